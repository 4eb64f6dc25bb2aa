"""Fits costs to designed runs: what operations take *in place*, beside everything else
that a run does.

An operation in a run is slower than the same one alone: others use the memory, the
caches are cold, a thread must be woken. So costs are taken from runs: the time of an
operation with the slowdown of what overlapped it divided out, and the gaps that belong
to no operation as terms of their own. Nothing here knows of any run that a prediction
will be compared with.

Means, not medians: a run is a sum of operations, and its tail is part of the sum. Both
ends are clipped at 10 %.

Source: issue 4's table of terms that mattered, from trials on a machine with two cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.entries import Entries
from moesim.hwprofiles.calibration.fit_control import fit_dispatch, fit_planning
from moesim.hwprofiles.calibration.fit_dense import fit_dense
from moesim.hwprofiles.calibration.fit_operations import SPAN_KINDS, OperationFit
from moesim.hwprofiles.calibration.gaps import add_gaps
from moesim.hwprofiles.calibration.observations import DesignedRun, Gaps
from moesim.hwprofiles.calibration.robust import clipped_mean
from moesim.hwprofiles.calibration.run_spans import RunSpans
from moesim.hwprofiles.lanes import COMPUTE_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.hwprofiles.schema import Curve, Quantity
    from moesim.traces.format.schema import ModelShape

__all__ = ["Calibration", "DesignedRun", "calibrate"]


class Calibration(NamedTuple):
    """What the runs showed: entries of a hardware profile by dotted path, and
    residuals.
    """

    numbers: dict[str, Quantity]
    curves: dict[str, Curve]
    fit: dict[str, dict[str, float]]


def calibrate(runs: Sequence[DesignedRun], *, date: str, seed: int = 0) -> Calibration:
    """Fit costs, contention, dispatch terms and distributions to designed runs.

    Args:
        runs: timelines of this machine, warm; at least one product on each lane.
        date: day of the measurement, ISO 8601.
        seed: of the resampling behind intervals.

    Returns:
        Entries for whatever the runs exercised; what they did not is left to the
        profile they are put into.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("calibration needs at least one run")

    # Shapes are sorted by size later; here each has a number.
    shapes: list[ModelShape] = []
    for run in runs:
        if run.shape not in shapes:
            shapes.append(run.shape)
    all_spans = [
        RunSpans(run, shapes.index(run.shape), number)
        for number, run in enumerate(runs)
    ]
    gaps = Gaps()
    for spans in all_spans:
        add_gaps(spans, gaps)

    # The order of these parts is the order of their draws.
    entries = Entries(date, seed)
    follow_s = _fit_hand_over(gaps, entries)
    operations = OperationFit(all_spans, shapes, entries)
    for lane_kind in COMPUTE_KINDS:
        operations.products(lane_kind, follow_s.get(lane_kind.name, 0.0))
    for lane_kind in SPAN_KINDS:
        operations.copies(lane_kind, follow_s.get(lane_kind.name, 0.0))
    fit_dispatch(gaps, operations.first_excess, entries)
    fit_dense(all_spans, shapes, operations, entries)
    fit_planning(all_spans, entries)
    return Calibration(entries.numbers, entries.curves, entries.fit)


def _fit_hand_over(gaps: Gaps, entries: Entries) -> dict[str, float]:
    """Enter what lies between operations of one worker; return by what it is more on
    each kind of lane than on the fastest.
    """
    follow = {
        name: np.concatenate(parts)
        for name, parts in gaps.follow.items()
        if sum(map(len, parts))
    }
    if not follow:
        return {}

    # One number serves all lanes; what slower ones need beyond it joins their costs.
    mean_s = {name: clipped_mean(seconds) for name, seconds in follow.items()}
    fastest = min(mean_s, key=lambda name: mean_s[name])
    entries.put_mean(
        paths.PER_OPERATION_S,
        follow[fastest],
        f"between operations of one worker, {fastest} lane",
    )
    return {name: seconds - mean_s[fastest] for name, seconds in mean_s.items()}
