"""A cache alone hits as it does in an on-demand run, whatever its rule and sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.handmade import plan_of, routed, run, shape, steps

from moesim.policies.base import PolicyError
from moesim.policies.cache.lru import LRU
from moesim.policies.cache_replay import replay
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.policies.systems import System
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import of_steps

LAYERS = 2
EXPERTS = 7
CACHES = ["lru", "belady", "belady:must_admit=true", "arc", "mrs", "static"]
forward_passes = st.lists(
    st.sets(st.integers(0, EXPERTS - 1), min_size=1), min_size=LAYERS, max_size=LAYERS
)


def passes(trace):
    scores = np.random.default_rng(0).random((len(trace), LAYERS, 1, EXPERTS))
    return steps(
        *[
            [
                routed(layer, *sorted(chosen), scores=scores[step, layer])
                for layer, chosen in enumerate(layers)
            ]
            for step, layers in enumerate(trace)
        ]
    )


def alone(spec, model, size, forward, blocks=None):
    blocks = blocks or of_steps(forward, scores=True)
    policy = resolve(spec, "cache")
    return replay(policy, spec, model, size, blocks, future=RecordedFuture(forward))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(forward_passes, min_size=1, max_size=15),
    st.integers(0, EXPERTS),
    st.sampled_from(["layer", "global"]),
    st.sampled_from([(100, 100), (100, 170)]),
    st.sampled_from(CACHES),
)
def test_a_cache_alone_counts_the_hits_of_an_on_demand_run(
    trace, slots, scope, expert_bytes, spec
):
    model = shape(LAYERS, EXPERTS, expert_bytes=expert_bytes)
    forward = passes(trace)
    size = CacheSize.of(expert_bytes, EXPERTS, scope=scope, slots_per_layer=slots)
    counts = alone(spec, model, size, forward)
    planner = plan_of(
        model,
        System("on-demand", cache=spec),
        slots=slots,
        scope=scope,
        staging=EXPERTS,
        future=RecordedFuture(forward),
    )
    _, timeline = run(planner, forward)
    accesses = timeline.access_frame()
    hits = accesses["layer"][accesses["state"] == "hit"]
    assert counts.hits_by_layer.tolist() == np.bincount(hits, minlength=2).tolist()
    assert counts.accesses == len(accesses)


@pytest.mark.parametrize("spec", CACHES)
def test_blocks_do_not_change_the_counts(spec):
    draw = np.random.default_rng(0)
    chosen = draw.permuted(np.tile(np.arange(EXPERTS), (60, LAYERS, 1)), axis=2)
    forward = passes(chosen[:, :, :3].tolist())
    model = shape(LAYERS, EXPERTS)
    size = CacheSize.of(model.expert_bytes, EXPERTS, slots_per_layer=3)
    one_by_one = [block for step in forward for block in of_steps([step], scores=True)]
    in_parts = alone(spec, model, size, forward, one_by_one)
    assert len(one_by_one) == 60
    assert in_parts.hits == alone(spec, model, size, forward).hits > 0


def answering(question, answer):
    """An LRU that answers one question so."""
    return type("Odd", (LRU,), {question: answer})()


def fill(keys, values):
    for n, value in enumerate(values):
        keys[n] = value


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"victims": lambda *a: fill(a[3], [0, 0])}, r"victims \[0, 0\].*distinct"),
        ({"victims": lambda *a: fill(a[3], [2])}, "of the 2 candidates"),
        ({"victims": lambda *a: fill(a[3], [10**9])}, "of the 2 candidates"),
        ({"precedence": lambda *a: fill(a[1], [2, 2])}, r"precedence \[2, 2\]"),
        ({"precedence": lambda *a: fill(a[1], [-9])}, r"precedence \[-9, 3\]"),
        ({"initial": lambda *_: np.arange(4)}, "more than fits"),
    ],
)
def test_an_answer_that_cannot_be_is_the_policys_error(odd, words):
    """Two slots hold 0 and 1; then 2 and 3 are missed."""
    ((question, answer),) = odd.items()
    model = shape(1, 4)
    size = CacheSize.of((100,), 4, slots_per_layer=2)
    forward = steps([routed(0, 0, 1)], [routed(0, 2, 3)])
    with pytest.raises(PolicyError, match=f"'odd'.*{words}"):
        replay(answering(question, answer), "odd", model, size, of_steps(forward))
