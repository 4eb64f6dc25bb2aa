"""What the routing of earlier tokens says about this one: shared by parts of a policy.

The routing of the token under way is compared, after every layer, with that of the last
tokens. Those that chose the same experts so far foretell what it uses in its deeper
layers (`expect`), and what the next token uses in this one (`observe`). No gate is
evaluated and nothing is trained.

A token is a forward pass in the decode phase; of a batch, the union of its sequences.
Prompts have too many tokens in a pass to be compared, and count as uses only.

L layers, E experts, H tokens remembered.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.names import NONE, PREFILL

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

_UNION = 8
"""Tokens' worth of experts that are remembered of a forward pass in a layer: of larger
unions of a batch, those of the lowest ids.
"""

_SHARPNESS = 20.0
"""A token that shares all experts with this one so far weighs e to this power more than
one that shares none.
"""

_FAINT = 3.0
"""Tokens of a weight below e^-3 of the most similar one are left out."""

_BELIEVED = 8.0
"""Promises taken to have been kept before the first one."""

_GRADED = 5
"""Every so many layer steps what was expected is compared with what is used."""

_HALF_BELIEVED = 10.0
"""Squared difference for which the regression's slope counts as one half beforehand."""

_PRIOR = 2.0
"""Tokens without uses that frequencies begin with."""


