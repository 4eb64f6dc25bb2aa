"""FlashMoE's learned eviction: a small trained network per layer ranks the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.cache._learned_network import History, Network
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext


class FlashMoE(ScoreBasedCache):
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

    Source: FlashMoE (seed 004) as read in algorithms §5.3-5.4, where the paper's lost
    formulas are reconstructed.
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
        self.scoring_s = scoring_s

    def start(self, context: RunContext) -> None:
        """Take the trained network.

        Raises:
            PolicyError: there is none, or it was trained for another shape.
        """
        super().start(context)
        layers = context.shape.layers
        policy = "cache policy 'flashmoe'"
        arrays = context.extras.get(self.network)
        if arrays is None:
            present = ", ".join(sorted(context.extras)) or "none"
            raise PolicyError(
                f"{policy}: expected a trained network {self.network!r}, found"
                f" {present}; make one of a trace of this model with `moesim"
                " train-cache TRACE --out DIR`, then add --artefacts DIR"
            )

        self._network = Network.of(arrays, f"{policy}: artefact {self.network!r}")
        trained_for = (self._network.layers, self._network.experts)
        if trained_for != (layers, self.experts):
            raise PolicyError(
                f"{policy}: artefact {self.network!r}: expected {layers} layers x"
                f" {self.experts} experts, found a network of {self._network.layers} x"
                f" {self._network.experts}; train one on a trace of this model"
            )
        self._history = History(layers, self.experts)
        # Layers whose scores are older than their history.
        self._stale = np.ones(layers, np.bool_)

    def accessed(self, work: LayerWork) -> None:
        """Note the active experts; the layer's scores wait until a victim is needed."""
        self._history.note(work.layer, work.experts)
        self._stale[work.layer] = True

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Choose the highest outputs, after evaluating layers whose history has
        moved.
        """
        for layer in np.unique(candidates // self.experts):
            if self._stale[layer]:
                features = self._history.features(layer)
                output = self._network.evaluate(layer, features)
                # The base evicts the lowest; a large output is a distant next use.
                self.score[self.keys_of(layer)] = -output
                self._stale[layer] = False
        return super().victims(incoming, candidates)

    def exposed_s(self, load_s: float) -> float:
        """The evaluation runs beside the load; only what outlasts it is waited for.

        Source: algorithms §5.4, ``max(0, t_policy - t_load)`` on a miss and 0
        otherwise.
        """
        return max(0.0, self.scoring_s - load_s)
