"""A calibration's intervals hold the truth about as often as they say, and contention
of a known machine is found again. `benchmarks/calibration_coverage.py` makes 300 draws.

The unit of repetition is a run: operations of one share what the machine did meanwhile.
"""

import numpy as np
import pytest
from support.known_machine import (
    CONTENTION,
    Noise,
    coverage,
    few_samples_cover,
    learned_contention,
    line_covers,
    mean_covers,
    plane_covers,
    roofline_covers,
    slowdowns_cover,
)

NOISES = {
    "quiet": Noise(0.02, drift=0.0, outliers=0.0),
    "usual": Noise(0.10, drift=0.01, outliers=0.02),
    "loud": Noise(0.25, drift=0.02, outliers=0.02),
}
DRAWS = {
    mean_covers: 60,
    few_samples_cover: 200,
    plane_covers: 40,
    line_covers: 12,
    roofline_covers: 10,
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("covers", DRAWS, ids=lambda covers: covers.__name__)
def test_intervals_hold_the_truth_as_often_as_they_say(covers, noise):
    """At 90 % of so few draws, fewer than this come about once in a thousand times."""
    draws = DRAWS[covers]
    least = 0.9 - 3.0 * (0.9 * 0.1 / draws) ** 0.5
    for term, share in coverage(covers, NOISES[noise], draws).items():
        assert share >= least, term


@pytest.mark.parametrize("noise", NOISES)
def test_intervals_of_slowdowns_are_neither_narrow_nor_wide(noise):
    """At 95 %, shares outside of these come about once in a thousand times."""
    for term, share in coverage(slowdowns_cover, NOISES[noise], 200).items():
        assert 0.89 <= share <= 0.99, term


@pytest.mark.parametrize("noise", NOISES)
def test_contention_of_a_known_machine_comes_back(noise):
    """CPU beside GPU and copies at once: factors multiply, noise does not draw them
    towards one, and waiting for copies is not taken for being slowed by them.
    """
    learned = learned_contention(NOISES[noise], seed=7)
    errors = []
    for path, number in learned.items():
        truth = CONTENTION[path]
        low, high = number.interval
        # Just outside is an interval of 95 % for one of seven in every third draw.
        slack = 0.5 * (high - low)
        assert low - slack <= truth <= high + slack, path
        errors.append(abs(number.value / truth - 1.0))
    # Reads are few, so what slows them is known less well than the rest.
    assert np.median(errors) < 0.01 + NOISES[noise].scatter / 8
