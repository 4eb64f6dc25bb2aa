"""The plan of one layer step: `moesim.policies.planner.planner` on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesim.machine_code.functions import compiled, loaded, rows_at, table_at
from moesim.policies.base import ABSENT, CPU, DEFERRED, IN_FLIGHT, RESIDENT
from moesim.policies.kernels import (
    WAITS,
    GateWork,
    KernelView,
    State,
    Work,
)
from moesim.policies.planner.layer_work import gate_mass_kept
from moesim.policies.planner.plan import FETCH, PREFETCH, READ, REPLACE
from moesim.sim.compiled import host, memory
from moesim.sim.compiled.memory import cache_state
from moesim.sim.compiled.records import ENTRIES, KEPT_ROUTING, NONE, WORLD
from moesim.sim.compiled.transfers import LATE_WAIT, link_enqueue
from moesim.traces.format.schema import Phase

_DECODE = int(Phase.DECODE)

_COMPUTE_LANES = 2
"""Place of the CPU in `world.lane_by_use`; GPUs follow."""


@compiled
def home(world: Any, layer: int) -> int:
    """GPU that runs a layer's dense part."""
    constants = world.constants
    if constants.splits_layers:
        return layer * constants.gpus // constants.layers
    return 0


@compiled
def rows_of(world: Any) -> int:
    """How many GPUs compute the experts of one layer."""
    return 1 if world.constants.splits_layers else world.constants.gpus


@compiled
def gpu_states(world: Any) -> Any:
    """State of every expert on every GPU, without host memory."""
    return world.state[: world.constants.gpus]


@compiled
def gpu_seconds(world: Any, active: int) -> Any:
    """Seconds of the active experts on each GPU, as `_look` has found them."""
    return rows_at(world.work_s[2], rows_of(world), active)


@compiled
def served(world: Any, s: int) -> Any:
    """Active experts of a layer step, once they have been routed."""
    return world.served[world.served_edges[s] : world.served_edges[s + 1]]


@compiled
def _served_tokens(world: Any, s: int) -> Any:
    return world.served_tokens[world.served_edges[s] : world.served_edges[s + 1]]


# -- routing ---------------------------------------------------------------------------


@compiled
def _rows_of_trace(world: Any, column: Any, s: int) -> Any:
    """A layer step's rows of a column; none where nobody has read it."""
    if not len(column):
        return column
    return column[world.row_edges[s] : world.row_edges[s + 1]]


@compiled
def _routing(world: Any, s: int) -> Any:
    """Experts of every token of a layer step of this pass: of the last three layers."""
    place = world.layer[s] % KEPT_ROUTING
    columns = world.run.columns[place]
    if world.constants.alters and columns:
        return rows_at(world.routed[place], world.rows[s], columns)
    return _rows_of_trace(world, world.routing, s)


@compiled
def _gate(world: Any, s: int) -> GateWork:
    """What a layer step's gate says."""
    predicted = world.token_predicted[:0]
    # The gate's scores on the input of the layer before.
    if world.layer[s]:
        predicted = _rows_of_trace(world, world.token_predicted, s - 1)
    return GateWork(
        step=world.step[s],
        layer=world.layer[s],
        phase=np.int64(world.phase[s]),  # type: ignore[arg-type] # an int64 it must be
        experts=_rows_of_trace(world, world.routing, s),
        weights=_rows_of_trace(world, world.token_weights, s),
        scores=_rows_of_trace(world, world.token_scores, s),
        predicted=predicted,
        states=gpu_states(world),
    )


