"""Caches into which no fetched expert ever comes: they are empty, fixed, or swap on
their own account.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.base import CachePolicy

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork


class ClosedCache(CachePolicy):
    """Admits nothing: what is fetched or prefetched runs from staging and is gone
    afterwards.
    """

    def accessed(self, work: LayerWork) -> None:
        """Remember nothing."""

    def admits(self, work: LayerWork, incoming: np.ndarray) -> np.ndarray:
        """Refuse all."""
        del work
        return np.zeros(len(incoming), dtype=np.bool_)

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Decline all."""
        del candidates
        return np.full(len(incoming), -1, np.int64)
