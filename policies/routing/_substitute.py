"""Substitution of experts, and the combine weights that follow from it.

Shared by the routing policies that replace experts, and by DAOP's assignment, which
foresees what they do.

T tokens, K experts per token, E experts of the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import filled, zeros
from moesim.policies.base import RoutingPolicy
from moesim.policies.names import ABSENT, RESIDENT, UNUSED
from moesim.policies.ranking import best_of

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Gate, MachineView
    from moesim.policies.run_context import RunContext

SMALLEST = 1e-30
"""Least divisor of a normalisation: a sum of scores may be 0."""


class Substitution:
    """The experts of one token at a time, and who may take their places.

    Attributes:
        present: uint8 [E], experts that need no copy; see `look`.
        score: float64 [E], the token's scores; see `read`.
        experts: int64 [E], of which the first K are the token's, best first.
        chosen: uint8 [E], 1 for those; see `mark`.
        replaced: uint8 [E], columns of `experts` that are up for replacement.
        alternatives: uint8 [E], experts that may enter.
    """

    def __init__(self, experts: int) -> None:
        self.count = 0
        self.present: Ints = zeros(experts, np.uint8)
        self.score: Floats = zeros(experts)
        self.experts: Ints = zeros(experts, np.int64)
        self.chosen: Ints = zeros(experts, np.uint8)
        self.replaced: Ints = zeros(experts, np.uint8)
        self.alternatives: Ints = zeros(experts, np.uint8)
        self.best: Ints = zeros(experts, np.int64)
        self.everybody: Ints = filled(experts, 1, np.uint8)

    def look(self, view: MachineView, layer: int, in_flight: bool) -> None:
        """Note which experts of a layer are on some GPU, or `in_flight` to one."""
        width = len(self.present)
        for expert in range(width):
            self.present[expert] = 0
            for gpu in range(view.gpus):
                state = view.states[gpu, layer * width + expert]
                if state == RESIDENT or (in_flight and state != ABSENT):
                    self.present[expert] = 1

    def read(self, scores: Floats, t: int) -> None:
        """Take the scores of a token, of float64 [T, E]."""
        for expert in range(len(self.score)):
            self.score[expert] = scores[t, expert]

    def take(self, experts: Ints, t: int) -> None:
        """Take the experts of a token, of uint16 [T, K]."""
        self.count = experts.shape[1]
        for column in range(self.count):
            self.experts[column] = experts[t, column]

    def choose(self, top_k: int) -> None:
        """Take the experts of highest score."""
        self.count = best_of(self.score, self.everybody, self.experts[:top_k])

    def mark(self) -> None:
        """Fill in `chosen`."""
        for expert in range(len(self.chosen)):
            self.chosen[expert] = 0
        for column in range(self.count):
            # What no expert takes has an id beyond all.
            if self.experts[column] < len(self.chosen):
                self.chosen[self.experts[column]] = 1

    def substitute(self) -> None:
        """Replace the token's marked experts by its best alternatives.

        With fewer alternatives than marked experts the first of those, which are the
        best, stay.
        """
        marked = 0
        for column in range(self.count):
            marked += self.replaced[column]
        if not marked:
            return
        taken = best_of(self.score, self.alternatives, self.best[:marked])
        n = taken - marked
        for column in range(self.count):
            if not self.replaced[column]:
                continue
            if n >= 0:
                self.experts[column] = self.best[n]
            n += 1

    def keep_one_absent(self) -> None:
        """DAOP's degradation: a token keeps its best absent expert, and the next-best
        residents replace the others.
        """
        absent = 0
        for column in range(self.count):
            missing = not self.present[self.experts[column]]
            absent += missing
            # Columns stand best first: the first absent one is the one that may stay.
            self.replaced[column] = missing and absent > 1
        self.mark()
        for expert in range(len(self.score)):
            self.alternatives[expert] = self.present[expert] and not self.chosen[expert]
        self.substitute()


class SubstitutingRouting(RoutingPolicy):
    """Base of rules that replace experts: every expert counts with its own score."""

    reads_tokens = True
    needs: tuple[str, ...] = ("scores",)

    def start(self, context: RunContext) -> None:
        """Make room, and learn how the model weighs."""
        self.normalises = context.shape.norm_topk
        self.token = Substitution(context.shape.experts)

    def weigh(self, gate: Gate, experts: np.ndarray) -> np.ndarray | None:
        return weights_of(gate, experts, np.asarray(gate.scores), self.normalises)


def weights_of(
    gate: Gate,
    experts: np.ndarray,
    used: np.ndarray,
    normalises: bool,
    *,
    gate_spoke: bool = True,
) -> np.ndarray:
    """Combine weights of altered experts: float32 [T, K'].

    A token that keeps its experts keeps its recorded weights. Elsewhere every expert
    counts with its own score, brought to the recorded scale: the sum of weights stays
    where the model normalises over the top k, else the ratio of weight to score.
    Without recorded weights that scale is 1.

    Args:
        gate: what was recorded.
        experts: ids [T, K'], `UNUSED` in unused columns.
        used: scores [T, E] by which the experts count.
        normalises: whether the model normalises over the top k.
        gate_spoke: whether `used` are the gate's own; if not, it was never evaluated,
            and no token keeps its recorded weights.
    """
    scores = np.asarray(gate.scores)
    recorded = np.asarray(gate.experts).astype(np.int64)
    recorded_weights = np.asarray(gate.weights)

    # One column of zeros more, to which the id of an unused column is sent.
    width = scores.shape[1]
    padded = np.zeros((len(used), width + 1))
    padded[:, :width] = used
    ids = np.minimum(experts, width).astype(np.int64)
    expert_scores = np.take_along_axis(padded, ids, axis=1)

    if normalises:
        base = expert_scores.sum(axis=1)
        total = np.ones(len(expert_scores))
    else:
        base = np.take_along_axis(scores, recorded, axis=1).sum(axis=1)
        total = base
    if len(recorded_weights):
        total = recorded_weights.sum(axis=1)
    scale = total / np.maximum(base, SMALLEST)
    weights = expert_scores * scale[:, None]

    top_k = recorded.shape[1]
    extra = experts.shape[1] - top_k
    if len(recorded_weights) and gate_spoke and extra >= 0:
        same_experts = (experts[:, :top_k] == recorded).all(axis=1)
        no_more = (experts[:, top_k:] == UNUSED).all(axis=1)
        same = same_experts & no_more
        # Recorded weights are exact; recomputed ones would differ by rounding.
        weights[same, :top_k] = recorded_weights[same]
        weights[same, top_k:] = 0.0
    return weights.astype(np.float32)
