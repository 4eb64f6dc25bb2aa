"""The noise of synthetic predictions: how wrong guesses depend on each other.

The noise of depth d at a token and layer is a vector over experts, of unit variance:

- *between depths* it is correlated by ``depths ** |d - d'|``: what depth 1 gets wrong,
  depth 2 is likelier to get wrong too;
- *between tokens* of a sequence, for one layer and expert, by ``tokens`` per token:
  wrong guesses are repeated;
- *between layers* its size is: each token and layer has a difficulty, the factor
  ``exp(spread * g)`` with g a standard normal, of whose variance all layers of a token
  share the part ``layers``.

The defaults were measured in the predictions that the shipped trace ``tiny`` has: 0.60
to 0.62, 0.40, 0.4 and 0.26.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.signal import lfilter

from moesim.base.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Streams of random numbers; depth d has `_DEPTH_STREAM` + d.
SCORE_STREAM = 0
_DIFFICULTY_STREAM = 1
_DEPTH_STREAM = 2


@dataclass(frozen=True, slots=True)
class Dependence:
    """Correlations between errors of predictions; see the module.

    Attributes:
        depths: correlation of the noise of adjacent depths, 0..1.
        tokens: correlation of the noise of adjacent tokens, 0 to less than 1.
        layers: share of the difficulty's variance that a token's layers have in common,
            0..1.
        spread: standard deviation of the logarithm of the difficulty, 0..2.
    """

    depths: float = 0.6
    tokens: float = 0.4
    layers: float = 0.4
    spread: float = 0.25

    def __post_init__(self) -> None:
        """Refuse coefficients that no noise can have."""
        limits = {"depths": 1.0, "tokens": 0.999, "layers": 1.0, "spread": 2.0}
        for name, value in asdict(self).items():
            if not 0 <= value <= limits[name]:
                raise TraceError(
                    f"predictions: dependence of {name}: expected 0..{limits[name]:g},"
                    f" got {value}"
                )


class Walk:
    """Standard normals [T, W] of one sequence that remember their last token.

    They are the same however many tokens a call asks for.

    Args:
        seed: of the generator; the same numbers give the same walk.
        width: W, values of one token.
        memory: correlation of adjacent tokens.
    """

    def __init__(self, seed: Sequence[int], width: int, memory: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._fresh = np.array([math.sqrt(1 - memory * memory)], np.float32)
        self._past = np.array([1, -memory], np.float32)
        self._width = width
        self._state: np.ndarray | None = None

    def next(self, tokens: int) -> np.ndarray:
        """Return the next `tokens` of them: float32 [T, W]."""
        values = self._rng.standard_normal((tokens, self._width), np.float32)
        if self._state is None:
            # The first token has no past, and unit variance all the same.
            self._state = np.zeros((1, self._width), np.float32)
            values[0] /= self._fresh
        walk, self._state = lfilter(
            self._fresh, self._past, values, axis=0, zi=self._state
        )
        return np.asarray(walk)


class SequenceNoise:
    """The noise of all depths for one sequence, a few tokens at a time.

    Args:
        seed: of the whole trace.
        number: of the sequence in the trace, from 0.
        layers: L.
        experts: E.
        depths: how many, D.
        dependence: between errors.
    """

    def __init__(
        self,
        seed: int,
        number: int,
        *,
        layers: int,
        experts: int,
        depths: int,
        dependence: Dependence,
    ) -> None:
        self._dependence = dependence
        self._shape = (layers, experts)
        # A stream per depth: one more depth leaves the others as they are.
        self._walks = [
            Walk(
                (seed, number, _DEPTH_STREAM + depth),
                layers * experts,
                dependence.tokens,
            )
            for depth in range(1, depths + 1)
        ]
        self._difficulty = np.random.default_rng((seed, number, _DIFFICULTY_STREAM))

    def next(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the next tokens' difficulties, float32 [T, L], and their noise of
        every depth, float32 [T, D, L, E].
        """
        layers, experts = self._shape
        normals = self._difficulty.standard_normal((tokens, 1 + layers), np.float32)
        shared = np.float32(math.sqrt(self._dependence.layers))
        apart = np.float32(math.sqrt(1 - self._dependence.layers))
        exponent = shared * normals[:, :1] + apart * normals[:, 1:]
        difficulty = np.exp(np.float32(self._dependence.spread) * exponent)

        keep = np.float32(self._dependence.depths)
        fresh = np.float32(math.sqrt(1 - self._dependence.depths**2))
        noise = np.empty((tokens, len(self._walks), layers, experts), np.float32)
        for depth, walk in enumerate(self._walks):
            values = walk.next(tokens).reshape(tokens, layers, experts)
            # Deeper guesses add to the errors of shallower ones.
            if depth:
                values = fresh * values + keep * noise[:, depth - 1]
            noise[:, depth] = values
        return difficulty, noise
