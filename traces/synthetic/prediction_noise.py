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

from moesim.base.errors import TraceError
from moesim.traces.format.arrays import top_k
from moesim.traces.synthetic.loops import remember

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
        self._memory = memory
        self._last = np.zeros(width, np.float32)
        self._begun = False

    def next(self, tokens: int) -> np.ndarray:
        """Return the next `tokens` of them: float32 [T, W]."""
        shape = (tokens, len(self._last))
        values = self._rng.standard_normal(shape, np.float32)
        remember(values, self._last, self._memory, self._begun)
        self._begun = True
        return values


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
        self._layers = layers
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

    def next(self, tokens: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the next tokens' difficulties, float32 [T * L], and the noise of every
        depth, float32 [T * L, E].
        """
        normals = self._difficulty.standard_normal(
            (tokens, 1 + self._layers), np.float32
        )
        shared = math.sqrt(self._dependence.layers)
        apart = math.sqrt(1 - self._dependence.layers)
        exponent = np.float32(shared) * normals[:, :1]
        exponent = exponent + np.float32(apart) * normals[:, 1:]
        difficulty = np.exp(np.float32(self._dependence.spread) * exponent)

        keep = np.float32(self._dependence.depths)
        fresh = np.float32(math.sqrt(1 - self._dependence.depths**2))
        noise: list[np.ndarray] = []
        for walk in self._walks:
            values = walk.next(tokens)
            # Deeper guesses add to the errors of shallower ones.
            if noise:
                values *= fresh
                values += keep * noise[-1].reshape(values.shape)
            noise.append(values.reshape(tokens * self._layers, -1))

        return difficulty.reshape(-1), noise


def count_hits(scores: np.ndarray, experts: np.ndarray) -> int:
    """Return how many of the experts [N, K] are among the K best of scores [N, E];
    equal scores go to the lower id.
    """
    best = top_k(scores, experts.shape[1])
    return int((best[:, :, None] == experts[:, None, :]).sum())
