"""Plans of a layer step where copies and the CPU slow each other: by hand, against an
independent simulation, and in a run.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import assigned, placed, shape, work
from support.strategies import layer_works

from moesim.policies.assignment._placing import transfer_s
from moesim.policies.assignment.exact import Exact
from moesim.policies.assignment.hybrimoe_schedule import HybriMoESchedule
from moesim.policies.names import IN_FLIGHT
from moesim.policies.run_context import RunContext

RULES = (
    lambda: HybriMoESchedule(contention=True),
    lambda: Exact(objective="contended"),
)
SLOWDOWNS = st.sampled_from([1.0, 1.25, 1.6, 2.0])


def begun(rule, now, *, link=1.0, cpu=1.0):
    """A rule on a machine whose link and CPU slow each other."""
    sizes = shape(now.layer + 1, len(now.state))
    costs = SimpleNamespace(overlap=(link, cpu))
    context = RunContext(sizes, now.gpus, np.zeros(1, int), "global", costs=costs)
    rule.start(context)
    return rule


THREE_MISSES = {"cpu_s": [4.0] * 3, "gpu_s": [1.0] * 3, "arrive_s": [7.0] * 3}


@pytest.mark.parametrize("rule", RULES)
def test_a_copy_that_costs_the_cpu_more_than_it_saves_is_left(rule):
    """Three misses of 4 s, a copy of 7 s. Alone: two on the CPU, 8 s, and one that lands
    after 7 s. Where both take twice as long beside each other the copy lands after 14 s
    and ends at 15 s; the CPU alone ends at 12 s.
    """
    now = work(**THREE_MISSES)
    alone = placed(begun(rule(), now), now)
    slowed = placed(begun(rule(), now, link=2.0, cpu=2.0), now)
    assert sorted(alone.lanes) == [0, 0, 1]
    assert slowed.lanes.tolist() == [0, 0, 0]


def test_as_published_hybrimoe_knows_no_slowdowns():
    now = work(**THREE_MISSES)
    as_published = placed(begun(HybriMoESchedule(), now, link=2.0, cpu=2.0), now)
    assert sorted(as_published.lanes) == [0, 0, 1]


def queued(now, lanes, order):
    """Seconds of each lane, and of its link when each expert has landed."""
    work_s = {"cpu": 0.0} | {g: float(now.link_s[g]) for g in range(now.gpus)}
    marks = {}
    flying = [now.gpu_state[lanes[i] - 1, i] == IN_FLIGHT for i in range(now.active)]
    for i in sorted(order, key=lambda i: not flying[i]):
        g = lanes[i] - 1
        if g < 0:
            work_s["cpu"] += max(now.host_s[i], now.cpu_s[i])
        elif now.arrive_s[g, i] and flying[i]:
            marks[i] = now.arrive_s[g, i]
            work_s[g] = max(work_s[g], marks[i])
    for i in order:
        g = lanes[i] - 1
        if g >= 0 and now.arrive_s[g, i] and not flying[i]:
            work_s[g] += transfer_s(now, g, i)
            marks[i] = work_s[g]
    work_s["cpu"] += now.first_cpu_s * bool(work_s["cpu"])
    return work_s, marks


def times_of(work_s, stops, link, cpu):
    """When each lane has done so much of its work: from one event to the next."""
    now_s = 0.0
    done = dict.fromkeys(work_s, 0.0)
    reached = {}
    while True:
        for lane, mark in stops - reached.keys():
            if done[lane] >= mark - 1e-13:
                reached[lane, mark] = now_s
        busy = [lane for lane in work_s if done[lane] < work_s[lane] - 1e-13]
        if not busy:
            return reached
        links = len([lane for lane in busy if lane != "cpu"])
        rates = dict.fromkeys(busy, 1 / link if "cpu" in busy else 1.0)
        rates["cpu"] = 1 / cpu**links
        waits = [
            (mark - done[lane]) / rates[lane]
            for lane, mark in stops - reached.keys()
            if lane in busy
        ]
        step_s = min(waits)
        now_s += step_s
        for lane in busy:
            done[lane] += step_s * rates[lane]


def simulated_s(now, lanes, order, link, cpu):
    """End of a plan."""
    work_s, marks = queued(now, lanes, order)
    stops = set(work_s.items()) | {(lanes[i] - 1, mark) for i, mark in marks.items()}
    reached = times_of(work_s, stops, link, cpu)
    ends = [reached["cpu", work_s["cpu"]]]
    for g in range(now.gpus):
        there = [i for i in order if lanes[i] == 1 + g and i not in marks]
        end_s = sum(now.gpu_s[g, i] for i in there)
        for i in order:
            if lanes[i] == 1 + g and i in marks:
                end_s = max(end_s, reached[g, marks[i]]) + now.gpu_s[g, i]
        ends.append(end_s)
    return max(ends)


@settings(max_examples=150, deadline=None)
@given(layer_works(most=6, gpus=st.integers(1, 2)), SLOWDOWNS, SLOWDOWNS, st.randoms())
def test_a_plan_ends_when_a_simulation_of_its_lanes_does(now, link, cpu, dice):
    rule = begun(Exact(objective="contended"), now, link=link, cpu=cpu)
    lanes = np.array([dice.randint(0, now.gpus) for _ in range(now.active)], np.int8)
    order = np.array(dice.sample(range(now.active), now.active))
    expected = simulated_s(now, lanes, order, link, cpu)
    assert rule.end_s(now, lanes.data, order.data) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(layer_works(most=6, gpus=st.integers(1, 2)), SLOWDOWNS, SLOWDOWNS)
def test_no_plan_ends_later_for_knowing_of_slowdowns(now, link, cpu):
    plain_rules = (HybriMoESchedule(), Exact(objective="scheduled"))
    for rule, plain in zip(RULES, plain_rules, strict=True):
        knowing = begun(rule(), now, link=link, cpu=cpu)
        told = placed(knowing, now)
        untold = assigned(plain, now)
        ends = [
            knowing.end_s(now, each.lanes.data, each.order.data)
            for each in (told, untold)
        ]
        assert ends[0] <= ends[1] * (1 + 1e-12)
        if link == cpu == 1.0:
            assert told.lanes.tolist() == untold.lanes.tolist()
