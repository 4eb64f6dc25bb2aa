"""DAOP's cache: filled from a calibration, adapted to each prompt in prefill, fixed in
decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import ExpertKey, PolicyError, Swap
from moesim.policies.cache._own_replacements import OwnReplacementsCache
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.planner.starting import first_fit
from moesim.policies.ranking import highest_first, lowest_first, ranked
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView, RunContext

Variant = Literal["paper", "released"]
Fill = Literal["auto", "calibrated"]

# Products such as 1.05 · 20 must equal 21 (algorithms §0).
_TOLERANCE = 1e-12


class PrefillSwap(OwnReplacementsCache):
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

    Source: DAOP Alg. 1 and §4; ``daop_moe.py``, ``modeling_daop.py``; algorithms §2.1
    and §2.2.
    """

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

    replaces_first = True

    def start(self, context: RunContext) -> None:
        """Rank the experts by calibration.

        Raises:
            PolicyError: ``fill=calibrated`` without calibration counts.
        """
        super().start(context)
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
            self._counts = np.zeros(self.inside.shape)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Give each layer its share of its own best, the remainder to the best of all:
        int64 flat keys, ascending.
        """
        layers, experts = self.inside.shape
        # A GPU may hold no layer at all: more GPUs than layers.
        served = max(1, int(self._served.sum()))
        is_global = len(capacity_slots) == 1
        shares = capacity_slots
        if is_global:
            shares = np.full(layers, int(capacity_slots[0]) // served)

        taken = np.zeros(self.inside.shape, np.bool_)
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

    def replacements(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[Swap]:
        """Pair hot with cold after a prefill step."""
        if work.phase != Phase.PREFILL:
            return ()

        tokens = np.zeros(self.inside.shape[1], np.int64)
        tokens[work.experts] = work.tokens
        settled = self.settled(work.layer, view)
        absent = ~self.inside[work.layer]
        most = int(self.share * len(tokens))

        if self.variant == "released":
            # The code multiplies by masks instead of selecting: residents have 0
            # tokens in the first list, absent experts many times theirs in the second.
            penalty = np.where(absent, len(work.routing), 1)
            every = np.arange(len(tokens))
            hot = highest_first(every, tokens * absent)[:most]
            cold = lowest_first(every, tokens * penalty)[:most]
        else:
            hot = np.flatnonzero(absent)
            hot = highest_first(hot, tokens[hot])[:most]
            cold = np.flatnonzero(settled)
            cold = lowest_first(cold, tokens[cold])[:most]

        # The shorter list decides how many pairs there are.
        pairs = zip(hot.tolist(), cold.tolist(), strict=False)
        swaps = []
        for incoming, outgoing in pairs:
            possible = absent[incoming] and settled[outgoing]
            clear = self._clear(int(tokens[incoming]), int(tokens[outgoing]))
            if possible and clear:
                swaps.append(
                    Swap(
                        outgoing=ExpertKey(work.layer, outgoing),
                        incoming=ExpertKey(work.layer, incoming),
                    )
                )
        return swaps

    def _clear(self, hot: int, cold: int) -> bool:
        """Whether `hot` tokens are enough more than `cold` ones for a swap."""
        needed = self.margin * cold
        if self.variant == "released":
            return hot > needed * (1.0 + _TOLERANCE)
        enough = hot >= needed * (1.0 - _TOLERANCE)
        return enough and (hot > 0 or self.idle)
