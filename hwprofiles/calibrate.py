"""From designed runs to costs: what operations take *in place*, beside everything else that a run does.

An operation in a run is slower than the same one alone: others use the memory, the caches are cold, somebody must wake
a thread. So costs are taken from runs: the time of an operation with the slowdown of what overlapped it divided out
(found by regressing the logarithm of its duration on the shares of its time that others were busy), and the gaps that
belong to no operation as terms of their own. Nothing here knows of any run that a prediction will be compared with.

Means, not medians: a run is a sum of operations, and its tail is part of the sum. Both ends are clipped at 10 %.

Source: issue 4's table of terms that mattered, from trials on a machine with two cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hwprofiles.costs import dense_reference, dense_work
from hwprofiles.fit import Estimate, FitReport, Roofline, estimated, fit_line, fit_roofline, inverse, isotonic
from hwprofiles.robust import (
    CLIP,
    around_mean,
    clipped_mean,
    quantiles_around_one,
    resampled,
    slowdown_shares,
)
from hwprofiles.schema import LANE_CLASSES, Curve, Quantity, ReferenceExpert
from hwprofiles.spans import DesignedRun, Gaps, Operations, Spans
from traces.timeline import COMPUTE, FETCH, PREFETCH, READ, REPLACE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from traces.schema import ModelShape

__all__ = ["Calibration", "DesignedRun", "calibrate", "profile_entries"]

LEAST_SAMPLES = 8
"""Operations of one size below which they say nothing on their own."""
LEAST_OVERLAPPED = 40
"""Operations with an overlap of a tenth or more that a slowdown is worth being read from."""
_DRAWS = 40
_CONTEXT_TOKENS = 16
"""Contexts are rounded up to this, so that dense parts of neighbouring steps are one point."""
_SIZE_EDGES = np.unique(np.round(2.0 ** np.arange(0.0, 14.0, 0.25)).astype(np.int64))
_COPIES = {"h2d": (FETCH, PREFETCH, REPLACE), "ssd": (READ,)}


class Calibration(NamedTuple):
    """What the runs said: entries of a hardware profile by dotted path, and residuals."""

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
        Entries for whatever the runs exercised; what they did not is left to the profile they are put into.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("calibration needs at least one run")
    return _Fit(runs, date, seed).result()


class _Fit:
    """The parts of the fit, each filling in entries."""

    def __init__(self, runs: Sequence[DesignedRun], date: str, seed: int) -> None:
        self._date, self._rng = date, np.random.default_rng(seed)
        self._shapes: list[ModelShape] = []
        for run in runs:
            if run.shape not in self._shapes:
                self._shapes.append(run.shape)
        self._spans = [Spans(run, self._shapes.index(run.shape)) for run in runs]
        self._gaps = Gaps()
        for spans in self._spans:
            spans.gaps(self._gaps)
        self._numbers: dict[str, Quantity] = {}
        self._curves: dict[str, Curve] = {}
        self._fit: dict[str, dict[str, float]] = {}
        self._excess_s: dict[str, np.ndarray] = {}

    def result(self) -> Calibration:
        between = {name: np.concatenate(parts) for name, parts in self._gaps.follow.items() if sum(map(len, parts))}
        follow = {name: clipped_mean(gaps) for name, gaps in between.items()}
        per_op_s = min(follow.values(), default=0.0)
        if follow:
            least = min(follow, key=lambda name: follow[name])
            self._put("costs.dispatch.per_op_s", between[least], f"between operations of one worker, {least} lane")
        for lane in ("cpu", "gpu"):
            self._products(lane, follow.get(lane, per_op_s) - per_op_s)
        for lane in _COPIES:
            self._copies(lane, max(0.0, follow.get(lane, per_op_s) - per_op_s))
        self._dispatch()
        self._dense()
        self._planning()
        return Calibration(self._numbers, self._curves, self._fit)

    # -- operations ----------------------------------------------------------------------------------

    def _products(self, lane: str, more_s: float) -> None:
        """Expert products: contention, curve over tokens, roofline over shapes, distribution."""
        ops = Operations.joined(spans.of(lane, (COMPUTE,)) for spans in self._spans)
        if len(ops.seconds) < LEAST_SAMPLES:
            return
        groups = ops.shapes * len(_SIZE_EDGES) + np.searchsorted(_SIZE_EDGES, ops.sizes, side="right")
        alone_s = self._contention(lane, ops, groups)
        cold = ~ops.first & ~ops.fresh
        if cold.sum() >= LEAST_SAMPLES:
            points = _points(alone_s[cold], ops.sizes[cold], groups[cold])
            alone_s = alone_s + self._fresh(lane, ops, _at(points, groups) - alone_s)
        usable = ~ops.first if (~ops.first).sum() >= LEAST_SAMPLES else np.ones_like(ops.first)
        points = _points(alone_s[usable] + more_s, ops.sizes[usable], groups[usable])
        excess_s = alone_s + more_s - _at(points, groups)
        self._excess_s[lane] = excess_s[ops.first & np.isfinite(excess_s)]
        self._roofline(lane, points)
        ratios = (alone_s + more_s)[usable] / _at(points, groups[usable])
        quantiles = quantiles_around_one(ratios[np.isfinite(ratios)])
        by_size = sorted(range(len(self._shapes)), key=lambda number: -self._shapes[number].max_expert_bytes)
        for key, number in zip(("points", "points_small"), by_size, strict=False):
            known = [point for point in points if point.group // len(_SIZE_EDGES) == number]
            if known:
                self._curves[f"costs.{lane}.{key}"] = self._curve(known, self._shapes[number], quantiles)
        self._held_out(lane, alone_s[usable], groups[usable], ops.odd[usable])

    def _fresh(self, lane: str, ops: Operations, shorter_s: np.ndarray) -> np.ndarray:
        """Fit by what products of just copied weights are shorter; return it for each operation, 0 for the others."""
        known = ops.fresh & ~ops.first & np.isfinite(shorter_s)
        if lane != "gpu" or known.sum() < LEAST_SAMPLES:
            return np.zeros(len(ops.seconds))
        moved = np.array([shape.max_expert_bytes for shape in self._shapes], np.float64)[ops.shapes]
        per_byte = resampled(shorter_s[known] / moved[known], self._rng)
        if per_byte.interval[0] <= 0.0:
            return np.zeros(len(ops.seconds))
        rate = inverse(per_byte)
        self._numbers["costs.gpu.fresh_bytes_per_s"] = estimated(
            rate,
            samples=int(known.sum()),
            source="products of weights just copied, against the others",
            date=self._date,
        )
        return np.where(ops.fresh, moved * per_byte.value, 0.0)

    def _curve(self, points: Sequence[_Point], shape: ModelShape, quantiles: tuple[float, ...]) -> Curve:
        return Curve(
            unit="tokens",
            at=tuple(point.size for point in points),
            seconds=tuple(isotonic(np.array([point.mean_s for point in points])).tolist()),
            kind="measured",
            source="products of designed runs through the executor, contention divided out, mean",
            samples=min(len(point.seconds) for point in points),
            spread=tuple(float(np.subtract(*np.quantile(point.seconds, (0.75, 0.25)))) for point in points),
            date=self._date,
            quantiles=quantiles,
            reference=ReferenceExpert(shape.hidden, shape.expert_intermediate, shape.max_expert_bytes, shape.dtype),
        )

    def _roofline(self, lane: str, points: Sequence[_Point]) -> None:
        read, flops = [], []
        for point in points:
            shape = self._shapes[point.group // len(_SIZE_EDGES)]
            read.append(float(shape.max_expert_bytes))
            flops.append(point.size * float(shape.expert_flops_per_token))
        if len(points) < 3:
            return
        roof = fit_roofline(read, flops, [point.around_mean() for point in points])
        samples = sum(len(point.seconds) for point in points)
        self._roof(f"costs.{lane}", roof, samples, "roofline through the means of products by shape and tokens")

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
        points = _points(alone_s, ops.sizes, groups)
        if not points:
            return
        source = "copies of designed runs through the executor, contention divided out, mean"
        samples = sum(len(point.seconds) for point in points)
        if len(points) > 1:
            line = fit_line({int(point.size): point.around_mean() for point in points})
            base, slope = line.base_s, line.slope_s
        else:
            base, slope = Estimate(0.0, (0.0, 0.0), 0.0), resampled(points[0].seconds / points[0].size, self._rng)
        rate = 1.0 / max(slope.value, 1e-24)
        bounds = sorted(1.0 / max(bound, 1e-24) for bound in slope.interval)
        spread = rate * rate * slope.spread
        self._numbers[f"costs.{lane}.latency_s"] = estimated(base, samples=samples, source=source, date=self._date)
        self._numbers[f"costs.{lane}.bytes_per_s"] = estimated(
            Estimate(rate, (min(rate, bounds[0]), max(rate, bounds[1])), spread),
            samples=samples, source=source, date=self._date,
        )  # fmt: skip
        self._curves[f"costs.{lane}.points"] = Curve(
            unit="bytes",
            at=tuple(float(point.size) for point in points),
            seconds=tuple(isotonic(np.array([point.mean_s for point in points])).tolist()),
            kind="measured",
            source=source,
            samples=min(len(point.seconds) for point in points),
            spread=tuple(float(np.subtract(*np.quantile(point.seconds, (0.75, 0.25)))) for point in points),
            date=self._date,
            quantiles=quantiles_around_one((alone_s / _at(points, groups))[np.isfinite(_at(points, groups))]),
        )
        self._held_out(lane, alone_s, groups, ops.odd)

    def _contention(self, lane: str, ops: Operations, groups: np.ndarray) -> np.ndarray:
        """Fit what others cost this class; return the seconds its operations would have taken alone."""
        seen = [
            column for column, name in enumerate(LANE_CLASSES)
            if name not in {lane, "control"} and (ops.shares[:, column] > 0.1).sum() >= LEAST_OVERLAPPED
        ]  # fmt: skip
        if not seen:
            return ops.seconds
        shares = ops.shares[:, seen]
        groups = 4 * groups + 2 * ops.fresh + ops.first  # unlike in time, and unlike in what runs beside them
        lost = slowdown_shares(np.log(ops.seconds), shares, groups)
        draws = []
        for _ in range(_DRAWS):
            rows = self._rng.integers(0, len(groups), len(groups))
            draws.append(slowdown_shares(np.log(ops.seconds[rows]), shares[rows], groups[rows], sweeps=6, start=lost))
        low, quarter, three, high = np.quantile(1.0 / (1.0 - np.array(draws)), (0.025, 0.25, 0.75, 0.975), axis=0)
        for i, column in enumerate(seen):
            factor = float(1.0 / (1.0 - lost[i]))
            self._numbers[f"contention.{lane}.{LANE_CLASSES[column]}"] = Quantity(
                factor, "measured", "log duration of designed runs' operations regressed on overlap shares",
                samples=int((ops.shares[:, column] > 0.1).sum()), spread=float(three[i] - quarter[i]), date=self._date,
                interval=(float(min(factor, low[i])), float(max(factor, high[i]))),
            )  # fmt: skip
        return np.asarray(ops.seconds * (1.0 - shares @ lost))

    # -- what is no operation ------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """First operations, the join, and who is told late: what passes once per layer step."""
        first = {name: np.concatenate(parts) for name, parts in self._gaps.first.items() if sum(map(len, parts))}
        last = {name: np.concatenate(parts) for name, parts in self._gaps.last.items() if sum(map(len, parts))}
        around = np.concatenate(self._gaps.around)
        wait_s = {name: clipped_mean(gaps) for name, gaps in last.items()}
        least_s = min(wait_s.values(), default=0.0)
        if len(around):
            words = "per layer step: dense part to planning, last operation to join, join, to the next dense part"
            self._put("costs.dispatch.join_s", around + least_s, words)
        begin = {
            name: clipped_mean(gaps) + wait_s.get(name, least_s) - least_s
            + (max(0.0, clipped_mean(self._excess_s[name])) if len(self._excess_s.get(name, ())) else 0.0)
            for name, gaps in first.items()
        }  # fmt: skip
        if not begin:
            return
        least = min(begin, key=lambda name: begin[name])
        self._put("costs.dispatch.first_op_s", first[least] + begin[least] - clipped_mean(first[least]),
                  f"from plan to first operation and what it takes longer, {least} lane")  # fmt: skip
        for name in ("cpu", "gpu"):
            more_s = begin.get(name, begin[least]) - begin[least]
            gaps = first.get(name, first[least])
            words = f"by what the first {name} operation begins, takes and is noticed later than the {least} lane's"
            self._put(f"costs.{name}.first_s", gaps - clipped_mean(gaps) + more_s, words)

    def _dense(self) -> None:
        """The dense part: a roofline through head and layers, and of the layers a curve over tokens by shape."""
        seconds: dict[tuple[float, float], list[float]] = {}
        by_tokens: dict[tuple[int, int], list[tuple[float, tuple[float, float]]]] = {}
        for spans in self._spans:
            for one_s, key, tokens, layer in _dense_parts(spans):
                seconds.setdefault(key, []).append(one_s)
                if layer >= 0:
                    by_tokens.setdefault((self._shapes.index(spans.run.shape), tokens), []).append((one_s, key))
        points = {key: np.array(values) for key, values in seconds.items() if len(values) >= LEAST_SAMPLES}
        if len(points) < 3:
            return
        roof = fit_roofline(
            [key[0] for key in points], [key[1] for key in points], [around_mean(values) for values in points.values()]
        )
        self._roof("costs.dense", roof, sum(map(len, points.values())), "roofline through dense parts in designed runs")
        self._fit["dense"] = _plain(roof.report)
        by_size = sorted(range(len(self._shapes)), key=lambda number: -dense_reference(self._shapes[number]).bytes)
        for name, number in zip(("points", "points_small"), by_size, strict=False):
            counts = sorted(t for n, t in by_tokens if n == number and len(by_tokens[n, t]) >= LEAST_SAMPLES // 2)
            if counts:
                reference = dense_reference(self._shapes[number])
                samples = [_at_reference(by_tokens[number, count], roof, reference, count) for count in counts]
                self._curves[f"costs.dense.{name}"] = Curve(
                    unit="tokens",
                    at=tuple(map(float, counts)),
                    seconds=tuple(clipped_mean(one) for one in samples),
                    kind="measured",
                    source="dense parts of designed runs over the roofline's, times the roofline of the reference",
                    samples=min(map(len, samples)),
                    spread=tuple(float(np.subtract(*np.quantile(one, (0.75, 0.25)))) for one in samples),
                    date=self._date,
                    reference=reference,
                )

    def _planning(self) -> None:
        """Planning in place, by policy; the most expensive that was seen stands in for those that were not."""
        found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for spans in self._spans:
            found.setdefault(spans.run.assignment, []).append(spans.planning())
        lines: dict[str, tuple[float, float]] = {}
        for name, parts in found.items():
            active, seconds = (np.concatenate(column) for column in zip(*parts, strict=True))
            lines[name] = _line(active, seconds)
            self._plan_entry(name, lines[name], active, seconds)
        every = [
            np.concatenate(column) for column in zip(*(part for parts in found.values() for part in parts), strict=True)
        ]
        self._plan_entry("default", _line(*every), *every)

    def _plan_entry(self, name: str, line: tuple[float, float], active: np.ndarray, seconds: np.ndarray) -> None:
        base_s, slope_s = line
        ratios = seconds / np.maximum(base_s + slope_s * active, 1e-9)
        spread = float(np.subtract(*np.quantile(seconds, (0.75, 0.25))))
        reach = 1.96 * float(np.std(np.clip(seconds, *np.quantile(seconds, (CLIP, 1 - CLIP))))) / np.sqrt(len(seconds))
        source = "planning of designed runs, line over active experts"
        for key, value, more in (
            ("base_s", base_s, reach),
            ("per_expert_s", slope_s, reach / max(1.0, float(active.mean()))),
        ):
            self._numbers[f"costs.planning.{name}.{key}"] = Quantity(
                value, "measured", source, samples=len(seconds), spread=spread, date=self._date,
                interval=(float(max(0.0, value - more)), float(value + more)),
                quantiles=quantiles_around_one(ratios) if key == "base_s" else (),
            )  # fmt: skip

    # -- helpers -------------------------------------------------------------------------------------

    def _put(self, path: str, seconds: np.ndarray, source: str) -> None:
        """Note the mean of samples, never below zero."""
        found = resampled(seconds, self._rng)
        value = max(0.0, found.value)
        self._numbers[path] = Quantity(
            value, "measured", source, samples=len(seconds), spread=found.spread, date=self._date,
            interval=(min(value, max(0.0, found.interval[0])), max(value, found.interval[1])),
        )  # fmt: skip

    def _held_out(self, lane: str, seconds: np.ndarray, groups: np.ndarray, odd: np.ndarray) -> None:
        """Predict odd steps from even ones."""
        missed = []
        for group in np.unique(groups):
            here, there = seconds[(groups == group) & odd], seconds[(groups == group) & ~odd]
            if min(len(here), len(there)) >= LEAST_SAMPLES:
                missed.append(abs(clipped_mean(there) / clipped_mean(here) - 1.0))
        if missed:
            self._fit[lane] = _plain(
                FitReport(len(seconds), len(missed), float(np.median(missed)), float(np.max(missed)))
            )


class _Point(NamedTuple):
    """Operations of one group: their mean size, their seconds, the clipped mean of those."""

    group: int
    size: float
    seconds: np.ndarray
    mean_s: float

    def around_mean(self) -> np.ndarray:
        """Seconds moved so that their median is the clipped mean."""
        return around_mean(self.seconds)


def _at_reference(
    parts: Sequence[tuple[float, tuple[float, float]]], roof: Roofline, reference: ReferenceExpert, tokens: int
) -> np.ndarray:
    """Seconds of dense parts, each carried by the roofline from its own bytes and FLOPs to the reference's."""

    def seconds(read_bytes: float, flops: float) -> float:
        return roof.overhead_s.value + max(read_bytes / roof.bytes_per_s.value, flops / roof.flops_per_s.value)

    there_s = seconds(reference.bytes, 6.0 * reference.hidden * reference.intermediate * tokens)
    return np.array([one_s * there_s / seconds(*work) for one_s, work in parts])


