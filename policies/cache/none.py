"""No cache."""

from __future__ import annotations

from moesim.policies.cache._no_admission import NoAdmissionCache


class NoCache(NoAdmissionCache):
    """Keep nothing: every fetched expert runs from staging and is gone afterwards.

    Source: the caches of Pre-gated MoE and DeepSpeed, which have buffers only
    (algorithms §6.5, §6.6).
    """
