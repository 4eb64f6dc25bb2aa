"""Copies and products: what waits, what starts, and what follows an end.

As `moesim.engine.lanes`, `moesim.engine.transfers` and `moesim.engine.layer_step`, with
the planner's part of a copy's life.
"""

from __future__ import annotations

from typing import Any

from moesim.engine.lanes import DEMAND
from moesim.machine_code.functions import address_of, compiled, table_at
from moesim.policies.base import RESIDENT
from moesim.policies.planner.plan import PREFETCH, READ, REPLACE
from moesim.sim.compiled import host, memory
from moesim.sim.compiled.lanes import (
    AHEAD,
    AWAITED_AHEAD,
    COMPUTED,
    COPIED,
    FETCHED,
    HAS_READ,
    PREDICTED,
    UNAWAITED,
    begin,
    forget,
    operation,
    push,
    withdraw,
)
from moesim.sim.compiled.records import ENTRIES, NONE, WORLD

CONTROL = 0
SSD = 1
CPU = 2
GPU = 3
"""Places in `world.lane_by_use`; lanes of GPUs follow each other."""

_START = 0
_WAIT = 1
_DROP = 2

LATE_DROP = 0
LATE_KEEP = 1
LATE_WAIT = 2

STAGE = 0
WAIT = 1
DROP = 2
"""What becomes of a prefetch that finds no place."""


# -- links -----------------------------------------------------------------------------


@compiled
def link_enqueue(world: Any, gpu: int, key: int) -> None:
    """Note a queued copy."""
    link = world.memories[gpu]
    link.queued += 1
    link.queued_s += world.copy_s[gpu, world.size_of[key]]


@compiled
def link_withdraw(world: Any, gpu: int, key: int) -> None:
    """Note that a queued copy has left the queue, started or not."""
    link = world.memories[gpu]
    link.queued -= 1
    link.queued_s = (
        link.queued_s - world.copy_s[gpu, world.size_of[key]] if link.queued else 0.0
    )


# -- starts ----------------------------------------------------------------------------


@compiled
def submit(world: Any, i: int, priority: int) -> None:
    """Queue an operation; it starts at once if its worker is idle."""
    lane = world.lanes[world.operations[i].lane]
    worker = world.workers[lane.worker]
    if not worker.busy and worker.waiting == 0 and not lane.gated:
        worker.busy = True
        begin(world, i)
        return
    push(world, i, priority)
    if not worker.busy:
        serve(world, lane.worker)


@compiled
def serve(world: Any, w: int) -> None:
    """Start the next operation that an idle worker may start."""
    if world.workers[w].waiting:
        world.serve_worker(address_of(world), w)


@compiled
def go_on(world: Any, w: int) -> None:
    """Let a worker that has ended something, or is given back, do what comes next."""
    run = world.run
    if run.takes and w == control_worker(world):
        run.takes = False
        run.turn = True
        run.turns += 1
        return
    world.workers[w].busy = False
    serve(world, w)


@compiled
def control_worker(world: Any) -> int:
    """Who plans; its lanes may be others as well."""
    return world.lanes[world.lane_by_use[CONTROL]].worker


@compiled
def all_computed(world: Any) -> None:
    """Let the layer step go on once control is free: it joins before it serves its
    lanes again.
    """
    run = world.run
    worker = world.workers[control_worker(world)]
    if worker.busy:
        run.takes = True
        return
    worker.busy = True
    run.turn = True
    run.turns += 1


@compiled
def offer(world: Any) -> None:
    """Let idle workers look again at operations that waited for a place."""
    workers = world.workers
    for w in range(len(workers)):
        if workers[w].gated and workers[w].waiting and not workers[w].busy:
            serve(world, w)


@compiled
def _pick(world: Any, w: int) -> int:
    """Take out the first operation that may start now; -1 if there is none."""
    worker = world.workers[w]
    for n in range(worker.count):
        lane = world.lanes[worker.lanes[n]]
        for priority in range(3):
            while lane.first[priority] != NONE:
                i = lane.first[priority]
                if lane.gated:
                    if world.run.closed:
                        break
                    verdict = _admit(world, i)
                    if verdict == _WAIT:
                        break
                    if verdict == _DROP:
                        withdraw(world, i, priority)
                        forget(world, i)
                        continue
                withdraw(world, i, priority)
                return i
    return NONE


