"""The loop over layer steps: `moesim.sim.replay` and `moesim.engine.layer_step`."""

from __future__ import annotations

from typing import Any

from moesim.engine.lanes import DEMAND, REPLACEMENT
from moesim.engine.lanes import PREFETCH as BEHIND_DEMAND
from moesim.machine_code import types as nb
from moesim.machine_code.functions import address_of, compiled, table_at
from moesim.policies.base import RESIDENT
from moesim.policies.kernels import SERIAL, WAITS
from moesim.policies.planner.plan import FETCH, PREFETCH, READ
from moesim.sim.compiled import host, memory, planning, transfers
from moesim.sim.compiled import lanes as kinds
from moesim.sim.compiled.lanes import operation
from moesim.sim.compiled.records import NONE, WORLD
from moesim.sim.compiled.transfers import CONTROL, CPU, GPU
from moesim.traces.timeline.spans import ACTIVATION, COMPUTE, DENSE, JOIN, PLAN


@compiled
def _link_to(world: Any, gpu: int) -> int:
    return world.lane_by_use[GPU + world.constants.gpus + gpu]


@compiled
def _control_s(cost: Any, active: int, copies: int) -> float:
    """Seconds of ``base + per_expert x active + per_copy x copies``, and what an SSD
    adds.
    """
    return cost[0] + cost[1] * active + cost[2] * copies + cost[3]


@compiled
def _wait(world: Any) -> None:
    """Let operations end until the layer step may go on."""
    run = world.run
    while not run.turn:
        i = kinds.end_next(world)
        if i == NONE:
            run.error = memory.STUCK
        if run.error:
            return
        on_end = world.operations[i].on_end
        if on_end == kinds.TURN or on_end == kinds.KEPT:  # noqa: PLR1714
            run.turn = True
            run.turns += 1
            kinds.forget(world, i)
            if on_end == kinds.TURN:
                transfers.go_on(world, world.lanes[world.operations[i].lane].worker)
        else:
            world.end_operation(address_of(world), i)
    run.turn = False


@compiled
def _alone(world: Any, lane: int, kind: int, layer: int, work_s: float) -> None:
    """Let one operation run, and wait for its end."""
    if world.constants.inline and _serves(world, transfers.control_worker(world), lane):
        # The thread is the model's until it asks for experts.
        _on_control(world, lane, kind, layer, work_s)
        return
    i = operation(world, lane, kind, layer, NONE, work_s, 0, kinds.TURN)
    transfers.submit(world, i, DEMAND)
    _wait(world)


@compiled
def _serves(world: Any, w: int, lane: int) -> bool:
    return world.lanes[lane].worker == w


@compiled
def _on_control(world: Any, lane: int, kind: int, layer: int, work_s: float) -> None:
    """Let control's worker, which was taken and is kept, do one operation."""
    i = operation(world, lane, kind, layer, NONE, work_s, 0, kinds.KEPT)
    kinds.begin(world, i)
    _wait(world)


@compiled
def _take_control(world: Any) -> None:
    """Wait for control, which plans, unless its thread is the model's own."""
    if world.constants.inline:
        return
    worker = world.workers[transfers.control_worker(world)]
    if worker.busy:
        world.run.takes = True
        _wait(world)
    else:
        worker.busy = True


@compiled
def _enqueue(world: Any) -> None:
    """Queue the copies of a plan in their order."""
    constants = world.constants
    run = world.run
    for n in range(run.copies):
        copy = world.copies[n]
        if copy.kind == READ:
            transfers.read(world, copy.layer, copy.expert, DEMAND, copy.read)
            continue
        key = copy.layer * constants.experts + copy.expert
        copy_s = world.copy_s[copy.gpu, world.size_of[key]]
        if copy.read:
            copy_s *= constants.copy_after_read
        i = operation(
            world,
            _link_to(world, copy.gpu),
            copy.kind,
            copy.layer,
            copy.expert,
            copy_s + constants.dispatch_s,
            world.size_bytes[world.size_of[key]],
            kinds.COPIED,
        )
        priority = REPLACEMENT
        if copy.kind == FETCH:
            priority = DEMAND
        elif copy.kind == PREFETCH:
            priority = BEHIND_DEMAND
            run.prefetches += 1
            _note_prefetched(world, copy.layer)
        world.operations[i].priority = priority
        key = copy.layer * constants.experts + copy.expert
        world.experts[copy.gpu, key].queued = i
        run.queued += 1
        world.pools[0, copy.layer].outstanding += 1
        world.pools[0, copy.layer].unawaited += priority != DEMAND
        # Somebody else's read may be pending.
        behind_read = copy.read
        if constants.host != NONE:
            behind_read |= world.experts[constants.host, key].queued != NONE
        if behind_read:
            transfers.read(world, copy.layer, copy.expert, priority, copy.read)
            transfers.await_read(world, i)
        else:
            transfers.submit(world, i, priority)
    run.copies = 0


@compiled
def _note_prefetched(world: Any, layer: int) -> None:
    """Note a layer when a prefetch is queued for it the first time."""
    run = world.run
    pool = world.pools[0, layer]
    if not pool.prefetched:
        pool.prefetched = True
        world.prefetched_layers[run.prefetched] = layer
        run.prefetched += 1


