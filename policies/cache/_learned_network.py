"""What FlashMoE's learned cache knows of the past, and the small network that reads it.

Per layer, every expert has two numbers: how long ago it was used, and how often. The
network turns them into one number per expert, larger for those it expects back later.
Training (`runtime/train/cache_network.py`) and replay use the same `History`, so that a
policy never meets features it was not trained on.

L MoE layers, N experts per layer, h hidden units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from moesim.policies.base import PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping


class History:
    """Recency and frequency of every expert, layer by layer; a layer ages when it is
    noted, not before.

    Attributes:
        age: float64 [L, N] layer steps since the last use: 1 if used in the latest one,
            infinite if never.
        uses: float64 [L, N] layer steps in which the expert was active.

    Source: FlashMoE as read in algorithms §5.3. CECAR's runtime begins with age 0,
    which looks freshly used; its training does not, and neither do we.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.age = np.full((layers, experts), np.inf)
        self.uses = np.zeros((layers, experts))

    def note(self, layer: int, experts: np.ndarray) -> None:
        """Count one layer step with these active experts, int [A]."""
        self.age[layer] += 1.0
        self.age[layer, experts] = 1.0
        self.uses[layer, experts] += 1.0

    def features(self, layer: int) -> np.ndarray:
        """``1 / age`` of each expert (0 if never used), then ``uses / most uses``:
        float32 [2N].
        """
        uses = self.uses[layer]
        return np.concatenate(
            (1.0 / self.age[layer], uses / max(1.0, uses.max()))
        ).astype(np.float32)


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
    def of(cls, arrays: Mapping[str, np.ndarray], where: str) -> Network:
        """Take a network from named arrays.

        Raises:
            PolicyError: arrays are missing or do not fit each other; `where` begins the
                message.
        """
        if missing := [name for name in cls._fields if name not in arrays]:
            found = ", ".join(sorted(arrays)) or "nothing"
            raise PolicyError(
                f"{where}: expected arrays {', '.join(cls._fields)}, found {found};"
                f" lacks {missing[0]!r}"
            )
        made = cls(
            *(np.ascontiguousarray(arrays[name], np.float32) for name in cls._fields)
        )
        layers, experts = made.b3.shape if made.b3.ndim == 2 else (0, 0)
        hidden = made.b1.shape[-1] if made.b1.ndim else 0
        for name, expected in sizes(layers, experts, hidden).items():
            if (shape := getattr(made, name).shape) != expected:
                raise PolicyError(
                    f"{where}: {name}: expected shape {expected}, found {shape}; train"
                    " it again"
                )
        return made

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

    def evaluate(self, layer: int, features: np.ndarray) -> np.ndarray:
        """float32 [N]: how late each expert is expected, from `features` float32 [2N];
        larger is later.
        """
        x = silu(self.w1[layer] @ features + self.b1[layer])
        x = silu(self.w2[layer] @ x + self.b2[layer])
        result: np.ndarray = self.w3[layer] @ x + self.b3[layer]
        return result


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


def silu(x: np.ndarray) -> np.ndarray:
    """``x * sigmoid(x)``, written so that nothing overflows."""
    result: np.ndarray = x * (0.5 * (1.0 + np.tanh(0.5 * x)))
    return result
