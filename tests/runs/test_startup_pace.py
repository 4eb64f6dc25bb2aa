"""Start-up, first token and steady state of a real run, told apart."""

import numpy as np
import pytest

from moesim.runs.measured import pace_of
from moesim.traces.format.schema import Phase


def steps(*seconds, phase=Phase.DECODE):
    ends = np.cumsum(seconds)
    phases = np.full(len(seconds), phase)
    return {"phase": phases, "start_s": ends - np.array(seconds), "end_s": ends}


def test_settling_is_what_the_first_half_takes_beyond_the_second():
    """Six steps: 3, 2, 1 and then 1, 1, 9: steady 1 s; 6 - 3 s of settling."""
    found = pace_of([steps(3.0, 2.0, 1.0), steps(1.0, 1.0, 9.0)])
    assert found == {
        "steady_token_s": pytest.approx(1.0),
        "settling_s": pytest.approx(3.0),
    }


def test_a_run_that_gets_slower_has_nothing_to_settle():
    assert pace_of([steps(1.0, 1.0, 4.0, 4.0)])["settling_s"] == 0.0


def test_a_prompt_is_no_step_of_either_half_and_few_steps_tell_nothing():
    both = [steps(50.0, phase=Phase.PREFILL), steps(1.0, 1.0, 1.0)]
    assert pace_of(both) == {}
