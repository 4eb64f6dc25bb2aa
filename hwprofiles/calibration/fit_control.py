"""Fits what is no operation of a lane: planning, handing out work, joining.

Each is a plane: a base, so much for every active expert, so much for every copy, and
what an SSD behind host memory adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import interquartile_range
from moesim.hwprofiles.calibration.observations import LayerStepTimes
from moesim.hwprofiles.calibration.points import LEAST_SAMPLES
from moesim.hwprofiles.calibration.robust import (
    DRAWS,
    clipped_mean,
    fit_plane,
    quantiles_around_one,
)
from moesim.hwprofiles.lanes import COMPUTE_KINDS, LANE_KINDS, SSD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.hwprofiles.calibration.entries import Entries
    from moesim.hwprofiles.calibration.observations import Gaps
    from moesim.hwprofiles.calibration.run_spans import RunSpans
    from moesim.hwprofiles.paths import ControlPaths

_SLOPES = 3
"""Columns of a plane beside its bases: active experts, copies, the SSD."""
_TINY_S = 1e-9


def fit_dispatch(
    gaps: Gaps, first_excess: Sequence[LayerStepTimes], entries: Entries
) -> None:
    """Fit first operations, the join, and the lane that is noticed later: what passes
    once per layer step.

    Args:
        gaps: of all runs.
        first_excess: what first products take beyond later ones.
        entries: where results go.
    """
    if not gaps.first:
        return
    first = LayerStepTimes.joined(gaps.first)
    join = LayerStepTimes.joined(gaps.join)
    # Charged as one number: the gap before the first operation of a layer step, and
    # what that operation takes beyond later ones.
    tables = [first]
    if first_excess:
        tables.append(LayerStepTimes.joined(first_excess))

    first_later_s = _beyond_least(
        fit_control_plane(
            paths.FIRST_OPERATION,
            tables,
            "from plan to first operation and what it takes longer, by active experts"
            " and copies",
            entries,
        )
    )
    join_later_s = _beyond_least(
        fit_control_plane(
            paths.JOIN,
            [join],
            "per layer step: from dense part to planning, last operation to join, join,"
            " to the next dense part",
            entries,
        )
    )

    for lane_kind in COMPUTE_KINDS:
        number = LANE_KINDS.index(lane_kind)
        if number not in first_later_s:
            continue
        gap_s = first.seconds[first.lane_kind == number]
        later_s = first_later_s[number] + join_later_s.get(number, 0.0)
        # The samples give the scatter; their mean is that of the planes.
        entries.put_mean(
            paths.first_s(lane_kind.name),
            gap_s - clipped_mean(gap_s) + later_s,
            f"by what the first {lane_kind.name} operation begins, takes and is noticed"
            " later than the other lane's",
        )

    if sum(map(len, gaps.read)) >= LEAST_SAMPLES:
        entries.put_mean(
            paths.first_s(SSD.name),
            np.concatenate(gaps.read),
            "from plan to the first read of a layer step",
        )


def fit_planning(all_spans: Sequence[RunSpans], entries: Entries) -> None:
    """Fit planning in place, by policy; all together stand in for those that were not
    run.
    """
    by_policy: dict[str, list[LayerStepTimes]] = {}
    for spans in all_spans:
        by_policy.setdefault(spans.run.assignment, []).append(spans.planning())

    tables = {
        policy: LayerStepTimes.joined(parts) for policy, parts in by_policy.items()
    }
    # Last, since entries are drawn in this order.
    tables[paths.DEFAULT_POLICY] = LayerStepTimes.joined(
        part for parts in by_policy.values() for part in parts
    )
    for policy, table in tables.items():
        fit_control_plane(
            paths.planning(policy),
            [table],
            "planning of designed runs, by active experts and copies",
            entries,
        )


def fit_control_plane(
    constants: ControlPaths,
    tables: Sequence[LayerStepTimes],
    source: str,
    entries: Entries,
) -> dict[int, float]:
    """Enter base, slopes by active experts and copies, and what the SSD tier adds;
    intervals are resampled.

    Args:
        constants: where the results go.
        tables: fitted one by one and summed.
        source: the procedure, in words.
        entries: where results go.

    Returns:
        The base by number of the kind of lane; the least of them is entered.
    """
    lane_kinds = np.unique(np.concatenate([table.lane_kind for table in tables]))

    def fitted(table: LayerStepTimes) -> np.ndarray:
        return fit_plane(_columns(table, lane_kinds), table.seconds)

    plane = np.sum([fitted(table) for table in tables], axis=0)
    # Layer steps are resampled as wholes: amounts and seconds stay together.
    draws = []
    for _ in range(DRAWS):
        redrawn = []
        for table in tables:
            count = len(table.lane_kind)
            rows = entries.rng.integers(0, count, count)
            redrawn.append(fitted(table.where(rows)))
        draws.append(np.sum(redrawn, axis=0))
    bounds = np.quantile(
        [_base_and_slopes(draw) for draw in draws], (0.025, 0.975), axis=0
    ).T

    table = tables[0]
    expected_s = _columns(table, lane_kinds) @ plane
    ratios = table.seconds / np.maximum(expected_s, _TINY_S)
    spread = interquartile_range(table.seconds)
    for path, value, (low, high) in zip(
        constants, _base_and_slopes(plane), bounds, strict=True
    ):
        # Where no run had an SSD, nothing is known of what it adds.
        if path == constants.with_ssd_s and not any(
            table.tiered.any() for table in tables
        ):
            continue
        # Scatter belongs to the whole; it is kept with the base.
        quantiles: tuple[float, ...] = ()
        if path == constants.base_s and ratios.any():
            quantiles = quantiles_around_one(ratios)
        entries.put(
            path,
            value,
            source,
            samples=len(table.seconds),
            spread=spread,
            interval=(low, high),
            quantiles=quantiles,
        )

    bases_s = plane[:-_SLOPES].tolist()
    return dict(zip(lane_kinds.tolist(), bases_s, strict=True))


def _beyond_least(bases_s: dict[int, float]) -> dict[int, float]:
    least_s = min(bases_s.values())
    return {number: base_s - least_s for number, base_s in bases_s.items()}


def _columns(table: LayerStepTimes, lane_kinds: np.ndarray) -> np.ndarray:
    """A column of ones by kind of lane, then active experts, copies, and the SSD tier:
    float64 [N, kinds + 3].
    """
    of_kind = (table.lane_kind[:, None] == lane_kinds).astype(np.float64)
    return np.column_stack((of_kind, table.active, table.copies, table.tiered))


def _base_and_slopes(plane: np.ndarray) -> tuple[float, float, float, float]:
    """Least base, and the three slopes."""
    per_expert, per_copy, with_ssd = plane[-_SLOPES:]
    return (
        float(plane[:-_SLOPES].min()),
        float(per_expert),
        float(per_copy),
        float(with_ssd),
    )
