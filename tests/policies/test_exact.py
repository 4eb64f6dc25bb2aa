"""The exact solver against brute force, an integer program, the simulator, and every
policy that might beat it.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import handmade
from support.cache_driver import assigned, work
from support.strategies import layer_works as steps

from moesim.policies.assignment._optimum import (
    modelled_s,
    optimal,
    optimal_scheduled,
    scheduled_s,
)
from moesim.policies.assignment.exact import Exact
from moesim.policies.assignment.ilp import ILP
from moesim.policies.base import AssignmentPolicy
from moesim.policies.names import IN_FLIGHT
from moesim.policies.registry import names, resolve
from moesim.policies.systems import System


def every_choice(now):
    return (
        np.array(c, np.int8)
        for c in itertools.product(range(now.gpus + 1), repeat=now.active)
    )


@settings(max_examples=90, deadline=None)
@given(st.one_of(steps(most=8), steps(most=5, gpus=st.just(2))))
def test_both_optima_equal_brute_force(now):
    """All (1 + G)^A assignments; the lanes that come back cost what is claimed."""
    for ruler_s, best in (
        (modelled_s, optimal(now)),
        (scheduled_s, optimal_scheduled(now)),
    ):
        least_s = min(ruler_s(now, lanes) for lanes in every_choice(now))
        assert best.makespan_s == pytest.approx(least_s, rel=1e-9)
        assert ruler_s(now, best.lanes) == pytest.approx(best.makespan_s, rel=1e-12)
    if now.gpus == 1:
        in_its_order_s = scheduled_s(now, best.lanes, best.order)
        assert in_its_order_s == pytest.approx(best.makespan_s, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(steps(most=5), st.data())
def test_no_launch_order_beats_the_longest_first(now, data):
    """Johnson's rule for equal copies, whatever the lanes: all A! orders."""
    lanes = np.array(
        data.draw(st.lists(st.integers(0, 1), min_size=now.active, max_size=now.active))
    )
    seen = now.arrays()
    flying = np.flatnonzero(seen.state == IN_FLIGHT)
    landing = flying[np.argsort(seen.arrive_s[0, flying], kind="stable")]
    rest = np.flatnonzero(seen.state != IN_FLIGHT)
    orders = (
        np.array([*landing, *permuted]) for permuted in itertools.permutations(rest)
    )
    in_our_order_s = scheduled_s(now, lanes)
    assert in_our_order_s <= min(scheduled_s(now, lanes, order) for order in orders) * (
        1 + 1e-12
    )


def test_scheduled_time_table_by_hand():
    """Resident 2 and copies of 4: the first lands at 4 and takes 3, the second at 8 and
    takes 1: 9. CPU: 0.5 + 6.
    """
    now = work(
        cpu_s=[9, 6, 9, 9], gpu_s=[2, 1, 1, 3], arrive_s=[0, 4, 4, 4], first_cpu_s=0.5
    )
    lanes = np.array([1, 0, 1, 1])
    assert scheduled_s(now, lanes) == 9
    assert scheduled_s(now, lanes, np.array([0, 1, 2, 3])) == 11
    assert scheduled_s(now, np.array([1, 0, 0, 1])) == 15.5
    assert modelled_s(now, lanes) == 10


def test_copies_wait_for_what_is_in_flight():
    """Lands at 3, computed to 4; the copy starts at 3, lands at 7, computed to 8, even
    if the CPU takes the former.
    """
    now = work(cpu_s=[9, 9], gpu_s=[1, 1], arrive_s=[3, 4], state=[IN_FLIGHT, 0])
    assert scheduled_s(now, np.array([1, 1])) == 8
    assert scheduled_s(now, np.array([1, 0])) == 9
    assert scheduled_s(now, np.array([0, 1])) == 9


class Recorder(AssignmentPolicy):
    """Stands where the assignment policy stood; remembers what the time table says of
    its answers.
    """

    def __init__(self, policy):
        self.policy = policy
        self.expected_s = []

    def assign(self, work, view, lanes, order):
        flags = self.policy.assign(work, view, lanes, order)
        answer = np.array(lanes), np.array(order)
        self.expected_s.append(scheduled_s(work, *answer))
        return flags