@compiled
def _admit(world: Any, i: int) -> int:
    """Take a place for a copy that could start; say whether it may."""
    run = world.run
    copy = world.operations[i]
    if run.predicting and copy.kind == PREFETCH:
        return _WAIT
    gpu = world.lanes[copy.lane].gpu
    key = copy.layer * world.constants.experts + copy.expert
    if copy.kind == READ:
        return _START if _start_read(world, copy.layer, key) else _WAIT
    if not _start_copy(world, gpu, copy.layer, key):
        if run.error or not _gives_up(world, gpu, key):
            return _WAIT
        cancel_copy(world, gpu, key)
        _unqueue(world, gpu, key)
        settle(world, copy.layer)
        return _DROP
    _unqueue(world, gpu, key)
    world.experts[gpu, key].copying = True
    if world.constants.writes_back:
        _write_back(world, gpu, copy.step)
    return _START


@compiled
def link_back(world: Any, gpu: int) -> int:
    """Lane of copies from a GPU to host memory."""
    return world.lane_by_use[GPU + 2 * world.constants.gpus + gpu]


@compiled
def _write_back(world: Any, gpu: int, step: int) -> None:
    """Copy back what has left for the copy that starts; nobody waits for it."""
    constants = world.constants
    key = world.run.evicted
    while key != NONE:
        # Another copy may start meanwhile, with victims of its own.
        following = world.experts[gpu, key].next_victim
        layer = key // constants.experts
        i = operation(
            world,
            link_back(world, gpu),
            REPLACE,
            layer,
            key - layer * constants.experts,
            world.back_s[gpu, world.size_of[key]] + constants.dispatch_s,
            world.size_bytes[world.size_of[key]],
            UNAWAITED,
        )
        world.operations[i].step = step
        submit(world, i, DEMAND)
        key = following


@compiled
def _start_copy(world: Any, gpu: int, layer: int, key: int) -> bool:
    """Take a place for a queued copy to a GPU that starts now."""
    run = world.run
    landing_s = run.now_s + world.copy_s[gpu, world.size_of[key]]
    stages = world.constants.no_place != DROP
    kept = memory.RESERVED_SLOTS
    place = memory.start(world, gpu, key, landing_s, kept, stages)
    demanded = world.experts[gpu, key].demanded
    # A prefetch that waits in staging is a guess; demand is not.
    if place == memory.NO_PLACE and demanded and _frees_staging(world, gpu, layer):
        place = memory.start(world, gpu, key, landing_s, kept, True)
    if place == memory.NO_PLACE:
        return False
    link_withdraw(world, gpu, key)
    world.memories[gpu].busy_until_s = landing_s
    return True


@compiled
def _frees_staging(world: Any, gpu: int, layer: int) -> bool:
    """Drop a prefetch that waits in staging; say whether there was one."""
    if not world.memories[gpu].staged:
        return False
    idle = memory.idle_prefetch(world, gpu, layer, NONE)
    if idle == NONE:
        return False
    memory.drop_staged(world, gpu, idle)
    return True


@compiled
def _start_read(world: Any, layer: int, key: int) -> bool:
    """Take a place in host memory for a read that starts now."""
    m = world.constants.host
    landing_s = world.run.now_s + world.read_s[world.size_of[key]]
    kept = memory.RESERVED_SLOTS
    place = memory.start(world, m, key, landing_s, kept, True)
    if place == memory.NO_PLACE and _yields(world, layer, key):
        place = memory.start(world, m, key, landing_s, kept, True)
    if place == memory.NO_PLACE:
        return False
    world.memories[m].busy_until_s = landing_s
    world.experts[m, key].copying = True
    return True


@compiled
def _yields(world: Any, layer: int, read: int) -> bool:
    """Give up a prefetch for a read that finds no place; whether there was one.

    A read that a layer step waits for goes before guesses whose experts lie in host
    memory's staging area until a link takes them.
    """
    m = world.constants.host
    if not world.experts[m, read].demanded or not world.memories[m].staged:
        return False
    key = memory.idle_prefetch(world, m, layer, NONE)
    while key != NONE:
        copies = 0
        demanded = False
        for gpu in range(world.constants.gpus):
            wished = world.experts[gpu, key]
            copies += wished.wished
            demanded |= wished.wished and wished.demanded
        # Staging itself is one hold. More holds than copies: another need.
        if copies and not demanded and world.holds[m, key] == 1 + copies:
            for gpu in range(world.constants.gpus):
                if world.experts[gpu, key].wished:
                    _take_back(world, gpu, key)
            return True
        key = memory.idle_prefetch(world, m, layer, key)
    return False


