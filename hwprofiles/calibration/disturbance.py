"""Which repetition of a step was disturbed least, by what the system counted.

A step that took long is not therefore disturbed, and one that was disturbed need not
be long. So the choice is made by evidence: the seconds in which threads of the run
could have worked and others did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from moesim.traces.timeline.operations import REQUEST

if TYPE_CHECKING:
    from moesim.traces.timeline.operations import OperationTable

TOLERATED: Final = 0.01
"""Share of a step's time that may be lost beyond that of the best repetition."""


def lost_shares(operations: OperationTable | None, lengths_s: np.ndarray) -> np.ndarray:
    """Share of each step's time that its threads waited for a core.

    Args:
        operations: of a run; None where nothing was counted.
        lengths_s: float64 [S], seconds of each forward pass.

    Returns:
        float64 [S]; zero where nothing was counted.
    """
    lost_s = np.zeros(len(lengths_s))
    if operations is None:
        return lost_s
    columns = operations.columns()
    counted = np.isfinite(columns["waited_s"]) & (columns["kind"] < REQUEST)
    np.add.at(lost_s, columns["step"][counted], columns["waited_s"][counted])
    return lost_s / np.maximum(lengths_s, 1e-9)


def undisturbed_medians(lengths_s: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Choose a repetition of every step: of those that lost least, the median one.

    Other tenants of a machine slow memory and clocks without a trace in any counter,
    in bursts of half a second; they are why the median counts. Of two the shorter does.

    Args:
        lengths_s: float64 [R, S], seconds by repetition and step.
        lost: float64 [R, S], shares of `lost_shares`.

    Returns:
        int64 [S], repetition by step.
    """
    disturbed = lost > lost.min(axis=0) + TOLERATED
    # Disturbed ones sort last, so that the first rows are the others by length.
    order = np.argsort(np.where(disturbed, np.inf, lengths_s), axis=0, kind="stable")
    middle = ((~disturbed).sum(axis=0) - 1) // 2
    return np.asarray(order[middle, np.arange(lengths_s.shape[1])])