@compiled
def _route(world: Any, s: int) -> None:
    """Let the routing policy choose the experts of every token."""
    run = world.run
    experts = world.constants.experts
    place = world.layer[s] % KEPT_ROUTING
    gate = _gate(world, s)
    room = world.routed[place]
    columns = world.route(loaded(State, world.constants.routing), gate, room)
    run.columns[place] = columns
    first = world.served_edges[s]
    count = 0
    if columns:
        counts = world.counts
        for expert in range(experts):
            counts[expert] = 0
        for n in range(world.rows[s] * columns):
            # Larger ids mark unused places.
            if room[n] < experts:
                counts[room[n]] += 1
        for expert in range(experts):
            if counts[expert]:
                world.served[first + count] = expert
                world.served_tokens[first + count] = counts[expert]
                count += 1
    else:
        for n in range(world.edges[s], world.edges[s + 1]):
            world.served[first + count] = world.active[n]
            world.served_tokens[first + count] = world.tokens[n]
            count += 1
    world.served_edges[s + 1] = first + count
    if world.constants.notes_mass:
        world.gate_mass[s] = gate_mass_kept(gate, _routing(world, s))


# -- what a layer step asks for --------------------------------------------------------


@compiled
def _look(world: Any, s: int) -> None:
    """Look the active experts up: states, costs and expected arrivals."""
    constants = world.constants
    run = world.run
    layer = world.layer[s]
    run.looked += 1
    experts = served(world, s)
    tokens = _served_tokens(world, s)
    active = len(experts)
    rows = rows_of(world)
    at_home = home(world, layer)
    first = layer * constants.experts

    cpu_s = world.work_s[0][:active]
    host_s = world.work_s[1][:active]
    gpu_s = gpu_seconds(world, active)
    arrive_s = rows_at(world.work_s[3], rows, active)
    state = world.work_state[0][:active]
    gpu_state = world.work_state[1][: rows * active]
    link_s = world.work_link_s[:rows]
    for i in range(active):
        size = world.size_of[first + experts[i]]
        cpu_s[i] = world.cpu_by_size_s[size, tokens[i]]
        host_s[i] = 0.0
        if constants.host != NONE:
            host_s[i] = host.wait_s(world, layer, experts[i])
        state[i] = ABSENT
    for row in range(rows):
        gpu = at_home + row
        left_s = max(0.0, world.memories[gpu].busy_until_s - run.now_s)
        link_s[row] = left_s
        for i in range(active):
            key = first + experts[i]
            here = world.state[gpu, key]
            size = world.size_of[key]
            gpu_s[row, i] = world.gpu_by_size_s[size, tokens[i]]
            if here == RESIDENT:
                arrive_s[row, i] = 0.0
            elif here == ABSENT:
                # A copy starts when link and expert are there, whichever is later.
                arrive_s[row, i] = max(left_s, host_s[i]) + world.copy_s[gpu, size]
            else:
                lands_s = world.experts[gpu, key].landing_s
                arrive_s[row, i] = max(0.0, lands_s - run.now_s)
            state[i] = max(state[i], here)
            if rows > 1 and arrive_s[row, i] == 0.0:
                here = np.int8(RESIDENT)
            gpu_state[row * active + i] = here


@compiled
def work_of(world: Any, s: int) -> Work:
    """The work of a layer step, as it was last looked up."""
    rows = rows_of(world)
    experts = served(world, s)
    tokens = _served_tokens(world, s)
    active = len(experts)
    scores = world.work_s[0][:0]
    first_scores = world.work_s[0][:0]
    if len(world.scores):
        scores = world.scores[s]
    if len(world.token_scores) and world.rows[s]:
        first_scores = world.token_scores[world.row_edges[s]]
    return Work(
        world.step[s],
        world.layer[s],
        np.int64(world.phase[s]),  # type: ignore[arg-type] # an int64 it must be
        world.batch[s],
        world.rows[s],
        experts,
        tokens,
        world.work_state[0][:active],
        world.work_s[0][:active],
        world.work_s[1][:active],
        gpu_seconds(world, active),
        rows_at(world.work_s[3], rows, active),
        world.work_link_s[:rows],
        world.work_state[1][: rows * active],
        scores,
        first_scores,
        gpu_states(world),
        world.constants.cpu_first_s,
        world.work_ranks[: active if world.constants.defers else 0],
    )


@compiled
def _rank(world: Any, s: int) -> None:
    """Find the best place of each active expert among the experts of any token."""
    width = world.constants.experts
    routing = _routing(world, s)
    columns = routing.shape[1]
    best = world.counts
    for expert in range(width):
        best[expert] = columns
    for t in range(len(routing)):
        for place in range(columns):
            expert = routing[t, place]
            # Larger ids mark unused places.
            if expert < width:
                best[expert] = min(best[expert], place)
    experts = served(world, s)
    for i in range(len(experts)):
        world.work_ranks[i] = best[experts[i]]


