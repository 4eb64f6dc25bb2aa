"""SMoE's router: absent experts of little weight are replaced by similar residents."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.names import DECODE, UNUSED
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import best_of
from moesim.policies.routing._substitute import SMALLEST, SubstitutingRouting

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Gate, MachineView
    from moesim.policies.run_context import RunContext

Reading = Literal["text", "literal"]
Phases = Literal["both", "decode"]


# Thresholds are products: (1 + 0.1) x 0.1 exceeds 0.11 in binary.
TOLERANCE = 1e-12

# What is known of an expert for one token, added up.
CHOSEN = 1
"""It is recorded."""
TOP = 2
"""Its score lies above the band around beta,"""
CLOSE = 4
"""or not below it."""
LOW = 8
"""It is up for replacement (as Algorithm 1 is printed)."""


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
        self.decode_only = phase == "decode"
        self.literal = reading == "literal"

    def start(self, context: RunContext) -> None:
        """Make room."""
        SubstitutingRouting.start(self, context)
        self.width = context.shape.experts
        self.requests: Ints = zeros(self.width, np.int64)
        self.low: Ints = zeros(self.width, np.uint8)
        self.eligible: Ints = zeros(self.width, np.uint8)
        self.best: Ints = zeros(self.width, np.int64)
        self._make_room(1)

    def _make_room(self, rows: int) -> None:
        """Room for so many tokens."""
        by_token = (rows, self.width)
        self.known: Ints = zeros(by_token, np.int8)
        self.used: Ints = zeros(by_token, np.uint8)
        self.experts: Ints = zeros(by_token, np.int64)
        self.missing: Ints = zeros(by_token, np.uint8)

    def route(self, gate: Gate, view: MachineView, routing: Ints) -> int:
        top_k = gate.experts.shape[1]
        # With all experts chosen there is no alternative, and no beta.
        if top_k >= self.width or (self.decode_only and gate.phase != DECODE):
            return 0
        if gate.rows > len(self.known):
            self._make_room(2 * gate.rows)
        self._find_present(gate, view)
        if self.literal:
            return self._to_the_letter(gate, routing)
        for t in range(gate.rows):
            self._by_residents(gate, t, top_k)
        if self.batch_aware:
            self._gather(gate, top_k)
        for t in range(gate.rows):
            for column in range(top_k):
                routing[t * top_k + column] = self.experts[t, column]
        return top_k

    def _find_present(self, gate: Gate, view: MachineView) -> None:
        """Note what needs no copy: some token's top-score expert is fetched anyway, so
        others may use it.
        """
        self.token.look(view, gate.layer, self.inflight_ok)
        fetched = TOP if self.literal else TOP | CHOSEN
        for t in range(gate.rows):
            self._note_bands(gate, t)
            for expert in range(self.width):
                if self.known[t, expert] & fetched == fetched:
                    self.token.present[expert] = 1

    def _note_bands(self, gate: Gate, t: int) -> None:
        """Note where the scores of a token's experts lie."""
        token = self.token
        token.take(gate.experts, t)
        token.mark()
        beta = -inf
        for expert in range(self.width):
            if not token.chosen[expert]:
                beta = max(beta, gate.scores[t, expert])
        upper = (1.0 + self.alpha) * beta
        lower = (1.0 - self.alpha) * beta
        for expert in range(self.width):
            score = gate.scores[t, expert]
            known = CHOSEN if token.chosen[expert] else 0
            if score > upper + TOLERANCE:
                known |= TOP
            if score >= lower - TOLERANCE:
                known |= CLOSE
            if score >= beta - TOLERANCE and score < upper - TOLERANCE:
                known |= LOW
            self.known[t, expert] = known

    def _by_residents(self, gate: Gate, t: int, top_k: int) -> None:
        """Replace a token's low-score experts that are absent by the best of those
        present; notes those that still have to be fetched.
        """
        token = self.token
        token.read(gate.scores, t)
        token.take(gate.experts, t)
        for expert in range(self.width):
            close = self.known[t, expert] & (CLOSE | CHOSEN) == CLOSE
            token.alternatives[expert] = close and token.present[expert]
        for column in range(top_k):
            expert = token.experts[column]
            low = not self.known[t, expert] & TOP
            token.replaced[column] = low and not token.present[expert]
        token.substitute()
        for column in range(top_k):
            kept = token.experts[column] == gate.experts[t, column]
            self.experts[t, column] = token.experts[column]
            self.missing[t, column] = token.replaced[column] and kept

    def _gather(self, gate: Gate, top_k: int) -> None:
        """Replace experts that are still missing by those of the batch that more tokens
        ask for.
        """
        most = SMALLEST
        for expert in range(self.width):
            self.requests[expert] = 0
            for t in range(gate.rows):
                most = max(most, gate.scores[t, expert])
        for t in range(gate.rows):
            for column in range(top_k):
                self.requests[self.experts[t, column]] += 1
        for t in range(gate.rows):
            for expert in range(self.width):
                close = self.known[t, expert] & CLOSE
                self.eligible[expert] = close and self.requests[expert] > 0
            for column in range(top_k):
                self.eligible[self.experts[t, column]] = 0
            # From a token's worst expert on: the first replacement is the best one.
            for column in range(top_k - 1, -1, -1):
                if self.missing[t, column]:
                    self._replace(gate, t, column, most)

    def _replace(self, gate: Gate, t: int, column: int, most: float) -> None:
        """Give a token the eligible expert that most ask for, if they are more."""
        best = self._most_asked(gate, t, most)
        if best >= 0 and self.requests[best] > self.requests[self.experts[t, column]]:
            self.experts[t, column] = best
            self.eligible[best] = 0

    def _most_asked(self, gate: Gate, t: int, most: float) -> int:
        """The eligible expert that most tokens ask for; -1 if none. `most` is the
        highest score of the batch.
        """
        best = -1
        preference = -1.0
        for expert in range(self.width):
            # Scores, scaled below one half, only break ties between equal counts.
            value = self.requests[expert] + gate.scores[t, expert] / (2.0 * most)
            if self.eligible[expert] and value > preference:
                best = expert
                preference = value
        return best

    def _to_the_letter(self, gate: Gate, routing: Ints) -> int:
        """Algorithm 1 as printed, ids best first; the length of a row, as tokens may
        end with different numbers of experts.
        """
        token = self.token
        most = 0
        for t in range(gate.rows):
            token.read(gate.scores, t)
            most = max(most, self._swap_low(t))
        for t in range(gate.rows):
            token.read(gate.scores, t)
            for expert in range(self.width):
                self.eligible[expert] = self.used[t, expert]
            taken = best_of(token.score, self.eligible, self.best[:most])
            for column in range(most):
                routing[t * most + column] = self.best[column]
            for column in range(taken, most):
                routing[t * most + column] = UNUSED
        return most

    def _swap_low(self, t: int) -> int:
        """Mark what a token uses: its top-score experts, and its low ones unless there
        are substitutes; how many.
        """
        token = self.token
        low = substitutes = used = 0
        for expert in range(self.width):
            known = self.known[t, expert]
            self.used[t, expert] = known & TOP != 0
            self.low[expert] = known & LOW != 0
            close = known & (CLOSE | TOP | LOW) == CLOSE
            self.eligible[expert] = close and token.present[expert]
            low += self.low[expert]
            substitutes += self.eligible[expert]
        swapped = min(low, substitutes)
        self._use(t, self.low, low - swapped)
        self._use(t, self.eligible, swapped)
        for expert in range(self.width):
            used += self.used[t, expert]
        return used

    def _use(self, t: int, among: Ints, most: int) -> None:
        """Mark the best of some experts as used."""
        taken = best_of(self.token.score, among, self.best[:most])
        for n in range(taken):
            self.used[t, self.best[n]] = 1
