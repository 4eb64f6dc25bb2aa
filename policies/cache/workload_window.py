"""DALI's workload-aware cache: experts are replaced at the end of every window."""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import RESIDENT, RunContext
from moesim.policies.cache._kernels import mark_keys
from moesim.policies.cache.static import Static
from moesim.policies.compiled import CompiledCache
from moesim.policies.kernels import (
    ACCESSED,
    MOVED,
    REPLACEMENTS,
    CacheKernels,
    State,
    Work,
    admits_nothing,
    state,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.traces.format.schema import Phase

Trigger = Literal["aligned", "literal"]
Swaps = Literal["always", "gain-only"]
Deadline = Literal["visit", "none"]
Fill = Literal["random", "calibrated", "lowest"]

PREFILL = int(Phase.PREFILL)

# Rows of the state's marks: by key, and steps of the window by layer.
_INSIDE = 0
_SUMS = 1
_STEPS = 2

# Places in the state's integers.
_EXPERTS = 0
_WINDOW = 1
_MOST_SWAPS = 2
_LITERAL = 3
_GAIN_ONLY = 4
_PREFILL_COUNTS = 5


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    """Add this step's tokens to the layer's sums."""
    if work.phase == PREFILL and not state.integers[_PREFILL_COUNTS]:
        return
    first = work.layer * state.integers[_EXPERTS]
    for i in range(len(work.experts)):
        state.marks[_SUMS, first + work.experts[i]] += work.tokens[i]
    state.marks[_STEPS, work.layer] += 1


@compiled(MOVED)
def _admitted(state: State, keys: np.ndarray) -> None:
    mark_keys(state.marks[_INSIDE], keys, 1)


@compiled(MOVED)
def _evicted(state: State, keys: np.ndarray) -> None:
    mark_keys(state.marks[_INSIDE], keys, 0)


@compiled
def _largest(sums: np.ndarray, among: np.ndarray) -> int:
    """The expert with the largest sum, ties to the lower id; -1 if there is none."""
    best = -1
    for expert in range(len(sums)):
        if among[expert] and (best < 0 or sums[expert] > sums[best]):
            best = expert
    return best


@compiled(REPLACEMENTS)
def _replacements(
    state: State,
    work: Work,
    states: np.ndarray,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """At the end of a window, pair the busiest outside with the idlest inside, and
    begin a new window.
    """
    if work.phase == PREFILL and not state.integers[_PREFILL_COUNTS]:
        return 0
    # Algorithm 2 counts from 0, so its first window ends after one step.
    done = state.marks[_STEPS, work.layer] - state.integers[_LITERAL]
    if done % state.integers[_WINDOW]:
        return 0

    width = state.integers[_EXPERTS]
    first = work.layer * width
    sums = state.marks[_SUMS, first : first + width].copy()
    # The window ends here even if nothing is swapped.
    state.marks[_SUMS, first : first + width] = 0

    # What is inside may still be in flight, and then it cannot leave yet.
    may_enter = np.zeros(width, np.bool_)
    may_leave = np.zeros(width, np.bool_)
    for expert in range(width):
        may_enter[expert] = state.marks[_INSIDE, first + expert] == 0
        landed = states[first + expert] == RESIDENT
        may_leave[expert] = landed and not may_enter[expert]

    count = 0
    while count < state.integers[_MOST_SWAPS]:
        busiest = _largest(sums, may_enter)
        idlest = _largest(-sums, may_leave)
        if busiest < 0 or idlest < 0:
            break
        # Both only get closer: once a pair gains nothing, none does.
        if state.integers[_GAIN_ONLY] and sums[busiest] <= sums[idlest]:
            break
        outgoing[count] = first + idlest
        incoming[count] = first + busiest
        count += 1
        may_enter[busiest] = False
        may_leave[idlest] = False
    return count


class WorkloadWindow(CompiledCache):
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

    replaces_by_kernel = True

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

    def bring(self, context: RunContext) -> CacheKernels:
        """Begin all sums at 0."""
        self._initial_content = Static(fill=self.fill)
        self._initial_content.start(context)
        shape = context.shape
        rules = (
            self.window,
            self.swaps,
            self.trigger == "literal",
            self.gain == "gain-only",
            self.prefill,
        )
        return CacheKernels(
            state(
                marks=np.zeros((3, shape.layers * shape.experts)),
                integers=[shape.experts, *rules],
            ),
            accessed=_accessed,
            admits=admits_nothing,
            admitted=_admitted,
            evicted=_evicted,
            replacements=_replacements,
        )

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Fill the cache as `fill` says: int64 flat keys, ascending."""
        return self._initial_content.initial(capacity_slots)
