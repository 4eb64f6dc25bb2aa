"""What the planner hands to a world: lanes, launch order and copies of one layer step;
and how a run is set up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from moesim.policies.base import (
        AssignmentPolicy,
        CachePolicy,
        Policy,
        PrefetchPolicy,
        RoutingPolicy,
    )
    from moesim.policies.planner.records import LayerWork, Precompute, Swap
    from moesim.policies.planner.residency import CacheSize

FETCH = 3
PREFETCH = 4
REPLACE = 5
READ = 6
"""Kinds of copies, equal to the timeline's; lower goes first on a link."""

LAYERS = "layers"
EXPERTS = "experts"
"""Readings of several GPUs: each layer lives on one of them, or each layer's experts on
all.
"""


class Launch(NamedTuple):
    """Where the active experts of a layer step are computed, checked.

    Attributes:
        lanes: int8 [A], CPU (0) or 1 + GPU index.
        order: int [A], positions in launch order.
        serial: the CPU waits for the GPUs' fetched experts.
        waits: GPU products wait for every copy of the layer.
        deferred: int32, experts whose results join one layer later.
    """

    lanes: np.ndarray
    order: np.ndarray
    serial: bool
    waits: bool
    deferred: np.ndarray


class Copies(NamedTuple):
    """Copies of one kind to one memory, in queue order. None of them has started.

    Attributes:
        kind: FETCH, PREFETCH or REPLACE to a GPU; READ to host memory only (for the
            CPU).
        gpu: destination; -1 for READ.
        layer: MoE layer of all of them.
        experts: expert ids.
        read: whether each must first be read from the SSD into host memory. Where it is
            false, the expert is in host memory or already on its way there.
    """

    kind: int
    gpu: int
    layer: int
    experts: list[int]
    read: list[bool]


@dataclass(slots=True)
class Plan:
    """What the lanes do for one layer step.

    Attributes:
        work: what the layer step asks for.
        lanes: int8 [A], CPU (0) or 1 + GPU index.
        order: positions in launch order.
        copies: what is to be queued, demand first.
        promoted: (GPU, expert) of queued replacements that this layer step waits for;
            they go before its demand fetches.
        copied: experts that `copies` and `promoted` bring from one memory to another.
        planning_s: seconds that planning is charged.
        serial: the CPU waits for the GPUs' fetched experts.
        waits: GPU products wait until every copy of the layer has landed; staging can
            hold them all.
        dense_parts: dense parts of coming layers that the home GPU evaluates behind its
            residents' products, to predict; prefetches start after them.
        swaps: replacements by GPU, wished for when the layer has joined.
        released: (GPU, expert), active residents that replacements of this very layer
            step evict; nobody holds them.
        precompute: experts of the next layer that the CPU starts after its own.
        precompute_s: seconds of each.
        deferred: experts that the CPU computes last, and whose results join one layer
            later.
    """

    work: LayerWork
    lanes: np.ndarray
    order: list[int]
    copies: list[Copies]
    promoted: list[tuple[int, int]]
    copied: int
    planning_s: float
    serial: bool = False
    waits: bool = False
    dense_parts: int = 0
    swaps: list[tuple[int, Swap]] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    precompute: Precompute | None = None
    precompute_s: list[float] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Policies:
    """One instance of each policy that a run needs; one cache policy per memory.

    `writes_back`: experts that leave a GPU's cache are copied to host memory, as their
    system does it; see `System`, for `fixed_graph` and `draft_experts` too.
    """

    assignment: AssignmentPolicy
    prefetch: PrefetchPolicy
    caches: list[CachePolicy]
    routing: RoutingPolicy
    host_cache: CachePolicy | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    writes_back: bool = False
    fixed_graph: bool = False
    draft_experts: int = 1

    def all(self) -> list[Policy]:
        """Every instance."""
        policies: list[Policy] = [
            self.assignment,
            self.prefetch,
            *self.caches,
            self.routing,
        ]
        if self.host_cache is not None:
            policies.append(self.host_cache)
        return policies

    def remarks(self) -> list[str]:
        """What the policies have to say about a run that has ended, without repeats."""
        lines = [line for policy in self.all() for line in policy.remarks()]
        return list(dict.fromkeys(lines))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How much of each memory experts may use.

    Attributes:
        gpu: cache size of each GPU.
        host: host memory in front of the SSD; None if it holds every expert.
        staging: staging slots beside each GPU cache (and beside host memory when that
            is limited).
        prefetch_budget_bytes: most bytes prefetched per layer step; None for no limit.
        gpu_split: with several GPUs, ``layers`` or ``experts``.
        unified: GPU and CPU compute from one memory, which holds every expert from the
            start.
    """

    gpu: CacheSize
    host: CacheSize | None = None
    staging: int = 2
    prefetch_budget_bytes: int | None = None
    gpu_split: str = LAYERS
    unified: bool = False
