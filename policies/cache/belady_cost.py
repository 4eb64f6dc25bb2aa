"""The bound when a miss may be computed on the CPU instead of fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.cache._offline_bounds import (
    OfflineOptimalCache,
    Uses,
    miss_costs,
    sizes_in_slots,
)
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.hwprofiles.costs import Costs
    from moesim.policies.run_context import RunContext
    from moesim.traces.format.schema import ModelShape


class BeladyCost(OfflineOptimalCache):
    """Follow the plan that spends the least lane time on misses, each fetched or
    computed on the CPU.

    A miss costs the shorter of its fetch and its CPU time for the tokens it has; only a
    fetched expert can stay, so one that stays where the CPU would have been shorter
    pays the difference. The plan minimises the sum over all misses: it bounds lane time
    added up, not the makespan of steps whose lanes overlap. It holds for caches that
    are filled by demand alone (`moesim.policies.cache._offline_bounds`), and for an
    assignment that sends a declined miss to the CPU where that is shorter, and the
    others to the GPU; the cache does not decide that.

    Args:
        cpu: CPU time of one token as a share of the fetch time, which then goes by the
            expert's bytes. None takes both from this machine: the copy, and what the
            CPU takes longer than the GPU would; reads from an SSD and the extra seconds
            of a layer's first CPU expert are left out. A cache that is driven alone has
            no machine: there None is 1, where one token is always fetched; with equal
            sizes that is `belady-size`. At 0 nothing is worth keeping.
        growth: what each further token adds to `cpu`, as a share of the first; 1 is
            proportional to the tokens, as Fiddler and HybriMoE model their CPUs.

    Source: ours, after FOO in `moesim.policies.cache._offline_bounds`.
    """

    def __init__(self, *, cpu: float | None = None, growth: float = 1.0) -> None:
        expect(cpu is None or cpu >= 0.0, "cpu", ">= 0 or none", cpu)
        expect(growth >= 0.0, "growth", ">= 0", growth)
        self.cpu = cpu
        self.growth = growth

    def uses(
        self,
        time: np.ndarray,
        key: np.ndarray,
        tokens: np.ndarray,
        slots: int,
        context: RunContext,
    ) -> tuple[Uses, float]:
        """Price in seconds of this machine, or by bytes relative to the largest expert;
        capacity in bytes likewise.
        """
        shape = context.shape
        if self.cpu is None and context.costs is not None:
            fetch, cpu = _seconds(key, tokens, context.costs, shape)
        else:
            share = 1.0 if self.cpu is None else self.cpu
            growth = 1.0 + self.growth * (tokens - 1.0)
            sizes = np.array(shape.sizes_by_expert(), np.float64).reshape(-1)
            fetch = sizes[key] / shape.max_expert_bytes
            cpu = share * fetch * growth
        cost, entry = miss_costs(fetch, cpu)

        uses = Uses(
            time=time,
            key=key,
            size=sizes_in_slots(key, context),
            cost=cost,
            entry=entry,
        )
        return uses, float(slots)


def _seconds(
    key: np.ndarray,
    tokens: np.ndarray,
    costs: Costs,
    shape: ModelShape,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds beyond a hit's of every use, float64 [U]: fetched, and on the CPU."""
    layer = key // shape.experts
    # Tables of costs take a moment to import, which a list of policies need not.
    from moesim.hwprofiles.costs import seconds_by_expert  # noqa: PLC0415

    fetch_s = seconds_by_expert(shape, costs.copy_s).reshape(-1)[key]
    cpu_s = np.empty(len(key))
    # Costs are asked layer by layer, as layers may have experts of unequal size.
    for number in np.unique(layer).tolist():
        members = layer == number
        workload = tokens[members]
        which = {}
        if shape.bytes_by_expert:
            which["experts"] = key[members] % shape.experts
        on_cpu_s = costs.cpu_s(number, workload, **which)
        on_gpu_s = costs.gpu_s(number, workload, **which)
        cpu_s[members] = np.maximum(0.0, on_cpu_s - on_gpu_s)
    return fetch_s, cpu_s
