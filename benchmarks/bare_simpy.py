"""The yardsticks: what SimPy alone needs for a number of events, with no policy, trace
or record.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import simpy

if TYPE_CHECKING:
    from collections.abc import Generator

LANES = 5


def timeouts_s(events: int) -> float:
    """CPU seconds for `events` timeouts, spread over as many processes as a machine has
    busy lanes.
    """
    env = simpy.Environment()

    def lane(count: int, pace: float) -> Generator[simpy.Event, None, None]:
        for _ in range(count):
            yield env.timeout(pace)

    for index in range(LANES):
        env.process(lane(events // LANES, 1.0 + index / 7))
    return _run_s(env)


def resources_s(events: int) -> float:
    """CPU seconds for `events` events of operations that hold a lane: request, timeout,
    release.

    This is how a SimPy user would write lanes; it needs three events for what our lanes
    do in one.
    """
    env = simpy.Environment()

    def work(
        lane: simpy.Resource, count: int, pace: float
    ) -> Generator[simpy.Event, None, None]:
        for _ in range(count):
            with lane.request() as turn:
                yield turn
                yield env.timeout(pace)

    for index in range(LANES):
        env.process(work(simpy.Resource(env), events // (3 * LANES), 1.0 + index / 7))
    return _run_s(env)


def _run_s(env: simpy.Environment) -> float:
    begin_s = time.process_time()
    env.run()
    return time.process_time() - begin_s
