"""The physical bound: by hand, against brute force, never beaten by any replay, and met
where one lane is the bottleneck.
"""

import functools
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from support.handmade import HandCosts, hand_trace, plan_of, run, shape
from support.strategies import traces

from moesim.hwprofiles.costs import Overlap
from moesim.policies import registry
from moesim.policies.sizes import CacheSize, MemoryPlan
from moesim.policies.systems import System
from moesim.runs.bound import (
    CPU,
    LINK,
    ORDER,
    Bound,
    _shared_memory,
    bound_of,
    flattened,
    least_reads,
    least_seconds,
    min_with_bypass,
    most_experts,
    replay_bound,
)
from moesim.runs.bound_loops import least_makespans
from moesim.runs.config import MemoryOptions, RunConfig
from moesim.runs.replay import replay
from moesim.runs.setup import Setup, profile_of
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import layer_steps
from moesim.traces.format.reader import open_trace

A, B, C = range(3)


def misses(uses, size):
    _, edges, keys = flattened([(0, experts) for experts in uses])
    return min_with_bypass(edges, keys, size)


def test_min_with_bypass_by_hand():
    """A A B A C A with one slot: A is kept, B and C are turned away. A and B in one
    step: whoever uses A first can keep B.
    """
    assert misses([[A], [A], [B], [A], [C], [A]], 1) == 3
    assert misses([[A], [B], [A], [B]], 0) == 4
    assert misses([[A], [B], [A], [B]], 2) == 2
    assert misses([[A], [A, B], [B]], 1) == 2


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_min_with_bypass_is_the_least_of_all_choices(steps, size):
    """Brute force over every content after every step, prefetches included."""
    contents = [
        frozenset(choice)
        for count in range(size + 1)
        for choice in itertools.combinations(range(4), count)
    ]
    costs = {frozenset(): 0}
    for used in steps:
        # Reads: what is used and absent, and what enters the cache without being used.
        costs = {
            after: min(
                cost + len(used - before) + len(after - before - used)
                for before, cost in costs.items()
            )
            for after in contents
        }
    assert misses([sorted(used) for used in steps], size) == min(costs.values())


def test_a_warm_cache_saves_a_read_per_slot():
    steps = [(0, [0]), (0, [1]), (0, [2]), (0, [0]), (0, [1]), (0, [2])]
    cold = least_reads(*flattened(steps), np.array([1]), shared=False)
    assert (
        least_reads(*flattened(steps), np.array([1]), shared=False, warm=True)
        == cold - 1
    )


def test_layers_share_a_pool_only_where_it_is_global():
    steps = [(0, [0]), (1, [0]), (0, [0]), (1, [0])]
    assert least_reads(*flattened(steps), np.array([1, 1]), shared=False) == 2
    assert least_reads(*flattened(steps), np.array([1]), shared=True) == 3


def test_a_shared_pool_holds_the_smallest_experts():
    size = type("Size", (), {"scope": "global", "pool_bytes": np.array([100])})
    assert most_experts(size, (30, 60)).tolist() == [3]


def test_least_makespans_of_one_layer_step_by_hand():
    """CPU 2 s, GPU 1 s each, the first on the CPU 1 s more, 0.5 s for its results. None
    on the CPU: 3 s. One: 2 + 1 + 0.5. All: 3 x 2 + 1 + 0.5. Two would take 5.5 s, and
    lie on the line between their neighbours.
    """
    least = least_makespans(np.full(3, 2.0), np.ones(3), np.array([1.0, 0.0]), 0.5)
    assert least.tolist() == pytest.approx([3.0, 3.5, 5.5, 7.5])


SECONDS = st.floats(0.1, 10)


