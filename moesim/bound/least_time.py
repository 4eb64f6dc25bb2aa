"""The least seconds that any schedule of some forward passes takes on a machine.

Theorem (proof: `docs/explanation/bound.md`). Let A accesses (one expert in one layer
step) be served by a machine whose GPU caches hold S experts, and let R be the misses of
Belady's MIN with bypass. Whatever is computed where and copied when,

    T >= min over m of max(C(m), X(R - m), (D + G(A - m)) / g)      (lanes)
    T >= sum over layer steps of dense + min over splits            (order)

where m accesses are computed on the CPU; C(m), G(n) and X(n) are the sums of the m or n
smallest times of a product on the CPU, on a GPU, of a copy; D is the dense work and g
the number of GPUs. With times of bytes over bandwidth this reads: the larger of device
bytes over device bandwidth and host bytes over the highest read rate of the host.

Prefetching, admission, eviction and overlap are free in it; only the number of reads,
the lanes' rates and the order of layer steps count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.bound.least_reads import LayerStep, least_reads
from moesim.hwprofiles.costs import seconds_by_expert
from moesim.policies.planner.residency import GLOBAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moesim.hwprofiles.costs import Costs
    from moesim.policies.planner.plan import MemoryPlan
    from moesim.policies.planner.residency import CacheSize
    from moesim.traces.format.batch import RoutedStep

# Names of the resources in answers.
CPU = "CPU"
LINK = "link"
GPU = "GPU"
ORDER = "order of layer steps"
SSD = "SSD"


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds that any schedule takes.

    Attributes:
        seconds: the bound.
        resource: what limits it.
        by_resource: seconds that each resource alone forces at the best split.
        accesses: A.
        least_reads: R, experts that must be read from host memory.
        cpu_accesses: m, accesses on the CPU at the best split.
    """

    seconds: float
    resource: str
    by_resource: dict[str, float]
    accesses: int
    least_reads: int
    cpu_accesses: int

    def share(self, makespan_s: float) -> float:
        """Return the part of the possible speed that a run reached, at most 1."""
        return self.seconds / makespan_s if makespan_s else 1.0

    def words(self, makespan_s: float) -> str:
        """Put a run's distance in words."""
        share = 100 * self.share(makespan_s)
        reads = f"{self.least_reads:,} of {self.accesses:,} expert reads"
        return (
            f"at {share:.0f} % of what this machine can do at best, limited by the"
            f" {self.resource} ({reads} cannot be avoided)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def least_seconds(
    passes: Iterable[RoutedStep],
    costs: Costs,
    memory: MemoryPlan,
    *,
    gpus: int = 1,
    warm: bool = False,
    computes_ahead: bool = False,
) -> Bound:
    """Bound the seconds of any schedule of some forward passes.

    Args:
        passes: what was asked for; their order is the order of layer steps.
        costs: seconds of single operations. Slower ones (contention, planning) add.
        memory: sizes of the caches; staging holds nothing for a second use.
        gpus: of the machine.
        warm: a run may begin with any content in its caches.
        computes_ahead: the CPU may compute experts before their layer step begins.
    """
    work = _Work(costs, gpus, computes_ahead=computes_ahead)
    for step in passes:
        work.add(step)

    shape = costs.shape
    sizes = shape.expert_bytes, shape.bytes_by_expert
    slots = gpus * most_experts(memory.gpu, *sizes)
    shared = memory.gpu.scope == GLOBAL
    least = least_reads(work.steps, slots, shared=shared, warm=warm)
    lanes, on_cpu = _best_split(work, least, gpus)
    by_resource = {**lanes, ORDER: work.ordered_s}

    if memory.host is not None:
        # An expert in either memory needs no read; one pool of both is the best case.
        host_slots = most_experts(memory.host, *sizes)
        both = np.array([slots.sum() + host_slots.sum()])
        reads = least_reads(work.steps, both, shared=True, warm=warm)
        fastest_s = float(seconds_by_expert(shape, costs.read_s).min())
        by_resource[SSD] = reads * fastest_s

    resource = max(by_resource, key=lambda name: by_resource[name])
    return Bound(
        seconds=by_resource[resource],
        resource=resource,
        by_resource=by_resource,
        accesses=work.accesses,
        least_reads=least,
        cpu_accesses=on_cpu,
    )


