"""Substitution of experts, and the combine weights that follow from it.

Shared by the routing policies that replace experts, and by DAOP's assignment, which
foresees what they do.

T tokens, K experts per token, E experts of the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import ABSENT, RESIDENT, Routing
from moesim.policies.compiled import CompiledRouting
from moesim.policies.kernels import UNUSED
from moesim.policies.ranking import best_of

if TYPE_CHECKING:
    from moesim.policies.base import Gate, MachineView
    from moesim.policies.kernels import GateWork

# Keeps the division by a sum of scores, which may be 0, harmless.
SMALLEST = 1e-30
"""Least divisor of a normalisation."""


# -- kernels ---------------------------------------------------------------------------


@compiled
def on_gpu(gate: GateWork, experts: int, in_flight: bool) -> np.ndarray:
    """Bool [E]: experts of the gate's layer that are on some GPU, or `in_flight` to
    one.
    """
    here = np.zeros(experts, np.bool_)
    first = gate.layer * experts
    for gpu in range(len(gate.states)):
        for expert in range(experts):
            state = gate.states[gpu, first + expert]
            here[expert] |= state == RESIDENT or (in_flight and state != ABSENT)
    return here


@compiled
def chosen_by(experts: np.ndarray, width: int) -> np.ndarray:
    """Bool [E]: the experts of one token."""
    mask = np.zeros(width, np.bool_)
    for expert in experts:
        if expert < width:
            mask[expert] = True
    return mask


@compiled
def substitute(
    experts: np.ndarray,
    replaced: np.ndarray,
    scores: np.ndarray,
    alternatives: np.ndarray,
) -> None:
    """Replace a token's marked experts by its best alternatives, where they lie.

    With fewer alternatives than marked experts the first of those, which are the best,
    stay.

    Args:
        experts: int64 [K], best first.
        replaced: bool [K], columns that are up for replacement.
        scores: float64 [E], higher is better, ties to the lower id.
        alternatives: bool [E], experts that may enter.
    """
    marked = 0
    for column in range(len(experts)):
        marked += replaced[column]
    if not marked:
        return
    best = best_of(scores, alternatives, marked)
    kept = marked - len(best)
    n = 0
    for column in range(len(experts)):
        if not replaced[column]:
            continue
        if n >= kept:
            experts[column] = best[n - kept]
        n += 1


@compiled
def keep_one_absent(
    experts: np.ndarray, scores: np.ndarray, resident: np.ndarray
) -> None:
    """DAOP's degradation, where a token's experts lie: it keeps its best absent one,
    and the next-best residents replace the others.

    Args:
        experts: int64 [K], best first.
        scores: float64 [E], by which they were chosen.
        resident: bool [E].
    """
    further = np.zeros(len(experts), np.bool_)
    absent = 0
    for column in range(len(experts)):
        if not resident[experts[column]]:
            absent += 1
            # Columns stand best first: the first absent one is the one that may stay.
            further[column] = absent > 1
    chosen = chosen_by(experts, len(scores))
    alternatives = np.empty(len(scores), np.bool_)
    for expert in range(len(scores)):
        alternatives[expert] = resident[expert] and not chosen[expert]
    substitute(experts, further, scores, alternatives)


# -- weights ---------------------------------------------------------------------------


class SubstitutingRouting(CompiledRouting):
    """Experts by a kernel, their combine weights by `routing`."""

    needs: tuple[str, ...] = ("scores",)

    def weigh(self, gate: Gate, experts: np.ndarray, view: MachineView) -> Routing:
        """Weigh every expert by its own score."""
        return routing(gate, experts, view)


def routing(
    gate: Gate,
    experts: np.ndarray,
    view: MachineView,
    *,
    predicted: np.ndarray | None = None,
) -> Routing:
    """Pack the experts used with their combine weights.

    A token that keeps its experts keeps its recorded weights. Elsewhere every expert
    counts with its own score, brought to the recorded scale: the sum of weights stays
    where the model normalises over the top k, else the ratio of weight to score.
    Without recorded weights that scale is 1.

    Args:
        gate: what was recorded.
        experts: ids [T, K'], `UNUSED` in unused columns.
        view: knows the model's shape.
        predicted: scores [T, E] by which the experts were chosen instead of the gate's
            own; then no token keeps its recorded weights, as the gate was never
            evaluated.
    """
    assert gate.scores is not None, (
        "a policy that needs scores was started without them"
    )
    scores = gate.scores.astype(np.float64)
    recorded = gate.experts.astype(np.int64)
    used = scores if predicted is None else predicted.astype(np.float64)

    # One column of zeros more, to which the id of an unused column is sent.
    width = scores.shape[1]
    padded = np.zeros((len(used), width + 1))
    padded[:, :width] = used
    ids = np.minimum(experts, width).astype(np.int64)
    expert_scores = np.take_along_axis(padded, ids, axis=1)

    if view.shape.norm_topk:
        base = expert_scores.sum(axis=1)
        total = np.ones(len(expert_scores))
    else:
        base = np.take_along_axis(scores, recorded, axis=1).sum(axis=1)
        total = base
    if gate.weights is not None:
        recorded_weights = gate.weights.astype(np.float64)
        total = recorded_weights.sum(axis=1)
    scale = total / np.maximum(base, SMALLEST)
    weights = expert_scores * scale[:, None]

    top_k = recorded.shape[1]
    extra = experts.shape[1] - top_k
    if gate.weights is not None and predicted is None and extra >= 0:
        same_experts = (experts[:, :top_k] == recorded).all(axis=1)
        no_more = (experts[:, top_k:] == UNUSED).all(axis=1)
        same = same_experts & no_more
        # Recorded weights are exact; recomputed ones would differ by rounding.
        weights[same, :top_k] = gate.weights[same]
        weights[same, top_k:] = 0.0
    return Routing(
        experts=experts.astype(np.uint16),
        weights=weights.astype(np.float32),
    )
