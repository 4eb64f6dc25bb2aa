"""MoE-Infinity's cache: a priority from layer, sequence and past visits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import CachePolicy, flat_keys
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

Topology = Literal["first", "released"]
Visits = Literal["in-cache", "perfect"]

# Added to each normalised factor, so that a zero in one does not hide the others
# (released code).
_FLOOR = 1e-6


class MoEInfinity(CachePolicy):
    """Evict the expert with the lowest product of topology decay, activation ratio of
    the sequence, and visit frequency.

    Each factor is scaled to sum to 1 over all experts and raised by 1e-6. The
    activation ratio is the expert's share of its layer's tokens since the sequences
    began; a layer that has none counts as uniform. Experts of the current layer, and
    prefetched ones that were not used yet, leave only when no other can; within either
    group the lowest product, then the lower id. Made for the global scope.

    Args:
        topology: ``first`` favours early layers, ``1 − l / L``: their experts are
            predicted latest; ``released`` is the code's rule, which takes the first
            half of the layers for an encoder. While the current layer lies in a half,
            that half's layers up to it count 1; otherwise the first half falls from 1
            and the second rises from 0.
        visits: ``in-cache`` counts layer steps since entering, from 1; ``perfect`` over
            the run.
        reset: whether the next batch begins new sequences; otherwise the whole run is
            one.

    Source: MoE-Infinity ``expert_priority_score.py`` and ``expert_cache.py``.
    """

    def __init__(
        self,
        *,
        topology: Topology = "first",
        visits: Visits = "in-cache",
        reset: bool = True,
    ) -> None:
        expect_choice("topology", topology, Topology)
        expect_choice("visits", visits, Visits)
        self.topology = topology
        self.visits = visits
        self.reset = reset

    def start(self, context: RunContext) -> None:
        """Begin without tokens or visits."""
        self._layers = context.shape.layers
        self._experts = context.shape.experts
        keys = self._layers * self._experts
        self._tokens = np.zeros((self._layers, self._experts))
        self._visits = np.zeros(keys)
        self._counted = np.full(keys, self.visits == "perfect")
        self._unused = np.zeros(keys, np.bool_)
        self._active = np.zeros(keys, np.bool_)
        self._layer = 0
        self._batch: int | None = None

    def accessed(self, work: LayerWork) -> None:
        """Count tokens and visits of the active experts."""
        # Not by phase: a prompt may come in several passes.
        if self.reset and work.batch != self._batch:
            self._tokens[:] = 0.0
            self._batch = work.batch
        self._layer = work.layer
        self._tokens[work.layer, work.experts] += work.tokens

        keys = flat_keys(work, self._experts)
        counted = keys[self._counted[keys]]
        self._visits[counted] += 1.0
        self._unused[keys] = False
        # Kept for `admitted`, which follows and is not told the layer step.
        self._active[:] = False
        self._active[keys] = True

    def admitted(self, keys: np.ndarray) -> None:
        """Begin to count what enters."""
        # What enters without being active was prefetched, and is protected until used.
        self._unused[keys] = ~self._active[keys]
        if self.visits == "in-cache":
            self._visits[keys] = 1.0
            self._counted[keys] = True

    def evicted(self, keys: np.ndarray) -> None:
        """Forget what leaves, unless all-time visits are kept."""
        self._unused[keys] = False
        if self.visits == "in-cache":
            self._visits[keys] = 0.0
            self._counted[keys] = False

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Choose the lowest priorities, protected ones last."""
        current = candidates // self._experts == self._layer
        protected = self._unused[candidates] | current
        # The last key sorts first: unprotected candidates, then by priority.
        order = np.lexsort((self._priority()[candidates], protected))
        return candidates[order[: len(incoming)]]

    def _priority(self) -> np.ndarray:
        """The product for every expert: float64 [L * E]."""
        total = self._tokens.sum(axis=1, keepdims=True)
        share = self._tokens / np.maximum(total, 1.0)
        # A layer without tokens of these sequences counts as uniform.
        ratio = np.where(total > 0.0, share, 1.0 / self._experts)
        topology = np.repeat(self._decay(), self._experts)
        factors = [
            _share(topology),
            _share(ratio.reshape(-1)),
            _share(self._visits),
        ]
        return np.prod(factors, axis=0)

    def _decay(self) -> np.ndarray:
        """Float64 [L], 0 to 1."""
        layer = np.arange(self._layers)
        if self.topology == "first":
            return 1.0 - layer / self._layers

        half = max(1, self._layers // 2)
        falling = 1.0 - layer / half
        rising = (layer - half) / (half + 1)
        if self._layer < half:
            falling = np.where(layer > self._layer, falling, 1.0)
        else:
            rising = np.where(layer > self._layer, rising, 1.0)
        return np.where(layer < half, falling, rising)


def _share(values: np.ndarray) -> np.ndarray:
    """`values` as shares of their sum, raised by the floor; uniform where all are 0."""
    total = values.sum()
    if total > 0.0:
        return values / total + _FLOOR
    return np.full(len(values), 1.0 / len(values)) + _FLOOR
