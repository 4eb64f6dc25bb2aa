"""SP-MoE's prefetch while tokens are drafted, down to a cutoff layer."""

from __future__ import annotations

from moesim.policies.parameters import expect
from moesim.policies.prefetch._drafted import DraftedPrefetch


class SPMoE(DraftedPrefetch):
    """Prefetch the first layers' experts of every token that was just drafted.

    The draft model resembles the target: its attention output, given to the target's
    gates, predicts the target's experts. Behind the cutoff layer nothing is prefetched,
    as it would come too late or take the link from demand.

    Args:
        accuracy: share of a token's experts that are predicted right, drawn. Assumed:
            we know no published number for a layer's whole top k.
        cutoff: layers that are prefetched; none for those whose copies can have landed
            when their turn comes, at the earliest: when the next token is drafted, and
            a dense part later for each layer in between. The paper takes a number of
            layers from a profile and a model of the latency.

    Source: SP-MoE (arXiv 2510.10302), as its abstract and introduction describe it.
    """

    def __init__(self, *, accuracy: float = 0.9, cutoff: int | None = None) -> None:
        holds = cutoff is None or cutoff >= 0
        expect(holds, "cutoff", "a number >= 0 or none", cutoff)
        super().__init__(accuracy=accuracy, cutoff=cutoff)
