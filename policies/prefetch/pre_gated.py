"""Pre-gated MoE's prefetch, whose gates were retrained to decide one layer early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.base import ExpertKey
from moesim.policies.prefetch._future import FuturePrefetch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView


class PreGated(FuturePrefetch):
    """Prefetch the next layer's experts, which this layer's gate already knows.

    To a trace of an unchanged model that is perfect foresight of one layer, so it
    counts as an oracle. The first layer runs on demand. What the retraining costs in
    quality is not modelled.

    Source: Pre-gated MoE; our reference, section 6.6.
    """

    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Name the next layer's experts in ascending id."""
        # Perfect foresight stands in for the retrained gate.
        experts = self.coming(work, view, depth=1).tolist()
        return [ExpertKey(work.layer + 1, expert) for expert in experts]
