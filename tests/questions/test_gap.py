"""Gap accounting: where the cause is known by hand, the blame falls there, and the
shares sum to the gap.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.handmade import HandCosts, HandProfile, routed, shape, steps
from support.small_trace import write_trace
from typer.testing import CliRunner

from benchmarks.routing_figures import Grades
from moesim import cli
from moesim.policies.base import PolicyError
from moesim.policies.sizes import CacheSize, MemoryPlan
from moesim.policies.systems import System
from moesim.questions.gap import (
    CEILING,
    PARTS,
    MixReplays,
    decompose,
    gap,
    gap_answer,
    shapley,
)
from moesim.runs import replay as api
from moesim.runs.config import RunConfig
from moesim.runs.setup import Setup
from moesim.sim.replay import Replay
from moesim.traces.format.future import RecordedFuture

NO_CPU = 1000.0
"""Seconds of an expert on a CPU that nobody would choose."""


ONE_LAYER_AHEAD = System(CEILING.assignment, cache="belady", prefetch="clairvoyant")
"""Substitutes that look no further than causes by hand."""


def replays(model, system, forward, *, slots, ceiling=ONE_LAYER_AHEAD, **costs):
    setup = Setup(RunConfig(), model, HandProfile(), system)
    setup.memory = MemoryPlan(
        CacheSize.of(model.expert_bytes, model.experts, slots_per_layer=slots)
    )
    setup.costs = lambda: HandCosts(**costs)

    def walk(planner, timeline):
        return Replay(setup.profile, planner, timeline).run(forward)

    return MixReplays(setup, walk, RecordedFuture(forward), ceiling)


def one_layer(*experts):
    return steps(*[[routed(0, expert)] for expert in experts])


def parts(result):
    return result.parts.set_index("name").to_dict("index")


def shares(result):
    return {name: part["share_s"] for name, part in parts(result).items()}


def test_two_players_share_what_they_save_together():
    """Alone a saves 4 and b saves 1, together 6: a gets (4 + 5) / 2, b gets (1 + 2) /
    2.
    """
    value = {
        frozenset(): 10.0,
        frozenset("a"): 6.0,
        frozenset("b"): 9.0,
        frozenset("ab"): 4.0,
    }
    assert shapley(value, ["a", "b"]) == {"a": 4.5, "b": 1.5}


# One cause at a time.


@pytest.mark.parametrize(("cause", "system", "experts", "costs", "policy_s", "least_s"), [
    # Two slots: LRU misses all 6 (7 s each), Belady hits 2 of them (3 s each).
    ("eviction", System("on-demand", cache="lru"), (0, 1, 2, 0, 1, 2),
     {"cpu": NO_CPU}, 6 * (2 + 4 + 1), 4 * (2 + 4 + 1) + 2 * (2 + 1)),
    # Everything is on the GPU (1 s), and yet the CPU (10 s) computes it.
    ("assignment", System("all-cpu", cache="static:fill=lowest"), (0, 1, 0),
     {}, 3 * (2 + 10), 3 * (2 + 1)),
    ("planning", System("on-demand", cache="lru"), (0, 1, 0, 1),
     {"cpu": NO_CPU, "plan": 0.5}, 2 * 7.5 + 2 * 3.5, 2 * 7 + 2 * 3),
])  # fmt: skip
def test_the_one_part_that_differs_costs_all(
    cause, system, experts, costs, policy_s, least_s
):
    model = shape(experts=max(experts) + 1)
    result = decompose(replays(model, system, one_layer(*experts), slots=2, **costs))
    assert (result.policy_s, result.ceiling_s) == (policy_s, least_s)
    expected = dict.fromkeys(PARTS, 0.0) | {cause: policy_s - least_s}
    assert shares(result) == pytest.approx(expected)
    # Even where only two of three fit: no copy, and no planning.
    assert result.resident_s == len(experts) * (2 + 1)


def test_only_prefetch_differs():
    """Two layers, no cache, two staging slots, one of them for demand alone. Late:
    2 (2 + 4 + 1) = 14 s. Foreseen at 2 s, the second copy gets the slot of the first
    when that is computed, and runs from 7 to 11 s: 12 s.
    """
    model = shape(layers=2, experts=2)
    forward = steps([routed(0, 0), routed(1, 1)])
    system = System(CEILING.assignment, cache="belady", prefetch="none")
    result = decompose(replays(model, system, forward, slots=0, cpu=NO_CPU))
    assert (result.policy_s, result.ceiling_s) == (14.0, 12.0)
    assert shares(result) == pytest.approx({"prefetch": 2.0, "planning": 0.0})


def test_the_clairvoyant_composition_has_no_gap():
    model = shape(layers=2, experts=4)
    forward = steps(*[[routed(0, i % 4), routed(1, (i + 1) % 3)] for i in range(6)])
    result = decompose(
        replays(model, CEILING, forward, slots=2, plan=0.0, ceiling=CEILING)
    )
    assert result.gap_s == 0.0
    assert list(parts(result)) == ["planning"]
    assert parts(result)["planning"]["replaced_by"] is None


def test_a_prefetcher_that_floods_the_link_is_not_forced_on_the_policy():
    """A copy takes longer than the whole run: foreseeing helps nobody, and the bound
    leaves it out.
    """
    model = shape(layers=2, experts=4)
    forward = steps(*[[routed(0, i % 4), routed(1, (i + 2) % 4)] for i in range(6)])
    result = decompose(
        replays(
            model, System("all-cpu", cache="lru"), forward, slots=1, cpu=3.0, copy=1e4
        )
    )
    prefetch = parts(result)["prefetch"]
    assert result.mixes["prefetch: clairvoyant"] >= result.policy_s
    assert prefetch["replaced_by"] is None
    assert prefetch["share_s"] == 0.0


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=2, max_size=2),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 5),
    st.sampled_from(["greedy", "on-demand", "all-cpu"]),
    st.sampled_from(["lru", "static:fill=lowest", "none"]),
)
def test_shares_are_never_negative_and_sum_to_the_gap(trace, slots, assignment, cache):
    model = shape(layers=2, experts=5, top_k=2)
    forward = steps(
        *[
            [routed(layer, *sorted(chosen)) for layer, chosen in enumerate(layers)]
            for layers in trace
        ]
    )
    result = decompose(
        replays(
            model,
            System(assignment, cache=cache),
            forward,
            slots=slots,
            plan=0.25,
            cpu=3.0,
            ceiling=CEILING,
        )
    )
    assert sum(shares(result).values()) == pytest.approx(result.gap_s, abs=1e-9)
    assert min(shares(result).values()) >= -1e-9
    assert result.parts[["alone_s", "last_s"]].to_numpy().min() >= 0.0
    assert result.ceiling_s == min(result.mixes.values())
    assert result.policy_s == result.mixes["as it is"]


# Grades of the assignment.


def test_an_assignment_ten_times_slower_than_the_best_is_graded_ten():
    model = shape(experts=2)
    forward = one_layer(0, 1, 0)
    grades = Grades()
    replays(
        model, System("all-cpu", cache="static:fill=lowest"), forward, slots=2
    ).replay_s({}, grades)
    assert list(grades.modelled) == [10.0] * 3
    assert grades.chosen_s == 10.0 * grades.least_s


def test_nobody_is_graded_better_than_the_best_and_the_best_is_best():
    rng = np.random.default_rng(1)
    model = shape(experts=8, top_k=4)
    forward = steps(
        *[
            [routed(0, *rng.choice(8, 5, replace=False), tokens=rng.integers(1, 9, 5))]
            for _ in range(40)
        ]
    )
    deferral = "fixed-mapping:defer=2"
    for assignment, best in (("greedy", False), ("exact", True), (deferral, False)):
        grades = Grades()
        replays(
            model, System(assignment), forward, slots=3, per_token=0.7, cpu=2.0
        ).replay_s({}, grades)
        assert min(grades.modelled) >= 1.0 - 1e-9
        assert (max(grades.modelled) <= 1.0 + 1e-9) is best


# On traces.


@pytest.fixture
def trace(tmp_path, tiny_shape):
    return write_trace(
        tmp_path / "trace.parquet", tiny_shape, ((4, 8), (4, 8)), columns=("scores",)
    )


def test_the_policy_itself_is_timed_as_replay_times_it(trace):
    given = {
        "cache": "lru",
        "hw": "rtx3090-epyc7532",
        "batch": 2,
        "slots_per_layer": 3,
    }
    result = gap(trace, "greedy", **given)
    assert result.policy_s == api.replay(trace, "greedy", **given).metrics["makespan_s"]
    assert set(parts(result)) == set(PARTS)
    assert sum(shares(result).values()) == pytest.approx(result.gap_s)
    # The physical bound is named beside the ceiling, wherever one reads.
    assert result.bound.seconds <= result.ceiling_s
    answer = gap_answer(result)
    assert "no schedule is faster" in answer.text()
    assert answer.to_json()["bound"]["seconds"] == result.bound.seconds
    assert json.loads(json.dumps(result.to_json()))["parts"]["planning"]["share_s"] > 0


def test_the_ceiling_is_no_slower_than_with_plain_foresight():
    """Rules that were the best from a start of their own led 5 % less far from here.
    And every combination is listed, though two parts may have substitutes of one name.
    """
    told = []
    result = gap(
        "gpt-oss-20b-like", "on-demand", gpu_memory_bytes=8 << 30, hw="rtx4060ti",
        steps=4, progress=told.append,
    )  # fmt: skip
    assert result.config["ceiling"] == {
        name: getattr(CEILING, name) for name in ("assignment", "cache", "prefetch")
    }
    assert len(result.mixes) == 16
    assert told == [place / 16 for place in range(1, 17)]


def test_altered_routing_has_no_future(trace):
    with pytest.raises(PolicyError, match=r"cache-prior.*alters the routing"):
        gap(trace, "greedy", routing="cache-prior", hw="rtx3090-epyc7532")


def test_the_command_prints_every_part(trace):
    line = f"gap {trace} --policy greedy --hw rtx3090-epyc7532 --steps 6"
    done = CliRunner().invoke(cli.app, line.split())
    assert done.exit_code == 0, done.output
    assert all(part in done.stdout for part in (*PARTS, "ceiling", "tiny"))
