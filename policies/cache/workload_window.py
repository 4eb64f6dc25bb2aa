"""DALI's workload-aware cache: experts are replaced at the end of every window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import ExpertKey, Swap
from moesim.policies.cache._own_replacements import OwnReplacementsCache
from moesim.policies.cache.static import Static
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import highest_first, lowest_first
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView, RunContext

Trigger = Literal["aligned", "literal"]
Swaps = Literal["always", "gain-only"]
Deadline = Literal["visit", "none"]
Fill = Literal["random", "calibrated", "lowest"]


class WorkloadWindow(OwnReplacementsCache):
    """Every `window` steps, replace the residents with the fewest tokens by the absent
    experts with the most.

    Tokens are summed over the w steps of a window, then the u busiest absent experts
    are swapped with the u idlest residents. Each layer has a window of its own, in
    global scope too, where a swap stays within its layer. Ranks are paired, best with
    worst; ties go to the lower id; u is cut to what there is. Experts fetched on demand
    never enter; one whose copy from the last window is still in flight does not leave.
    The swaps are copied after the layer step, behind its demand loads; what has not
    started when the layer comes again goes first then.

    Args:
        window: w, steps of a layer per window: 4 as published.
        swaps: u, experts per window: 1 for Mixtral, 8 for DeepSeek and Qwen.
        trigger: ``aligned`` swaps after steps w, 2w, …, so that a window sums exactly w
            steps as eq. 12 does; ``literal`` swaps when ``i mod w == 0`` as Alg. 2
            prints, first after a single step.
        gain: ``always`` swaps whatever the sums, as published; ``gain-only`` a pair
            only if its incoming sum is larger.
        prefill: whether a prefill step counts as one step with all its tokens (our
            reading); if not it is skipped.
        deadline: ``visit`` lets swaps go first when their layer comes again (algorithms
            §1.7 f), which copies issued in stream order do at the latest; with ``none``
            they are background work, which a busy link may put off for many windows.
            The batches of the paper hardly tell them apart; small ones pay for the
            deadline (docs/measurements/systems.md).
        fill: the start: ``random`` as published, ``calibrated``, or ``lowest`` ids.

    Source: DALI Alg. 2, with line 11 read as the text says (lowest leaves); algorithms
    §1.7.
    """

    def __init__(
        self,
        *,
        window: int = 4,
        swaps: int = 8,
        trigger: Trigger = "aligned",
        gain: Swaps = "always",
        prefill: bool = True,
        deadline: Deadline = "visit",
        fill: Fill = "random",
    ) -> None:
        expect(window >= 1, "window", ">= 1", window)
        expect(swaps >= 0, "swaps", ">= 0", swaps)
        expect_choice("trigger", trigger, Trigger)
        expect_choice("gain", gain, Swaps)
        expect_choice("deadline", deadline, Deadline)
        expect_choice("fill", fill, Fill)
        self.window = window
        self.swaps = swaps
        self.trigger = trigger
        self.gain = gain
        self.prefill = prefill
        self.deadline = deadline
        self.lands_by_next_visit = deadline == "visit"
        self.fill: Fill = fill

    def start(self, context: RunContext) -> None:
        """Begin all sums at 0."""
        super().start(context)
        self._initial_content = Static(fill=self.fill)
        self._initial_content.start(context)
        self._sums = np.zeros(self.inside.shape, np.int64)
        self._steps = [0] * len(self.inside)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Fill the cache as `fill` says: int64 flat keys, ascending."""
        return self._initial_content.initial(capacity_slots)

    def accessed(self, work: LayerWork) -> None:
        """Add this step's tokens to the layer's sums."""
        if self._counts(work):
            self._sums[work.layer, work.experts] += work.tokens
            self._steps[work.layer] += 1

    def replacements(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[Swap]:
        """At the end of a window, pair the busiest outside with the idlest inside, and
        begin a new window.
        """
        layer = work.layer
        # Algorithm 2 counts from 0, so its first window ends after one step.
        done = self._steps[layer]
        if self.trigger == "literal":
            done -= 1
        if not self._counts(work) or done % self.window:
            return ()

        sums = self._sums[layer].copy()
        # The window ends here even if nothing is swapped.
        self._sums[layer] = 0
        inside = np.flatnonzero(self.settled(layer, view))
        outside = np.flatnonzero(~self.inside[layer])
        leaving = lowest_first(inside, sums[inside])[: self.swaps]
        entering = highest_first(outside, sums[outside])[: self.swaps]

        # The shorter list decides how many are swapped.
        pairs = zip(leaving.tolist(), entering.tolist(), strict=False)
        swaps = []
        for outgoing, incoming in pairs:
            if self.gain == "always" or sums[incoming] > sums[outgoing]:
                swaps.append(
                    Swap(
                        outgoing=ExpertKey(layer, outgoing),
                        incoming=ExpertKey(layer, incoming),
                    )
                )
        return swaps

    def _counts(self, work: LayerWork) -> bool:
        """Whether this layer step belongs to a window."""
        return self.prefill or work.phase != Phase.PREFILL
