"""The least seconds that any schedule of some forward passes takes on a machine.

Theorem (proof: `docs/explanation/bound.md`). Let A accesses (one expert in one layer
step) be served by a machine with g GPUs whose caches hold S experts, and let R be the
misses of Belady's MIN with bypass. Whatever is computed where and copied when,

    T >= min over m of max(C(m), X(R - m) / g, y C(m) + X(R - m) / g,
                           F(m, 0), F(m, z) + z X(R - m))

where m accesses are computed on the CPU; C(m) and X(n) are the sums of the m or n
smallest times of a product on the CPU and of a copy. F(m, z) goes layer step by layer
step, as they follow each other: its dense part, planning, the first launch and the join
in full, and the least that its experts can take if the CPU computes some of them, such
that in all steps together it computes m. The CPU and the links read one memory: y and
z, at most 1 and 1/g, follow from what they slow each other (`_shared_memory`), and
F(m, z) counts what keeps no CPU busy only by 1 - g z.

Prefetching, admission, eviction and overlap are free in it; only the number of reads,
the lanes' rates and the order of layer steps count.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.hwprofiles.costs import seconds_by_expert
from moesim.policies.names import RESIDENT
from moesim.policies.sizes import GLOBAL
from moesim.runs.bound_loops import count_misses, least_of_steps
from moesim.runs.setup import Setup, trace_of
from moesim.traces.format.layer_steps import join, layer_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.engine.planner import Planner
    from moesim.hwprofiles.costs import Costs, Overlap
    from moesim.policies.sizes import CacheSize, MemoryPlan
    from moesim.runs.config import RunConfig
    from moesim.traces.format.batch import LayerSteps, RoutedStep
    from moesim.traces.format.reader import Trace

# Names of the resources in answers.
CPU = "CPU"
LINK = "link"
HOST_MEMORY = "host memory"
ORDER = "order of layer steps"
IN_WORDS = {ORDER: "layer steps, which wait for each other"}
SSD = "SSD"


@dataclass(frozen=True, slots=True)
class Least:
    """Seconds below which nothing gets.

    Attributes:
        seconds: the bound.
    """

    seconds: float

    def share(self, makespan_s: float) -> float:
        """Return the part of the possible speed that a run reached, at most 1."""
        return self.seconds / makespan_s if makespan_s else 1.0

    def to_json(self, makespan_s: float) -> dict[str, Any]:
        """Return all fields, and the share of a run."""
        return asdict(self) | {"share": self.share(makespan_s)}


@dataclass(frozen=True, slots=True)
class Bound(Least):
    """The least seconds that any schedule takes.

    Attributes:
        resource: what limits it.
        by_resource: seconds that each resource forces at the best split.
        accesses: A.
        least_reads: R, experts that must be read from host memory.
        cpu_accesses: m, accesses on the CPU at the best split.
    """

    resource: str
    by_resource: dict[str, float]
    accesses: int
    least_reads: int
    cpu_accesses: int

    def words(self, makespan_s: float) -> str:
        """Put a run's distance in words."""
        share = 100 * self.share(makespan_s)
        reads = f"{self.least_reads:,} of {self.accesses:,} expert reads"
        limit = IN_WORDS.get(self.resource, self.resource)
        return (
            f"at {share:.0f} % of what this machine can do at best, limited by the"
            f" {limit} ({reads} happen under any schedule)"
        )


