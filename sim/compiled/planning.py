"""The plan of one layer step: `moesim.policies.planner.planner` on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesim.machine_code.functions import compiled, loaded, rows_at, table_at
from moesim.policies.base import ABSENT, RESIDENT
from moesim.policies.kernels import WAITS, KernelView, State, Work
from moesim.policies.planner.plan import FETCH, PREFETCH, READ, REPLACE
from moesim.sim.compiled import host, memory
from moesim.sim.compiled.memory import cache_state
from moesim.sim.compiled.records import ENTRIES, NONE, WORLD
from moesim.sim.compiled.transfers import LATE_WAIT, link_enqueue

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
def _look(world: Any, s: int) -> None:
    """Look the active experts up: states, costs and expected arrivals."""
    constants = world.constants
    run = world.run
    layer = world.layer[s]
    experts = world.active[world.edges[s] : world.edges[s + 1]]
    tokens = world.tokens[world.edges[s] : world.edges[s + 1]]
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
    experts = world.active[world.edges[s] : world.edges[s + 1]]
    tokens = world.tokens[world.edges[s] : world.edges[s + 1]]
    active = len(experts)
    scores = world.work_s[0][:0]
    if len(world.scores):
        scores = world.scores[s]
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
        world.constants.cpu_first_s,
    )


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
    read = host.need(world, work, keys[:count], True)
    for key in keys[:count]:
        queue(world, FETCH, gpu, key, memory.contains(read, key))


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
    if constants.reads_routing:
        routing = world.routing[world.row_edges[s] : world.row_edges[s + 1]]
        if layer:
            before = world.routing[world.row_edges[s - 1] : world.row_edges[s]]
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
        world.workload[min(s, len(world.workload) - 1)],
        world.score_sums[min(s, len(world.score_sums) - 1)],
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
    run = world.run
    experts = constants.experts
    named = world.keys[5]
    count = world.prefetch(
        loaded(State, constants.prefetch),
        work,
        _view(world, s),
        named,
    )
    for n in range(count):
        if named[n] < 0 or named[n] >= constants.layers * experts:
            run.error = memory.BAD_PREFETCH
            return
    # A new prediction of a layer takes the place of the last one.
    _unshield(world, work.layer)
    last = NONE
    for n in range(count):
        if named[n] // experts != last:
            last = named[n] // experts
            _unshield(world, last)
    for n in range(count):
        layer = named[n] // experts
        world.experts[home(world, layer), named[n]].shielded = True

    budget = constants.budget_bytes
    for n in range(count):
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
            cache_state(world, gpu), work, gpu_states(world), outgoing, incoming
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
    run = world.run
    for n in range(run.swaps):
        swap = world.swaps[n]
        key = swap.expert
        if world.state[swap.gpu, key] != ABSENT or world.experts[swap.gpu, key].wished:
            continue
        if world.state[swap.gpu, swap.kind] != RESIDENT:
            continue
        memory.wish(world, swap.gpu, key, True, False)
        world.experts[swap.gpu, key].replaces = swap.kind
        world.keys[0][0] = key
        read = host.need(world, work, world.keys[0][:1], False)
        queue(world, REPLACE, swap.gpu, key, len(read) > 0)


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
    _look(world, s)
    work = work_of(world, s)
    first = world.edges[s]
    active = len(work.experts)
    lanes = world.work_lanes[:active]
    order = world.work_order[:active]
    flags = assign(world, work, lanes, order)
    if run.error:
        return flags
    note_accesses(world, work, lanes)
    run.promoted = 0
    promote_due(world, layer)
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
    ask_replacements(world, work)
    for i in range(active):
        world.lane_of[first + i] = world.lane_by_use[_COMPUTE_LANES + lanes[i]]
        world.state_of[first + i] = work.state[i]
    return flags
