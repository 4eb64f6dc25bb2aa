"""FlashMoE's learned eviction: a small trained network per layer ranks the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import PolicyError
from moesim.policies.cache._kernels import lowest_scores
from moesim.policies.cache._learned_network import (
    Network,
    evaluate,
    features_of,
    note_use,
)
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.kernels import (
    ACCESSED,
    VICTIMS,
    CacheKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


# Rows of the state's scores, by key.
_OUTPUT = 0
_AGE = 1
_USES = 2

# Places in the state's integers.
_LAYERS = 0
_EXPERTS = 1
_HIDDEN = 2


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    """Note the active experts; the layer's outputs wait until a victim is needed."""
    width = state.integers[_EXPERTS]
    first = work.layer * width
    note_use(
        state.scores[_AGE, first : first + width],
        state.scores[_USES, first : first + width],
        work.experts,
    )
    state.marks[0, work.layer] = 1


@compiled(VICTIMS)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Choose the highest outputs, after evaluating layers whose history has moved."""
    width = state.integers[_EXPERTS]
    size = len(state.numbers) // state.integers[_LAYERS]
    for key in candidates:
        layer = key // width
        if not state.marks[0, layer]:
            continue
        state.marks[0, layer] = 0
        first = layer * width
        features = features_of(
            state.scores[_AGE, first : first + width],
            state.scores[_USES, first : first + width],
        )
        weights = state.numbers[layer * size : (layer + 1) * size]
        outputs = evaluate(weights, state.integers[_HIDDEN], features)
        # The lowest leaves; a large output is a distant next use.
        for expert in range(width):
            state.scores[_OUTPUT, first + expert] = -outputs[expert]
    score = state.scores[_OUTPUT]
    lowest_scores(candidates, score, score, chosen)


class FlashMoE(AdmittingCompiledCache):
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

    def bring(self, context: RunContext) -> CacheKernels:
        """Take the trained network.

        Raises:
            PolicyError: there is none, or it was trained for another shape.
        """
        layers = context.shape.layers
        experts = context.shape.experts
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
        if (network.layers, network.experts) != (layers, experts):
            raise PolicyError(
                f"{policy}: artefact {self.network!r}: expected {layers} layers x"
                f" {experts} experts, found a network of {network.layers} x"
                f" {network.experts}; train one on a trace of this model"
            )
        shape = (layers, experts)
        scores = np.zeros((3, layers * experts))
        scores[_AGE] = np.inf
        weights = [network.packed(layer) for layer in range(layers)]
        # Layers whose scores are older than their history.
        stale = np.ones(layers)
        return CacheKernels(
            state(
                scores=scores,
                marks=stale,
                numbers=np.concatenate(weights),
                integers=[*shape, network.hidden],
            ),
            victims=_victims,
            accessed=_accessed,
        )