def least_seconds(
    blocks: Iterable[LayerSteps],
    costs: Costs,
    memory: MemoryPlan,
    *,
    gpus: int = 1,
    warm: bool = False,
    computes_ahead: bool = False,
    moves_results: bool = True,
) -> Bound:
    """Bound the seconds of any schedule of some forward passes.

    Args:
        blocks: what was asked for; their order is the order of layer steps.
        costs: seconds of single operations, and what CPU and links cost each other.
            Other contention and planning only add.
        memory: sizes of the caches; staging holds nothing for a second use.
        gpus: of the machine.
        warm: a run may begin with any content in its caches.
        computes_ahead: the CPU may compute experts before their layer step begins, or
            after it has ended.
        moves_results: the CPU's results have a way to the GPU.
    """
    steps = join(list(blocks))
    layer = np.repeat(steps.layer, np.diff(steps.edges))
    accesses = len(layer)
    cpu_s, gpu_s, copy_s = _of_accesses(steps, layer, costs)
    serial_s = _serial_s(steps, costs, computes_ahead=computes_ahead)
    back_s = _back_s(steps.rows, costs) if moves_results else np.zeros(len(steps.rows))
    firsts_s = np.array([costs.cpu_first_s, costs.gpu_first_s / gpus])

    def in_order(share: float) -> np.ndarray:
        """Seconds of layer steps that follow each other by accesses on the CPU, 0 to
        all: float64, convex, not falling; what keeps no CPU busy counts by `share`.
        """
        firsts = firsts_s * np.array([1.0, share])
        # Work ahead of its gate leaves its layer step, which may have none left.
        inside = 0.0 if computes_ahead else 1.0
        further_s = np.empty(accesses)
        least_s, free, count = least_of_steps(
            np.ascontiguousarray(steps.edges, np.int64),
            inside * cpu_s,
            share * gpu_s / gpus,
            inside * firsts,
            inside * share * back_s,
            further_s,
        )
        # The cheapest first, whichever layer steps they belong to.
        sums = _sums_of_smallest(further_s[:count])
        beyond = np.maximum(0, np.arange(accesses + 1) - free)
        return share * serial_s + least_s + sums[np.minimum(beyond, len(sums) - 1)]

    shape = costs.shape
    sizes = shape.expert_bytes, shape.bytes_by_expert
    keys = layer * shape.experts + steps.experts

    def reads_of(slots: np.ndarray, *, shared: bool) -> int:
        return least_reads(
            steps.layer, steps.edges, keys, slots, shared=shared, warm=warm
        )

    slots = gpus * most_experts(memory.gpu, *sizes)
    reads = reads_of(slots, shared=memory.gpu.scope == GLOBAL)
    cpu_sum = _sums_of_smallest(cpu_s)
    copy_sum = _sums_of_smallest(copy_s)
    cpu_weight, copy_weight = _shared_memory(costs.overlap, gpus)
    alone = in_order(1.0)
    # What keeps no CPU busy counts in full, or by what copies beside it leave.
    beside_copies = in_order(max(0.0, 1.0 - gpus * copy_weight))

    def lanes(on_cpu: int) -> dict[str, float]:
        on_cpu_s = float(cpu_sum[on_cpu])
        copies_s = float(copy_sum[max(0, reads - on_cpu)])
        return {
            # Of equal ones the first is named.
            ORDER: float(alone[on_cpu]),
            CPU: on_cpu_s,
            LINK: copies_s / gpus,
            HOST_MEMORY: max(
                float(beside_copies[on_cpu]) + copy_weight * copies_s,
                cpu_weight * on_cpu_s + copies_s / gpus,
            ),
        }

    def latest_s(on_cpu: int) -> float:
        return max(lanes(on_cpu).values())

    # All of them are convex, so the latest of them falls, then rises.
    counts = range(accesses)
    split = bisect_left(counts, x=True, key=lambda m: latest_s(m) <= latest_s(m + 1))
    by_resource = lanes(split)

    if memory.host is not None:
        # An expert in either memory needs no read; one pool of both is the best case.
        host_slots = most_experts(memory.host, *sizes)
        both = np.array([slots.sum() + host_slots.sum()])
        fastest_s = float(seconds_by_expert(shape, costs.read_s).min())
        by_resource[SSD] = reads_of(both, shared=True) * fastest_s

    resource = max(by_resource, key=lambda name: by_resource[name])
    return Bound(
        seconds=by_resource[resource],
        resource=resource,
        by_resource=by_resource,
        accesses=accesses,
        least_reads=reads,
        cpu_accesses=split,
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


def _of_accesses(
    steps: LayerSteps, layer: np.ndarray, costs: Costs
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least seconds of every access on the CPU, on a GPU and as a copy, float64 [A]."""
    cpu_s = np.empty(len(layer))
    gpu_s = np.empty(len(layer))
    for each in np.unique(steps.layer).tolist():
        at = layer == each
        tokens = steps.tokens[at]
        experts = steps.experts[at]
        cpu_s[at] = costs.cpu_s(each, tokens, experts)
        gpu_s[at] = costs.gpu_s(each, tokens, experts=experts)
    copy_s = seconds_by_expert(costs.shape, costs.copy_s)[layer, steps.experts]
    # Warm processor caches can make what follows an SSD read faster than usual.
    cpu_s *= min(1.0, costs.after_read("cpu"))
    copy_s *= min(1.0, costs.after_read("h2d"))
    dispatch_s = costs.dispatch_s
    return cpu_s + dispatch_s, gpu_s + dispatch_s, copy_s + dispatch_s


def _serial_s(steps: LayerSteps, costs: Costs, *, computes_ahead: bool) -> float:
    """Dense parts, planning, first launch and join of all layer steps."""
    layers = costs.shape.layers
    last = np.flatnonzero(steps.layer == layers - 1)
    dense_s, head_s = costs.dense_of_passes(
        steps.pass_tokens[last], steps.context_tokens[last], steps.sequences[last]
    )
    dense_factor = min(1.0, costs.after_read("dense"))
    counts = np.diff(steps.edges)
    each_s = costs.least_planning_s(counts)
    parts = [costs.join_terms()]
    if not computes_ahead:
        parts.append(costs.first_op_terms())
    for base_s, per_expert_s, *_ in parts:
        each_s = each_s + base_s + per_expert_s * counts
    return float(head_s.sum() + layers * dense_factor * dense_s.sum() + each_s.sum())


def _back_s(rows: np.ndarray, costs: Costs) -> np.ndarray:
    """What results of the CPU take to the GPU, float64 [N], by tokens."""
    seconds_of = np.zeros(int(rows.max()) + 1)
    for tokens in np.unique(rows).tolist():
        seconds_of[tokens] = costs.activation_s(tokens)
    return seconds_of[rows]


def _shared_memory(overlap: Overlap, gpus: int) -> tuple[float, float]:
    """Weights y and z such that ``T >= C + z X`` and ``T >= y C + X / gpus``, of C
    seconds on the CPU and X on all links, each as long as it takes alone.

    While k links copy, the CPU does 1 / cpu**k of a second's work in a second, and
    each link 1 / link. The weighted sum of what all do is at most one in every state.

    Source: the dual of "least time in which both are done", a linear programme over
    the states; proof in `docs/explanation/bound.md`.
    """
    busy = np.arange(1, gpus + 1)
    copy_weight = min(
        1.0 / gpus, float(np.min(overlap.link * (1.0 - overlap.cpu**-busy) / busy))
    )
    # With few links copying, the CPU gets on, as far as they leave of the time.
    idle_share = 1.0 - busy / (gpus * overlap.link)
    cpu_weight = min(1.0, float(np.min(overlap.cpu**busy * idle_share)))
    return max(0.0, cpu_weight), max(0.0, copy_weight)


def _sums_of_smallest(seconds: np.ndarray) -> np.ndarray:
    """Sums of the n smallest, float64 [A + 1]."""
    return np.concatenate([[0.0], np.cumsum(np.sort(seconds))])


# -- of replay -------------------------------------------------------------------------
# The bound of one replay: its trace, machine and memories, as commands name them.

# Belady's choice takes 0.1 µs per access; more would delay an answer.
MOST_ACCESSES = 10_000_000


def replay_bound(
    setup: Setup, trace: Trace, planner: Planner | None = None
) -> Bound | None:
    """Bound what a replay of a trace can reach with its memories on its machine.

    Args:
        setup: of the replay.
        trace: that it walks through.
        planner: of the replay, before it begins; None to make one.

    Returns:
        The bound; None where the routing policy alters what is asked for, where
        requests arrive over time, or where the trace is empty or too long to bound
        while somebody waits.
    """
    config = setup.config
    if config.arrivals is not None:
        return None
    # About: a prompt has many tokens in one pass.
    rows = trace.rows
    if config.steps is not None:
        rows = min(rows, config.steps * config.batch * trace.shape.layers)
    if not 0 < rows * trace.shape.top_k <= MOST_ACCESSES:
        return None
    planner = setup.planner() if planner is None else planner
    policies = planner.policies
    if policies.routing.alters:
        return None
    warm = any((np.asarray(memory.state) == RESIDENT).any() for memory in planner.gpu)
    # Either way a layer step does not wait for all that the CPU does for it.
    ahead = policies.assignment.precomputes or policies.assignment.defers
    return least_seconds(
        layer_steps(trace, batch=setup.config.batch, steps=setup.config.steps),
        planner.costs,
        setup.memory,
        gpus=setup.profile.gpus,
        # What a limited host memory begins with is not looked at: any content.
        warm=warm or planner.host is not None,
        computes_ahead=ahead,
        moves_results=not setup.profile.shares_memory,
    )


def bound_of(config: RunConfig) -> Bound | None:
    """Bound a replay by its configuration; see `replay_bound`."""
    trace = trace_of(config)
    return replay_bound(Setup.of(config, trace), trace)


# -- bandwidths ------------------------------------------------------------------------
# The theorem with bytes over bandwidth: what a routing allows on a specification.
#
# Times of single operations are bytes over a rate, so only sizes, rates and the least
# reads count. Proof: `docs/explanation/bound.md`, "Bytes over bandwidth".

HOST = "host memory"
DEVICE = "GPU memory"


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Highest rates of a machine, bytes per second.

    Attributes:
        host: reads of host memory, by CPU and link together.
        link: copies to the cards.
        device: reads of graphics memory, all cards together.
    """

    host: float
    link: float
    device: float


@dataclass(frozen=True, slots=True)
class RoutingBound:
    """The least seconds of some steps, wherever experts are kept and computed.

    Attributes:
        seconds: of all steps together.
        resource: what sets it.
        steps: how many.
        reads: experts that must be read from host memory.
        accesses: experts used.
    """

    seconds: float
    resource: str
    steps: int
    reads: int
    accesses: int

    @property
    def steps_per_s(self) -> float:
        """Speed that nothing can beat."""
        return self.steps / self.seconds


def routing_bound(
    sizes: Sequence[int],
    reads: int,
    steps: int,
    other_bytes: float,
    rates: Bandwidths,
) -> RoutingBound:
    """Bound the seconds of some decode steps by the best split of their accesses.

    Args:
        sizes: bytes of every expert used, one entry per access.
        reads: the least reads from host memory.
        steps: number of decode steps.
        other_bytes: read from graphics memory in each step.
        rates: of the machine.
    """
    # The smallest ones first, wherever they are served: no split has fewer bytes.
    ascending = np.sort(np.asarray(sizes))
    least_bytes = np.concatenate([[0], np.cumsum(ascending)])
    on_cpu = np.arange(len(sizes) + 1)
    copies = np.maximum(0, reads - on_cpu)

    # Whoever reads it, what no cache holds crosses the memory's wires.
    from_host = np.maximum(least_bytes, least_bytes[reads])
    on_device = steps * other_bytes + least_bytes[::-1]
    lanes = {
        HOST: from_host / rates.host,
        LINK: least_bytes[copies] / rates.link,
        DEVICE: on_device / rates.device,
    }
    latest = np.maximum.reduce(list(lanes.values()))
    split = int(latest.argmin())
    resource = max(lanes, key=lambda name: float(lanes[name][split]))
    return RoutingBound(
        seconds=float(latest[split]),
        resource=resource,
        steps=steps,
        reads=reads,
        accesses=len(sizes),
    )


# -- the least reads of any cache ------------------------------------------------------
# The least reads from host memory that any cache of a size needs: Belady with bypass.
#
# A layer step uses several experts in any order, so the cache is cut back to its size
# only after the step: whatever a real cache holds then is a subset of what it held
# before and what the step used. This can only lower the count.
#
# N layer steps with A uses in all, an expert being used once in a step.


def least_reads(
    layer: np.ndarray,
    edges: np.ndarray,
    keys: np.ndarray,
    slots: np.ndarray,
    *,
    shared: bool,
    warm: bool = False,
) -> int:
    """Count the reads that no cache of this size avoids.

    Args:
        layer: int64 [N], of each layer step in order.
        edges: int64 [N + 1]; layer step i has the uses ``edges[i]:edges[i + 1]``.
        keys: int64 [A], flat keys of the experts.
        slots: experts that fit, int [L] or [1].
        shared: one pool for all layers.
        warm: the cache may begin with any content, which saves a read per slot.
    """
    counts = np.diff(edges)
    # Layers with caches of their own do not compete for slots.
    pools = np.zeros_like(layer) if shared else layer
    pool_of_use = np.repeat(pools, counts)

    reads = 0
    single = shared or len(slots) == 1
    for pool in np.unique(pools).tolist():
        size = int(slots[0 if single else pool])
        sizes = counts[pools == pool]
        uses = keys[pool_of_use == pool]
        misses = min_with_bypass(_edges(sizes), uses, size)
        if warm:
            misses = max(0, misses - size)
        reads += misses
    return reads


def flattened(
    steps: Iterable[tuple[int, Sequence[int]]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Layers, edges and keys of layer steps, each a layer and the experts it uses."""
    layers: list[int] = []
    uses: list[np.ndarray] = []
    for layer, experts in steps:
        layers.append(layer)
        uses.append(np.asarray(experts, np.int64))
    experts_used = np.concatenate([np.zeros(0, np.int64), *uses])
    # Ids may be negative; equal ones of two layers are two experts.
    least = int(experts_used.min(initial=0))
    width = int(experts_used.max(initial=0)) - least + 1
    layer_of = np.array(layers, np.int64)
    sizes = np.array([len(each) for each in uses], np.int64)
    keys = experts_used - least + width * np.repeat(layer_of, sizes)
    return layer_of, _edges(sizes), keys


def _edges(sizes: np.ndarray) -> np.ndarray:
    edges = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=edges[1:])
    return edges


def min_with_bypass(edges: np.ndarray, keys: np.ndarray, size: int) -> int:
    """Count misses of the cache that keeps what is used again soonest.

    Args:
        edges: int64 [N + 1], of one pool.
        keys: int64 [A].
        size: experts that the cache holds between steps.

    Source: Belady 1966; with bypass, what was just used is a candidate for eviction.
    """
    _, numbers = np.unique(keys, return_inverse=True)
    return count_misses(edges, numbers.astype(np.int64, copy=False), size)


# -- host memory -----------------------------------------------------------------------
# The least seconds of a measured run: bytes that host memory must deliver.
#
# The processor's own caches are caches in the sense of the theorem: what lies in them
# need not be read from memory. Belady's least reads for a cache of their size, times
# the bytes of an expert, over the highest rate at which memory can be read, is
# therefore less than any run takes. Proof: `docs/explanation/bound.md`, "Real runs".


@dataclass(frozen=True, slots=True)
class MemoryBound(Least):
    """The least seconds that reading host memory takes.

    Attributes:
        reads: of an expert's size, that no cache avoids.
        accesses: uses of experts, and of other weights in pieces of that size.
        bytes_per_s: highest rate at which the memory can be read.
        cache_bytes: of the processor's caches, and of a card's slots.
    """

    reads: int
    accesses: int
    bytes_per_s: float
    cache_bytes: int

    def words(self, makespan_s: float) -> str:
        """Put a run's distance in words."""
        share = 100 * self.share(makespan_s)
        return (
            f"at {share:.0f} % of what reading host memory at"
            f" {self.bytes_per_s / 1e9:.1f} GB/s allows at best ({self.reads:,} of"
            f" {self.accesses:,} reads happen under any schedule)"
        )


def memory_bound(
    passes: Iterable[RoutedStep],
    expert_bytes: Sequence[int],
    bytes_per_s: float,
    *,
    cache_bytes: int,
    dense_bytes: int = 0,
    warm: bool = True,
) -> MemoryBound:
    """Bound the seconds of any run of some forward passes.

    Args:
        passes: what was asked for.
        expert_bytes: of one expert, by layer.
        bytes_per_s: highest rate at which host memory can be read.
        cache_bytes: what can be kept elsewhere from one use to the next.
        dense_bytes: of all other weights, read from host memory in each step.
        warm: the caches may begin with any content.
    """
    smallest = min(expert_bytes)
    # Whole records of the smallest size: fewer bytes than there really are.
    pieces = dense_bytes // len(expert_bytes) // smallest
    steps: list[tuple[int, list[int]]] = []
    accesses = 0
    for step in passes:
        for routed in step.layers:
            experts = routed.experts.tolist()
            # Negative ids cannot be those of experts.
            records = [*experts, *range(-pieces, 0)]
            accesses += len(records)
            steps.append((routed.layer, records))

    # A part of an expert may be kept: one more makes up for it.
    slots = np.array([-(-cache_bytes // smallest)])
    reads = least_reads(*flattened(steps), slots, shared=True, warm=warm)
    return MemoryBound(
        seconds=reads * smallest / bytes_per_s,
        reads=reads,
        accesses=accesses,
        bytes_per_s=bytes_per_s,
        cache_bytes=cache_bytes,
    )


def highest_read_rate(numbers: Mapping[str, Any]) -> float | None:
    """Return the highest probed rate of a profile's numbers; None without probes.

    A probe states its median; single reads are faster by chance, so the quartile above
    it counts.
    """
    rates = [
        quantity.value + (quantity.spread or 0.0)
        for path, quantity in numbers.items()
        if path.startswith("probes.host_read.")
    ]
    return max(rates, default=None)
