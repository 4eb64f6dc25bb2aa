"""Assignment policies against the worked examples of the reference, brute force and
each other.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import assigned, work

from moesim.policies.assignment._optimum import modelled_s
from moesim.policies.assignment.beam import Beam
from moesim.policies.assignment.exact import Exact
from moesim.policies.assignment.greedy import Greedy
from moesim.policies.assignment.ilp import ILP
from moesim.policies.assignment.static_threshold import StaticThreshold
from moesim.policies.registry import resolve

# By hand, after DALI's equations 3 to 9: workloads, transfer, GPU compute, CPU a and b, residents
EXAMPLES = {
    "A": ([6, 1, 3, 1, 0, 2], 4, 1, 2, 0, {1}),
    "B": ([5, 4, 3, 3, 3], 6, 1, 2, 0, set()),
    "D": ([3, 3, 2, 2, 2], 3, 1, 1, 0, set()),
}


def example(name):
    """The active experts of a §1.4 example; one without tokens is not active."""
    tokens, transfer, compute, slope, first, resident = EXAMPLES[name]
    ids = [e for e, w in enumerate(tokens) if w]
    return work(
        experts=ids,
        tokens=[tokens[e] for e in ids],
        cpu_s=[first + slope * tokens[e] for e in ids],
        gpu_s=[compute] * len(ids),
        arrive_s=[0 if e in resident else transfer for e in ids],
    )


def loads_s(now, lanes):
    """Summed cost of each lane, CPU first: list of 1 + G."""
    seen = now.arrays()
    costs = np.vstack(
        [np.maximum(seen.host_s, seen.cpu_s), np.maximum(seen.arrive_s, seen.gpu_s)]
    )
    return [
        float(sum(costs[d, i] for i, lane in enumerate(lanes) if lane == d))
        for d in range(len(costs))
    ]


def on_gpu(now, answer):
    return {
        int(e) for e, lane in zip(now.experts, answer.lanes, strict=True) if lane == 1
    }


def brute_force_s(now):
    lanes = range(now.gpus + 1)
    return min(
        max(loads_s(now, choice))
        for choice in itertools.product(lanes, repeat=now.active)
    )


@pytest.mark.parametrize(
    ("name", "gpu", "gpu_s", "cpu_s"),
    [("A", {0, 3, 5}, 12, 8), ("B", {0, 2, 4}, 18, 14), ("D", {0, 3}, 6, 7)],
)
def test_section_1_4_greedy(name, gpu, gpu_s, cpu_s):
    now = example(name)
    answer = assigned(Greedy(), now)
    assert on_gpu(now, answer) == gpu
    assert loads_s(now, answer.lanes) == [cpu_s, gpu_s]


@pytest.mark.parametrize(("name", "makespan"), [("A", 8), ("B", 18), ("D", 7)])
def test_section_1_4_beam_of_two(name, makespan):
    now = example(name)
    assert max(loads_s(now, assigned(Beam(width=2), now).lanes)) == makespan


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize(("name", "makespan"), [("A", 8), ("B", 18), ("D", 6)])
def test_section_1_4_optimum(name, makespan, solver):
    now = example(name)
    assert brute_force_s(now) == makespan
    assert max(loads_s(now, assigned(ILP(solver=solver), now).lanes)) == makespan


@pytest.mark.parametrize(
    ("name", "gpu", "gpu_s", "cpu_s"),
    [("A", {0, 1, 2, 5}, 13, 2), ("B", {0, 1, 2, 3, 4}, 30, 0), ("D", {0, 1}, 6, 6)],
)
def test_section_1_4_static_threshold(name, gpu, gpu_s, cpu_s):
    """Parallel makespans 13, 30, 6; serial ones (the sums) 15, 30, 12."""
    now = example(name)
    answer = assigned(StaticThreshold(), now)
    assert on_gpu(now, answer) == gpu
    assert loads_s(now, answer.lanes) == [cpu_s, gpu_s]


def test_section_6_3_fiddler_threshold_ties_go_to_the_gpu():
    """7 per token against 70 to load: 9 tokens cost 63, 10 tie at 70, 11 cost 77; a
    resident costs nothing.
    """
    now = work(
        tokens=[9, 10, 11, 1],
        cpu_s=[63, 70, 77, 7],
        gpu_s=[0, 0, 0, 0],
        arrive_s=[70, 70, 70, 0],
    )
    for policy in (
        StaticThreshold(rule="max"),
        StaticThreshold(rule="sum"),
        StaticThreshold(tokens=10),
    ):
        assert assigned(policy, now).lanes.tolist() == [0, 1, 1, 1]


def test_static_threshold_variants_differ_where_compute_adds_to_the_copy():
    """Copy 4 and compute 3 against 5 on the CPU: overlapped 4, one after the other
    7.
    """
    now = work(cpu_s=[5], gpu_s=[3], arrive_s=[4])
    assert assigned(StaticThreshold(rule="max"), now).lanes.tolist() == [1]
    assert assigned(StaticThreshold(rule="sum"), now).lanes.tolist() == [0]


def test_section_1_1_a2_greedy_falls_back_to_the_cpu_when_staging_is_full():
    """Three absent experts that all want the GPU, room to stage one: the largest gap
    gets it; residents need none.
    """
    now = work(cpu_s=[9, 30, 20, 8], gpu_s=[1, 1, 1, 1], arrive_s=[2, 2, 2, 0])
    assert assigned(Greedy(), now).lanes.tolist() == [1, 1, 1, 1]
    assert assigned(Greedy(staging=1), now).lanes.tolist() == [0, 1, 0, 1]
    assert assigned(Greedy(staging=0), now).lanes.tolist() == [0, 0, 0, 1]
    assert assigned(ILP(staging=1), now).lanes.tolist() == [0, 1, 0, 1]


def test_section_1_8_two_gpus_share_and_ties_go_to_the_lower_one():
    """Equal experts of 3 on a GPU and 4 on the CPU: GPU 0, GPU 1, then the CPU (4 <
    6).
    """
    now = work(cpu_s=[4, 4, 4], gpu_s=[[3, 3, 3], [3, 3, 3]])
    assert assigned(Greedy(), now).lanes.tolist() == [1, 2, 0]
    assert assigned(resolve("on-demand", "assignment"), now).lanes.tolist() == [1, 2, 1]
    assert assigned(StaticThreshold(), now).lanes.tolist() == [1, 2, 1]


def test_all_cpu_and_on_demand_never_cross():
    now = example("A")
    assert assigned(resolve("all-cpu", "assignment"), now).lanes.tolist() == [0] * 5
    assert assigned(resolve("on-demand", "assignment"), now).lanes.tolist() == [1] * 5


SECONDS = st.integers(1, 40).map(lambda n: n * 1e-4)


@st.composite
def works(draw, active, gpus):
    """Costs of the size a real machine has, a third of the experts resident."""
    a = draw(active)
    g = draw(gpus)
    times = st.lists(SECONDS, min_size=a, max_size=a)
    arrive = st.lists(st.one_of(st.just(0.0), SECONDS, SECONDS), min_size=a, max_size=a)
    return work(
        cpu_s=draw(times),
        host_s=draw(st.one_of(st.just([0.0] * a), times)),
        gpu_s=[draw(times) for _ in range(g)],
        arrive_s=[draw(arrive) for _ in range(g)],
    )


@settings(max_examples=25, deadline=None)
@given(works(gpus=st.integers(1, 2), active=st.integers(1, 6)))
def test_ilp_equals_brute_force_and_no_lanes_beat_it(now):
    best_s = brute_force_s(now)
    assert max(loads_s(now, assigned(ILP(), now).lanes)) == pytest.approx(
        best_s, rel=1e-6
    )
    for policy in (Greedy(), Beam(width=2), StaticThreshold()):
        assert max(loads_s(now, assigned(policy, now).lanes)) >= best_s * (1 - 1e-9)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_ilp_that_may_not_finish_takes_the_best_plan_so_far_and_states_its_gap(solver):
    """A nanosecond suffices for nothing but greedy's plan: no two costs are equal."""
    rng = np.random.default_rng(0)
    now = work(
        cpu_s=1e-3 + rng.random(64) * 5e-3,
        gpu_s=rng.random(64) * 1e-3,
        arrive_s=np.where(rng.random(64) < 0.3, 0.0, 4e-3),
    )
    policy = ILP(solver=solver, limit_s=1e-9)
    found_s = modelled_s(now, assigned(policy, now).lanes)
    best_s = modelled_s(now, assigned(Exact(), now).lanes)
    assert best_s <= found_s <= modelled_s(now, assigned(Greedy(), now).lanes)
    [remark] = policy.remarks()
    assert f"at most {100 * (found_s / best_s - 1):.1f} % slower" in remark
    assert not ILP().remarks()


