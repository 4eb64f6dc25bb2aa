"""Decayed frequency with an admission margin: what is missed often enters later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numba import types as nb

from moesim.policies.base import RESIDENT, ExpertKey, Swap
from moesim.policies.cache import _kernels
from moesim.policies.cache._kernels import mark_keys
from moesim.policies.cache._own_replacements import OwnReplacementsCache
from moesim.policies.cache.static import Static
from moesim.policies.compilation import EXPERT_IDS
from moesim.policies.kernels import (
    ACCESSED,
    MOVED,
    REPLACEMENTS,
    CacheKernels,
    State,
    Work,
    admits_nothing,
    state,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.traces.compilation import compiled, input_array, linked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView, RunContext

Fill = Literal["auto", "calibrated", "lowest", "random"]


@compiled(nb.void(nb.float64[::1], EXPERT_IDS, nb.float64))
def _age(scores: np.ndarray, experts: np.ndarray, decay: float) -> None:
    """Let a layer's scores, float64 [E], decay by one step; count the active ones."""
    for expert in range(len(scores)):
        scores[expert] *= decay
    for expert in experts:
        scores[expert] += 1.0


@compiled(
    nb.int64(
        nb.float64[::1],
        EXPERT_IDS,
        input_array(nb.boolean),
        input_array(nb.boolean),
        nb.float64,
        nb.int64[::1],
        nb.int64[::1],
    )
)
def _pair(
    scores: np.ndarray,
    experts: np.ndarray,
    inside: np.ndarray,
    settled: np.ndarray,
    margin: float,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """Pair the best of the missed with the worst of the residents, while that pays.

    Args:
        scores: float64 [E] of a layer.
        experts: int32 [A], active.
        inside, settled: bool [E], what the cache has, and what has arrived of it.
        margin: by which a newcomer must beat whom it replaces.
        outgoing, incoming: int64, results: experts.

    Returns:
        The number of pairs.
    """
    left = settled.copy()
    missed = np.zeros(len(scores), np.bool_)
    for expert in experts:
        missed[expert] = not inside[expert]
    count = 0
    while True:
        best = -1
        worst = -1
        for expert in range(len(scores)):
            if missed[expert] and (best < 0 or scores[expert] > scores[best]):
                best = expert
            if left[expert] and (worst < 0 or scores[expert] < scores[worst]):
                worst = expert
        # Both only get closer: once a pair does not pay, none does.
        if best < 0 or worst < 0 or not scores[best] > scores[worst] + margin:
            return count
        outgoing[count] = worst
        incoming[count] = best
        count += 1
        missed[best] = False
        left[worst] = False


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    width = state.integers[0]
    first = work.layer * width
    _age(state.scores[0][first : first + width], work.experts, state.numbers[0])


@linked(MOVED, _kernels)
def _admitted(state: State, keys: np.ndarray) -> None:
    mark_keys(state.marks[0], keys, 1)


@linked(MOVED, _kernels)
def _evicted(state: State, keys: np.ndarray) -> None:
    mark_keys(state.marks[0], keys, 0)


@compiled(REPLACEMENTS)
def _replacements(
    state: State,
    work: Work,
    states: np.ndarray,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    width = state.integers[0]
    first = work.layer * width
    inside = np.zeros(width, np.bool_)
    settled = np.zeros(width, np.bool_)
    for expert in range(width):
        inside[expert] = state.marks[0, first + expert] != 0
        for gpu in range(len(states)):
            settled[expert] |= states[gpu, first + expert] == RESIDENT
        settled[expert] &= inside[expert]
    scores = state.scores[0][first : first + width]
    count = _pair(
        scores, work.experts, inside, settled, state.numbers[1], outgoing, incoming
    )
    for n in range(count):
        outgoing[n] += first
        incoming[n] += first
    return count


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
        outgoing = np.empty(len(work.experts), np.int64)
        incoming = np.empty(len(work.experts), np.int64)
        count = _pair(
            self._scores[layer],
            work.experts,
            self.inside[layer],
            self.settled(layer, view),
            self.margin,
            outgoing,
            incoming,
        )
        pairs = zip(outgoing[:count].tolist(), incoming[:count].tolist(), strict=True)
        return [
            Swap(ExpertKey(layer, out), ExpertKey(layer, into)) for out, into in pairs
        ]

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
            admitted=_admitted,
            evicted=_evicted,
            replacements=_replacements,
        )
