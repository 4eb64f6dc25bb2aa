"""Base of caches that admit no fetched expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import CachePolicy

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork


class NoAdmissionCache(CachePolicy):
    """Admits nothing: what is fetched or prefetched runs from staging and is gone
    afterwards.

    A subclass may be empty, have fixed content (`initial`) or replace experts on its
    own account (`replacements`).
    """

    def admits(
        self,
        work: LayerWork,
        incoming: np.ndarray,
    ) -> np.ndarray:
        """Refuse all."""
        del work
        return np.zeros(len(incoming), dtype=np.bool_)

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Decline all."""
        del candidates
        return np.full(len(incoming), -1, np.int64)
