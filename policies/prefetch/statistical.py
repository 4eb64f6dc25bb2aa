"""EdgeMoE's prefetch by a table of transitions between layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import PolicyError, PrefetchPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._absent_experts import absent_experts
from moesim.policies.prefetch._transitions import PairTransitions, Transitions
from moesim.policies.ranking import ranked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView, RunContext

Table = Literal["auto", "calibrated", "online"]


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
            `moesim.policies.prefetch._transitions`); ``online`` counts what this run
            has seen so far, and so needs no calibration; ``auto`` is the first where it
            exists.
        preceding: layers that predict, 1 or 2. Pairs are always counted in this run.
        refill: False lets experts that are present use up their rank, True takes the
            next in rank instead.

    Source: EdgeMoE; our reference, section 6.7.
    """

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
        self._calibrated = table
        if table is not None:
            self._calibrated = np.asarray(table, np.float64)
        self._learned = Transitions(layers, experts)
        self._pairs = PairTransitions(experts)
        # What was routed in this pass so far, the last two layers.
        self._before: list[LayerWork] = []

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Predict the next layer; on the way learn how this one followed the last."""
        # The last layer predicts nothing, but how it was reached is learned.
        before = self._preceding(work)
        self._learn(work, before)
        self._before = [*before, work][-2:]
        layer = work.layer + 1
        if layer >= view.layers:
            return ()

        if self.preceding == 2 and before:
            workload = self._by_pairs(work, before[-1])
        else:
            workload = work.tokens @ self._follows(work.layer, work.experts)
        # Experts that never followed are not wanted.
        followed = np.count_nonzero(workload)
        return absent_experts(
            ranked(workload)[:followed],
            layer,
            view,
            size=self.size,
            refill=self.refill,
        )

    def _follows(self, layer: int, experts: np.ndarray) -> np.ndarray:
        """Probabilities of what follows some experts: float64 [A, E]."""
        if self._calibrated is None:
            return self._learned.rows(layer, experts)
        return self._calibrated[layer, experts]

    def _by_pairs(self, work: LayerWork, before: LayerWork) -> np.ndarray:
        """Workload predicted by two layers, and by one for tokens of unseen pairs."""
        workload, unseen = self._pairs.workload(
            work.layer, before.routing, work.routing
        )
        experts = work.routing[unseen].astype(np.int64).reshape(-1)
        experts = experts[experts < self._pairs.experts]
        return workload + self._follows(work.layer, experts).sum(axis=0)

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
        if self._calibrated is None:
            self._learned.observe(last.layer, last.routing, work.routing)
        if self.preceding == 2 and len(before) == 2:
            self._pairs.observe(
                last.layer, before[0].routing, last.routing, work.routing
            )
