"""Decayed frequency with an admission margin: what is missed often enters later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.policies.cache._own_replacements import (
    OwnReplacementsCache,
    note_admitted,
    note_evicted,
    replace_by_missed,
    swaps,
)
from moesim.policies.cache.static import Static
from moesim.policies.kernels import (
    ACCESSED,
    EXPERT_IDS,
    CacheKernels,
    State,
    Work,
    admits_nothing,
    state,
)
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView, RunContext, Swap

Fill = Literal["auto", "calibrated", "lowest", "random"]


@compiled(nb.void(nb.float64[::1], EXPERT_IDS, nb.float64))
def _age(scores: np.ndarray, experts: np.ndarray, decay: float) -> None:
    """Let a layer's scores, float64 [E], decay by one step; count the active ones."""
    for expert in range(len(scores)):
        scores[expert] *= decay
    for expert in experts:
        scores[expert] += 1.0


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    width = state.integers[0]
    first = work.layer * width
    _age(state.scores[0][first : first + width], work.experts, state.numbers[0])


class DecayedFrequency(OwnReplacementsCache):
    """Replace residents of a layer by missed experts that were used clearly more of
    late.

    Every use adds 1 to an expert's score, which halves in every `half_life` steps of
    its layer: ``score · 2^(-Δt / half_life) + 1``. After a layer step its missed
    experts, best first, are held against the layer's residents, worst first; one enters
    if its score beats the other's by more than `margin`. Nothing waits for these
    copies: what is missed is computed where it is, or runs from staging.

    Args:
        half_life: steps of a layer.
        margin: κ, by which a newcomer must beat whom it replaces.
        fill: the start, as in `static`.

    Source: moe-speed-of-light (harshithkantamneni), decayed-frequency admission; its
    runs have a half-life of 16 and κ = 1. There copies take effect two tokens later;
    here, when they have landed.
    """

    def __init__(
        self, *, half_life: float = 16.0, margin: float = 1.0, fill: Fill = "auto"
    ) -> None:
        expect(half_life > 0, "half_life", "> 0", half_life)
        expect(margin >= 0, "margin", ">= 0", margin)
        expect_choice("fill", fill, Fill)
        self.half_life = half_life
        self._decay = 2.0 ** (-1.0 / half_life)
        self.margin = margin
        self.fill: Fill = fill

    def start(self, context: RunContext) -> None:
        """Begin with no uses."""
        super().start(context)
        self._initial_content = Static(fill=self.fill)
        self._initial_content.start(context)
        self._scores = np.zeros(self.inside.shape)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Fill the cache as `fill` says: int64 flat keys, ascending."""
        return self._initial_content.initial(capacity_slots)

    def accessed(self, work: LayerWork) -> None:
        """Let the layer's scores decay by one step, and count the active experts."""
        _age(self._scores[work.layer], work.experts, self._decay)

    def replacements(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[Swap]:
        """Pair the best of the missed with the worst of the residents."""
        layer = work.layer
        settled = self.settled(layer, view)
        scores = self._scores[layer]
        return swaps(work, scores, self.inside[layer], settled, self.margin)

    def kernels(self) -> CacheKernels:
        """The same in compiled runs."""
        return CacheKernels(
            state(
                [self._scores.ravel()],
                [self.inside.ravel()],
                numbers=[self._decay, self.margin],
                integers=[self._scores.shape[1]],
            ),
            accessed=_accessed,
            admits=admits_nothing,
            admitted=note_admitted,
            evicted=note_evicted,
            replacements=replace_by_missed,
        )
