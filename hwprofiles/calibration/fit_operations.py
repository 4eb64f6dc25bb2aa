"""Fits what operations of a lane take: expert products, copies and reads.

The slowdown by whatever overlapped an operation is divided out first: it is found by
regressing the logarithm of an operation's duration on who else was busy for which
share of its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    Resampled,
    Units,
    comparable,
    contrast,
    fit_slowdowns,
    interquartile_range,
    inverse,
    quantiles_around_one,
    renumbered,
)
from moesim.hwprofiles.calibration.fit_curves import (
    LEAST_SAMPLES,
    centres_of,
    fit_line,
    fit_roofline,
    points_of,
    seconds_of,
)
from moesim.hwprofiles.calibration.observations import (
    LayerStepTimes,
    Operations,
    joined,
)
from moesim.hwprofiles.lanes import (
    COMPUTE_KINDS,
    CPU,
    H2D,
    LANE_KINDS,
    SSD,
    LaneKind,
)
from moesim.hwprofiles.roofline import isotonic
from moesim.hwprofiles.schema import Curve, ReferenceExpert
from moesim.traces.timeline.spans import COMPUTE, FETCH, PREFETCH, READ, REPLACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.hwprofiles.calibration.fit_curves import Centres, Entries, Point
    from moesim.hwprofiles.calibration.observations import RunSpans
    from moesim.traces.format.schema import ModelShape

LEAST_OVERLAPPED = 40
"""Operations with an overlap of a tenth or more that a slowdown is worth being read
from.
"""
_OVERLAPPED = 0.1
_BLOCKS = 4
"""Of a run, that are resampled. Source: machines with known factors,
`benchmarks/calibration_coverage.py`.
"""

_QUARTERS = np.round(2.0 ** np.arange(0.0, 14.0, 0.25))
_SIZE_EDGES = np.unique(_QUARTERS.astype(np.int64))
"""Borders between groups of products by tokens: four to a doubling."""
_RUN_BITS = 20
"""Groups of operations are numbered below this bit; numbers of runs lie above it."""

SPAN_KINDS = {H2D: (FETCH, PREFETCH, REPLACE), SSD: (READ,)}
"""Links that are calibrated by runs, and their operations. Copies back to the host keep
the costs that were measured in isolation.
"""


class OperationFit:
    """Fits products and copies of all runs.

    Args:
        spans: the runs.
        shapes: of their models.
        entries: where results go.

    Attributes:
        first_excess: what first products of layer steps take beyond later ones.
    """

    def __init__(
        self,
        spans: Sequence[RunSpans],
        shapes: Sequence[ModelShape],
        entries: Entries,
    ) -> None:
        self._spans = spans
        self._shapes = shapes
        self._entries = entries
        self.first_excess: list[LayerStepTimes] = []

    def alone(
        self, lane_kind: LaneKind
    ) -> tuple[Operations, np.ndarray, np.ndarray] | None:
        """Enter what others cost operations of a kind of lane.

        Returns:
            The operations, their groups of equal work, int64 [N], and the seconds that
            they would have taken alone, float64 [N]; None where they are too few.
        """
        kinds = SPAN_KINDS.get(lane_kind, (COMPUTE,))
        ops = joined(spans.operations(lane_kind, kinds) for spans in self._spans)
        if len(ops.seconds) < LEAST_SAMPLES:
            return None

        # Experts of a model have few sizes, so equal bytes are equal work; products are
        # it by experts and by about as many tokens.
        groups = renumbered(ops.sizes)
        if lane_kind in COMPUTE_KINDS:
            size_groups = np.searchsorted(_SIZE_EDGES, ops.sizes, side="right")
            groups = ops.shapes * len(_SIZE_EDGES) + size_groups
        return ops, groups, self._divide_out_contention(lane_kind, ops, groups)

    def fit(self, lane_kind: LaneKind, extra_s: float) -> None:
        """Fit products, copies or reads: contention, seconds by tokens or bytes,
        roofline or rate, distribution.

        Args:
            lane_kind: a compute lane, or one of `SPAN_KINDS`.
            extra_s: by what the next operation begins later here than on the lane that
                is handed work the fastest.
        """
        operations = self.alone(lane_kind)
        if operations is None:
            return
        ops, groups, alone_s = operations
        computes = lane_kind in COMPUTE_KINDS
        usable = usual = _usual(lane_kind, ops)
        if computes:
            later = usual & ~ops.first & ~ops.late
            enough = later.sum() >= LEAST_SAMPLES
            usable = later if enough else np.ones_like(usual)
        seconds = alone_s + extra_s
        points = points_of(seconds[usable], ops.sizes[usable], groups[usable])
        if not points:
            return
        units = Units(ops.runs[usable] // 2, ops.steps[usable])
        centres = centres_of(points, seconds[usable], units)
        expected_s = seconds_of(points, groups)
        # Groups too small for a point have no expected time to be compared with.
        ratios = (seconds / expected_s)[usable]
        quantiles = quantiles_around_one(ratios[np.isfinite(ratios)])
        if computes:
            self._note_first_excess(lane_kind, ops, usual, seconds - expected_s)
        if lane_kind in (CPU, H2D):
            # First products have an excess of their own, which is noted above.
            rows = np.flatnonzero(~ops.first | (lane_kind is H2D))
            self.after_read(
                lane_kind.name,
                alone_s[rows] if computes else seconds[rows],
                ops.fresh[rows],
                # Within runs, so that what the machine did meanwhile hits both alike.
                (groups + (ops.runs << _RUN_BITS))[rows],
                shapes=ops.shapes[rows],
                units_of=(ops.runs[rows] // 2, ops.steps[rows]),
            )
        if computes:
            self._products(lane_kind, points, centres, quantiles)
        else:
            self._copies(lane_kind, points, centres, quantiles)
        held_out_s = (alone_s if computes else seconds)[usable]
        self._entries.put_held_out(
            lane_kind.name, held_out_s, groups[usable], ops.odd[usable]
        )

    def _note_first_excess(
        self,
        lane_kind: LaneKind,
        ops: Operations,
        usual: np.ndarray,
        excess_s: np.ndarray,
    ) -> None:
        chosen = ops.first & usual & np.isfinite(excess_s)
        count = int(chosen.sum())
        self.first_excess.append(
            LayerStepTimes(
                seconds=excess_s[chosen],
                active=ops.active[chosen],
                copies=ops.copies[chosen],
                # Who shares a layer step is charged once as well, where it joins.
                shared=np.zeros(count),
                # The SSD is charged once, in the gap before the operation.
                tiered=np.zeros(count),
                lane_kind=np.full(count, LANE_KINDS.index(lane_kind)),
                runs=ops.runs[chosen] // 2,
                steps=ops.steps[chosen],
            )
        )

    def _products(
        self,
        lane_kind: LaneKind,
        points: Sequence[Point],
        centres: Centres,
        quantiles: tuple[float, ...],
    ) -> None:
        """Enter a roofline over all shapes, and a curve over tokens of two."""
        numbers = [point.group // len(_SIZE_EDGES) for point in points]
        shapes = [self._shapes[number] for number in numbers]
        # Three constants need three points.
        if len(points) >= 3:
            flops = [
                point.size * float(shape.expert_flops_per_token)
                for point, shape in zip(points, shapes, strict=True)
            ]
            roof = fit_roofline(
                [float(shape.max_expert_bytes) for shape in shapes],
                flops,
                [point.seconds for point in points],
                centres=centres,
            )
            self._entries.put_roofline(
                lane_kind.name,
                roof,
                samples=centres.samples,
                source="roofline through the means of products by shape and tokens",
            )
        # A profile has room for two sizes; `by_size` lists the largest first.
        for small, number in zip((False, True), self.by_size(), strict=False):
            of_shape = [p for p, n in zip(points, numbers, strict=True) if n == number]
            if of_shape:
                shape = self._shapes[number]
                self._curve(
                    paths.points(lane_kind.name, small=small),
                    of_shape,
                    "tokens",
                    "products",
                    quantiles,
                    ReferenceExpert(
                        hidden=shape.hidden,
                        intermediate=shape.expert_intermediate,
                        bytes=shape.max_expert_bytes,
                        dtype=shape.dtype,
                    ),
                )

    def _copies(
        self,
        lane_kind: LaneKind,
        points: Sequence[Point],
        centres: Centres,
        quantiles: tuple[float, ...],
    ) -> None:
        """Enter latency and bandwidth of a link, and a curve over bytes."""
        # Groups are numbered by bytes, so points ascend in them.
        line = fit_line(
            {int(point.size): point.seconds for point in points}, centres=centres
        )
        constants = paths.link(lane_kind.name)
        for path, estimate in (
            (constants.latency_s, line.base_s),
            (constants.bytes_per_s, inverse(line.slope_s)),
        ):
            self._entries.put(
                path, estimate, _source("copies"), samples=centres.samples
            )
        path = paths.points(lane_kind.name)
        self._curve(path, points, "bytes", "copies", quantiles)

    def _curve(
        self,
        path: str,
        points: Sequence[Point],
        unit: str,
        operations: str,
        quantiles: tuple[float, ...],
        reference: ReferenceExpert | None = None,
    ) -> None:
        # Larger operations never take less time; a dip is noise.
        means_s = isotonic(np.array([point.mean_s for point in points]))
        self._entries.curves[path] = Curve(
            unit=unit,
            at=tuple(float(point.size) for point in points),
            seconds=tuple(means_s.tolist()),
            kind="measured",
            source=_source(operations),
            samples=min(len(point.seconds) for point in points),
            spread=tuple(interquartile_range(point.seconds) for point in points),
            date=self._entries.date,
            quantiles=quantiles,
            reference=reference,
        )

    def _divide_out_contention(
        self, lane_kind: LaneKind, ops: Operations, groups: np.ndarray
    ) -> np.ndarray:
        """Fit what others cost operations of one kind of lane; return the seconds that
        these would have taken alone, float64 [N].
        """
        others = [
            column
            for column, other in enumerate(LANE_KINDS)
            if other is not lane_kind and _overlapped(ops, column) >= LEAST_OVERLAPPED
        ]
        if not others:
            return ops.seconds
        # States that differ only in lanes which are not told apart become one.
        states, first_rows = np.unique(
            _busy(np.arange(ops.states.shape[1]), others), axis=0, return_inverse=True
        )
        merge = np.eye(len(states))[first_rows.ravel()]
        shares = ops.states @ merge
        expected = ops.expected @ merge
        busy = states.astype(np.float64)
        logs = np.log(ops.seconds)

        # Unlike in time, and unlike in what runs beside them.
        groups = 4 * groups + 2 * ops.fresh + ops.first
        # First products take longer the more copies there are, whether or not these run
        # beside them, which would count as being slowed.
        told_by = ~(ops.first | ops.late) | (lane_kind not in COMPUTE_KINDS)
        if (
            min(_overlapped(ops, column, told_by) for column in others)
            < LEAST_OVERLAPPED
        ):
            told_by[:] = True
        chosen = np.flatnonzero(told_by)
        slowed = fit_slowdowns(
            logs[chosen], shares[chosen], expected[chosen], busy, groups[chosen]
        )
        factors = slowed.factors
        alone_s = ops.seconds * (shares @ (factors**-busy).prod(axis=1))

        runs = renumbered(ops.runs[chosen] // 2)
        units = Units(runs, ops.steps[chosen], _BLOCKS)
        redrawn = slowed.redrawn(units, runs, self._entries.rng)
        estimates = Resampled(factors, redrawn, units.count).estimates(1.0)
        for estimate, column in zip(estimates, others, strict=True):
            self._entries.put(
                paths.contention(lane_kind.name, LANE_KINDS[column].name),
                estimate,
                "log duration of designed runs' operations regressed on who else was"
                " busy for which share; what was expected from their start is the"
                " instrument",
                samples=_overlapped(ops, column, told_by),
            )
        return np.asarray(alone_s)

    def after_read(
        self,
        part: str,
        seconds: np.ndarray,
        fresh: np.ndarray,
        groups: np.ndarray,
        *,
        shapes: np.ndarray,
        units_of: tuple[np.ndarray, np.ndarray],
    ) -> dict[int, float]:
        """Enter by what operations differ that follow a read from the SSD from those of
        the same group that do not.

        Args:
            part: of the profile's costs.
            seconds: float64 [N].
            fresh: bool [N], follows a read.
            groups: int64 [N], operations of equal work of the same run.
            shapes: int64 [N], numbers of shapes.
            units_of: int64 [N] each, the run and forward pass that it belongs to.

        Returns:
            The factor by number of shape; none where too few can be compared.
        """
        logs = np.log(seconds)
        factors = {}
        for small, number in zip((False, True), self.by_size(), strict=False):
            # Caches hold more of a small expert than of a large one.
            rows = np.flatnonzero(shapes == number)
            rows = rows[comparable(fresh[rows], groups[rows])]
            if fresh[rows].sum() < LEAST_OVERLAPPED:
                continue

            def slower(drawn: np.ndarray, rows: np.ndarray = rows) -> float:
                chosen = rows[drawn]
                return contrast(logs[chosen], fresh[chosen], groups[chosen])

            units = Units(*(column[rows] for column in units_of))
            (factor,) = Resampled.of(slower, units, self._entries.rng).estimates()
            self._entries.put(
                paths.after_read(part, small=small),
                factor,
                "what follows a read in designed runs over the same that does not, in"
                " the same run",
                samples=len(rows),
            )
            factors[number] = factor.value
        return factors

    def by_size(self) -> list[int]:
        """Numbers of the shapes, the largest experts first."""
        return sorted(
            range(len(self._shapes)),
            key=lambda number: -self._shapes[number].max_expert_bytes,
        )


def _overlapped(
    ops: Operations, column: int, chosen: np.ndarray | slice = slice(None)
) -> int:
    """Operations beside which lanes of a kind worked for a tenth of their time."""
    beside = _busy(np.arange(ops.states.shape[1]), [column])[:, 0]
    shares = ops.states[chosen][:, beside].sum(axis=1)
    return int((shares > _OVERLAPPED).sum())


def _busy(states: np.ndarray, columns: Sequence[int]) -> np.ndarray:
    """Which kinds of lanes are busy in a state, bool [K, C]."""
    return (states[:, None] >> np.array(columns) & 1).astype(np.bool_)


def _usual(lane_kind: LaneKind, ops: Operations) -> np.ndarray:
    """Operations that do not follow a read of their expert, bool [N]: it may lie in
    caches, which matters where host memory is read.
    """
    reads_host = lane_kind in (CPU, H2D)
    return ~ops.fresh if reads_host and not ops.fresh.all() else np.ones_like(ops.fresh)


def _source(kind: str) -> str:
    return f"{kind} of designed runs through the executor, contention divided out, mean"
