"""EdgeMoE's prefetch by a table of transitions between layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import PolicyError, PrefetchPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._absent_experts import absent_experts
from moesim.policies.prefetch._transitions import Transitions
from moesim.policies.ranking import ranked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView, RunContext

Table = Literal["auto", "calibrated", "online"]


class Statistical(PrefetchPolicy):
    """Prefetch the experts that most often follow this layer's active experts.

    The predicted workload of expert e is the sum over tokens, and over each token's
    experts a, of P(e | a). EdgeMoE itself looks at the experts of the two preceding
    layers; here one layer predicts, as in our reference.

    Args:
        size: experts of the next layer, ranked by predicted workload, ties to the lower
            id.
        table: ``calibrated`` reads ``extras["transitions"]`` (see
            `moesim.policies.prefetch._transitions`); ``online`` counts what this run
            has seen so far, and so needs no calibration; ``auto`` is the first where it
            exists.
        refill: False lets experts that are present use up their rank, True takes the
            next in rank instead.

    Source: EdgeMoE; our reference, section 6.7.
    """

    def __init__(
        self,
        *,
        size: int = 4,
        table: Table = "auto",
        refill: bool = False,
    ) -> None:
        expect(size >= 0, "size", "a number >= 0", size)
        expect_choice("table", table, Table)
        self.size = size
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
        self._before: LayerWork | None = None

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Predict the next layer; on the way learn how this one followed the last."""
        # The last layer predicts nothing, but how it was reached is learned.
        if self._calibrated is None:
            self._learn(work)
        layer = work.layer + 1
        if layer >= view.layers:
            return ()

        if self._calibrated is None:
            follows = self._learned.rows(work.layer, work.experts)
        else:
            follows = self._calibrated[work.layer, work.experts]
        workload = work.tokens @ follows
        # Experts that never followed are not wanted.
        followed = np.count_nonzero(workload)
        return absent_experts(
            ranked(workload)[:followed],
            layer,
            view,
            size=self.size,
            refill=self.refill,
        )

    def _learn(self, work: LayerWork) -> None:
        """Count how this layer's experts followed those of the layer before."""
        before = self._before
        self._before = work
        if before is None:
            return
        # Transitions do not cross from the last layer to the next step's first.
        if before.step != work.step or before.layer + 1 != work.layer:
            return
        # Layers of a ragged prefill hold different tokens.
        if len(before.routing) == len(work.routing):
            self._learned.observe(before.layer, before.routing, work.routing)
