"""Cuts the time that belongs to no operation out of a run.

Threads are woken, work is handed out, results are joined: seconds pass between spans.
They are found between spans that follow each other without waiting for anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles.lanes import (
    COMPUTE_KINDS,
    GPU,
    H2D,
    LANE_KINDS,
    LaneKind,
    kind_of,
)
from moesim.traces.timeline.spans import COMPUTE, DENSE, FETCH, JOIN, PLAN, READ

if TYPE_CHECKING:
    from moesim.hwprofiles.calibration.observations import Gaps
    from moesim.hwprofiles.calibration.run_spans import RunSpans

_NEVER_S = 1e30


def add_gaps(spans: RunSpans, gaps: Gaps) -> None:
    """Add one run's gaps."""
    count = spans.layer_step_count
    # What waits for the SSD shows nothing about handing work out.
    with_read = np.zeros(count, np.bool_)
    with_read[spans.layer_step[spans.kind == READ]] = True

    # Prefetches are left out: nothing of the layer step waits for them.
    work = spans.kept & np.isin(spans.kind, (COMPUTE, FETCH))
    without_read = ~with_read[spans.layer_step]
    _add_follow(spans, np.flatnonzero(work & without_read), gaps)

    # Layer steps without a plan stay NaN, and drop out of every comparison.
    planned = spans.kind == PLAN
    plan_end_s = np.full(count, np.nan)
    plan_end_s[spans.layer_step[planned]] = spans.end_s[planned]
    _add_first_and_join(spans, work, plan_end_s, with_read, gaps)
    _add_first_reads(spans, plan_end_s, gaps)


def _add_first_and_join(
    spans: RunSpans,
    work: np.ndarray,
    plan_end_s: np.ndarray,
    with_read: np.ndarray,
    gaps: Gaps,
) -> None:
    """Add gaps from planning to each compute lane's first operation, and around the
    join.
    """
    count = len(plan_end_s)
    amounts = spans.amounts()
    joins = spans.kind == JOIN
    join_start_s = np.full(count, np.nan)
    join_start_s[spans.layer_step[joins]] = spans.start_s[joins]

    extremes = {kind: _extremes(spans, work, kind) for kind in COMPUTE_KINDS}
    lasts_s = [last_s for _, last_s in extremes.values()]
    latest_s = np.max(lasts_s, axis=0)
    around_join_s = _around_join(spans, count)

    for lane_kind, (first_s, last_s) in extremes.items():
        worked = (first_s < _NEVER_S) & np.isfinite(plan_end_s)
        first = spans.times(
            seconds=first_s - plan_end_s,
            amounts=amounts,
            lane_kind=lane_kind,
        )
        gaps.first.append(first.where(worked & ~with_read))

        # The join waits for the last lane only; the other one's end shows nothing.
        was_last = last_s == latest_s
        has_join = np.isfinite(join_start_s)
        has_neighbours = np.isfinite(around_join_s)
        noticed_s = np.maximum(join_start_s - last_s, 0.0)
        join = spans.times(
            seconds=noticed_s + around_join_s,
            amounts=amounts,
            lane_kind=lane_kind,
        )
        complete = worked & was_last & has_join & has_neighbours
        gaps.join.append(join.where(complete))


def _add_first_reads(spans: RunSpans, plan_end_s: np.ndarray, gaps: Gaps) -> None:
    """Add gaps from the end of planning to the first read that it asked for."""
    rows = np.flatnonzero(spans.kept & (spans.kind == READ))
    layer_steps, first = np.unique(
        spans.layer_step[rows],
        return_index=True,
    )
    first_start_s = spans.start_s[rows[first]]
    gap_s = first_start_s - plan_end_s[layer_steps]
    # One that began before the plan had ended was asked for by an earlier plan.
    gaps.read.append(gap_s[gap_s >= 0.0])


def _extremes(
    spans: RunSpans, work: np.ndarray, lane_kind: LaneKind
) -> tuple[np.ndarray, np.ndarray]:
    """First start and last end of the workers of a kind of lane: float64 [P] each."""
    count = spans.layer_step_count
    # By worker, not by lane: a host accelerator's own copies are its work as well.
    workers = {spans.worker[lane] for lane in spans.lanes_of(lane_kind)}
    worker = spans.worker[spans.lane]
    rows = work & np.isin(worker, list(workers))
    layer_steps = spans.layer_step[rows]

    first_s = np.full(count, _NEVER_S)
    last_s = np.full(count, -_NEVER_S)
    np.minimum.at(first_s, layer_steps, spans.start_s[rows])
    np.maximum.at(last_s, layer_steps, spans.end_s[rows])
    return first_s, last_s


def _add_follow(spans: RunSpans, rows: np.ndarray, gaps: Gaps) -> None:
    """Add gaps between operations of the same layer step and worker."""
    worker = spans.worker[spans.lane[rows]]
    for number, lanes in enumerate(spans.run.workers.values()):
        of_worker = rows[worker == number]
        if len(of_worker) < 2:
            continue
        before = of_worker[:-1]
        after = of_worker[1:]
        same_layer_step = spans.layer_step[after] == spans.layer_step[before]
        between_s = spans.start_s[after] - spans.end_s[before]
        gap_s = np.maximum(between_s, 0.0)

        served = {kind_of(lane) for lane in lanes}
        if H2D not in served:
            # A GPU whose copies another worker makes waits for them between products.
            served.discard(GPU)
        for lane_kind in LANE_KINDS:
            if lane_kind not in served:
                continue
            lanes_after = spans.lane[after]
            on_kind = np.isin(lanes_after, spans.lanes_of(lane_kind))
            of_kind_s = gap_s[on_kind & same_layer_step]
            follow = gaps.follow.setdefault(lane_kind.name, [])
            follow.append(of_kind_s)


def _around_join(spans: RunSpans, count: int) -> np.ndarray:
    """From dense part to planning, and from the start of the join to the next dense
    part: float64 [P]; NaN where one is missing.
    """
    chain = np.isin(spans.kind, (DENSE, PLAN, JOIN))
    rows = np.flatnonzero(chain)
    kinds = spans.kind[rows]
    start_s = spans.start_s[rows]
    end_s = spans.end_s[rows]

    # Row of the dense part of each layer step that another one follows.
    dense = np.flatnonzero(
        (kinds[:-3] == DENSE)
        & (kinds[1:-2] == PLAN)
        & (kinds[2:-1] == JOIN)
        & (kinds[3:] == DENSE)
    )
    plan = dense + 1
    join = dense + 2
    next_dense = dense + 3
    request_s = start_s[plan] - end_s[dense]
    join_s = start_s[next_dense] - start_s[join]

    around_s = np.full(count, np.nan)
    layer_steps = spans.layer_step[rows[dense]]
    around_s[layer_steps] = np.maximum(request_s + join_s, 0.0)
    return around_s
