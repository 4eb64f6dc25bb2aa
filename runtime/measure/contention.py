"""Measures how much lanes slow each other down while they work side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable  # noqa: TC003 - a field's type
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from moesim.runtime.measure.timing import sample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.runtime.measure.measurements import Measurements

_ROUNDS: Final = 3
_FEWEST: Final = 3


class LaneWork(NamedTuple):
    """What a lane does while others are measured: operation number i, on so many
    threads.
    """

    threads: int
    run: Callable[[int], object]


def measure_contention(
    measurements: Measurements,
    work: Mapping[str, LaneWork],
    pairs: list[tuple[str, str]],
    *,
    seconds: float,
) -> None:
    """Measure each pair (victim, other) of lane classes: the victim's operation alone
    and beside the other's.

    Alone and beside take turns, so that a drifting machine slows both. Means, not
    medians: work that stands still now and then gets less done, and that is what a rate
    is.

    Args:
        measurements: receive ``contention.<victim>.<other>``.
        work: lane class -> what it does.
        pairs: of lane classes on different workers.
        seconds: to spend.
    """
    share_s = seconds / (2 * _ROUNDS * len(pairs))
    for victim, other in pairs:
        ratios = [slowdown(work[victim], work[other], share_s) for _ in range(_ROUNDS)]
        measurements.number(
            f"contention.{victim}.{other}",
            # Below 1 is noise: no work gets faster beside other work.
            np.maximum(ratios, 1.0),
            f"{victim} beside {other}: mean time over mean time alone, in {_ROUNDS}"
            " rounds of both",
        )


def slowdown(victim: LaneWork, other: LaneWork, seconds: float) -> float:
    """Return the victim's mean time beside the other's work over that alone."""
    torch.set_num_threads(victim.threads)
    alone_s = float(np.mean(sample(victim.run, seconds, fewest=_FEWEST)))

    stop = threading.Event()
    running = threading.Event()
    errors: list[Exception] = []

    def neighbour() -> None:
        try:
            torch.set_num_threads(other.threads)
            for index in count():
                other.run(index)
                running.set()
                if stop.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - raised by the waiting thread below
            errors.append(error)
            # Else the measuring thread would wait for ever.
            running.set()

    thread = threading.Thread(target=neighbour, name="measured-neighbour", daemon=True)
    thread.start()
    try:
        running.wait()
        # Again: the neighbour may have changed the setting of all threads.
        torch.set_num_threads(victim.threads)
        beside_s = float(np.mean(sample(victim.run, seconds, fewest=_FEWEST)))
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
    return beside_s / alone_s
