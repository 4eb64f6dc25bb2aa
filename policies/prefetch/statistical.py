"""EdgeMoE's prefetch by a table of transitions between layers."""

from __future__ import annotations

from collections import defaultdict
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
from moesim.policies.prefetch._kernels import (
    absent_experts,
    name_absent,
    ranked_experts,
)
from moesim.policies.ranking import ranked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView, RunContext


Table = Literal["auto", "calibrated", "online"]


@compiled(PREFETCH)
def _following(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    size, refill, learns = state.integers
    experts = state.scores.shape[1]
    first = work.layer * experts
    # Layers of a ragged prefill hold different tokens.
    if learns and len(view.before) == len(view.routing):
        count_pairs(
            state.scores, state.marks[0], first - experts, view.before, view.routing
        )
    # The last layer predicts nothing, but how it was reached is learned.
    if first + experts == len(state.scores):
        return 0
    workload = following_workload(
        state.scores, state.marks[0], first, work.experts, work.tokens
    )
    # Experts that never followed are not wanted.
    return name_absent(
        ranked_experts(workload, np.zeros(experts)),
        work.layer + 1,
        experts,
        view.states,
        size,
        refill != 0,
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
        self._learns = table is None
        if table is None:
            self._transitions = Transitions(layers, experts)
        else:
            self._transitions = Transitions.known(np.asarray(table, np.float64))
        # The kernel works on the same arrays.
        known = State(
            self._transitions.pairs,
            self._transitions.seen[None],
            np.empty(0),
            np.array([self.size, self.refill, self._learns], np.int64),
        )
        self.brought = PrefetchKernels(_following, known)
        self._pairs = PairTransitions(experts)
        # What was routed in this pass so far, the last two layers.
        self._before: list[LayerWork] = []

    def kernels(self) -> PrefetchKernels | None:
        """The same in compiled runs, but for pairs of layers: their table grows."""
        return self.brought if self.preceding == 1 else None

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Predict the next layer; on the way learn how this one followed the last."""
        if self.preceding == 1:
            return super().prefetch(work, view)
        # The last layer predicts nothing, but how it was reached is learned.
        before = self._preceding(work)
        self._learn(work, before)
        self._before = [*before, work][-2:]
        layer = work.layer + 1
        if layer >= view.layers:
            return ()

        if before:
            workload = self._by_pairs(work, before[-1])
        else:
            workload = self._transitions.workload(work.layer, work.experts, work.tokens)
        # Experts that never followed are not wanted.
        followed = np.count_nonzero(workload)
        return absent_experts(
            ranked(workload)[:followed],
            layer,
            view,
            size=self.size,
            refill=self.refill,
        )

    def _by_pairs(self, work: LayerWork, before: LayerWork) -> np.ndarray:
        """Workload predicted by two layers, and by one for tokens of unseen pairs."""
        workload, unseen = self._pairs.workload(
            work.layer, before.routing, work.routing
        )
        routed = work.routing[unseen].astype(np.int64).reshape(-1)
        experts, tokens = np.unique(
            routed[routed < self._pairs.experts], return_counts=True
        )
        return workload + self._transitions.workload(work.layer, experts, tokens)

    def _preceding(self, work: LayerWork) -> list[LayerWork]:
        """The layers of this pass right before, as far as they hold the same tokens."""
        same: list[LayerWork] = []
        follower = work
        for before in reversed(self._before):
            # Transitions do not cross from the last layer to the next step's first.
            if before.step != follower.step or before.layer + 1 != follower.layer:
                break
            # Layers of a ragged prefill hold different tokens.
            if len(before.routing) != len(work.routing):
                break
            same.insert(0, before)
            follower = before
        return same

    def _learn(self, work: LayerWork, before: list[LayerWork]) -> None:
        """Count how this layer's experts followed those of the layers before."""
        if not before:
            return
        last = before[-1]
        if self._learns:
            self._transitions.observe(last.layer, last.routing, work.routing)
        if len(before) == 2:
            self._pairs.observe(
                last.layer, before[0].routing, last.routing, work.routing
            )


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


class PairTransitions:
    """Counts what followed a token's expert in one layer and another in the next. E
    experts of a layer.

    Few of the E² pairs ever occur, so rows are made when they are first seen.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts
        # (layer of the second, first * E + second) -> counts [E], and how often seen.
        self._followers: dict[tuple[int, int], np.ndarray] = {}
        self._seen: dict[tuple[int, int], int] = defaultdict(int)

    def observe(
        self, layer: int, first: np.ndarray, second: np.ndarray, after: np.ndarray
    ) -> None:
        """Note the same tokens' experts in three layers.

        Args:
            layer: the second one.
            first, second, after: ids [T, K]; unused columns hold ids >= E.
        """
        pairs = self._pairs(first, second)
        seen, times = np.unique(pairs[pairs >= 0], return_counts=True)
        for pair, count in zip(seen.tolist(), times.tolist(), strict=True):
            self._seen[layer, pair] += count

        # All followers of one pair stand together in ascending order.
        after = after.astype(np.int64)
        followed = pairs[:, :, None] * self.experts + after[:, None, :]
        used = (pairs[:, :, None] >= 0) & (after[:, None, :] < self.experts)
        followed, times = np.unique(followed[used], return_counts=True)
        owners, starts = np.unique(followed // self.experts, return_index=True)
        edges = [*starts.tolist(), len(followed)]
        for pair, begin, end in zip(owners.tolist(), edges, edges[1:], strict=False):
            row = self._followers.setdefault((layer, pair), np.zeros(self.experts))
            row[followed[begin:end] % self.experts] += times[begin:end]

    def workload(
        self, layer: int, first: np.ndarray, second: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predict the workload of the layer behind `layer`: float64 [E].

        A token's estimate is the mean over its pairs that were seen before.

        Returns:
            The workload, and which tokens have no such pair: bool [T].
        """
        pairs, place = np.unique(self._pairs(first, second), return_inverse=True)
        place = place.reshape(len(second), -1)
        known = np.array([(layer, pair) in self._followers for pair in pairs.tolist()])
        counted = known[place].sum(axis=1, keepdims=True)
        share = known[place] / np.maximum(counted, 1)
        weight = np.bincount(place.reshape(-1), share.reshape(-1), len(pairs))

        workload = np.zeros(self.experts)
        for pair, tokens in zip(pairs[known].tolist(), weight[known], strict=True):
            key = layer, pair
            workload += tokens * self._followers[key] / self._seen[key]
        return workload, counted[:, 0] == 0

    def _pairs(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Numbers of each token's pairs, int64 [T, K²]; -1 for unused columns."""
        # Wider integers, as pairs are numbered `first * E + second`.
        first = first.astype(np.int64)[:, :, None]
        second = second.astype(np.int64)[:, None, :]
        used = (first < self.experts) & (second < self.experts)
        pairs = np.where(used, first * self.experts + second, -1)
        return pairs.reshape(len(pairs), -1)
