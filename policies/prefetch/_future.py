"""Base of prefetching oracles: access to the coming layers of the same step."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.base import PrefetchPolicy

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, MachineView, RunContext


class FuturePrefetch(PrefetchPolicy):
    """Sees which experts the coming layers of a step will use. The planner refuses it
    where there is no future.
    """

    oracle: ClassVar[bool] = True

    def start(self, context: RunContext) -> None:
        """Keep the future."""
        self._future = context.future

    def coming(
        self,
        work: LayerWork,
        view: MachineView,
        depth: int,
    ) -> np.ndarray:
        """Active experts `depth` layers on in this step, int32 ascending; none past the
        last layer.
        """
        layer = work.layer + depth
        # The next step's first layers are out of reach: its tokens are not there yet.
        if self._future is None or layer >= view.layers:
            return np.zeros(0, np.int32)
        return self._future.active(work.step, layer)
