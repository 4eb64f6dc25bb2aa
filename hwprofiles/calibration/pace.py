"""A machine's pace over time: by what factor everything took longer while it was
measured.

Clocks change, and other tenants come and go. Reference runs between all others do the
same work each time, so what they take longer at one time is the machine's. Where they
do not tell a change from their own scatter, the pace is one throughout.
"""

from __future__ import annotations

from typing import Final

import numpy as np

LEAST_MOVE: Final = 0.02
"""Change of pace that is worth a factor: identical runs on a quiet machine scatter by
as much.
"""
CERTAIN: Final = 4.0
"""Standard errors that a change of pace must exceed."""

_MAD_TO_DEVIATION: Final = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""
_MEDIAN_ERROR: Final = 1.2533
"""Standard error of a median over that of a mean, of a normal distribution."""


def pace_at_times(seconds: np.ndarray) -> np.ndarray:
    """Find by what factor a machine took longer at each time.

    A change must last from one time to the next: a burst of other tenants is shorter,
    and is left out where repetitions are chosen.

    Args:
        seconds: float64 [times, runs, steps], the same reference runs at each time.

    Returns:
        float64 [times], with median 1; exactly 1 where the machine did not move.
    """
    logs = np.log(seconds)
    relative = logs - np.median(logs, axis=0)
    # Steps of one run are disturbed together; runs are not.
    by_run = np.median(relative, axis=2)
    moved = np.median(by_run, axis=1)

    scatter = _MAD_TO_DEVIATION * np.median(np.abs(by_run - moved[:, None]))
    error = _MEDIAN_ERROR * scatter / np.sqrt(seconds.shape[1])
    least = max(np.log1p(LEAST_MOVE), CERTAIN * error)

    # Both neighbours of the first and the last time are the one that they have.
    neighbours = np.concatenate((moved[:1], moved, moved[-1:]))
    windows = np.lib.stride_tricks.sliding_window_view(neighbours, 3)
    smooth = np.median(windows, axis=1)
    return np.exp(np.where(np.abs(smooth) > least, smooth, 0.0))


def pace_of_runs(at_times: np.ndarray, every: int, count: int) -> np.ndarray:
    """Interpolate the pace of runs that were made between the times.

    Args:
        at_times: float64 [times].
        every: runs from one time to the next.
        count: of the runs.

    Returns:
        float64 [count].
    """
    middle = (np.arange(count) + 0.5) / every
    logs = np.interp(middle, np.arange(len(at_times)), np.log(at_times))
    return np.asarray(np.exp(logs))


TOLERATED: Final = 0.01
"""Share of a step's time that may be lost beyond that of the best repetition."""


def undisturbed_medians(lengths_s: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Choose a repetition of every step: of those that lost least, the median one.

    Other tenants of a machine slow memory and clocks without a trace in any counter,
    in bursts of half a second; they are why the median counts. Of two the shorter does.

    Args:
        lengths_s: float64 [R, S], seconds by repetition and step.
        lost: float64 [R, S], shares as
            `moesim.traces.timeline.operations.lost_shares` counts them.

    Returns:
        int64 [S], repetition by step.
    """
    disturbed = lost > lost.min(axis=0) + TOLERATED
    # Disturbed ones sort last, so that the first rows are the others by length.
    order = np.argsort(np.where(disturbed, np.inf, lengths_s), axis=0, kind="stable")
    middle = ((~disturbed).sum(axis=0) - 1) // 2
    return np.asarray(order[middle, np.arange(lengths_s.shape[1])])
