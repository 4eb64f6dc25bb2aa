"""Who is faster for certain: intervals that cover the truth, and ties where it is not
known.
"""

import numpy as np
import pandas as pd
import pytest
from support.interval_coverage import WORKLOADS, is_share
from support.small_trace import write_small_trace

import moesim
from moesim.policies.base import PolicyError
from moesim.questions.ranked import ranked_answer
from moesim.runs.sweeps.ranking import ranking


def frame_of(times_s, *, axes=("policy",), tokens=None, **columns):
    """Rows of a sweep: a run for each entry of `times_s`, seconds per sequence with one
    token each unless `tokens` says otherwise.
    """
    rows = [
        {
            "policy": policy,
            "model": "m",
            "oracle": policy == "oracle",
            "tpot_s": float(np.mean(seconds)),
            "batch_decode_s": list(seconds),
            "batch_decode_tokens": [1] * len(seconds)
            if tokens is None
            else tokens[place],
            "batch_makespan_s": list(seconds),
            **{name: values[place] for name, values in columns.items()},
        }
        for place, (policy, seconds) in enumerate(times_s)
    ]
    frame = pd.DataFrame(rows)
    frame.attrs["axes"] = list(axes)
    return frame


def answered(frame):
    """What is said of such a frame; columns that it lacks are those of a real run."""
    run = moesim.sweep("tiny", ["greedy"], steps=1, jobs=1)
    lacking = {name: run[name].iloc[0] for name in run if name not in frame}
    return ranked_answer(frame.assign(**lacking))


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


def test_an_axis_without_values_changes_nothing():
    """Such as the cache of systems that have none of their own."""
    times = [("a", [1.0]), ("b", [2.0])]
    bare = ranking(frame_of(times, axes=("policy", "cache"), cache=[None, None]))
    assert bare["behind"].tolist() == ranking(frame_of(times))["behind"].tolist()


def test_a_lead_that_hangs_on_one_sequence_is_a_tie():
    times_s = np.full(10, 1.0)
    other_s = np.full(10, 1.001)
    other_s[3] = 0.98
    ranked = ranking(frame_of([("a", times_s), ("b", other_s)]))
    assert ranked["tied"].tolist() == [True, True]


SAMPLES = (8, 16, 48)


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_an_interval_covers_the_truth_as_often_as_it_says(draws, workload, samples):
    """Times per token of sequences with 5 to 50 tokens each, whose mean is 1: "95 %" is
    90 to 98 %.
    """
    rng = np.random.default_rng(samples)
    covered = 0
    for _ in range(draws):
        tokens = rng.integers(5, 50, samples)
        seconds = WORKLOADS[workload](rng, samples) * tokens
        row = ranking(frame_of([("a", seconds)], tokens=[tokens])).iloc[0]
        covered += row["low_s"] <= 1.0 <= row["high_s"]
    assert is_share(covered, draws, 0.90, 0.98)


@pytest.mark.parametrize(("seeds", "batches"), [(8, 1), (8, 3), (10, 12), (16, 40)])
def test_an_interval_of_seeds_and_batches_covers_the_truth(draws, seeds, batches):
    """Batches differ, seeds differ, and each seed does something else to each batch.
    Three batches were taken for all that there are: 18 % of intervals held the mean of
    the workload that they are drawn from. One batch is the workload.
    """
    rng = np.random.default_rng([seeds, batches])
    covered = 0
    for _ in range(draws):
        of_batch = rng.normal(0, 0.1, batches)
        of_seed = rng.normal(0, 0.03, (seeds, 1))
        seconds = 1 + of_batch + of_seed + rng.normal(0, 0.05, (seeds, batches))
        truth_s = 1.0 if batches > 1 else 1 + of_batch.mean()
        runs = [("a", row) for row in seconds]
        frame = frame_of(runs, axes=("policy", "seed"), seed=range(seeds))
        row = ranking(frame).iloc[0]
        covered += row["low_s"] <= truth_s <= row["high_s"]
    assert is_share(covered, draws, 0.90, 0.98)


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policies", [2, 6, 12])
def test_equal_policies_are_seldom_called_slower(draws, policies, workload, samples):
    """They differ in each sequence, and in the mean not at all: in at most 5 % of draws
    is any "certainly slower" than the fastest, whichever that is. It was 17 % of twelve.
    """
    rng = np.random.default_rng([policies, samples])
    slower = 0
    for _ in range(draws):
        common = rng.uniform(0.5, 2.0, samples)
        times_s = common * WORKLOADS[workload](rng, (policies, samples))
        ranked = ranking(frame_of([(f"p{n}", row) for n, row in enumerate(times_s)]))
        slower += not ranked["tied"].all()
    assert is_share(slower, draws, 0.0, 0.05)


@pytest.mark.parametrize("others", [False, True])
def test_equal_policies_that_draw_are_seldom_called_slower(draws, others):
    """One batch, ten seeds. A third policy that draws nothing changes none of it, and is
    itself compared by what the others draw.
    """
    rng = np.random.default_rng(7)
    slower = 0
    for _ in range(draws):
        runs = [(name, [each]) for name in "ab" for each in rng.normal(1, 0.1, 10)]
        runs += [("constant", [1.0])] * 10 * others
        seeds = [*range(10)] * (2 + others)
        frame = frame_of(runs, axes=("policy", "seed"), seed=seeds)
        slower += not ranking(frame)["tied"].all()
    assert is_share(slower, draws, 0.0, 0.05)