@compiled
def _gives_up(world: Any, gpu: int, key: int) -> bool:
    """Whether a queued copy that finds no place is dropped; else it waits."""
    wished = world.experts[gpu, key]
    if wished.demanded:
        return False
    if wished.replaces != NONE:
        left = world.state[gpu, wished.replaces] != RESIDENT
        fits = memory.swap_fits(world, gpu, key, wished.replaces)
        return left or wished.hurried or not fits
    if world.constants.no_place == STAGE:
        return not memory.staging_will_have_room(world, gpu)
    return world.constants.no_place == DROP


@compiled
def cancel_copy(world: Any, gpu: int, key: int) -> None:
    """Forget the wish for a queued copy to a GPU."""
    memory.cancel(world, gpu, key)
    link_withdraw(world, gpu, key)
    host.unneed(world, key)


@compiled
def _take_back(world: Any, gpu: int, key: int) -> None:
    """Cancel a queued copy, with the read that only it needs."""
    i = world.experts[gpu, key].queued
    copy = world.operations[i]
    cancel_copy(world, gpu, key)
    _unqueue(world, gpu, key)
    settle(world, copy.layer)
    if copy.awaits_read:
        _leave_read(world, i, key)
    else:
        withdraw(world, i, copy.priority)
    forget(world, i)


@compiled
def _unqueue(world: Any, gpu: int, key: int) -> None:
    """Forget that a copy is queued; its operation stays."""
    copy = world.experts[gpu, key]
    run = world.run
    queued = world.operations[copy.queued]
    run.prefetches -= queued.kind == PREFETCH
    world.pools[0, queued.layer].unawaited -= queued.priority != DEMAND
    run.queued -= 1
    copy.queued = NONE


# -- decisions -------------------------------------------------------------------------


@compiled
def begin_decisions(world: Any, layer: int, active: Any) -> None:
    """Stop starts, and settle what becomes of queued prefetches."""
    run = world.run
    run.closed = True
    if not run.prefetches:
        return
    constants = world.constants
    if not constants.requeue:
        _drop_late(world, layer, layer, active)
        return
    # Sums of seconds depend on the order in which copies leave the link's queue.
    for target in world.prefetched_layers[: run.prefetched]:
        _drop_late(world, target, layer, active)


@compiled
def _drop_late(world: Any, target: int, layer: int, active: Any) -> None:
    """Drop queued prefetches for a layer, but those that stay."""
    constants = world.constants
    if target == layer and constants.late == LATE_WAIT:
        return
    first = target * constants.experts
    for gpu in range(constants.gpus):
        for key in range(first, first + constants.experts):
            i = world.experts[gpu, key].queued
            if i == NONE or world.operations[i].kind != PREFETCH:
                continue
            if target == layer and constants.late == LATE_KEEP:
                awaited = False
                for expert in active:
                    awaited |= first + expert == key
                if not awaited:
                    continue
            _take_back(world, gpu, key)


@compiled
def end_decisions(world: Any) -> None:
    """Report what has landed meanwhile, and let queued operations start."""
    run = world.run
    run.closed = False
    for n in range(run.reports):
        report = world.reports[n]
        _note_end(world, report.kind, report.gpu, report.layer, report.expert)
    run.reports = 0
    offer(world)


@compiled
def promote(world: Any, gpu: int, layer: int, expert: int) -> None:
    """Let a queued copy go first: a layer step waits for it."""
    key = layer * world.constants.experts + expert
    i = world.experts[gpu, key].queued
    copy = world.operations[i]
    if copy.awaits_read:
        _promote_read(world, key)
    elif copy.priority != DEMAND:
        withdraw(world, i, copy.priority)
        submit(world, i, DEMAND)
    world.pools[0, layer].unawaited -= copy.priority != DEMAND
    copy.priority = DEMAND


@compiled
def start_on_gpu(world: Any, gpu: int, i: int) -> None:
    """Start a product as soon as its expert is on a GPU."""
    product = world.operations[i]
    key = product.layer * world.constants.experts + product.expert
    expert = world.experts[gpu, key]
    if expert.queued != NONE or expert.copying:
        expert.awaiting = i
    else:
        submit(world, i, DEMAND)


@compiled
def start_on_cpu(world: Any, i: int) -> None:
    """Start a product as soon as its expert is in host memory."""
    m = world.constants.host
    if m != NONE:
        product = world.operations[i]
        key = product.layer * world.constants.experts + product.expert
        if world.experts[m, key].queued != NONE:
            world.experts[m, key].awaiting = i
            return
    submit(world, i, DEMAND)


# -- reads -----------------------------------------------------------------------------


