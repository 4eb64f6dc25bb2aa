"""The life of a copy by hand: wished for, started, landed; five rules.

Dense part 2 s, copy 4 s, GPU 1 s, CPU 10 s and read 8 s unless a test says otherwise.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.handmade import (
    HandCosts,
    plan_of,
    registered,
    routed,
    run,
    shape,
    spans,
    states_of,
    steps,
)

import moesim
from moesim.engine.names import NO_PLACE, STAGED
from moesim.engine.observers import observed
from moesim.policies.base import CachePolicy, Late, PolicyError, PrefetchPolicy
from moesim.policies.cache.lru import LRU
from moesim.policies.names import ABSENT, IN_FLIGHT, RESIDENT
from moesim.policies.systems import System


class Wishes(PrefetchPolicy):
    """In layer 0, wish for experts ``layer.expert/…``."""

    def __init__(self, *, keys: str = "1.1", late: Late = "drop") -> None:
        self.late = late
        self.keys = [tuple(map(int, key.split("."))) for key in keys.split("/")]

    def prefetch(self, work, view, named):
        if work.layer or work.step:
            return 0
        for n, (layer, expert) in enumerate(self.keys):
            named[n] = layer * view.experts + expert
        return len(self.keys)


class Undecided(Wishes):
    """Says what becomes of late copies in words of its own."""

    late = "never"

    def __init__(self) -> None:
        self.keys = []


class Swapping(LRU):
    """In step 0, layer 0, ask for (1, 3) in the place of (1, 0), behind (2, 3) in the
    place of (2, 0).
    """

    def replacements(self, work, states, outgoing, incoming):
        if work.step or work.layer:
            return 0
        for n, layer in enumerate((2, 1)):
            outgoing[n] = layer * self.experts
            incoming[n] = layer * self.experts + 3
        return 2


class Roomy(Swapping):
    """Begins with experts 0 and 1 of each layer, however many fit."""

    def initial(self, slots):
        return np.flatnonzero(np.arange(3 * 4) % 4 < 2)


class Reluctant(CachePolicy):
    """Lets nobody leave."""

    def victims(self, incoming, candidates, chosen):
        pass


@pytest.fixture(autouse=True, scope="module")
def policies_of_this_module():
    with registered(
        prefetch_wishes=Wishes,
        cache_swapping=Swapping,
        cache_roomy=Roomy,
        cache_reluctant=Reluctant,
    ):
        yield


class Watching:
    """Notes the states of some layers' experts on the GPU at every start."""

    def __init__(self, planner):
        self.memory = planner.gpu[0]
        self.starts = []

    def reported(self, call, arguments, answer):
        if call == "start_copy":
            _, key, now_s = arguments
            layer, expert = divmod(key, self.memory.experts)
            self.starts.append((layer, expert, now_s, answer, self.memory.evicted))


def filled(layers, experts, per_layer):
    """A calibration that saw the first `per_layer` experts of each layer."""
    counts = np.zeros((layers, experts))
    counts[:, :per_layer] = 1
    return counts


def made(
    prefetch="none", cache="lru", assignment="on-demand", costs=None, layers=3, **more
):
    """Three layers of four experts, two slots each, which hold experts 0 and 1."""
    slots = more.pop("slots", 2)
    return plan_of(
        shape(layers=layers),
        System(assignment, cache=cache, prefetch=prefetch),
        costs or HandCosts(),
        slots=slots,
        calibration=filled(layers, 4, slots),
        **more,
    )


# -- 1. a place is taken when a copy starts ---------------------------------------------


def test_a_victim_leaves_when_the_link_begins():
    """Two prefetches at 2: (1,2) starts at once and takes the place of (1,0); the
    second, for layer 2, starts at 6. Layer 0 ends at 3: (2,0) is still resident.
    """
    planner = made("wishes:keys=1.2/2.2")
    watching = Watching(planner)
    run(observed(planner, watching), steps([routed(0, 0)]))
    state = states_of(planner)
    assert [start[:3] for start in watching.starts] == [(1, 2, 2.0)]
    assert watching.starts[0][4] == 4
    assert state[1].tolist() == [ABSENT, RESIDENT, IN_FLIGHT, ABSENT]
    assert state[2].tolist() == [RESIDENT, RESIDENT, ABSENT, ABSENT]


