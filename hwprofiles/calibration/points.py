"""Operations of equal work as points of a curve: how many, how large, how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from moesim.hwprofiles.calibration.robust import around_mean, clipped_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_SAMPLES = 8
"""Operations of one size below which they say nothing on their own."""


class Point(NamedTuple):
    """Operations of one group: their mean size, their seconds, the clipped mean of
    those.
    """

    group: int
    size: float
    seconds: np.ndarray
    mean_s: float

    def around_mean(self) -> np.ndarray:
        """Seconds moved so that their median is the clipped mean."""
        return around_mean(self.seconds)


def points_of(
    seconds: np.ndarray, sizes: np.ndarray, groups: np.ndarray
) -> list[Point]:
    """Groups with enough operations; where none has, the largest."""
    names, counts = np.unique(groups, return_counts=True)
    chosen = (
        names[counts >= LEAST_SAMPLES]
        if (counts >= LEAST_SAMPLES).any()
        else names[[counts.argmax()]]
    )
    found = []
    for group in chosen:
        own = groups == group
        found.append(
            Point(
                int(group),
                round(float(sizes[own].mean()), 3),
                seconds[own],
                clipped_mean(seconds[own]),
            )
        )
    return found


def seconds_of(points: Sequence[Point], groups: np.ndarray) -> np.ndarray:
    """Mean seconds of each operation's group; NaN where it is no point."""
    table = np.full(
        int(max(groups.max(initial=0), *(point.group for point in points))) + 1, np.nan
    )
    for point in points:
        table[point.group] = point.mean_s
    return np.asarray(table[groups])
