"""DALI's workload-aware cache: experts are replaced at the end of every window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.cache._own_replacements import ReplacingCache
from moesim.policies.cache.static import Static
from moesim.policies.names import NONE, PREFILL, RESIDENT
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Trigger = Literal["aligned", "literal"]
Swaps = Literal["always", "gain-only"]
Deadline = Literal["visit", "none"]
Fill = Literal["random", "calibrated", "lowest"]


class WorkloadWindow(ReplacingCache):
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
        self.literal = trigger == "literal"
        self.gain_only = gain == "gain-only"
        self.prefill = prefill
        self.lands_by_next_visit = deadline == "visit"
        self.fill: Fill = fill

    def start(self, context: RunContext) -> None:
        """Begin all sums, which are the scores, at 0."""
        ReplacingCache.start(self, context)
        self.steps: Ints = zeros(self.layers, np.int64)
        self.may_enter: Ints = zeros(self.experts, np.int8)
        self.may_leave: Ints = zeros(self.experts, np.int8)
        self._initial_content = Static(fill=self.fill)
        self._initial_content.start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Fill the cache as `fill` says: int64 flat keys, ascending."""
        return self._initial_content.initial(capacity_slots)

    def admits(self, work: Work, key: int) -> bool:
        return False

    def accessed(self, work: Work) -> None:
        """Add this step's tokens to the layer's sums."""
        if work.phase == PREFILL and not self.prefill:
            return
        for i in range(work.active):
            self.score[work.first + work.experts[i]] += work.tokens[i]
        self.steps[work.layer] += 1

    def replacements(
        self, work: Work, states: Ints, outgoing: Ints, incoming: Ints
    ) -> int:
        """At the end of a window, pair the busiest outside with the idlest inside, and
        begin a new window.
        """
        if work.phase == PREFILL and not self.prefill:
            return 0
        # Algorithm 2 counts from 0, so its first window ends after one step.
        done = self.steps[work.layer] - self.literal
        if done % self.window:
            return 0
        for expert in range(self.experts):
            key = work.first + expert
            # What is inside may still be in flight, and then it cannot leave yet.
            landed = states[key] == RESIDENT
            self.may_enter[expert] = not self.inside[key]
            self.may_leave[expert] = landed and self.inside[key]
        count = self._paired(work.first, outgoing, incoming)
        # The window ends here even if nothing is swapped.
        for key in range(work.first, work.first + self.experts):
            self.score[key] = 0.0
        return count

    def _paired(self, first: int, outgoing: Ints, incoming: Ints) -> int:
        count = 0
        while count < self.swaps:
            busiest = self._largest(first, 1.0, self.may_enter)
            idlest = self._largest(first, -1.0, self.may_leave)
            if busiest < 0 or idlest < 0:
                break
            gains = self.score[first + busiest] > self.score[first + idlest]
            # Both only get closer: once a pair gains nothing, none does.
            if self.gain_only and not gains:
                break
            outgoing[count] = first + idlest
            incoming[count] = first + busiest
            count += 1
            self.may_enter[busiest] = 0
            self.may_leave[idlest] = 0
        return count

    def _largest(self, first: int, sign: float, among: Ints) -> int:
        """The expert with the largest sum, or, by the sign, the smallest; ties to the
        lower id; -1 if there is none.
        """
        best = NONE
        most = 0.0
        for expert in range(self.experts):
            value = sign * self.score[first + expert]
            if among[expert] and (best < 0 or value > most):
                best = expert
                most = value
        return best
