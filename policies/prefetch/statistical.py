"""EdgeMoE's table: who usually comes after whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from moesim.policies.base import PolicyError, PrefetchPolicy
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.prefetch._transitions import Transitions
from moesim.policies.prefetch._wishes import wishes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView, RunContext

Table = Literal["auto", "calibrated", "online"]


class Statistical(PrefetchPolicy):
    """Prefetch the experts that most often follow this layer's active experts.

    The predicted workload of expert e is the sum over tokens, and over each token's
    experts a, of P(e | a). EdgeMoE itself looks at the experts of the two preceding
    layers; here one layer speaks, as in our reference.

    Args:
        size: experts of the next layer, ranked by predicted workload, ties to the lower
            id.
        table: ``calibrated`` reads ``extras["transitions"]`` (see
            `moesim.policies.prefetch._transitions`); ``online`` counts what this run
            has seen so far, and so needs no calibration; ``auto`` is the first where it
            exists.
        refill: False lets experts that are present use up their place, True takes the
            next in rank instead.

    Source: EdgeMoE; our reference, section 6.7.
    """

    def __init__(
        self, *, size: int = 4, table: Table = "auto", refill: bool = False
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
        given = None if self.table == "online" else context.extras.get("transitions")
        if given is None and self.table == "calibrated":
            raise PolicyError(
                "prefetch policy 'statistical': table=calibrated needs a calibration;"
                " found none"
            )
        if given is not None and np.shape(given) != (layers, experts, experts):
            raise PolicyError(
                "prefetch policy 'statistical': calibration 'transitions': expected"
                f" shape {(layers, experts, experts)}, got {np.shape(given)}"
            )
        self._given = None if given is None else np.asarray(given, np.float64)
        self._learned = Transitions(layers, experts)
        self._before: LayerWork | None = None

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Predict the next layer; on the way learn how this one followed the last."""
        if self._given is None:
            self._learn(work)
        if work.layer + 1 >= view.layers:
            return ()
        follows = self._learned.rows(work.layer, work.experts)
        if self._given is not None:
            follows = self._given[work.layer, work.experts]
        workload = work.tokens @ follows
        ranked = np.argsort(-workload, kind="stable")
        ranked = ranked[: np.count_nonzero(workload)]
        return wishes(ranked, work.layer + 1, view, size=self.size, refill=self.refill)

    def _learn(self, work: LayerWork) -> None:
        before = self._before
        self._before = work
        if before is None or (before.step, before.layer + 1) != (work.step, work.layer):
            return
        # Layers of a ragged prefill hold different tokens.
        if len(before.routing) == len(work.routing):
            self._learned.observe(before.layer, before.routing, work.routing)