@compiled
def read(world: Any, layer: int, expert: int, priority: int, new: bool) -> None:
    """Queue a read from the SSD, or hurry the one that is pending."""
    constants = world.constants
    run = world.run
    key = layer * constants.experts + expert
    if not new:
        if priority == DEMAND:
            _promote_read(world, key)
        return
    work_s = world.read_s[world.size_of[key]] + constants.dispatch_s
    # The first one that a layer step demands takes longer.
    first = run.read_step != run.step or run.read_layer != layer
    if priority == DEMAND and first:
        run.read_step = run.step
        run.read_layer = layer
        work_s += constants.first_read_s
    i = operation(
        world,
        world.lane_by_use[SSD],
        READ,
        layer,
        expert,
        work_s,
        world.size_bytes[world.size_of[key]],
        HAS_READ,
    )
    world.operations[i].priority = priority
    pending = world.experts[constants.host, key]
    pending.queued = i
    pending.copying = False
    # It may start at once: then it has a place, and is under way.
    submit(world, i, priority)


@compiled
def await_read(world: Any, i: int) -> None:
    """Let a queued copy wait for the read of its expert."""
    copy = world.operations[i]
    copy.awaits_read = True
    key = copy.layer * world.constants.experts + copy.expert
    pending = world.experts[world.constants.host, key]
    copy.next = NONE
    copy.previous = pending.last_copy
    if pending.last_copy == NONE:
        pending.first_copy = i
    else:
        world.operations[pending.last_copy].next = i
    pending.last_copy = i


@compiled
def _promote_read(world: Any, key: int) -> None:
    """Let a pending read go first: a layer step waits for it."""
    pending = world.experts[world.constants.host, key]
    i = pending.queued
    queued = world.operations[i]
    if not pending.copying and queued.priority != DEMAND:
        withdraw(world, i, queued.priority)
        submit(world, i, DEMAND)
    queued.priority = DEMAND


@compiled
def _leave_read(world: Any, i: int, key: int) -> None:
    """Withdraw the read behind a copy if nothing else needs it."""
    m = world.constants.host
    pending = world.experts[m, key]
    copy = world.operations[i]
    if copy.previous == NONE:
        pending.first_copy = copy.next
    else:
        world.operations[copy.previous].next = copy.next
    if copy.next == NONE:
        pending.last_copy = copy.previous
    else:
        world.operations[copy.next].previous = copy.previous
    needed = pending.first_copy != NONE or pending.awaiting != NONE
    if pending.copying or needed:
        return
    unread = pending.queued
    withdraw(world, unread, world.operations[unread].priority)
    forget(world, unread)
    pending.queued = NONE
    memory.cancel(world, m, key)


@compiled
def _has_read(world: Any, i: int) -> None:
    """Queue what waited for an expert in host memory."""
    ended = world.operations[i]
    _report(world, HAS_READ, NONE, ended.layer, ended.expert)
    key = ended.layer * world.constants.experts + ended.expert
    pending = world.experts[world.constants.host, key]
    pending.queued = NONE
    pending.copying = False
    copy = pending.first_copy
    product = pending.awaiting
    pending.first_copy = NONE
    pending.last_copy = NONE
    pending.awaiting = NONE
    while copy != NONE:
        following = world.operations[copy].next
        world.operations[copy].awaits_read = False
        submit(world, copy, world.operations[copy].priority)
        copy = following
    if product != NONE:
        submit(world, product, DEMAND)


# -- ends ------------------------------------------------------------------------------


@compiled
def release_held(world: Any) -> None:
    """Let the CPU of a serial plan begin."""
    run = world.run
    count = run.held
    run.held = 0
    for n in range(count):
        start_on_cpu(world, world.held[n])


@compiled
def _unawaited_ended(world: Any, i: int) -> None:
    """Let go of a product that nobody has awaited yet."""
    ended = world.operations[i]
    expert = world.experts[0, ended.layer * world.constants.experts + ended.expert]
    # A wrong guess of an earlier step may end after its successor has begun.
    if expert.ahead == i:
        expert.ahead = NONE
    _report(world, AHEAD, NONE, ended.layer, ended.expert)


@compiled
def _copied(world: Any, i: int) -> None:
    """Start the product that waited for an expert on a GPU."""
    copy = world.operations[i]
    gpu = world.lanes[copy.lane].gpu
    _report(world, COPIED, gpu, copy.layer, copy.expert)
    key = copy.layer * world.constants.experts + copy.expert
    expert = world.experts[gpu, key]
    expert.copying = False
    if expert.awaiting != NONE:
        product = expert.awaiting
        expert.awaiting = NONE
        submit(world, product, DEMAND)
    settle(world, copy.layer)


