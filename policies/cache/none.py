"""No cache: every fetched expert runs from staging and is gone afterwards."""

from __future__ import annotations

from moesim.policies.cache._no_admission import ClosedCache


class NoCache(ClosedCache):
    """Admit nothing.

    Source: the caches of Pre-gated MoE and DeepSpeed, which have buffers only
    (algorithms §6.5, §6.6).
    """
