"""Contending lanes against processor sharing, one link against M/D/1, and the order of
simultaneous events.
"""

import math
import random
import statistics

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

from moesim.hwprofiles.lanes import END_ORDER
from moesim.sim.clock import Clock, Contention, Operation

ORDER = tuple(kind.name for kind in END_ORDER)


class Bench:
    """Contention alone: start operations at given times, collect their ends."""

    def __init__(self, classes, slow=None, finished=None):
        self.env = Clock()
        slow = slow or {}
        self.ends = {}
        self.contention = Contention(
            self.env,
            classes,
            lambda v, o: slow.get((v, o), 1.0),
            finished or self._finished,
        )

    def _finished(self, operation):
        self.ends[operation.expert] = self.env.now

    def start_at(self, at_s, name, lane, work_s):
        def arrive():
            yield self.env.timeout(at_s)
            self.contention.start(Operation(lane, 2, 0, 0, name, work_s))

        self.env.process(arrive())

    def run(self):
        self.env.run()
        return self.ends


BOTH = {("cpu", "gpu"): 2.0, ("gpu", "cpu"): 2.0}


def test_two_lanes_that_halve_each_other_share_the_processor():
    """0 s: A needs 4. 1 s: B needs 2. Shared from 1: B done at 5, when A has 1 s left
    -> 6.
    """
    bench = Bench(["cpu", "gpu"], BOTH)
    bench.start_at(0, 0, 0, 4)
    bench.start_at(1, 1, 1, 2)
    assert bench.run() == pytest.approx({1: 5.0, 0: 6.0})


def test_slowdown_may_be_one_sided():
    bench = Bench(["cpu", "h2d"], {("cpu", "h2d"): 1.25})
    bench.start_at(0, 0, 0, 10)
    bench.start_at(0, 1, 1, 5)
    # while the copy runs (5 s) the CPU does 5 / 1.25 = 4 s of work; 6 s are left alone
    assert bench.run() == pytest.approx({1: 5.0, 0: 11.0})


def test_slowdowns_of_several_lanes_multiply():
    slow = {("cpu", "gpu"): 2.0, ("cpu", "ssd"): 1.5}
    bench = Bench(["cpu", "gpu", "ssd"], slow)
    for lane, work_s in enumerate((1.0, 100.0, 100.0)):
        bench.start_at(0, lane, lane, work_s)
    assert bench.run()[0] == pytest.approx(3.0)


@pytest.mark.parametrize("seed", range(5))
def test_random_overlaps_agree_with_egalitarian_processor_sharing(seed):
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
    bench = Bench(["cpu", "gpu"], BOTH)
    for name, (at, lane, work_s) in enumerate(kept):
        bench.start_at(at, name, lane, work_s)
    assert bench.run() == pytest.approx(_sharing(kept), abs=1e-9)


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
    from moesim.sim.machine import Machine
    from moesim.traces.timeline.spans import Timeline

    service_s = 1.0
    rho = 0.6
    count = 4000
    means = []
    for seed in range(20):
        env = Clock()
        profile = HandProfile()
        machine = Machine(env, profile, timeline := Timeline(profile.lanes))
        draw = random.Random(seed)
        arrived = []

        def source(env=env, machine=machine, draw=draw, arrived=arrived):
            for name in range(count):
                yield env.timeout(draw.expovariate(rho / service_s))
                arrived.append(env.now)
                machine.submit(Operation(3, 3, 0, 0, name, service_s))

        env.process(source())
        env.run()
        started = timeline.frame()["start_s"].to_numpy()
        means.append(statistics.fmean(started - arrived))
    expected = rho * service_s / (2 * (1 - rho))
    # Student t, 19 degrees of freedom.
    half = 2.093 * statistics.stdev(means) / math.sqrt(len(means))
    assert half < 0.05 * expected
    assert abs(statistics.fmean(means) - expected) < half


def test_at_the_same_instant_reads_and_copies_land_before_results_and_control():
    """All five end at 1 s, started in the opposite order; the documented order
    decides.
    """
    order = []
    bench = Bench(
        list(ORDER), finished=lambda operation: order.append(ORDER[operation.lane])
    )
    for lane in reversed(range(len(ORDER))):
        bench.contention.start(Operation(lane, 2, 0, 0, lane, 1.0))
    bench.run()
    assert tuple(order) == ORDER


def test_a_copy_that_lands_when_the_cpu_ends_is_seen_first():
    """CPU and copy both end at 2 + 10: the GPU result still comes 1 s later, and
    nothing is lost.
    """
    from moesim.policies.systems import System

    planner = plan_of(
        shape(), System("greedy", cache="lru"), HandCosts(cpu=10.0, copy=10.0), slots=2
    )
    result, timeline = run(planner, steps([routed(0, 0, 1)]))
    assert result.makespan_s == 13
    assert {s[0] for s in spans(timeline, "compute")} == {"cpu", "gpu0"}


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


def test_simpys_queue_is_what_our_loop_walks():
    """Names that SimPy does not publish: should one change, `sim/clock.py` must."""
    clock = Clock()
    timeout = clock.timeout(2.0)
    assert clock.queue == [(2.0, 1, 0, timeout)]
    assert next(clock.numbers) == 1
    clock.now_s = 1.5
    assert clock.now == 1.5
    assert clock.peek() == 2.0
