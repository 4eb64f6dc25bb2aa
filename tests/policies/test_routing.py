"""Routing policies: who replaces whom, with which weight, and what must never happen to
a token.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import View, shape

from moesim.policies.arrays import view_of
from moesim.policies.base import Gate, PolicyError
from moesim.policies.names import DECODE, PREFILL, UNUSED
from moesim.policies.registry import names, resolve
from moesim.policies.routing._substitute import weights_of
from moesim.policies.routing.adaptive_gating import AdaptiveGating
from moesim.policies.routing.cache_prior import CachePrior
from moesim.policies.routing.expert_cache_router import ExpertCacheRouter
from moesim.policies.routing.graceful_degradation import GracefulDegradation
from moesim.policies.run_context import RunContext
from moesim.traces.format.schema import ModelShape

T0 = [0.30, 0.06, 0.20, 0.11, 0.10, 0.09, 0.08, 0.06]
T1 = [0.05, 0.28, 0.10, 0.13, 0.09, 0.12, 0.085, 0.145]
SMOE_RESIDENT = {(0, 0, 2), (0, 0, 4), (0, 0, 6)}


def gate(
    scores, top_k, *, layer=0, phase=DECODE, norm=True, weights=True, predicted=None
):
    """What a softmax gate says: its top k, ties to the lower id, and their weights."""
    scores = np.array(scores, np.float64)
    experts = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    if weights is True:
        weights = np.take_along_axis(scores, experts, axis=1)
        if norm:
            weights = weights / weights.sum(axis=1, keepdims=True)
    return outputs(experts, weights, scores, layer, phase, predicted)


def outputs(experts, weights, scores=None, layer=0, phase=DECODE, predicted=None):
    said = Gate()
    said.step, said.layer, said.phase = 0, layer, phase
    said.rows = len(experts)
    said.experts = view_of(experts, np.uint16)
    if weights is not False:
        said.weights = view_of(weights, np.float64)
    if scores is not None:
        said.scores = view_of(scores, np.float64)
    if predicted is not None:
        said.predicted = view_of(predicted, np.float64)
    return said


class Model(View):
    """A view of a model that does or does not normalise its weights."""

    def __init__(
        self,
        experts,
        resident=(),
        *,
        layers=1,
        norm=True,
        in_flight=(),
        top_k=2,
        scoring="softmax",
    ):
        super().__init__(layers, experts, 1, resident, in_flight)
        self.shape = ModelShape(
            "test", layers, experts, top_k, 4, 4, (100,) * layers, 1, norm_topk=norm,
            scoring=scoring,
        )  # fmt: skip


class Routing(NamedTuple):
    """Experts that serve the tokens, [T, K], and their weights, or None."""

    experts: np.ndarray
    weights: np.ndarray | None


def asked(policy, gate_output, view):
    """Ask a routing that has started."""
    chosen = np.zeros(gate_output.rows * view.experts, np.uint16)
    columns = policy.route(gate_output, view, chosen.data)
    if not columns:
        weights = np.asarray(gate_output.weights)
        return Routing(
            np.asarray(gate_output.experts), weights if len(weights) else None
        )
    experts = chosen[: gate_output.rows * columns].reshape(-1, columns)
    return Routing(experts, policy.weigh(gate_output, experts))


def routed(policy, gate_output, view):
    policy.start(RunContext(view.shape, 1, np.zeros(view.layers, int), "layer"))
    answer = asked(policy, gate_output, view)
    return [[e for e in row if e != UNUSED] for row in answer.experts.tolist()], answer


@pytest.mark.parametrize(("alpha", "expected"), [
    (0.15, ([0, 2, 4], [1, 7, 3])),
    (0.35, ([0, 2, 4], [1, 4, 2])),
    (0.05, ([0, 2, 3], [1, 7, 3])),
])  # fmt: skip
def test_section_3_1_expert_cache_router(alpha, expected):
    """At .15 token 0 swaps 3 for the resident 4; at .35 token 1 swaps 7 and 3 for 2 and
    4; at .05 nothing changes.
    """
    policy = ExpertCacheRouter(alpha=alpha, batch_aware=False)
    experts, _ = routed(policy, gate([T0, T1], 3), Model(8, SMOE_RESIDENT, top_k=3))
    assert [set(row) for row in experts] == [set(row) for row in expected]


@pytest.mark.parametrize(("token", "expected"), [(0, {0, 2, 3, 4}), (1, {1, 7, 3, 5})])
def test_section_3_1_literal_algorithm_returns_four_experts(token, expected):
    """As printed, rank k+1 belongs to the low-score experts, so k+1 come out; the
    text's reading keeps three.
    """
    gate_output = gate([T0, T1], 3)
    view = Model(8, SMOE_RESIDENT, top_k=3)
    literal, _ = routed(
        ExpertCacheRouter(alpha=0.15, reading="literal"), gate_output, view
    )
    text, _ = routed(ExpertCacheRouter(alpha=0.15), gate_output, view)
    assert set(literal[token]) == expected
    assert len(text[token]) == 3


def test_section_3_1_the_threshold_itself_is_not_top_score():
    """With beta .10 and alpha .15 a score of .115 equals T, though 1.15 x 0.1 < 0.115
    in binary: low, so replaced.
    """
    assert 1.15 * 0.1 < 0.115
    scores = [[0.5, 0.115, 0.10, 0.095, 0.095, 0.095]]
    experts, _ = routed(
        ExpertCacheRouter(alpha=0.15), gate(scores, 2), Model(6, {(0, 0, 3)})
    )
    assert experts == [[0, 3]]


def test_section_3_1_in_flight_counts_only_if_asked():
    view = Model(8, {(0, 0, 2)}, in_flight={(0, 0, 4)}, top_k=3)
    gate_output = gate([T0], 3)
    assert routed(ExpertCacheRouter(alpha=0.15), gate_output, view)[0] == [[0, 2, 3]]
    assert routed(ExpertCacheRouter(alpha=0.15, inflight_ok=True), gate_output, view)[
        0
    ] == [[0, 2, 4]]


def test_section_3_1_d_alternatives_need_not_be_resident_and_rank_k_plus_1_is_one():
    """Token 0 misses 3. Rank 4, expert 4 (s = beta), comes in if it is resident, or if
    it is token 1's top score.
    """
    other = [0.05, 0.08, 0.10, 0.09, 0.40, 0.12, 0.08, 0.08]
    for gate_output, resident, expected in (
        (gate([T0], 3), {(0, 0, 4)}, {0, 2, 4}),
        (gate([T0, other], 3), set(), {0, 2, 4}),
        (gate([T0], 3), set(), {0, 2, 3}),
    ):
        experts, _ = routed(
            ExpertCacheRouter(alpha=0.15, batch_aware=False),
            gate_output,
            Model(8, resident, top_k=3),
        )
        assert set(experts[0]) == expected


def test_section_3_1_e_substitutes_weigh_what_their_own_gate_scores_say():
    """Scores .30, .20, .10 of experts 0, 2, 4: normalised by .60 where the model
    normalises, as they are elsewhere.
    """
    for norm, expected in ((True, [1 / 2, 1 / 3, 1 / 6]), (False, [0.3, 0.2, 0.1])):
        view = Model(8, SMOE_RESIDENT, norm=norm, top_k=3)
        for weights in (True, False):
            gate_output = gate([T0], 3, norm=norm, weights=weights)
            _, answer = routed(ExpertCacheRouter(alpha=0.15), gate_output, view)
            assert answer.weights[0] == pytest.approx(expected, rel=1e-6)


def test_section_3_5_batch_aware_replacement():
    """{1,2,4}, {1,5,4}, {2,6,7}: 6 is low-score and missing, 4 is wanted by two tokens:
    {2,4,7}.

    Nothing is resident; 1, 2, 5, 7 are some token's top-score experts, 4 and 6 no token's.
    """
    scores = [
        [0.01, 0.50, 0.30, 0.01, 0.07, 0.01, 0.06, 0.04],
        [0.01, 0.50, 0.01, 0.02, 0.07, 0.30, 0.06, 0.03],
        [0.01, 0.01, 0.50, 0.01, 0.06, 0.04, 0.07, 0.30],
    ]
    gate_output = gate(scores, 3)
    view = Model(8, top_k=3)
    assert [set(row) for row in np.array(gate_output.experts).tolist()] == [
        {1, 2, 4},
        {1, 5, 4},
        {2, 6, 7},
    ]
    with_batch, _ = routed(ExpertCacheRouter(alpha=0.3), gate_output, view)
    assert [set(row) for row in with_batch] == [{1, 2, 4}, {1, 5, 4}, {2, 4, 7}]
    alone, _ = routed(
        ExpertCacheRouter(alpha=0.3, batch_aware=False), gate_output, view
    )
    assert set(alone[2]) == {2, 6, 7}


def test_section_3_5_two_misses_do_not_trade_places():
    """Each token misses what the other has as alternative; with one asker each, nothing
    is gained.
    """
    scores = [[0.5, 0.11, 0.10, 0.0], [0.5, 0.10, 0.11, 0.0]]
    experts, _ = routed(ExpertCacheRouter(alpha=0.3), gate(scores, 2), Model(4))
    assert experts == [[0, 1], [0, 2]]


def test_section_2_4_graceful_degradation():
    """Both top-2 experts on the CPU: 0 stays, the best resident takes the place of 1;
    weights .30 and .18 over .48.
    """
    scores = [[0.30, 0.25, 0.18, 0.12, 0.15]]
    resident = {(0, 5, 2), (0, 5, 3)}
    view = Model(5, resident, layers=6)
    experts, answer = routed(GracefulDegradation(), gate(scores, 2, layer=5), view)
    assert experts == [[0, 2]]
    assert answer.weights[0] == pytest.approx([0.625, 0.375], abs=1e-6)


@pytest.mark.parametrize(("norm", "resident", "experts", "weights"), [
    (True, {2, 3}, [0, 2], [0.30 / 0.48, 0.18 / 0.48]),
    (False, {2, 3}, [0, 2], [0.30, 0.18]),
    (True, {0, 1}, [0, 1], [0.30 / 0.55, 0.25 / 0.55]),
    (False, {0, 1}, [0, 1], [0.30, 0.25]),
])  # fmt: skip
def test_section_2_4_predicted_weights_are_formed_as_the_model_forms_its_own(
    norm, resident, experts, weights
):
    """The layer before says .30, .25, .18; the gate itself, never evaluated, would
    say 4 and 3.

    Not rounded to what a trace could store: .30 / .48 and .30 / .55 have no exact
    float16.
    """
    view = Model(5, {(0, 5, one) for one in resident}, layers=6, norm=norm)
    gate_output = gate(
        [[0.05, 0.05, 0.10, 0.30, 0.50]],
        2,
        layer=5,
        norm=norm,
        predicted=[[0.30, 0.25, 0.18, 0.12, 0.15]],
    )
    used, answer = routed(GracefulDegradation(), gate_output, view)
    assert used == [experts]
    assert answer.weights[0] == pytest.approx(weights, rel=1e-6)


def test_a_token_that_keeps_its_experts_keeps_its_weights_however_many_places_others_need():
    """The first token is given a third expert; the second one's weights are not what
    its scores say, and stay.
    """
    scores = [[0.5, 0.3, 0.2, 0.0], [0.0, 0.4, 0.4, 0.2]]
    gate_output = gate(scores, 2, weights=[[0.625, 0.375], [0.7, 0.3]])
    used = np.array([[0, 1, 2], [1, 2, UNUSED]])
    weights = weights_of(gate_output, used, np.array(scores), True)
    assert weights[0] == pytest.approx([0.5, 0.3, 0.2], rel=1e-6)
    assert weights[1] == pytest.approx([0.7, 0.3, 0.0], rel=1e-6)


def test_section_2_4_cases_that_stay():
    """One expert resident; none resident; an early layer; a prefill."""
    scores = [[0.30, 0.25, 0.18, 0.12, 0.15]]
    on_demand = Model(5, {(0, 0, 2)}, layers=6)
    for view, gate_output in (
        (Model(5, {(0, 5, 1)}, layers=6), gate(scores, 2, layer=5)),
        (Model(5, layers=6), gate(scores, 2, layer=5)),
        (on_demand, gate(scores, 2, layer=0)),
        (Model(5, {(0, 5, 2)}, layers=6), gate(scores, 2, layer=5, phase=PREFILL)),
    ):
        assert routed(GracefulDegradation(), gate_output, view)[0] == [[0, 1]]


def test_section_2_4_more_than_two_experts_keep_the_best_absent_one():
    """Top 4 is 0, 1, 2, 3 with 1 resident; of 0, 2, 3 the best stays and 4 is the only
    other resident.
    """
    scores = [[0.3, 0.2, 0.15, 0.12, 0.1, 0.05]]
    view = Model(6, {(0, 5, 1), (0, 5, 4)}, layers=6)
    assert routed(GracefulDegradation(), gate(scores, 4, layer=5), view)[0] == [
        [0, 1, 2, 4]
    ]


def test_section_6_8_adaptive_gating_drops_the_light_second_expert():
    """sqrt(0.005 / 0.08) = 1/4: a second expert with 24 % of the weight goes, one with
    26 % stays.
    """
    weights = np.array([[0.76, 0.24], [0.74, 0.26]], np.float16)
    gate_output = outputs([[3, 1], [0, 2]], weights)
    policy = AdaptiveGating(sensitivity=0.08)
    experts, answer = routed(policy, gate_output, Model(4))
    assert experts == [[3], [0, 2]]
    assert answer.weights.tolist() == [
        pytest.approx([1.0, 0.0], rel=1e-3),
        pytest.approx([0.74, 0.26], rel=1e-3),
    ]
    _, raw = routed(policy, gate_output, Model(4, norm=False))
    assert raw.weights[0] == pytest.approx([0.76, 0.0], rel=1e-3)
    prefill = outputs([[3, 1], [0, 2]], weights, phase=PREFILL)
    assert routed(policy, prefill, Model(4))[0] == [[3, 1], [0, 2]]


def test_section_6_8_sensitivities_come_from_the_calibration():
    """Two layers with thresholds sqrt(0.005 / 0.02) = 1/2 and sqrt(0.005 / 0.5) =
    1/10.
    """
    policy = AdaptiveGating()
    extras = {"sensitivity": np.array([0.02, 0.5])}
    policy.start(
        RunContext(shape(2, 4, 2), 1, np.zeros(2, int), "layer", extras=extras)
    )
    for layer, experts in enumerate(([[3, UNUSED]], [[3, 1]])):
        gate_output = outputs([[3, 1]], [[0.6, 0.4]], layer=layer)
        answer = asked(policy, gate_output, Model(4, layers=2))
        assert answer.experts.tolist() == experts
    with pytest.raises(PolicyError, match="'sensitivity': expected 2 positive numbers"):
        policy.start(
            RunContext(
                shape(2, 4, 2),
                1,
                np.zeros(2, int),
                "layer",
                extras={"sensitivity": np.ones(3)},
            )
        )


def test_cache_prior_lets_a_resident_win_a_near_tie():
    """Logits 4, 2, 1.9, 0 span 4. Raised by 0.1 x 4 the resident third reaches 2.3 and
    beats the second's 2.
    """
    scores = np.exp([[4.0, 2.0, 1.9, 0.0]])
    gate_output = gate(scores / scores.sum(), 2)
    assert routed(
        CachePrior(strength=0.1, scale="token"), gate_output, Model(4, {(0, 0, 2)})
    )[0] == [[0, 2]]
    assert routed(
        CachePrior(strength=0.02, scale="token"), gate_output, Model(4, {(0, 0, 2)})
    )[0] == [[0, 1]]
    assert routed(CachePrior(strength=0.1, scale="token"), gate_output, Model(4))[
        0
    ] == [[0, 1]]


def test_cache_prior_always_keeps_the_top_j():
    """A boost of 10 ranges would drown the gate; J = 1 saves expert 0, J = 0 does
    not.
    """
    scores = np.exp([[4.0, 2.0, 1.0, 0.0]])
    gate_output = gate(scores / scores.sum(), 2)
    view = Model(4, {(0, 0, 2), (0, 0, 3)})
    assert routed(CachePrior(strength=10.0), gate_output, view)[0] == [[0, 2]]
    assert routed(CachePrior(strength=10.0, top_j=0), gate_output, view)[0] == [[2, 3]]


def test_cache_prior_scales_by_the_running_mean_range():
    """After a token of range 8, one of range 4 is scaled by 6: 0.1 x 6 lifts 1.5 over
    2; 0.1 x 4 does not.
    """
    wide, narrow = (
        np.exp([logits]) / np.exp(logits).sum()
        for logits in ([8.0, 2, 1, 0], [4.0, 2, 1.5, 0])
    )
    view = Model(4, {(0, 0, 2)})
    for scale, expected in (("mean", [[0, 2]]), ("token", [[0, 1]])):
        policy = CachePrior(strength=0.1, scale=scale)
        policy.start(RunContext(view.shape, 1, np.zeros(1, int), "layer"))
        asked(policy, gate(wide, 2), view)
        assert asked(policy, gate(narrow, 2), view).experts.tolist() == expected


def test_cache_prior_reads_sigmoid_scores_as_such():
    """Sigmoid scores .9 and .8 are logits 2.20 and 1.39, .5 is 0: the range is 2.20, a
    share of 0.7 of it 1.54.
    """
    view = Model(4, {(0, 0, 2)}, scoring="sigmoid")
    gate_output = gate([[0.9, 0.8, 0.5, 0.5]], 2)
    assert math.log(0.8 / 0.2) < 0.7 * math.log(9)
    assert routed(CachePrior(strength=0.7, scale="token"), gate_output, view)[0] == [
        [0, 2]
    ]
    assert routed(CachePrior(strength=0.6, scale="token"), gate_output, view)[0] == [
        [0, 1]
    ]


@st.composite
def gates(draw):
    """A batch with float16 scores, as a trace has them, and any residency."""
    experts = draw(st.integers(2, 9))
    tokens = draw(st.integers(1, 5))
    top_k = draw(st.integers(1, experts))
    raw = st.lists(st.floats(0.01, 1.0), min_size=experts, max_size=experts)
    scores = np.array(draw(st.lists(raw, min_size=tokens, max_size=tokens)))
    scores = (
        (scores / scores.sum(axis=1, keepdims=True))
        .astype(np.float16)
        .astype(np.float64)
    )
    norm = draw(st.booleans())
    resident = {(0, 5, e) for e in draw(st.sets(st.integers(0, experts - 1)))}
    view = Model(experts, resident, layers=6, norm=norm, top_k=top_k)
    return gate(scores, top_k, layer=5, norm=norm, weights=draw(st.booleans())), view


@pytest.mark.parametrize("spec", [
    *names("routing"),
    "cache-prior:strength=0.9,scale=token",
    "adaptive-gating:budget=9",
])  # fmt: skip
@settings(max_examples=60, deadline=None)
@given(drawn=gates())
def test_routing_invariants(spec, drawn):
    """Each token has 1 to K distinct legal experts; unused places weigh 0; weights keep
    the model's scale.
    """
    gate_output, view = drawn
    policy = resolve(spec, "routing")
    scores = np.array(gate_output.scores)
    recorded = np.array(gate_output.experts)
    if "weights" in policy.needs and not len(gate_output.weights):
        chosen = np.take_along_axis(scores, recorded.astype(int), axis=1)
        gate_output.weights = chosen.data
    experts, answer = routed(policy, gate_output, view)
    assert answer.experts.shape == recorded.shape
    assert np.array_equal(gate_output.experts, recorded)
    for row in experts:
        assert row
        assert len(set(row)) == len(row)
        assert max(row) < view.experts
    if answer.weights is None:
        return
    assert (answer.weights[answer.experts == UNUSED] == 0).all()
    if view.shape.norm_topk:
        given = np.array(gate_output.weights)
        total = given.sum(axis=1) if len(given) else 1.0
        assert answer.weights.sum(axis=1) == pytest.approx(total, rel=1e-3)
    elif spec != "as-recorded":
        expected = np.take_along_axis(
            np.pad(scores, ((0, 0), (0, 1))),
            np.minimum(answer.experts, view.experts).astype(int),
            axis=1,
        )
        assert answer.weights == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "spec",
    ["expert-cache-router:batch-aware=no", "graceful-degradation", "cache-prior"],
)
@settings(max_examples=40, deadline=None)
@given(drawn=gates())
def test_substitutes_never_add_a_miss(spec, drawn):
    """What enters is on the GPU, or is another token's top-score expert that is
    fetched anyway.
    """
    gate_output, view = drawn
    experts, _ = routed(resolve(spec, "routing"), gate_output, view)
    resident = set(np.flatnonzero(view.resident(5)).tolist())
    recorded = np.array(gate_output.experts).tolist()
    for row, was in zip(experts, recorded, strict=True):
        assert set(row) - set(was) <= resident | {
            e for other in recorded for e in other
        }
        assert len(set(row) - resident) <= len(set(was) - resident)


def test_the_planner_counts_rerouted_workloads_and_the_gate_mass_kept():
    """One token chose 0 and 1 (.30, .25); only 2 is resident (.18), so 0 and 2
    run: mass .48 of .55.
    """
    from support.handmade import plan_of, plan_step
    from support.handmade import routed as layer_of

    from moesim.policies.systems import System

    model = shape(1, 4, 2)
    system = System(
        assignment="on-demand",
        cache="static:fill=lowest",
        routing="graceful-degradation:first-layer=0",
    )
    planner = plan_of(model, system, slots=1)
    scores = np.array([[0.18, 0.30, 0.25, 0.01]], np.float16)
    plan_step(planner, layer_of(0, 1, 2, scores=scores))
    assert list(planner.work.experts) == [0, 1]
    assert planner.gate_mass == [pytest.approx(0.48 / 0.55, rel=1e-3)]
