"""SMoE's router: absent experts of little weight are replaced by similar residents."""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.kernels import (
    ROUTE,
    UNUSED,
    GateWork,
    RoutingKernels,
    State,
    state,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import best_of
from moesim.policies.routing._substitute import (
    SMALLEST,
    SubstitutingRouting,
    chosen_by,
    on_gpu,
    substitute,
)
from moesim.traces.format.schema import Phase

Reading = Literal["text", "literal"]
Phases = Literal["both", "decode"]

# Thresholds are products: (1 + 0.1) x 0.1 exceeds 0.11 in binary.
_TOLERANCE = 1e-12


_DECODE = int(Phase.DECODE)

# What is known of an expert for one token, added up.
_CHOSEN = 1
"""It is recorded."""
_TOP = 2
"""Its score lies above the band around beta,"""
_CLOSE = 4
"""or not below it."""
_LOW = 8
"""It is up for replacement (as Algorithm 1 is printed)."""


@compiled
def _bands(
    scores: np.ndarray, experts: np.ndarray, alpha: float, known: np.ndarray
) -> None:
    """Note where the scores of a token's experts lie, int8 [E]."""
    chosen = chosen_by(experts, len(scores))
    beta = -np.inf
    for expert in range(len(scores)):
        if not chosen[expert]:
            beta = max(beta, scores[expert])
    upper = (1.0 + alpha) * beta
    for expert in range(len(scores)):
        score = scores[expert]
        known[expert] = 0
        if chosen[expert]:
            known[expert] |= _CHOSEN
        if score > upper + _TOLERANCE:
            known[expert] |= _TOP
        if score >= (1.0 - alpha) * beta - _TOLERANCE:
            known[expert] |= _CLOSE
        if score >= beta - _TOLERANCE and score < upper - _TOLERANCE:
            known[expert] |= _LOW


@compiled(ROUTE)
def _route(state: State, gate: GateWork, routing: np.ndarray) -> int:
    """Route a batch. The state's number is alpha; its integers: whether the whole batch
    is looked at, whether experts in flight are present, whether only decode is altered,
    and whether Algorithm 1 is followed to the letter.
    """
    gathers, in_flight, decode_only, literal = state.integers
    tokens, top_k = gate.experts.shape
    width = gate.scores.shape[1]
    # With all experts chosen there is no alternative, and no beta.
    if top_k >= width or (decode_only and gate.phase != _DECODE):
        return 0
    known = np.empty((tokens, width), np.int8)
    available = on_gpu(gate, width, in_flight != 0)
    # Some token's top-score expert will be fetched anyway, so others may use it.
    fetched = _TOP if literal else _TOP | _CHOSEN
    for t in range(tokens):
        _bands(gate.scores[t], gate.experts[t], state.numbers[0], known[t])
        for expert in range(width):
            available[expert] |= known[t, expert] & fetched == fetched
    if literal:
        return _literal(gate.scores, known, available, routing)

    experts = np.empty((tokens, top_k), np.int64)
    missing = np.zeros((tokens, top_k), np.bool_)
    for t in range(tokens):
        _by_residents(
            gate.experts[t],
            gate.scores[t],
            known[t],
            available,
            experts[t],
            missing[t],
        )
    if gathers:
        _gather(experts, missing, gate.scores, known)
    for t in range(tokens):
        for column in range(top_k):
            routing[t * top_k + column] = experts[t, column]
    return top_k


@compiled
def _by_residents(
    recorded: np.ndarray,
    scores: np.ndarray,
    known: np.ndarray,
    available: np.ndarray,
    experts: np.ndarray,
    missing: np.ndarray,
) -> None:
    """Replace a token's low-score experts that are absent by the best of those present.

    Args:
        recorded: uint16 [K].
        scores: float64 [E].
        known: int8 [E], see `_bands`.
        available: bool [E].
        experts: int64 [K], filled in.
        missing: bool [K], filled in: low-score experts that would have to be fetched.
    """
    alternatives = np.empty(len(scores), np.bool_)
    for expert in range(len(scores)):
        close = known[expert] & (_CLOSE | _CHOSEN) == _CLOSE
        alternatives[expert] = close and available[expert]
    for column in range(len(experts)):
        expert = recorded[column]
        experts[column] = expert
        missing[column] = not (known[expert] & _TOP) and not available[expert]
    substitute(experts, missing, scores, alternatives)
    for column in range(len(experts)):
        missing[column] &= experts[column] == recorded[column]


@compiled
def _gather(
    experts: np.ndarray, missing: np.ndarray, scores: np.ndarray, known: np.ndarray
) -> None:
    """Replace experts that are still missing by those of the batch that more tokens ask
    for.

    Args:
        experts: int64 [T, K] after replacement by residents; changes.
        missing: bool [T, K], low-score experts that would have to be fetched.
        scores: float64 [T, E].
        known: int8 [T, E], see `_bands`.
    """
    tokens, top_k = experts.shape
    width = scores.shape[1]
    requests = np.zeros(width, np.int64)
    most = SMALLEST
    for t in range(tokens):
        for expert in experts[t]:
            requests[expert] += 1
        most = max(most, scores[t].max())

    for t in range(tokens):
        eligible = np.zeros(width, np.bool_)
        chosen = chosen_by(experts[t], width)
        for expert in range(width):
            asked = requests[expert] > 0 and not chosen[expert]
            eligible[expert] = asked and known[t, expert] & _CLOSE != 0
        # From a token's worst expert on: the first replacement is the best one.
        for column in range(top_k - 1, -1, -1):
            if not missing[t, column]:
                continue
            best = -1
            preference = -1.0
            for expert in range(width):
                # Scores, scaled below one half, only break ties between equal counts.
                value = requests[expert] + scores[t, expert] / (2.0 * most)
                if eligible[expert] and value > preference:
                    best = expert
                    preference = value
            if best >= 0 and requests[best] > requests[experts[t, column]]:
                experts[t, column] = best
                eligible[best] = False


@compiled
def _literal(
    scores: np.ndarray, known: np.ndarray, available: np.ndarray, routing: np.ndarray
) -> int:
    """Algorithm 1 as printed: fills in the ids of every token, best first.

    Args:
        scores: float64 [T, E].
        known: int8 [T, E], see `_bands`.
        available: bool [E], on a GPU, or some token's top-score expert.
        routing: uint16, the result; tokens may end with different numbers of experts,
            and the rest of a row is unused.

    Returns:
        The length of a row.
    """
    tokens, width = scores.shape
    used = np.zeros((tokens, width), np.bool_)
    low = np.empty(width, np.bool_)
    substitutes = np.empty(width, np.bool_)
    most = 0
    for t in range(tokens):
        count_low = 0
        count_substitutes = 0
        for expert in range(width):
            is_top = known[t, expert] & _TOP != 0
            is_close = known[t, expert] & _CLOSE != 0
            low[expert] = known[t, expert] & _LOW != 0
            other = available[expert] and not low[expert] and not is_top
            substitutes[expert] = is_close and other
            count_low += low[expert]
            count_substitutes += substitutes[expert]
            used[t, expert] = is_top
        swapped = min(count_low, count_substitutes)
        for expert in best_of(scores[t], low, count_low - swapped):
            used[t, expert] = True
        for expert in best_of(scores[t], substitutes, swapped):
            used[t, expert] = True
        count = 0
        for expert in range(width):
            count += used[t, expert]
        most = max(most, count)
    for t in range(tokens):
        best = best_of(scores[t], used[t], most)
        for column in range(most):
            routing[t * most + column] = UNUSED
        for column in range(len(best)):
            routing[t * most + column] = best[column]
    return most


class ExpertCacheRouter(SubstitutingRouting):
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
        rules = (batch_aware, inflight_ok, phase == "decode", reading == "literal")
        self.brought = RoutingKernels(_route, state(numbers=[alpha], integers=rules))
