"""Prefetch policies: what they want, in which order, and what they leave out."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import View, context, named, work

from moesim.policies.prefetch.next_gate import NextGate
from moesim.policies.prefetch.residual import Residual
from moesim.traces.format.arrays import predicted_workload


def wanted(policy, view, scores, *, column="pred1_raw"):
    """Experts of layer 1 that are named in layer 0, whose tokens' scores are given."""
    policy.start(context([], 1, layers=view.layers, experts=view.experts))
    keys = named(policy, NOW, view, predicted={column: scores})
    assert all(layer == 1 for layer, _ in keys)
    return [expert for _, expert in keys]


NOW = work(experts=[0])


def test_section_1_5_residual_correction_changes_the_choice():
    """Raw logits (.10, .05, .02) choose expert 0; with res_vec (1, 1) they are (.10,
    .55, 1.22) and choose 2.

    For h = (1, 0) both choose 0. The vector is the mean change from layer to layer of
    two calibration tokens.
    """
    gate = np.array([(1, -1), (0, 0.5), (-1, 2.2)])
    inputs = np.array([(1, 0), (0, 1)])
    next_inputs = np.array([(2, 1), (1, 2)])
    hidden = np.array([0.2, 0.1])
    res_vec = (next_inputs - inputs).mean(axis=0)
    assert res_vec.tolist() == [1, 1]
    assert (
        (gate @ (1, 0)).argmax() == (gate @ (res_vec + np.array([1, 0]))).argmax() == 0
    )
    corrected = [gate @ (hidden + res_vec)]
    assert np.allclose(corrected, [[0.10, 0.55, 1.22]])
    view = View(layers=2, experts=3)
    assert wanted(NextGate(size=1), view, [gate @ hidden]) == [0]
    assert wanted(Residual(size=1), view, corrected, column="pred1_res") == [2]


def test_experts_are_ranked_by_predicted_workload_not_by_score():
    """Two tokens choose 1, one chooses 3 with a higher score."""
    scores = [[0.1, 0.3, 0.2, 0.0], [0.1, 0.3, 0.2, 0.0], [0, 0, 0, 0.9]]
    assert wanted(NextGate(size=2), View(layers=2, experts=4), scores) == [1, 3]


def test_equal_workloads_go_to_the_lower_id_or_by_score():
    scores = [[0.1, 0.2, 0.3, 0.4]]
    view = View(layers=2, experts=4, top_k=3)
    assert wanted(NextGate(size=2), view, scores) == [1, 2]
    assert wanted(NextGate(size=2, tie="score"), view, scores) == [3, 2]


def test_section_1_5_a_present_experts_use_up_their_place_unless_refilled():
    """Ranked 0, 1, 2, 3; 0 resident and 1 on its way: of the top two nothing is left,
    refilled 2 and 3 come.
    """
    view = View(
        layers=2, experts=4, resident={(0, 1, 0)}, in_flight={(0, 1, 1)}, top_k=4
    )
    scores = [[0.4, 0.3, 0.2, 0.1]]
    for size, refill, expected in ((2, False, []), (3, False, [2]), (2, True, [2, 3])):
        policy = Residual(size=size, refill=refill)
        assert wanted(policy, view, scores, column="pred1_res") == expected


def test_an_expert_on_any_gpu_is_present():
    view = View(layers=2, experts=2, gpus=2, resident={(1, 1, 0)}, top_k=2)
    assert wanted(NextGate(size=2), view, [[0.4, 0.3]]) == [1]


def test_an_expert_that_no_token_is_predicted_to_choose_is_not_wanted():
    view = View(layers=2, experts=4)
    assert wanted(NextGate(size=4), view, [[0.4, 0.3, 0.2, 0.1]]) == [0]


def test_depth_asks_nearer_layers_first_and_stops_at_the_last():
    columns = {
        "pred1_raw": [[1, 0, 0]],
        "pred2_raw": [[0, 1, 0]],
        "pred3_raw": [[0, 0, 1]],
    }
    policy = NextGate(size=1, depth=3)
    assert policy.needs == ("pred1_raw", "pred2_raw", "pred3_raw")
    assert NextGate().needs == ("pred1_raw",)
    policy.start(context([], 1, layers=4, experts=3))
    for layers, expected in ((4, [(1, 0), (2, 1), (3, 2)]), (3, [(1, 0), (2, 1)])):
        view = View(layers=layers, experts=3)
        assert named(policy, NOW, view, predicted=columns) == expected


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
def test_predicted_workload_counts_each_tokens_best(data, tokens, width, top_k):
    """Ties inside a token go to the lower id, as a stable sort gives them."""
    score = st.sampled_from([-1.0, -0.0, 0.0, 0.25, 0.5])
    row = st.lists(score, min_size=width, max_size=width)
    scores = np.array(
        data.draw(st.lists(row, min_size=tokens, max_size=tokens)), np.float32
    )
    expected = np.zeros(width, int)
    for token in scores:
        for expert in sorted(range(width), key=lambda e: -token[e])[:top_k]:
            expected[expert] += 1
    assert predicted_workload(scores, top_k).tolist() == expected.tolist()
