"""Fits what operations of a lane take: expert products, copies and reads.

The slowdown by whatever overlapped an operation is divided out first: it is found by
regressing the logarithm of an operation's duration on the shares of its time that
others were busy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    DrawSummary,
    Estimate,
    interquartile_range,
    interval_around,
)
from moesim.hwprofiles.calibration.fit_curves import fit_line, fit_roofline
from moesim.hwprofiles.calibration.observations import LayerStepTimes, Operations
from moesim.hwprofiles.calibration.points import LEAST_SAMPLES, points_of, seconds_of
from moesim.hwprofiles.calibration.robust import (
    DRAWS,
    comparable,
    contrast,
    quantiles_around_one,
    renumbered,
    resampled,
    slowdown_shares,
)
from moesim.hwprofiles.isotonic import isotonic
from moesim.hwprofiles.lanes import CONTROL, CPU, H2D, LANE_KINDS, SSD, LaneKind
from moesim.hwprofiles.schema import Curve, ReferenceExpert
from moesim.traces.timeline.spans import COMPUTE, FETCH, PREFETCH, READ, REPLACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.hwprofiles.calibration.entries import Entries
    from moesim.hwprofiles.calibration.points import Point
    from moesim.hwprofiles.calibration.run_spans import RunSpans
    from moesim.traces.format.schema import ModelShape

LEAST_OVERLAPPED = 40
"""Operations with an overlap of a tenth or more that a slowdown is worth being read
from.
"""
_OVERLAPPED = 0.1
_DRAW_ITERATIONS = 6
"""Steps of a resampled regression, which starts from the answer."""
_LEAST_SLOPE = 1e-24

_SIZE_EDGES = np.unique(np.round(2.0 ** np.arange(0.0, 14.0, 0.25)).astype(np.int64))
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

    def products(self, lane_kind: LaneKind, extra_s: float) -> None:
        """Fit expert products: contention, curve over tokens, roofline over shapes,
        distribution.

        Args:
            lane_kind: which compute lane.
            extra_s: by what the next operation begins later here than on the lane that
                is handed work the fastest.
        """
        ops = Operations.joined(
            spans.operations(lane_kind, (COMPUTE,)) for spans in self._spans
        )
        if len(ops.seconds) < LEAST_SAMPLES:
            return
        # Products of about as many tokens of the same experts are equal work.
        size_groups = np.searchsorted(_SIZE_EDGES, ops.sizes, side="right")
        groups = ops.shapes * len(_SIZE_EDGES) + size_groups
        alone_s = self._divide_out_contention(lane_kind, ops, groups)

        # The CPU computes from host memory: what was just read may lie in its caches.
        usual = np.ones_like(ops.fresh)
        if lane_kind is CPU:
            usual = ~ops.fresh
        later = usual & ~ops.first
        usable = later if later.sum() >= LEAST_SAMPLES else np.ones_like(ops.first)

        charged_s = alone_s + extra_s
        points = points_of(charged_s[usable], ops.sizes[usable], groups[usable])
        excess_s = charged_s - seconds_of(points, groups)
        self._note_first_excess(lane_kind, ops, usual, excess_s)
        if lane_kind is CPU:
            # First products have an excess of their own, which is noted above.
            not_first = ~ops.first
            self.after_read(
                lane_kind.name,
                alone_s[not_first],
                ops.fresh[not_first],
                _within_runs(groups, ops)[not_first],
                ops.shapes[not_first],
            )
        self._roofline(lane_kind, points)
        # Groups too small for a point have no expected time to be compared with.
        ratios = charged_s[usable] / seconds_of(points, groups[usable])
        quantiles = quantiles_around_one(ratios[np.isfinite(ratios)])
        self._product_curves(lane_kind, points, quantiles)
        self._entries.put_held_out(
            lane_kind.name, alone_s[usable], groups[usable], ops.odd[usable]
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
                # The SSD is charged once, in the gap before the operation.
                tiered=np.zeros(count),
                lane_kind=np.full(count, LANE_KINDS.index(lane_kind)),
            )
        )

    def _roofline(self, lane_kind: LaneKind, points: Sequence[Point]) -> None:
        # Three constants need three points.
        if len(points) < 3:
            return
        shapes = [self._shapes[_shape_number(point)] for point in points]
        roof = fit_roofline(
            [float(shape.max_expert_bytes) for shape in shapes],
            [
                point.size * float(shape.expert_flops_per_token)
                for point, shape in zip(points, shapes, strict=True)
            ],
            [point.around_mean() for point in points],
        )
        self._entries.put_roofline(
            lane_kind.name,
            roof,
            samples=sum(len(point.seconds) for point in points),
            source="roofline through the means of products by shape and tokens",
        )

    def _product_curves(
        self,
        lane_kind: LaneKind,
        points: Sequence[Point],
        quantiles: tuple[float, ...],
    ) -> None:
        # A profile has room for two sizes; `by_size` lists the largest first.
        for small, number in zip((False, True), self.by_size(), strict=False):
            of_shape = [point for point in points if _shape_number(point) == number]
            if not of_shape:
                continue
            shape = self._shapes[number]
            path = paths.points(lane_kind.name, small=small)
            self._entries.curves[path] = self._curve(
                of_shape,
                "tokens",
                source=(
                    "products of designed runs through the executor, contention divided"
                    " out, mean"
                ),
                quantiles=quantiles,
                reference=ReferenceExpert(
                    hidden=shape.hidden,
                    intermediate=shape.expert_intermediate,
                    bytes=shape.max_expert_bytes,
                    dtype=shape.dtype,
                ),
            )

    def copies(self, lane_kind: LaneKind, extra_s: float) -> None:
        """Fit copies or reads: contention, seconds by bytes, distribution.

        Args:
            lane_kind: which link; one of `SPAN_KINDS`.
            extra_s: as for `products`.
        """
        ops = Operations.joined(
            spans.operations(lane_kind, SPAN_KINDS[lane_kind]) for spans in self._spans
        )
        if len(ops.seconds) < LEAST_SAMPLES:
            return
        # Experts of a model have few sizes, so equal bytes are equal work.
        groups = renumbered(ops.sizes)
        alone_s = self._divide_out_contention(lane_kind, ops, groups) + extra_s

        usual = np.ones_like(ops.fresh)
        # A copy reads host memory as well; a read from the SSD does not.
        if lane_kind is not SSD and not ops.fresh.all():
            usual = ~ops.fresh
        points = points_of(alone_s[usual], ops.sizes[usual], groups[usual])
        if not points:
            return
        if lane_kind is H2D:
            self.after_read(
                lane_kind.name,
                alone_s,
                ops.fresh,
                _within_runs(groups, ops),
                ops.shapes,
            )

        source = (
            "copies of designed runs through the executor, contention divided out, mean"
        )
        self._link(lane_kind, points, source)
        ratios = (alone_s / seconds_of(points, groups))[usual]
        ratios = ratios[np.isfinite(ratios)]
        self._entries.curves[paths.points(lane_kind.name)] = self._curve(
            points,
            "bytes",
            source=source,
            quantiles=quantiles_around_one(ratios),
        )
        self._entries.put_held_out(
            lane_kind.name, alone_s[usual], groups[usual], ops.odd[usual]
        )

    def _link(self, lane_kind: LaneKind, points: Sequence[Point], source: str) -> None:
        """Enter latency and bandwidth of a link."""
        if len(points) > 1:
            line = fit_line({int(point.size): point.around_mean() for point in points})
            base = line.base_s
            slope = line.slope_s
        else:
            # One size cannot tell latency from bandwidth.
            base = Estimate(0.0, (0.0, 0.0), 0.0)
            only = points[0]
            slope = resampled(only.seconds / only.size, self._entries.rng)

        # Unlike `inverse`, bounds are sorted: the smallest slope is the fastest rate.
        rate = 1.0 / max(slope.value, _LEAST_SLOPE)
        low, high = sorted(1.0 / max(bound, _LEAST_SLOPE) for bound in slope.interval)
        bandwidth = Estimate(
            value=rate,
            interval=interval_around(rate, low, high),
            spread=rate * rate * slope.spread,
        )
        constants = paths.link(lane_kind.name)
        samples = sum(len(point.seconds) for point in points)
        self._entries.put_estimate(
            constants.latency_s, base, samples=samples, source=source
        )
        self._entries.put_estimate(
            constants.bytes_per_s, bandwidth, samples=samples, source=source
        )

    def _curve(
        self,
        points: Sequence[Point],
        unit: str,
        *,
        source: str,
        quantiles: tuple[float, ...],
        reference: ReferenceExpert | None = None,
    ) -> Curve:
        # Larger operations never take less time; a dip is noise.
        means_s = isotonic(np.array([point.mean_s for point in points]))
        return Curve(
            unit=unit,
            at=tuple(float(point.size) for point in points),
            seconds=tuple(means_s.tolist()),
            kind="measured",
            source=source,
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
        # Control plans while the lanes wait, so it slows none of them.
        others = [
            column
            for column, other in enumerate(LANE_KINDS)
            if other not in {lane_kind, CONTROL}
            and _overlapped(ops, column) >= LEAST_OVERLAPPED
        ]
        if not others:
            return ops.seconds
        shares = ops.shares[:, others]

        # Unlike in time, and unlike in what runs beside them.
        groups = 4 * groups + 2 * ops.fresh + ops.first
        lost = slowdown_shares(np.log(ops.seconds), shares, groups)

        draws = []
        for _ in range(DRAWS):
            rows = self._entries.rng.integers(0, len(groups), len(groups))
            draws.append(
                slowdown_shares(
                    np.log(ops.seconds[rows]),
                    shares[rows],
                    groups[rows],
                    iterations=_DRAW_ITERATIONS,
                    start=lost,
                )
            )
        # From the share of speed that is lost to the factor of a slowdown.
        factors = [1.0 / (1.0 - draw) for draw in draws]
        drawn = DrawSummary.of(factors)

        for number, column in enumerate(others):
            self._entries.put(
                paths.contention(lane_kind.name, LANE_KINDS[column].name),
                float(1.0 / (1.0 - lost[number])),
                "log duration of designed runs' operations regressed on overlap shares",
                samples=_overlapped(ops, column),
                spread=float(drawn.spread[number]),
                interval=(drawn.low[number], drawn.high[number]),
            )
        return np.asarray(ops.seconds * (1.0 - shares @ lost))

    def after_read(
        self,
        part: str,
        seconds: np.ndarray,
        fresh: np.ndarray,
        groups: np.ndarray,
        shapes: np.ndarray,
    ) -> dict[int, float]:
        """Enter by what operations differ that follow a read from the SSD from those of
        the same group that do not.

        Groups lie within runs, so that what the machine did meanwhile hits both alike.

        Args:
            part: of the profile's costs.
            seconds: float64 [N].
            fresh: bool [N], follows a read.
            groups: int64 [N], operations of equal work of the same run.
            shapes: int64 [N], numbers of shapes.

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

            value = contrast(logs[rows], fresh[rows], groups[rows])
            draws = []
            for _ in range(DRAWS):
                redrawn = self._entries.rng.choice(rows, len(rows))
                draws.append(contrast(logs[redrawn], fresh[redrawn], groups[redrawn]))
            summary = DrawSummary.of(draws)
            self._entries.put(
                paths.after_read(part, small=small),
                value,
                "what follows a read in designed runs over the same that does not, in"
                " the same run",
                samples=len(rows),
                spread=float(summary.spread),
                interval=(float(summary.low), float(summary.high)),
            )
            factors[number] = value
        return factors

    def by_size(self) -> list[int]:
        """Numbers of the shapes, the largest experts first."""
        return sorted(
            range(len(self._shapes)),
            key=lambda number: -self._shapes[number].max_expert_bytes,
        )


def _overlapped(ops: Operations, column: int) -> int:
    return int((ops.shares[:, column] > _OVERLAPPED).sum())


def _within_runs(groups: np.ndarray, ops: Operations) -> np.ndarray:
    return groups + (ops.runs << _RUN_BITS)


def _shape_number(point: Point) -> int:
    return point.group // len(_SIZE_EDGES)
