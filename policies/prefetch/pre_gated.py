"""Pre-gated MoE: the gate was retrained to decide one layer early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.base import ExpertKey
from moesim.policies.prefetch._foresight import Foresight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView


class PreGated(Foresight):
    """Prefetch the next layer's experts, which this layer's gate already knows.

    To a trace of an unchanged model that is perfect foresight of one layer, so it
    counts as an oracle. The first layer runs on demand. What the retraining costs in
    quality is not modelled.

    Source: Pre-gated MoE; our reference, section 6.6.
    """

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Name the next layer's experts in ascending id."""
        return [
            ExpertKey(work.layer + 1, expert)
            for expert in self.coming(work, view, 1).tolist()
        ]
