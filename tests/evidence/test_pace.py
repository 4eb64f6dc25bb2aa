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


def test_costs_are_learned_at_the_usual_pace():
    """Else what others did would be taken for the machine's."""
    machine = load_profile("two-core-host")
    shape = sized("olmoe-1b-7b/4")
    runs = [
        (shape, design.trial, simulate(design.trial, shape, machine))
        for design in designs(shape, quick=True)[2:5]
    ]
    measured_s, usual_s = (
        learn(runs, machine, date=DATE, name="x", pace=[pace] * 3)
        .curves["costs.gpu.points"]
        .seconds
        for pace in (1.0, 1.25)
    )
    assert usual_s == pytest.approx(np.array(measured_s) / 1.25, rel=1e-6)
