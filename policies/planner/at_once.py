"""Carries a plan out at once: for callers that ask a planner without lanes to run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.planner.plan import FETCH, READ

if TYPE_CHECKING:
    from moesim.policies.planner.plan import Copies, Plan
    from moesim.policies.planner.planner import Planner


def carry_out(planner: Planner, plan: Plan, now_s: float) -> float:
    """Let a plan's copies start and land one after another, then join the layer step.

    An expert is computed the moment it has landed. A prefetch or replacement that finds
    no place is forgotten, so nothing is ever queued when the next layer step is planned.

    Args:
        planner: that made the plan, and whose plans are all carried out like this.
        plan: the last one it made.
        now_s: when the copies begin.

    Returns:
        When the last copy has landed, by the profile's estimates.
    """
    assert not plan.promoted, "a copy of an earlier plan was left in the queue"
    for copies in plan.copies:
        now_s = _copy_all(planner, copies, now_s)
    for copies in planner.complete(plan, now_s):
        now_s = _copy_all(planner, copies, now_s)
    return now_s


def _copy_all(planner: Planner, copies: Copies, now_s: float) -> float:
    """Copy experts of one kind, each after the one before; return when all are there."""
    for expert, read in zip(copies.experts, copies.read, strict=True):
        now_s = _copy(planner, copies, expert, now_s, read=read)
    return now_s


def _copy(
    planner: Planner, copies: Copies, expert: int, now_s: float, *, read: bool
) -> float:
    """Read an expert if it must be read, then copy it if a GPU wants it."""
    layer = copies.layer
    key = layer * planner.experts + expert
    if copies.kind != READ and not planner.gpu[copies.gpu].is_wished(key):
        return now_s  # it has yielded to a read
    if read:
        place = planner.start_read(layer, expert, now_s)
        if place is None:
            for copy in planner.yielding_copies(layer, expert):
                planner.cancel_copy(*copy)
            place = planner.start_read(layer, expert, now_s)
        if place is None:
            # Demand always finds a slot: what was staged before has been computed.
            assert copies.kind not in {FETCH, READ}, "demand found no place"
            planner.cancel_copy(copies.gpu, layer, expert)
            planner.cancel_read(layer, expert)
            return now_s
        planner.read_done(layer, expert)
        now_s += planner.costs.read_s(layer)
    if copies.kind == READ:
        planner.computed(-1, layer, expert)
        return now_s

    if planner.start_copy(copies.gpu, layer, expert, now_s) is None:
        assert copies.kind != FETCH, "demand found no place"
        planner.cancel_copy(copies.gpu, layer, expert)
        return now_s
    planner.landed(copies.gpu, layer, expert)
    now_s += planner.copy_s(layer)
    if copies.kind == FETCH:
        planner.computed(copies.gpu, layer, expert)
    return now_s
