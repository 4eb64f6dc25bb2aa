"""Operations of equal work as points of a curve: how many, how large, how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.hwprofiles.calibration.robust import around_mean, clipped_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_SAMPLES = 8
"""Operations of one size below which they are no point of their own."""


class Point(NamedTuple):
    """Operations of one group: their mean size, their seconds, the clipped mean of
    those.
    """

    group: int
    size: float
    seconds: np.ndarray
    mean_s: float

    def around_mean(self) -> np.ndarray:
        """Return seconds moved so that their median is the clipped mean."""
        return around_mean(self.seconds)


def points_of(
    seconds: np.ndarray, sizes: np.ndarray, groups: np.ndarray
) -> list[Point]:
    """Return groups with enough operations; where none has, the largest.

    Args:
        seconds: float64 [N].
        sizes: int64 [N].
        groups: int64 [N], operations of about the same size.
    """
    numbers, counts = np.unique(groups, return_counts=True)
    enough = counts >= LEAST_SAMPLES
    # A curve of one doubtful point is still better than none.
    chosen = numbers[enough] if enough.any() else numbers[[counts.argmax()]]

    points = []
    for group in chosen:
        members = groups == group
        # Rounded, since tokens within a group differ and a file should be readable.
        points.append(
            Point(
                group=int(group),
                size=round(float(sizes[members].mean()), 3),
                seconds=seconds[members],
                mean_s=clipped_mean(seconds[members]),
            )
        )
    return points


def seconds_of(points: Sequence[Point], groups: np.ndarray) -> np.ndarray:
    """Look up the mean seconds of each operation's group, float64 [N]; NaN where it is
    no point.

    Args:
        points: at least one.
        groups: int64 [N].
    """
    highest = max(groups.max(initial=0), *(point.group for point in points))
    table = np.full(int(highest) + 1, np.nan)
    for point in points:
        table[point.group] = point.mean_s
    return np.asarray(table[groups])
