"""HybriMoE's minus-recent-score cache, which keeps experts that the gate rated highly
of late, used or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import flat_keys
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.cache.static import Static
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import ranked

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, RunContext

Fill = Literal["empty", "lowest"]
Tie = Literal["id", "touched"]


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
        if self.tie_rule == "touched":
            self.tie[flat_keys(work, self.experts)] = self._now
        if work.scores is None:
            return

        if self.first_row:
            scores = work.scores[0]
        else:
            scores = work.scores.mean(axis=0, dtype=np.float64)
        best = ranked(scores)[: self._top]
        # A view, so that the layer's part of all scores changes in place.
        layer = self.score[self.keys_of(work.layer)]
        # All decay, also the experts outside the best p.
        layer *= 1.0 - self.alpha
        best_scores = scores[best].astype(np.float64)
        layer[best] += self.alpha * best_scores

    def admitted(self, keys: np.ndarray) -> None:
        """Entering is a touch."""
        if self.tie_rule == "touched":
            self.tie[keys] = self._now
