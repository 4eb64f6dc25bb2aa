"""DAOP's cache: filled from a calibration, adapted to each prompt in prefill, fixed in
decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import RESIDENT, PolicyError
from moesim.policies.cache._own_replacements import note_admitted, note_evicted
from moesim.policies.compiled import CompiledCache
from moesim.policies.kernels import (
    REPLACEMENTS,
    CacheKernels,
    State,
    Work,
    admits_nothing,
    state,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.planner.starting import first_fit
from moesim.policies.ranking import best_of, ranked
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

Variant = Literal["paper", "released"]
Fill = Literal["auto", "calibrated"]

# Products such as 1.05 · 20 must equal 21.
_TOLERANCE = 1e-12


_PREFILL = int(Phase.PREFILL)

# Places in the state's integers.
_EXPERTS = 0
_RELEASED = 1
_IDLE = 2
_MOST = 3


@compiled
def _is_clear(state: State, hot: int, cold: int) -> bool:
    """Whether `hot` tokens are enough more than `cold` ones for a swap."""
    needed = state.numbers[0] * cold
    if state.integers[_RELEASED]:
        return hot > needed * (1.0 + _TOLERANCE)
    enough = hot >= needed * (1.0 - _TOLERANCE)
    return enough and (hot > 0 or state.integers[_IDLE] != 0)


@compiled(REPLACEMENTS)
def _replacements(
    state: State,
    work: Work,
    states: np.ndarray,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """Pair hot with cold after a prefill step."""
    if work.phase != _PREFILL:
        return 0
    width = state.integers[_EXPERTS]
    first = work.layer * width
    tokens = np.zeros(width, np.int64)
    for i in range(len(work.experts)):
        tokens[work.experts[i]] = work.tokens[i]
    absent = np.zeros(width, np.bool_)
    settled = np.zeros(width, np.bool_)
    for expert in range(width):
        absent[expert] = state.marks[0, first + expert] == 0
        # What is inside may still be in flight, and then it cannot leave yet.
        landed = states[first + expert] == RESIDENT
        settled[expert] = landed and not absent[expert]

    enters = absent
    leaves = settled
    rising = -tokens
    falling = tokens.copy()
    if state.integers[_RELEASED]:
        # The code multiplies by masks instead of selecting: residents have 0 tokens in
        # the first list, absent experts many times theirs in the second.
        enters = leaves = np.ones(width, np.bool_)
        for expert in range(width):
            if absent[expert]:
                rising[expert] *= work.rows
            else:
                falling[expert] = 0
    hot = best_of(falling, enters, state.integers[_MOST])
    cold = best_of(rising, leaves, state.integers[_MOST])
    count = 0
    # The shorter list decides how many pairs there are.
    for n in range(min(len(hot), len(cold))):
        possible = absent[hot[n]] and settled[cold[n]]
        if possible and _is_clear(state, tokens[hot[n]], tokens[cold[n]]):
            outgoing[count] = first + cold[n]
            incoming[count] = first + hot[n]
            count += 1
    return count


class PrefillSwap(CompiledCache):
    """In prefill, swap each layer's busiest absent experts for its least busy
    residents; in decode, change nothing.

    Of the N experts, the ``share·N`` hottest absent ones (by prompt tokens) meet as
    many coldest residents, rank by rank; ties go to the lower id. A pair is swapped
    where the difference is clear, before the layer's experts run, so the prompt is
    served from the new placement. What is fetched otherwise runs from staging.

    Args:
        share: of all experts that may swap in one prefill of a layer.
        margin: hot must have at least `margin` times the tokens of cold: 1.05.
        variant: ``paper`` swaps at equality and pairs clean lists; ``released`` does
            what the code does: strictly more tokens, and lists over *all* experts,
            where an absent expert without tokens passes for the coldest resident and
            shifts the pairs; a pair of two residents or two absent experts has no
            effect.
        idle: whether an absent expert without tokens may enter where the cold one has
            none either, as ≥ says literally; our default spares the copy. Only for
            ``paper``.
        fill: ``calibrated`` gives every layer ⌊slots / L⌋ of its own most frequent
            experts and the rest to the most frequent of all; ``auto`` is that where
            there is a calibration, else lowest ids.

    Source: DAOP, Algorithm 1 and section 4; ``daop_moe.py``, ``modeling_daop.py``.
    """

    replaces_by_kernel = True
    replaces_first = True

    def __init__(
        self,
        *,
        share: float = 0.5,
        margin: float = 1.05,
        variant: Variant = "paper",
        idle: bool = False,
        fill: Fill = "auto",
    ) -> None:
        expect(0.0 < share <= 1.0, "share", "0 < share <= 1", share)
        expect(margin > 0.0, "margin", "> 0", margin)
        expect_choice("variant", variant, Variant)
        expect_choice("fill", fill, Fill)
        self.share = share
        self.margin = margin
        self.variant = variant
        self.idle = idle
        self.fill = fill

    def bring(self, context: RunContext) -> CacheKernels:
        """Rank the experts by calibration.

        Raises:
            PolicyError: ``fill=calibrated`` without calibration counts.
        """
        served = context.served
        if served is None:
            served = np.ones(context.shape.layers, np.bool_)
        self._served = served
        self._bytes_of = np.array(context.shape.sizes_by_expert(), np.int64)
        self._pool_bytes = context.pool_bytes

        if context.calibration is not None:
            self._counts = np.asarray(context.calibration, dtype=np.float64)
        elif self.fill == "calibrated":
            raise PolicyError(
                "cache policy 'prefill-swap': fill=calibrated needs the counts of a"
                " calibration trace; found none"
            )
        else:
            # Equal counts: ties leave the lowest ids in front.
            self._counts = np.zeros((context.shape.layers, context.shape.experts))
        experts = context.shape.experts
        rules = (self.variant == "released", self.idle, int(self.share * experts))
        return CacheKernels(
            state(
                marks=np.zeros(self._counts.size),
                numbers=[self.margin],
                integers=[experts, *rules],
            ),
            admits=admits_nothing,
            admitted=note_admitted,
            evicted=note_evicted,
            replacements=_replacements,
        )

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Give each layer its share of its own best, the remainder to the best of all:
        int64 flat keys, ascending.
        """
        layers, experts = self._counts.shape
        # A GPU may hold no layer at all: more GPUs than layers.
        served = max(1, int(self._served.sum()))
        is_global = len(capacity_slots) == 1
        shares = capacity_slots
        if is_global:
            shares = np.full(layers, int(capacity_slots[0]) // served)

        taken = np.zeros(self._counts.shape, np.bool_)
        for layer in np.flatnonzero(self._served).tolist():
            best = ranked(self._counts[layer])
            taken[layer, best[: shares[layer]]] = True

        if is_global:
            flat = taken.reshape(-1)
            order = ranked(self._counts.reshape(-1))
            order = order[self._served[order // experts]]
            order = order[~flat[order]]
            sizes = self._bytes_of.reshape(-1)[order]
            # Slots count the largest experts; smaller ones leave room for more.
            room = int(capacity_slots[0] * self._bytes_of.max())
            if self._pool_bytes is not None:
                room = int(self._pool_bytes[0])
            room -= int(self._bytes_of[taken].sum())
            flat[order[first_fit(sizes, room)]] = True
        return np.flatnonzero(taken)
