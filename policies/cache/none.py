"""No cache."""

from __future__ import annotations

import numpy as np

from moesim.policies.cache._own_replacements import NoAdmissionCache


class NoCache(NoAdmissionCache):
    """Keep nothing: every fetched expert runs from staging and is gone afterwards. A
    calibration fills nothing either.

    Source: the caches of Pre-gated MoE and DeepSpeed, which have buffers only.
    """

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Start empty, whatever would fit."""
        del capacity_slots
        return np.empty(0, np.int64)
