"""The least reads from host memory that any cache of a size needs: Belady with bypass.

A layer step uses several experts in any order, so the cache is cut back to its size
only after the step: whatever a real cache holds then is a subset of what it held before
and what the step used. This can only lower the count.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

Expert = tuple[int, int]
"""Layer and expert."""

LayerStep = tuple[int, "Sequence[int]"]
"""Layer, and the experts that it uses in one step."""


def least_reads(
    steps: Iterable[LayerStep],
    slots: np.ndarray,
    *,
    shared: bool,
    warm: bool = False,
) -> int:
    """Count the reads that no cache of this size avoids.

    Args:
        steps: layer steps in order.
        slots: experts that fit, int [L] or [1].
        shared: one pool for all layers.
        warm: the cache may begin with any content, which saves a read per slot.
    """
    # Layers with caches of their own do not compete for slots.
    pools: dict[int, list[list[Expert]]] = {}
    for layer, experts in steps:
        pool = pools.setdefault(0 if shared else layer, [])
        pool.append([(layer, expert) for expert in experts])

    reads = 0
    single = shared or len(slots) == 1
    for pool_id, uses in pools.items():
        size = int(slots[0 if single else pool_id])
        misses = min_with_bypass(uses, size)
        if warm:
            misses = max(0, misses - size)
        reads += misses
    return reads


def min_with_bypass(uses: Sequence[Sequence[Expert]], size: int) -> int:
    """Count misses of the cache that keeps what is used again soonest.

    Args:
        uses: experts of each step of one pool, in order.
        size: experts that the cache holds between steps.

    Source: Belady 1966; with bypass, what was just used is a candidate for eviction.
    """
    following = _next_uses(uses)
    resident: dict[Expert, int] = {}
    latest_first: list[tuple[int, Expert]] = []
    misses = 0

    for experts, next_steps in zip(uses, following, strict=True):
        used_next = dict(zip(experts, next_steps, strict=True))
        for expert, next_step in used_next.items():
            if expert not in resident:
                misses += 1
            resident[expert] = next_step
            entry = (-next_step, expert)
            heapq.heappush(latest_first, entry)

        while len(resident) > size:
            negative, victim = heapq.heappop(latest_first)
            # Entries of earlier uses are stale once the expert was used again.
            if resident.get(victim) == -negative:
                del resident[victim]
    return misses


def _next_uses(uses: Sequence[Sequence[Expert]]) -> list[list[int]]:
    """Return for each use the number of the step that uses the expert next."""
    never = len(uses)
    next_step: dict[Expert, int] = {}
    following: list[list[int]] = []

    for at in reversed(range(never)):
        experts = uses[at]
        next_steps = [next_step.get(expert, never) for expert in experts]
        following.append(next_steps)
        next_step |= dict.fromkeys(experts, at)
    following.reverse()
    return following
