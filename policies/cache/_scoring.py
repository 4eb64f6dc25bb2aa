"""What a learned cache does in every layer step: a history, and a small network.

N experts of a layer, h hidden units, A active experts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints


def note_use(age: Floats, uses: Floats, experts: Ints) -> None:
    """Count one layer step with these active experts, int32 [A], into a layer's
    history, both float64 [N].
    """
    # All age, and the active ones start again; infinity stays infinity.
    for expert in range(len(age)):
        age[expert] += 1.0
    for n in range(len(experts)):
        age[experts[n]] = 1.0
        uses[experts[n]] += 1.0


def features_of(age: Floats, uses: Floats, features: Floats) -> None:
    """Fill in what the network reads of a layer's history: float64 [2N]."""
    count = len(age)
    # Before the first use of a layer the most is 0, and so is every frequency.
    most = 1.0
    for expert in range(count):
        most = max(most, uses[expert])
    for expert in range(count):
        features[expert] = 1.0 / age[expert]
        features[count + expert] = uses[expert] / most


def evaluate(
    weights: Floats,
    features: Floats,
    first_units: Floats,
    second_units: Floats,
    outputs: Floats,
) -> None:
    """Say how late each expert of a layer is expected; larger is later.

    Args:
        weights: of the layer, as `Network.packed` lays them out.
        features: float64 [2N].
        first_units, second_units: float64 [h], room for the hidden units.
        outputs: float64 [N], to be filled in.
    """
    place = _affine(weights, 0, features, first_units)
    _silu(first_units)
    place = _affine(weights, place, first_units, second_units)
    _silu(second_units)
    _affine(weights, place, second_units, outputs)


def _affine(weights: Floats, begin: int, x: Floats, outputs: Floats) -> int:
    """One layer of the network: its matrix lies from `begin` on, a row per input, its
    biases behind it. Returns where they end.
    """
    count = len(outputs)
    biases = begin + len(x) * count
    for j in range(count):
        outputs[j] = weights[biases + j]
    for i in range(len(x)):
        # Experts that were never used have no part.
        if x[i] == 0.0:
            continue
        row = begin + i * count
        for j in range(count):
            outputs[j] += x[i] * weights[row + j]
    return biases + count


def _silu(x: Floats) -> None:
    """``x * sigmoid(x)``, in place."""
    for n in range(len(x)):
        x[n] /= 1.0 + math.exp(-x[n])
