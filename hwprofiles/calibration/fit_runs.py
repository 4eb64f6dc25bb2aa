"""From designed runs to costs: what operations take *in place*, beside everything else
that a run does.

An operation in a run is slower than the same one alone: others use the memory, the
caches are cold, somebody must wake a thread. So costs are taken from runs: the time of
an operation with the slowdown of what overlapped it divided out (found by regressing
the logarithm of its duration on the shares of its time that others were busy), and the
gaps that belong to no operation as terms of their own. Nothing here knows of any run
that a prediction will be compared with.

Means, not medians: a run is a sum of operations, and its tail is part of the sum. Both
ends are clipped at 10 %.

Source: issue 4's table of terms that mattered, from trials on a machine with two cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from moesim.hwprofiles.calibration.fit_curves import (
    Estimate,
    FitReport,
    Roofline,
    estimated,
    fit_line,
    fit_roofline,
    isotonic,
)
from moesim.hwprofiles.calibration.observations import (
    DesignedRun,
    Gaps,
    Operations,
    Rows,
    Spans,
)
from moesim.hwprofiles.calibration.points import (
    LEAST_SAMPLES,
    Point,
    points_of,
    seconds_of,
)
from moesim.hwprofiles.calibration.robust import (
    around_mean,
    clipped_mean,
    comparable,
    contrast,
    plane,
    quantiles_around_one,
    resampled,
    slowdown_shares,
)
from moesim.hwprofiles.costs import dense_reference, dense_work
from moesim.hwprofiles.schema import LANE_CLASSES, Curve, Quantity, ReferenceExpert
from moesim.traces.timeline.spans import COMPUTE, FETCH, PREFETCH, READ, REPLACE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moesim.traces.format.schema import ModelShape

__all__ = ["Calibration", "DesignedRun", "calibrate"]

LEAST_OVERLAPPED = 40
"""Operations with an overlap of a tenth or more that a slowdown is worth being read
from.
"""
_DRAWS = 40
_CONTEXT_TOKENS = 16
"""Contexts are rounded up to this, so that dense parts of neighbouring steps are one
point.
"""
_SIZE_EDGES = np.unique(np.round(2.0 ** np.arange(0.0, 14.0, 0.25)).astype(np.int64))
_COPIES = {"h2d": (FETCH, PREFETCH, REPLACE), "ssd": (READ,)}


class Calibration(NamedTuple):
    """What the runs said: entries of a hardware profile by dotted path, and
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
    return _Fit(runs, date, seed).result()


