"""Reference runs: how fast the machine is now, against what it was when a profile was
calibrated.
"""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from support.calibrating import sized
from support.real_machine import host_profile

from moesim.evidence.validation.drift import (
    TERMS,
    ReferenceRuns,
    drift,
    nearest_run,
)
from moesim.evidence.validation.paired_runs import simulate
from moesim.traces.timeline.spans import COMPUTE, FETCH, READ

RUNS = ("memory", "memory_small", "ssd", "ssd_small")
PATHS = {f"reference.{run}.{term}_s" for run in RUNS for term in TERMS}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """With experts of a test's size."""
    sizes = {"": "olmoe-1b-7b/16", "_small": "olmoe-1b-7b/32"}
    with ExitStack() as runners:
        yield ReferenceRuns(
            host_profile(), "float32", tmp_path_factory.mktemp("stores"), runners, sizes
        )


def test_all_are_run_before_the_first_other_run_and_before_every_twelfth(running):
    for _ in range(25):
        running.run_if_due()
    assert running.pace().shape == (25,)
    quantities = running.quantities("2026-01-01")
    assert {
        path: quantity.samples for path, quantity in quantities.items()
    } == dict.fromkeys(PATHS, 3)
    for quantity in quantities.values():
        low, high = quantity.interval
        assert 0 <= low <= quantity.value <= high
        assert quantity.value > 0


def test_they_use_every_lane_and_do_the_same_whatever_the_profile_says(running):
    """Costs ten times as high change no decision: else a recalibration would change
    what is compared.
    """
    slow = host_profile()
    tenfold = {
        key: replace(quantity, value=10 * quantity.value, interval=None)
        for key, quantity in slow.numbers.items()
        if key.startswith("costs.cpu")
    }
    slow = replace(slow, numbers=slow.numbers | tenfold)
    for name, run in running.runs.items():
        spans, slow_spans = (
            next(simulate(run.trial, run.runner.shape, profile).chunks())
            for profile in (host_profile(), slow)
        )
        assert set(np.unique(spans["kind"])) >= {COMPUTE, FETCH} | (
            {READ} if "ssd" in name else set()
        )
        assert len(np.unique(spans["lane"][spans["kind"] == COMPUTE])) == 2, (
            "CPU and GPU compute"
        )
        done = []
        for chunk in (spans, slow_spans):
            keys = ("step", "layer", "kind", "lane", "expert")
            columns = [chunk[key].tolist() for key in keys]
            done.append(sorted(zip(*columns, strict=True)))
        assert done[0] == done[1]


def test_drift_by_hand():
    """0.11 s where the profile says 0.10: ten percent longer; of a run that the profile
    does not know, nothing.
    """
    profile = host_profile()
    then = {
        f"reference.ssd.{term}_s": replace(profile.numbers["cores"], value=0.10)
        for term in TERMS
    }
    now = {path: replace(profile.numbers["cores"], value=0.11) for path in PATHS}
    known = replace(profile, numbers=profile.numbers | then)
    assert drift(known, now, "ssd") == dict.fromkeys(TERMS, pytest.approx(0.1))
    assert drift(known, now, "memory") is None
    assert drift(known, {}, "ssd") is None


def test_a_run_is_held_against_the_reference_of_the_nearest_size():
    """Experts of 6.3 and 1.6 MB; the border is at 3.1 MB."""
    assert nearest_run(sized("olmoe-1b-7b/2"), "float32", ssd=False) == "memory"
    assert nearest_run(sized("qwen3-30b-a3b/4"), "float32", ssd=True) == "ssd_small"
    assert nearest_run(sized("mixtral-8x7b"), "float32", ssd=False) == "memory"
