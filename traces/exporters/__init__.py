"""Traces for other tools, by layout.

``csv`` is seq, pos, phase, layer, e0 … eK-1, and w0 … wK-1 and token where the trace
has them; it comes back by the importer `columns`. ``moe-cache-profile`` is what
llama.cpp's expert-cache forks take as ``--moe-cache-profile``, and comes back by
`llama_moe_trace`: pos,layer,e0 … eK-1 without a header, layers by the model's own
numbers, dense ones counted; prompts come layer by layer, at negative positions that
count from their end. ``statistics`` is the figures of `trace stats` as Parquet, a row
for each layer. The other two have a module each.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from moesim.base.errors import TraceError
from moesim.base.files import written_beside
from moesim.traces.exporters.moe_cache_slots import export_slots
from moesim.traces.exporters.oracle_general import export_requests
from moesim.traces.format.parquet import named, numbers, write_table
from moesim.traces.format.schema import Phase
from moesim.traces.stats.trace_summary import layer_table, summarise_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from moesim.traces.format.reader import Trace

    Progress = Callable[[int], None]

# Rows written at a time: a sequence may be longer than memory would like as text.
_ROWS = 1 << 18


def export_trace(
    trace: Trace,
    out: Path | str,
    layout: str,
    *,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
    **options: Any,
) -> int:
    """Write a trace in another layout; the file appears only when it is whole.

    Args:
        trace: an opened trace.
        out: the file to make.
        layout: a name from `EXPORTERS`.
        progress: called with the number of records written so far.
        tell: called with what deserves a line.
        options: of `moesim.traces.exporters.moe_cache_slots.export_slots`.

    Returns:
        Records written.

    Raises:
        TraceError: an unknown layout or option, a damaged trace, or sizes that the
            layout cannot hold.
    """
    # A misspelt layout is told before the trace is read.
    export = EXPORTERS.get(layout)
    if export is None:
        raise TraceError(
            f"export layout {layout!r}: unknown; known: {', '.join(EXPORTERS)}"
        )
    if export is export_slots:
        options["tell"] = tell or (lambda _: None)
    elif options:
        name = min(options).replace("_", "-")
        raise TraceError(f"--{name}: layout {layout} takes no such option")
    return int(export(trace, Path(out), progress or (lambda _: None), **options))


def _export_csv(trace: Trace, out: Path, progress: Progress) -> int:
    """Write one line per token and layer, in trace order."""
    return _write_csv(out, _rows(trace), progress, has_header=True)


def _rows(trace: Trace) -> Iterator[dict[str, pa.Array]]:
    labels = [phase.label for phase in Phase]
    optional = [name for name in ("weights", "token") if name in trace.columns]
    for rows in trace.sequences(optional):
        for start in range(0, len(rows.pos), _ROWS):
            part = slice(start, start + _ROWS)
            experts = rows.experts[part]
            columns = {
                "seq": numbers(np.full(len(experts), rows.seq, np.int32)),
                "pos": numbers(rows.pos[part]),
                "phase": named(rows.phase[part], labels).cast("string"),
                "layer": numbers(rows.layer[part]),
            }
            columns |= _numbered("e", experts)
            if "weights" in rows.columns:
                # Arrow writes no 16-bit floats as text.
                weights = rows.columns["weights"][part].astype(np.float32)
                columns |= _numbered("w", weights)
            if "token" in rows.columns:
                columns["token"] = numbers(rows.columns["token"][part])
            yield columns


def _export_profile(trace: Trace, out: Path, progress: Progress) -> int:
    """Write one line per token and layer, sequence after sequence.

    Raises:
        TraceError: generated tokens without a prompt behind a prompt without generated
            tokens, which the layout cannot tell apart.
    """
    return _write_csv(out, _captures(trace), progress, has_header=False)


def _captures(trace: Trace) -> Iterator[dict[str, pa.Array]]:
    layer_numbers = np.array(trace.shape.layer_numbers, np.int32)
    is_open = False  # the sequence before has a prompt alone
    for rows in trace.sequences():
        prompt = int(np.searchsorted(rows.phase, Phase.DECODE))
        if is_open and not prompt:
            raise TraceError(
                f"{trace.path}: sequence {rows.seq}: expected a prompt behind a"
                " sequence without generated tokens, found none; this layout joins both"
            )
        is_open = prompt == len(rows.pos)
        begin = rows.pos[-1] + 1 if is_open else rows.pos[prompt]
        by_layer = np.argsort(rows.layer[:prompt], kind="stable")
        order = np.concatenate((by_layer, np.arange(prompt, len(rows.pos))))
        yield {
            "pos": numbers((rows.pos - begin)[order]),
            "layer": numbers(layer_numbers[rows.layer[order]]),
            **_numbered("e", rows.experts[order]),
        }


def _numbered(name: str, matrix: np.ndarray) -> dict[str, pa.Array]:
    """The columns of a matrix, such as e0, e1, …"""
    return {f"{name}{rank}": numbers(column) for rank, column in enumerate(matrix.T)}


def _write_csv(
    out: Path,
    parts: Iterable[dict[str, pa.Array]],
    progress: Progress,
    *,
    has_header: bool,
) -> int:
    """Write rows as CSV, and return how many."""
    tables = map(pa.table, parts)
    first = next(tables)
    # pyarrow would quote the names of the header.
    plain = csv.WriteOptions(include_header=False, quoting_style="none")
    written = 0
    with written_beside(out) as part, part.open("wb") as file:
        if has_header:
            file.write(",".join(first.column_names).encode() + b"\n")
        with csv.CSVWriter(file, first.schema, write_options=plain) as lines:
            for table in chain((first,), tables):
                lines.write_table(table)
                written += table.num_rows
                progress(written)
    return written


def _export_statistics(trace: Trace, out: Path, progress: Progress) -> int:
    """Write ``layers.parquet`` of `moesim.traces.stats.trace_summary.write_tables`."""
    table = layer_table(trace, summarise_trace(trace))
    write_table(out, table)
    progress(table.num_rows)
    return int(table.num_rows)


EXPORTERS: dict[str, Callable[..., int]] = {
    "csv": _export_csv,
    "moe-cache-profile": _export_profile,
    "moe-cache-slots": export_slots,
    "oracle-general": export_requests,
    "statistics": _export_statistics,
}
"""Layouts by name."""
