"""FlashMoE's learned eviction: a small trained network per layer ranks the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.arrays import filled, view_of, zeros
from moesim.policies.base import PolicyError
from moesim.policies.cache._learned_network import Network
from moesim.policies.cache._scoring import evaluate, features_of, note_use
from moesim.policies.parameters import expect
from moesim.policies.ranked_cache import RankedCache, lowest

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext


class FlashMoE(RankedCache):
    """Evict the expert that a trained network expects back last, ties to the lower id.

    The network reads how long ago and how often each expert of the layer was used. It
    comes from ``moesim train-cache TRACE --out DIR`` and reaches the run by
    ``--artefacts DIR``; it fits one model's shape only. With the global scope, outputs
    of different layers are compared as they are, which the distance labels allow and
    the paper does not treat.

    Its time is hidden behind the load that it makes room for; what outlasts that load
    is charged to planning.

    Args:
        network: name of the trained network among the artefacts.
        scoring_s: seconds of one evaluation; 158 µs as FlashMoE measured its own.

    Source: FlashMoE (arXiv 2601.17063); features and labels in the form of CECAR's
    code (malmong/CECAR, ``ML_Train.py``).
    """

    # LRU, LFU, ARC and LeCaR as in its paper; LFRU as the best causal rule we know.
    compared_with: ClassVar[tuple[str, ...]] = (
        "lru",
        "lfu",
        "lfru",
        "arc",
        "lecar",
    )

    def __init__(self, *, network: str = "flashmoe", scoring_s: float = 158e-6) -> None:
        expect(scoring_s >= 0.0, "scoring_s", ">= 0", scoring_s)
        self.network = network
        self.choosing_s = scoring_s

    def start(self, context: RunContext) -> None:
        """Take the trained network.

        Raises:
            PolicyError: there is none, or it was trained for another shape.
        """
        RankedCache.start(self, context)
        network = self._trained(context)
        packed = [network.packed(layer) for layer in range(self.layers)]
        keys = self.layers * self.experts
        self.weights: Floats = view_of(np.concatenate(packed), np.float64)
        self.size = len(packed[0])
        self.age: Floats = filled(keys, np.inf)
        self.uses: Floats = zeros(keys)
        # Layers whose scores are older than their history.
        self.stale: Ints = filled(self.layers, 1, np.int8)
        self.features: Floats = zeros(2 * self.experts)
        self.first_units: Floats = zeros(network.hidden)
        self.second_units: Floats = zeros(network.hidden)
        self.outputs: Floats = zeros(self.experts)

    def _trained(self, context: RunContext) -> Network:
        policy = "cache policy 'flashmoe'"
        arrays = context.extras.get(self.network)
        if arrays is None:
            present = ", ".join(sorted(context.extras)) or "none"
            raise PolicyError(
                f"{policy}: expected a trained network {self.network!r}, found"
                f" {present}; make one of a trace of this model with `moesim"
                " train-cache TRACE --out DIR`, then add --artefacts DIR"
            )

        network = Network.of(arrays, f"{policy}: artefact {self.network!r}")
        if (network.layers, network.experts) != (self.layers, self.experts):
            raise PolicyError(
                f"{policy}: artefact {self.network!r}: expected {self.layers} layers x"
                f" {self.experts} experts, found a network of {network.layers} x"
                f" {network.experts}; train one on a trace of this model"
            )
        return network

    def accessed(self, work: Work) -> None:
        """Note the active experts; the layer's scores wait until one must leave."""
        end = work.first + self.experts
        note_use(self.age[work.first : end], self.uses[work.first : end], work.experts)
        self.stale[work.layer] = 1

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        """Choose the highest outputs; first renew those of moved layers."""
        for n in range(len(candidates)):
            layer = candidates[n] // self.experts
            if self.stale[layer]:
                self.stale[layer] = 0
                self._score(layer)
        lowest(candidates, self.score, self.score, chosen)

    def _score(self, layer: int) -> None:
        first = layer * self.experts
        end = first + self.experts
        features_of(self.age[first:end], self.uses[first:end], self.features)
        evaluate(
            self.weights[layer * self.size : (layer + 1) * self.size],
            self.features,
            self.first_units,
            self.second_units,
            self.outputs,
        )
        # The lowest leaves; a large output is a distant next use.
        for expert in range(self.experts):
            self.score[first + expert] = -self.outputs[expert]
