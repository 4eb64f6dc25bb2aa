"""What prefetching oracles share: the future, and which layers of it they may look
at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from moesim.policies.base import PrefetchPolicy

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, MachineView, RunContext


class Foresight(PrefetchPolicy):
    """Knows the coming layers of the same step. The planner refuses it where there is
    no future.
    """

    oracle: ClassVar[bool] = True

    def start(self, context: RunContext) -> None:
        """Keep the future."""
        self._future = context.future

    def coming(self, work: LayerWork, view: MachineView, ahead: int) -> np.ndarray:
        """Active experts `ahead` layers on in this step, int32 ascending; none past the
        last layer.
        """
        if self._future is None or work.layer + ahead >= view.layers:
            return np.zeros(0, np.int32)
        return self._future.active(work.step, work.layer + ahead)
