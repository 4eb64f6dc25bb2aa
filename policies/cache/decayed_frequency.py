"""Decayed frequency with an admission margin: what is missed often enters later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moesim.policies.cache._own_replacements import ReplacingCache
from moesim.policies.cache.static import Static
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Fill = Literal["auto", "calibrated", "lowest", "random"]


class DecayedFrequency(ReplacingCache):
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
        self.decay = 2.0 ** (-1.0 / half_life)
        self.margin = margin
        self.content = Static(fill=fill)

    def start(self, context: RunContext) -> None:
        """Begin with no uses."""
        ReplacingCache.start(self, context)
        self.content.start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Fill the cache as `fill` says."""
        return self.content.initial(capacity_slots)

    def accessed(self, work: Work) -> None:
        for key in range(work.first, work.first + self.experts):
            self.score[key] *= self.decay
        for i in range(work.active):
            self.score[work.first + work.experts[i]] += 1.0

    def admits(self, work: Work, key: int) -> bool:
        return False

    def replacements(
        self, work: Work, states: Ints, outgoing: Ints, incoming: Ints
    ) -> int:
        return self.pair(work, states, outgoing, incoming, self.margin, everyone=False)
