"""A change of a machine's pace while it is measured is found by its reference runs, and
divided out; where they did not change, nothing is.
"""

import numpy as np
import pytest
from support.calibrating import DATE, sized

from moesim.evidence.validation.calibrate import learn
from moesim.evidence.validation.paired_runs import designs, simulate
from moesim.hwprofiles.calibration.estimates import pace_at_times, pace_of_runs
from moesim.hwprofiles.profile import load_profile

RUNS = 4
STEPS = 8


def reference_steps(factors, seed=0, scatter=0.03):
    """Steps of the reference runs, some with the SSD and longer, on a machine whose pace
    is known.
    """
    rng = np.random.default_rng(seed)
    work_s = rng.uniform(0.01, 0.05, (RUNS, STEPS))
    noise = rng.normal(0.0, scatter, (len(factors), RUNS, STEPS))
    return np.array(factors)[:, None, None] * work_s * np.exp(noise)


def test_a_known_factor_over_time_is_found():
    """A neighbour that comes and goes, and a clock that falls."""
    neighbour = [1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 1.0, 1.0, 1.0]
    assert pace_at_times(reference_steps(neighbour)) == pytest.approx(
        neighbour, rel=0.03
    )
    falling = 1.1 ** np.linspace(-1.0, 1.0, 9)
    assert pace_at_times(reference_steps(falling))[1:-1] == pytest.approx(
        falling[1:-1], rel=0.04
    )


@pytest.mark.parametrize("scatter", [0.0, 0.01, 0.03, 0.1])
def test_a_machine_that_kept_its_pace_has_exactly_one(scatter):
    for seed in range(50):
        steps = reference_steps([1.0] * 9, seed, scatter)
        assert (pace_at_times(steps) == 1.0).all(), f"seed {seed}"


def test_a_burst_between_two_times_is_no_change_of_pace():
    assert (pace_at_times(reference_steps([1, 1, 1, 1.5, 1, 1, 1])) == 1.0).all()


def test_one_disturbed_run_of_four_is_no_change_of_pace():
    steps = reference_steps([1.0] * 7)
    steps[2:5, 1] *= 1.5
    assert (pace_at_times(steps) == 1.0).all()


def test_runs_between_two_times_lie_between_their_paces_by_hand():
    """Two runs from one time to the next: a quarter and three quarters of the way."""
    pace = pace_of_runs(np.array([1.0, 16.0]), every=2, count=4)
    assert pace == pytest.approx([2.0, 8.0, 16.0, 16.0])


class Slowed:
    """A timeline of the same work at another pace."""

    def __init__(self, timeline, factor):
        self._timeline = timeline
        self._factor = factor

    def __getattr__(self, name):
        """Of the timeline."""
        return getattr(self._timeline, name)

    def _longer(self, chunks):
        for chunk in chunks:
            times = {key: chunk[key] * self._factor for key in ("start_s", "end_s")}
            yield {**chunk, **times}

    def chunks(self):
        return self._longer(self._timeline.chunks())

    def step_chunks(self):
        return self._longer(self._timeline.step_chunks())


def test_a_fit_to_disturbed_runs_is_that_of_undisturbed_ones():
    """The machine was a quarter slower during one of the designed runs."""
    machine = load_profile("two-core-host")
    shape = sized("olmoe-1b-7b/4")
    calm = [
        (shape, design.trial, simulate(design.trial, shape, machine))
        for design in designs(shape, quick=True)[2:5]
    ]
    pace = [1.0, 1.25, 1.0]
    disturbed = [
        (shape, trial, Slowed(timeline, factor))
        for (_, trial, timeline), factor in zip(calm, pace, strict=True)
    ]

    def products_s(runs, **options):
        profile = learn(runs, machine, date=DATE, name="x", **options)
        return np.array(profile.curves["costs.gpu.points"].seconds)

    right_s = products_s(calm)
    assert products_s(disturbed, pace=pace) == pytest.approx(right_s, rel=1e-6)
    assert np.abs(products_s(disturbed) / right_s - 1.0).max() > 0.05