def test_one_that_draws_does_not_make_others_certain():
    """Two policies that draw nothing, on one sequence, a ten thousandth apart: nothing is
    known beyond this trace, and no interval has a width of zero.
    """
    rng = np.random.default_rng(0)
    runs = [("a", [1.0])] * 10 + [("b", [1.0001])] * 10
    runs += [("draws", [each]) for each in rng.normal(1.2, 0.01, 10)]
    frame = frame_of(runs, axes=("policy", "seed"), seed=[*range(10)] * 3)
    ranked = ranking(frame).set_index("candidate")
    assert ranked.loc[["a", "b"], "low_s"].isna().all()
    assert ranked.loc["draws", "low_s"] < 1.2 < ranked.loc["draws", "high_s"]
    assert ranked["tied"].to_dict() == {"a": True, "b": False, "draws": False}


def test_a_batch_without_tokens_counts_for_nothing():
    """Prompts alone: intervals are stated, and the fastest ties with itself."""
    tokens = [[1] * 9 + [0]] * 2
    seconds = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.02, 0.98, 0.0]
    frame = frame_of([("a", seconds), ("b", np.multiply(2, seconds))], tokens=tokens)
    ranked = ranking(frame)
    assert ranked["low_s"].notna().all()
    assert ranked["seconds"].iloc[0] == pytest.approx(1.0)
    assert ranked["tied"].tolist() == [True, False]


@pytest.mark.parametrize("options", [
    {"batch": 1, "draft_tokens": 3},
    {"batch": 2, "arrivals": "poisson:50"},
    {"batch": 2, "arrivals": "poisson:5000", "steps": 40, "micro_batch": 2},
    {"batch": 4},
])  # fmt: skip
def test_the_time_that_is_ranked_is_the_time_per_token(tmp_path, options):
    """Of drafts a step makes several tokens; of requests it is the mean of theirs."""
    trace = write_small_trace(tmp_path / "small.parquet", sequences=9, new_tokens=6)
    swept = moesim.sweep(trace, ["greedy"], jobs=1, details=True, **options)
    assert ranking(swept)["seconds"].iloc[0] == pytest.approx(swept["tpot_s"].iloc[0])


def test_seeds_that_change_nothing_are_no_repetitions():
    """Eight copies of one run made a lead of a ten thousandth certain."""
    copies = [("a", [1.0, 2.0])] * 8 + [("b", [1.0, 2.0001])] * 8
    frame = frame_of(copies, axes=("policy", "seed"), seed=[*range(8)] * 2)
    ranked = ranking(frame)
    assert ranked["low_s"].isna().all()
    assert "got 2 and 8, which change nothing" in answered(frame).text()


def test_too_few_sequences_give_no_interval_and_tie_only_when_equal():
    ranked = ranking(frame_of([("a", [1.0]), ("b", [1.0]), ("c", [1.0001])]))
    assert ranked["low_s"].isna().all()
    assert ranked["tied"].tolist() == [True, True, False]


def test_an_oracle_is_a_bound_and_no_rival():
    frame = frame_of([("oracle", [0.5] * 5), ("a", [1.0] * 5), ("b", [2.0] * 5)])
    ranked = ranking(frame)
    assert ranked["candidate"].tolist() == ["a", "b", "oracle"]
    assert ranked["tied"].tolist() == [True, False, False]
    answer = answered(frame)
    rows = {row[0]: row[1:] for row in answer.tables[0].cells()}
    assert rows["oracle"][answer.tables[0].heads().index("behind") - 1] == "-50.0 %"
    assert "oracle: sees the future" in answer.text()
    assert answer.sentences[0].startswith("fastest per token: a,")


def test_ties_are_printed_as_ties():
    """Per cell and in the count: nobody wins alone where two are equal."""
    times_s = [("a", [1.0] * 4), ("b", [1.0] * 4), ("a", [1.0] * 4), ("b", [2.0] * 4)]
    frame = frame_of(times_s, axes=("policy", "batch"), batch=[1, 1, 2, 2])
    answer = answered(frame)
    winners, often = answer.tables
    first, second = winners.cells()
    assert first[:2] == ["1", "a = b"]
    assert second[:2] == ["2", "a"]
    assert second[2:4] == ["100.0 %", "b"]
    assert often.heads()[:2] == ["policy", "fastest or tied"]
    assert [row[:2] for row in often.cells()] == [["a", "2"], ["b", "1"]]
    assert "a = b" in answered(frame).text()


def test_a_frame_without_times_of_sequences_is_one_sample():
    frame = frame_of([("a", [1.0]), ("b", [2.0])])
    bare = frame.drop(columns=["batch_decode_s", "batch_decode_tokens"])
    columns = ["candidate", "seconds", "tied", "behind"]
    pd.testing.assert_frame_equal(
        moesim.ranking(bare.assign(makespan_s=9.0))[columns], ranking(frame)[columns]
    )


def test_rows_of_an_older_moesim_are_refused():
    frame = frame_of([("a", [1.0])]).assign(batch_decode_tokens=None)
    with pytest.raises(PolicyError, match="sweep again"):
        moesim.ranking(frame)
