"""Intervals on pages cover the truth as often as they say; those of sweeps are in
`tests/questions/test_ranking.py`, those of calibrations in
`tests/hwprofiles/test_coverage.py`.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from support.interval_coverage import WORKLOADS, is_share

from benchmarks.measured.page import verdict
from benchmarks.measured.scores import (
    BASELINES,
    OURS,
    Guess,
    Prediction,
    compared,
    stretch,
)
from benchmarks.recorded import mean_with_interval
from moesim.advice.times.latents import NINETY
from moesim.advice.times.priors import stretched
from moesim.evidence.validation.verify import interval


@pytest.mark.parametrize("repetitions", [3, 5, 8, 20])
@pytest.mark.parametrize("scatter", [0.03, 0.3])
def test_the_median_of_repeated_runs(draws, scatter, repetitions):
    """Of real runs, in the protocol's table."""
    rng = np.random.default_rng(repetitions)
    covered = 0
    for _ in range(draws):
        _, low_s, high_s = interval(rng.lognormal(0.0, scatter, repetitions))
        covered += low_s <= 1.0 <= high_s
    assert is_share(covered, draws, 0.90, 0.98)


@pytest.mark.parametrize("sequences", [3, 8, 16])
@pytest.mark.parametrize("workload", ["alike", "skewed"])
def test_a_published_ratio_on_recorded_routing(draws, workload, sequences):
    """The mean over sequences, in brackets behind it."""
    rng = np.random.default_rng(sequences)
    covered = 0
    for _ in range(draws):
        text = mean_with_interval(WORKLOADS[workload](rng, sequences).tolist())
        low, high = map(float, re.search(r"\[(.*), (.*)\]", text).groups())
        covered += low <= 1.0 <= high
    assert is_share(covered, draws, 0.90, 0.98)


def prediction(platform, guesses):
    """Of one row of a platform that took one second."""
    row = SimpleNamespace(place=f"row {platform}")
    run = SimpleNamespace(group=platform, row=row, kind="decode", seconds=1.0)
    return Prediction(run, "", "", guesses)


def missed_by(miss, platform):
    """A row whose prediction was off by so much, in logarithms."""
    return prediction(platform, {OURS: Guess(miss, 0.1)})


def predictions(rng, platforms):
    """Rows whose baseline loses 1 more than we do, in the mean over platforms."""
    lost = rng.normal(1.0, 0.5, platforms) / (2 * NINETY)
    for platform, more in enumerate(lost):
        guesses = {OURS: Guess(0.0, 1.0), BASELINES[0]: Guess(0.0, 1.0 + more)}
        yield prediction(platform, guesses)


@pytest.mark.parametrize("platforms", [2, 5, 10, 40])
def test_the_lead_over_a_baseline(draws, platforms):
    """90 % over other platforms; they had been drawn again from few."""
    rng = np.random.default_rng(platforms)
    covered = 0
    for _ in range(draws):
        _, low, high = compared(list(predictions(rng, platforms)))
        covered += low <= 1.0 <= high
    assert is_share(covered, draws, 0.85, 0.94)


def test_one_platform_says_nothing_of_others():
    """It had been "better by +1.28 to +1.28"."""
    alone = list(predictions(np.random.default_rng(0), 1))
    assert verdict(alone) == "one platform, which says nothing of others"


@pytest.mark.parametrize("platforms", [10, 20, 40])
def test_a_stranger_after_few_platforms(draws, platforms):
    """Stretched by so many platforms, 90 % of the next one's rows lie inside; without
    counting the next one it had been 82 % after ten.
    """
    rng = np.random.default_rng(platforms)
    covered = 0
    # Three standard errors of fewer would not tell 82 from 90 %.
    trials = 5 * draws
    for _ in range(trials):
        misses = rng.standard_t(3.0, platforms + 1)
        known = [missed_by(miss, platform) for platform, miss in enumerate(misses[:-1])]
        spread = stretched(0.1, stretch(known, OURS))
        covered += abs(misses[-1]) <= NINETY * spread
    assert is_share(covered, trials, 0.88, 0.95)
