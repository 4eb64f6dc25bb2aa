"""A calibration knows what disturbed it: by what the system counted, not by length."""

import os
import subprocess
import sys
import threading
import time
from collections import namedtuple
from dataclasses import replace

import numpy as np
import psutil
import pytest
from support.real_machine import host_profile

from moesim.evidence.validation import paired_runs
from moesim.evidence.validation.calibrate import (
    _chosen_steps,
    prediction_errors,
)
from moesim.evidence.validation.profile_checks import (
    DISTURBED,
    STOLEN,
    doubts_of,
)
from moesim.hwprofiles.calibration.estimates import undisturbed_medians
from moesim.hwprofiles.profile import prediction_error, rate_interval
from moesim.hwprofiles.schema import FIT_KEYS
from moesim.runtime.executor.trace_driven import shape_for
from moesim.runtime.measure.profile import StolenTime, ThreadEvidence
from moesim.traces.timeline.operations import OperationTable, Part, lost_shares
from moesim.traces.timeline.spans import COMPUTE

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux counts what a thread waits for"
)
SPIN = "import os, time\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
CORE = max(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
"""That of the host accelerator."""
DATE = "2026-01-01"


def busy(script):
    """A process that works on the accelerator's core."""
    command = [sys.executable, "-c", script.format(core=CORE)]
    return subprocess.Popen(command)


def report(median_share, worst=0.0):
    return dict(zip(FIT_KEYS, (1.0, 1.0, median_share, worst), strict=True))


# The evidence.


@LINUX
def test_a_thread_that_shares_its_core_is_seen_to_wait():
    """Two threads of one core: one waits while the other works."""
    counted = []
    walls = []

    def work():
        os.sched_setaffinity(0, {CORE})
        evidence = ThreadEvidence()
        begin_s = time.perf_counter()
        before = evidence.read()
        shared = before.since(before)
        # Until the scheduler has let the other one work, whenever that is.
        while time.perf_counter() < begin_s + 120:
            # A move to another core is waited for, too, and is no switch.
            if shared.waited_s >= 1e-3 and shared.switches:
                break
            shared = evidence.read().since(before)
        walls.append(time.perf_counter() - begin_s)
        counted.append(shared)
        evidence.close()

    other = busy(SPIN)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        other.kill()
        other.wait()
    assert counted[0].waited_s >= 1e-3
    assert counted[0].switches > 0
    assert counted[0].cpu_s < walls[0]


def test_shares_are_of_the_step_that_lost_them():
    table = OperationTable()
    for step, waited_s in ((0, 0.1), (0, 0.2), (2, 0.5), (1, float("nan"))):
        table.add(Part(0, COMPUTE, step, 0, 1, 0.0, 0.0, 1.0, 1.0, 0.5, waited_s, 0))
    lost = lost_shares(table, np.array([1.0, 1.0, 2.0]))
    assert lost == pytest.approx([0.3, 0.0, 0.25])
    assert lost_shares(None, np.ones(2)).tolist() == [0.0, 0.0]


def test_disturbed_repetitions_are_left_out_whatever_their_length():
    """First step: the median is disturbed, as is the shortest. Second: nobody is, so the
    median counts. Third: all are, and the least disturbed one counts.
    """
    lengths_s = np.array([[1.0, 3.0, 2.0], [2.0, 1.0, 3.0], [3.0, 2.0, 4.0]])
    lost = np.array([[0.2, 0.0, 0.5], [0.4, 0.0, 0.2], [0.0, 0.005, 0.4]])
    assert undisturbed_medians(lengths_s, lost).tolist() == [2, 2, 1]


def test_what_a_hypervisor_takes_is_a_share_of_all_cores(monkeypatch):
    """Of 100 further seconds 25 were stolen; guests' are users' as well. Where nothing is
    counted nothing is known.
    """
    Times = namedtuple("Times", "user system idle steal guest")  # noqa: PYI024
    read = iter([Times(10, 10, 80, 5, 7), Times(50, 10, 115, 30, 9)])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(read))
    assert StolenTime().share() == 0.25

    Elsewhere = namedtuple("Elsewhere", "user system idle")  # noqa: PYI024
    read = iter([Elsewhere(1, 2, 3), Elsewhere(2, 2, 3)])
    assert np.isnan(StolenTime().share())


def test_a_repetition_whose_cores_were_stolen_does_not_count():
    """The second of three repetitions would be the median."""
    shape = shape_for(paired_runs.ROUTED, "olmoe-1b-7b/8", "float32")
    (trial, *_) = [design.trial for design in paired_runs.designs(shape, quick=True)]
    runs = [
        (shape, trial, paired_runs.simulate(trial, shape, host_profile()))
        for _ in range(3)
    ]
    chosen, lost = _chosen_steps(runs, [0.2, 0.0, float("nan")])
    assert not chosen[0].any()
    assert sum(map(np.count_nonzero, chosen)) == len(trial.steps)
    assert (lost == 0.0).all()


# The verdict.


def test_a_profile_is_doubted_for_what_its_calibration_saw():
    fit = {"noise_floor": report(0.05), "drift": report(0.02)}
    quiet = replace(host_profile(), fit={DISTURBED: report(0.001), **fit})
    assert not doubts_of(quiet)
    for name, share, word in (
        (DISTURBED, 0.2, "20 % of half of the steps"),
        ("noise_floor", 0.3, "identical runs differ by 30 %"),
        ("drift", 0.4, "changed its speed by 40 %"),
        (STOLEN, 0.1, "gave 10 % of the cores' time to others"),
    ):
        (doubt,) = doubts_of(replace(quiet, fit={**quiet.fit, name: report(share)}))
        assert word in doubt


# Intervals.


def test_a_rate_has_the_interval_of_its_profile():
    """8 % and 6 % of the time are 10 % together; rates are shorter below than above."""
    assert prediction_error(host_profile()) is None
    fit = {"predictions": report(0.02, worst=0.08), "drift": report(0.06)}
    profile = replace(host_profile(), fit=fit)
    assert prediction_error(profile) == pytest.approx(0.1)
    low, high = rate_interval(49.5, 0.1)
    assert (low, high) == pytest.approx((45.0, 55.0))


def test_predictions_of_the_runs_themselves_are_exact():
    """Runs that were simulated with a profile are predicted by it without error."""
    base = host_profile()
    shape = shape_for(paired_runs.ROUTED, "olmoe-1b-7b/8", "float32")
    (trial, *_) = [design.trial for design in paired_runs.designs(shape, quick=True)]
    runs = [(shape, trial, paired_runs.simulate(trial, shape, base)) for _ in range(3)]
    assert prediction_errors(runs, base)["residual_worst"] < 1e-9