@compiled
def _defer(world: Any, work: Work, lanes: Any) -> None:
    """Read out of an assignment's lanes whose results join one layer later."""
    constants = world.constants
    run = world.run
    m = constants.host
    run.defers = work.phase == _DECODE and work.layer + 1 < constants.layers
    for i in range(len(lanes)):
        deferred = run.defers and lanes[i] == DEFERRED
        if lanes[i] == DEFERRED:
            lanes[i] = CPU
        if run.precomputed:
            deferred = deferred and not world.work_precomputed[i]
        if deferred and m != NONE:
            key = work.layer * constants.experts + work.experts[i]
            # Staging is for reads that a layer step waits for.
            deferred = (
                world.state[m, key] == RESIDENT and not world.experts[m, key].staged
            )
        world.work_deferred[i] = deferred


@compiled
def _launch_deferred_last(world: Any, order: Any) -> None:
    """Reorder positions so that what joins later goes last; either part keeps its
    order.
    """
    last = world.keys[0]
    count = 0
    for n in range(len(order)):
        if world.work_deferred[order[n]]:
            last[count] = order[n]
            count += 1
        else:
            order[n - count] = order[n]
    for n in range(count):
        order[len(order) - count + n] = last[n]


@compiled
def assign(world: Any, work: Work, lanes: Any, order: Any) -> int:
    """Ask for lanes and launch order, and check them; flags of the plan."""
    constants = world.constants
    run = world.run
    flags = world.assign(
        loaded(State, constants.assignment),
        work,
        lanes,
        order,
    )
    if constants.defers:
        _defer(world, work, lanes)
    rows = rows_of(world)
    seen = world.answers[: len(order)]
    for i in range(len(order)):
        seen[i] = False
    for i in range(len(order)):
        if lanes[i] < 0 or lanes[i] > rows:
            run.error = memory.BAD_ASSIGNMENT
        if order[i] < 0 or order[i] >= len(order) or seen[order[i]]:
            run.error = memory.BAD_ASSIGNMENT
            return flags
        seen[order[i]] = True
    at_home = home(world, work.layer)
    if at_home:
        for i in range(len(lanes)):
            if lanes[i] > 0:
                lanes[i] += at_home
    if run.precomputed:
        for i in range(len(lanes)):
            if world.work_precomputed[i]:
                lanes[i] = 0
    if constants.defers and run.defers:
        _launch_deferred_last(world, order)
    return flags


@compiled
def note_accesses(world: Any, work: Work, lanes: Any) -> None:
    """Hold every active expert before any victim is named, then tell the caches."""
    first = work.layer * world.constants.experts
    for gpu in range(world.constants.gpus):
        for i in range(len(lanes)):
            key = first + work.experts[i]
            world.holds[gpu, key] += 1
            if lanes[i] == 1 + gpu:
                world.experts[gpu, key].used = True
        if world.pools[gpu, work.layer].staged:
            _forget_wrong_guesses(world, gpu, first)
    if world.constants.host != NONE:
        host.note_accesses(world, work, lanes)
    at_home = home(world, work.layer)
    for gpu in range(at_home, at_home + rows_of(world)):
        world.accessed(cache_state(world, gpu), work)


@compiled
def _forget_wrong_guesses(world: Any, gpu: int, first: int) -> None:
    """Free the staging slots of prefetches that a GPU does not compute after all."""
    for key in range(first, first + world.constants.experts):
        expert = world.experts[gpu, key]
        if not expert.staged:
            continue
        if expert.used:
            # It may be on its way since a step that no longer needed it.
            expert.orphan = False
        else:
            forget_staged(world, gpu, key)


@compiled
def forget_staged(world: Any, gpu: int, key: int) -> None:
    """Forget a staged expert, now or when its copy has landed."""
    if world.state[gpu, key] == RESIDENT:
        memory.drop_staged(world, gpu, key)
    else:
        world.experts[gpu, key].orphan = True


