"""Gives the experts of one layer bit-widths of their own.

Traces are recorded with one width per layer; systems such as EdgeMoE store the experts
of one layer at several. Here widths are dealt out, by a stated rule, or read from a
table; the header says which. A width counts bits per weight, scales included: an expert
of ``3 H F`` weights has ``3 H F x bits / 8`` bytes. Routing stays as it was recorded.

Letters: L layers, E experts, H hidden, F expert intermediate, W widths.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.errors import TraceError
from moesim.base.inputs import quoted, read_text
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.writer import TraceWriter
from moesim.traces.stats.statistics import expert_uses
from moesim.traces.synthetic.marks import WIDTHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.format.schema import ModelShape

RANDOM = "random"
POPULARITY = "popularity"
_MOST_BITS = 64.0


@dataclass(frozen=True, slots=True)
class WidenedTrace:
    """The trace that `set_widths` wrote.

    Attributes:
        path: of the trace.
        rows: written.
        shape: the model, with sizes by expert.
        bits: float64 [L, E].
        mark: what its header says of them.
    """

    path: Path
    rows: int
    shape: ModelShape
    bits: np.ndarray
    mark: dict[str, Any]


def set_widths(
    source: Trace | Path | str,
    target: Path | str,
    *,
    bits: Sequence[float] = (),
    shares: Sequence[float] | None = None,
    by: str = RANDOM,
    table: Path | str | None = None,
    seed: int = 0,
) -> WidenedTrace:
    """Write a trace whose experts have widths of their own, and say so in its header.

    Args:
        source: a trace.
        target: the trace to write; it appears when it is complete.
        bits: W widths, for the first experts of each layer's ranking first.
        shares: of each layer's experts, for each width; None for equal ones. What does
            not divide evenly goes to the largest remainders.
        by: who ranks first in a layer: ``random``, or ``popularity`` (used most often
            in this trace; ties to the lower id).
        table: instead of all that: a CSV file with the columns layer, expert, bits.
        seed: of ``random``.

    Raises:
        TraceError: widths or shares that no model can have, neither or both of `bits`
            and `table`, or a file that does not name every expert once.
    """
    trace = source if isinstance(source, Trace) else open_trace(source)
    shape = trace.shape
    if (table is None) == (not bits):
        raise TraceError("widths: expected either bits or a table of them")
    mark: dict[str, Any]
    if table is not None:
        width = _read(Path(table), shape)
        mark = {"table": str(table)}
    else:
        counts, given = _counts(bits, shares, shape.experts)
        score = _score(trace, by, seed)
        ranked = np.argsort(-score, axis=1, kind="stable")
        width = np.empty(ranked.shape)
        np.put_along_axis(width, ranked, np.repeat(bits, counts)[None, :], axis=1)
        mark = {"bits": list(bits), "shares": given, "by": by}
        if by == RANDOM:
            mark["seed"] = seed

    widened = shape.with_bytes_by_expert(_sizes(width, shape))
    header = replace(
        trace.header, shape=widened, provenance=trace.header.provenance | {WIDTHS: mark}
    )
    columns = sorted(trace.columns)
    with TraceWriter(target, header, columns) as writer:
        for rows in trace.sequences(columns):
            writer.write(**rows.arrays())
    return WidenedTrace(writer.path, writer.rows, widened, width, mark)


def _sizes(bits: np.ndarray, shape: ModelShape) -> list[list[int]]:
    """Bytes of every expert, [L][E].

    Raises:
        TraceError: a width out of 0..64.
    """
    if not ((bits > 0) & (bits <= _MOST_BITS)).all():
        raise TraceError(
            f"widths: expected 0 < bits <= {_MOST_BITS:g} per weight, got"
            f" {bits.min():g}..{bits.max():g}"
        )
    weights = 3 * shape.hidden * shape.expert_intermediate
    sizes: list[list[int]] = (
        np.maximum(1, np.rint(weights * bits / 8)).astype(np.int64).tolist()
    )
    return sizes


def _counts(
    bits: Sequence[float], shares: Sequence[float] | None, experts: int
) -> tuple[np.ndarray, list[float]]:
    """Count the experts of a layer that get each width, int64 [W], and return the
    shares.

    Raises:
        TraceError: as many shares as widths are not given, or they are no shares.
    """
    given = [1 / len(bits)] * len(bits) if shares is None else list(shares)
    if len(given) != len(bits):
        raise TraceError(
            f"widths: expected one share for each of {len(bits)} widths, got"
            f" {len(given)}"
        )
    if min(given) < 0 or abs(sum(given) - 1) > 1e-6:
        listed = ",".join(f"{share:g}" for share in given)
        raise TraceError(f"widths: expected shares that add up to 1, got {listed}")

    wanted = np.array(given) * experts
    # A share of 0.3 of ten experts are three, whatever binary numbers say.
    counts = np.floor(wanted + 1e-9).astype(np.int64)
    remainder = counts - wanted
    order = np.argsort(remainder, kind="stable")
    counts[order[: experts - int(counts.sum())]] += 1
    return counts, given


def _score(trace: Trace, by: str, seed: int) -> np.ndarray:
    """Who ranks first in each layer, float64 [L, E], highest first."""
    shape = trace.shape
    if by == RANDOM:
        return np.random.default_rng(seed).random((shape.layers, shape.experts))
    if by != POPULARITY:
        raise TraceError(f"widths: by: expected {RANDOM} or {POPULARITY}, got {by!r}")
    uses = np.zeros((shape.layers, shape.experts), np.int64)
    for rows in trace.sequences():
        uses += expert_uses(rows.layer, rows.experts, shape)
    return uses


def _read(path: Path, shape: ModelShape) -> np.ndarray:
    """Read the width of every expert from a CSV file, float64 [L, E].

    Raises:
        TraceError: it cannot be read, or does not name every expert once.
    """
    names = ["layer", "expert", "bits"]
    try:
        table = pd.read_csv(io.StringIO(read_text(path)), index_col=False)[names]
        table = table.apply(pd.to_numeric)
    except (OSError, ValueError, KeyError) as error:
        reason = quoted(str(error).splitlines()[0])
        raise TraceError(
            f"{path}: expected numbers in the columns {','.join(names)}: {reason}"
        ) from None

    size = (shape.layers, shape.experts)
    widths = table.set_index(names[:2])["bits"]
    every = pd.MultiIndex.from_product([range(count) for count in size])
    wrong = [
        *widths.index[widths.index.duplicated()],
        *every.symmetric_difference(widths.index),
    ]
    if wrong:
        raise TraceError(
            f"{path}: expected each of {size[0]} x {size[1]} experts once; layer and"
            f" expert {','.join(map(str, wrong[0]))} is missing, unknown or there twice"
        )
    return widths.reindex(every).to_numpy(np.float64).reshape(size)