@compiled
def _note_reads(world: Any) -> None:
    """Note whether the layer step demands a read."""
    run = world.run
    run.has_read = False
    for n in range(run.copies):
        copy = world.copies[n]
        run.has_read |= copy.kind == READ or (copy.kind == FETCH and copy.read)


@compiled
def _dispatch(world: Any, s: int, flags: int, first_op_s: float) -> bool:
    """Queue the layer step's products in launch order; whether the CPU has one."""
    constants = world.constants
    run = world.run
    layer = world.layer[s]
    experts = planning.served(world, s)
    active = len(experts)
    several = planning.rows_of(world) > 1
    gpu_s = planning.gpu_seconds(world, active)
    unused = world.answers
    for code in range(constants.gpus + 1):
        unused[code] = True
    for i in range(active if run.precomputed else 0):
        if world.work_precomputed[i]:
            world.awaited[run.awaited] = layer * constants.experts + experts[i]
            run.awaited += 1
    # Products of earlier layer steps are the CPU's, ended or not.
    cpu_used = run.awaited > 0
    for n in range(run.awaited):
        _await(world, world.awaited[n])
    run.awaited = 0
    count = 0
    for n in range(active):
        i = world.work_order[n]
        if run.precomputed and world.work_precomputed[i]:
            continue
        code = world.work_lanes[i]
        expert = experts[i]
        key = layer * constants.experts + expert
        if code == 0:
            seconds = world.work_s[0, i]
            if constants.host != NONE and world.experts[constants.host, key].cpu_reads:
                seconds *= constants.compute_after_read
            first_s = constants.cpu_first_s
        else:
            seconds = gpu_s[code - 1 if several else 0, i]
            first_s = constants.gpu_first_s
        work_s = constants.dispatch_s + seconds
        if unused[code]:
            unused[code] = False
            work_s += first_op_s + first_s
        product = operation(
            world,
            world.lane_by_use[CPU + code],
            COMPUTE,
            layer,
            expert,
            work_s,
            0,
            kinds.COMPUTED,
        )
        if code == 0:
            cpu_used = True
            if run.defers and world.work_deferred[i]:
                _defer(world, product, key)
            else:
                count += 1
            if flags & SERIAL:
                world.held[run.held] = product
                run.held += 1
            else:
                transfers.start_on_cpu(world, product)
            continue
        count += 1
        gpu = code - 1
        if flags & SERIAL and world.state[gpu, key] != RESIDENT:
            run.fetched += 1
            world.operations[product].on_end = kinds.FETCHED
        if flags & WAITS:
            world.barred[run.barred] = product
            run.barred += 1
        else:
            transfers.start_on_gpu(world, gpu, product)
    run.pending += count
    transfers.open_when_landed(world, layer)
    if run.held and not run.fetched:
        transfers.release_held(world)
    return cpu_used


@compiled
def _await(world: Any, key: int) -> None:
    """Count a product of an earlier layer step, unless it has ended."""
    expert = world.experts[0, key]
    if expert.ahead != NONE:
        world.operations[expert.ahead].on_end = kinds.AWAITED_AHEAD
        expert.ahead = NONE
        world.run.pending += 1


@compiled
def _defer(world: Any, product: int, key: int) -> None:
    """Let a product go on by itself until the next layer step awaits it."""
    run = world.run
    world.operations[product].on_end = kinds.AHEAD
    world.experts[0, key].ahead = product
    world.awaited[run.awaited] = key
    run.awaited += 1


@compiled
def _begin_precomputes(world: Any, layer: int) -> None:
    """Queue products of the next layer's experts, after this layer's own."""
    constants = world.constants
    for expert in range(constants.experts):
        tokens = world.ahead_tokens[expert]
        if not tokens:
            continue
        key = layer * constants.experts + expert
        i = operation(
            world,
            world.lane_by_use[CPU],
            COMPUTE,
            layer,
            expert,
            world.cpu_by_size_s[world.size_of[key], tokens] + constants.dispatch_s,
            0,
            kinds.AHEAD,
        )
        world.experts[0, key].ahead = i
        transfers.submit(world, i, DEMAND)


@compiled
def _complete(world: Any, s: int) -> None:
    """Release a layer step's holds, forget what was staged for it; replace."""
    run = world.run
    layer = world.layer[s]
    first = layer * world.constants.experts
    for n in range(run.released):
        # What follows ends one hold of every active expert.
        world.holds[world.released[n].gpu, world.released[n].expert] += 1
    run.released = 0
    for gpu in range(world.constants.gpus):
        for expert in planning.served(world, s):
            world.holds[gpu, first + expert] -= 1
            world.experts[gpu, first + expert].used = False
        if world.pools[gpu, layer].staged:
            for key in range(first, first + world.constants.experts):
                if world.experts[gpu, key].staged:
                    planning.forget_staged(world, gpu, key)
    if world.constants.host != NONE:
        host.complete(world, layer)
    run.joined_s = run.now_s
    if run.swaps:
        planning.wish_swaps(world, planning.work_of(world, s))
        _enqueue(world)
    transfers.offer(world)