def test_of_equal_makespans_a_beam_keeps_the_smaller_sum():
    """Expert 0 goes to the GPU, 0-3. Expert 1 would end at 4 on either lane, and take 4
    seconds of the CPU or 1 of the GPU.
    """
    now = work(experts=[0, 1], cpu_s=[10, 4], gpu_s=[3, 1], arrive_s=[0, 0])
    assert list(assigned(Beam(width=1), now).lanes) == [1, 1]


@settings(max_examples=40, deadline=None)
@given(works(gpus=st.integers(1, 2), active=st.integers(1, 6)))
def test_a_wide_beam_is_exhaustive(now):
    assert max(loads_s(now, assigned(Beam(width=3**6), now).lanes)) == pytest.approx(
        brute_force_s(now)
    )


@settings(max_examples=30, deadline=None)
@given(works(active=st.integers(1, 90), gpus=st.integers(1, 3)))
def test_greedy_equals_its_definition_in_plain_python(now):
    """The same rule by sorting."""
    seen = now.arrays()
    cpu = np.maximum(seen.cpu_s, seen.host_s).tolist()
    gpu = np.maximum(seen.gpu_s, seen.arrive_s).T.tolist()
    order = sorted(range(len(cpu)), key=lambda i: -abs(min(gpu[i]) - cpu[i]))
    load = [0.0] * (len(gpu[0]) + 1)
    lanes = [-1] * len(cpu)
    for i in order:
        ends = [(load[1 + g] + gpu[i][g], g + 1) for g in range(len(gpu[i]))] + [
            (load[0] + cpu[i], len(load))
        ]
        end, lane = min(ends)
        lanes[i] = lane % len(load)
        load[lanes[i]] = end
    answer = assigned(Greedy(), now)
    assert answer.lanes.tolist() == lanes
    assert answer.order.tolist() == order
