"""AdapMoE's prefetch: one expert ahead, the best that is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.base import PrefetchPolicy
from moesim.policies.parameters import expect
from moesim.policies.prefetch._prediction import most_wanted
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey, LayerWork, MachineView


class FirstMissing(PrefetchPolicy):
    """Of the best experts that the next gate chooses for this layer's input, prefetch
    the first absent one.

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
        self.top = top
        self.count = count

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Look one layer ahead."""
        if work.phase != Phase.DECODE:
            return ()
        return most_wanted(
            work, view, "pred1_raw", 1, size=self.top, refill=False, tie="score"
        )[: self.count]
