"""DAOP's cache: filled from a calibration, adapted to each prompt in prefill, fixed in
decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.arrays import filled, zeros
from moesim.policies.base import PolicyError
from moesim.policies.cache._own_replacements import ReplacingCache
from moesim.policies.names import PREFILL, RESIDENT
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import best_of, ranked
from moesim.policies.sizes import first_fit

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Variant = Literal["paper", "released"]
Fill = Literal["auto", "calibrated"]

# Products such as 1.05 · 20 must equal 21.
_TOLERANCE = 1e-12


class PrefillSwap(ReplacingCache):
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
        self.released = variant == "released"
        self.idle = idle
        self.fill = fill

    def start(self, context: RunContext) -> None:
        """Rank the experts by calibration.

        Raises:
            PolicyError: ``fill=calibrated`` without calibration counts.
        """
        ReplacingCache.start(self, context)
        served = context.served
        if served is None:
            served = np.ones(self.layers, np.bool_)
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
            self._counts = np.zeros((self.layers, self.experts))
        most = int(self.share * self.experts)
        self.hot: Ints = zeros(most, np.int64)
        self.cold: Ints = zeros(most, np.int64)
        self.falling: Floats = zeros(self.experts)
        self.rising: Floats = zeros(self.experts)
        self.tokens: Ints = zeros(self.experts, np.int64)
        self.absent: Ints = zeros(self.experts, np.uint8)
        self.settled: Ints = zeros(self.experts, np.uint8)
        self.every: Ints = filled(self.experts, 1, np.uint8)

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

    def admits(self, work: Work, key: int) -> bool:
        return False

    def replacements(
        self, work: Work, states: Ints, outgoing: Ints, incoming: Ints
    ) -> int:
        """Pair hot with cold after a prefill step."""
        if work.phase != PREFILL:
            return 0
        self._sort_out(work, states)
        enters = self.every if self.released else self.absent
        leaves = self.every if self.released else self.settled
        hottest = best_of(self.falling, enters, self.hot)
        coldest = best_of(self.rising, leaves, self.cold)
        count = 0
        # The shorter list decides how many pairs there are.
        for n in range(min(hottest, coldest)):
            hot = self.hot[n]
            cold = self.cold[n]
            if not (self.absent[hot] and self.settled[cold]):
                continue
            if self._is_clear(self.tokens[hot], self.tokens[cold]):
                outgoing[count] = work.first + cold
                incoming[count] = work.first + hot
                count += 1
        return count

    def _sort_out(self, work: Work, states: Ints) -> None:
        """Note tokens, and who is absent or settled, of the layer's experts."""
        for expert in range(self.experts):
            self.tokens[expert] = 0
        for i in range(work.active):
            self.tokens[work.experts[i]] = work.tokens[i]
        for expert in range(self.experts):
            key = work.first + expert
            tokens = self.tokens[expert]
            # What is inside may still be in flight, and then it cannot leave yet.
            landed = states[key] == RESIDENT
            self.absent[expert] = not self.inside[key]
            self.settled[expert] = landed and self.inside[key]
            self.falling[expert] = tokens
            self.rising[expert] = -tokens
            # The code multiplies by masks instead of selecting: residents have 0 tokens
            # in the first list, absent experts many times theirs in the second.
            if self.released and self.absent[expert]:
                self.rising[expert] *= work.rows
            elif self.released:
                self.falling[expert] = 0.0

    def _is_clear(self, hot: int, cold: int) -> bool:
        """Whether `hot` tokens are enough more than `cold` ones for a swap."""
        needed = self.margin * cold
        if self.released:
            return hot > needed * (1.0 + _TOLERANCE)
        enough = hot >= needed * (1.0 - _TOLERANCE)
        return enough and (hot > 0 or self.idle)
