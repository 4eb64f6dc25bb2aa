"""No cache: every fetched expert runs from staging and is gone afterwards."""

from __future__ import annotations

import numpy as np

from policies.base import CachePolicy, LayerWork


class NoCache(CachePolicy):
    """Admit nothing.

    Source: the caches of Pre-gated MoE and DeepSpeed, which have buffers only (algorithms §6.5, §6.6).
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
