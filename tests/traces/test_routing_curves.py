"""Curves that drawn routing is compared by: against sets, against what others computed,
and within five points for all that ships.
"""

import csv

import numpy as np
import pytest

from benchmarks.ship_statistics import source_of
from moesim.traces.format.reader import open_trace
from moesim.traces.stats.routing_curves import Likeness, mean_curves, routing_curves
from moesim.traces.synthetic.draw import draw
from moesim.traces.synthetic.saved import model_like, shipped_statistics

REFERENCE = {
    # curve of the reference -> ours, places, tolerance
    "lru_hit_rate": ("lru", ("0.1", "0.25", "0.5"), 1e-4),
    "working_set_share": ("working_set", ("2", "8", "32", "128"), 1e-4),
    # It looks at every third token, and draws other batches.
    "overlap_at_lag": ("overlap", ("1", "8", "64"), 0.02),
    "union_over_batch_share": ("union", ("2", "8", "32"), 0.05),
}


def naive_hits(routing, slots, order):
    """Hit rate of one layer after the eighth token; `order` gives what stays first."""
    last, count = {}, {}
    hits = asked = 0
    for token, experts in enumerate(routing):
        for place, expert in enumerate(sorted(experts)):
            kept = sorted(last, key=lambda e: order(last[e], count[e]), reverse=True)
            if token >= 8:
                asked += 1
                hits += expert in kept[:slots]
            last[expert] = (token, place)
            count[expert] = count.get(expert, 0) + 1
    return hits / asked


def test_hit_rates_by_sets():
    rng = np.random.default_rng(3)
    routing = np.argsort(rng.random((60, 1, 12)) ** np.arange(1, 13), axis=2)[..., :3]
    found = routing_curves([routing], 12)
    for size, slots in (("0.1", 1), ("0.25", 3), ("0.5", 6)):
        layer = routing[:, 0].tolist()
        expected = {
            "lru": naive_hits(layer, slots, lambda last, count: last),
            "lfu": naive_hits(layer, slots, lambda last, count: (count, last)),
        }
        for name, rate in expected.items():
            assert found[name][size] == pytest.approx(rate), (name, size)
        assert found["belady"][size] >= found["lru"][size]


def test_curves_by_hand():
    """Two sequences of one layer, one expert of four each: 0 1 0 1 … and 2 2 2 …"""
    turns = np.tile([[[0]], [[1]]], (20, 1, 1))
    same = np.full((40, 1, 1), 2)
    found = routing_curves([turns, same], 4)
    assert found["working_set"]["2"] == (0.5 + 0.25) / 2
    assert found["overlap"]["1"] == pytest.approx(0.5)
    assert found["overlap"]["2"] == 1.0
    assert found["union"] == {"2": 0.5}
    # One slot: only the second sequence hits. Two slots: both do.
    assert found["lru"] == {"0.1": 0.5, "0.25": 0.5, "0.5": 1.0}
    assert found["belady"]["0.25"] == 0.75


def test_a_layer_that_copies_the_one_below_is_told_and_an_independent_one_is_not():
    rng = np.random.default_rng(0)
    below = rng.integers(8, size=(400, 1, 1))
    other = rng.integers(8, size=(400, 1, 1))
    copied = routing_curves([np.concatenate([below, below], axis=1)], 8)
    apart = routing_curves([np.concatenate([below, other], axis=1)], 8)
    assert copied["next_layer"]["1"] == 1.0
    assert apart["next_layer"]["1"] == pytest.approx(1 / 8, abs=0.06)


def test_the_comparison_in_words():
    real = {"lru": {"0.25": 0.5}, "next_layer": {"1": 0.3}, "union": {"2": 0.4}}
    drawn = {"lru": {"0.25": 0.46}, "next_layer": {"1": 0.37}}
    lines = Likeness(real, drawn, left_out=9).lines()
    assert lines == [
        "routing as drawn, in % (real: 9 sequences left out of the fit)",
        "  hit rate of LRU, cache of … of the experts: 25 %: 46 (50)",
        "  experts of the next layer that this one tells: 37 (30)",
        "  largest difference: 7.0 points, experts of the next layer that this one tells",
    ]


def reference(shared_traces, name):
    """Curves of real routing that others computed, under our names."""
    path = shared_traces.parent / "reference" / "routing_curves.csv"
    curves = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["trace"].replace("_", "-") == name and row["curve"] in REFERENCE:
                curve, places, _ = REFERENCE[row["curve"]]
                if row["x"] in places:
                    curves.setdefault(curve, {})[row["x"]] = float(row["value"])
    return curves


@pytest.mark.parametrize("name", ["gpt-oss-20b", "olmoe-1b-7b"])
def test_real_traces_have_the_curves_that_others_computed(
    shared_traces, tmp_path, name
):
    trace = open_trace(source_of(name, tmp_path))
    layers, top_k = trace.shape.layers, trace.shape.top_k
    routing = [rows.experts.reshape(-1, layers, top_k) for rows in trace.sequences()]
    found = routing_curves(routing, trace.shape.experts)
    expected = reference(shared_traces, name)
    assert sum(map(len, expected.values())) >= 10
    for curve, _, tolerance in REFERENCE.values():
        for place, value in expected.get(curve, {}).items():
            assert found[curve][place] == pytest.approx(value, abs=tolerance)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "mixtral-8x7b"])
def test_models_whose_traces_nobody_has_are_drawn_like_their_curves(
    shared_traces, name
):
    likeness = Likeness(
        reference(shared_traces, name), model_like(name).likeness.drawn, left_out=1
    )
    differences = likeness.differences()
    assert len(differences) >= 10
    assert max(map(abs, differences.values())) <= 0.05, differences


def test_the_real_curves_of_a_file_are_those_of_its_trace(shared_traces, tmp_path):
    (rows,) = open_trace(source_of("olmoe-1b-7b", tmp_path)).sequences()
    routing = rows.experts.reshape(-1, 16, 8)
    assert routing_curves([routing], 64) == model_like("olmoe-1b-7b").likeness.real


@pytest.mark.parametrize("name", shipped_statistics())
def test_what_ships_draws_within_five_points_of_real_routing(name):
    """At every place of every curve; of sequences left out of the fit where there are
    any. What the file says was drawn is what is drawn.
    """
    model = model_like(name)
    likeness = model.likeness
    assert (likeness.left_out > 0) is (model.provenance["fitted_sequences"] > 1)
    differences = likeness.differences()
    assert len(differences) >= 20
    assert max(map(abs, differences.values())) <= 0.05, differences

    # As long as what it is compared with: caches begin empty.
    known = model.provenance
    tokens = min(160, known["fitted_tokens"] // known["fitted_sequences"])
    if likeness.left_out:
        drawn = [list(draw(model, tokens, 16, np.random.default_rng(1)))]
    else:
        drawn = [[one] for one in draw(model, tokens, 8, np.random.default_rng(1))]
    again = mean_curves([routing_curves(part, model.shape.experts) for part in drawn])
    for curve, place in (("lru", "0.5"), ("working_set", "8"), ("next_layer", "1")):
        assert again[curve][place] == pytest.approx(
            likeness.drawn[curve][place], abs=0.05
        )
