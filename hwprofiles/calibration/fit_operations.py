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
    DRAWS,
    Estimate,
    Units,
    comparable,
    contrast,
    fit_slowdowns,
    interquartile_range,
    interval_of,
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
from moesim.hwprofiles.calibration.observations import LayerStepTimes, Operations
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
        ops = Operations.joined(
            spans.operations(lane_kind, kinds) for spans in self._spans
        )
        if len(ops.seconds) < LEAST_SAMPLES:
            return None

        # Experts of a model have few sizes, so equal bytes are equal work; products are
        # it by experts and by about as many tokens.
        groups = renumbered(ops.sizes)
        if lane_kind in COMPUTE_KINDS:
            size_groups = np.searchsorted(_SIZE_EDGES, ops.sizes, side="right")
            groups = ops.shapes * len(_SIZE_EDGES) + size_groups
        return ops, groups, self._divide_out_contention(lane_kind, ops, groups)

    def products(self, lane_kind: LaneKind, extra_s: float) -> None:
        """Fit expert products: contention, curve over tokens, roofline over shapes,
        distribution.

        Args:
            lane_kind: which compute lane.
            extra_s: by what the next operation begins later here than on the lane that
                is handed work the fastest.
        """
        operations = self.alone(lane_kind)
        if operations is None:
            return
        ops, groups, alone_s = operations

        # The CPU computes from host memory: what was just read may lie in its caches.
        usual = np.ones_like(ops.fresh)
        if lane_kind is CPU:
            usual = ~ops.fresh
        later = usual & ~ops.first & ~ops.late
        usable = later if later.sum() >= LEAST_SAMPLES else np.ones_like(ops.first)

        charged_s = alone_s + extra_s
        points = points_of(charged_s[usable], ops.sizes[usable], groups[usable])
        units = Units(ops.runs[usable] // 2, ops.steps[usable])
        centres = centres_of(points, charged_s[usable], units)
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
                shapes=ops.shapes[not_first],
                runs=ops.runs[not_first] // 2,
                steps=ops.steps[not_first],
            )
        self._roofline(lane_kind, points, centres)
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
                runs=ops.runs[chosen] // 2,
                steps=ops.steps[chosen],
            )
        )

    def _roofline(
        self, lane_kind: LaneKind, points: Sequence[Point], centres: Centres
    ) -> None:
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
            [point.seconds for point in points],
            centres=centres,
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
        operations = self.alone(lane_kind)
        if operations is None:
            return
        ops, groups, alone_s = operations
        alone_s = alone_s + extra_s

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
                shapes=ops.shapes,
                runs=ops.runs // 2,
                steps=ops.steps,
            )

        source = (
            "copies of designed runs through the executor, contention divided out, mean"
        )
        units = Units(ops.runs[usual] // 2, ops.steps[usual])
        self._link(lane_kind, points, centres_of(points, alone_s[usual], units), source)
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

    def _link(
        self,
        lane_kind: LaneKind,
        points: Sequence[Point],
        centres: Centres,
        source: str,
    ) -> None:
        """Enter latency and bandwidth of a link."""
        if len(points) > 1:
            # Groups are numbered by bytes, so points ascend in them.
            samples = {int(point.size): point.seconds for point in points}
            line = fit_line(samples, centres=centres)
            base = line.base_s
            slope = line.slope_s
        else:
            # One size cannot tell latency from bandwidth.
            base = Estimate(0.0, (0.0, 0.0), 0.0)
            only = points[0]
            draws = [centres.redrawn(self._entries.rng)[0] for _ in range(DRAWS)]
            seconds = only.mean_s
            low, high = interval_of(seconds, draws, centres.units)
            slope = Estimate(
                seconds / only.size,
                (low / only.size, high / only.size),
                interquartile_range(only.seconds) / only.size,
            )

        constants = paths.link(lane_kind.name)
        for path, estimate in (
            (constants.latency_s, base),
            (constants.bytes_per_s, inverse(slope)),
        ):
            self._entries.put_estimate(
                path, estimate, samples=centres.samples, source=source
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
        draws = slowed.redrawn(units, runs, self._entries.rng)
        for factor, drawn, column in zip(
            factors.tolist(), draws.T, others, strict=True
        ):
            low, high = interval_of(factor, drawn, units.count)
            self._entries.put(
                paths.contention(lane_kind.name, LANE_KINDS[column].name),
                factor,
                "log duration of designed runs' operations regressed on who else was"
                " busy for which share; what was expected from their start is the"
                " instrument",
                samples=_overlapped(ops, column, told_by),
                spread=interquartile_range(drawn),
                interval=(max(1.0, low), max(1.0, high)),
            )
        return np.asarray(alone_s)

    def after_read(
        self,
        part: str,
        seconds: np.ndarray,
        fresh: np.ndarray,
        groups: np.ndarray,
        shapes: np.ndarray,
        runs: np.ndarray,
        steps: np.ndarray,
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
            runs, steps: int64 [N], the run and forward pass that it belongs to.

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
            units = Units(runs[rows], steps[rows])
            draws = []
            for _ in range(DRAWS):
                redrawn = rows[units.redrawn(self._entries.rng)]
                draws.append(contrast(logs[redrawn], fresh[redrawn], groups[redrawn]))
            low, high = interval_of(value, draws, units.count)
            self._entries.put(
                paths.after_read(part, small=small),
                value,
                "what follows a read in designed runs over the same that does not, in"
                " the same run",
                samples=len(rows),
                spread=interquartile_range(np.array(draws)),
                interval=(max(0.0, low), high),
            )
            factors[number] = value
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


def _within_runs(groups: np.ndarray, ops: Operations) -> np.ndarray:
    return groups + (ops.runs << _RUN_BITS)


def _shape_number(point: Point) -> int:
    return point.group // len(_SIZE_EDGES)