@compiled
def settle(world: Any, layer: int) -> None:
    """Count a copy that has landed or was given up."""
    pool = world.pools[0, layer]
    pool.outstanding -= 1
    all_landed = pool.outstanding == pool.unawaited
    if all_landed and world.run.barred_layer == layer:
        _open(world)


@compiled
def _open(world: Any) -> None:
    """Start the GPU products that waited for all copies of their layer."""
    run = world.run
    run.barred_layer = NONE
    count = run.barred
    run.barred = 0
    for n in range(count):
        product = world.barred[n]
        start_on_gpu(world, world.lanes[world.operations[product].lane].gpu, product)


@compiled
def open_when_landed(world: Any, layer: int) -> None:
    """Start products once all copies of their layer have landed, or now.

    Queued ones that nobody waits for may need a place that this layer step holds.
    """
    run = world.run
    if not run.barred:
        return
    pool = world.pools[0, layer]
    if pool.outstanding > pool.unawaited:
        run.barred_layer = layer
    else:
        _open(world)


@compiled
def _report(world: Any, kind: int, gpu: int, layer: int, expert: int) -> None:
    """Note what has ended, now or when decisions are over."""
    run = world.run
    if run.closed:
        report = world.reports[run.reports]
        report.kind = kind
        report.gpu = gpu
        report.layer = layer
        report.expert = expert
        run.reports += 1
        return
    if _note_end(world, kind, gpu, layer, expert):
        offer(world)


@compiled
def _note_end(world: Any, kind: int, gpu: int, layer: int, expert: int) -> bool:
    """Note what has ended; whether a staging slot is free again."""
    if kind == COPIED:
        return _landed(world, gpu, layer, expert)
    key = layer * world.constants.experts + expert
    if kind == HAS_READ:
        return host.land(world, key)
    if kind == AHEAD:
        return host.unneed(world, key)
    if gpu == NONE:
        return host.computed(world, key)
    return _computed(world, gpu, key)


@compiled
def _landed(world: Any, gpu: int, layer: int, expert: int) -> bool:
    """Note that a copy to a GPU is complete; whether a staging slot is free again."""
    key = layer * world.constants.experts + expert
    world.state[gpu, key] = RESIDENT
    freed = world.experts[gpu, key].orphan
    if freed:
        world.experts[gpu, key].orphan = False
        memory.drop_staged(world, gpu, key)
    # Host memory is told in any case.
    unneeded = host.unneed(world, key)
    return freed or unneeded


@compiled
def _computed(world: Any, gpu: int, key: int) -> bool:
    """Note that a product on a GPU has ended; whether a staging slot is free again."""
    if not world.experts[gpu, key].staged:
        return False
    memory.drop_staged(world, gpu, key)
    return True


@compiled(ENTRIES["end_operation"])
def end_operation(address: int, i: int) -> None:
    """Let an operation's consequences queue, then let its worker go on."""
    world = table_at(WORLD, address)
    run = world.run
    ended = world.operations[i]
    # Busy until all consequences are queued: the worker chooses among all of them.
    w = world.lanes[ended.lane].worker
    if ended.on_end == COPIED:
        _copied(world, i)
    elif ended.on_end == HAS_READ:
        _has_read(world, i)
    elif ended.on_end == AHEAD:
        _unawaited_ended(world, i)
    elif ended.on_end != UNAWAITED:
        if ended.on_end == FETCHED:
            run.fetched -= 1
            if not run.fetched:
                release_held(world)
        if ended.on_end == COMPUTED or ended.on_end == FETCHED:  # noqa: PLR1714
            gpu = world.lanes[ended.lane].gpu
            # Where nothing is staged there is nothing to let go of.
            if gpu == NONE:
                lets_go = world.constants.host != NONE
            else:
                lets_go = world.memories[gpu].staged > 0
            if lets_go:
                _report(world, COMPUTED, gpu, ended.layer, ended.expert)
        if ended.on_end == AWAITED_AHEAD:
            _report(world, AHEAD, NONE, ended.layer, ended.expert)
        if ended.on_end == PREDICTED:
            run.predicting = False
            offer(world)
        run.pending -= 1
        if not run.pending:
            all_computed(world)
    forget(world, i)
    go_on(world, w)


@compiled(ENTRIES["serve_worker"])
def serve_worker(address: int, w: int) -> None:
    """Start the next operation that an idle worker may start."""
    world = table_at(WORLD, address)
    worker = world.workers[w]
    # A copy that takes its place may queue others here: one is picked at a time.
    worker.busy = True
    i = _pick(world, w)
    if i == NONE:
        worker.busy = False
    else:
        begin(world, i)
