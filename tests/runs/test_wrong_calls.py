"""Calls from Python with values that cannot be: refused in words, before anything runs."""

import multiprocessing
import pickle
from functools import partial

import numpy as np
import pandas as pd
import pytest

import moesim
from moesim.base.errors import AdviceError, TraceError
from moesim.base.options import ConfigError
from moesim.runs.sweeps.rows import ResultsError

SWEEP = partial(moesim.sweep, "tiny", "greedy", steps=1)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (partial(SWEEP, jobs=0), ConfigError, "jobs: expected a whole number >= 1"),
        (partial(SWEEP, jobs=-1), ConfigError, "jobs: expected a whole number >= 1"),
        (partial(SWEEP, jobs=np.nan), TypeError, "sweep: jobs: expected int"),
        (partial(SWEEP, jobs=True), TypeError, "sweep: jobs: expected int"),
        (partial(SWEEP, jobs=1, results=""), ResultsError, "results: expected a folder"),
        (partial(SWEEP, jobs=1, seed=2**63), ConfigError, "a number of 64 bits"),
        (partial(moesim.replay, "tiny", slo="ttft=x"), TraceError, "slo: expected"),
        (partial(moesim.replay, "tiny", slo="ttft=1,ttft=2"), TraceError, "of each"),
        (partial(moesim.advise, "olmoe-1b-7b", count=-1), AdviceError, "count: exp"),
        (partial(moesim.synth, "t", tokens=9, like="qwen3-30b-a3b", skew=1.0),
         ValueError, "--skew states what --like measures"),
        (partial(moesim.ranking, {"a": 1}), TypeError, "expected pd.DataFrame"),
        (partial(moesim.hit_rates, "tiny", "lru"), TypeError, "caches: expected Seq"),
        (partial(moesim.hit_rates, "tiny", ["lru", 3]), TypeError, "caches: expected"),
    ],
    # A call's own words hold an address, which differs between processes.
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_what_cannot_be_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_what_fits_is_taken():
    """Numbers and lists of NumPy, paths and frames, keys of a dictionary."""
    rates = moesim.hit_rates(
        "tiny", {"lru": 1}.keys(), np.array([0.5]), steps=np.int64(1)
    )
    assert isinstance(rates, pd.DataFrame)


def in_a_daemon(queue):
    queue.put(
        moesim.sweep("tiny", "greedy", steps=[1, 2], jobs=2)["makespan_s"].tolist()
    )


def test_a_sweep_in_a_daemon_takes_one_process():
    """A pool's worker may not start processes; that was an AssertionError."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=in_a_daemon, args=(queue,), daemon=True)
    process.start()
    expected = moesim.sweep("tiny", "greedy", steps=[1, 2], jobs=1)["makespan_s"]
    assert queue.get(timeout=300) == expected.tolist()
    process.join()


def test_public_functions_travel_to_other_processes():
    assert pickle.loads(pickle.dumps(moesim.replay)) is moesim.replay
