"""Lanes, workers and the clock: `moesim.sim.world` and `moesim.sim.clock`.

There is no event heap: few operations run at once, so the next end is found by looking
at all of them.
"""

from __future__ import annotations

from typing import Any

from moesim.machine_code.functions import compiled
from moesim.sim.compiled.records import NONE

TURN = 0
COMPUTED = 1
FETCHED = 2
COPIED = 3
PREDICTED = 4
HAS_READ = 5
KEPT = 6
UNAWAITED = 7
AHEAD = 8
AWAITED_AHEAD = 9
"""What follows an operation's end."""


@compiled
def operation(
    world: Any,
    lane: int,
    kind: int,
    layer: int,
    expert: int,
    work_s: float,
    nbytes: int,
    on_end: int,
) -> int:
    """Make an operation of the layer step under way; its place."""
    run = world.run
    i = run.free
    made = world.operations[i]
    # Behind the last one that was given back all are unused.
    run.free = made.next - 1 if made.next else i + 1
    run.operations += 1
    made.lane = lane
    made.kind = kind
    made.step = run.step
    made.layer = layer
    made.expert = expert
    made.work_s = work_s
    made.nbytes = nbytes
    made.on_end = on_end
    made.start_s = -1.0
    made.awaits_read = False
    made.next = NONE
    made.previous = NONE
    return i


@compiled
def forget(world: Any, i: int) -> None:
    """Let another operation take the place of this one."""
    run = world.run
    world.operations[i].next = run.free + 1
    run.free = i
    run.operations -= 1


# -- what runs -------------------------------------------------------------------------


@compiled
def _schedule(run: Any, running: Any, delay_s: float) -> None:
    """Expect an end; among equal ones, what was scheduled first ends first."""
    running.end_s = run.now_s + delay_s
    running.order = run.scheduled
    run.scheduled += 1
    run.events += 1


@compiled
def begin(world: Any, i: int) -> None:
    """Start an operation now."""
    run = world.run
    started = world.operations[i]
    if world.noise.shape[1]:
        lane = world.lanes[started.lane]
        started.work_s *= world.noise[started.lane, lane.drawn]
        lane.drawn += 1
    started.start_s = run.now_s
    world.running[run.running] = i
    run.running += 1
    if not len(world.slowdown):
        _schedule(run, started, started.work_s)
        return
    started.settled_s = run.now_s
    started.left_s = started.work_s
    started.rate = 0.0
    _adjust(world)


@compiled
def _adjust(world: Any) -> None:
    """Settle and re-schedule every operation whose rate has changed."""
    run = world.run
    for n in range(run.running):
        running = world.operations[world.running[n]]
        rate = 1.0
        for other in range(run.running):
            if other != n:
                lane = world.operations[world.running[other]].lane
                rate /= world.slowdown[running.lane, lane]
        if rate != running.rate:
            done_s = (run.now_s - running.settled_s) * running.rate
            running.left_s = max(0.0, running.left_s - done_s)
            running.settled_s = run.now_s
            running.rate = rate
            _schedule(run, running, running.left_s / rate)


@compiled
def _next_end(world: Any) -> int:
    """Which of the running operations ends next; -1 if none runs."""
    run = world.run
    if not run.running:
        return NONE
    best = 0
    first = world.operations[world.running[0]]
    first_rank = world.lanes[first.lane].end_rank
    for n in range(1, run.running):
        other = world.operations[world.running[n]]
        if other.end_s > first.end_s:
            continue
        rank = world.lanes[other.lane].end_rank
        if other.end_s == first.end_s:
            if rank > first_rank:
                continue
            if rank == first_rank and other.order > first.order:
                continue
        best = n
        first = other
        first_rank = rank
    return best


@compiled
def end_next(world: Any) -> int:
    """Let the next operation end, and record its span; -1 if nothing runs."""
    run = world.run
    n = _next_end(world)
    if n == NONE:
        return NONE
    i = world.running[n]
    ended = world.operations[i]
    run.now_s = ended.end_s
    run.running -= 1
    for later in range(n, run.running):
        world.running[later] = world.running[later + 1]
    if len(world.slowdown):
        _adjust(world)
    span = run.spans
    world.codes[0, span] = ended.lane
    world.codes[1, span] = ended.kind
    world.places[0, span] = ended.step
    world.places[1, span] = ended.layer
    world.places[2, span] = ended.expert
    world.times_s[0, span] = ended.start_s
    world.times_s[1, span] = ended.end_s
    world.nbytes[span] = ended.nbytes
    run.spans += 1
    return i


# -- queues ----------------------------------------------------------------------------


@compiled
def push(world: Any, i: int, priority: int) -> None:
    """Append an operation to its lane's queue."""
    pushed = world.operations[i]
    lane = world.lanes[pushed.lane]
    last = lane.last[priority]
    pushed.previous = last
    pushed.next = NONE
    if last == NONE:
        lane.first[priority] = i
    else:
        world.operations[last].next = i
    lane.last[priority] = i
    world.workers[lane.worker].waiting += 1


@compiled
def withdraw(world: Any, i: int, priority: int) -> None:
    """Take back an operation that has not started."""
    taken = world.operations[i]
    lane = world.lanes[taken.lane]
    if taken.previous == NONE:
        lane.first[priority] = taken.next
    else:
        world.operations[taken.previous].next = taken.next
    if taken.next == NONE:
        lane.last[priority] = taken.previous
    else:
        world.operations[taken.next].previous = taken.previous
    taken.next = NONE
    taken.previous = NONE
    world.workers[lane.worker].waiting -= 1
