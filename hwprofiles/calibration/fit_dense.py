"""Fits dense parts and heads: the rate at which attention reads keys and values, one
roofline through all the rest, and of each a curve over tokens by shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    Resampled,
    clipped_mean,
    fit_plane,
)
from moesim.hwprofiles.calibration.fit_curves import (
    LEAST_SAMPLES,
    Points,
    fit_roofline,
)
from moesim.hwprofiles.calibration.observations import units_of
from moesim.hwprofiles.dense_costs import dense_reference, dense_work
from moesim.hwprofiles.paths import DENSE, HEAD
from moesim.hwprofiles.roofline import flops_per_token

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from moesim.hwprofiles.calibration.fit_curves import Entries
    from moesim.hwprofiles.calibration.fit_operations import OperationFit
    from moesim.hwprofiles.calibration.observations import Spans

_WORK = ["weight_bytes", "kept_bytes", "flops"]
_CELL = ["head", "shape", "tokens"]
"""Dense parts of one cell differ in what attention reads only."""


def fit_dense(spans: Spans, operations: OperationFit, entries: Entries) -> None:
    """Fit dense parts of all runs.

    Args:
        spans: of the runs.
        operations: fits by what dense parts differ after a read.
        entries: where results go.
    """
    parts = _parts_of(spans)
    # Taken out first: the roofline is that of dense parts whose caches are their own.
    _take_out_reads(parts, operations)
    _take_out_attention(parts, entries)

    # A trace may tell nothing of its model's head, which then reads nothing.
    known = parts[parts["weight_bytes"] > 0]
    known = known[known.groupby(_WORK)["seconds"].transform("size") >= LEAST_SAMPLES]
    works = known.groupby(_WORK)
    # Three constants need three points.
    if works.ngroups < 3:
        return
    points = Points(
        known["seconds"].to_numpy(), works.ngroup().to_numpy(), units_of(known)
    )
    weight_bytes, kept_bytes, flops = np.array(list(works.groups)).T
    roof = fit_roofline(weight_bytes + kept_bytes, flops, points)
    entries.put_fit(
        paths.roofline(DENSE), roof, "roofline through dense parts in designed runs"
    )
    entries.fit[DENSE] = roof.report.as_table()

    for name, head in ((DENSE, False), (HEAD, True)):
        references = [dense_reference(shape, head=head) for shape in spans.shapes]
        # By bytes of the dense part, which need not order models as their experts do.
        by_size = sorted(
            range(len(references)), key=lambda number: -references[number].bytes
        )
        for small, number in zip((False, True), by_size, strict=False):
            reference = references[number]
            of = parts[(parts["head"] == head) & (parts["shape"] == number)]
            # A curve needs fewer parts at each size than the roofline, which carries
            # each from its own bytes and FLOPs to the reference's.
            of = of[
                of.groupby("tokens")["seconds"].transform("size") >= LEAST_SAMPLES // 2
            ]
            if of.empty:
                continue
            reference_flops = flops_per_token(reference) * of["tokens"]
            carried = roof.seconds(reference.bytes, reference_flops) / roof.seconds(
                of["weight_bytes"] + of["kept_bytes"], of["flops"]
            )
            entries.put_curve(
                paths.points(name, small=small),
                of["seconds"] * carried,
                of["tokens"],
                "tokens",
                "dense parts of designed runs over the roofline's, times the roofline"
                " of the reference",
                rising=False,
                reference=reference,
            )


def _parts_of(spans: Spans) -> pd.DataFrame:
    """The dense parts and heads of all runs, with their work; ``tokens`` of a head are
    the positions whose output is wanted.
    """
    parts = spans.dense_parts()
    parts = parts.assign(head=parts["layer"] < 0)
    rows: Iterable[Any] = parts.itertuples()
    works = [
        dense_work(
            spans.shapes[row.shape],
            row.tokens,
            int(spans.runs[row.run].context_tokens[row.step]),
            row.sequences,
            head=row.head,
        )
        for row in rows
    ]
    return parts.assign(
        decode=parts["tokens"] == parts["sequences"],
        tokens=parts["tokens"].where(~parts["head"], parts["sequences"]),
        **{name: [float(getattr(work, name)) for work in works] for name in _WORK},
    )


def _take_out_reads(parts: pd.DataFrame, operations: OperationFit) -> None:
    """Enter by what a dense part is slower after a layer step that read from the SSD,
    by shape, and divide it out.
    """
    # Heads have a length of their own, and the first layer follows no layer step.
    later = parts[(parts["layer"] > 0) & (parts["seconds"] > 0)]
    factors = operations.after_read(
        DENSE, later["seconds"], later["after_read"], later, ["run", "tokens", "layer"]
    )
    for number, factor in factors.items():
        slower = parts["after_read"] & (parts["shape"] == number)
        parts.loc[slower, "seconds"] /= factor


def _take_out_attention(parts: pd.DataFrame, entries: Entries) -> None:
    """Enter the rate at which attention reads keys and values, and take its seconds
    out of all parts; as they are where no part shows that rate.

    Only decoded tokens count: a prompt computes with keys more than it reads them.
    """
    decoded = parts[parts["decode"] & ~parts["head"]]
    if decoded.empty:
        return
    kept_bytes, seconds = (
        (
            of - of.groupby([decoded[name] for name in _CELL]).transform(_clipped)
        ).to_numpy()
        for of in (decoded["kept_bytes"], decoded["seconds"])
    )

    def slope(rows: np.ndarray) -> np.ndarray:
        return fit_plane(kept_bytes[rows, None], seconds[rows])

    (per_byte,) = Resampled.of(slope, units_of(decoded), entries.rng).estimates(-np.inf)
    # Contexts of one length, or a slope within its own noise, show no rate.
    if per_byte.interval[0] <= 0.0:
        return
    entries.put(
        paths.ATTENTION_BYTES_PER_S,
        per_byte,
        "dense parts of decoded tokens in designed runs, over their contexts",
        samples=len(seconds),
    )
    parts["seconds"] -= per_byte.value * parts["kept_bytes"]
    parts["kept_bytes"] = 0.0


def _clipped(values: pd.Series) -> float:
    return clipped_mean(values.to_numpy())