def test_a_copy_that_is_dropped_before_it_started_leaves_no_trace():
    """(1,2) is on the link 2-6; layer 1 comes at 5 and drops (1,3). Nobody has left for
    it: expert 1 hits.
    """
    planner = made("wishes:keys=1.2/1.3")
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 1)]))
    assert spans(timeline, "prefetch") == [("h2d0", 2, 2, 6)]
    assert timeline.access_frame()["state"].tolist() == ["hit", "hit"]
    assert states_of(planner)[1].tolist() == [ABSENT, RESIDENT, RESIDENT, ABSENT]
    assert not any(planner.gpu[0].holds)


@pytest.mark.parametrize(("staging", "copied"), [(3, [(2, "staged")]), (1, [])])
def test_a_prefetch_without_a_place_is_staged_or_dropped(staging, copied):
    """A cache that lets nobody leave. One staging slot is demand's alone."""
    planner = made("wishes:keys=1.2", cache="reluctant", staging=staging)
    watching = Watching(planner)
    run(observed(planner, watching), steps([routed(0, 0)]))
    started = [
        (expert, "staged" if place == STAGED else "cached")
        for _, expert, _, place, _ in watching.starts
        if place != NO_PLACE
    ]
    assert started == copied
    # Who was dropped is forgotten.
    assert not planner.gpu[0].wished[1 * 4 + 2]


def test_another_word_for_what_is_late_is_refused():
    refused = pytest.raises(PolicyError, match="late: expected keep, drop or wait")
    with registered(prefetch_undecided=Undecided), refused:
        moesim.replay("tiny", "greedy", prefetch="undecided", steps=1)


def test_a_prefetch_waits_for_the_slot_that_demand_uses():
    """No cache, two slots. The fetch 2-6 is computed to 7; then the prefetch starts."""
    planner = made("wishes:keys=1.1", cache="none", slots=0, staging=2)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 1)]))
    assert spans(timeline, "prefetch") == [("h2d0", 1, 7, 11)]
    assert timeline.access_frame()["state"].tolist() == ["miss", "delayed"]


def test_a_replacement_waits_until_the_one_it_replaces_is_free():
    """Wished for at 3, when layer 0 has joined. (2,3) starts at once, to 7; layer 1,
    from 5 on, computes the (1,0) that (1,3) should replace: only then may it go.
    """
    planner = made(cache="swapping", costs=HandCosts(gpu=3.0, dense=1.0))
    passes = steps([routed(0, 0), routed(1, 0), routed(2, 1)])
    _, timeline = run(planner, passes)
    # Layer 0: dense to 1, product to 4. Layer 1: to 5, product to 8; the link is free
    # at 8 too. Layer 2: to 9, product to 12.
    assert spans(timeline, "replace") == [("h2d0", 3, 4, 8), ("h2d0", 3, 8, 12)]
    assert states_of(planner)[1].tolist() == [ABSENT, RESIDENT, ABSENT, RESIDENT]


def test_free_room_does_not_let_a_replacement_overtake_who_is_being_used():
    """Layer 0 joins at 7; (2,3) is copied 7-11. Layer 1 computes (1,0) from 8 to 14:
    until then (1,3), which is to take its place, waits, though a slot is free.
    """
    planner = made(cache="roomy", slots=3, costs=HandCosts(gpu=6.0, dense=1.0))
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 0), routed(2, 1)]))
    assert spans(timeline, "replace") == [("h2d0", 3, 7, 11), ("h2d0", 3, 14, 18)]