@compiled
def _add(copies: Any, n: int, kind: int, gpu: int, layer: int, expert: int) -> None:
    copy = copies[n]
    copy.read = False
    copy.kind = kind
    copy.gpu = gpu
    copy.layer = layer
    copy.expert = expert


@compiled
def queue(world: Any, kind: int, gpu: int, key: int, read: bool) -> None:
    """Put a copy on the plan and on the books of its link; whether a read comes
    first.
    """
    run = world.run
    layer = key // world.constants.experts
    link_enqueue(world, gpu, key)
    expert = key - layer * world.constants.experts
    _add(world.copies, run.copies, kind, gpu, layer, expert)
    world.copies[run.copies].read = read
    run.copies += 1


@compiled
def _promoted(world: Any, gpu: int, layer: int, expert: int) -> None:
    """Put a promotion on the plan, once."""
    run = world.run
    for n in range(run.promoted):
        other = world.promoted[n]
        if other.gpu == gpu and other.expert == expert:
            return
    _add(world.promoted, run.promoted, NONE, gpu, layer, expert)
    run.promoted += 1


@compiled
def promote_due(world: Any, layer: int) -> None:
    """Promote queued copies of a layer that should have landed before it came.

    That is all of them if its products wait for them, else replacements of caches with
    a deadline.
    """
    constants = world.constants
    run = world.run
    first = layer * constants.experts
    for gpu in range(constants.gpus):
        everything = constants.late == LATE_WAIT
        if not (everything or world.memories[gpu].hurries):
            continue
        if not world.memories[gpu].queued:
            continue
        keys = world.keys[0]
        count = 0
        for key in range(first, first + constants.experts):
            wished = world.experts[gpu, key]
            if not wished.wished:
                continue
            # In the order of the wishes.
            n = count
            while n > 0 and world.experts[gpu, keys[n - 1]].order > wished.order:
                keys[n] = keys[n - 1]
                n -= 1
            keys[n] = key
            count += 1
        for key in keys[:count]:
            wished = world.experts[gpu, key]
            if everything:
                wished.demanded = True
                host.promote(world, key)
                _promoted(world, gpu, layer, key - first)
                continue
            late = wished.replaces != NONE and not wished.hurried
            # A guess must not block the SSD.
            late &= host.holds_expert(world, key)
            if late and memory.may_leave(world, gpu, wished.replaces):
                wished.hurried = True
                _add(world.promoted, run.promoted, NONE, gpu, layer, key - first)
                run.promoted += 1


@compiled
def demand(world: Any, work: Work, gpu: int, lanes: Any, order: Any) -> None:
    """Wish for what a GPU lacks; what is queued already is promoted."""
    first = work.layer * world.constants.experts
    keys = world.keys[0]
    count = 0
    for i in order:
        key = first + work.experts[i]
        if lanes[i] != gpu + 1 or world.state[gpu, key] != ABSENT:
            continue
        wished = world.experts[gpu, key]
        if not wished.wished:
            keys[count] = key
            count += 1
        elif not wished.demanded:
            wished.demanded = True
            host.promote(world, key)
            _promoted(world, gpu, work.layer, work.experts[i])
    if not count:
        return
    memory.demand(world, work, gpu, keys[:count])
    if world.constants.choosing_s > 0.0:
        _note_exposed(world, work, gpu, keys[:count])
    read = host.need(world, work, keys[:count], True)
    for key in keys[:count]:
        queue(world, FETCH, gpu, key, memory.contains(read, key))


@compiled
def _note_exposed(world: Any, work: Work, gpu: int, keys: Any) -> None:
    """Note by how much the choice of victims outlasts the first load."""
    row = 0 if world.constants.splits_layers else gpu
    first = work.layer * world.constants.experts
    first_s = np.inf
    for i in range(len(work.experts)):
        if memory.contains(keys, first + work.experts[i]):
            first_s = min(first_s, work.arrive_s[row, i])
    exposed_s = max(0.0, world.constants.choosing_s - first_s)
    world.run.exposed_s = max(world.run.exposed_s, exposed_s)


