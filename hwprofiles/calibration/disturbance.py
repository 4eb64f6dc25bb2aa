"""Which repetition of a step was disturbed least, by what the system counted.

A step that took long is not therefore disturbed, and one that was disturbed need not
be long. So the choice is made by evidence: the seconds in which threads of the run
could have worked and others did.
"""

from __future__ import annotations

from typing import Final

import numpy as np

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
