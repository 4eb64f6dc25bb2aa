"""Work ahead of the gate (DAOP), results that join one layer later (KTransformers'
expert deferral) and serial issue (Fiddler), by hand.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.cache_driver import assigned, work
from support.handmade import (
    HandCosts,
    plan_of,
    plan_step,
    registered,
    routed,
    run,
    shape,
    spans,
    steps,
)

from moesim.policies.assignment.daop import DAOP
from moesim.policies.base import AssignmentPolicy, PolicyError
from moesim.policies.names import DECODE, DEFERRED, PREFILL, SERIAL
from moesim.policies.systems import System
from moesim.traces.format.schema import Phase


class Foreseeing(AssignmentPolicy):
    """All on the CPU; starts the experts of `guess` one layer ahead."""

    def __init__(self, *, guess: str = "1"):
        self.guess = [int(e) for e in guess.split("/")]

    def assign(self, work, view, lanes, order):
        return 0

    def precompute(self, gate, view, routing, tokens):
        for column, expert in enumerate(self.guess):
            routing[column] = expert
            if expert < view.experts:
                tokens[expert] = 1
        return len(self.guess)


class Turns(AssignmentPolicy):
    """Expert 0 on the CPU, the rest on the GPU, one after the other."""

    def __init__(self, *, serial: bool = True):
        self.serial = serial

    def assign(self, work, view, lanes, order):
        for i in range(work.active):
            lanes[i] = work.experts[i] > 0
        return SERIAL if self.serial else 0


@pytest.fixture(autouse=True, scope="module")
def policies_of_this_module():
    with registered(assignment_foreseeing=Foreseeing, assignment_turns=Turns):
        yield


def ahead(guess="1"):
    return System(f"foreseeing:guess={guess}", cache="none")


def test_section_2_3_a_precalculated_expert_is_awaited_for_the_remainder_only():
    """Layer 0: dense 0-2, CPU expert 0 2-12, then (1,1) ahead 12-22; layer 1: dense
    12-14, waits to 22.
    """
    planner = plan_of(shape(layers=2), ahead())
    result, timeline = run(planner, steps([routed(0, 0), routed(1, 1)]))
    assert spans(timeline, "compute") == [("cpu", 0, 2, 12), ("cpu", 1, 12, 22)]
    assert result.makespan_s == 22


def test_a_wrong_guess_keeps_the_cpu_busy_and_joins_nothing():
    """Layer 1 wants expert 2, but the CPU is at expert 1 until 22."""
    planner = plan_of(shape(layers=2), ahead())
    result, timeline = run(planner, steps([routed(0, 0), routed(1, 2)]))
    assert spans(timeline, "compute")[1:] == [("cpu", 1, 12, 22), ("cpu", 2, 22, 32)]
    assert result.makespan_s == 32


def test_with_limited_host_memory_only_what_is_there_is_computed_ahead():
    planner = plan_of(shape(layers=2), ahead(), host_slots=4)
    _, timeline = run(
        planner, steps([routed(0, 0), routed(1, 1)], [routed(0, 0), routed(1, 1)])
    )
    # The second pass starts (1, 1) from host memory.
    assert [s[1] for s in spans(timeline, "read")] == [0, 1]
    assert not any(planner.host.memory.holds)


def test_nothing_lies_ahead_of_the_last_layer_and_ids_are_checked():
    planner = plan_of(shape(layers=1), ahead())
    assert not plan_step(planner, routed(0, 0)).begins_ahead
    with pytest.raises(PolicyError, match="precompute: experts"):
        plan_step(plan_of(shape(layers=2), ahead("9")), routed(0, 0))


@pytest.mark.parametrize(("serial", "cpu_starts"), [("true", 7), ("false", 2)])
def test_serial_issue_lets_the_cpu_wait_for_fetched_experts(serial, cpu_starts):
    """Copy 2-6, GPU 6-7; only then does a serial CPU begin."""
    planner = plan_of(shape(), System(f"turns:serial={serial}", cache="lru"), slots=2)
    _, timeline = run(planner, steps([routed(0, 0, 1)]))
    assert [s for s in spans(timeline, "compute") if s[0] == "cpu"] == [
        ("cpu", 0, cpu_starts, cpu_starts + 10)
    ]


def test_residents_overlap_a_serial_cpu():
    planner = plan_of(shape(), System("turns", cache="lru"), slots=2)
    _, timeline = run(planner, steps([routed(0, 0, 1)], [routed(0, 0, 1)]))
    assert spans(timeline, "compute")[-2:] == [("gpu0", 1, 19, 20), ("cpu", 0, 19, 29)]


def test_section_2_3_on_demand_layers_are_parallel_as_drawn_or_serial_as_coded():
    """Experts 0 resident, 1 absent; layer 0 is below the first predicted one, layer 1
    is not.
    """
    layers = [
        work(layer=n, cpu_s=[5, 5], gpu_s=[1, 1], arrive_s=[0, 4], state=[2, 0])
        for n in (0, 1)
    ]
    for before_first, serial in (
        ("parallel", [False, False]),
        ("serial", [True, False]),
    ):
        policy = DAOP(first_layer=1, before_first=before_first)
        answers = [assigned(policy, now) for now in layers]
        assert [answer.lanes.tolist() for answer in answers] == [[1, 0], [1, 0]]
        assert [answer.flags == SERIAL for answer in answers] == serial


def test_section_2_2_prompts_run_in_place_or_where_the_sum_of_latencies_is_least():
    """A6000: 8.5 ms a token on the CPU, 210 ms a load. 24 tokens stay (204), 25 load
    (212.5), a tie loads too.
    """
    cpu_ms = [8.5 * 24, 8.5 * 25, 8.5, 210.0]
    now, prompt = (
        work(
            cpu_s=cpu_ms,
            gpu_s=[0] * 4,
            arrive_s=[210, 210, 0, 210],
            tokens=[24, 25, 1, 24],
            state=[0, 0, 2, 0],
            phase=phase,
        )
        for phase in (DECODE, PREFILL)
    )
    cheapest = DAOP(prefill="cheapest")
    assert assigned(DAOP(), prompt).lanes.tolist() == [0, 0, 1, 0]
    assert assigned(cheapest, prompt).lanes.tolist() == [0, 1, 1, 1]
    # Decode stays as it is.
    assert assigned(cheapest, now).lanes.tolist() == [0, 0, 1, 0]


THREE_LAYERS = shape(layers=3, top_k=2)


def test_a_deferred_result_joins_one_layer_later():
    """Every token has two experts, both on the CPU, the lesser one deferred.

    Layer 0: dense 0-2, the first expert 2-12, then the deferred one beside layer 1's
    dense part 12-14. Its own first expert waits for it, 22-32. Layer 2 is the last: its
    dense part is 32-34, both experts follow layer 1's deferred one, 42-52-62.
    """
    planner = plan_of(THREE_LAYERS, System("fixed-mapping:defer=1", cache="none"))
    result, timeline = run(planner, steps([routed(n, 1, 0) for n in range(3)]))
    assert spans(timeline, "compute") == [
        ("cpu", 1, 2, 12),
        ("cpu", 0, 12, 22),
        ("cpu", 1, 22, 32),
        ("cpu", 0, 32, 42),
        ("cpu", 0, 42, 52),
        ("cpu", 1, 52, 62),
    ]
    assert [end for *_, end in spans(timeline, "join")] == [12, 32, 62]
    assert result.makespan_s == 62


def test_a_layer_step_waits_for_what_the_one_before_has_deferred():
    """Expert 0 is on the GPU, 2-3, and expert 1 on the CPU, deferred, 2-12. Layer 1 has
    nothing on the CPU: its product ends at 6, and it joins at 12, results brought over.
    """
    costs = HandCosts(activation=0.5)
    system = System("fixed-mapping:defer=1", cache="static:fill=lowest")
    planner = plan_of(shape(layers=2, top_k=2), system, costs, slots=1)
    passes = steps([routed(0, 0, 1), routed(1, 0)])
    result, timeline = run(planner, passes)
    # Layer 0 has something on the CPU, so hidden states are moved before it joins.
    assert spans(timeline, "activation") == [
        ("d2h0", -1, 3, 3.5),
        ("d2h0", -1, 12, 12.5),
    ]
    assert result.makespan_s == 12.5


def test_prompts_are_not_deferred():
    """All at once: three layers of 2 + 2 x 10."""
    planner = plan_of(THREE_LAYERS, System("fixed-mapping:defer=1", cache="none"))
    passes = steps([routed(n, 1, 0) for n in range(3)], phase=Phase.PREFILL)
    assert run(planner, passes)[0].makespan_s == 66


def test_what_any_token_ranks_among_its_first_joins_at_once():
    """Expert 2 is the second of one token and the first of the other."""
    layers = [
        replace(
            routed(n, 1, 2, 3, tokens=[1, 2, 1]),
            routing=np.array([[1, 2], [2, 3]], np.uint16),
        )
        for n in range(2)
    ]
    planner = plan_of(THREE_LAYERS, System("fixed-mapping:defer=1", cache="none"))
    plan = plan_step(planner, *layers)
    assert list(plan.deferred[:3]) == [0, 0, 1]
    everything = plan_of(THREE_LAYERS, System("fixed-mapping:defer=2", cache="none"))
    plan = plan_step(everything, *layers)
    assert list(plan.deferred[:3]) == [1, 1, 1]
    assert list(plan.lanes[:3]) == [0, 0, 0]


def test_with_limited_host_memory_only_what_is_there_is_deferred():
    """The first pass reads every expert, and none of them is deferred."""
    planner = plan_of(
        THREE_LAYERS, System("fixed-mapping:defer=1", cache="none"), host_slots=6
    )
    passes = steps(*[[routed(n, 0, 1) for n in range(3)] for _ in range(2)])
    result, _ = run(planner, passes)
    cold_s = 3 * (2 + 8 + 2 * 10)
    assert result.makespan_s == cold_s + 62
    assert not any(planner.host.memory.holds)


def test_a_policy_that_does_not_defer_may_not_say_so():
    class Marks(AssignmentPolicy):
        def assign(self, work, view, lanes, order):
            for i in range(work.active):
                lanes[i] = DEFERRED
            return 0

    with registered(assignment_marks=Marks):
        planner = plan_of(THREE_LAYERS, System("marks", cache="none"))
        with pytest.raises(PolicyError, match="expected a lane"):
            plan_step(planner, routed(0, 1, 0))
