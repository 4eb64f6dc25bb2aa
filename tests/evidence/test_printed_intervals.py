"""Intervals on pages cover the truth as often as they say; those of sweeps are in
`tests/questions/test_ranking.py`, those of calibrations in
`tests/hwprofiles/test_coverage.py`.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from support.interval_coverage import WORKLOADS, is_share

from moesim.advice.measured.page import verdict
from moesim.advice.measured.scores import BASELINES, OURS, Guess, Prediction, compared
from moesim.advice.times.latents import NINETY
from moesim.evidence.reproduction.report import mean_with_interval
from moesim.evidence.validation.protocol import interval


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


def predictions(rng, platforms):
    """Rows whose baseline loses 1 more than we do, in the mean over platforms."""
    lost = rng.normal(1.0, 0.5, platforms) / (2 * NINETY)
    for platform, more in enumerate(lost):
        row = SimpleNamespace(place=f"row {platform}")
        run = SimpleNamespace(group=platform, row=row, kind="decode", seconds=1.0)
        guesses = {OURS: Guess(0.0, 1.0), BASELINES[0]: Guess(0.0, 1.0 + more)}
        yield Prediction(run, "", "", guesses)


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
