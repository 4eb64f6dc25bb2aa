"""The bound when a miss may be computed on the CPU instead of fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.bounds import Uses, miss_costs
from policies.parameters import expect
from policies.planned import PlannedCache

if TYPE_CHECKING:
    from policies.base import RunContext


class BeladyCost(PlannedCache):
    """Follow the plan that spends the least lane time on misses, each fetched or computed on the CPU.

    A miss costs the shorter of its fetch and its CPU time; only a fetched expert can stay, so one that
    stays where the CPU would have been shorter pays the difference. The plan minimises the sum over all misses:
    it bounds lane time added up, not the makespan of steps whose lanes overlap. It holds for caches that are
    filled by demand alone (`policies.bounds`), and for an assignment that sends a declined miss to the CPU where
    that is shorter, and the others to the GPU; the cache does not decide that.

    A fetch takes time in proportion to the expert's bytes. Every use counts as one token, because the future that
    oracles see holds no workloads; for prefill or batches price the uses with `policies.bounds.miss_costs` and
    call `best_stays`.

    Args:
        cpu: CPU time of one expert as a share of its fetch time. From 1 on a miss is always fetched; with equal sizes
            that is Belady with bypass, except that this plan knows no holds. At 0 nothing is worth keeping.
    """

    def __init__(self, *, cpu: float = 1.0) -> None:
        expect(cpu >= 0.0, "cpu", ">= 0", cpu)
        self.cpu = cpu

    def uses(self, place: np.ndarray, key: np.ndarray, slots: int, context: RunContext) -> tuple[Uses, float]:
        """Price by bytes relative to the largest expert; room in bytes likewise."""
        bytes_of = np.array(context.shape.expert_bytes, np.float64) / context.shape.max_expert_bytes
        size = bytes_of[key // context.shape.experts]
        cost, entry = miss_costs(size, self.cpu * size)
        if len(context.capacity_slots) > 1:
            size = np.ones(len(key))
        return Uses(place, key, size, cost, entry), float(slots)