class _Fit:
    """The parts of the fit, each filling in entries."""

    def __init__(self, runs: Sequence[DesignedRun], date: str, seed: int) -> None:
        self._date = date
        self._rng = np.random.default_rng(seed)
        self._shapes: list[ModelShape] = []
        for run in runs:
            if run.shape not in self._shapes:
                self._shapes.append(run.shape)
        self._spans = [
            Spans(run, self._shapes.index(run.shape), number)
            for number, run in enumerate(runs)
        ]
        self._gaps = Gaps()
        for spans in self._spans:
            spans.gaps(self._gaps)
        self._numbers: dict[str, Quantity] = {}
        self._curves: dict[str, Curve] = {}
        self._fit: dict[str, dict[str, float]] = {}
        self._excess: list[Rows] = []

    def result(self) -> Calibration:
        between = {
            name: np.concatenate(parts)
            for name, parts in self._gaps.follow.items()
            if sum(map(len, parts))
        }
        follow = {name: clipped_mean(gaps) for name, gaps in between.items()}
        per_op_s = min(follow.values(), default=0.0)
        if follow:
            least = min(follow, key=lambda name: follow[name])
            self._put(
                "costs.dispatch.per_op_s",
                between[least],
                f"between operations of one worker, {least} lane",
            )
        for lane in ("cpu", "gpu"):
            self._products(lane, follow.get(lane, per_op_s) - per_op_s)
        for lane in _COPIES:
            self._copies(lane, max(0.0, follow.get(lane, per_op_s) - per_op_s))
        self._dispatch()
        self._dense()
        self._planning()
        return Calibration(self._numbers, self._curves, self._fit)

    # -- operations --------------------------------------------------------------------

    def _products(self, lane: str, more_s: float) -> None:
        """Expert products: contention, curve over tokens, roofline over shapes,
        distribution.
        """
        ops = Operations.joined(spans.of(lane, (COMPUTE,)) for spans in self._spans)
        if len(ops.seconds) < LEAST_SAMPLES:
            return
        groups = ops.shapes * len(_SIZE_EDGES) + np.searchsorted(
            _SIZE_EDGES, ops.sizes, side="right"
        )
        alone_s = self._contention(lane, ops, groups)
        # Others do not read what was just read.
        usual = ~ops.fresh if lane == "cpu" else np.ones_like(ops.fresh)
        usable = (
            usual & ~ops.first
            if (usual & ~ops.first).sum() >= LEAST_SAMPLES
            else np.ones_like(ops.first)
        )
        points = points_of(alone_s[usable] + more_s, ops.sizes[usable], groups[usable])
        excess_s = alone_s + more_s - seconds_of(points, groups)
        known = ops.first & usual & np.isfinite(excess_s)
        group = np.full(int(known.sum()), LANE_CLASSES.index(lane))
        tiered = np.zeros(int(known.sum()))
        self._excess.append(
            Rows(excess_s[known], ops.active[known], ops.copies[known], tiered, group)
        )
        if lane == "cpu":
            later = ~ops.first
            self._after_read(
                lane,
                alone_s[later],
                ops.fresh[later],
                (groups + (ops.runs << 20))[later],
                ops.shapes[later],
            )
        self._roofline(lane, points)
        ratios = (alone_s + more_s)[usable] / seconds_of(points, groups[usable])
        quantiles = quantiles_around_one(ratios[np.isfinite(ratios)])
        for key, number in zip(
            ("points", "points_small"), self._by_size(), strict=False
        ):
            own = [
                point for point in points if point.group // len(_SIZE_EDGES) == number
            ]
            if own:
                self._curves[f"costs.{lane}.{key}"] = self._curve(
                    own, self._shapes[number], quantiles
                )
        self._held_out(lane, alone_s[usable], groups[usable], ops.odd[usable])

    def _after_read(
        self,
        part: str,
        seconds: np.ndarray,
        after: np.ndarray,
        groups: np.ndarray,
        shapes: np.ndarray,
    ) -> dict[int, float]:
        """Note by what operations differ that follow a read from the SSD from those of
        the same group that do not.

        Groups lie within runs, so that what the machine did meanwhile hits both alike.

        Returns:
            The factor by number of shape; none where too few can be compared.
        """
        found = {}
        for key, number in zip(
            ("after_read", "after_read_small"), self._by_size(), strict=False
        ):
            rows = np.flatnonzero(shapes == number)
            rows = rows[comparable(after[rows], groups[rows])]
            if after[rows].sum() < LEAST_OVERLAPPED:
                continue
            logs = np.log(seconds)
            value = contrast(logs[rows], after[rows], groups[rows])
            drawn = (self._rng.choice(rows, len(rows)) for _ in range(_DRAWS))
            draws = [contrast(logs[some], after[some], groups[some]) for some in drawn]
            low, quarter, three, high = np.quantile(draws, (0.025, 0.25, 0.75, 0.975))
            self._numbers[f"costs.{part}.{key}"] = Quantity(
                value,
                "measured",
                "what follows a read in designed runs over the same that does not, in"
                " the same run",
                samples=len(rows),
                spread=float(three - quarter),
                date=self._date,
                interval=(float(min(value, low)), float(max(value, high))),
            )
            found[number] = value
        return found

    def _by_size(self) -> list[int]:
        """Numbers of the shapes, the largest experts first."""
        return sorted(
            range(len(self._shapes)),
            key=lambda number: -self._shapes[number].max_expert_bytes,
        )

    def _curve(
        self, points: Sequence[Point], shape: ModelShape, quantiles: tuple[float, ...]
    ) -> Curve:
        return Curve(
            unit="tokens",
            at=tuple(point.size for point in points),
            seconds=tuple(
                isotonic(np.array([point.mean_s for point in points])).tolist()
            ),
            kind="measured",
            source=(
                "products of designed runs through the executor, contention divided"
                " out, mean"
            ),
            samples=min(len(point.seconds) for point in points),
            spread=tuple(
                float(np.subtract(*np.quantile(point.seconds, (0.75, 0.25))))
                for point in points
            ),
            date=self._date,
            quantiles=quantiles,
            reference=ReferenceExpert(
                shape.hidden,
                shape.expert_intermediate,
                shape.max_expert_bytes,
                shape.dtype,
            ),
        )

    def _roofline(self, lane: str, points: Sequence[Point]) -> None:
        read = []
        flops = []
        for point in points:
            shape = self._shapes[point.group // len(_SIZE_EDGES)]
            read.append(float(shape.max_expert_bytes))
            flops.append(point.size * float(shape.expert_flops_per_token))
        if len(points) < 3:
            return
        roof = fit_roofline(read, flops, [point.around_mean() for point in points])
        samples = sum(len(point.seconds) for point in points)
        self._roof(
            f"costs.{lane}",
            roof,
            samples,
            "roofline through the means of products by shape and tokens",
        )

    def _roof(self, table: str, roof: Roofline, samples: int, source: str) -> None:
        for key in ("overhead_s", "bytes_per_s", "flops_per_s"):
            self._numbers[f"{table}.{key}"] = estimated(
                getattr(roof, key), samples=samples, source=source, date=self._date
            )

    def _copies(self, lane: str, more_s: float) -> None:
        """Copies or reads: contention, seconds by bytes, distribution."""
        ops = Operations.joined(spans.of(lane, _COPIES[lane]) for spans in self._spans)
        if len(ops.seconds) < LEAST_SAMPLES:
            return
        _, groups = np.unique(ops.sizes, return_inverse=True)
        alone_s = self._contention(lane, ops, groups) + more_s
        usual = (
            ~ops.fresh
            if lane != "ssd" and not ops.fresh.all()
            else np.ones_like(ops.fresh)
        )
        points = points_of(alone_s[usual], ops.sizes[usual], groups[usual])
        if not points:
            return
        if lane == "h2d":
            self._after_read(
                lane, alone_s, ops.fresh, groups + (ops.runs << 20), ops.shapes
            )
        source = (
            "copies of designed runs through the executor, contention divided out, mean"
        )
        samples = sum(len(point.seconds) for point in points)
        if len(points) > 1:
            line = fit_line({int(point.size): point.around_mean() for point in points})
            base = line.base_s
            slope = line.slope_s
        else:
            base = Estimate(0.0, (0.0, 0.0), 0.0)
            slope = resampled(points[0].seconds / points[0].size, self._rng)
        rate = 1.0 / max(slope.value, 1e-24)
        bounds = sorted(1.0 / max(bound, 1e-24) for bound in slope.interval)
        spread = rate * rate * slope.spread
        self._numbers[f"costs.{lane}.latency_s"] = estimated(
            base, samples=samples, source=source, date=self._date
        )
        self._numbers[f"costs.{lane}.bytes_per_s"] = estimated(
            Estimate(rate, (min(rate, bounds[0]), max(rate, bounds[1])), spread),
            samples=samples,
            source=source,
            date=self._date,
        )
        self._curves[f"costs.{lane}.points"] = Curve(
            unit="bytes",
            at=tuple(float(point.size) for point in points),
            seconds=tuple(
                isotonic(np.array([point.mean_s for point in points])).tolist()
            ),
            kind="measured",
            source=source,
            samples=min(len(point.seconds) for point in points),
            spread=tuple(
                float(np.subtract(*np.quantile(point.seconds, (0.75, 0.25))))
                for point in points
            ),
            date=self._date,
            quantiles=quantiles_around_one(
                (alone_s / seconds_of(points, groups))[
                    usual & np.isfinite(seconds_of(points, groups))
                ]
            ),
        )
        self._held_out(lane, alone_s[usual], groups[usual], ops.odd[usual])

    def _contention(self, lane: str, ops: Operations, groups: np.ndarray) -> np.ndarray:
        """Fit what others cost this class; return the seconds its operations would have
        taken alone.
        """
        seen = [
            column
            for column, name in enumerate(LANE_CLASSES)
            if name not in {lane, "control"}
            and (ops.shares[:, column] > 0.1).sum() >= LEAST_OVERLAPPED
        ]
        if not seen:
            return ops.seconds
        shares = ops.shares[:, seen]
        # Unlike in time, and unlike in what runs beside them.
        groups = 4 * groups + 2 * ops.fresh + ops.first
        lost = slowdown_shares(np.log(ops.seconds), shares, groups)
        draws = []
        for _ in range(_DRAWS):
            rows = self._rng.integers(0, len(groups), len(groups))
            draws.append(
                slowdown_shares(
                    np.log(ops.seconds[rows]),
                    shares[rows],
                    groups[rows],
                    sweeps=6,
                    start=lost,
                )
            )
        low, quarter, three, high = np.quantile(
            1.0 / (1.0 - np.array(draws)), (0.025, 0.25, 0.75, 0.975), axis=0
        )
        for i, column in enumerate(seen):
            factor = float(1.0 / (1.0 - lost[i]))
            self._numbers[f"contention.{lane}.{LANE_CLASSES[column]}"] = Quantity(
                factor,
                "measured",
                "log duration of designed runs' operations regressed on overlap shares",
                samples=int((ops.shares[:, column] > 0.1).sum()),
                spread=float(three[i] - quarter[i]),
                date=self._date,
                interval=(float(min(factor, low[i])), float(max(factor, high[i]))),
            )
        return np.asarray(ops.seconds * (1.0 - shares @ lost))

    # -- what is no operation ----------------------------------------------------------

    def _dispatch(self) -> None:
        """First operations, the join, and who is told late: what passes once per layer
        step.
        """
        if not self._gaps.first:
            return
        first = Rows.joined(self._gaps.first)
        join = Rows.joined(self._gaps.join)
        tables = [first, *([Rows.joined(self._excess)] if self._excess else [])]
        words = (
            "from plan to first operation and what it takes longer, by active experts"
            " and copies"
        )
        late_s = self._planes("costs.dispatch.first_op", tables, words)
        words = (
            "per layer step: from dense part to planning, last operation to join, join,"
            " to the next dense part"
        )
        told_s = self._planes("costs.dispatch.join", [join], words)
        for name in ("cpu", "gpu"):
            group = LANE_CLASSES.index(name)
            if group in late_s:
                gaps = first.seconds[first.group == group]
                words = (
                    f"by what the first {name} operation begins, takes and is noticed"
                    " later than the other lane's"
                )
                later_s = late_s[group] + told_s.get(group, 0.0)
                self._put(
                    f"costs.{name}.first_s", gaps - clipped_mean(gaps) + later_s, words
                )
        if sum(map(len, self._gaps.read)) >= LEAST_SAMPLES:
            words = "from plan to the first read of a layer step"
            self._put("costs.ssd.first_s", np.concatenate(self._gaps.read), words)

    def _planes(
        self, path: str, tables: Sequence[Rows], words: str
    ) -> dict[int, float]:
        """Note ``{path}_s``, ``..._per_expert_s`` and ``..._per_copy_s``; return by
        lane class what it takes beyond.
        """
        keys = tuple(
            f"{path}{what}_s" for what in ("", "_per_expert", "_per_copy", "_with_ssd")
        )
        bases_s = self._plane(keys, tables, words)
        return {
            group: base_s - min(bases_s.values()) for group, base_s in bases_s.items()
        }

    def _plane(
        self, keys: Sequence[str], tables: Sequence[Rows], words: str
    ) -> dict[int, float]:
        """Note base, slopes by active experts and copies, and what the SSD tier adds;
        intervals are resampled.

        Tables are summed. The SSD's part is left out where no run had one.

        Returns:
            The base by group, of which the least is noted.
        """
        groups = np.unique(np.concatenate([rows.group for rows in tables]))

        def fitted(rows: Rows) -> np.ndarray:
            return plane(_columns(rows, groups), rows.seconds)

        found = np.sum([fitted(rows) for rows in tables], axis=0)
        drawn = [
            np.sum(
                [
                    fitted(
                        rows.where(
                            self._rng.integers(0, len(rows.group), len(rows.group))
                        )
                    )
                    for rows in tables
                ],
                0,
            )
            for _ in range(_DRAWS)
        ]
        rows = tables[0]
        ratios = rows.seconds / np.maximum(_columns(rows, groups) @ found, 1e-9)
        spread = float(np.subtract(*np.quantile(rows.seconds, (0.75, 0.25))))
        bounds = np.quantile([_least(draw) for draw in drawn], (0.025, 0.975), axis=0).T
        if not any(rows.tiered.any() for rows in tables):
            keys = keys[:-1]
        for number, (key, value, (low, high)) in enumerate(
            zip(keys, _least(found), bounds, strict=False)
        ):
            self._numbers[key] = Quantity(
                value,
                "measured",
                words,
                samples=len(rows.seconds),
                spread=spread,
                date=self._date,
                interval=(float(min(value, low)), float(max(value, high))),
                quantiles=(
                    () if number or not ratios.any() else quantiles_around_one(ratios)
                ),
            )
        return dict(zip(groups.tolist(), found[:-3].tolist(), strict=True))

    def _dense(self) -> None:
        """The dense part: a roofline through head and layers, and of each a curve over
        tokens by shape.
        """
        seconds: dict[tuple[float, float], list[float]] = {}
        by_tokens: dict[
            tuple[bool, int, int], list[tuple[float, tuple[float, float]]]
        ] = {}
        after = self._dense_after_read()
        for spans in self._spans:
            for one_s, key, tokens, head in _dense_parts(
                spans, after.get(self._shapes.index(spans.run.shape), 1.0)
            ):
                seconds.setdefault(key, []).append(one_s)
                by_tokens.setdefault(
                    (head, self._shapes.index(spans.run.shape), tokens), []
                ).append((one_s, key))
        points = {
            key: np.array(values)
            for key, values in seconds.items()
            if len(values) >= LEAST_SAMPLES
        }
        if len(points) < 3:
            return
        roof = fit_roofline(
            [key[0] for key in points],
            [key[1] for key in points],
            [around_mean(values) for values in points.values()],
        )
        self._roof(
            "costs.dense",
            roof,
            sum(map(len, points.values())),
            "roofline through dense parts in designed runs",
        )
        self._fit["dense"] = _plain(roof.report)
        for part, head in (("dense", False), ("head", True)):
            references = [dense_reference(shape, head=head) for shape in self._shapes]
            by_size = sorted(
                range(len(references)), key=lambda number: -references[number].bytes
            )
            for name, number in zip(("points", "points_small"), by_size, strict=False):
                parts = {
                    tokens: values
                    for (kind, shape, tokens), values in sorted(by_tokens.items())
                    if kind == head
                    and shape == number
                    and len(values) >= LEAST_SAMPLES // 2
                }
                if parts:
                    self._curves[f"costs.{part}.{name}"] = self._dense_curve(
                        parts, roof, references[number]
                    )

    def _dense_after_read(self) -> dict[int, float]:
        """By what the dense part is slower after a layer step that read from the SSD,
        by number of shape.
        """
        parts = []
        for number, spans in enumerate(self._spans):
            seconds, step, layer, read = spans.dense()
            kept = (layer > 0) & (seconds > 0)
            groups = ((number << 40) + (spans.of_steps("tokens")[step] << 16) + layer)[
                kept
            ]
            parts.append(
                (
                    seconds[kept],
                    read[kept],
                    groups,
                    np.full(len(groups), self._shapes.index(spans.run.shape)),
                )
            )
        return self._after_read(
            "dense", *(np.concatenate(columns) for columns in zip(*parts, strict=True))
        )

    def _dense_curve(
        self,
        parts: Mapping[int, list[tuple[float, tuple[float, float]]]],
        roof: Roofline,
        reference: ReferenceExpert,
    ) -> Curve:
        samples = [
            _at_reference(values, roof, reference, tokens)
            for tokens, values in parts.items()
        ]
        return Curve(
            unit="tokens",
            at=tuple(map(float, parts)),
            seconds=tuple(clipped_mean(one) for one in samples),
            kind="measured",
            source=(
                "dense parts of designed runs over the roofline's, times the roofline"
                " of the reference"
            ),
            samples=min(map(len, samples)),
            spread=tuple(
                float(np.subtract(*np.quantile(one, (0.75, 0.25)))) for one in samples
            ),
            date=self._date,
            reference=reference,
        )

    def _planning(self) -> None:
        """Planning in place, by policy; all together stand in for those that were not
        seen.
        """
        found: dict[str, list[Rows]] = {}
        for spans in self._spans:
            found.setdefault(spans.run.assignment, []).append(spans.planning())
        every = Rows.joined(rows for parts in found.values() for rows in parts)
        for name, rows in (
            *((name, Rows.joined(parts)) for name, parts in found.items()),
            ("default", every),
        ):
            keys = [
                f"costs.planning.{name}.{key}_s"
                for key in ("base", "per_expert", "per_copy", "with_ssd")
            ]
            self._plane(
                keys, [rows], "planning of designed runs, by active experts and copies"
            )

    # -- helpers -----------------------------------------------------------------------

    def _put(self, path: str, seconds: np.ndarray, source: str) -> None:
        """Note the mean of samples, never below zero."""
        found = resampled(seconds, self._rng)
        value = max(0.0, found.value)
        self._numbers[path] = Quantity(
            value,
            "measured",
            source,
            samples=len(seconds),
            spread=found.spread,
            date=self._date,
            interval=(
                min(value, max(0.0, found.interval[0])),
                max(value, found.interval[1]),
            ),
        )

    def _held_out(
        self, lane: str, seconds: np.ndarray, groups: np.ndarray, odd: np.ndarray
    ) -> None:
        """Predict odd steps from even ones."""
        missed = []
        for group in np.unique(groups):
            here = seconds[(groups == group) & odd]
            there = seconds[(groups == group) & ~odd]
            if min(len(here), len(there)) >= LEAST_SAMPLES:
                missed.append(abs(clipped_mean(there) / clipped_mean(here) - 1.0))
        if missed:
            self._fit[lane] = _plain(
                FitReport(
                    len(seconds),
                    len(missed),
                    float(np.median(missed)),
                    float(np.max(missed)),
                )
            )


def _at_reference(
    parts: Sequence[tuple[float, tuple[float, float]]],
    roof: Roofline,
    reference: ReferenceExpert,
    tokens: int,
) -> np.ndarray:
    """Seconds of dense parts, each carried by the roofline from its own bytes and FLOPs
    to the reference's.
    """

    def seconds(read_bytes: float, flops: float) -> float:
        return roof.overhead_s.value + max(
            read_bytes / roof.bytes_per_s.value, flops / roof.flops_per_s.value
        )

    there_s = seconds(
        reference.bytes, 6.0 * reference.hidden * reference.intermediate * tokens
    )
    return np.array([one_s * there_s / seconds(*work) for one_s, work in parts])


def _dense_parts(
    spans: Spans, after: float
) -> Iterator[tuple[float, tuple[float, float], int, bool]]:
    """Seconds, (bytes, FLOPs), tokens and whether it is the head of each dense part;
    the head's tokens are logits.

    Where the layer before read from the SSD, seconds are divided by `after`.
    """
    run = spans.run
    tokens_of = spans.of_steps("tokens")
    sequences_of = spans.of_steps("sequences")
    for seconds, step, layer, read in zip(*spans.dense(), strict=True):
        tokens = int(tokens_of[step])
        sequences = int(sequences_of[step])
        context = (
            -(-int(run.context_tokens[int(step)]) // _CONTEXT_TOKENS) * _CONTEXT_TOKENS
        )
        head = layer < 0
        work = dense_work(run.shape, tokens, context, sequences, head=head)
        yield (
            float(seconds) / (after if read else 1.0),
            work,
            sequences if head else tokens,
            bool(head),
        )


def _columns(rows: Rows, groups: np.ndarray) -> np.ndarray:
    """A column of ones by group, then active experts, copies, and the SSD tier, float64
    [N, groups + 3].
    """
    own = (rows.group[:, None] == groups).astype(np.float64)
    return np.column_stack((own, rows.active, rows.copies, rows.tiered))


def _least(plane_: np.ndarray) -> tuple[float, float, float, float]:
    """Least base, and the three slopes."""
    return (
        float(plane_[:-3].min()),
        float(plane_[-3]),
        float(plane_[-2]),
        float(plane_[-1]),
    )


def _plain(report: FitReport) -> dict[str, float]:
    return {key: float(value) for key, value in report._asdict().items()}
