"""FlashMoE's learned cache: its features, its small network per layer, and the
release's own way of serving one request after the other.

Per layer, every expert has two features: how long ago it was used, and how often. The
network turns them into one number per expert, larger for those it expects back later.
Training (`runtime/train_cache.py`) and replay use the same `History`, so that a
policy never meets features it was not trained on.

L MoE layers, N experts per layer, h hidden units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.cache._scoring import evaluate, features_of, note_use

if TYPE_CHECKING:
    from collections.abc import Mapping


class History:
    """Recency and frequency of every expert, layer by layer; a layer ages when it is
    noted, not before.

    Attributes:
        age: float64 [L, N] layer steps since the last use: 1 if used in the latest one,
            infinite if never.
        uses: float64 [L, N] layer steps in which the expert was active.

    Source: FlashMoE (arXiv 2601.17063), recency and frequency, in the form of CECAR's
    training code. CECAR's runtime begins with age 0, which looks freshly used; its
    training does not, and neither do we.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.age = np.full((layers, experts), np.inf)
        self.uses = np.zeros((layers, experts))

    def note(
        self,
        layer: int,
        experts: np.ndarray,
    ) -> None:
        """Count one layer step with these active experts, int [A]."""
        note_use(self.age[layer], self.uses[layer], experts.astype(np.int32))

    def features(self, layer: int) -> np.ndarray:
        """``1 / age`` of each expert (0 if never used), then ``uses / most uses``:
        float32 [2N].
        """
        features = np.empty(2 * self.age.shape[1])
        features_of(self.age[layer], self.uses[layer], features)
        return features.astype(np.float32)


class Network(NamedTuple):
    """One feed-forward network per layer, 2N -> h -> h -> N with SiLU between, as
    stacked float32 arrays.

    ``w1`` [L, h, 2N], ``b1`` [L, h], ``w2`` [L, h, h], ``b2`` [L, h], ``w3`` [L, N, h],
    ``b3`` [L, N].
    """

    w1: np.ndarray
    b1: np.ndarray
    w2: np.ndarray
    b2: np.ndarray
    w3: np.ndarray
    b3: np.ndarray

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, np.ndarray],
        where: str,
    ) -> Network:
        """Take a network from named arrays.

        Raises:
            PolicyError: arrays are missing or do not fit each other; `where` begins the
                message.
        """
        missing = [name for name in cls._fields if name not in arrays]
        if missing:
            present = ", ".join(sorted(arrays)) or "nothing"
            raise PolicyError(
                f"{where}: expected arrays {', '.join(cls._fields)}, found {present};"
                f" lacks {missing[0]!r}"
            )
        network = cls(
            *(np.ascontiguousarray(arrays[name], np.float32) for name in cls._fields)
        )

        # The biases give the sizes; a scalar in their place makes every check fail.
        layers = 0
        experts = 0
        if network.b3.ndim == 2:
            layers, experts = network.b3.shape
        hidden = network.b1.shape[-1] if network.b1.ndim else 0
        if not layers:
            raise PolicyError(
                f"{where}: expected one network for each layer, found none; train it"
                " again"
            )
        for name, expected in sizes(layers, experts, hidden).items():
            shape = getattr(network, name).shape
            if shape != expected:
                raise PolicyError(
                    f"{where}: {name}: expected shape {expected}, found {shape}; train"
                    " it again"
                )
            if not np.isfinite(getattr(network, name)).all():
                raise PolicyError(
                    f"{where}: {name}: expected finite numbers, found others; train it"
                    " again"
                )
        return network

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.b3)

    @property
    def experts(self) -> int:
        """Experts per layer."""
        return self.b3.shape[1]

    @property
    def bytes_per_layer(self) -> int:
        """Size of one layer's parameters: 28,928 of 4 bytes for h = 64, N = 128 (the
        paper's 113 KB).
        """
        return sum(array[0].nbytes for array in self)

    @property
    def hidden(self) -> int:
        """Hidden units."""
        return self.b1.shape[1]

    def packed(self, layer: int) -> np.ndarray:
        """One layer's parameters, float64: of each matrix a row per input, then its
        biases.
        """
        pairs = ((self.w1, self.b1), (self.w2, self.b2), (self.w3, self.b3))
        parts = [part for w, b in pairs for part in (w[layer].T.ravel(), b[layer])]
        return np.concatenate(parts).astype(np.float64)

    def evaluate(self, layer: int, features: np.ndarray) -> np.ndarray:
        """How late each expert is expected, float64 [N], from `features` [2N]; larger
        is later.
        """
        first, second = np.empty((2, self.hidden))
        outputs = np.empty(self.experts)
        given = features.astype(np.float64)
        evaluate(self.packed(layer), given, first, second, outputs)
        return outputs


def sizes(layers: int, experts: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of a `Network`, by name."""
    return {
        "w1": (layers, hidden, 2 * experts),
        "b1": (layers, hidden),
        "w2": (layers, hidden, hidden),
        "b2": (layers, hidden),
        "w3": (layers, experts, hidden),
        "b3": (layers, experts),
    }


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