@given(
    st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6),
    st.tuples(SECONDS, SECONDS, SECONDS),
)
def test_least_makespans_are_below_every_assignment_and_convex(pairs, fixed):
    cpu_s = np.array([pair[0] for pair in pairs])
    gpu_s = np.array([pair[1] for pair in pairs])
    cpu_first_s, gpu_first_s, back_s = fixed
    active = len(pairs)
    least = least_makespans(cpu_s, gpu_s, np.array([cpu_first_s, gpu_first_s]), back_s)
    for count in range(active + 1):
        for chosen in itertools.combinations(range(active), count):
            on_cpu = np.isin(np.arange(active), chosen)
            cpu_lane_s = cpu_s[on_cpu].sum() + cpu_first_s * (count > 0)
            gpu_lane_s = gpu_s[~on_cpu].sum() + gpu_first_s * (count < active)
            taken_s = max(cpu_lane_s, gpu_lane_s) + back_s * (count > 0)
            assert least[count] <= taken_s + 1e-9
    assert (np.diff(least, 2) >= -1e-9).all()


@settings(deadline=None)
@given(
    cpu=st.floats(1.0, 4.0),
    link=st.floats(1.0, 4.0),
    gpus=st.integers(1, 3),
    # The solver overlooks a tenth of a microsecond.
    cpu_s=st.just(0.0) | st.floats(0.001, 10.0),
    copies_s=st.floats(0.01, 10.0),
)
def test_shared_memory_is_bounded_by_the_best_share_of_states(
    cpu, link, gpus, cpu_s, copies_s
):
    """Least time in which both are done, as a linear programme over the states: the CPU
    works or not, beside 0 to all links.
    """
    states = [(on, busy) for on in (0, 1) for busy in range(gpus + 1)]
    done_on_cpu = [on * cpu**-busy for on, busy in states]
    copied = [busy / (link if on else 1.0) for on, busy in states]
    least = linprog(
        np.ones(len(states)),
        A_ub=-np.array([done_on_cpu, copied]),
        b_ub=[-cpu_s, -copies_s],
    ).fun
    y, z = _shared_memory(Overlap(link=link, cpu=cpu), gpus)
    bound_s = max(cpu_s + z * copies_s, y * cpu_s + copies_s / gpus)
    assert bound_s <= least * (1 + 1e-6)
    if gpus == 1:
        assert bound_s == pytest.approx(max(least, cpu_s, copies_s), rel=1e-6)


MACHINES = (
    "two-core-host",
    "rtx4060ti",
    "a6000-i9-10980xe",
    "rtx5060ti-ryzen9900x",
    "flashmoe-rtx5070ti",
    "dali-2x-rtx3090",
)
SYSTEMS = (
    ("greedy", {}),
    ("all-cpu", {}),
    ("on-demand", {"cache": "lfu"}),
    ("on-demand", {"cache": "belady", "prefetch": "clairvoyant"}),
    ("fiddler", {}),
    ("beam", {"cache": "random"}),
    ("exact", {"cache": "belady", "prefetch": "clairvoyant:depth=2"}),
    ("static-threshold", {"cache": "none"}),
    ("fetch-split", {}),
    ("moe-lightning", {}),
    ("hybrimoe-schedule", {"cache": "foresight", "prefetch": "foresight"}),
)
REPLAYS = 1000
EACH = 20

# Parsing a profile takes longer than a replay of a small trace.
profile = functools.cache(profile_of)


