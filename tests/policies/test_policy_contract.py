"""The contract of every policy, held by one suite over all registered names."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import (
    LayerStep,
    ListFuture,
    View,
    admit,
    context,
    drive,
    evict,
    named,
    placed,
    shape,
    victims,
    work,
)

from moesim.policies.arrays import view_of
from moesim.policies.assignment._optimum import modelled_s
from moesim.policies.base import Gate, PolicyError
from moesim.policies.names import ABSENT, DECODE
from moesim.policies.registry import KINDS, describe, find, name_of, names, resolve
from moesim.policies.run_context import RunContext
from moesim.traces.format.schema import PREDICTION_COLUMNS

LAYERS = 3
EXPERTS = 6


ANY_COST = st.sampled_from([0.0, 1e-3, 2e-3, 5e-3, np.inf])
"""Infinite on a lane that is no choice: of an expert that is just being replaced, the
arrival.
"""


STATES = st.integers(0, 2)


@st.composite
def works(draw, cpu_s=None, states=STATES):
    """A layer step: from one active expert to all, any residency, one or two GPUs, and
    costs that are zero, finite or infinite in any mix.
    """
    experts = sorted(
        draw(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS))
    )
    active = len(experts)
    gpus = draw(st.integers(1, 2))
    costs = st.one_of(st.floats(0, 0.1), ANY_COST)

    def times(seconds):
        return draw(st.lists(seconds, min_size=active, max_size=active))

    return work(
        experts=experts,
        layer=draw(st.integers(0, LAYERS - 1)),
        tokens=draw(st.lists(st.integers(1, 50), min_size=active, max_size=active)),
        cpu_s=times(costs if cpu_s is None else cpu_s),
        host_s=times(st.floats(0, 0.1)),
        gpu_s=[times(costs) for _ in range(gpus)],
        arrive_s=[times(costs) for _ in range(gpus)],
        state=draw(st.lists(states, min_size=active, max_size=active)),
        rows=draw(st.integers(1, 4)),
        width=EXPERTS,
    )


@st.composite
def tokens(draw, now):
    """Experts of each token of a layer step, and predictions by name."""
    active = st.sampled_from(list(now.experts))
    score = st.lists(st.floats(-4, 4, width=16), min_size=EXPERTS, max_size=EXPERTS)
    predicted = draw(st.lists(score, min_size=now.rows, max_size=now.rows))
    routing = [[draw(active)] for _ in range(now.rows)]
    return routing, dict.fromkeys(PREDICTION_COLUMNS, predicted)


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
    return View(LAYERS, EXPERTS, gpus, resident, draw(keys) - resident, future=FUTURE)


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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", names("assignment"))
@settings(max_examples=40, deadline=None)
@given(data=st.data(), now=works())
def test_assignment_places_every_active_expert_once_on_a_legal_lane(name, data, now):
    view = data.draw(views(now.gpus))
    answer = placed(started("assignment", name, now.gpus), now, view)
    assert 0 <= answer.lanes.min() <= answer.lanes.max() <= now.gpus
    assert sorted(answer.order.tolist()) == list(range(now.active))
    again = placed(started("assignment", name, now.gpus), now, view)
    assert again.lanes.tolist() == answer.lanes.tolist()


WEIGH_COSTS = (
    "beam", "exact", "fetch-split", "fiddler", "greedy", "hybrimoe-released",
    "hybrimoe-schedule", "ilp", "smoe-balancer", "static-threshold",
)  # fmt: skip
"""The others place by residency, layer or number of tokens, whatever it costs."""


@pytest.mark.parametrize("name", WEIGH_COSTS)
@settings(max_examples=60, deadline=None)
@given(now=works(st.floats(0, 0.1), st.just(ABSENT)))
def test_infinite_costs_forbid_a_lane_to_every_assignment_that_weighs_costs(name, now):
    """The CPU could finish every expert, so no policy waits forever on a GPU."""
    # An expert that is resident where it would be computed forever is no machine's.
    now.arrive_s = np.where(np.isinf(now.gpu_s), np.inf, now.arrive_s).data
    answer = placed(started("assignment", name, now.gpus), now)
    assert np.isfinite(modelled_s(now, answer.lanes))


@settings(max_examples=150, deadline=None)
@given(now=works())
def test_infinite_costs_leave_ilp_and_exact_at_the_optimum(now):
    choices = itertools.product(range(now.gpus + 1), repeat=now.active)
    best_s = min(modelled_s(now, np.array(choice, np.int8)) for choice in choices)
    for name in ("ilp", "exact"):
        answer = placed(started("assignment", name, now.gpus), now)
        if np.isfinite(best_s):
            # Solvers' tolerance is 1e-6 of the largest cost, which is 0.1 s here.
            taken_s = modelled_s(now, answer.lanes)
            assert taken_s == pytest.approx(best_s, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", names("prefetch"))
@settings(max_examples=25, deadline=None)
@given(data=st.data(), now=works())
def test_prefetch_names_distinct_absent_experts_of_coming_layers(name, data, now):
    view = data.draw(views(now.gpus))
    routing, predicted = data.draw(tokens(now))
    policy, again = (started("prefetch", name, now.gpus) for _ in range(2))
    keys = named(policy, now, view, routing=routing, predicted=predicted)
    assert len(set(keys)) == len(keys)
    # A layer whose products wait for all its copies may name itself, when it is the first.
    waits = policy.late == "wait" and now.layer == 0
    for layer, expert in keys:
        assert policy.foresees_passes or now.layer < layer + waits
        assert layer < LAYERS
        assert 0 <= expert < EXPERTS
    if now.layer == LAYERS - 1 and not waits:
        assert policy.foresees_passes or keys == []
    assert keys == named(again, now, view, routing=routing, predicted=predicted)


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
    now = work(experts=[0], width=EXPERTS)
    named(policy, now, View(LAYERS, EXPERTS, future=FUTURE), predicted=predicted)


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
        policy.accessed(work(experts=active, step=step, layer=layer, width=EXPERTS))
        entering = np.array(
            sorted(data.draw(st.sets(keys, max_size=4)) - inside), np.int64
        )
        admit(policy, *entering)
        inside |= set(entering.tolist())
        incoming = np.array(
            sorted(data.draw(st.sets(keys, max_size=3)) - inside), np.int64
        )[: len(inside)]
        chosen = victims(policy, incoming, sorted(inside))
        left = [victim for victim in chosen if victim >= 0]
        assert len(set(left)) == len(left)
        assert set(left) <= inside
        evict(policy, *left)
        inside -= set(left)


@pytest.mark.parametrize("name", names("routing"))
def test_routing_keeps_the_shape_and_says_whether_it_alters(name):
    experts = np.array([[3, 1], [0, 2]], np.uint16)
    weights = np.array([[0.6, 0.4], [0.9, 0.1]], np.float16)
    scores = np.array(
        [[0.1, 0.3, 0.1, 0.5, 0, 0], [0.6, 0.1, 0.2, 0.1, 0, 0]], np.float16
    )
    policy = started("routing", name, 1)
    gate = Gate()
    gate.layer, gate.phase, gate.rows = 0, DECODE, len(experts)
    gate.experts = experts.data
    gate.weights = view_of(weights, np.float64)
    gate.scores = view_of(scores, np.float64)
    chosen = np.zeros(2 * EXPERTS, np.uint16)
    columns = policy.route(gate, View(LAYERS, EXPERTS), chosen.data)
    assert columns in {0, 2}
    if not policy.alters:
        assert columns == 0
    if columns:
        used = policy.weigh(gate, chosen[:4].reshape(2, 2))
        assert used.shape == experts.shape


@pytest.mark.parametrize("kind", KINDS)
def test_every_policy_knows_its_name(kind):
    for name in names(kind):
        assert name_of(find(name, kind)) == name


@pytest.mark.parametrize("value", ["-1", "-0.5", "luck"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_no_parameter_can_mean_is_refused_by_its_name(kind, value):
    for info in describe(kind):
        for parameter in info.parameters:
            if parameter.type_label == "str":
                continue
            refused = f"policy '{info.name}': {parameter.name}: expected"
            with pytest.raises(PolicyError, match=refused):
                resolve(f"{info.name}:{parameter.name}={value}", kind)


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
