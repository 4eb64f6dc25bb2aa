"""Searches: better than chance on a known landscape, the same every time, and a Pareto
front that nothing beats.
"""

import pytest
from support.command_line import refused
from support.processes import run_python
from support.small_trace import write_small_trace

import moesim
from moesim.base.options import ConfigError
from moesim.runs.sweeps.rows import directions

pytest.importorskip("optuna", reason="Optuna is not installed: moesim[search]")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_small_trace(
        tmp_path_factory.mktemp("trace") / "small.parquet", new_tokens=12
    )


FRONT = {
    "policies": ["on-demand", "all-cpu"],
    "over": {"slots_per_layer": (0, 8)},
    "objectives": ["hit_rate_active", "gpu_bytes"],
    "trials": 24,
    "jobs": 1,
}


def test_nothing_beats_the_front(trace):
    """Each row of it has more hits than every smaller memory that was tried."""
    found = moesim.search(trace, **FRONT)
    front = found[found["best"]].sort_values("gpu_bytes")
    assert 3 <= len(front) < len(found)
    assert front["hit_rate_active"].is_monotonic_increasing
    for row in found[~found["best"]].to_dict("records"):
        beaten = front[
            (front["gpu_bytes"] <= row["gpu_bytes"])
            & (front["hit_rate_active"] >= row["hit_rate_active"])
        ]
        assert len(beaten)
    said = f"nothing beats {len(front)} of {len(found)} runs"
    assert said in moesim.answer(found).text()


def test_the_same_search_finds_the_same(trace, tmp_path):
    """And asks the results first: the second time nothing is replayed."""
    store = tmp_path / "s"
    first = moesim.search(trace, results=store, **FRONT)
    files = sorted(store.iterdir())
    assert first.equals(moesim.search(trace, results=store, **FRONT))
    assert sorted(store.iterdir()) == files


def test_a_search_that_ran_out_of_time_goes_on(trace, tmp_path):
    """One round of twelve proposals is made in any case; the next call finds its runs
    among the results, and makes the other twelve.
    """
    places = {"results": tmp_path / "s"}
    first = moesim.search(trace, minutes=0.0, **places, **FRONT)
    assert first.attrs["left_out"] == 12
    whole = moesim.search(trace, **places, **FRONT)
    assert whole.attrs["left_out"] == 0
    assert set(first["digest"]) < set(whole["digest"])


def test_a_parameter_of_a_policy_is_chosen_in_its_range(trace):
    found = moesim.search(
        trace,
        "on-demand",
        cache=["lru", "lfu"],
        over={"cache.decay": (0.5, 0.99)},
        slots_per_layer=2,
        trials=12,
        steps=4,
        jobs=1,
    )
    # LRU has no such parameter.
    is_lfu = found["cache"] == "lfu"
    assert found.loc[is_lfu, "cache.decay"].between(0.5, 0.99).all()
    assert found.loc[~is_lfu, "cache.decay"].isna().all()
    assert set(found["cache"]) == {"lru", "lfu"}
    # All proposals with LRU are one run: it has no such parameter.
    assert (found["cache"] == "lru").sum() == 1


def test_a_search_knows_which_way_is_better():
    """A share within limits is to be large, delayed hits few, and of forward passes
    neither more nor fewer are better.
    """
    assert directions()["slo_attainment"] == directions()["hits"] == "larger"
    assert directions()["delayed_hits"] == directions()["gpu_bytes"] == "smaller"
    assert "steps" not in directions()
    assert {"larger", "smaller"} == set(directions().values())


def test_the_best_share_within_limits_is_found(trace):
    """A limit between the times of no cache and of one for all experts."""
    options = {"warm": trace, "arrivals": "poisson:10"}
    times_s = [
        moesim.replay(trace, "on-demand", slots_per_layer=slots, **options).metrics[
            "tpot_s"
        ]
        for slots in (0, 8)
    ]
    served = moesim.search(
        trace,
        "on-demand",
        slots_per_layer=[0, 8],
        slo=f"tpot={sum(times_s) / 2}",
        objectives="slo_attainment",
        trials=6,
        jobs=1,
        **options,
    )
    assert served["slo_attainment"].tolist() == [1.0, 0.0]
    assert served["slots_per_layer"].tolist() == [8, 0]


@pytest.mark.parametrize(("options", "words"), [
    ({"objectives": "tpot"}, "did you mean 'tpot_s'"),
    ({"over": {"cache_ratio": (0.5, 0.1)}}, "expected low < high"),
    ({"over": {"cache.decai": (0.1, 0.5)}, "cache": "lfu"}, "none of the policies"),
    ({"over": {"nothing": (0.1, 0.5)}}, "expected a number among the options"),
    ({}, "something to choose"),
])  # fmt: skip
def test_slips_are_refused(trace, options, words):
    with pytest.raises(ConfigError, match=words):
        moesim.search(trace, trials=1, **options)


def test_the_command_prints_the_front(command, trace, tmp_path):
    code, out, _ = command(
        "search",
        trace,
        "--policy",
        "on-demand,all-cpu",
        "--over",
        "slots-per-layer=1:6",
        "--objective",
        "tpot_s,gpu_bytes",
        "--trials",
        6,
        "--table",
        tmp_path / "t.csv",
    )
    assert code == 0
    assert "best: " in out
    # In a reader's units, and not every run is the best.
    rows = out.partition("unbeaten")[2].partition("best: ")[0].splitlines()[1:]
    rows = [row for row in rows if row]
    assert all(" ms " in row and " MiB " in row for row in rows)
    assert {row.split()[-1] for row in rows} == {"yes", "no"}
    assert (tmp_path / "t.csv").read_text().startswith("policy,slots_per_layer,")
    assert refused(command("search", trace, "--over", "cache_ratio"), "LOW:HIGH")


def test_without_optuna_the_extra_is_named(trace):
    code = (
        "import sys; sys.modules['optuna'] = None\n"
        "from moesim import cli; cli.main(sys.argv[1:])"
    )
    words = ["search", trace, "--over", "cache_ratio=0.1:0.5"]
    done = run_python("-c", code, *words)
    assert done.returncode == 2
    assert "pip install 'moesim[search]'" in done.stderr
