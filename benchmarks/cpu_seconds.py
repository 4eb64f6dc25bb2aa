"""How long something computes: on machines that others use too, the process's own time
says more than the clock.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of `work`, the middle of three."""
    taken_s = []
    for _ in range(3):
        begin_s = time.process_time()
        work()
        taken_s.append(time.process_time() - begin_s)
    return statistics.median(taken_s)
