"""Calls from Python with values that cannot be: refused in words, before anything runs."""

from functools import partial

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
        (partial(SWEEP, jobs=1, results=""), ResultsError, "results: expected a folder"),
        (partial(SWEEP, jobs=1, seed=2**63), ConfigError, "a number of 64 bits"),
        (partial(moesim.replay, "tiny", slo="ttft=x"), TraceError, "slo: expected"),
        (partial(moesim.replay, "tiny", slo="ttft=1,ttft=2"), TraceError, "of each"),
        (partial(moesim.advise, "olmoe-1b-7b", count=-1), AdviceError, "count: exp"),
        (partial(moesim.synth, "t", tokens=9, like="qwen3-30b-a3b", skew=1.0),
         ValueError, "--skew states what --like measures"),
    ],
    # A call's own words hold an address, which differs between processes.
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_what_cannot_be_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