@pytest.fixture(scope="module", autouse=True)
def policies_found_once():
    """Folders are looked through for every policy of every run; here they stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_files", functools.cache(registry._files))
        yield


@settings(max_examples=REPLAYS // EACH, deadline=None)
@given(data=st.data(), drawn=traces(max_sequences=3, max_decode=4))
def test_no_replay_beats_the_bound(data, drawn, tmp_path_factory):
    """A thousand replays of drawn traces, machines, policies and memories."""
    trace = open_trace(drawn.write(tmp_path_factory.mktemp("drawn") / "t.parquet"))
    for _ in range(EACH):
        policy, parts = data.draw(st.sampled_from(SYSTEMS))
        hw = data.draw(st.sampled_from(MACHINES))
        batch = data.draw(st.integers(1, 3))
        memory = MemoryOptions(
            cache_ratio=data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])),
            cache_scope=data.draw(st.sampled_from(["layer", "global"])),
            host_memory_bytes=(
                data.draw(st.sampled_from([None, 3 << 20]))
                # MoE-Lightning stages two layers, which need room.
                if hw == "two-core-host" and policy != "moe-lightning"
                else None
            ),
        )
        config = RunConfig.of(
            trace,
            policy=policy,
            hw=profile(hw),
            batch=batch,
            **memory.options(),
            **parts,
        )
        done = replay(config, keep=False)
        bound = replay_bound(Setup.of(config, trace), trace)
        assert bound is not None
        assert bound.seconds <= done.metrics["makespan_s"] * (1 + 1e-9)


def test_altered_routing_has_no_bound(tmp_path):
    chosen = [[[0, 1]], [[1, 2]]]
    scores = [[[0.4, 0.3, 0.2, 0.1]]] * 2
    trace = hand_trace(tmp_path / "t.parquet", chosen, experts=4, scores=scores)
    config = RunConfig.of(trace, policy="greedy", routing="cache-prior")
    assert bound_of(config) is None


def met(tmp_path, costs, assignment, *, slots, top_k, layers=8, tokens=30):
    """Share of the bound that a schedule which knows the future reaches, and what
    limits it.
    """
    draw = random.Random(0)
    routing = [
        [draw.sample(range(8), top_k) for _ in range(layers)] for _ in range(tokens)
    ]
    trace = hand_trace(tmp_path / "t.parquet", routing, experts=8)
    costs.shape = shape(layers, 8, top_k)
    planner = plan_of(
        costs.shape,
        System(assignment, cache="belady"),
        costs,
        slots=slots,
        future=RecordedFuture.of(trace, batch=1, steps=None),
    )
    result, _ = run(planner, list(compose(trace)))
    bound = least_seconds(layer_steps(trace), costs, planner.sizes)
    return bound.share(result.makespan_s), bound.resource


TINY = 1e-7


@pytest.mark.parametrize(("assignment", "costs", "slots", "top_k", "limits"), [
    # All is computed on the CPU.
    ("all-cpu", HandCosts(cpu=1.0, gpu=1e9, copy=1e9, dense=TINY), 0, 2, {CPU, ORDER}),
    # All eight experts fit, and copies cost next to nothing.
    ("on-demand", HandCosts(cpu=1e9, gpu=1.0, copy=TINY, dense=0.5), 8, 2, {ORDER}),
    # One expert per layer step: the link never rests and reads what MIN must.
    ("on-demand", HandCosts(cpu=1e9, gpu=TINY, copy=1.0, dense=TINY), 3, 1, {LINK}),
])  # fmt: skip
def test_the_bound_is_met_where_one_lane_takes_all_the_time(
    tmp_path, assignment, costs, slots, top_k, limits
):
    share, resource = met(tmp_path, costs, assignment, slots=slots, top_k=top_k)
    assert share > 0.99
    assert resource in limits


def test_work_ahead_of_its_gate_leaves_its_layer_step(tmp_path):
    trace = hand_trace(tmp_path / "t.parquet", [[[0]]], experts=2)
    costs = HandCosts(cpu=1.0, gpu=1e9, copy=1e9, dense=TINY)
    costs.shape = shape(1, 2, 1)
    plan = MemoryPlan(CacheSize.for_model(costs.shape, slots_per_layer=0))
    for ahead, inside_s in ((False, 1.0), (True, 0.0)):
        bound = least_seconds(layer_steps(trace), costs, plan, computes_ahead=ahead)
        assert bound.by_resource[ORDER] == pytest.approx(inside_s, abs=1e-3)
        assert bound.by_resource[CPU] == pytest.approx(1.0)


def test_words_name_what_limits():
    bound = Bound(2.0, LINK, {LINK: 2.0}, 100, 40, 0)
    assert bound.words(4.0) == (
        "at 50 % of what this machine can do at best, limited by the link (40 of 100"
        " expert reads happen under any schedule)"
    )


def test_a_trace_too_long_to_wait_for_has_no_bound(tmp_path, monkeypatch):
    trace = hand_trace(tmp_path / "t.parquet", [[[0, 1]], [[1, 2]]], experts=4)
    config = RunConfig.of(trace, policy="greedy")
    assert bound_of(config).accesses == 4
    monkeypatch.setattr("moesim.runs.bound.MOST_ACCESSES", 3)
    assert bound_of(config) is None
    assert bound_of(config.replaced(steps=1)).accesses == 2
