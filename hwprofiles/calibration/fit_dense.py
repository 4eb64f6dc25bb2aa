"""Fits dense parts and heads: the rate at which attention reads keys and values, one
roofline through all the rest, and of each a curve over tokens by shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    DRAWS,
    Estimate,
    Units,
    clipped_mean,
    fit_plane,
    interquartile_range,
    interval_of,
    inverse,
)
from moesim.hwprofiles.calibration.fit_curves import (
    LEAST_SAMPLES,
    centres_of,
    fit_roofline,
    points_of,
)
from moesim.hwprofiles.dense_costs import DenseWork, dense_reference, dense_work
from moesim.hwprofiles.paths import DENSE, HEAD
from moesim.hwprofiles.roofline import flops_per_token
from moesim.hwprofiles.schema import Curve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moesim.hwprofiles.calibration.fit_curves import Entries, Roofline
    from moesim.hwprofiles.calibration.fit_operations import OperationFit
    from moesim.hwprofiles.calibration.observations import RunSpans
    from moesim.hwprofiles.schema import ReferenceExpert
    from moesim.traces.format.schema import ModelShape

_RUN_BITS = 40
_TOKEN_BITS = 16
"""Groups of dense parts are numbered by run, tokens and layer, in these bits."""


@dataclass(frozen=True, slots=True)
class _DensePart:
    """One dense part or head; a head's tokens are the positions whose output is
    wanted. Where attention's rate is known, its seconds are taken out.
    """

    seconds: float
    work: DenseWork
    tokens: int
    decode: bool
    head: bool
    run: int
    step: int


class _CurveKey(NamedTuple):
    head: bool
    shape_number: int
    tokens: int


def fit_dense(
    all_spans: Sequence[RunSpans],
    shapes: Sequence[ModelShape],
    operations: OperationFit,
    entries: Entries,
) -> None:
    """Fit dense parts of all runs.

    Args:
        all_spans: the runs.
        shapes: of their models.
        operations: fits by what dense parts differ after a read.
        entries: where results go.
    """
    by_tokens: dict[_CurveKey, list[_DensePart]] = {}
    # Taken out first: the roofline is that of dense parts whose caches are their own.
    factors = _after_read(all_spans, shapes, operations)
    for spans in all_spans:
        shape_number = shapes.index(spans.run.shape)
        for part in _dense_parts(spans, factors.get(shape_number, 1.0)):
            key = _CurveKey(part.head, shape_number, part.tokens)
            by_tokens.setdefault(key, []).append(part)
    by_tokens = _without_attention(by_tokens, entries)

    by_work: dict[DenseWork, list[_DensePart]] = {}
    for members in by_tokens.values():
        for part in members:
            by_work.setdefault(part.work, []).append(part)
    # A trace may tell nothing of its model's head, which then reads nothing.
    works = [
        work
        for work, members in by_work.items()
        if len(members) >= LEAST_SAMPLES and work.weight_bytes > 0
    ]
    # Three constants need three points.
    if len(works) < 3:
        return
    parts_of_works = [part for work in works for part in by_work[work]]
    seconds = np.array([part.seconds for part in parts_of_works])
    counts = [len(by_work[work]) for work in works]
    groups = np.repeat(np.arange(len(works)), counts)
    points = points_of(seconds, groups, groups)
    units = Units(
        np.array([part.run for part in parts_of_works]),
        np.array([part.step for part in parts_of_works]),
    )
    centres = centres_of(points, seconds, units)
    roof = fit_roofline(
        [work.weight_bytes + work.kept_bytes for work in works],
        [work.flops for work in works],
        [point.seconds for point in points],
        centres=centres,
    )
    entries.put_roofline(
        DENSE,
        roof,
        samples=centres.samples,
        source="roofline through dense parts in designed runs",
    )
    entries.fit[DENSE] = roof.report.as_table()

    for name, head in ((DENSE, False), (HEAD, True)):
        references = [dense_reference(shape, head=head) for shape in shapes]
        # By bytes of the dense part, which need not order models as their experts do.
        by_size = sorted(
            range(len(references)), key=lambda number: -references[number].bytes
        )
        for small, number in zip((False, True), by_size, strict=False):
            # A curve needs fewer parts at each size than the roofline, which carries
            # them all to one reference.
            parts = {
                key.tokens: members
                for key, members in sorted(by_tokens.items(), key=lambda item: item[0])
                if key.head == head
                and key.shape_number == number
                and len(members) >= LEAST_SAMPLES // 2
            }
            if parts:
                path = paths.points(name, small=small)
                entries.curves[path] = _curve(
                    parts, roof, references[number], entries.date
                )


def _after_read(
    all_spans: Sequence[RunSpans],
    shapes: Sequence[ModelShape],
    operations: OperationFit,
) -> dict[int, float]:
    """By what the dense part is slower after a layer step that read from the SSD, by
    number of shape.
    """
    seconds = []
    after_read = []
    groups = []
    shape_numbers = []
    runs = []
    steps = []
    for number, spans in enumerate(all_spans):
        parts = spans.dense_parts()
        # Heads have a length of their own, and the first layer follows no layer step.
        chosen = (parts.layer > 0) & (parts.seconds > 0)
        tokens = spans.of_steps("tokens")[parts.step]
        group = (number << _RUN_BITS) + (tokens << _TOKEN_BITS) + parts.layer
        seconds.append(parts.seconds[chosen])
        after_read.append(parts.after_read[chosen])
        groups.append(group[chosen])
        shape_number = shapes.index(spans.run.shape)
        shape_numbers.append(np.full(int(chosen.sum()), shape_number))
        runs.append(np.full(int(chosen.sum()), number))
        steps.append(parts.step[chosen])

    return operations.after_read(
        DENSE,
        np.concatenate(seconds),
        np.concatenate(after_read),
        np.concatenate(groups),
        shapes=np.concatenate(shape_numbers),
        runs=np.concatenate(runs),
        steps=np.concatenate(steps),
    )


def _dense_parts(spans: RunSpans, after_read: float) -> Iterator[_DensePart]:
    """Yield the dense parts and heads of a run; where the layer before read from the
    SSD, seconds are divided by `after_read`.
    """
    run = spans.run
    tokens_of = spans.of_steps("tokens")
    sequences_of = spans.of_steps("sequences")
    parts = spans.dense_parts()
    for seconds, step, layer, follows_read in zip(*parts, strict=True):
        tokens = int(tokens_of[step])
        sequences = int(sequences_of[step])
        context = int(run.context_tokens[int(step)])
        head = bool(layer < 0)
        yield _DensePart(
            seconds=float(seconds) / (after_read if follows_read else 1.0),
            work=dense_work(run.shape, tokens, context, sequences, head=head),
            tokens=sequences if head else tokens,
            decode=tokens == sequences,
            head=head,
            run=spans.number,
            step=int(step),
        )


def _without_attention(
    by_tokens: dict[_CurveKey, list[_DensePart]], entries: Entries
) -> dict[_CurveKey, list[_DensePart]]:
    """Enter the rate at which attention reads keys and values, and take its seconds
    out of all parts; as they are where no part shows that rate.

    Parts of one model and as many tokens differ in what attention reads only, so their
    slope over those bytes is attention's. Only decoded tokens count: a prompt computes
    with keys more than it reads them.
    """
    decoded = [
        members
        for key, members in by_tokens.items()
        if not key.head and members[0].decode
    ]
    if not decoded:
        return by_tokens
    parts = [part for members in decoded for part in members]
    kept_bytes = np.concatenate(
        [_about_mean([part.work.kept_bytes for part in members]) for members in decoded]
    )
    seconds = np.concatenate(
        [_about_mean([part.seconds for part in members]) for members in decoded]
    )

    def slope_of(rows: np.ndarray) -> float:
        return float(fit_plane(kept_bytes[rows, None], seconds[rows])[0])

    units = Units(
        np.array([part.run for part in parts]), np.array([part.step for part in parts])
    )
    slope = slope_of(np.arange(len(parts)))
    draws = [slope_of(units.redrawn(entries.rng)) for _ in range(DRAWS)]
    low, high = interval_of(slope, draws, units.count)
    # Contexts of one length, or a slope within its own noise, show no rate.
    if low <= 0.0:
        return by_tokens

    per_byte = Estimate(slope, (low, high), interquartile_range(np.array(draws)))
    entries.put_estimate(
        paths.ATTENTION_BYTES_PER_S,
        inverse(per_byte),
        samples=len(parts),
        source="dense parts of decoded tokens in designed runs, over their contexts",
    )

    def rest(part: _DensePart) -> _DensePart:
        attention_s = slope * part.work.kept_bytes
        work = part.work._replace(kept_bytes=0.0)
        return replace(part, work=work, seconds=part.seconds - attention_s)

    return {key: [rest(part) for part in members] for key, members in by_tokens.items()}


def _about_mean(values: Sequence[float]) -> np.ndarray:
    """Differences from the clipped mean, float64 [N]."""
    array = np.array(values)
    return array - clipped_mean(array)


def _curve(
    parts: Mapping[int, list[_DensePart]],
    roof: Roofline,
    reference: ReferenceExpert,
    date: str,
) -> Curve:
    """Make a curve over tokens of the dense parts of one shape."""
    samples = [
        _at_reference(members, roof, reference, tokens)
        for tokens, members in parts.items()
    ]
    return Curve(
        unit="tokens",
        at=tuple(map(float, parts)),
        seconds=tuple(clipped_mean(seconds) for seconds in samples),
        kind="measured",
        source=(
            "dense parts of designed runs over the roofline's, times the roofline"
            " of the reference"
        ),
        samples=min(map(len, samples)),
        spread=tuple(interquartile_range(seconds) for seconds in samples),
        date=date,
        reference=reference,
    )


def _at_reference(
    parts: Sequence[_DensePart],
    roof: Roofline,
    reference: ReferenceExpert,
    tokens: int,
) -> np.ndarray:
    """Seconds of dense parts, each carried by the roofline from its own bytes and FLOPs
    to the reference's.
    """

    def roofline_s(read_bytes: float, flops: float) -> float:
        return roof.overhead_s.value + max(
            read_bytes / roof.bytes_per_s.value, flops / roof.flops_per_s.value
        )

    reference_flops = float(flops_per_token(reference)) * tokens
    reference_s = roofline_s(reference.bytes, reference_flops)
    # Contexts differ among parts of as many tokens, so each has its own denominator.
    seconds = []
    for part in parts:
        read_bytes = part.work.weight_bytes + part.work.kept_bytes
        part_s = roofline_s(read_bytes, part.work.flops)
        seconds.append(part.seconds * reference_s / part_s)
    return np.array(seconds)
