"""Carries a plan out at once, for callers that ask a planner but have no lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.policies.names import RESIDENT
from moesim.policies.planner.plan import FETCH, PREFETCH, READ, REPLACE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.policies.planner.plan import Copies, Plan
    from moesim.policies.planner.planner import Planner


@dataclass(slots=True)
class _Queued:
    """One copy that has not landed: as in `Copies`."""

    kind: int
    gpu: int
    layer: int
    expert: int
    read: bool

    @property
    def place(self) -> tuple[int, int]:
        """Layer and expert."""
        return self.layer, self.expert


def carry_out(planner: Planner, plan: Plan, now_s: float) -> float:
    """Let a plan's copies start and land one after another, then join the layer step.

    An expert is computed the moment it has landed. A prefetch or replacement that finds
    no place is forgotten, so nothing is queued when the next layer step is planned.

    Args:
        planner: that made the plan, and whose plans are all carried out like this.
        plan: the last one it made.
        now_s: when the copies begin.

    Returns:
        When the last copy has landed, by the profile's estimates.
    """
    assert not plan.promoted, "a copy of an earlier plan was left in the queue"
    now_s = _carry_all(planner, plan.copies, now_s)
    for expert in plan.deferred:
        planner.unawaited_ended(plan.work.layer, expert)
    return _carry_all(planner, planner.complete(plan, now_s), now_s)


def _carry_all(planner: Planner, copies: Iterable[Copies], now_s: float) -> float:
    """Carry copies in their order as far as there are places; return the time."""
    queue = [
        _Queued(part.kind, part.gpu, part.layer, expert, read)
        for part in copies
        for expert, read in zip(part.experts, part.read, strict=True)
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
    if copy.read:
        if planner.start_read(*copy.place, now_s) is None:
            return None
        copy.read = False
        planner.read_done(*copy.place)
        assert planner.host is not None
        now_s += planner.host.read_s(*copy.place)
    elif not _is_in_host_memory(planner, copy):
        return None
    if copy.kind == READ:
        planner.computed(-1, *copy.place)
        return now_s

    if planner.start_copy(copy.gpu, *copy.place, now_s) is None:
        return None
    planner.landed(copy.gpu, *copy.place)
    if copy.kind == FETCH:
        planner.computed(copy.gpu, *copy.place)
    return now_s + planner.copy_s(*copy.place)


def _is_in_host_memory(planner: Planner, copy: _Queued) -> bool:
    """Whether an expert could be copied to a GPU or computed on the CPU."""
    if planner.host is None:
        return True
    return bool(planner.host.memory.state[copy.place] == RESIDENT)


def _forget(planner: Planner, guess: _Queued, waiting: list[_Queued]) -> None:
    """Cancel a copy; its read goes to another copy of the expert, if there is one."""
    planner.cancel_copy(guess.gpu, *guess.place)
    if not guess.read:
        return
    for copy in waiting:
        if copy.place == guess.place:
            copy.read = True
            return
    planner.cancel_read(*guess.place)
