"""The compiled cache loop equals the policies, and the policies in the planner."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.handmade import plan_of, routed, run, shape, steps

from moesim.policies import cache_replay
from moesim.policies.planner.residency import CacheSize
from moesim.policies.registry import resolve
from moesim.policies.systems import System
from moesim.traces.format import layer_steps as layer_steps_module
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import of_steps

LAYERS = 2
EXPERTS = 7
forward_passes = st.lists(
    st.sets(st.integers(0, EXPERTS - 1), min_size=1), min_size=LAYERS, max_size=LAYERS
)


def passes(trace):
    return steps(
        *[
            [routed(layer, *sorted(chosen)) for layer, chosen in enumerate(layers)]
            for layers in trace
        ]
    )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(forward_passes, min_size=1, max_size=15),
    st.integers(0, EXPERTS),
    st.sampled_from(["layer", "global"]),
    st.sampled_from(["lru", "belady", "belady:must_admit=true"]),
)
def test_compiled_loop_policy_alone_and_planner_count_the_same_hits(
    trace, slots, scope, spec
):
    model = shape(LAYERS, EXPERTS)
    forward = passes(trace)
    size = CacheSize.of(model.expert_bytes, EXPERTS, scope=scope, slots_per_layer=slots)
    fast = cache_replay.replay_compiled(
        spec, model, size, of_steps(forward), future=RecordedFuture(forward)
    )
    slow = cache_replay.replay(
        resolve(spec, "cache"),
        spec,
        model,
        size,
        forward,
        future=RecordedFuture(forward),
    )
    planner = plan_of(
        model,
        System("on-demand", cache=spec),
        slots=slots,
        scope=scope,
        future=RecordedFuture(forward),
    )
    _, timeline = run(planner, forward)
    accesses = timeline.access_frame()
    assert fast.hits == slow.hits == (accesses["state"] == "hit").sum()
    assert fast.accesses == slow.accesses == len(accesses)
    assert np.array_equal(fast.hits_by_layer, slow.hits_by_layer)


def test_blocks_do_not_change_the_counts(monkeypatch):
    draw = np.random.default_rng(0)
    forward = passes(
        [
            [
                set(draw.choice(EXPERTS, 3, replace=False).tolist())
                for _ in range(LAYERS)
            ]
            for _ in range(60)
        ]
    )
    model = shape(LAYERS, EXPERTS)
    size = CacheSize.of(model.expert_bytes, EXPERTS, slots_per_layer=3)
    future = RecordedFuture(forward)
    at_once = []
    parts = []
    for spec in ("lru", "belady"):
        monkeypatch.setattr(layer_steps_module, "BLOCK_ACCESSES", 1 << 19)
        at_once.append(
            cache_replay.replay_compiled(
                spec, model, size, of_steps(forward), future=future
            ).hits
        )
        monkeypatch.setattr(layer_steps_module, "BLOCK_ACCESSES", 5)
        parts.append(
            cache_replay.replay_compiled(
                spec, model, size, of_steps(forward), future=future
            ).hits
        )
    assert at_once == parts


@pytest.mark.parametrize(
    ("spec", "compiled"),
    [("lru", True), ("belady", True), ("lfu", False), ("lru:x=1", False)],
)
def test_only_lru_and_belady_have_a_compiled_loop(spec, compiled):
    size = CacheSize.of((100, 100), EXPERTS, slots_per_layer=3)
    assert (
        cache_replay.has_compiled_loop(spec, shape(LAYERS, EXPERTS), size) is compiled
    )


def test_unequal_experts_in_one_pool_are_left_to_the_policy():
    model = shape(LAYERS, EXPERTS, expert_bytes=[100, 200])
    size = CacheSize.of(model.expert_bytes, EXPERTS, scope="global", slots_per_layer=3)
    assert not cache_replay.has_compiled_loop("lru", model, size)