@compiled
def _read_for_cpu(world: Any, work: Work, lanes: Any, order: Any) -> None:
    """Wish for reads of what the CPU computes; the layer step itself holds it."""
    run = world.run
    m = world.constants.host
    first = work.layer * world.constants.experts
    keys = world.keys[0]
    reads = world.keys[6]
    count = 0
    unread = 0
    for i in order:
        key = first + work.experts[i]
        if lanes[i] != 0 or world.state[m, key] != ABSENT:
            continue
        keys[count] = key
        count += 1
        if not world.experts[m, key].wished:
            reads[unread] = key
            unread += 1
    for key in keys[:count]:
        host.promote(world, key)
    if unread:
        memory.demand(world, work, m, reads[:unread])
    for key in keys[:count]:
        world.experts[m, key].cpu_reads = True
        _add(world.copies, run.copies, READ, NONE, work.layer, key - first)
        world.copies[run.copies].read = memory.contains(reads[:unread], key)
        run.copies += 1


@compiled
def _view(world: Any, s: int) -> KernelView:
    """What the prefetch policy sees beside the layer step."""
    constants = world.constants
    run = world.run
    layer = world.layer[s]
    routing = world.routing[:0]
    before = world.routing[:0]
    before_that = world.routing[:0]
    if constants.reads_routing:
        routing = _routing(world, s)
        if layer:
            before = _routing(world, s - 1)
        if layer > 1:
            before_that = _routing(world, s - 2)
    coming = world.active[:0]
    coming_edges = world.edges[:0]
    if constants.oracle:
        coming = world.active
        coming_edges = world.edges[s + 1 : s + 1 + constants.layers - layer]
    link = world.memories[0]
    return KernelView(
        gpu_states(world),
        routing,
        before,
        before_that,
        world.workload[min(s, len(world.workload) - 1)],
        world.score_sums[min(s, len(world.score_sums) - 1)],
        _rows_of_trace(world, world.token_predicted, s),
        coming,
        coming_edges,
        world.mean_copy_s,
        world.cpu_s,
        world.gpu_s,
        max(0.0, link.busy_until_s - run.now_s) + link.queued_s,
        run.gap_s,
    )


@compiled
def prefetch(world: Any, work: Work, s: int) -> None:
    """Wish for what the prefetch policy names, within its byte budget."""
    constants = world.constants
    named = world.keys[5]
    count = world.prefetch(
        loaded(State, constants.prefetch),
        work,
        _view(world, s),
        named,
    )
    _check_named(world, named[:count])
    if world.run.error:
        return
    # A new prediction of a layer takes the place of the last one.
    _unshield(world, work.layer)
    last = NONE
    for key in named[:count]:
        if key // constants.experts != last:
            last = key // constants.experts
            _unshield(world, last)
    _wish_for(world, work, named[:count])


@compiled
def foretell(world: Any, s: int) -> None:
    """Wish for what the next drafted token of a pass foretells."""
    constants = world.constants
    run = world.run
    named = world.keys[5]
    first = run.drafts * constants.layers
    # Of a layer step it says nothing.
    view = KernelView(
        gpu_states(world),
        world.routing[:0],
        world.routing[:0],
        world.routing[:0],
        world.workload[0],
        world.score_sums[0],
        world.token_predicted[:0],
        world.active[:0],
        world.edges[:0],
        world.mean_copy_s,
        world.cpu_s,
        world.gpu_s,
        max(0.0, world.memories[0].busy_until_s - run.now_s)
        + world.memories[0].queued_s,
        run.gap_s,
    )
    count = world.foretold(
        loaded(State, constants.prefetch),
        world.drafts[first : first + constants.layers],
        world.draft_s[s],
        view,
        named,
    )
    run.drafts += 1
    _check_named(world, named[:count])
    if not run.error:
        _wish_for(world, _between_layers(world), named[:count])