def test_a_replacement_of_who_has_left_is_forgotten():
    """(2,3) is on the link 3-7, (1,3) waits for the place of (1,0). Layer 1 fetches
    (1,2) before it, 7-11, which takes that place.
    """
    planner = made(cache="swapping")
    passes = steps([routed(0, 0), routed(1, 2), routed(2, 1)])
    _, timeline = run(planner, passes)
    assert spans(timeline, "fetch") == [("h2d0", 2, 7, 11)]
    assert spans(timeline, "replace") == [("h2d0", 3, 3, 7)]
    assert not planner.gpu[0].wished[1 * 4 + 3]


# -- 2. what is awaited is promoted -----------------------------------------------------


class Arrivals:
    """Notes what each plan expected of its active experts."""

    def __init__(self, planner):
        self.work = planner.work
        self.expected = {}

    def reported(self, call, arguments, answer):
        if call == "plan":
            shown = self.work.arrays()
            self.expected[answer.step, answer.layer] = (
                shown.state.tolist(),
                shown.arrive_s[0].tolist(),
            )


def test_a_queued_prefetch_that_a_layer_awaits_becomes_its_demand():
    """(2,2) is on the link from 2 on; (1,3) waits behind it and behind (2,3). Layer 1
    comes at 5 and needs it: expected after the copy under way, 1 s, and its own, 4 s.
    """
    planner = made("wishes:keys=2.2/2.3/1.3")
    arrivals = Arrivals(planner)
    _, timeline = run(observed(planner, arrivals), steps([routed(0, 0), routed(1, 3)]))
    assert arrivals.expected[0, 1] == ([ABSENT], [5.0])
    assert spans(timeline, "fetch") == [("h2d0", 3, 6, 10)]
    assert spans(timeline, "prefetch")[0] == ("h2d0", 2, 2, 6)


def test_a_queued_replacement_that_a_layer_awaits_is_promoted():
    """(2,3) is on the link 3-7; (1,3), asked for by the cache at the lowest priority, is
    needed by layer 1 at 5: 2 s are left and 4 its own. It goes before a prefetch.
    """
    planner = made(cache="swapping")
    arrivals = Arrivals(planner)
    _, timeline = run(
        observed(planner, arrivals), steps([routed(0, 0), routed(1, 3), routed(2, 1)])
    )
    assert arrivals.expected[0, 1] == ([ABSENT], [6.0])
    assert spans(timeline, "replace") == [("h2d0", 3, 3, 7), ("h2d0", 3, 7, 11)]
    assert spans(timeline, "compute")[1] == ("gpu0", 3, 11, 12)
    assert states_of(planner)[1].tolist() == [ABSENT, RESIDENT, ABSENT, RESIDENT]


def test_a_read_behind_an_awaited_copy_is_promoted_too():
    """Host memory of one. Reads of (2,2), 2-10, then (2,3), then (1,3) for prefetches;
    layer 1 comes at 5 and awaits (1,3): its read is next, 10-18, its copy 18-22.
    """
    planner = made("wishes:keys=2.2/2.3/1.3", host_slots=1, staging=3)
    arrivals = Arrivals(planner)
    _, timeline = run(observed(planner, arrivals), steps([routed(0, 0), routed(1, 3)]))
    assert spans(timeline, "read") == [("ssd", 2, 2, 10), ("ssd", 3, 10, 18)]
    # 5 s of the read under way, 8 of its own, 4 of the copy.
    assert arrivals.expected[0, 1] == ([ABSENT], [17.0])
    assert spans(timeline, "fetch") == [("h2d0", 3, 18, 22)]


# -- 3. in flight is not out of reach ---------------------------------------------------