def most_experts(
    size: CacheSize,
    expert_bytes: Sequence[int],
    by_expert: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """Return how many experts a cache holds at most, int64 [L] or [1].

    A pool of bytes is taken to hold its smallest experts: then more fit, and fewer
    reads are called unavoidable.
    """
    if size.scope == GLOBAL:
        return size.pool_bytes // min(map(min, by_expert or [expert_bytes]))
    if by_expert:
        return size.pool_bytes // np.array([min(layer) for layer in by_expert])
    return size.slots


class _Work:
    """Least seconds of every access and layer step, collected in one walk."""

    def __init__(self, costs: Costs, gpus: int, *, computes_ahead: bool) -> None:
        self.costs = costs
        self.gpus = gpus
        self.computes_ahead = computes_ahead
        self.accesses = 0
        self.cpu_s: list[np.ndarray] = []
        self.gpu_s: list[np.ndarray] = []
        self.copy_s: list[np.ndarray] = []
        self.dense_s = 0.0
        self.ordered_s = 0.0
        self.steps: list[LayerStep] = []
        # Warm processor caches can make what follows an SSD read faster than usual.
        self.cpu_factor = min(1.0, costs.after_read("cpu"))
        self.dense_factor = min(1.0, costs.after_read("dense"))
        self.copy_factor = min(1.0, costs.after_read("h2d"))
        self.copy_of_s = seconds_by_expert(costs.shape, costs.copy_s)

    def add(self, step: RoutedStep) -> None:
        """Add one forward pass."""
        costs = self.costs
        dense_s = costs.dense_s(step.tokens, step.context_tokens, step.sequences)
        dense_s *= self.dense_factor
        head_s = costs.head_s(step.tokens, step.sequences)
        self.dense_s += head_s
        self.ordered_s += head_s

        for routed in step.layers:
            layer = routed.layer
            dispatch_s = costs.dispatch_s
            tokens = routed.tokens
            cpu_s = costs.cpu_s(layer, tokens, routed.experts) * self.cpu_factor
            cpu_s = cpu_s + dispatch_s
            gpu_s = costs.gpu_s(layer, tokens, experts=routed.experts)
            gpu_s = gpu_s + dispatch_s
            copy_s = self.copy_of_s[layer, routed.experts] * self.copy_factor
            copy_s += dispatch_s

            self.accesses += len(cpu_s)
            self.cpu_s.append(cpu_s)
            self.gpu_s.append(gpu_s)
            self.copy_s.append(copy_s)
            experts = routed.experts.tolist()
            self.steps.append((layer, experts))
            self.dense_s += dense_s
            self.ordered_s += dense_s
            # Work ahead of its gate leaves its layer step: the dense part binds alone.
            if not self.computes_ahead:
                self.ordered_s += least_makespan(cpu_s, gpu_s / self.gpus)


def least_makespan(cpu_s: np.ndarray, gpu_s: np.ndarray) -> float:
    """Return the least makespan of a layer step's experts if each may be divided.

    Moving an expert from the GPU to the CPU costs least where its CPU time is small for
    its GPU time; so in the order of that ratio a prefix is on the CPU, and at most one
    expert is cut (fractional knapsack). Whole experts can only take longer.

    Args:
        cpu_s: float [A], on the CPU.
        gpu_s: float [A], on the GPUs together.
    """
    order = np.argsort(cpu_s / gpu_s)
    cpu_sum = _prefix_sums(cpu_s[order])
    moved = _prefix_sums(gpu_s[order])
    gpu_sum = gpu_s.sum() - moved

    # The first prefix with which the CPU is the later one: the cut is just before.
    after = int(np.argmax(cpu_sum >= gpu_sum))
    if after == 0:
        return float(gpu_sum[0])
    cpu_before = cpu_sum[after - 1]
    gpu_before = gpu_sum[after - 1]
    more_cpu = cpu_sum[after] - cpu_before
    less_gpu = gpu_before - gpu_sum[after]
    share = (gpu_before - cpu_before) / (more_cpu + less_gpu)
    return float(cpu_before + share * more_cpu)


def _best_split(work: _Work, reads: int, gpus: int) -> tuple[dict[str, float], int]:
    """Choose how many accesses the CPU computes such that the latest lane is earliest.

    The CPU's time grows with that number, the others' fall, so the crossing is found by
    bisection.
    """
    cpu_sum = _sums_of_smallest(work.cpu_s)
    gpu_sum = _sums_of_smallest(work.gpu_s)
    copy_sum = _sums_of_smallest(work.copy_s)

    def lanes(on_cpu: int) -> dict[str, float]:
        copies = max(0, reads - on_cpu)
        on_gpu = work.accesses - on_cpu
        copies_s = float(copy_sum[copies])
        gpus_s = work.dense_s + float(gpu_sum[on_gpu])
        return {
            CPU: float(cpu_sum[on_cpu]),
            LINK: copies_s / gpus,
            GPU: gpus_s / gpus,
        }

    # Bisection, because a trace may have a million accesses.
    low = 0
    high = work.accesses
    while low < high:
        middle = (low + high) // 2
        times = lanes(middle)
        if times[CPU] >= max(times[LINK], times[GPU]):
            high = middle
        else:
            low = middle + 1
    nearby = {max(0, low - 1), low}
    best = min(nearby, key=lambda on_cpu: max(lanes(on_cpu).values()))
    return lanes(best), best


def _sums_of_smallest(seconds: Sequence[np.ndarray]) -> np.ndarray:
    """Sums of the n smallest, float64 [A + 1]."""
    # The empty array stands for a trace without accesses.
    values = np.concatenate([np.zeros(0), *seconds])
    return _prefix_sums(np.sort(values))


def _prefix_sums(values: np.ndarray) -> np.ndarray:
    """Sums of the first n, float64 [A + 1]."""
    sums = np.cumsum(values)
    return np.concatenate([[0.0], sums])