@compiled
def _layer_step(world: Any, s: int) -> None:
    """Run one layer step: dense part, plan, launch, compute, join."""
    constants = world.constants
    run = world.run
    run.step = world.step[s]
    layer = world.layer[s]
    at_home = planning.home(world, layer)
    phase = world.phase[s]

    work_s = world.dense_s[s]
    if run.has_read:
        work_s *= constants.dense_after_read
    gates = world.evaluations[layer, phase, 0]
    if gates:
        work_s += gates * world.gate_s[s]
    _alone(world, world.lane_by_use[GPU + at_home], DENSE, layer, work_s)
    if run.error:
        return
    _take_control(world)
    if run.error:
        return

    recorded = world.active[world.edges[s] : world.edges[s + 1]]
    transfers.begin_decisions(world, layer, recorded)
    run.place = s
    flags = world.plan_layer_step(address_of(world), s)
    if run.error:
        return
    active = len(planning.served(world, s))
    copied = run.promoted + run.copies

    plan_s = run.exposed_s + _control_s(constants.planning_s, active, copied)
    control = world.lane_by_use[CONTROL]
    _on_control(world, control, PLAN, layer, plan_s)
    if run.error:
        return
    if constants.host != NONE:
        _note_reads(world)
    for n in range(run.promoted):
        promoted = world.promoted[n]
        transfers.promote(world, promoted.gpu, layer, promoted.expert)
    _enqueue(world)
    first_op_s = _control_s(constants.first_op_s, active, copied)
    cpu_used = _dispatch(world, s, flags, first_op_s)
    if run.begins:
        _begin_precomputes(world, layer + 1)
    _predict(world, s, world.evaluations[layer, phase, 1])
    if not run.pending:
        transfers.all_computed(world)
    transfers.end_decisions(world)
    # Control serves its lanes meanwhile.
    transfers.go_on(world, transfers.control_worker(world))
    _wait(world)

    if cpu_used and constants.moves_activations and not run.error:
        lane = transfers.link_back(world, at_home)
        _alone(world, lane, ACTIVATION, layer, world.activation_s[s])
    if run.error:
        return
    join_s = _control_s(constants.join_s, active, copied)
    _on_control(world, control, JOIN, layer, join_s)
    if run.error:
        return
    _complete(world, s)
    if not constants.inline:
        transfers.go_on(world, transfers.control_worker(world))


@compiled
def _predict(world: Any, s: int, dense_parts: int) -> None:
    """Queue the evaluation of coming layers' dense parts, to predict them."""
    if not dense_parts:
        return
    layer = world.layer[s]
    lane = world.lane_by_use[GPU + planning.home(world, layer)]
    work_s = dense_parts * world.dense_s[s] + world.constants.dispatch_s
    i = operation(world, lane, DENSE, layer, NONE, work_s, 0, kinds.PREDICTED)
    world.run.pending += 1
    world.run.predicting = True
    transfers.submit(world, i, DEMAND)


@compiled
def _draft(world: Any, s: int) -> None:
    """Draft tokens one by one on the first GPU, and prefetch what each foretells."""
    run = world.run
    run.step = world.step[s]
    run.place = s
    for _ in range(world.drafted[s]):
        _alone(world, world.lane_by_use[GPU], DENSE, NONE, world.draft_s[s])
        if run.error:
            return
        if world.constants.foretells:
            planning.foretell(world, s)
            if run.error:
                return
            _enqueue(world)
        transfers.offer(world)


@compiled(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64))
def run_steps(address: int, first: int, full_spans: int, full_steps: int) -> int:
    """Run layer steps of a block from the first on.

    Args:
        address: of the world's table.
        first: layer step to begin with.
        full_spans: stop after the forward pass that has brought so many spans.
        full_steps: stop after the forward pass that has brought so many layer steps.

    Returns:
        The layer step to go on with: behind the last if the block is done. In the
        middle of a pass the room for spans or for operations is short, or ``run.error``
        says what failed.
    """
    world = table_at(WORLD, address)
    run = world.run
    # Of one layer step: its products, all copies, and what surrounds them.
    most = 3 * world.constants.experts + 2 * world.state.size + 8
    s = first
    while s < len(world.layer):
        # What was begun before it may end in it.
        used = run.operations + most
        spans = used + world.drafted[s] * (1 + most)
        if run.spans + spans > len(world.nbytes) or used > len(world.operations):
            return s
        if world.layer[s] == 0:
            run.pass_s = run.now_s
            run.has_read = False
            if world.drafted[s]:
                _draft(world, s)
                if run.error:
                    return s
        _layer_step(world, s)
        if run.error:
            return s
        head_s = world.head_s[s]
        s += 1
        run.layer_steps += 1
        if head_s < 0.0:
            continue
        if head_s > 0.0:
            _alone(world, world.lane_by_use[GPU], DENSE, NONE, head_s)
        world.start_s[s - 1] = run.pass_s
        world.end_s[s - 1] = run.now_s
        if run.spans >= full_spans or run.layer_steps >= full_steps:
            return s
    return s
