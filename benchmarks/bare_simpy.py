"""The yardstick: what SimPy alone needs for a number of events, with nothing modelled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import simpy

if TYPE_CHECKING:
    from collections.abc import Generator

LANES = 5


def seconds(events: int) -> float:
    """CPU seconds for `events` timeouts, spread over as many processes as a machine has busy lanes."""
    env = simpy.Environment()

    def lane(count: int, pace: float) -> Generator[simpy.Event, None, None]:
        for _ in range(count):
            yield env.timeout(pace)

    for index in range(LANES):
        env.process(lane(events // LANES, 1.0 + index / 7))
    begin_s = time.process_time()
    env.run()
    return time.process_time() - begin_s
