"""MoE-SpeQ's prefetch of everything that drafted tokens will use."""

from __future__ import annotations

from moesim.policies.prefetch._drafted import DraftedPrefetch

_EVERY_LAYER = 1 << 62


class MoESpeQ(DraftedPrefetch):
    """Prefetch the experts of every token that was just drafted, in all layers.

    The model drafts for itself, in few bits and wholly on the GPU, so its own gates say
    what the verifying pass will use. Copies go on while that pass runs; those that have
    not started when their layer comes are dropped or become demand.

    Args:
        accuracy: share of a token's experts that are predicted right, drawn. Assumed:
            we know no published number.

    Source: MoE-SpeQ (arXiv 2511.14102), as its abstract describes it. Its governor,
    which chooses how many tokens to draft, is left to the user.
    """

    def __init__(self, *, accuracy: float = 0.95) -> None:
        super().__init__(accuracy=accuracy, cutoff=_EVERY_LAYER)
