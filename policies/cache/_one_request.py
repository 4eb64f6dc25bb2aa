"""Caches that serve one request after the other, as FlashMoE's released code does.

Within a layer step nobody is held: an expert that is requested later in the same step
may leave for one that is requested earlier, and is then a miss. No engine that computes
a layer step as a whole can run so; hit rates can be counted. Requests of a layer step
come in ascending id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.cache._learned_network import History

if TYPE_CHECKING:
    from moesim.policies.cache._learned_network import Network

# Keeps the release's quotients finite.
_SMALL = 1e-6


class LRURequests:
    """Least recently used, by request; one cache per layer, empty at first."""

    def __init__(self, layers: int, slots: int) -> None:
        self._slots = slots
        # Dictionaries keep the order of use.
        self._resident: list[dict[int, None]] = [{} for _ in range(layers)]

    def serve(self, layer: int, experts: np.ndarray) -> int:
        """Serve a layer step and return its hits."""
        resident = self._resident[layer]
        hits = 0
        for expert in experts.tolist():
            if expert in resident:
                hits += 1
                del resident[expert]
            elif len(resident) >= self._slots:
                del resident[next(iter(resident))]
            resident[expert] = None
        return hits


class FlashMoERequests:
    """FlashMoE's learned eviction, by request.

    The network is asked once per layer step, and its ranking of all experts is walked
    through from the latest next use on: each miss evicts the next expert of the ranking
    that is resident, and none is looked at twice. When the ranking is used up, the
    expert that entered first leaves.

    Args:
        network: trained on the model.
        slots: per layer.
        unseen_age: age of experts that were never used. The release begins with 0,
            which looks freshly used, though it trains otherwise.

    Source: CECAR's ``MLCache``, its baseline FlashMoE.
    """

    def __init__(
        self, network: Network, slots: int, *, unseen_age: float = 0.0
    ) -> None:
        self._network = network
        self._slots = slots
        self._history = History(network.layers, network.experts)
        self._history.age[:] = unseen_age
        self._resident: list[dict[int, None]] = [{} for _ in range(network.layers)]

    def serve(self, layer: int, experts: np.ndarray) -> int:
        """Serve a layer step and return its hits."""
        self._history.note(layer, experts)
        resident = self._resident[layer]
        ranking = iter(self._ranked(layer))
        hits = 0
        for expert in experts.tolist():
            if expert in resident:
                hits += 1
                continue
            if len(resident) >= self._slots:
                oldest = next(iter(resident))
                victim = next((other for other in ranking if other in resident), oldest)
                del resident[victim]
            resident[expert] = None
        return hits

    def _ranked(self, layer: int) -> list[int]:
        """Experts by descending output, ties to the lower id."""
        uses = self._history.uses[layer]
        recency = 1.0 / (self._history.age[layer] + _SMALL)
        frequency = uses / (uses.max() + _SMALL)
        features = np.concatenate((recency, frequency)).astype(np.float32)
        output = self._network.evaluate(layer, features)
        ranking: list[int] = np.argsort(-output, kind="stable").tolist()
        return ranking
