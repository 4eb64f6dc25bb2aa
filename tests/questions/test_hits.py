"""Hit rates by cache and size: the same as one replay at a time, and never above who
knows the future.
"""

import dataclasses
import json

import pandas as pd
import pytest
from support.small_trace import SHAPE, write_trace

import moesim


def test_every_cell_is_a_replay_of_its_own(trace):
    rates = moesim.hit_rates(trace, ["lru", "lfu"], [0.25, 0.5])
    for name in rates.columns:
        for ratio in rates.index:
            alone = moesim.replay_cache(trace, name, cache_ratio=ratio)
            assert rates.loc[ratio, name] == alone["hit_rate_active"]


CACHES = ["lru", "belady", "lfu", "arc", "sieve", "lecar", "random", "edgemoe", "none"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch": 2},
        {"cache_scope": "global"},
        {"steps": 3},
        {"warm": "tiny-calibration"},
        {"draft_tokens": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_alone_hits_as_in_a_run_that_fetches_every_miss(cache, options):
    counted = moesim.replay_cache("tiny", cache, cache_ratio=0.3, **options)
    run = moesim.replay(
        "tiny", "on-demand", cache=cache, cache_ratio=0.3, staging=64, **options
    )
    assert counted["hits"] == run.metrics["hits"]


def test_moe_infinity_forgets_a_sequence_that_ended():
    """Counted without a machine, it was never told that another one began."""
    counted = moesim.replay_cache("tiny", "moe-infinity", cache_ratio=0.5)
    run = moesim.replay("tiny", "on-demand", cache="moe-infinity", cache_ratio=0.5)
    assert counted["hits"] == run.metrics["hits"]
    assert sum(counted["hits_by_layer"]) == counted["hits"]


def test_belady_is_no_bound_of_batches(tmp_path):
    """Three of six experts for each of two sequences, one slot: a cache that copies
    what nobody missed hits 34 times, Belady's 27 times; the text says so.
    """
    shape = dataclasses.replace(
        SHAPE, layers=1, experts=6, top_k=3, expert_bytes=(1 << 20,)
    )
    trace = write_trace(tmp_path / "b.parquet", shape, [(0, 40)] * 2, seed=5)
    caches = ["belady", "workload-window"]
    rates = moesim.hit_rates(trace, caches, [1 / 6], batch=2)
    assert rates["workload-window"].iloc[0] > rates["belady"].iloc[0]
    assert "belady: sees the future; no bound" in moesim.answer(rates).text()


def test_one_sequence_hits_no_more_often_than_belady_and_a_whole_cache_misses_first_uses(
    trace,
):
    rates = moesim.hit_rates(trace, ["lru", "lfu", "sieve", "belady"], [0.25, 0.5, 1.0])
    assert (rates["belady"] >= rates.max(axis=1)).all()
    assert len(set(rates.loc[1.0])) == 1
    assert (rates["lru"].diff().dropna() >= 0).all()


def test_the_command_prints_draws_and_writes_them(command, trace, tmp_path):
    line = f"hits {trace} --cache lru,lfu:decay=0.9,variant=perfect"
    words = f"{line} --cache-ratio 0.25,0.5".split()
    code, out, _ = command(
        *words, "--png", tmp_path / "h.svg", "--table", tmp_path / "h.parquet"
    )
    assert code == 0
    rows = [line.split() for line in out.splitlines() if "%" in line]
    assert [row[0] for row in rows[:3]] == [
        "cache",
        "lru",
        "lfu:decay=0.9,variant=perfect",
    ]
    rates = pd.read_parquet(tmp_path / "h.parquet").set_index("cache")
    found = json.loads(command(*words, "--json")[1])
    assert found["hit_rates"] == {
        name: {size: rates.loc[name, size] for size in ("0.25", "0.5")}
        for name in rates.index
    }
    assert "<svg" in (tmp_path / "h.svg").read_text()


def test_both_commands_that_count_hits_say_of_what(command):
    """One counts decode accesses, one all; their tables stood side by side."""
    _, counted, _ = command("trace", "stats", "tiny")
    assert "hit rates here are of decode accesses; `moesim hits` counts all" in counted
    _, counted, _ = command("hits", "tiny", "--cache", "lru", "--cache-ratio", 0.5)
    assert "of active experts in all forward passes, prompts included" in counted
