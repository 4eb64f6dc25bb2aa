"""One layer step by hand: what waits for what, and for how long."""

from dataclasses import replace

import pytest
from support.handmade import (
    HandCosts,
    HandProfile,
    plan_of,
    plan_step,
    registered,
    routed,
    run,
    shape,
    spans,
    steps,
)

from moesim.policies.base import RoutingPolicy
from moesim.policies.cache.lru import LRU
from moesim.policies.names import RESIDENT
from moesim.policies.systems import System
from moesim.sim.clock import FastClock
from moesim.sim.simpy_clock import SimpyClock

ON_GPU = System("on-demand", cache="lru")
ON_CPU = System("all-cpu", cache="none")


def test_a_single_lane_adds_up():
    """Dense 2 + three CPU experts of 10 each, one after the other = 32."""
    planner = plan_of(shape(), ON_CPU)
    result, timeline = run(planner, steps([routed(0, 0, 1, 2)]))
    assert result.makespan_s == 2 + 3 * 10
    assert spans(timeline, "compute") == [
        ("cpu", 0, 2, 12),
        ("cpu", 1, 12, 22),
        ("cpu", 2, 22, 32),
    ]


def test_second_miss_waits_for_first_copy():
    """Copies 2-6 and 6-10 on one link; compute 6-7 and 10-11 as they land."""
    planner = plan_of(shape(), ON_GPU, slots=2)
    result, timeline = run(planner, steps([routed(0, 0, 1)]))
    assert spans(timeline, "fetch") == [("h2d0", 0, 2, 6), ("h2d0", 1, 6, 10)]
    assert spans(timeline, "compute") == [("gpu0", 0, 6, 7), ("gpu0", 1, 10, 11)]
    assert result.makespan_s == 11


def test_residents_run_while_copies_are_on_their_way():
    """Second step: expert 0 is a hit and runs at once; expert 2 evicts 1 and arrives 4
    s later.
    """
    planner = plan_of(shape(), ON_GPU, slots=2)
    _, timeline = run(planner, steps([routed(0, 0, 1)], [routed(0, 0, 2)]))
    assert spans(timeline, "compute")[2:] == [("gpu0", 0, 13, 14), ("gpu0", 2, 17, 18)]
    states = timeline.access_frame()["state"].tolist()
    assert states == ["miss", "miss", "hit", "miss"]


def test_planning_dispatch_first_operation_join_and_activation_are_charged_once_each():
    """dense 2, plan .5, CPU: first 1 + dispatch .25 + cold CPU 3 + 10, then .25 + 10;
    activation .125, join .0625.
    """
    costs = HandCosts(
        plan=0.5,
        dispatch_s=0.25,
        first_op=1.0,
        cpu_first_s=3.0,
        activation=0.125,
        join=0.0625,
    )
    planner = plan_of(shape(), ON_CPU, costs)
    result, timeline = run(planner, steps([routed(0, 0, 1)]))
    assert (
        result.makespan_s
        == 2 + 0.5 + (1 + 0.25 + 3 + 10) + (0.25 + 10) + 0.125 + 0.0625
    )
    assert timeline.frame()["kind"].tolist() == [
        "dense",
        "plan",
        "compute",
        "compute",
        "activation",
        "join",
    ]


def test_a_host_accelerator_shares_memory_and_moves_no_activations():
    planner = plan_of(shape(), ON_CPU, HandCosts(activation=0.125))
    result, timeline = run(
        planner, steps([routed(0, 0)]), HandProfile(shares_memory=True)
    )
    assert result.makespan_s == 2 + 10
    assert "activation" not in set(timeline.frame()["kind"])


def test_without_room_in_the_cache_experts_run_from_staging_and_are_gone_afterwards():
    """No slots, one staging slot: the second copy waits for the first expert's compute
    to free it.
    """
    planner = plan_of(shape(), ON_GPU, slots=0, staging=1)
    _, timeline = run(planner, steps([routed(0, 0, 1)], [routed(0, 0)]))
    assert spans(timeline, "fetch")[:2] == [("h2d0", 0, 2, 6), ("h2d0", 1, 7, 11)]
    assert timeline.access_frame()["state"].tolist() == ["miss", "miss", "miss"]


def test_prefill_may_need_more_experts_than_fit():
    """Four active experts, two slots: two enter, two pass through staging; all are
    computed.
    """
    planner = plan_of(shape(), ON_GPU, slots=2, staging=2)
    _, timeline = run(planner, steps([routed(0, 0, 1, 2, 3)]))
    assert sorted(s[1] for s in spans(timeline, "compute")) == [0, 1, 2, 3]
    assert planner.view.resident(0).sum() == 2