@compiled
def _between_layers(world: Any) -> Work:
    """Asks for nothing: what caches are told of prefetches that no layer step named."""
    nothing = world.work_s[0][:0]
    states = world.work_state[0][:0]
    none_s = rows_at(world.work_s[2], 1, 0)
    experts = world.active[:0]
    link_s = world.work_link_s[:1]
    link_s[0] = 0.0
    return Work(
        NONE,
        NONE,
        _DECODE,
        0,
        0,
        experts,
        experts,
        states,
        nothing,
        nothing,
        none_s,
        none_s,
        link_s,
        states,
        nothing,
        nothing,
        gpu_states(world),
        0.0,
        experts,
    )


@compiled
def _check_named(world: Any, named: Any) -> None:
    for key in named:
        if key < 0 or key >= world.constants.layers * world.constants.experts:
            world.run.error = memory.BAD_PREFETCH


@compiled
def _wish_for(world: Any, work: Work, named: Any) -> None:
    """Wish for named experts that are absent, and shield all of them."""
    constants = world.constants
    experts = constants.experts
    for n in range(len(named)):
        layer = named[n] // experts
        world.experts[home(world, layer), named[n]].shielded = True

    budget = constants.budget_bytes
    for n in range(len(named)):
        key = named[n]
        layer = key // experts
        gpu = home(world, layer)
        if world.state[gpu, key] != ABSENT or world.experts[gpu, key].wished:
            continue
        if constants.budget_bytes >= 0:
            if budget < world.size_bytes[world.size_of[key]]:
                break
            budget -= world.size_bytes[world.size_of[key]]
        memory.prefetch(world, work, gpu, key)
        # The products of this very layer may wait for it: then it is no guess.
        awaited = layer == work.layer and constants.late == LATE_WAIT
        world.experts[gpu, key].demanded = awaited
        read = host.need(world, work, named[n : n + 1], awaited)
        queue(world, FETCH if awaited else PREFETCH, gpu, key, len(read) > 0)


@compiled
def _unshield(world: Any, layer: int) -> None:
    gpu = home(world, layer)
    first = layer * world.constants.experts
    for key in range(first, first + world.constants.experts):
        world.experts[gpu, key].shielded = False


@compiled
def ask_replacements(world: Any, work: Work) -> None:
    """Ask caches for their own copies, and check them."""
    run = world.run
    run.swaps = 0
    at_home = home(world, work.layer)
    for gpu in range(at_home, at_home + rows_of(world)):
        if not world.memories[gpu].replaces:
            continue
        outgoing = world.keys[0]
        incoming = world.keys[1]
        count = world.replacements(
            cache_state(world, gpu), work, world.state[gpu], outgoing, incoming
        )
        for n in range(count):
            enters = world.state[gpu, incoming[n]] != RESIDENT
            enters |= world.experts[gpu, incoming[n]].staged
            if world.state[gpu, outgoing[n]] != RESIDENT or not enters:
                run.error = memory.BAD_SWAP
                return
            _add(world.swaps, run.swaps, outgoing[n], gpu, work.layer, incoming[n])
            run.swaps += 1


@compiled
def wish_swaps(world: Any, work: Work) -> None:
    """Wish for replacements, unless copies have overtaken them."""
    for n in range(world.run.swaps):
        swap = world.swaps[n]
        _wish_swap(world, work, swap.gpu, swap.kind, swap.expert, False)


@compiled
def _wish_swap(
    world: Any, work: Work, gpu: int, outgoing: int, key: int, demanded: bool
) -> None:
    """Wish for one replacement, unless a copy has overtaken it."""
    wished = world.experts[gpu, key]
    if world.state[gpu, key] != ABSENT or wished.wished:
        return
    if world.state[gpu, outgoing] != RESIDENT:
        return
    memory.wish(world, gpu, key, True, demanded)
    wished.replaces = outgoing
    world.keys[0][0] = key
    read = host.need(world, work, world.keys[0][:1], demanded)
    queue(world, FETCH if demanded else REPLACE, gpu, key, len(read) > 0)


@compiled
def _place_of(work: Work, expert: int) -> int:
    """Position of an expert among the active ones; -1 if it is none of them."""
    for i in range(len(work.experts)):
        if work.experts[i] == expert:
            return i
    return NONE


