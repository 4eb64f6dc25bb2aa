"""What altered routing keeps of the gate's weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Gate

SMALLEST = 1e-30
"""Stands for a sum of zero, which cannot divide."""


def gate_mass_kept(gate: Gate, used: Ints) -> float:
    """Share of the recorded experts' gate scores that the `used` experts, uint16
    [T, K'], have, mean over tokens. Where a trace has combine weights only, substitutes
    count for nothing; NaN if it has neither.
    """
    by_score = len(gate.scores) > 0
    if not by_score and not len(gate.weights):
        return float("nan")
    rows = len(used)
    columns = used.shape[1]
    top_k = gate.experts.shape[1]
    total = 0.0
    for t in range(rows):
        kept = 0.0
        wanted = 0.0
        for column in range(top_k):
            expert = gate.experts[t, column]
            if by_score:
                wanted += gate.scores[t, expert]
                continue
            wanted += gate.weights[t, column]
            for other in range(columns):
                if used[t, other] == expert:
                    kept += gate.weights[t, column]
        if by_score:
            for other in range(columns):
                # Larger ids mark unused places.
                if used[t, other] < gate.scores.shape[1]:
                    kept += gate.scores[t, used[t, other]]
        total += kept / max(wanted, SMALLEST)
    return total / max(1, rows)
