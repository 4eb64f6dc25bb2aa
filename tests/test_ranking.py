"""Who is faster for certain: intervals that cover the truth, and ties where it is not
known.
"""

import numpy as np
import pandas as pd
import pytest

import moesim
from moesim.policies.base import PolicyError
from moesim.reporting.sweeps.text import candidate_rows, sweep_text, winner_rows
from moesim.sweeps.ranking import ranking


def frame_of(times_s, *, axes=("policy",), **columns):
    """Rows of a sweep: a run for each entry of `times_s`, seconds per sequence with one
    token each.
    """
    rows = [
        {
            "policy": policy,
            "model": "m",
            "oracle": policy == "oracle",
            "tpot_s": float(np.mean(seconds)),
            "batch_decode_s": list(seconds),
            "batch_decode_steps": [1] * len(seconds),
            "batch_makespan_s": list(seconds),
            **{name: values[place] for name, values in columns.items()},
        }
        for place, (policy, seconds) in enumerate(times_s)
    ]
    frame = pd.DataFrame(rows)
    frame.attrs["axes"] = list(axes)
    return frame


def test_a_difference_in_every_sequence_is_certain():
    """B is slower by a tenth in each: however the sequences vary, that is no chance."""
    rng = np.random.default_rng(0)
    times_s = rng.uniform(1, 5, 20)
    ranked = ranking(frame_of([("a", times_s), ("b", 1.1 * times_s)]))
    assert ranked["candidate"].tolist() == ["a", "b"]
    assert ranked["tied"].tolist() == [True, False]
    assert ranked["behind"].tolist() == pytest.approx([0, 0.1])
    # Although their intervals overlap widely: the draws are paired.
    assert ranked["low_s"].iloc[1] < ranked["high_s"].iloc[0]


def test_a_lead_that_hangs_on_one_sequence_is_a_tie():
    times_s = np.full(10, 1.0)
    other_s = np.full(10, 1.001)
    other_s[3] = 0.98
    ranked = ranking(frame_of([("a", times_s), ("b", other_s)]))
    assert ranked["tied"].tolist() == [True, True]


def test_an_interval_covers_the_truth_as_often_as_it_says():
    """19 of 20 intervals; percentile intervals of 30 draws cover a little less."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        row = ranking(frame_of([("a", rng.exponential(1.0, 40))])).iloc[0]
        covered += row["low_s"] <= 1.0 <= row["high_s"]
    assert 0.88 <= covered / 200 <= 0.98


def test_seeds_that_change_nothing_are_no_repetitions():
    """Four copies of one run made a lead of a ten thousandth certain."""
    copies = [("a", [1.0, 2.0])] * 4 + [("b", [1.0, 2.0001])] * 4
    frame = frame_of(copies, axes=("policy", "seed"), seed=[0, 1, 2, 3] * 2)
    ranked = ranking(frame)
    assert ranked["low_s"].isna().all()
    assert "(2 and 4, which change nothing)" in sweep_text(frame)


def test_seeds_that_change_something_are_repetitions():
    drawn = [("a", [1.0 + place / 100]) for place in range(4)]
    ranked = ranking(frame_of(drawn, axes=("policy", "seed"), seed=[0, 1, 2, 3]))
    assert 1.0 <= ranked["low_s"].iloc[0] < ranked["high_s"].iloc[0] <= 1.03


def test_too_few_sequences_give_no_interval_and_tie_only_when_equal():
    ranked = ranking(frame_of([("a", [1.0]), ("b", [1.0]), ("c", [1.0001])]))
    assert ranked["low_s"].isna().all()
    assert ranked["tied"].tolist() == [True, True, False]


def test_seeds_repeat_a_run():
    """Six seeds of one sequence: draws are of seeds."""
    noise = [0.9, 1.1, 1.0, 0.95, 1.05, 1.0]
    runs = [("a", [value]) for value in noise]
    runs += [("b", [value + 1]) for value in noise]
    ranked = ranking(
        frame_of(runs, axes=("policy", "seed"), seed=[*range(6), *range(6)])
    )
    assert ranked["runs"].tolist() == [6, 6]
    assert ranked["seconds"].tolist() == pytest.approx([1.0, 2.0])
    assert ranked["low_s"].notna().all()
    assert ranked["tied"].tolist() == [True, False]


def test_an_oracle_is_a_bound_and_no_rival():
    frame = frame_of([("oracle", [0.5] * 5), ("a", [1.0] * 5), ("b", [2.0] * 5)])
    ranked = ranking(frame)
    assert ranked["candidate"].tolist() == ["a", "b", "oracle"]
    assert ranked["tied"].tolist() == [True, False, False]
    rows = {row[0]: row[1:] for row in candidate_rows(ranked)}
    assert rows["a"][0] == "1 of 1"
    assert rows["oracle"][0] == "sees the future"
    assert rows["oracle"][2] == "-50.0 %"


def test_ties_are_printed_as_ties():
    """Per cell and in the count: nobody wins alone where two are equal."""
    times_s = [("a", [1.0] * 4), ("b", [1.0] * 4), ("a", [1.0] * 4), ("b", [2.0] * 4)]
    frame = frame_of(times_s, axes=("policy", "batch"), batch=[1, 1, 2, 2])
    ranked = ranking(frame)
    _, first, second = winner_rows(ranked)
    assert first[:2] == ["1", "a = b"]
    assert second[:2] == ["2", "a"]
    assert second[-2:] == ["100.0 %", "b"]
    rows = {row[0]: row[1:3] for row in candidate_rows(ranked)}
    assert rows == {
        "policy": ["fastest", "tied"],
        "a": ["1 of 2", "1"],
        "b": ["0 of 2", "1"],
    }
    assert "a = b" in sweep_text(frame)


def test_a_frame_without_times_is_refused():
    frame = frame_of([("a", [1.0])]).drop(columns="batch_decode_s")
    with pytest.raises(PolicyError, match="details=True"):
        moesim.ranking(frame)
