"""EdgeMoE's prefetch by a table of transitions between layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch import _kernels, _transitions
from moesim.policies.prefetch._absent_experts import absent_experts
from moesim.policies.prefetch._compiled import CompiledPrefetch
from moesim.policies.prefetch._kernels import name_absent, ranked_experts
from moesim.policies.prefetch._transitions import (
    PairTransitions,
    Transitions,
    count_pairs,
    following_workload,
)
from moesim.policies.ranking import ranked
from moesim.traces.compilation import linked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView, RunContext

Table = Literal["auto", "calibrated", "online"]


@linked(PREFETCH, _kernels, _transitions)
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
            `moesim.policies.prefetch._transitions`); ``online`` counts what this run
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
