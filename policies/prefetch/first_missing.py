"""AdapMoE's prefetch of one absent expert of the next layer."""

from __future__ import annotations

from moesim.policies.names import DECODE
from moesim.policies.parameters import expect
from moesim.policies.prefetch._ranked import PredictedWorkload
from moesim.policies.run_context import Evaluations


class FirstMissing(PredictedWorkload):
    """Prefetch the best absent expert among the few that the next gate prefers for this
    layer's input.

    Decode only, as in the released code, which looks ahead while a single token is
    decoded; for a batch experts are ranked by predicted workload, then by summed score.

    Args:
        top: ranked experts among which the first absent one is sought; the released
            code has Mixtral's 2.
        count: absent ones taken; 1 in the source.

    Source: AdapMoE, `src/custom_layers.py`.
    """

    needs = ("pred1_raw",)

    def __init__(self, *, top: int = 2, count: int = 1) -> None:
        expect(top >= 0, "top", "a number >= 0", top)
        expect(count >= 0, "count", "a number >= 0", count)
        # Present experts use up their rank, so only the best `top` are considered.
        self.ranks(size=top, refill=False, tie="score", most=count, decode_only=True)

    def evaluations(self, following: int, phase: int) -> Evaluations:
        """The next layer's gate, in decode."""
        del following
        return Evaluations(gates=int(phase == DECODE))