def _dense_parts(spans: Spans) -> Iterator[tuple[float, tuple[float, float], int, int]]:
    """Seconds, (bytes, FLOPs), tokens and layer of each dense part of a run."""
    run = spans.run
    columns = [
        np.concatenate(parts)
        for parts in zip(
            *((chunk["step"], chunk["tokens"], chunk["sequences"]) for chunk in run.timeline.step_chunks()), strict=True
        )
    ]
    facts = {int(step): (int(tokens), int(count)) for step, tokens, count in zip(*columns, strict=True)}
    for seconds, step, layer in zip(*spans.dense(), strict=True):
        tokens, sequences = facts[int(step)]
        context = -(-int(run.context_tokens[int(step)]) // _CONTEXT_TOKENS) * _CONTEXT_TOKENS
        work = dense_work(run.shape, tokens, context, sequences, head=layer < 0)
        yield float(seconds), work, tokens, int(layer)


def _points(seconds: np.ndarray, sizes: np.ndarray, groups: np.ndarray) -> list[_Point]:
    """Groups with enough operations; where none has, the largest."""
    names, counts = np.unique(groups, return_counts=True)
    chosen = names[counts >= LEAST_SAMPLES] if (counts >= LEAST_SAMPLES).any() else names[[counts.argmax()]]
    found = []
    for group in chosen:
        own = groups == group
        found.append(_Point(int(group), round(float(sizes[own].mean()), 3), seconds[own], clipped_mean(seconds[own])))
    return found


def _at(points: Sequence[_Point], groups: np.ndarray) -> np.ndarray:
    """Mean seconds of each operation's group; NaN where it is no point."""
    table = np.full(int(max(groups.max(initial=0), *(point.group for point in points))) + 1, np.nan)
    for point in points:
        table[point.group] = point.mean_s
    return np.asarray(table[groups])


def _line(active: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Base and slope of mean seconds over active experts, neither negative."""
    clipped = np.clip(seconds, *np.quantile(seconds, (CLIP, 1 - CLIP)))
    centred = active - active.mean()
    below = float(centred @ centred)
    slope = max(0.0, float(centred @ clipped) / below) if below else 0.0
    base = float(clipped.mean()) - slope * float(active.mean())
    if base < 0.0:
        return 0.0, float(clipped.mean() / active.mean())
    return base, slope


def _plain(report: FitReport) -> dict[str, float]:
    return {key: float(value) for key, value in report._asdict().items()}


def profile_entries(found: Calibration, base: Mapping[str, Quantity]) -> dict[str, Quantity]:
    """Numbers of a profile with the calibrated ones put in.

    A contention factor that the design could not see is dropped: an isolated figure would be counted twice.
    """
    kept = {path: quantity for path, quantity in base.items() if not path.startswith("contention.")}
    return {**kept, **found.numbers}
