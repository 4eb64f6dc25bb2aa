"""Equivalence must be proven, differences must be seen, and ties are no evidence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from moesim.validation.agreement import (
    equivalent,
    estimate_noise,
    kendall_tau,
    kolmogorov_smirnov,
    noise_floor,
    repeated_tau,
)

VALUES = st.lists(st.integers(1, 50), min_size=3, max_size=12)


def test_distance_of_distributions_by_hand():
    """Below 2.5 lie all of the first sample and half of the second: distance 1/2."""
    assert kolmogorov_smirnov([1, 2], [1.5, 3]).distance == pytest.approx(0.5)
    assert kolmogorov_smirnov([1, 2, 3], [1, 2, 3]) == (0.0, 1.0)


def test_one_distribution_is_rarely_called_two():
    rng = np.random.default_rng(0)
    called = sum(
        kolmogorov_smirnov(rng.normal(size=60), rng.normal(size=60)).p_value < 0.05
        for _ in range(300)
    )
    assert called / 300 < 0.09


def test_equivalence_within_five_percent_is_proven_by_enough_pairs():
    rng = np.random.default_rng(1)
    measured = rng.lognormal(0, 0.1, 200)
    near = measured * 1.02 * rng.lognormal(0, 0.03, 200)
    far = measured * 1.08 * rng.lognormal(0, 0.03, 200)
    assert equivalent(near, measured).equivalent
    assert not equivalent(far, measured).equivalent
    assert equivalent(near, measured).ratio == pytest.approx(1.02, abs=0.01)


def test_few_noisy_pairs_prove_nothing():
    """Equal means, but they scatter by a half: no difference can be shown, and no
    equivalence either.
    """
    assert not equivalent([1.0, 1.5, 0.5], [1.0, 0.5, 1.5]).equivalent


def test_a_mean_on_the_margin_passes_as_rarely_as_alpha_says():
    rng = np.random.default_rng(2)
    passed = 0
    for _ in range(600):
        measured = np.ones(20)
        passed += equivalent(
            measured * 1.05 + rng.normal(0, 0.04, 20), measured
        ).equivalent
    assert passed / 600 == pytest.approx(0.05, abs=0.03)


def test_exact_pairs_need_no_test():
    assert equivalent([1.04, 1.04], [1.0, 1.0]) == (pytest.approx(1.04), 0.0, True)
    assert not equivalent([1.06, 1.06], [1.0, 1.0]).equivalent


def test_tau_by_hand():
    """Of three pairs one is in the wrong order: (2 - 1) / 3."""
    assert kendall_tau([1, 3, 2], [1, 2, 3]) == pytest.approx(1 / 3)
    assert kendall_tau([3, 2, 1], [1, 2, 3]) == -1


def test_what_the_measurement_cannot_order_is_no_evidence():
    assert kendall_tau([2, 1, 9], [1.00, 1.01, 3.0], floor=0.02) == 1.0
    assert kendall_tau([2, 1, 9], [1.00, 1.01, 3.0]) == pytest.approx(1 / 3)
    assert kendall_tau([1, 2], [5.0, 5.0]) is None


@given(VALUES, st.randoms(use_true_random=False))
def test_without_ties_tau_is_scipys(values, random):
    measured = list(dict.fromkeys(values))
    simulated = measured[:]
    random.shuffle(simulated)
    if len(measured) > 1:
        assert kendall_tau(simulated, measured) == pytest.approx(
            stats.kendalltau(simulated, measured).statistic
        )


def test_measurements_far_apart_agree_with_themselves_and_close_ones_do_not():
    """Ten percent of noise: policies a factor of two apart keep their order, those one
    percent apart draw lots.
    """
    rng = np.random.default_rng(3)
    groups = [
        [middle * rng.lognormal(0.0, 0.1, 5) for middle in middles]
        for middles in ((1, 2, 4), (1, 1.01, 1.02))
    ]
    far, close = (repeated_tau([group], [0.0]) for group in groups)
    assert far == 1.0
    assert abs(close) < 0.9
    assert repeated_tau([[[1.0], [2.0]]], [0.0]) is None, "nothing was repeated"
    assert repeated_tau([[[1.0, 1.0], [1.1, 1.1]]], [0.5]) is None, (
        "no pair is told apart"
    )


def test_noise_floor_by_hand():
    """Two runs: 1.0 and 1.1 differ by 0.1 / 1.05, the others by nothing; the third was
    not repeated.
    """
    assert noise_floor([[1.0, 1.1], [2.0, 2.0], [7.0]]) == pytest.approx(
        0.5 * 0.1 / 1.05
    )
    assert noise_floor([[1.0], [2.0]]) == 0.0


@pytest.mark.parametrize("function", [kolmogorov_smirnov, equivalent, kendall_tau])
def test_samples_that_cannot_be_compared_are_refused(function):
    with pytest.raises(ValueError, match="found"):
        function([], [1.0])


def test_the_noise_of_an_estimate_is_what_a_second_one_differs_by():
    """Means of five draws that scatter by 10 %: the bootstrap finds what really making
    them anew shows.
    """
    rng = np.random.default_rng(0)
    runs = rng.normal(1.0, 0.1, (2000, 5, 1))
    means = runs.mean(axis=(1, 2))
    true = np.median(np.abs(means[::2] - means[1::2]))
    found = [estimate_noise(one, lambda part: float(part.mean())) for one in runs[:200]]
    assert np.mean(found) == pytest.approx(true, rel=0.1)


def test_one_repetition_says_nothing_of_its_noise():
    assert estimate_noise(np.ones((1, 3)), lambda part: float(part.mean())) == 0.0
