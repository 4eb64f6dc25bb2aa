"""FlashMoE's learned eviction: a small network per layer says who will be missed
last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.base import PolicyError
from moesim.policies.cache._learned_network import History, Network
from moesim.policies.cache._score_based import ScoredCache
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext


class FlashMoE(ScoredCache):
    """Evict the resident with the highest output of a trained network, ties to the
    lower id.

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
        given = context.extras.get(self.network)
        who = "cache policy 'flashmoe'"
        if given is None:
            has = ", ".join(sorted(context.extras)) or "none"
            raise PolicyError(
                f"{who}: expected a trained network {self.network!r}, found {has}; make"
                " one of a trace of this model with `moesim train-cache TRACE --out"
                " DIR`, then add --artefacts DIR"
            )
        self._network = Network.of(given, f"{who}: artefact {self.network!r}")
        if (self._network.layers, self._network.experts) != (layers, self.experts):
            raise PolicyError(
                f"{who}: artefact {self.network!r}: expected {layers} layers x"
                f" {self.experts} experts, found a network of {self._network.layers} x"
                f" {self._network.experts}; train one on a trace of this model"
            )
        self._history = History(layers, self.experts)
        self._stale = np.ones(layers, np.bool_)

    def accessed(self, work: LayerWork) -> None:
        """Note the active experts; the layer's scores wait until somebody must
        leave.
        """
        self._history.note(work.layer, work.experts)
        self._stale[work.layer] = True

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Choose the highest outputs, after evaluating layers whose history has
        moved.
        """
        for layer in np.unique(candidates // self.experts):
            if self._stale[layer]:
                first = layer * self.experts
                output = self._network.evaluate(layer, self._history.features(layer))
                self.score[first : first + self.experts] = -output
                self._stale[layer] = False
        return super().victims(incoming, candidates)

    def exposed_s(self, load_s: float) -> float:
        """The evaluation runs beside the load; only what outlasts it is waited for.

        Source: algorithms §5.4, ``max(0, t_policy - t_load)`` on a miss and 0
        otherwise.
        """
        return max(0.0, self.scoring_s - load_s)
