"""Oracles that work out before the run which expert stays after each use, and then
follow the plan.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from moesim.policies.base import CachePolicy, PolicyError
from moesim.policies.cache._offline_bounds import Stays, Uses, best_stays

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

MOST_USES = 120_000
"""Uses that one pool may have: 115,200 took 8 s on one core, and 46 s where beginnings
cost extra (measured).
"""


class PlannedCache(CachePolicy):
    """Follows `best_stays`; subclasses price the uses in `uses`.

    The plan may let an expert leave in the very step that uses it. The planner holds
    active experts, so a planned entry may find no place; then the expert runs from
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
        layers = context.shape.layers
        experts = context.shape.experts
        name = type(self).__module__.rpartition(".")[2].replace("_", "-")
        if future is None:
            raise PolicyError(
                f"cache policy {name!r} must see the future; only a replay of a whole"
                " trace has one"
            )
        places = [divmod(place, layers) for place in range(future.never * layers)]
        steps = [future.active(*place) for place in places]
        self._edges = np.concatenate(
            ([0], np.cumsum([len(active) for active in steps]))
        ).astype(np.int64)
        place = np.repeat(np.arange(len(steps)), np.diff(self._edges))
        experts_used = np.concatenate([np.empty(0, np.int32), *steps]).astype(np.int64)
        tokens = np.concatenate(
            [np.empty(0, np.int32), *(future.tokens(*place) for place in places)]
        )
        self._layers = layers
        self._keys = place % layers * experts + experts_used
        self._plan = np.zeros(len(self._keys), np.bool_)
        self._keep = np.zeros(layers * experts, np.bool_)
        pooled = len(context.capacity_slots) == 1
        pools = (
            [np.arange(len(place))]
            if pooled
            else [np.flatnonzero(place % layers == n) for n in range(layers)]
        )
        self.stays = []
        for slots, members in zip(context.capacity_slots.tolist(), pools, strict=True):
            if len(members) > MOST_USES:
                raise PolicyError(
                    f"cache policy {name!r}: {len(members)} uses in one pool, at most"
                    f" {MOST_USES} can be solved; cut the replay with --steps"
                )
            uses, room = self.uses(
                place[members], self._keys[members], tokens[members], slots, context
            )
            self.stays.append(best_stays(uses, room))
            self._plan[members] = self.stays[-1].kept

    @abstractmethod
    def uses(
        self,
        place: np.ndarray,
        key: np.ndarray,
        tokens: np.ndarray,
        slots: int,
        context: RunContext,
    ) -> tuple[Uses, float]:
        """Price the uses of one pool, `place`, `key` int64 [U], `tokens` int32 [U];
        return them and the pool's room.
        """

    def accessed(self, work: LayerWork) -> None:
        """Learn who of the active experts stays."""
        place = work.step * self._layers + work.layer
        span = slice(*self._edges[place : place + 2])
        self._keep[self._keys[span]] = self._plan[span]

    def admits(self, work: LayerWork, incoming: np.ndarray) -> np.ndarray:
        """Take in who is to stay."""
        del work
        return self._keep[incoming]

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Evict who is not to stay, lower ids first; decline when nobody is left."""
        spare = candidates[~self._keep[candidates]][: len(incoming)]
        chosen = np.full(len(incoming), -1, np.int64)
        chosen[: len(spare)] = spare
        return chosen