class RoutingMemory:
    """The last tokens' routing, for the policies that share it.

    Attributes:
        layers, experts: of the model.
        value: float64 [L * E] by flat key, expected uses by a layer's next token.
        score: what an expert is worth in a cache: `value`, and until its layer has come
            what a prefetcher adds.
        copy_value: what it is worth to a copy of its own: `value`, as far as that is
            believed.
        coming: expected uses by this token.
        following: by the next token, as similar tokens foretell them.
        promises: `coming` when it was first high enough to be promised; 0 where none
            was.
        total: weight of all similar tokens; 0 if there are none.
        margin: uses by which a copy of its own must pay in this layer step.
    """

    def __init__(self, layers: int, experts: int, top_k: int, history: int) -> None:
        keys = layers * experts
        self.layers = layers
        self.experts = experts
        self.history = history
        # Experts of a token that are remembered in a layer, at most.
        self.width = min(experts, _UNION * top_k)
        self.words = (history + 3) // 4
        self.value: Floats = zeros(keys)
        self.score: Floats = zeros(keys)
        self.copy_value: Floats = zeros(keys)
        self.coming: Floats = zeros(keys)
        self.following: Floats = zeros(keys)
        self.promises: Floats = zeros(keys)
        self.total = 0.0
        self.margin = 0.0
        self.believed = 0.0
        self.share_short = 0.0
        self.margin_a_token = 0.0

        # Two decayed frequencies, and by layer how much of all tokens they have seen.
        self.lately: Floats = zeros(keys)
        self.short: Floats = zeros(keys)
        self.long: Floats = zeros(keys)
        self.seen_short: Floats = zeros(layers)
        self.seen_long: Floats = zeros(layers)
        self.decay_short = 0.0
        self.decay_long = 0.0

        # The layer step that was observed last, and the token under way: its place
        # among H, and the experts that it has used so far.
        self.last = NONE
        self.step = NONE
        self.slot = NONE
        self.active = 0
        self.tokens = 0
        # By token, experts that it has in common with this one so far; by flat key,
        # which tokens have used an expert. Both for four tokens in one integer of 16
        # bits each, so that four are added up at once.
        self.overlaps: Ints = zeros(self.words, np.int64)
        self.uses: Ints = zeros(keys * self.words, np.int64)
        # By layer and token, how many experts it has used, and which.
        self.counts: Ints = zeros(layers * history, np.int32)
        self.chosen: Ints = zeros(layers * history * self.width, np.int32)
        # Similar tokens and their weights.
        self.similar = 0
        self.listed: Ints = zeros(history, np.int32)
        self.weights: Floats = zeros(history)
        self.by_overlap: Floats = zeros(keys + 2)

        self.kept = 0.0
        self.promised = 0.0
        self.better = 0.0
        self.different = 0.0

    @classmethod
    def of(cls, context: RunContext, history: int) -> RoutingMemory:
        """The memory of a run, the same for all its policies that ask for it alike."""
        shape = context.shape
        sizes = (shape.layers, shape.experts, shape.top_k, history)
        return context.share((cls, history), lambda: cls(*sizes))

    def value_by(
        self,
        half_lives: tuple[float, float],
        believed: float,
        share_short: float,
        margin: float,
    ) -> None:
        """Say how experts are valued.

        Args:
            half_lives: of the two decayed frequencies, in tokens and in passes.
            believed: how far what followed similar tokens is believed where a copy is
                to be bought by it.
            share_short: weight of the first frequency.
            margin: of such a copy, for each token of a pass.
        """
        self.decay_short, self.decay_long = 0.5 ** (1.0 / np.array(half_lives))
        self.believed = believed
        self.share_short = share_short
        self.margin_a_token = margin

    def observe(self, work: Work) -> None:
        """Note the experts of a layer step, once, whoever tells first; value its
        layer.
        """
        now = work.step * self.layers + work.layer
        if self.last == now:
            return
        self.last = now
        self._hold_to_promises(work)
        if now % _GRADED == 0:
            self._grade(work)
        for key in range(work.first, work.first + self.experts):
            self.following[key] = 0.0
        self.similar = 0
        self.total = 0.0
        if work.phase != PREFILL:
            if self.step != work.step:
                self._begin_token(work.step)
            self._remember(work)
            self._list_similar()
            self._recall(work.layer, 1, self.following)
        self._value(work)

    def expect(self, layer: int) -> None:
        """Expect what similar tokens have used in a coming layer."""
        first = layer * self.experts
        for key in range(first, first + self.experts):
            self.coming[key] = 0.0
        self._recall(layer, 0, self.coming)

    def kept_promises(self) -> float:
        """Share of the promised uses that came; nearly all until some have been
        checked.
        """
        return (self.kept + _BELIEVED) / (self.promised + _BELIEVED)

    def _hold_to_promises(self, work: Work) -> None:
        """Compare what was promised of a layer with what it uses."""
        for i in range(work.active):
            if self.promises[work.first + work.experts[i]] > 0.0:
                self.kept += 1.0
        for key in range(work.first, work.first + self.experts):
            if self.promises[key] > 0.0:
                self.promised += 1.0
                self.promises[key] = 0.0

    def _grade(self, work: Work) -> None:
        """Regress what is used on what followed similar tokens and on use of late."""
        better = 0.0
        different = 0.0
        for key in range(work.first, work.first + self.experts):
            more = self.following[key] - self.lately[key]
            better -= more * self.lately[key]
            different += more * more
        for i in range(work.active):
            key = work.first + work.experts[i]
            better += self.following[key] - self.lately[key]
        self.better += better
        self.different += different

    def _begin_token(self, step: int) -> None:
        self.step = step
        self.tokens = min(self.tokens + 1, self.history)
        self.active = 0
        self.slot = (self.slot + 1) % self.history
        for word in range(self.words):
            self.overlaps[word] = 0

    def _remember(self, work: Work) -> None:
        """Count for every token which of this layer's experts it has used here, too;
        then let this token take the place of the oldest.
        """
        words = self.words
        uses = work.first * words
        bit = 1
        bit <<= (self.slot & 3) * 16
        of_slot = self.slot >> 2
        place = work.layer * self.history + self.slot
        begin = place * self.width
        for n in range(begin, begin + self.counts[place]):
            self.uses[uses + self.chosen[n] * words + of_slot] -= bit

        for i in range(work.active):
            of_expert = uses + work.experts[i] * words
            for word in range(words):
                self.overlaps[word] += self.uses[of_expert + word]
        self.active += work.active

        count = min(work.active, self.width)
        self.counts[place] = count
        for n in range(count):
            expert = work.experts[n]
            self.chosen[begin + n] = expert
            self.uses[uses + expert * words + of_slot] += bit

    def _overlap(self, slot: int) -> int:
        """Experts that a token has in common with this one so far."""
        return (self.overlaps[slot >> 2] >> ((slot & 3) * 16)) & 0xFFFF

    def _list_similar(self) -> None:
        """List the tokens most like this one so far, with their weights."""
        most = 0
        for slot in range(self.tokens):
            most = max(most, self._overlap(slot))
        # Shares of experts in common, times the sharpness.
        slope = _SHARPNESS / max(1, self.active)
        fainter = int(_FAINT / slope)
        weight = 1.0
        step = math.exp(-slope)
        for behind in range(fainter + 1):
            self.by_overlap[behind] = weight
            weight *= step
        count = 0
        total = 0.0
        for slot in range(self.tokens):
            overlap = self._overlap(slot)
            if overlap < most - fainter or slot == self.slot:
                continue
            weight = self.by_overlap[most - overlap]
            self.listed[count] = slot
            self.weights[count] = weight
            total += weight
            count += 1
        self.similar = count
        self.total = total

    def _recall(self, layer: int, later: int, expected: Floats) -> None:
        """Add up, by weight, the experts of a layer that similar tokens, or those so
        much `later`, have used: expected uses.
        """
        first = layer * self.experts
        share = 1.0 / max(self.total, 1e-300)
        for n in range(self.similar):
            slot = self.listed[n] + later
            if slot >= self.history:
                slot -= self.history
            weight = self.weights[n] * share
            place = layer * self.history + slot
            begin = place * self.width
            for chosen in range(begin, begin + self.counts[place]):
                expected[first + self.chosen[chosen]] += weight

    def _value(self, work: Work) -> None:
        """Value a layer's experts by use of late and by what followed similar
        tokens.
        """
        passed = work.rows if work.phase == PREFILL else 1
        self.margin = self.margin_a_token * (work.rows // passed)
        kept = self.decay_short**work.rows
        self._count(work, self.short, kept)
        of_short = self.share_short * _per_pass(
            work.layer, self.seen_short, kept, self.decay_short
        )
        kept = self.decay_long**passed
        self._count(work, self.long, kept)
        of_long = (1.0 - self.share_short) * _per_pass(
            work.layer, self.seen_long, kept, self.decay_long
        )
        recall = 0.0
        if self.total > 0.0:
            better = self.better + 0.5 * _HALF_BELIEVED
            recall = better / (self.different + _HALF_BELIEVED)
            recall = min(1.0, max(0.0, recall))
        for key in range(work.first, work.first + self.experts):
            of_late = of_short * self.short[key] + of_long * self.long[key]
            self.lately[key] = of_late
            more = recall * (self.following[key] - of_late)
            self.value[key] = of_late + more
            self.score[key] = of_late + more
            self.copy_value[key] = of_late + self.believed * more

    def _count(self, work: Work, frequency: Floats, kept: float) -> None:
        """Count a layer step's uses in a frequency, of which so much is kept; those of
        a prompt by its tokens.
        """
        for key in range(work.first, work.first + self.experts):
            frequency[key] *= kept
        for i in range(work.active):
            share = 1.0
            if work.phase == PREFILL:
                share = work.tokens[i] / work.rows
            frequency[work.first + work.experts[i]] += share * (1.0 - kept)


def _per_pass(layer: int, seen: Floats, kept: float, decay: float) -> float:
    """What a frequency's numbers must be multiplied by to be uses per pass."""
    weight = seen[layer] * kept + 1.0 - kept
    seen[layer] = weight
    before = _PRIOR * (1.0 - decay)
    return 1.0 / (weight + before)