def test_an_ssd_miss_is_a_chain_of_read_then_copy():
    """Read 8 s into host memory, then copy 4 s: compute starts at 2 + 8 + 4."""
    planner = plan_of(shape(), ON_GPU, slots=1, host_slots=1)
    result, timeline = run(planner, steps([routed(0, 0)], [routed(0, 1)]))
    assert spans(timeline, "read") == [("ssd", 0, 2, 10), ("ssd", 1, 17, 25)]
    assert spans(timeline, "fetch") == [("h2d0", 0, 10, 14), ("h2d0", 1, 25, 29)]
    assert result.makespan_s == 30


def test_the_cpu_reads_from_ssd_too_and_finds_it_in_host_memory_next_time():
    planner = plan_of(shape(), ON_CPU, host_slots=2)
    _, timeline = run(planner, steps([routed(0, 0)], [routed(0, 0)]))
    assert len(spans(timeline, "read")) == 1
    assert spans(timeline, "compute") == [("cpu", 0, 10, 20), ("cpu", 0, 22, 32)]


AFTER_READ = HandCosts(factors_after_read=(("cpu", 0.5), ("h2d", 0.75), ("dense", 1.5)))


def test_what_was_just_read_is_copied_sooner_and_the_dense_part_after_it_is_slower():
    """Layer 0 reads: copy 3 instead of 4 s; layer 1 begins with a dense part of 3
    instead of 2 s. The next step reads nothing in layer 0, and its dense part follows a
    head, not a read.
    """
    planner = plan_of(shape(layers=2), ON_GPU, AFTER_READ, slots=1, host_slots=2)
    _, timeline = run(
        planner, steps([routed(0, 0), routed(1, 0)], [routed(0, 0), routed(1, 0)])
    )
    assert [end - start for *_, start, end in spans(timeline, "fetch")] == [3, 3]
    assert [end - start for *_, start, end in spans(timeline, "dense")] == [2, 3, 2, 2]


def test_the_cpu_computes_what_was_just_read_from_its_caches():
    """5 instead of 10 s; the next time it comes from memory like any other."""
    planner = plan_of(shape(), ON_CPU, AFTER_READ, host_slots=2)
    _, timeline = run(planner, steps([routed(0, 0)], [routed(0, 0)]))
    assert [end - start for *_, start, end in spans(timeline, "compute")] == [5, 10]


def test_reads_overlap_copies_of_earlier_experts():
    """Two SSD misses: reads 2-10, 10-18; copies 10-14, 18-22."""
    planner = plan_of(shape(), ON_GPU, slots=2, host_slots=2)
    _, timeline = run(planner, steps([routed(0, 0, 1)]))
    assert spans(timeline, "fetch") == [("h2d0", 0, 10, 14), ("h2d0", 1, 18, 22)]


def test_lanes_that_share_a_worker_take_turns_in_their_order():
    """A host accelerator that copies by itself: products first, then copies."""
    profile = HandProfile(shared_worker=("gpu0", "h2d0", "d2h0"))
    planner = plan_of(shape(), ON_GPU, slots=3)
    run_steps = steps([routed(0, 0)], [routed(0, 0, 1, 2)])
    _, timeline = run(planner, run_steps, profile)
    # second step starts at 7, dense to 9; nothing starts before all is queued, so the
    # resident's product goes before the copies
    assert spans(timeline, "fetch")[1:] == [("h2d0", 1, 10, 14), ("h2d0", 2, 15, 19)]
    assert spans(timeline, "compute")[1:] == [
        ("gpu0", 0, 9, 10),
        ("gpu0", 1, 14, 15),
        ("gpu0", 2, 19, 20),
    ]


@pytest.mark.parametrize("clock", [FastClock, SimpyClock])
def test_control_brings_results_back_itself_where_it_serves_that_lane(clock):
    """Dense 2, CPU 10, results brought over in 0.5, joined in 0.25: 12.75 a step.

    Control has been taken by then, so nobody else could serve the lane.
    """
    costs = HandCosts(activation=0.5, join=0.25)
    profile = HandProfile(shared_worker=("control", "d2h0"))
    planner = plan_of(shape(), ON_CPU, costs)
    passes = steps([routed(0, 0)], [routed(0, 1)])
    result, timeline = run(planner, passes, profile, clock=clock)
    assert spans(timeline, "activation") == [
        ("d2h0", -1, 12, 12.5),
        ("d2h0", -1, 24.75, 25.25),
    ]
    assert result.makespan_s == 25.5


