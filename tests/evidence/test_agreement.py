"""Differences must be seen, and ties are no evidence: each decision keeps its level where
steps are correlated and the machine drifts.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from moesim.evidence.validation.results import (
    kendall_tau,
    measured_order,
    noise_floor,
    repeated_tau,
)
from moesim.evidence.validation.verify import Plan, judge

VALUES = st.lists(st.integers(1, 50), min_size=3, max_size=12)
STEPS = 15
REPETITIONS = 5
DRAWS = 300
PLAN = Plan()


def runs(rng, count, *, scatter=0.1, drift=0.015, slope=0.0, correlation=0.5):
    """Seconds of steps of some runs, float64 [count, STEPS], one on average: each step
    does other work, neighbours of a run scatter alike, every run has the machine's own
    speed, and it becomes slower by `slope` from one to the next.
    """
    work = 1.0 + 0.2 * np.sin(np.arange(STEPS))
    noise = np.empty((count, STEPS))
    noise[:, 0] = rng.standard_normal(count)
    rest = np.sqrt(1.0 - correlation**2)
    for step in range(1, STEPS):
        fresh = rng.standard_normal(count)
        noise[:, step] = correlation * noise[:, step - 1] + rest * fresh
    speed = 1.0 + drift * rng.standard_normal(count)
    speed += slope * (np.arange(count) - 0.5 * (count - 1))
    seconds = work * (1.0 + scatter * noise) * speed[:, None]
    return seconds / work.mean()


CIRCUMSTANCES = {
    "independent": {"drift": 0.0, "correlation": 0.0},
    "drift of 1.5 % from run to run": {},
    "a machine that gets slower": {"slope": 0.01},
    "a quiet machine that drifts": {"scatter": 0.02, "drift": 0.02},
}
circumstances = pytest.mark.parametrize(
    "given_by", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES
)


@circumstances
def test_equal_policies_are_ordered_in_five_percent(given_by):
    """Both were run in the same passes, whose speed they share."""
    rng = np.random.default_rng(3)
    ordered = 0
    for _ in range(DRAWS):
        common = runs(rng, REPETITIONS, **given_by).mean(axis=1)
        own = given_by | {"drift": 0.005, "slope": 0.0}
        first = common * runs(rng, REPETITIONS, **own).mean(axis=1)
        second = common * runs(rng, REPETITIONS, **own).mean(axis=1)
        ordered += abs(measured_order(first, second))
    assert ordered / DRAWS < 0.05 + 3 * np.sqrt(0.05 * 0.95 / DRAWS)


@circumstances
def test_a_perfect_model_misses_an_aim_in_five_percent(given_by):
    """Of three policies that are equal in four settings a prediction that is right says
    who is faster by a thousandth; all runs of one pass share the machine's speed.
    """
    rng = np.random.default_rng(6)
    own = given_by | {"drift": 0.005, "slope": 0.0}
    missed = 0
    for _ in range(DRAWS // 2):
        speed = runs(rng, REPETITIONS, **given_by).mean(axis=1)
        cells = [
            {
                "trace": "t",
                "shape": setting,
                "policy": policy,
                "cache_ratio": 0.4,
                "host_ratio": 1.0,
                "batch": 1,
                "measured": [{"tpot_s": each} for each in speed * noise],
                "predicted": {"tpot_s": 1.0 + 0.001 * rng.standard_normal()},
            }
            for setting in range(4)
            for policy in range(3)
            if len(noise := runs(rng, REPETITIONS, **own).mean(axis=1))
        ]
        verdict = judge(PLAN, [{"cells": cells}])
        missed += False in verdict.met.values()
    assert missed / (DRAWS // 2) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / (DRAWS // 2))


def twice(values):
    return [[float(value)] * 2 for value in values]


def test_what_the_measurement_cannot_order_is_no_evidence():
    unsure = [[1.0, 1.1, 1.05], [1.02, 1.0, 1.2], [3.0, 3.1, 3.0]]
    assert kendall_tau([2, 1, 9], unsure) == 1.0
    assert kendall_tau([1, 2], twice([5.0, 5.0])) is None


@given(VALUES, st.randoms(use_true_random=False))
def test_without_ties_tau_is_scipys(values, random):
    measured = list(dict.fromkeys(values))
    simulated = measured[:]
    random.shuffle(simulated)
    if len(measured) > 1:
        assert kendall_tau(simulated, twice(measured)) == pytest.approx(
            stats.kendalltau(simulated, measured).statistic
        )


def test_measurements_far_apart_agree_with_themselves():
    """Ten percent of noise: policies a factor of two apart keep their order; equal ones
    and those that were not repeated have none.
    """
    rng = np.random.default_rng(3)
    far = [middle * rng.lognormal(0.0, 0.1, 5) for middle in (1, 2, 4)]
    assert repeated_tau([far]) == 1.0
    assert repeated_tau([[[1.0], [2.0]]]) is None
    assert repeated_tau([[[1.0, 1.0, 1.0]] * 2]) is None


def test_policies_that_are_apart_are_ordered():
    """10 % apart, in four of five draws; exact repetitions need no test."""
    rng = np.random.default_rng(5)
    ordered = 0
    for _ in range(50):
        near, slower = runs(rng, 2 * REPETITIONS, scatter=0.05, drift=0.01).reshape(
            2, REPETITIONS, STEPS
        )
        ordered += measured_order(near.mean(1), 1.1 * slower.mean(1)) == -1
    assert ordered > 40
    assert measured_order([1.0, 1.0], [1.0, 1.0]) == 0
    assert measured_order([1.0, 1.0], [1.1, 1.1]) == -1
    assert measured_order([2.0], [1.0]) == 0, "one repetition orders nothing"


def test_the_noise_floor_is_what_a_second_measurement_differs_by():
    """Medians of five draws that scatter by 10 %: the bootstrap finds what really making
    them anew shows; one repetition says nothing.
    """
    rng = np.random.default_rng(0)
    repeated = rng.normal(1.0, 0.1, (2000, 5, 1))
    medians = np.median(repeated, axis=1)[:, 0]
    true = np.median(np.abs(medians[::2] - medians[1::2]))
    found = [noise_floor(one) for one in repeated[:200]]
    assert np.mean(found) == pytest.approx(true, rel=0.08)
    assert noise_floor([[1.0, 2.0]]) == 0.0
