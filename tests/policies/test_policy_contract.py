"""The contract of every policy, held by one suite over all registered names."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import (
    LayerStep,
    ListFuture,
    View,
    context,
    drive,
    shape,
    work,
)

from moesim.policies.assignment._optimum import modelled_s
from moesim.policies.base import Gate, RunContext
from moesim.policies.registry import KINDS, describe, find, names, resolve
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase

LAYERS = 3
EXPERTS = 6


@st.composite
def works(draw):
    """A layer step: from one active expert to all, any residency, one or two GPUs, with
    predictions.
    """
    experts = sorted(
        draw(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS))
    )
    active = len(experts)
    gpus = draw(st.integers(1, 2))
    tokens = draw(st.integers(1, 4))
    seconds = st.floats(0, 0.1, allow_nan=False)
    times = st.lists(seconds, min_size=active, max_size=active)
    score = st.lists(st.floats(-4, 4, width=16), min_size=EXPERTS, max_size=EXPERTS)
    predicted = draw(st.lists(score, min_size=tokens, max_size=tokens))
    return work(
        experts=experts,
        layer=draw(st.integers(0, LAYERS - 1)),
        tokens=draw(st.lists(st.integers(1, 50), min_size=active, max_size=active)),
        cpu_s=draw(times),
        host_s=draw(times),
        gpu_s=[draw(times) for _ in range(gpus)],
        arrive_s=[draw(times) for _ in range(gpus)],
        state=draw(st.lists(st.integers(0, 2), min_size=active, max_size=active)),
        routing=[
            draw(st.permutations(experts))[: draw(st.just(1))] for _ in range(tokens)
        ],
        predicted=dict.fromkeys(PREDICTION_COLUMNS, predicted),
    )


@st.composite
def views(draw, gpus):
    keys = st.sets(
        st.tuples(
            st.integers(0, gpus - 1),
            st.integers(0, LAYERS - 1),
            st.integers(0, EXPERTS - 1),
        )
    )
    resident = draw(keys)
    return View(LAYERS, EXPERTS, gpus, resident, draw(keys) - resident)


FUTURE = ListFuture(
    [
        LayerStep(step, layer, [(step + layer) % EXPERTS, EXPERTS - 1])
        for step in range(3)
        for layer in range(LAYERS)
    ]
)
"""What oracles are shown: two active experts in each layer step."""


def started(kind, name, gpus):
    policy = resolve(name, kind)
    future = FUTURE if policy.oracle else None
    policy.start(
        RunContext(
            shape(LAYERS, EXPERTS), gpus, np.full(LAYERS, 2), "layer", future=future
        )
    )
    return policy


@pytest.mark.parametrize("name", names("assignment"))
@settings(max_examples=25, deadline=None)
@given(data=st.data(), now=works())
def test_assignment_places_every_active_expert_once_on_a_legal_lane(name, data, now):
    gpus = len(now.gpu_s)
    view = data.draw(views(gpus))
    before = copy.deepcopy(now)
    answer = started("assignment", name, gpus).assign(now, view)
    active = len(now.experts)
    assert answer.lanes.dtype == np.int8
    assert answer.lanes.shape == (active,)
    assert 0 <= answer.lanes.min() <= answer.lanes.max() <= gpus
    if answer.order is not None:
        assert sorted(answer.order.tolist()) == list(range(active))
    again = started("assignment", name, gpus).assign(now, view)
    assert again.lanes.tolist() == answer.lanes.tolist()
    assert np.array_equal(now.cpu_s, before.cpu_s)
    assert answer.lanes is not again.lanes


ANY_COST = st.sampled_from([0.0, 1e-3, 2e-3, 5e-3, np.inf])
"""Infinite on a lane that is no choice: of an expert that is just being replaced, the
arrival.
"""


@st.composite
def works_with_extremes(draw, cpu_s=ANY_COST):
    """A layer step whose costs are zero, finite or infinite in any mix."""
    active = draw(st.integers(1, EXPERTS))
    gpus = draw(st.integers(1, 2))

    def times(seconds):
        return draw(st.lists(seconds, min_size=active, max_size=active))

    return work(
        cpu_s=times(cpu_s),
        gpu_s=[times(ANY_COST) for _ in range(gpus)],
        arrive_s=[times(ANY_COST) for _ in range(gpus)],
        host_s=times(st.sampled_from([0.0, 1e-3])),
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", names("assignment"))
@settings(max_examples=40, deadline=None)
@given(now=works_with_extremes())
def test_infinite_costs_are_survived_by_every_assignment(name, now):
    """Legal lanes and order, and no arithmetic on what is no number."""
    gpus = len(now.gpu_s)
    answer = started("assignment", name, gpus).assign(now, View(1, EXPERTS, gpus))
    active = len(now.experts)
    assert answer.lanes.shape == (active,)
    assert 0 <= answer.lanes.min() <= answer.lanes.max() <= gpus
    if answer.order is not None:
        assert sorted(answer.order.tolist()) == list(range(active))


WEIGH_COSTS = (
    "beam", "exact", "fetch-split", "fiddler", "greedy", "hybrimoe-released",
    "hybrimoe-schedule", "ilp", "smoe-balancer", "static-threshold",
)  # fmt: skip
"""The others place by residency, layer or number of tokens, whatever it costs."""


@pytest.mark.parametrize("name", WEIGH_COSTS)
@settings(max_examples=60, deadline=None)
@given(now=works_with_extremes(st.sampled_from([0.0, 1e-3, 5e-3])))
def test_infinite_costs_forbid_a_lane_to_every_assignment_that_weighs_costs(name, now):
    """The CPU could finish every expert, so no policy waits forever on a GPU."""
    gpus = len(now.gpu_s)
    # An expert that is resident where it would be computed forever is no machine's.
    arrive_s = np.where(np.isinf(now.gpu_s), np.inf, now.arrive_s)
    now = dataclasses.replace(now, arrive_s=arrive_s)
    answer = started("assignment", name, gpus).assign(now, View(1, EXPERTS, gpus))
    assert np.isfinite(modelled_s(now, answer.lanes))


@settings(max_examples=150, deadline=None)
@given(now=works_with_extremes())
def test_infinite_costs_leave_ilp_and_exact_at_the_optimum(now):
    lanes = range(len(now.gpu_s) + 1)
    choices = itertools.product(lanes, repeat=len(now.experts))
    best_s = min(modelled_s(now, np.array(choice, np.int8)) for choice in choices)
    for name in ("ilp", "exact"):
        policy = started("assignment", name, len(now.gpu_s))
        answer = policy.assign(now, View(1, EXPERTS, len(now.gpu_s)))
        if np.isfinite(best_s):
            assert modelled_s(now, answer.lanes) == pytest.approx(best_s, rel=1e-6)


@pytest.mark.parametrize("name", names("prefetch"))
@settings(max_examples=25, deadline=None)
@given(data=st.data(), now=works())
def test_prefetch_names_distinct_absent_experts_of_coming_layers(name, data, now):
    gpus = len(now.gpu_s)
    view = data.draw(views(gpus))
    keys = list(started("prefetch", name, gpus).prefetch(now, view))
    assert len(set(keys)) == len(keys)
    # A layer whose products wait for all its copies may name itself, when it is the first.
    waits = started("prefetch", name, gpus).late == "wait" and now.layer == 0
    any_layer = started("prefetch", name, gpus).foresees_passes
    for key in keys:
        assert any_layer or now.layer < key.layer + waits
        assert key.layer < LAYERS
        assert 0 <= key.expert < EXPERTS
    if now.layer == LAYERS - 1 and not waits:
        assert any_layer or keys == []
    assert keys == list(started("prefetch", name, gpus).prefetch(now, view))


@pytest.mark.parametrize("name", names("prefetch"))
def test_prefetch_declares_the_columns_it_reads(name):
    """With only what `needs` names in the trace, it answers."""
    policy = started("prefetch", name, 1)
    assert set(policy.needs) <= set(PREDICTION_COLUMNS) | {"scores", "weights"}
    predicted = {
        column: [[0.5] * EXPERTS]
        for column in policy.needs
        if column in PREDICTION_COLUMNS
    }
    policy.prefetch(work(experts=[0], predicted=predicted), View(LAYERS, EXPERTS))


@st.composite
def runs(draw):
    """Layer steps in replay order, from one active expert to all."""
    active = st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS)
    count = draw(st.integers(0, 8))
    return [
        LayerStep(i // LAYERS, i % LAYERS, sorted(draw(active)))
        for i in range(count * LAYERS // 2)
    ]


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", names("cache"))
@settings(max_examples=25, deadline=None)
@given(steps=runs(), capacity=st.integers(0, LAYERS * EXPERTS))
def test_cache_never_overflows_and_evicts_only_candidates(name, scope, steps, capacity):
    """The driver checks victims; empty caches, full ones and those that hold everything
    included.
    """
    capacity = min(capacity, EXPERTS) if scope == "layer" else capacity
    first, second = (
        drive(
            resolve(name, "cache"),
            steps,
            capacity,
            layers=LAYERS,
            experts=EXPERTS,
            scope=scope,
            seed=3,
        )
        for _ in range(2)
    )
    assert first == second
    assert first.hits <= first.accesses
    if capacity == 0:
        assert first.hits == 0


@pytest.mark.parametrize("name", names("cache"))
@settings(max_examples=25, deadline=None)
@given(data=st.data(), steps=runs())
def test_cache_survives_prefetches_it_never_asked_for(name, data, steps):
    """Keys enter and leave without being used, as prefetches of other layers do."""
    policy = resolve(name, "cache")
    policy.start(context(steps, 2, layers=LAYERS, experts=EXPERTS, scope="global"))
    keys = st.integers(0, LAYERS * EXPERTS - 1)
    inside: set[int] = set()
    for step, layer, active in steps:
        policy.accessed(work(experts=active, step=step, layer=layer))
        entering = np.array(
            sorted(data.draw(st.sets(keys, max_size=4)) - inside), np.int64
        )
        policy.admitted(entering)
        inside |= set(entering.tolist())
        incoming = np.array(
            sorted(data.draw(st.sets(keys, max_size=3)) - inside), np.int64
        )[: len(inside)]
        victims = policy.victims(incoming, np.array(sorted(inside), np.int64))
        assert victims.shape == incoming.shape
        left = [victim for victim in victims.tolist() if victim >= 0]
        assert len(set(left)) == len(left)
        assert set(left) <= inside
        policy.evicted(np.array(left, np.int64))
        inside -= set(left)


@pytest.mark.parametrize("name", names("routing"))
def test_routing_keeps_the_shape_and_says_whether_it_alters(name):
    experts = np.array([[3, 1], [0, 2]], np.uint16)
    weights = np.array([[0.6, 0.4], [0.9, 0.1]], np.float16)
    scores = np.array(
        [[0.1, 0.3, 0.1, 0.5, 0, 0], [0.6, 0.1, 0.2, 0.1, 0, 0]], np.float16
    )
    policy = started("routing", name, 1)
    routed = policy.route(
        Gate(0, 0, Phase.DECODE, experts, weights, scores), View(LAYERS, EXPERTS)
    )
    assert routed.experts.shape == experts.shape
    if not policy.alters:
        assert np.array_equal(routed.experts, experts)
        assert np.array_equal(routed.weights, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_every_policy_knows_its_name(kind):
    for name in names(kind):
        assert find(name, kind).name == name


@pytest.mark.parametrize("kind", KINDS)
def test_every_summary_is_one_sentence_that_begins_with_a_verb(kind):
    """`moesim list` prints it: short enough for a line, and in plain words."""
    for info in describe(kind):
        summary = info.summary
        assert summary.endswith("."), (info.name, summary)
        assert len(summary) <= 140, (info.name, summary)
        assert summary[0].isupper(), (info.name, summary)
        # An imperative, or a condition before it: no article, no noun phrase.
        first = summary.split()[0].strip(",")
        assert first not in {"A", "An", "The"}, (info.name, summary)
        assert not first.endswith("s"), (info.name, summary)
