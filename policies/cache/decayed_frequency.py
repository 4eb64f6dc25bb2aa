"""Decayed frequency with an admission margin: what is missed often enters later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import ExpertKey, Swap, flat_keys
from moesim.policies.cache._own_replacements import OwnReplacementsCache
from moesim.policies.cache.static import Static
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import highest_first, lowest_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView, RunContext

Fill = Literal["auto", "calibrated", "lowest", "random"]


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
        self._scores[work.layer] *= 2.0 ** (-1.0 / self.half_life)
        self._scores.reshape(-1)[flat_keys(work, self._scores.shape[1])] += 1.0

    def replacements(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[Swap]:
        """Pair the best of the missed with the worst of the residents."""
        layer = work.layer
        scores = self._scores[layer]
        missed = work.experts[~self.inside[layer, work.experts]]
        residents = np.flatnonzero(self.settled(layer, view))
        entering = highest_first(missed, scores[missed]).tolist()
        leaving = lowest_first(residents, scores[residents]).tolist()

        # The shorter list decides how many are compared.
        pairs = zip(entering, leaving, strict=False)
        return [
            Swap(ExpertKey(layer, outgoing), ExpertKey(layer, incoming))
            for incoming, outgoing in pairs
            if scores[incoming] > scores[outgoing] + self.margin
        ]
