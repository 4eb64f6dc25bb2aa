"""Scattered operation times: seeded, of the stated distribution, and later where lanes
race.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from support.handmade import HandCosts, HandProfile, plan_of, routed, shape, steps

from moesim.policies.systems import System
from moesim.sim.noise import BLOCK, Noise
from moesim.sim.replay import Replay
from moesim.traces.timeline.spans import Timeline


def profile(**quantiles):
    hand = HandProfile()
    hand.curves = {}
    hand.numbers = {
        f"costs.{c}.overhead_s": SimpleNamespace(quantiles=q)
        for c, q in quantiles.items()
    }
    return hand


def makespan(machine, seed, costs=None):
    planner = plan_of(shape(), System("all-cpu", cache="none"), costs)
    replay = Replay(machine, planner, Timeline(machine.lanes), noise_seed=seed)
    return replay.run(steps(*[[routed(0, 0)]] * 50)).makespan_s


def test_same_seed_same_run_and_another_seed_another():
    machine = profile(cpu=(0.9, 1.0, 1.2))
    assert makespan(machine, 1) == makespan(machine, 1) != makespan(machine, 2)


def test_a_lane_without_quantiles_keeps_its_means():
    assert makespan(profile(gpu=()), 1) == makespan(profile(), None) == 50 * 12


def test_factors_follow_the_quantiles():
    """Uniform between 0.5 and 1.5: mean 1, standard deviation 1 / sqrt(12)."""
    noise = Noise(profile(cpu=(0.5, 1.5)), 0)
    drawn = noise.factors(1, 2 * BLOCK).tolist()
    assert np.mean(drawn) == pytest.approx(1.0, abs=4 / np.sqrt(12 * len(drawn)))
    assert np.std(drawn) == pytest.approx(1 / np.sqrt(12), rel=0.05)
    assert 0.5 <= min(drawn) <= max(drawn) <= 1.5


def test_the_latest_of_two_noisy_lanes_is_later_than_the_latest_of_their_means():
    """CPU and GPU race at 10 s each, scattered by +-50 %: the mean of the maximum lies
    1/6 above.
    """
    machine = profile(cpu=(0.5, 1.5), gpu=(0.5, 1.5))
    costs = HandCosts(cpu=10.0, gpu=10.0, copy=0.001, dense=0.0)
    planner = plan_of(shape(), System("greedy", cache="lru"), costs, slots=4)
    replay = Replay(machine, planner, Timeline(machine.lanes), noise_seed=3)
    result = replay.run(steps(*[[routed(0, 0, 1)]] * 400))
    assert result.makespan_s / 400 == pytest.approx(10 * (1 + 1 / 6), rel=0.03)
