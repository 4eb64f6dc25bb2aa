"""Fits dense parts and heads: the rate at which attention reads keys and values, one
roofline through all the rest, and of each a curve over tokens by shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    Resampled,
    Units,
    clipped_mean,
    fit_plane,
    interquartile_range,
    inverse,
    renumbered,
)
from moesim.hwprofiles.calibration.fit_curves import (
    LEAST_SAMPLES,
    centres_of,
    fit_roofline,
    points_of,
)
from moesim.hwprofiles.calibration.observations import joined, where
from moesim.hwprofiles.dense_costs import dense_reference, dense_work
from moesim.hwprofiles.paths import DENSE, HEAD
from moesim.hwprofiles.roofline import flops_per_token
from moesim.hwprofiles.schema import Curve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.hwprofiles.calibration.fit_curves import Entries, Roofline
    from moesim.hwprofiles.calibration.fit_operations import OperationFit
    from moesim.hwprofiles.calibration.observations import RunSpans
    from moesim.hwprofiles.schema import ReferenceExpert
    from moesim.traces.format.schema import ModelShape

_RUN_BITS = 40
_TOKEN_BITS = 16
"""Groups of dense parts are numbered by run, tokens and layer, in these bits."""


class _Parts(NamedTuple):
    """Dense parts and heads of all runs: N of them.

    Attributes:
        seconds: float64 [N]; where attention's rate is known, without its seconds.
        weight_bytes, kept_bytes, flops: float64 [N], the work.
        tokens: int64 [N]; of a head, the positions whose output is wanted.
        decode, head, after_read: bool [N].
        shape, layer, run, step: int64 [N].
    """

    seconds: np.ndarray
    weight_bytes: np.ndarray
    kept_bytes: np.ndarray
    flops: np.ndarray
    tokens: np.ndarray
    decode: np.ndarray
    head: np.ndarray
    after_read: np.ndarray
    shape: np.ndarray
    layer: np.ndarray
    run: np.ndarray
    step: np.ndarray

    @property
    def units(self) -> Units:
        """What is resampled as a whole."""
        return Units(self.run, self.step)

    @property
    def cells(self) -> np.ndarray:
        """Number of each part's model, kind and tokens, int64 [N]."""
        keys = np.column_stack((self.head, self.shape, self.tokens))
        return np.unique(keys, axis=0, return_inverse=True)[1].ravel()


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
    parts = joined(_parts_of(spans, shapes) for spans in all_spans)
    # Taken out first: the roofline is that of dense parts whose caches are their own.
    parts = _without_attention(_without_reads(parts, operations), entries)

    # A trace may tell nothing of its model's head, which then reads nothing.
    known = where(parts, parts.weight_bytes > 0)
    works = np.column_stack((known.weight_bytes, known.kept_bytes, known.flops))
    works, groups = np.unique(works, axis=0, return_inverse=True)
    often = np.bincount(groups.ravel()) >= LEAST_SAMPLES
    # Three constants need three points.
    if often.sum() < 3:
        return
    known = where(known, often[groups.ravel()])
    groups = renumbered(groups.ravel()[often[groups.ravel()]])
    points = points_of(known.seconds, groups, groups)
    centres = centres_of(points, known.seconds, known.units)
    roof = fit_roofline(
        works[often, 0] + works[often, 1],
        works[often, 2],
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
            chosen = where(parts, (parts.head == head) & (parts.shape == number))
            curve = _curve(chosen, roof, references[number], entries.date)
            if curve is not None:
                entries.curves[paths.points(name, small=small)] = curve


def _parts_of(spans: RunSpans, shapes: Sequence[ModelShape]) -> _Parts:
    """The dense parts and heads of a run."""
    run = spans.run
    cut = spans.dense_parts()
    count = len(cut.seconds)
    head = cut.layer < 0
    all_tokens = spans.of_steps("tokens")[cut.step]
    sequences = spans.of_steps("sequences")[cut.step]
    works = [
        dense_work(
            run.shape, int(tokens), int(run.context_tokens[step]), int(each), head=of
        )
        for tokens, step, each, of in zip(
            all_tokens, cut.step.tolist(), sequences, head.tolist(), strict=True
        )
    ]
    return _Parts(
        seconds=cut.seconds,
        weight_bytes=np.array([work.weight_bytes for work in works], np.float64),
        kept_bytes=np.array([work.kept_bytes for work in works], np.float64),
        flops=np.array([work.flops for work in works], np.float64),
        tokens=np.where(head, sequences, all_tokens),
        decode=all_tokens == sequences,
        head=head,
        after_read=cut.after_read,
        shape=np.full(count, shapes.index(run.shape)),
        layer=cut.layer,
        run=np.full(count, spans.number),
        step=cut.step,
    )


def _without_reads(parts: _Parts, operations: OperationFit) -> _Parts:
    """Enter by what a dense part is slower after a layer step that read from the SSD,
    by shape, and divide it out.
    """
    # Heads have a length of their own, and the first layer follows no layer step.
    later = where(parts, (parts.layer > 0) & (parts.seconds > 0))
    factors = operations.after_read(
        DENSE,
        later.seconds,
        later.after_read,
        (later.run << _RUN_BITS) + (later.tokens << _TOKEN_BITS) + later.layer,
        shapes=later.shape,
        units_of=(later.run, later.step),
    )
    seconds = parts.seconds.copy()
    for number, factor in factors.items():
        seconds[parts.after_read & (parts.shape == number)] /= factor
    return parts._replace(seconds=seconds)


def _without_attention(parts: _Parts, entries: Entries) -> _Parts:
    """Enter the rate at which attention reads keys and values, and take its seconds
    out of all parts; as they are where no part shows that rate.

    Parts of one model and as many tokens differ in what attention reads only, so their
    slope over those bytes is attention's. Only decoded tokens count: a prompt computes
    with keys more than it reads them.
    """
    decoded = where(parts, parts.decode & ~parts.head)
    if not len(decoded.seconds):
        return parts
    cells = decoded.cells
    kept_bytes = _about_mean(decoded.kept_bytes, cells)
    seconds = _about_mean(decoded.seconds, cells)

    def slope(rows: np.ndarray) -> np.ndarray:
        return fit_plane(kept_bytes[rows, None], seconds[rows])

    (per_byte,) = Resampled.of(slope, decoded.units, entries.rng).estimates(-np.inf)
    # Contexts of one length, or a slope within its own noise, show no rate.
    if per_byte.interval[0] <= 0.0:
        return parts
    entries.put(
        paths.ATTENTION_BYTES_PER_S,
        inverse(per_byte),
        "dense parts of decoded tokens in designed runs, over their contexts",
        samples=len(seconds),
    )
    rest_s = parts.seconds - per_byte.value * parts.kept_bytes
    return parts._replace(seconds=rest_s, kept_bytes=np.zeros_like(rest_s))


def _about_mean(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Differences from the clipped mean of each group, float64 [N]."""
    means = [clipped_mean(values[groups == group]) for group in range(groups.max() + 1)]
    return np.asarray(values - np.array(means)[groups])


def _curve(
    parts: _Parts, roof: Roofline, reference: ReferenceExpert, date: str
) -> Curve | None:
    """A curve over tokens of the dense parts of one shape, each carried by the roofline
    from its own bytes and FLOPs to the reference's; None without parts.
    """

    def roofline_s(read_bytes: Any, flops: Any) -> Any:
        return roof.overhead_s.value + np.maximum(
            read_bytes / roof.bytes_per_s.value, flops / roof.flops_per_s.value
        )

    # Contexts differ among parts of as many tokens, so each has its own denominator.
    reference_flops = float(flops_per_token(reference)) * parts.tokens
    seconds = parts.seconds * roofline_s(reference.bytes, reference_flops)
    seconds /= roofline_s(parts.weight_bytes + parts.kept_bytes, parts.flops)
    tokens, counts = np.unique(parts.tokens, return_counts=True)
    # A curve needs fewer parts at each size than the roofline, which carries them all
    # to one reference.
    at = tokens[counts >= LEAST_SAMPLES // 2]
    samples = [seconds[parts.tokens == each] for each in at]
    if not samples:
        return None
    return Curve(
        unit="tokens",
        at=tuple(map(float, at)),
        seconds=tuple(map(clipped_mean, samples)),
        kind="measured",
        source=(
            "dense parts of designed runs over the roofline's, times the roofline"
            " of the reference"
        ),
        samples=min(map(len, samples)),
        spread=tuple(map(interquartile_range, samples)),
        date=date,
        reference=reference,
    )
