"""Base of oracles that solve before the run which expert stays after each use, and then
follow that plan.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.base import CachePolicy, PolicyError
from moesim.policies.cache._offline_bounds import Stays, Uses, best_stays

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

# 115,200 uses took 8 s on one core, and 46 s where beginnings cost extra (measured).
MOST_USES = 120_000
"""Uses that one pool may have."""


class OfflineOptimalCache(CachePolicy):
    """Follows `best_stays`; subclasses price the uses in `uses`.

    The plan may let an expert leave in the very step that uses it. The planner holds
    active experts, so a planned entry may find no slot; then the expert runs from
    staging and the run does worse than the plan (2 % fewer hits than planned on OLMoE,
    a quarter of each layer; 0.2 % in global scope). Content that was filled in before
    the run is not planned: it serves until it is evicted, so bounds hold for an empty
    start only.

    Attributes:
        stays: the solved pools, one per layer or one in global scope.
    """

    oracle: ClassVar[bool] = True
    stays: list[Stays]

    def start(self, context: RunContext) -> None:
        """Solve every pool.

        Raises:
            PolicyError: the future is not available, or too long.
        """
        future = context.future
        if future is None:
            raise PolicyError(
                f"cache policy {self._label!r} must see the future; only a replay of a"
                " whole trace has one"
            )

        # All uses of the run, in order: a time is a step, then a layer.
        layers = context.shape.layers
        experts = context.shape.experts
        step_layers = [divmod(time, layers) for time in range(future.never * layers)]
        active = [future.active(step, layer) for step, layer in step_layers]
        workloads = [future.tokens(step, layer) for step, layer in step_layers]
        lengths = [len(experts_of_time) for experts_of_time in active]
        # Uses of time t are numbered from edge t to edge t + 1.
        self._edges = np.zeros(len(active) + 1, np.int64)
        self._edges[1:] = np.cumsum(lengths)
        time = np.repeat(np.arange(len(active)), np.diff(self._edges))
        # The empty array in front keeps a run without any layer step legal.
        empty = np.empty(0, np.int32)
        ids = np.concatenate([empty, *active])
        tokens = np.concatenate([empty, *workloads])

        self._layers = layers
        layer_of = time % layers
        self._keys = layer_of * experts + ids.astype(np.int64)
        self._plan = np.zeros(len(self._keys), np.bool_)
        self._keep = np.zeros(layers * experts, np.bool_)

        if len(context.capacity_slots) == 1:
            pools = [np.arange(len(time))]
        else:
            pools = [np.flatnonzero(layer_of == layer) for layer in range(layers)]

        self.stays = []
        capacities = context.capacity_slots.tolist()
        for slots, members in zip(capacities, pools, strict=True):
            if len(members) > MOST_USES:
                raise PolicyError(
                    f"cache policy {self._label!r}: {len(members)} uses in one pool,"
                    f" at most {MOST_USES} can be solved; cut the replay with --steps"
                )
            uses, capacity = self.uses(
                time=time[members],
                key=self._keys[members],
                tokens=tokens[members],
                slots=slots,
                context=context,
            )
            stays = best_stays(uses, capacity)
            self.stays.append(stays)
            self._plan[members] = stays.kept

    @property
    def _label(self) -> str:
        """Its registered name; the class's where it was made without the registry."""
        return self.name or type(self).__name__

    @abstractmethod
    def uses(
        self,
        time: np.ndarray,
        key: np.ndarray,
        tokens: np.ndarray,
        slots: int,
        context: RunContext,
    ) -> tuple[Uses, float]:
        """Price the uses of one pool, `time`, `key` int64 [U], `tokens` int32 [U];
        return them and the pool's capacity.
        """

    def accessed(self, work: LayerWork) -> None:
        """Look up which of the active experts stay."""
        time = work.step * self._layers + work.layer
        span = slice(*self._edges[time : time + 2])
        self._keep[self._keys[span]] = self._plan[span]

    def admits(
        self,
        work: LayerWork,
        incoming: np.ndarray,
    ) -> np.ndarray:
        """Admit what is to stay."""
        del work
        return self._keep[incoming]

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Evict what is not to stay, lower ids first; decline when nothing is left."""
        is_spare = ~self._keep[candidates]
        spare = candidates[is_spare][: len(incoming)]
        chosen = np.full(len(incoming), -1, np.int64)
        chosen[: len(spare)] = spare
        return chosen
