"""EdgeMoE's prefetch by a table of transitions between layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.base import PolicyError, PrefetchPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._ranked import name_absent, sort_wanted

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext


Table = Literal["auto", "calibrated", "online"]

MOST_BYTES = 1 << 30
"""Of the counts of pairs: of more pairs, those that were seen first count."""


class Transitions:
    """Counts pairs of experts that served one token in neighbouring layers. L layers, E
    experts of a layer.

    Attributes:
        pairs: float64 [L * E, E], how often each expert of a layer was followed by each
            of the next.
        seen: int64 [L * E], how often each was chosen.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.experts = experts
        self.pairs: Floats = zeros((layers * experts, experts))
        self.seen: Ints = zeros(layers * experts, np.int64)

    @classmethod
    def known(cls, table: np.ndarray) -> Self:
        """The transitions of a table, float64 [L, E, E]; they are not counted on."""
        layers, experts, _ = np.shape(table)
        transitions = cls(layers, experts)
        np.asarray(transitions.pairs)[:] = np.reshape(table, (-1, experts))
        return transitions

    def observe(self, layer: int, before: Ints, after: Ints) -> None:
        """Note the same tokens' experts in `layer` and in the one after it.

        Args:
            layer: the earlier layer.
            before, after: uint16 [T, K], ids in both layers; unused columns hold ids
                >= E.
        """
        for t in range(len(before)):
            for n in range(before.shape[1]):
                expert = before[t, n]
                if expert >= self.experts:
                    continue
                key = layer * self.experts + expert
                self.seen[key] += 1
                for m in range(after.shape[1]):
                    if after[t, m] < self.experts:
                        self.pairs[key, after[t, m]] += 1.0

    def expect(self, key: int, tokens: int, workload: Floats) -> None:
        """Add what so many tokens of an expert use in the next layer to a workload,
        float64 [E]. What was never seen predicts nothing.
        """
        times = max(1, self.seen[key])
        for expert in range(self.experts):
            workload[expert] += tokens * (self.pairs[key, expert] / times)

    def workload(
        self, layer: int, experts: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """Predict the workload of the layer behind `layer`, float64 [E], by the active
        experts of `layer` and their tokens.
        """
        workload = np.zeros(self.experts)
        for expert, count in zip(experts.tolist(), tokens.tolist(), strict=True):
            self.expect(layer * self.experts + expert, count, workload.data)
        return workload

    def table(self) -> np.ndarray:
        """The full table: float64 [L, E, E]."""
        # At least 1, so that rows that were never seen stay 0.
        seen = np.maximum(self.seen, 1)
        table = np.asarray(self.pairs) / seen[:, None]
        return table.reshape(-1, self.experts, self.experts)


class Triples:
    """Counts the experts that followed pairs of experts in two layers.

    Attributes:
        row_of: int64 [L * E * E], by the later expert's layer, the earlier and the
            later expert: 1 and the pair's row; 0 for a pair that was never seen.
        seen: int64 [R], how often each pair was seen; of more pairs than R, those that
            were seen first count.
        after: float64 [R, E], how often every expert followed.
    """

    def __init__(self, layers: int, experts: int) -> None:
        pairs = layers * experts * experts
        rows = min(pairs, MOST_BYTES // (8 * experts))
        self.experts = experts
        self.rows = 0
        self.row_of: Ints = zeros(pairs, np.int64)
        self.seen: Ints = zeros(rows, np.int64)
        # What is never touched costs no memory.
        self.after: Floats = zeros((rows, experts))

    def observe(self, layer: int, first: Ints, second: Ints, after: Ints) -> None:
        """Note the same tokens' experts in three layers, of which `layer` is the second
        one; ids as in `Transitions.observe`.
        """
        for t in range(len(first)):
            for n in range(first.shape[1]):
                for m in range(second.shape[1]):
                    row = self._noted(layer, first[t, n], second[t, m])
                    if row < 0:
                        continue
                    self.seen[row] += 1
                    for e in range(after.shape[1]):
                        if after[t, e] < self.experts:
                            self.after[row, after[t, e]] += 1.0

    def row(self, layer: int, first: int, second: int) -> int:
        """The row of a pair; -1 for one that was never seen, or is none."""
        if first >= self.experts or second >= self.experts:
            return -1
        pair = (layer * self.experts + first) * self.experts + second
        return self.row_of[pair] - 1

    def _noted(self, layer: int, first: int, second: int) -> int:
        """The row of a pair, a new one if there is room."""
        row = self.row(layer, first, second)
        is_pair = first < self.experts and second < self.experts
        if row < 0 and is_pair and self.rows < len(self.seen):
            row = self.rows
            self.rows += 1
            pair = (layer * self.experts + first) * self.experts + second
            self.row_of[pair] = row + 1
        return row


class Statistical(PrefetchPolicy):
    """Prefetch the experts that most often follow this layer's active experts.

    The predicted workload of expert e is the sum over tokens, and over each token's
    experts a, of P(e | a). EdgeMoE looks at the two preceding layers: there it is the
    mean of P(e | a, b) over the token's experts a of the layer before and b of this
    one. A token whose pairs were all never seen counts as with one layer, and so does
    the first layer.

    Args:
        size: experts of the next layer, ranked by predicted workload, ties to the lower
            id.
        table: ``calibrated`` reads ``extras["transitions"]`` (see
            `moesim.policies.prefetch.statistical`); ``online`` counts what this run
            has seen so far, and so needs no calibration; ``auto`` is the first where it
            exists.
        preceding: layers that predict, 1 or 2. Pairs are always counted in this run.
        refill: False lets experts that are present use up their rank, True takes the
            next in rank instead.

    Source: EdgeMoE; our reference, section 6.7.
    """

    reads_routing: ClassVar[bool] = True

    def __init__(
        self,
        *,
        size: int = 4,
        table: Table = "auto",
        preceding: int = 1,
        refill: bool = False,
    ) -> None:
        expect(size >= 0, "size", "a number >= 0", size)
        expect_choice("table", table, Table)
        expect(preceding in {1, 2}, "preceding", "1 or 2", preceding)
        self.size = size
        self.looks_back = preceding == 2
        self.table = table
        self.refill = refill

    def start(self, context: RunContext) -> None:
        """Take the calibrated table, or begin an empty one.

        Raises:
            PolicyError: ``table=calibrated`` without a table, or one of a wrong shape.
        """
        layers = context.shape.layers
        experts = context.shape.experts
        table = None
        if self.table != "online":
            table = context.extras.get("transitions")
        if table is None and self.table == "calibrated":
            raise PolicyError(
                "prefetch policy 'statistical': table=calibrated needs a calibration;"
                " found none"
            )
        if table is not None and np.shape(table) != (layers, experts, experts):
            raise PolicyError(
                "prefetch policy 'statistical': calibration 'transitions': expected"
                f" shape {(layers, experts, experts)}, got {np.shape(table)}"
            )
        self.learns = table is None
        self.transitions = Transitions(layers, experts)
        if table is not None:
            self.transitions = Transitions.known(table)
        if self.looks_back:
            self.triples = Triples(layers, experts)
        self.value: Floats = zeros(experts)
        self.of_others: Floats = zeros(experts)
        self.no_tie: Floats = zeros(experts)
        self.unseen: Ints = zeros(experts, np.int32)
        self.ranked: Ints = zeros(experts, np.int64)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Learn how this layer was reached, and name what most often follows it."""
        # Layers of a ragged prefill hold different tokens.
        tokens = len(view.routing)
        follows = tokens > 0 and len(view.before) == tokens
        if follows and self.learns:
            self.transitions.observe(work.layer - 1, view.before, view.routing)
        by_pairs = follows and self.looks_back
        if by_pairs and len(view.before_that) == tokens:
            self.triples.observe(
                work.layer - 1, view.before_that, view.before, view.routing
            )
        # The last layer predicts nothing, but how it was reached is learned.
        if work.layer + 1 == view.layers:
            return 0
        for expert in range(view.experts):
            self.value[expert] = 0.0
        if by_pairs:
            self._expect_by_pairs(work, view)
        else:
            for i in range(work.active):
                key = work.first + work.experts[i]
                self.transitions.expect(key, work.tokens[i], self.value)
        # Experts that never followed are not wanted.
        ranked = self.ranked[: sort_wanted(self.value, self.no_tie, self.ranked)]
        layer = work.layer + 1
        return name_absent(view, layer, ranked, self.size, self.refill, named, 0)

    def _expect_by_pairs(self, work: Work, view: MachineView) -> None:
        """Expect the mean over each token's pairs that were seen before; a token
        without such pairs counts as with one layer.
        """
        for expert in range(view.experts):
            self.unseen[expert] = 0
            self.of_others[expert] = 0.0
        for t in range(len(view.routing)):
            pairs = self._known_pairs(work.layer, t, view)
            if pairs:
                self._add_pairs(work.layer, t, view, pairs)
                continue
            for m in range(view.routing.shape[1]):
                if view.routing[t, m] < view.experts:
                    self.unseen[view.routing[t, m]] += 1
        for expert in range(view.experts):
            if self.unseen[expert]:
                key = work.first + expert
                self.transitions.expect(key, self.unseen[expert], self.of_others)
        for expert in range(view.experts):
            self.value[expert] += self.of_others[expert]

    def _known_pairs(self, layer: int, t: int, view: MachineView) -> int:
        """How many of a token's pairs were seen before."""
        count = 0
        for n in range(view.before.shape[1]):
            for m in range(view.routing.shape[1]):
                row = self.triples.row(layer, view.before[t, n], view.routing[t, m])
                count += row >= 0
        return count

    def _add_pairs(self, layer: int, t: int, view: MachineView, pairs: int) -> None:
        triples = self.triples
        for n in range(view.before.shape[1]):
            for m in range(view.routing.shape[1]):
                row = triples.row(layer, view.before[t, n], view.routing[t, m])
                if row < 0:
                    continue
                for e in range(view.experts):
                    self.value[e] += triples.after[row, e] / triples.seen[row] / pairs
