"""HybriMoE's minus-recent-score cache, which keeps experts that the gate rated highly
of late, used or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numba import types as nb

from moesim.policies.cache import _kernels
from moesim.policies.cache._kernels import lowest_victims, stamp, stamp_keys
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.cache.static import Static
from moesim.policies.compilation import SECONDS
from moesim.policies.kernels import ACCESSED, MOVED, CacheKernels, State, Work, state
from moesim.policies.parameters import expect, expect_choice
from moesim.traces.compilation import compiled, linked

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

Fill = Literal["empty", "lowest"]
Tie = Literal["id", "touched"]


@compiled(nb.void(nb.float64[::1], SECONDS, nb.float64, nb.int64))
def _mix(average: np.ndarray, scores: np.ndarray, alpha: float, top: int) -> None:
    """Mix the `top` largest of a step's scores into a layer's average, both float64
    [E]; ties go to the lower id.
    """
    # All decay, also the experts outside the best.
    for expert in range(len(average)):
        average[expert] *= 1.0 - alpha
    mixed = np.zeros(len(scores), np.bool_)
    for _ in range(top):
        best = -1
        for expert in range(len(scores)):
            if not mixed[expert] and (best < 0 or scores[expert] > scores[best]):
                best = expert
        mixed[best] = True
        average[best] += alpha * scores[best]


@linked(ACCESSED, _kernels)
def _accessed(state: State, work: Work) -> None:
    state.numbers[0] += 1.0
    width = state.integers[0]
    first = work.layer * width
    if len(state.scores) > 1:
        stamp(state.scores[1], work.experts, first, state.numbers[0])
    if len(work.scores):
        average = state.scores[0][first : first + width]
        _mix(average, work.scores, state.numbers[1], state.integers[1])


@linked(MOVED, _kernels)
def _admitted(state: State, keys: np.ndarray) -> None:
    if len(state.scores) > 1:
        stamp_keys(state.scores[1], keys, state.numbers[0])


class MRS(ScoreBasedCache):
    """Evict the expert with the lowest moving average of its gate scores.

    That average is S, where ``S ← α · TopP(s) + (1 − α) · S`` at every step of its
    layer, starting from 0. s are the gate's scores of the step and TopP keeps the p
    largest (ties to the lower id); the others decay. In global scope the layers' S are
    compared as they are. A layer step without scores changes nothing.

    Args:
        alpha: α; 0.5 in the released code, not given in the paper.
        p: scores that count in a step; none is 2·k, as the paper says and the code
            passes.
        first_row: a step of many tokens counts by its first row only, as the released
            code does; otherwise the scores are averaged over the tokens (our reading:
            the paper has one token).
        tie: between equal S, ``id`` evicts the lower id (our rule), ``touched`` the
            least recently used or entered, as the released code's dictionary order
            does.
        fill: ``lowest`` fills the cache with the lowest ids before the run, as the
            released code does.

    Source: HybriMoE eq. 3 and its ``modeling_deepseek.py``; algorithms §4.5.
    """

    needs: tuple[str, ...] = ("scores",)

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        p: int | None = None,
        first_row: bool = False,
        tie: Tie = "id",
        fill: Fill = "empty",
    ) -> None:
        expect(0.0 < alpha <= 1.0, "alpha", "0 < alpha <= 1", alpha)
        expect(p is None or p >= 1, "p", ">= 1 or none", p)
        expect_choice("tie", tie, Tie)
        expect_choice("fill", fill, Fill)
        self.alpha = alpha
        self.p = p
        self.first_row = first_row
        self.tie_rule = tie
        self.fill = fill

    def start(self, context: RunContext) -> None:
        """Begin with S = 0."""
        super().start(context)
        shape = context.shape
        self._top = min(shape.experts, self.p or 2 * shape.top_k)
        self._now = 0.0
        if self.tie_rule == "touched":
            self.tie = np.zeros(len(self.score))
        self._lowest_ids = Static(fill="lowest")
        self._lowest_ids.start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Fill with the lowest ids, if asked for."""
        if self.fill == "lowest":
            return self._lowest_ids.initial(capacity_slots)
        return None

    def accessed(self, work: LayerWork) -> None:
        """Mix this step's best scores into the layer's S."""
        self._now += 1.0
        first = work.layer * self.experts
        if self.tie_rule == "touched":
            stamp(self.tie, work.experts, first, self._now)
        if work.scores is None:
            return

        if self.first_row:
            scores = work.scores[0].astype(np.float64)
        else:
            scores = work.scores.mean(axis=0, dtype=np.float64)
        # A view, so that the layer's part of all scores changes in place.
        _mix(self.score[self.keys_of(work.layer)], scores, self.alpha, self._top)

    def admitted(self, keys: np.ndarray) -> None:
        """Entering is a touch."""
        if self.tie_rule == "touched":
            stamp_keys(self.tie, keys, self._now)

    def kernels(self) -> CacheKernels | None:
        """The same in compiled runs; none for the first row, which they do not know."""
        if self.first_row:
            return None
        scores = [self.score] if self.tie_rule == "id" else [self.score, self.tie]
        return CacheKernels(
            state(
                scores,
                numbers=[self._now, self.alpha],
                integers=[self.experts, self._top],
            ),
            victims=lowest_victims,
            accessed=_accessed,
            admitted=_admitted,
        )