@pytest.mark.parametrize(
    "policy",
    ["exact:objective=scheduled", "hybrimoe-schedule", "hybrimoe-released", "greedy"],
)
def test_the_time_table_is_the_simulators(policy):
    """Nine layer steps over three residents: computing ends exactly when the table
    says.
    """
    rng = np.random.default_rng(1)
    model = handmade.shape(experts=8)
    planner = handmade.plan_of(
        model,
        System(policy, cache="static:fill=lowest"),
        handmade.HandCosts(cpu=5, gpu=1, copy=4, cpu_first_s=0.5, per_token=0.25),
        slots=3,
        staging=8,
    )
    recorder = planner.assignment = Recorder(planner.assignment)
    passes = []
    for _ in range(9):
        experts = sorted(rng.choice(8, 6, replace=False).tolist())
        passes.append([handmade.routed(0, *experts, tokens=rng.integers(1, 5, 6))])
    _, timeline = handmade.run(planner, handmade.steps(*passes))
    frame = timeline.frame()
    took_s = []
    for step in range(9):
        of_step = frame[frame["step"] == step]
        computing = of_step[of_step["kind"] == "compute"]
        took_s.append(
            computing["end_s"].max() - of_step[of_step["kind"] == "plan"]["end_s"].max()
        )
    assert took_s == pytest.approx(recorder.expected_s)


@settings(max_examples=25, deadline=None)
@given(steps(most=7, gpus=st.integers(1, 2)))
def test_nobody_beats_it(now):
    """Every registered assignment policy, measured with either ruler, its own launch
    order included.
    """
    least_s = optimal(now).makespan_s
    soonest_s = optimal_scheduled(now).makespan_s
    for name in names("assignment"):
        answer = assigned(resolve(name, "assignment"), now)
        assert modelled_s(now, answer.lanes) >= least_s * (1 - 1e-9), name
        if now.gpus == 1:
            assert scheduled_s(now, answer.lanes, answer.order) >= soonest_s * (
                1 - 1e-9
            ), name


@pytest.mark.parametrize("name", ["greedy", "beam", "ilp", "exact"])
def test_only_the_first_copy_waits_for_the_one_under_way(name):
    """Two absent experts: the link is free at 10 s, copies take 4, products 1, the CPU
    20 for each. Both on the GPU end at 10 + 4 + 4 = 18, one on each lane at 20; charged
    the wait twice, both on the GPU would seem to end at 28.
    """
    now = work(cpu_s=[20, 20], gpu_s=[1, 1], arrive_s=[14, 14], link_s=[10])
    answer = assigned(resolve(name, "assignment"), now)
    assert answer.lanes.tolist() == [1, 1]
    assert modelled_s(now, answer.lanes) == 18.0


def layer(rng, active, gpus=1, resident=0.3):
    """Costs as a PC has them: few token counts, affine in tokens, all copies alike."""
    tokens = rng.geometric(0.3, active)
    arrive_s = np.where(rng.random((gpus, active)) < resident, 0.0, 1.9e-3)
    gpu_s = np.tile(0.35e-3 + 1e-6 * tokens, (gpus, 1))
    return work(
        cpu_s=1.1e-3 + 0.21e-3 * tokens, gpu_s=gpu_s, arrive_s=arrive_s, tokens=tokens
    )


@pytest.mark.parametrize("active", [16, 32])
def test_equals_the_integer_program_where_brute_force_ends(active):
    now = layer(np.random.default_rng(active), active)
    by_program = modelled_s(now, assigned(ILP(), now).lanes)
    assert optimal(now).makespan_s == pytest.approx(by_program, rel=1e-6)


@pytest.mark.parametrize("active", [64, 128])
def test_certified_at_full_scale(active):
    for seed in range(5):
        now = layer(np.random.default_rng(seed), active)
        for best in (optimal(now), optimal_scheduled(now)):
            assert best.bound_s == best.makespan_s
    two = optimal(layer(np.random.default_rng(0), 64, gpus=2))
    assert two.bound_s == two.makespan_s


def test_an_unfinished_search_says_so():
    """Forty experts on two GPUs of which no two cost the same: the bound stays below,
    and none is below the bound.
    """
    rng = np.random.default_rng(0)
    gpu_s = rng.random((2, 40)) + 0.1
    arrive_s = rng.random((2, 40)) * (rng.random((2, 40)) < 0.7)
    now = work(cpu_s=rng.random(40) + 0.1, gpu_s=gpu_s, arrive_s=arrive_s)
    best = optimal_scheduled(now)
    assert 0 < best.bound_s < best.makespan_s
    for lanes in (
        rng.integers(0, 3, 40),
        best.lanes,
        assigned(resolve("greedy", "assignment"), now).lanes,
    ):
        assert scheduled_s(now, lanes) >= best.bound_s


def test_section_1_1_a3_what_is_modelled_and_what_is_scheduled_may_disagree():
    """A copy of 3 then a product of 2 is 3 for one and 5 for the other; the CPU takes
    4.
    """
    now = work(cpu_s=[4], gpu_s=[2], arrive_s=[3])
    assert assigned(Exact(), now).lanes.tolist() == [1]
    assert assigned(Exact(objective="scheduled"), now).lanes.tolist() == [0]
