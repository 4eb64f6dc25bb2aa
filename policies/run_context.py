"""What policies are told once, before the first layer step.

L MoE layers, E routed experts per layer, A active experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from moesim.hwprofiles.costs import Costs
    from moesim.traces.format.schema import ModelShape

_Shared = TypeVar("_Shared")


class Evaluations(NamedTuple):
    """What a prediction costs the home GPU beyond the model's own work, in one layer
    step, in units of what a profile knows the seconds of.

    Attributes:
        gates: gates of coming layers, on this layer's input. They are part of its dense
            part, so planning waits for them.
        dense_parts: dense parts of coming layers (attention, gate, shared experts),
            computed behind the layer's resident experts. Prefetches start after them,
            and the layer step ends after them.
    """

    gates: int = 0
    dense_parts: int = 0


class Future(Protocol):
    """The whole routing of a replay, given only to policies that declare ``oracle =
    True``.
    """

    def next_use(self, step: int, layer: int, expert: int) -> int:
        """First step strictly after `step` in which this expert is active; a number
        past the end if never.
        """

    def next_uses(
        self,
        step: int,
        layer: int,
        experts: np.ndarray,
    ) -> np.ndarray:
        """int64, same shape as `experts`: `next_use` of each."""

    def active(self, step: int, layer: int) -> np.ndarray:
        """int32 [A], ascending: the experts that layer step will use; empty past the
        end.
        """

    def tokens(self, step: int, layer: int) -> np.ndarray:
        """int32 [A]: the tokens routed to each of `active`."""

    @property
    def never(self) -> int:
        """The number that stands for "never again"."""

    @property
    def experts(self) -> np.ndarray:
        """int32, the active experts of all layer steps in replay order."""

    @property
    def following(self) -> np.ndarray:
        """int32, by the same accesses: the step of that expert's next use."""

    @property
    def edges(self) -> np.ndarray:
        """int64: layer step ``step * layers + layer`` has the accesses from its own
        edge to the next.
        """


# Frozen, as all policies of a run are started with the same one.
@dataclass(frozen=True, slots=True)
class RunContext:
    """What is fixed for one run.

    Attributes:
        shape: the model.
        gpus: number of GPUs.
        capacity_slots: int [L] cache slots per layer (per-layer scope), or one entry
            (global scope).
        scope: ``layer`` or ``global``.
        seed: for policies that draw: ``random.Random(seed)`` or
            ``numpy.random.default_rng(seed)``.
        calibration: activation counts float64 [L, E] of a calibration trace, or None.
        future: only for oracles.
        extras: calibration artefacts by name (tables, trained networks).
        costs: what operations take on this machine; None where a cache is driven alone.
        served: bool [L], layers that this memory serves: some of them where the layers
            are divided among several GPUs; None for all.
        gpu: the GPU whose memory a cache serves; 0 for other policies.
        pool_bytes: int64 [L] or [1], bytes of each pool, as in `capacity_slots`; None
            where slots say everything. Experts of unequal layers fill a global pool by
            bytes: its one entry of `capacity_slots` counts the largest.
        shared: what policies of the run know together, by what describes it: see
            `share`.
    """

    shape: ModelShape
    gpus: int
    capacity_slots: np.ndarray
    scope: str
    seed: int = 0
    calibration: np.ndarray | None = None
    future: Future | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    costs: Costs | None = None
    served: np.ndarray | None = None
    gpu: int = 0
    pool_bytes: np.ndarray | None = None
    shared: dict[Any, Any] = field(default_factory=dict)

    def share(self, description: Any, make: Callable[[], _Shared]) -> _Shared:
        """What several policies of this run know together: made for the first that
        asks, the same for all that ask with an equal, hashable `description`.
        """
        if description not in self.shared:
            self.shared[description] = make()
        known: _Shared = self.shared[description]
        return known
