"""Carries a plan out at once, for callers that ask a planner but have no lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.policies.names import NONE
from moesim.traces.timeline.spans import FETCH, PREFETCH, READ, REPLACE

if TYPE_CHECKING:
    from moesim.engine.plan import Copies
    from moesim.engine.planner import Planner


@dataclass(slots=True)
class _Queued:
    """One copy that has not landed; `read`: its expert is first read."""

    kind: int
    gpu: int
    key: int
    read: bool


def carry_out(planner: Planner, now_s: float) -> float:
    """Let the last plan's copies start and land one after another, then join its layer
    step.

    An expert is computed the moment it has landed. A prefetch or replacement that finds
    no place is forgotten, so nothing is queued when the next layer step is planned.

    Args:
        planner: whose plans are all carried out like this.
        now_s: when the copies begin.

    Returns:
        When the last copy has landed, by the profile's estimates.
    """
    plan = planner.planned
    work = planner.work
    assert not plan.promoted.count, "a copy of an earlier plan was left in the queue"
    now_s = _carry_all(planner, plan.copies, now_s)
    if plan.defers:
        for i in range(work.active):
            if plan.deferred[i]:
                planner.unawaited_ended(work.first + work.experts[i])
    if plan.begins_ahead:
        following = work.first + planner.experts
        for expert in range(planner.experts):
            if plan.ahead_tokens[expert]:
                planner.unawaited_ended(following + expert)
    return _carry_all(planner, planner.complete(work, now_s).copies, now_s)


def _carry_all(planner: Planner, copies: Copies, now_s: float) -> float:
    """Carry copies in their order as far as there are places; return the time."""
    queue = [
        _Queued(copies.kind[n], copies.gpu[n], copies.key[n], bool(copies.other[n]))
        for n in range(copies.count)
    ]
    while queue:
        waiting = []
        for copy in queue:
            landed_s = _carry(planner, copy, now_s)
            if landed_s is None:
                waiting.append(copy)
            else:
                now_s = landed_s
        if len(waiting) == len(queue):
            # Whoever has a place keeps it until a guess gives way.
            guesses = [copy for copy in queue if copy.kind in {PREFETCH, REPLACE}]
            assert guesses, "demand found no place"
            waiting.remove(guesses[0])
            _forget(planner, guesses[0], waiting)
        queue = waiting
    return now_s


def _carry(planner: Planner, copy: _Queued, now_s: float) -> float | None:
    """Read an expert if it must be read, then copy it if a GPU wants it.

    Returns:
        The time afterwards; None if it has not got through, for want of a place or of a
        read that another copy brings.
    """
    host = planner.host
    if copy.read:
        if not planner.start_read(copy.key, now_s):
            return None
        copy.read = False
        planner.read_done(copy.key)
        now_s += host.memory.link.copy_s[copy.key]
    elif host is not None and not host.holds_expert(copy.key):
        return None
    if copy.kind == READ:
        planner.computed(NONE, copy.key)
        return now_s

    if not planner.start_copy(copy.gpu, copy.key, now_s):
        return None
    planner.landed(copy.gpu, copy.key)
    if copy.kind == FETCH:
        planner.computed(copy.gpu, copy.key)
    return now_s + planner.gpu[copy.gpu].link.copy_s[copy.key]


def _forget(planner: Planner, guess: _Queued, waiting: list[_Queued]) -> None:
    """Cancel a copy; its read goes to another copy of the expert, if there is one."""
    planner.cancel_copy(guess.gpu, guess.key)
    if not guess.read:
        return
    for copy in waiting:
        if copy.key == guess.key:
            copy.read = True
            return
    planner.cancel_read(guess.key)
