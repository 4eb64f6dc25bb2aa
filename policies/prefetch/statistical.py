"""EdgeMoE's prefetch by a table of transitions between layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array
from moesim.policies.base import PolicyError
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._kernels import name_absent, ranked_experts

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


Table = Literal["auto", "calibrated", "online"]


# Places in the state's integers; then, of two layers that predict, the row of each pair
# of experts, and how often each row's pair was seen. The state's scores have a row for
# each expert, then one for each pair: how often every expert followed.
_SIZE = 0
_REFILL = 1
_LEARNS = 2
_PRECEDING = 3
_ROWS = 4
_PAIRS = 5

MOST_BYTES = 1 << 30
"""Of the counts of pairs: of more pairs, those that were seen first count."""


@compiled
def count_triples(
    state: State, layer: int, first: np.ndarray, second: np.ndarray, after: np.ndarray
) -> None:
    """Count the experts of the same tokens in three layers.

    Args:
        state: of `Statistical` with two layers that predict.
        layer: the second one.
        first, second, after: ids [T, K]; unused columns hold ids >= E.
    """
    experts = state.scores.shape[1]
    keys = state.marks.shape[1]
    row_of = state.integers[_PAIRS : _PAIRS + keys * experts]
    seen = state.integers[_PAIRS + keys * experts :]
    for t in range(len(first)):
        for a in first[t]:
            for b in second[t]:
                if a >= experts or b >= experts:
                    continue
                pair = (layer * experts + a) * experts + b
                if not row_of[pair]:
                    if state.integers[_ROWS] == len(seen):
                        continue
                    state.integers[_ROWS] += 1
                    row_of[pair] = state.integers[_ROWS]
                row = row_of[pair] - 1
                seen[row] += 1
                for e in after[t]:
                    if e < experts:
                        state.scores[keys + row, e] += 1.0


@compiled
def _known_rows(
    row_of: np.ndarray,
    experts: int,
    layer: int,
    first: np.ndarray,
    second: np.ndarray,
    rows: np.ndarray,
) -> int:
    """Fill in the rows of a token's pairs that were seen before; their number."""
    count = 0
    for a in first:
        for b in second:
            if a < experts and b < experts:
                row = row_of[(layer * experts + a) * experts + b]
                if row:
                    rows[count] = row - 1
                    count += 1
    return count


