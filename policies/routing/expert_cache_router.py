"""SMoE's router: absent experts of little weight are replaced by similar residents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import Routing, RoutingPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import present, ranked
from moesim.policies.routing._substitute import (
    SMALLEST,
    UNUSED,
    chosen_mask,
    routing,
    scores_of,
    substitute,
    values_at,
)
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import Gate, MachineView

Reading = Literal["text", "literal"]
Phases = Literal["both", "decode"]

# Thresholds are products: (1 + 0.1) x 0.1 exceeds 0.11 in binary.
_TOLERANCE = 1e-12


class ExpertCacheRouter(RoutingPolicy):
    """Replace low-score experts that are absent by resident ones of similar score.

    With beta the best score outside a token's top k: experts above (1 + alpha) beta are
    its top-score experts and always stay. The rest of the top k stay if they are on the
    GPU or some token's top-score expert; else the best experts of at least (1 - alpha)
    beta that are present replace them. If too few are, the best absent ones are
    fetched. Every expert counts with its own gate score.

    Args:
        alpha: half-width of the band around beta; 0.35, 0.30 and 0.25 in the paper's
            settings S1, S2, S3.
        batch_aware: what is still missing is then replaced by an expert of the band
            that more tokens of the batch ask for, by batch size, then score (section
            3.5). It must be asked for by strictly more than the one it replaces (our
            resolution: else two misses could replace each other).
        inflight_ok: experts still being copied count as present (ours; the paper says
            nothing).
        phase: ``decode`` alone, as the paper routes (section 4.1), or ``both``.
        reading: ``text``, or Algorithm 1 to the ``literal``: all experts of beta <= s <
            (1 + alpha) beta, resident ones and the rank k+1 included, are up for
            replacement, so tokens get k+1 experts and residents are replaced
            needlessly. Kept to show the difference.

    Source: SMoE, Algorithm 1 and its text; our reference, sections 3.1 and 3.5.
    """

    needs = ("scores",)

    def __init__(
        self,
        *,
        alpha: float = 0.3,
        batch_aware: bool = True,
        inflight_ok: bool = False,
        phase: Phases = "decode",
        reading: Reading = "text",
    ) -> None:
        expect(0 <= alpha < 1, "alpha", "0 <= alpha < 1", alpha)
        expect_choice("phase", phase, Phases)
        expect_choice("reading", reading, Reading)
        self.alpha = alpha
        self.batch_aware = batch_aware
        self.inflight_ok = inflight_ok
        self.phase = phase
        self.reading = reading

    def route(
        self,
        gate: Gate,
        view: MachineView,
    ) -> Routing:
        """Route a batch; a token whose experts stay keeps its weights."""
        # With all experts chosen there is no alternative, and no beta.
        all_chosen = gate.experts.shape[1] >= view.experts
        skipped = self.phase == "decode" and gate.phase != Phase.DECODE
        if all_chosen or skipped:
            return Routing(gate.experts, gate.weights)

        scores = scores_of(gate)
        chosen = chosen_mask(gate.experts, view.experts)
        others = np.where(chosen, -np.inf, scores)
        beta = others.max(axis=1, keepdims=True)
        upper = (1 + self.alpha) * beta
        top = scores > upper + _TOLERANCE
        close = scores >= (1 - self.alpha) * beta - _TOLERANCE
        resident = present(view, gate.layer, in_flight=self.inflight_ok)

        if self.reading == "literal":
            above = scores >= beta - _TOLERANCE
            low = above & (scores < upper - _TOLERANCE)
            available = resident | top.any(axis=0)
            experts = _literal(scores, top, low, close, available)
            return routing(gate, experts, view)

        # Some token's top-score expert will be fetched anyway, so others may use it.
        fetched = (top & chosen).any(axis=0)
        available = resident | fetched
        recorded = gate.experts.astype(np.int64)
        low = ~values_at(top, recorded)
        absent = low & ~available[recorded]
        alternatives = close & available & ~chosen
        experts = substitute(recorded, absent, scores, alternatives)
        if self.batch_aware:
            missing = absent & (experts == recorded)
            experts = _gather(experts, missing, scores, close)
        return routing(gate, experts, view)


def _gather(
    experts: np.ndarray,
    missing: np.ndarray,
    scores: np.ndarray,
    close: np.ndarray,
) -> np.ndarray:
    """Replace experts that are still missing by those of the batch that more tokens ask
    for.

    Args:
        experts: int64 [T, K] after replacement by residents.
        missing: bool [T, K], low-score experts that would have to be fetched.
        scores: float64 [T, E].
        close: bool [T, E], experts of at least (1 - alpha) beta.
    """
    if not missing.any():
        return experts

    experts = experts.copy()
    width = scores.shape[1]
    requests = np.bincount(experts.ravel(), minlength=width)
    chosen = chosen_mask(experts, width)
    eligible = close & (requests > 0) & ~chosen

    # Scores, scaled below one half, only break ties between equal request counts.
    most = np.maximum(scores.max(), SMALLEST)
    preference = requests + scores / (2 * most)
    # From a token's worst expert on: the first replacement is the best one.
    for column in reversed(range(experts.shape[1])):
        rows = np.flatnonzero(missing[:, column])
        value = np.where(eligible[rows], preference[rows], -1.0)
        best = value.argmax(axis=1)
        replaced = experts[rows, column]
        asked_more = requests[best] > requests[replaced]
        better = eligible[rows, best] & asked_more
        rows = rows[better]
        best = best[better]
        experts[rows, column] = best
        eligible[rows, best] = False
    return experts


def _literal(
    scores: np.ndarray,
    top: np.ndarray,
    low: np.ndarray,
    close: np.ndarray,
    available: np.ndarray,
) -> np.ndarray:
    """Algorithm 1 as printed: ids [T, K'], best first; all masks bool [T, E],
    `available` [E].
    """
    substitutes = close & available & ~low & ~top
    count_low = low.sum(axis=1)
    count_substitutes = substitutes.sum(axis=1)
    swapped = np.minimum(count_low, count_substitutes)
    kept_low = _best(scores, low, count_low - swapped)
    used = top | kept_low | _best(scores, substitutes, swapped)

    # Tokens may end with different numbers of experts; the rest of a row is unused.
    count = used.sum(axis=1)
    most = count.max()
    order = ranked(scores, among=used)
    is_used = np.arange(most) < count[:, None]
    return np.where(is_used, order[:, :most], UNUSED)


def _best(
    scores: np.ndarray,
    among: np.ndarray,
    count: np.ndarray,
) -> np.ndarray:
    """Bool [T, E]: the `count` [T] best of `among`, ties to the lower id."""
    order = ranked(scores, among=among)
    # Sorting a permutation inverts it: the rank of each expert in its row.
    rank = np.argsort(order, axis=1, kind="stable")
    return among & (rank < count[:, None])
