"""HybriMoE's minus-recent-score cache, which keeps experts that the gate rated highly
of late, used or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.policies.cache._kernels import (
    lowest_victims,
    mark_keys,
    score_state,
    stamp,
    stamp_keys,
)
from moesim.policies.cache._own_replacements import note_evicted, replace_by_missed
from moesim.policies.cache.static import Static
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.kernels import (
    ACCESSED,
    MOVED,
    SECONDS,
    CacheKernels,
    State,
    Work,
    replaces_nothing,
)
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

Copies = Literal["demand", "missed"]
Fill = Literal["empty", "lowest"]
Tie = Literal["id", "touched"]


@compiled(nb.void(nb.float64[::1], SECONDS, nb.float64, nb.int64[::1]))
def mix(
    average: np.ndarray, scores: np.ndarray, alpha: float, best: np.ndarray
) -> None:
    """Mix the largest of a step's scores into a layer's average, both float64 [E], as
    many as `best` has room for; ties go to the lower id.
    """
    kept = 0
    for expert in range(len(scores)):
        # All decay, also the experts outside the best.
        average[expert] *= 1.0 - alpha
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
    for expert in best[:kept]:
        average[expert] += alpha * scores[expert]


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    state.numbers[0] += 1.0
    width = state.integers[0]
    first = work.layer * width
    if len(state.scores) > 1:
        stamp(state.scores[1], work.experts, first, state.numbers[0])
    scores = work.first_scores if state.integers[2] else work.scores
    if len(scores):
        average = state.scores[0][first : first + width]
        best = state.marks[1][: state.integers[1]]
        mix(average, scores, state.numbers[1], best)


@compiled(MOVED)
def _admitted(state: State, keys: np.ndarray) -> None:
    mark_keys(state.marks[0], keys, 1)
    if len(state.scores) > 1:
        stamp_keys(state.scores[1], keys, state.numbers[0])


class MRS(AdmittingCompiledCache):
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
        self.tie_rule = tie
        self.fill = fill
        self.copies = copies

    @property
    def replaces(self) -> bool:
        """Whether missed experts are copied behind the layer step."""
        return self.copies == "missed"

    def start(self, context: RunContext) -> None:
        """Begin with S = 0."""
        super().start(context)
        self._lowest_ids = Static(fill="lowest")
        self._lowest_ids.start(context)

    def bring(self, context: RunContext) -> CacheKernels:
        """Make room for S, and for the best of a step."""
        experts = context.shape.experts
        top = min(experts, self.p or 2 * context.shape.top_k)
        return CacheKernels(
            score_state(
                context,
                rows=1 if self.tie_rule == "id" else 2,
                # What is inside, and room for the best of a step.
                marks=np.zeros((2, context.shape.layers * experts)),
                numbers=[0.0, self.alpha, 0.0],
                integers=[experts, top, self.first_row],
            ),
            victims=lowest_victims,
            accessed=_accessed,
            admitted=_admitted,
            evicted=note_evicted,
            replacements=replace_by_missed if self.replaces else replaces_nothing,
        )

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Fill with the lowest ids, if asked for."""
        if self.fill == "lowest":
            return self._lowest_ids.initial(capacity_slots)
        return None