@compiled
def triple_workload(
    state: State, layer: int, first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """Predict the workload of the layer behind `layer`: float64 [E].

    A token's estimate is the mean over its pairs that were seen before; one without
    such pairs counts as with one layer.
    """
    experts = state.scores.shape[1]
    keys = state.marks.shape[1]
    row_of = state.integers[_PAIRS : _PAIRS + keys * experts]
    seen = state.integers[_PAIRS + keys * experts :]
    workload = np.zeros(experts)
    unseen = np.zeros(experts, np.int32)
    rows = np.empty(first.shape[1] * second.shape[1], np.int64)
    for t in range(len(second)):
        count = _known_rows(row_of, experts, layer, first[t], second[t], rows)
        for row in rows[:count]:
            for e in range(experts):
                workload[e] += state.scores[keys + row, e] / seen[row] / count
        if not count:
            for b in second[t]:
                if b < experts:
                    unseen[b] += 1
    others = np.flatnonzero(unseen)
    ids = np.empty(len(others), np.int32)
    tokens = np.empty(len(others), np.int32)
    for n in range(len(others)):
        ids[n] = others[n]
        tokens[n] = unseen[others[n]]
    workload += following_workload(
        state.scores, state.marks[0], layer * experts, ids, tokens
    )
    return workload


@compiled(PREFETCH)
def _following(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    experts = state.scores.shape[1]
    first = work.layer * experts
    # Layers of a ragged prefill hold different tokens.
    tokens = len(view.routing)
    follows = tokens > 0 and len(view.before) == tokens
    if follows and state.integers[_LEARNS]:
        count_pairs(
            state.scores, state.marks[0], first - experts, view.before, view.routing
        )
    by_pairs = follows and state.integers[_PRECEDING] == 2
    if by_pairs and len(view.before_that) == tokens:
        count_triples(
            state, work.layer - 1, view.before_that, view.before, view.routing
        )
    # The last layer predicts nothing, but how it was reached is learned.
    if first + experts == state.marks.shape[1]:
        return 0
    if by_pairs:
        workload = triple_workload(state, work.layer, view.before, view.routing)
    else:
        workload = following_workload(
            state.scores, state.marks[0], first, work.experts, work.tokens
        )
    # Experts that never followed are not wanted.
    return name_absent(
        ranked_experts(workload, np.zeros(experts)),
        work.layer + 1,
        experts,
        view.states,
        state.integers[_SIZE],
        state.integers[_REFILL] != 0,
        named,
        0,
    )


class Statistical(CompiledPrefetch):
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
        self.preceding = preceding
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
        keys = layers * experts
        # What is never touched costs no memory.
        rows = 0
        if self.preceding == 2:
            rows = min(keys * experts, MOST_BYTES // (8 * experts))
        scores = np.zeros((keys + rows, experts))
        if table is not None:
            scores[:keys] = np.reshape(table, (keys, experts))
        integers = np.zeros(_PAIRS + (keys * experts + rows if rows else 0), np.int64)
        rules = (self.size, self.refill, table is None, self.preceding)
        integers[: len(rules)] = rules
        seen = np.zeros((1, keys), np.int64)
        known = State(scores, seen, np.empty(0), integers)
        self.brought = PrefetchKernels(_following, known)


_ROUTING = input_array(nb.uint16, 2)
_IDS = input_array(nb.int32)


@compiled(nb.void(nb.float64[:, ::1], nb.int64[::1], nb.int64, _ROUTING, _ROUTING))
def count_pairs(
    pairs: np.ndarray,
    seen: np.ndarray,
    first: int,
    before: np.ndarray,
    after: np.ndarray,
) -> None:
    """Count the experts of the same tokens in a layer and in the one after it.

    Args:
        pairs: float64 [L * E, E], how often each expert of a layer was followed by each
            of the next.
        seen: int64 [L * E], how often each was chosen.
        first: key of the earlier layer's first expert.
        before, after: ids [T, K] in both layers; unused columns hold ids >= E.
    """
    experts = pairs.shape[1]
    for t in range(len(before)):
        for a in before[t]:
            if a >= experts:
                continue
            seen[first + a] += 1
            for e in after[t]:
                if e < experts:
                    pairs[first + a, e] += 1.0


@compiled(
    nb.float64[::1](
        input_array(nb.float64, 2), input_array(nb.int64), nb.int64, _IDS, _IDS
    )
)
def following_workload(
    pairs: np.ndarray,
    seen: np.ndarray,
    first: int,
    experts: np.ndarray,
    tokens: np.ndarray,
) -> np.ndarray:
    """Predict the next layer's workload, float64 [E], of a layer's active `experts` [A]
    and their `tokens` [A].

    What was never seen predicts nothing. `pairs`, `seen` and `first` as in
    `count_pairs`.
    """
    workload = np.zeros(pairs.shape[1])
    for i in range(len(experts)):
        key = first + experts[i]
        times = max(1, seen[key])
        for e in range(len(workload)):
            workload[e] += tokens[i] * (pairs[key, e] / times)
    return workload


class Transitions:
    """Counts pairs of experts that served one token in neighbouring layers. L layers, E
    experts of a layer.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.experts = experts
        self.pairs = np.zeros((layers * experts, experts))
        self.seen = np.zeros(layers * experts, np.int64)

    @classmethod
    def known(cls, table: np.ndarray) -> Self:
        """The transitions of a table, float64 [L, E, E]; they are not counted on."""
        transitions = cls(len(table), table.shape[1])
        transitions.pairs[:] = table.reshape(transitions.pairs.shape)
        return transitions

    def observe(
        self,
        layer: int,
        before: np.ndarray,
        after: np.ndarray,
    ) -> None:
        """Note the same tokens' experts in `layer` and in the one after it.

        Args:
            layer: the earlier layer.
            before: ids [T, K]; unused columns hold ids >= E.
            after: ids [T, K'], row by row the same tokens.
        """
        count_pairs(
            self.pairs,
            self.seen,
            layer * self.experts,
            np.ascontiguousarray(before, np.uint16),
            np.ascontiguousarray(after, np.uint16),
        )

    def workload(
        self, layer: int, experts: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """Predict the workload of the layer behind `layer`, float64 [E], by the active
        experts of `layer` and their tokens.
        """
        return following_workload(
            self.pairs,
            self.seen,
            layer * self.experts,
            np.ascontiguousarray(experts, np.int32),
            np.ascontiguousarray(tokens, np.int32),
        )

    def table(self) -> np.ndarray:
        """The full table: float64 [L, E, E]."""
        # At least 1, so that rows that were never seen stay 0.
        seen = np.maximum(self.seen, 1)
        return (self.pairs / seen[:, None]).reshape(-1, self.experts, self.experts)
