"""Decayed frequency with an admission margin: what is missed often enters later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.cache._own_replacements import (
    note_admitted,
    note_evicted,
    replace_by_missed,
)
from moesim.policies.cache.static import Static
from moesim.policies.compiled import CompiledCache
from moesim.policies.kernels import (
    ACCESSED,
    CacheKernels,
    State,
    Work,
    admits_nothing,
    state,
)
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

Fill = Literal["auto", "calibrated", "lowest", "random"]


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    """Let the layer's scores decay by one step, and count the active experts."""
    first = work.layer * state.integers[0]
    for key in range(first, first + state.integers[0]):
        state.scores[0, key] *= state.numbers[0]
    for expert in work.experts:
        state.scores[0, first + expert] += 1.0


class DecayedFrequency(CompiledCache):
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

    replaces_by_kernel = True

    def __init__(
        self, *, half_life: float = 16.0, margin: float = 1.0, fill: Fill = "auto"
    ) -> None:
        expect(half_life > 0, "half_life", "> 0", half_life)
        expect(margin >= 0, "margin", ">= 0", margin)
        expect_choice("fill", fill, Fill)
        self.half_life = half_life
        self.margin = margin
        self.fill: Fill = fill

    def bring(self, context: RunContext) -> CacheKernels:
        """Begin with no uses."""
        self._initial_content = Static(fill=self.fill)
        self._initial_content.start(context)
        experts = context.shape.experts
        keys = context.shape.layers * experts
        return CacheKernels(
            state(
                scores=np.zeros(keys),
                marks=np.zeros(keys),
                numbers=[2.0 ** (-1.0 / self.half_life), self.margin],
                integers=[experts],
            ),
            accessed=_accessed,
            admits=admits_nothing,
            admitted=note_admitted,
            evicted=note_evicted,
            replacements=replace_by_missed,
        )

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Fill the cache as `fill` says: int64 flat keys, ascending."""
        return self._initial_content.initial(capacity_slots)