@compiled
def _replace_first(world: Any, work: Work) -> None:
    """Let caches replace residents before their layer step is assigned; its work then
    tells of the new content.
    """
    run = world.run
    experts = world.constants.experts
    ask_replacements(world, work)
    if run.error or not run.swaps:
        return
    run.looked += 1
    at_home = home(world, work.layer)
    rows = rows_of(world)
    for row in range(rows):
        gpu = at_home + row
        lands_s = work.link_s[row]
        for n in range(run.swaps):
            swap = world.swaps[n]
            if swap.gpu != gpu:
                continue
            lands_s += world.copy_s[gpu, world.size_of[swap.expert]]
            coming = _place_of(work, swap.expert % experts)
            if coming != NONE:
                work.state[coming] = IN_FLIGHT
                work.arrive_s[row, coming] = lands_s
                if rows > 1 and world.state[gpu, swap.expert] != IN_FLIGHT:
                    work.gpu_state[row * len(work.experts) + coming] = ABSENT
            going = _place_of(work, swap.kind % experts)
            if going != NONE:
                work.arrive_s[row, going] = np.inf
                work.gpu_state[row * len(work.experts) + going] = ABSENT
    # What leaves every GPU that has it is a miss.
    for i in range(len(work.experts)):
        gone = True
        for row in range(rows):
            gone &= work.arrive_s[row, i] == np.inf
        if gone:
            work.state[i] = ABSENT
        if rows == 1:
            work.gpu_state[i] = work.state[i]


@compiled
def _keep_computed(world: Any, work: Work, lanes: Any) -> None:
    """Note that outgoing experts are there which this step computes where they are:
    they leave after it.
    """
    at_home = home(world, work.layer)
    for n in range(world.run.swaps):
        swap = world.swaps[n]
        going = _place_of(work, swap.kind % world.constants.experts)
        if going != NONE and lanes[going] == 1 + swap.gpu:
            world.run.looked += 1
            work.state[going] = RESIDENT
            work.arrive_s[swap.gpu - at_home, going] = 0.0


@compiled
def _wish_first(world: Any, work: Work, lanes: Any) -> None:
    """Wish for what `_replace_first` found; demand, where this step awaits it. What it
    computes on that GPU all the same leaves after it.
    """
    run = world.run
    experts = world.constants.experts
    asked = run.swaps
    run.swaps = 0
    for n in range(asked):
        swap = world.swaps[n]
        gpu = swap.gpu
        outgoing = swap.kind
        key = swap.expert
        going = _place_of(work, outgoing % experts)
        if going != NONE and lanes[going] == 1 + gpu:
            _add(world.swaps, run.swaps, outgoing, gpu, work.layer, key)
            run.swaps += 1
            continue
        if going != NONE:
            world.holds[gpu, outgoing] -= 1
            _add(world.released, run.released, NONE, gpu, work.layer, outgoing)
            run.released += 1
        coming = _place_of(work, key % experts)
        awaited = coming != NONE and lanes[coming] == 1 + gpu
        _wish_swap(world, work, gpu, outgoing, key, awaited)


# -- products ahead of their gate ------------------------------------------------------


@compiled
def _take_precomputed(world: Any, work: Work) -> None:
    """Note which active experts the CPU has started one layer ahead."""
    run = world.run
    pool = world.pools[0, work.layer]
    run.precomputed = pool.started
    if not pool.started:
        return
    pool.started = False
    first = work.layer * world.constants.experts
    for i in range(len(work.experts)):
        started = world.experts[0, first + work.experts[i]].started
        world.work_precomputed[i] = started
    for key in range(first, first + world.constants.experts):
        world.experts[0, key].started = False


