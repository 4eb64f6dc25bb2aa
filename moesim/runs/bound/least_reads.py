"""The least reads from host memory that any cache of a size needs: Belady with bypass.

A layer step uses several experts in any order, so the cache is cut back to its size
only after the step: whatever a real cache holds then is a subset of what it held before
and what the step used. This can only lower the count.

N layer steps with A uses in all, an expert being used once in a step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.traces.format.batch import RoutedStep


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
    return _misses(edges, numbers.astype(np.int64, copy=False), size)


@compiled(nb.int64(input_array(nb.int64), input_array(nb.int64), nb.int64))
def _misses(edges: np.ndarray, keys: np.ndarray, size: int) -> int:
    """The same; keys are numbers from 0 on."""
    steps = len(edges) - 1
    uses = len(keys)
    experts = 0
    for a in range(uses):
        experts = max(experts, keys[a] + 1)
    following = np.empty(uses, np.int64)
    next_step = np.full(experts, steps)
    for n in range(steps):
        at = steps - 1 - n
        for a in range(edges[at], edges[at + 1]):
            following[a] = next_step[keys[a]]
        for a in range(edges[at], edges[at + 1]):
            next_step[keys[a]] = at

    # Step of the next use of what is cached, -1 of what is not.
    cached = np.full(experts, -1)
    held = 0
    misses = 0
    # A heap, latest use first. An entry is stale once its expert was used again.
    heap_step = np.empty(uses, np.int64)
    heap_key = np.empty(uses, np.int64)
    entries = 0
    for at in range(steps):
        for a in range(edges[at], edges[at + 1]):
            key = keys[a]
            if cached[key] < 0:
                misses += 1
                held += 1
            cached[key] = following[a]
            _push(heap_step, heap_key, entries, following[a], key)
            entries += 1
        while held > size:
            latest = heap_step[0]
            victim = heap_key[0]
            entries -= 1
            _pop(heap_step, heap_key, entries)
            if cached[victim] == latest:
                cached[victim] = -1
                held -= 1
    return misses


@compiled
def _push(
    heap_step: np.ndarray, heap_key: np.ndarray, entries: int, step: int, key: int
) -> None:
    """Add an entry to a heap of so many."""
    place = entries
    while place and heap_step[(place - 1) // 2] < step:
        above = (place - 1) // 2
        heap_step[place] = heap_step[above]
        heap_key[place] = heap_key[above]
        place = above
    heap_step[place] = step
    heap_key[place] = key


@compiled
def _pop(heap_step: np.ndarray, heap_key: np.ndarray, entries: int) -> None:
    """Drop the first entry of a heap that keeps so many."""
    step = heap_step[entries]
    key = heap_key[entries]
    place = 0
    while 2 * place + 1 < entries:
        below = 2 * place + 1
        if below + 1 < entries and heap_step[below + 1] > heap_step[below]:
            below += 1
        if heap_step[below] <= step:
            break
        heap_step[place] = heap_step[below]
        heap_key[place] = heap_key[below]
        place = below
    heap_step[place] = step
    heap_key[place] = key


# -- host memory -----------------------------------------------------------------------
# The least seconds of a measured run: bytes that host memory must deliver.
#
# The processor's own caches are caches in the sense of the theorem: what lies in them
# need not be read from memory. Belady's least reads for a cache of their size, times
# the bytes of an expert, over the highest rate at which memory can be read, is
# therefore less than any run takes. Proof: `docs/explanation/bound.md`, "Real runs".


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """The least seconds that reading host memory takes.

    Attributes:
        seconds: the bound.
        reads: of an expert's size, that no cache avoids.
        accesses: uses of experts, and of other weights in pieces of that size.
        bytes_per_s: highest rate at which the memory can be read.
        cache_bytes: of the processor's caches, and of a card's slots.
    """

    seconds: float
    reads: int
    accesses: int
    bytes_per_s: float
    cache_bytes: int

    def share(self, makespan_s: float) -> float:
        """Return the part of the possible speed that a run reached."""
        return self.seconds / makespan_s if makespan_s else 1.0

    def words(self, makespan_s: float) -> str:
        """Put a run's distance in words."""
        share = 100 * self.share(makespan_s)
        return (
            f"at {share:.0f} % of what reading host memory at"
            f" {self.bytes_per_s / 1e9:.1f} GB/s allows at best ({self.reads:,} of"
            f" {self.accesses:,} reads cannot be avoided)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


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
