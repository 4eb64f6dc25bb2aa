"""Contending lanes against processor sharing, one link against M/D/1, and the order of
simultaneous events.
"""

import itertools
import math
import random
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from support.handmade import (
    HandCosts,
    HandProfile,
    plan_of,
    routed,
    run,
    shape,
    spans,
    steps,
)

from moesim.engine.names import START, UNAWAITED
from moesim.engine.operations import Consequences, Gate, machine_of
from moesim.sim.clock import FastClock
from moesim.sim.simpy_clock import SimpyClock


@pytest.fixture(params=[FastClock, SimpyClock], ids=["fast", "simpy"])
def clock(request):
    return request.param


class Ends(Consequences):
    """Notes when each operation has ended, by its expert."""

    def __init__(self, clock):
        self.clock = clock
        self.of = {}

    def follow(self, operation):
        self.of[operation.expert] = self.clock.now_s


class Admits(Gate):
    """Has a place for every copy."""

    def admit(self, operation):
        return START


def ends_of(clock, lanes, arrivals, slow=None):
    """Submit operations (at, expert, lane, seconds) at their times to lanes with a
    worker each; when each has ended, and their spans.
    """
    machine_profile = HandProfile(slow=slow or {})
    kinds = {f"{kind}0" if kind not in PLAIN else kind: kind for kind in lanes}
    names = tuple(kinds)
    timed = clock(
        SimpleNamespace(lanes=names, contention=machine_profile.contention), None
    )
    machine = machine_of(names, [(name,) for name in names])
    machine.clock = timed
    machine.consequences = ends = Ends(timed)
    machine.gate = Admits()
    last_s = 1e6

    def source():
        for at_s, expert, lane, work_s in sorted(arrivals):
            if at_s > timed.now_s:
                timed.sleep(at_s)
                yield
            machine.submit(
                machine.operation(lane, 2, 0, 0, expert, work_s, 0, UNAWAITED), 0
            )
        timed.sleep(last_s)
        yield

    assert timed.drive(source(), machine)
    return ends.of, timed.spans.cut()


PLAIN = ("cpu", "ssd", "control")
BOTH = {("cpu", "gpu"): 2.0, ("gpu", "cpu"): 2.0}


def test_slowdown_may_be_one_sided(clock):
    slow = {("cpu", "h2d"): 1.25}
    ends, _ = ends_of(clock, ["cpu", "h2d"], [(0, 0, 0, 10), (0, 1, 1, 5)], slow)
    # while the copy runs (5 s) the CPU does 5 / 1.25 = 4 s of work; 6 s are left alone
    assert ends == pytest.approx({1: 5.0, 0: 11.0})


def test_slowdowns_of_several_lanes_multiply(clock):
    slow = {("cpu", "gpu"): 2.0, ("cpu", "ssd"): 1.5}
    works = [(0, lane, lane, s) for lane, s in enumerate((1.0, 100.0, 100.0))]
    ends, _ = ends_of(clock, ["cpu", "gpu", "ssd"], works, slow)
    assert ends[0] == pytest.approx(3.0)


@pytest.mark.parametrize("seed", range(5))
def test_random_overlaps_agree_with_egalitarian_processor_sharing(clock, seed):
    """Two lanes that slow each other by 2 give each of n <= 2 running jobs 1/n: the
    reference integrates just that.
    """
    draw = random.Random(seed)
    jobs = []
    for lane in (0, 1):
        at = 0.0
        for _ in range(20):
            at += draw.expovariate(0.3)
            # Arrivals far apart enough not to queue in a lane.
            jobs.append((at, lane, draw.uniform(0.1, 1.0)))
    by_lane = {lane: sorted(j for j in jobs if j[1] == lane) for lane in (0, 1)}
    kept = []
    for lane, lane_jobs in by_lane.items():
        free = -math.inf
        for at, _, work_s in lane_jobs:
            if at > free:
                kept.append((at, lane, work_s))
                free = at + 2.1 * work_s  # even at half speed it is done by then
    arrivals = [(at, name, lane, s) for name, (at, lane, s) in enumerate(kept)]
    ends, _ = ends_of(clock, ["cpu", "gpu"], arrivals, BOTH)
    assert ends == pytest.approx(_sharing(kept), abs=1e-9)


def _sharing(jobs):
    """Processor sharing by direct integration: each of n running jobs progresses at
    rate 1/n.
    """
    arrivals = sorted((at, name, work_s) for name, (at, _, work_s) in enumerate(jobs))
    now = 0.0
    running = {}
    ends = {}
    while arrivals or running:
        rate = 1 / len(running) if running else 0.0
        next_end = now + min(running.values()) / rate if running else math.inf
        next_arrival = arrivals[0][0] if arrivals else math.inf
        then = min(next_end, next_arrival)
        for name in list(running):
            running[name] -= (then - now) * rate
            if running[name] <= 1e-12:
                ends[name] = then
                del running[name]
        if next_arrival <= next_end:
            _, name, work_s = arrivals.pop(0)
            running[name] = work_s
        now = then
    return ends


def test_one_link_under_random_arrivals_is_an_m_d_1_queue():
    """Mean wait = rho s / (2 (1 - rho)), Pollaczek-Khinchine; 95 % interval over 20
    independent runs.
    """
    service_s = 1.0
    rho = 0.6
    count = 4000
    means = []
    for seed in range(20):
        draw = random.Random(seed)
        gaps = [draw.expovariate(rho / service_s) for _ in range(count)]
        arrived = list(itertools.accumulate(gaps))
        work = [(at, name, 0, service_s) for name, at in enumerate(arrived)]
        # Of the fast clock: both give the same, and SimPy's takes its time.
        _, columns = ends_of(FastClock, ["d2h"], work)
        waited = np.sort(columns["start_s"])[:count] - arrived
        means.append(statistics.fmean(waited))
    expected = rho * service_s / (2 * (1 - rho))
    # Student t, 19 degrees of freedom.
    half = 2.093 * statistics.stdev(means) / math.sqrt(len(means))
    assert half < 0.05 * expected
    assert abs(statistics.fmean(means) - expected) < half


def test_at_the_same_instant_reads_and_copies_land_before_results_and_control(clock):
    """All five end at 1 s, started in the opposite order; the documented order
    decides.
    """
    kinds = ["ssd", "h2d", "d2h", "gpu", "cpu", "control"]
    lanes = list(reversed(kinds))
    ends, columns = ends_of(clock, lanes, [(0, n, n, 1.0) for n in range(len(lanes))])
    assert set(ends.values()) == {1.0}
    assert [lanes[lane] for lane in columns["lane"].tolist()] == kinds


def test_contention_in_a_replay_stretches_what_overlaps():
    """CPU 6 s beside a copy of 4 s that costs it a quarter: 4 s do 3.2 s of work, 2.8 s
    are left: 2 + 4 + 2.8.
    """
    from moesim.policies.systems import System

    planner = plan_of(
        shape(), System("greedy", cache="lru"), HandCosts(cpu=6.0), slots=2
    )
    profile = HandProfile(slow={("cpu", "h2d"): 1.25})
    _, timeline = run(planner, steps([routed(0, 0, 1)]), profile)
    assert [s[3] for s in spans(timeline, "compute") if s[0] == "cpu"] == pytest.approx(
        [8.8]
    )
