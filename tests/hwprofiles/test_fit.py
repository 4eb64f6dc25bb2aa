"""The fit finds constants that it can know, and says how well."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_trace import SHAPE

from moesim.hwprofiles.calibration import estimates
from moesim.hwprofiles.calibration.fit_curves import (
    Entries,
    Points,
    fit_line,
    fit_roofline,
)
from moesim.hwprofiles.calibration.fit_runs import _fit_hand_over
from moesim.hwprofiles.calibration.observations import DesignedRun, Gaps, Spans
from moesim.hwprofiles.paths import PER_OPERATION_S
from moesim.hwprofiles.profile import default_profile
from moesim.hwprofiles.roofline import isotonic
from moesim.sim.noise import Noise
from moesim.traces.timeline.spans import DENSE, READ, Timeline

SIZES = (65_536, 262_144, 1_048_576, 4_194_304, 16_777_216)


def noisy_link(latency_s, bytes_per_s, *, seed, count=30):
    """Seconds by size with 5 % noise and a tail: one copy in twenty takes twice as
    long.
    """
    rng = np.random.default_rng(seed)
    return {
        size: (latency_s + size / bytes_per_s)
        * rng.lognormal(0.0, 0.05, count)
        * np.where(rng.random(count) < 0.05, 2.0, 1.0)
        for size in SIZES
    }


def test_a_line_through_exact_points_is_found_exactly():
    line = fit_line({1: np.array([5.0]), 2: np.array([8.0]), 4: np.array([14.0])})
    assert line.overhead_s.value == pytest.approx(2.0)
    assert line.per_byte_s.value == pytest.approx(3.0)
    assert line.report.held_out == 3
    assert line.report.residual_worst == pytest.approx(0.0, abs=1e-12)


def test_one_late_measurement_in_twenty_does_not_move_the_line():
    with_tail = fit_line(noisy_link(20e-6, 12e9, seed=3))
    assert with_tail.overhead_s.value == pytest.approx(20e-6, rel=0.1)


def test_a_falling_time_gives_no_negative_slope():
    line = fit_line({1: np.array([2.0]), 2: np.array([1.0])})
    assert line.per_byte_s.value == pytest.approx(0.0, abs=1e-9)
    assert line.overhead_s.value > 0


def test_one_size_cannot_tell_latency_from_bandwidth():
    line = fit_line({4: np.array([2.0])})
    assert (line.overhead_s.value, line.per_byte_s.value) == (0.0, 0.5)


def roofline_points(rng, noise):
    """Two experts, 8 MB and 2 MB, by tokens; overhead 30 us, 20 GB/s, 100 GFLOP/s: the
    border is at 10 tokens.
    """
    moved = []
    flops = []
    seconds = []
    for size in (8e6, 2e6):
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            work = size * tokens / 2
            moved.append(size)
            flops.append(work)
            seconds.append(
                (30e-6 + max(size / 20e9, work / 100e9)) * rng.lognormal(0.0, noise, 15)
            )
    return moved, flops, Points.single(seconds)


def test_a_roofline_is_found_with_its_three_constants():
    fit = fit_roofline(*roofline_points(np.random.default_rng(0), 0.0))
    assert fit.overhead_s.value == pytest.approx(30e-6, rel=1e-6)
    assert 1 / fit.per_byte_s.value == pytest.approx(20e9, rel=1e-6)
    assert 1 / fit.per_flop_s.value == pytest.approx(100e9, rel=1e-6)
    assert fit.report.residual_worst < 1e-6


def test_a_rate_that_nothing_waited_for_is_the_fastest_seen():
    """One token everywhere: arithmetic never binds, so its rate is what was done, not
    invented.
    """
    moved = [1e6, 2e6, 4e6, 8e6]
    seconds = [np.array([10e-6 + size / 20e9]) for size in moved]
    flops = [size / 2 for size in moved]
    fit = fit_roofline(moved, flops, Points.single(seconds))
    assert 1 / fit.per_byte_s.value == pytest.approx(20e9, rel=1e-6)
    assert 1 / fit.per_flop_s.value == pytest.approx(4e6 / (8e6 / 20e9), rel=1e-6)


def test_a_measured_number_is_the_median_with_its_quartiles():
    number = estimates.measured(
        np.array([1.0, 2.0, 3.0, 4.0, 100.0]), source="test", date="2026-01-01"
    )
    assert (number.value, number.spread, number.samples) == (3.0, 2.0, 5)
    assert number.interval[0] <= 3.0 <= number.interval[1]


def test_a_curve_pools_the_scatter_of_single_operations_relative_to_their_median():
    curve = estimates.measured_curve(
        {1: np.array([1.0, 1.0, 1.0]), 2: np.array([2.0, 4.0, 6.0])},
        "tokens",
        source="test",
        date="2026-01-01",
    )
    assert curve.seconds == (1.0, 4.0)
    assert curve.spread == (0.0, 2.0)
    assert curve.quantiles[10] == pytest.approx(1.0, abs=1e-3)
    # The 2 % and 98 % points of 0.5, four times 1, 1.5.
    assert curve.quantiles[0] == pytest.approx(0.55, abs=1e-3)
    assert curve.quantiles[-1] == pytest.approx(1.45, abs=1e-3)


def test_noise_of_a_measured_curve_adds_no_time():
    """One delay of 30 times in 300 samples: drawn noise has mean 1 (it had 1.78)."""
    seconds = np.random.default_rng(0).lognormal(0.0, 0.1, 300)
    seconds[7] *= 30.0
    curve = estimates.measured_curve(
        {1: seconds}, "tokens", source="test", date="2026-01-01"
    )
    noisy = replace(default_profile(), curves={"costs.cpu.points": curve})
    drawn = Noise(noisy, seed=0).factors(noisy.lanes.index("cpu"), 20_000)
    assert drawn.mean() == pytest.approx(1.0, abs=0.01)


def test_a_mean_may_be_that_of_the_samples_that_nothing_delayed():
    """Samples that take six times as long lie on one side: intervals of 95 % around a
    mean that they shift held the truth in 89 % of draws.
    """
    seconds = np.random.default_rng(0).normal(1.0, 0.25, 6000)
    late = seconds.copy()
    late[::40] *= 6.0
    units = estimates.Units(np.arange(6000) // 500, np.arange(6000) % 500)
    estimate = estimates.resampled(late, units, np.random.default_rng(0))
    assert estimates.clipped_mean(late) > 1.01
    assert estimate.interval[0] < estimates.clipped_mean(seconds[late < 3.0])


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=12))
def test_isotonic_never_falls_keeps_the_mean_and_leaves_rising_tables_alone(values):
    fitted = isotonic(np.array(values))
    assert (np.diff(fitted) >= -1e-9).all()
    assert fitted.mean() == pytest.approx(np.mean(values), abs=1e-6)
    assert isotonic(np.sort(values)) == pytest.approx(np.sort(values), abs=1e-9)


def test_what_lies_between_operations_is_that_of_the_fastest_lane():
    """5 us on the CPU's worker, 2 on the GPU's: 2 for all, 3 more belong to the CPU."""

    def times(seconds):
        steps = np.arange(40)
        return pd.DataFrame({"seconds": seconds, "run": steps, "step": steps})

    entries = Entries("2026-11-27", 0)
    gaps = Gaps({"cpu": times(5e-6), "gpu": times(2e-6)}, *[times(0.0)] * 3)
    more_s = _fit_hand_over(gaps, entries)
    assert more_s == pytest.approx({"cpu": 3e-6, "gpu": 0.0})
    assert entries.numbers[PER_OPERATION_S].value == pytest.approx(2e-6)
    assert _fit_hand_over(gaps._replace(follow={}), entries) == {}


def test_dense_parts_are_cut_out_and_heads_reach_to_the_next_step():
    """Three layers; what lies between two steps counts as head, where the next one
    follows. A dense part right behind a layer that read the SSD is marked.
    """
    timeline = Timeline(("cpu", "gpu0", "ssd"))
    shape = replace(SHAPE, layers=3)
    steps = {0: 0.0, 1: 20.0, 3: 40.0}
    for step, begin_s in steps.items():
        for layer in range(3):
            now_s = begin_s + 4 * layer
            timeline.span(1, DENSE, step, layer, -1, now_s, now_s + 1.0 + layer, 0)
            if layer != 1:
                timeline.span(2, READ, step, layer, 3, now_s + 3.0, now_s + 3.5, 100)
            timeline.access(step, layer, *np.ones((4, 1), np.int64))
        timeline.span(1, DENSE, step, -1, -1, begin_s + 13.0, begin_s + 16.0, 0)
        timeline.step(step, 1, 0, 1, 1, begin_s, begin_s + 16.0)
    workers = {"a": ("cpu",), "b": ("gpu0",), "c": ("ssd",)}
    run = DesignedRun(timeline, shape, "greedy", [0] * 4, workers)
    parts = Spans([run]).dense_parts()
    assert parts.layer.tolist() == [0, 1, 2, -1] * 3
    assert parts.step.tolist() == [0] * 4 + [1] * 4 + [3] * 4
    # Behind step 1 one is missing, and behind step 3 nothing comes.
    heads_s = parts.seconds[3::4].tolist()
    assert heads_s == [7.0, 3.0, 3.0]
    assert parts.seconds[:3].tolist() == [1.0, 2.0, 3.0]
    assert parts.after_read.tolist() == [False, True, False, False] * 3