@pytest.mark.parametrize("assignment", [
    "greedy",
    "exact",
    "exact:objective=scheduled",
    "ilp",
    "hybrimoe-schedule",
    "hybrimoe-schedule:reading=r1,stealing=false",
])  # fmt: skip
def test_the_cpu_computes_what_is_50_seconds_away(assignment):
    """Two layers, one expert each; copy 50 s, CPU 2 s.

    Layer 0: dense to 2, its resident on the GPU to 3; the prefetch of (1,1) 2-52. Layer
    1: dense to 5, and (1,1), in flight, on the CPU to 7. Awaited, it would be 53.
    """
    planner = plan_of(
        shape(layers=2),
        System(assignment, prefetch="wishes:keys=1.1", cache="lru"),
        HandCosts(cpu=2.0, copy=50.0),
        slots=1,
        calibration=filled(2, 4, 1),
    )
    result, timeline = run(planner, steps([routed(0, 0), routed(1, 1)]))
    assert result.makespan_s == 7
    assert timeline.access_frame()["state"].tolist() == ["hit", "delayed"]
    assert timeline.access_frame()["lane"].tolist() == ["gpu0", "cpu"]
    # The copy goes on.
    assert states_of(planner)[1, 1] == IN_FLIGHT


def test_a_copy_that_has_not_started_is_taken_back_when_the_cpu_takes_over():
    """(2,2) is on the link; (1,3) behind it is computed on the CPU and never copied."""
    planner = made(
        "wishes:keys=2.2/1.3", assignment="greedy", costs=HandCosts(cpu=2.0, copy=50.0)
    )
    result, timeline = run(planner, steps([routed(0, 0), routed(1, 3)]))
    assert result.makespan_s == 7
    assert not planner.gpu[0].wished[1 * 4 + 3]
    assert not spans(timeline, "fetch")


# -- 5. demand never waits behind prefetches for a staging slot -------------------------


def test_demand_takes_the_staging_slot_of_the_farthest_guess():
    """Two slots; (2,2) was staged 2-6 for a later layer. Layer 1 needs two at once:
    the first takes the free slot, the second that of (2,2).
    """
    planner = made(
        "wishes:keys=2.2", cache="none", slots=0, costs=HandCosts(gpu=5.0), staging=2
    )
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 1, 2), routed(2, 2)]))
    # Layer 0: fetch 2-6, product to 11. The prefetch waits for its slot: 11-15.
    assert spans(timeline, "prefetch") == [("h2d0", 2, 11, 15)]
    # Layer 1: dense to 13, fetches 15-19 and 19-23, without a wait between them.
    fetches = spans(timeline, "fetch")
    assert fetches[1:3] == [("h2d0", 1, 15, 19), ("h2d0", 2, 19, 23)]
    assert timeline.access_frame()["state"].tolist()[-1] == "miss"


def test_a_read_goes_before_guesses_that_fill_host_memorys_staging():
    """One place in host memory and one beside it; a queued guess keeps neither."""
    planner = made(
        "wishes:keys=0.3/0.2/1.3,late=keep",
        assignment="all-cpu",
        cache="reluctant",
        host_slots=1,
        staging=1,
    )
    result, timeline = run(planner, steps([routed(0, 2, 3), routed(1, 3)]))
    assert len(spans(timeline, "compute")) == 3
    assert result.makespan_s < 100


@pytest.mark.parametrize("prefetch", ["whole-layer", "hybrimoe-released"])
def test_a_copy_of_this_very_plan_is_not_promoted_before_it_is_queued(prefetch):
    """A cache replaces before the layer step is assigned; the barrier promotes what
    earlier plans have queued.
    """
    run = moesim.replay(
        "tiny", "greedy", cache="prefill-swap", prefetch=prefetch, steps=4
    )
    assert run.metrics["steps"] == 4


@pytest.mark.parametrize("engine", ["simpy", "fast"])
def test_an_awaited_read_takes_the_slot_that_a_landed_copy_has_left_to_a_guess(engine):
    """Host memory has one slot, and an expert in it that two GPUs want for later. While
    one copy runs the other cannot yield alone. When it has landed the read must be
    offered again, or everybody waits for ever.
    """
    replayed = moesim.replay(
        "tiny",
        "on-demand",
        cache="decayed-frequency:half_life=2,margin=0.1",
        hw="dali-2x-rtx3090",
        gpu_split="experts",
        cache_ratio=0.3,
        host_memory_bytes=13 * 86016,
        host_cache="none",
        staging=1,
        batch=2,
        engine=engine,
    )
    assert replayed.metrics["steps"] == 196
