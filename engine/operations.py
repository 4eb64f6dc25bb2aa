"""Operations: what one lane does without interruption, and who goes first in a lane.

A clock has operations of its own: SimPy's are events that take virtual seconds, the
runtime's are pieces of work for a thread. The engine asks only for what stands here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from moesim.policies.planner import plan as kinds

if TYPE_CHECKING:
    from collections.abc import Callable

DEMAND: Final = 0
PREFETCH: Final = 1
REPLACEMENT: Final = 2
PRIORITIES: Final = (DEMAND, PREFETCH, REPLACEMENT)
"""Priorities inside a lane: lower goes first, and nothing is preempted."""

PRIORITY_OF: Final = {
    kinds.FETCH: DEMAND,
    kinds.READ: DEMAND,
    kinds.PREFETCH: PREFETCH,
    kinds.REPLACE: REPLACEMENT,
}
"""Priority of a copy by its kind."""


class Operation(Protocol):
    """A product, a copy, a read, a plan: one lane, from start to end.

    Attributes:
        lane: index of the lane.
        kind: kind of span (`moesim.traces.timeline.spans`).
        step: forward pass.
        layer: MoE layer; -1 where there is none.
        expert: expert; -1 where there is none.
        on_end: called when it has ended, with the operation.
    """

    lane: int
    kind: int
    step: int
    layer: int
    expert: int
    on_end: Callable[..., object] | None
