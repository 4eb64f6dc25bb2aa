"""HybriMoE's minus-recent-score cache, which keeps experts that the gate rated highly
of late, used or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.cache._own_replacements import ReplacingCache
from moesim.policies.cache.static import Static
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Copies = Literal["demand", "missed"]
Fill = Literal["empty", "lowest"]
Tie = Literal["id", "touched"]


class MRS(ReplacingCache):
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
        copies: ``demand`` takes in what is fetched or prefetched, as the released code
            does; with ``missed`` missed experts, best first, also replace residents
            with a lower S: nothing waits for these copies, and the processor has
            computed them. Without them the cache of an assignment that never fetches
            would never change in decode.

    Source: HybriMoE eq. 3 and its ``modeling_deepseek.py``; section on caching.
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
        copies: Copies = "demand",
    ) -> None:
        expect(0.0 < alpha <= 1.0, "alpha", "0 < alpha <= 1", alpha)
        expect(p is None or p >= 1, "p", ">= 1 or none", p)
        expect_choice("tie", tie, Tie)
        expect_choice("fill", fill, Fill)
        expect_choice("copies", copies, Copies)
        self.alpha = alpha
        self.p = p
        self.first_row = first_row
        self.reads_tokens = first_row
        self.touched = tie == "touched"
        self.fill = fill
        self.copies = copies

    @property
    def replaces(self) -> bool:
        """Whether missed experts are copied behind the layer step."""
        return self.copies == "missed"

    def start(self, context: RunContext) -> None:
        """Begin with S = 0."""
        ReplacingCache.start(self, context)
        if self.touched:
            self.tie = zeros(self.layers * self.experts)
        self.now = 0.0
        top = min(self.experts, self.p or 2 * context.shape.top_k)
        self.best: Ints = zeros(top, np.int64)
        self._lowest_ids = Static(fill="lowest")
        self._lowest_ids.start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Fill with the lowest ids, if asked for."""
        if self.fill == "lowest":
            return self._lowest_ids.initial(capacity_slots)
        return None

    def accessed(self, work: Work) -> None:
        self.now += 1.0
        if self.touched:
            for i in range(work.active):
                self.tie[work.first + work.experts[i]] = self.now
        scores = work.first_scores if self.first_row else work.scores
        if len(scores):
            mix(self.score, work.first, scores, self.alpha, self.best)

    def admitted(self, key: int) -> None:
        ReplacingCache.admitted(self, key)
        if self.touched:
            self.tie[key] = self.now

    def replacements(
        self, work: Work, states: Ints, outgoing: Ints, incoming: Ints
    ) -> int:
        return self.pair(work, states, outgoing, incoming, 0.0, False)


def mix(average: Floats, first: int, scores: Floats, alpha: float, best: Ints) -> None:
    """Mix the largest of a step's scores into a layer's average; ties go to the lower
    id.

    Args:
        average: float64 [L * E].
        first: key of the layer's first expert.
        scores: float64 [E].
        alpha: weight of the scores.
        best: int64, room for as many as are mixed in.
    """
    kept = 0
    for expert in range(len(scores)):
        # All decay, also the experts outside the best.
        average[first + expert] *= 1.0 - alpha
        # Experts come in ascending id, so an equal score ranks behind.
        rank = kept
        while rank > 0 and scores[expert] > scores[best[rank - 1]]:
            rank -= 1
        if rank == len(best):
            continue
        kept = min(kept + 1, len(best))
        for n in range(kept - 1, rank, -1):
            best[n] = best[n - 1]
        best[rank] = expert
    for n in range(kept):
        average[first + best[n]] += alpha * scores[best[n]]