def test_a_pool_never_holds_more_bytes_than_it_has_though_layers_differ():
    """One expert of the second layer takes the place of two of the first."""
    model = replace(shape(layers=2, experts=2, top_k=2), expert_bytes=(100, 200))
    planner = plan_of(model, ON_GPU, scope="global", ratio=250 / 600)
    run(planner, steps([routed(0, 0, 1), routed(1, 0)]))
    memory = planner.gpu[0]
    assert [key for key, state in enumerate(memory.state) if state == RESIDENT] == [2]
    assert list(memory.free_bytes) == [50]


def test_nobody_is_named_to_leave_for_what_would_not_fit_anyway():
    """A cache that keeps lists takes whom it names for gone."""
    asked = []

    class Asked(LRU):
        def victims(self, incoming, candidates, chosen):
            asked.append(list(incoming))
            LRU.victims(self, incoming, candidates, chosen)

    model = replace(shape(layers=2, experts=2), expert_bytes=(100, 200))
    with registered(cache_asked=Asked):
        system = System("on-demand", cache="asked")
        planner = plan_of(model, system, scope="global", ratio=150 / 600)
        run(planner, steps([routed(0, 0), routed(1, 0)]))
    assert asked == []


def test_real_runs_compute_what_a_routing_policy_chose():
    class Other(RoutingPolicy):
        def route(self, gate, view, routing):
            routing[0], routing[1] = 3, 1
            return 2

    system = System("all-cpu", cache="none", routing="other")
    with registered(routing_other=Other):
        planner = plan_of(shape(layers=1, experts=4, top_k=2), system)
    plan_step(planner, routed(0, 0, 2))
    used, weights = planner.used_routing()
    assert used.tolist() == [[3, 1]]
    assert weights is None


def test_a_pool_of_split_layers_is_filled_by_the_layers_of_its_gpu():
    """Not by what its cache wants most of all layers, half of which never come here."""
    system = System("all-cpu", cache="static:fill=front")
    planner = plan_of(
        shape(layers=4, experts=3), system, slots=1, scope="global", gpus=2
    )
    residents = [
        [divmod(key, 3) for key, state in enumerate(memory.state) if state == RESIDENT]
        for memory in planner.gpu
    ]
    assert residents == [
        [(0, 0), (0, 1), (0, 2), (1, 0)],
        [(2, 0), (2, 1), (2, 2), (3, 0)],
    ]


def test_each_gpu_of_split_layers_has_its_own_cache_and_link():
    planner = plan_of(shape(layers=2), ON_GPU, slots=1, gpus=2)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 0)]))
    assert [s[0] for s in spans(timeline, "fetch")] == ["h2d0", "h2d1"]
    assert [s[0] for s in spans(timeline, "compute")] == ["gpu0", "gpu1"]


def test_experts_split_over_gpus_run_side_by_side():
    planner = plan_of(shape(), ON_GPU, slots=1, gpus=2, split="experts")
    result, timeline = run(planner, steps([routed(0, 0, 1)]))
    assert {s[0] for s in spans(timeline, "compute")} == {"gpu0", "gpu1"}
    assert result.makespan_s == 2 + 4 + 1


@pytest.mark.parametrize("slots", [0, 1, 2, 4])
def test_events_are_counted_as_simpy_counts_them(slots):
    """The reported number of events is what SimPy has scheduled, the process aside:
    ends and turns.
    """
    from moesim.sim.replay import Replay
    from moesim.traces.timeline.spans import Timeline

    planner = plan_of(shape(), ON_GPU, slots=slots)
    profile = HandProfile()
    replay = Replay(profile, planner, Timeline(profile.lanes), clock=SimpyClock)
    scheduled = []
    schedule = type(replay.clock.env).schedule

    def counting(env, *arguments, **named):
        scheduled.append(type(arguments[0]).__name__)
        schedule(env, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(replay.clock.env), "schedule", counting)
        result = replay.run(steps([routed(0, 0, 1)], [routed(0, 1, 2)]))
    assert replay.clock.turns
    counts = {kind: scheduled.count(kind) for kind in set(scheduled)}
    assert counts["_Turn"] == replay.clock.turns
    assert counts["_End"] + counts["_Turn"] == result.events
