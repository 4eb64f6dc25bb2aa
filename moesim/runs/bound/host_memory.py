"""The least seconds of a measured run: bytes that host memory must deliver.

The processor's own caches are caches in the sense of the theorem: what lies in them
need not be read from memory. Belady's least reads for a cache of their size, times the
bytes of an expert, over the highest rate at which memory can be read, is therefore less
than any run takes. Proof: `docs/explanation/bound.md`, "Real runs".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.runs.bound.least_reads import flattened, least_reads

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.traces.format.batch import RoutedStep


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