@compiled
def _precompute(world: Any, s: int) -> None:
    """Let the assignment name experts of the next layer; those that are not in host
    memory are left to their own layer.
    """
    constants = world.constants
    run = world.run
    layer = world.layer[s] + 1
    tokens = world.ahead_tokens
    for expert in range(len(tokens)):
        tokens[expert] = 0
    gate = GateWork(
        step=world.step[s],
        layer=layer,
        phase=np.int64(world.phase[s]),  # type: ignore[arg-type] # an int64 it must be
        experts=_routing(world, s),
        weights=world.token_weights[:0],
        scores=world.token_scores[:0],
        predicted=_rows_of_trace(world, world.token_predicted, s),
        states=gpu_states(world),
    )
    named = world.precompute(
        loaded(State, constants.assignment), gate, world.routed[KEPT_ROUTING], tokens
    )
    if run.error or not named:
        return
    m = constants.host
    for expert in range(len(tokens)):
        if not tokens[expert]:
            continue
        world.pools[0, layer].started = True
        key = layer * constants.experts + expert
        if m != NONE:
            # Staging is for reads that somebody waits for, not for guesses of a layer.
            if world.state[m, key] != RESIDENT or world.experts[m, key].staged:
                tokens[expert] = 0
                continue
            # Needed until the product has ended and its layer step is over.
            world.holds[m, key] += 2
            world.experts[m, key].held_ahead = True
        world.experts[0, key].started = True
        run.begins = True


@compiled
def _can_stage_all(world: Any, layer: int) -> bool:
    """Whether staging could hold every queued copy of a layer at once, beside what it
    holds already.
    """
    run = world.run
    at_home = home(world, layer)
    for gpu in range(at_home, at_home + rows_of(world)):
        # Slots of prefetches for other layers can be taken from them.
        count = world.pools[gpu, layer].staged
        for n in range(run.copies):
            copy = world.copies[n]
            count += copy.gpu == gpu and copy.layer == layer
        for n in range(run.promoted):
            count += world.promoted[n].gpu == gpu
        if count > world.memories[gpu].staging:
            return False
    return True


@compiled(ENTRIES["plan_layer_step"])
def plan_layer_step(address: int, s: int) -> int:
    """Plan one layer step in the order of the contract; flags of the plan."""
    world = table_at(WORLD, address)
    run = world.run
    layer = world.layer[s]
    if layer:
        run.gap_s = run.now_s - run.joined_s
    if world.constants.alters:
        _route(world, s)
        if run.error:
            return 0
    _look(world, s)
    if world.constants.defers:
        _rank(world, s)
    work = work_of(world, s)
    first = world.served_edges[s]
    active = len(work.experts)
    lanes = world.work_lanes[:active]
    order = world.work_order[:active]
    if world.constants.precomputes:
        _take_precomputed(world, work)
    run.swaps = 0
    if world.constants.replaces_first:
        _replace_first(world, work)
        if run.error:
            return 0
    flags = assign(world, work, lanes, order)
    if run.error:
        return flags
    if run.swaps:
        _keep_computed(world, work, lanes)
    note_accesses(world, work, lanes)
    if run.defers and world.constants.host != NONE:
        # Needed until the product has ended, which the layer step may not see.
        for i in range(active):
            key = layer * world.constants.experts + work.experts[i]
            if world.work_deferred[i]:
                world.holds[world.constants.host, key] += 1
    run.promoted = 0
    promote_due(world, layer)
    run.released = 0
    if run.swaps:
        _wish_first(world, work, lanes)
    run.exposed_s = 0.0
    at_home = home(world, layer)
    for gpu in range(at_home, at_home + rows_of(world)):
        demand(world, work, gpu, lanes, order)
    if world.constants.host != NONE:
        _read_for_cpu(world, work, lanes, order)
        host.release_gpu_experts(world, work, lanes)
    if world.constants.prefetches:
        prefetch(world, work, s)
    # Products that wait free no slot: staging must hold all that they wait for.
    waits = flags & WAITS != 0 or world.constants.late == LATE_WAIT
    flags &= ~WAITS
    if waits and _can_stage_all(world, layer):
        flags |= WAITS
    run.begins = False
    if world.constants.precomputes and layer + 1 < world.constants.layers:
        _precompute(world, s)
    if not world.constants.replaces_first:
        ask_replacements(world, work)
    for i in range(active):
        world.lane_of[first + i] = world.lane_by_use[_COMPUTE_LANES + lanes[i]]
        world.state_of[first + i] = work.state[i]
    return flags
