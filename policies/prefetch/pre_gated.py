"""Pre-gated MoE's prefetch, whose gates were retrained to decide one layer early."""

from __future__ import annotations

from moesim.policies.prefetch.clairvoyant import Clairvoyant


class PreGated(Clairvoyant):
    """Prefetch the next layer's experts, which this layer's gate already knows.

    To a trace of an unchanged model that is perfect foresight of one layer, so it
    counts as an oracle. The first layer runs on demand. What the retraining costs in
    quality is not modelled.

    Source: Pre-gated MoE; our reference, section 6.6.
    """

    def __init__(self) -> None:
        # Perfect foresight stands in for the retrained gate.
        super().__init__(depth=1)
