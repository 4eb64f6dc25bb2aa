"""Timelines as Chrome-trace JSON, which opens in Perfetto: one process per timeline,
one thread per lane.

Simulated and measured runs given together lie one below the other on the same clock.
"""

from __future__ import annotations

import gzip
import io
import json
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from moesim.traces.files import written_beside
from moesim.traces.timeline.spans import KIND_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moesim.traces.timeline.spans import Chunk, Timeline

_COLUMNS = ("lane", "kind", "step", "layer", "expert", "bytes")


def write_perfetto(
    path: Path | str,
    timelines: Mapping[str, Timeline],
) -> None:
    """Write all spans of named timelines to one JSON file, a chunk at a time.

    Args:
        path: file to make; it appears only when it is whole. Compressed if its name
            ends in ``.gz``, which Perfetto opens as well.
        timelines: name of the process in Perfetto -> timeline.
    """
    compressed = Path(path).suffix == ".gz"
    with written_beside(path) as part, _text_file(part, compressed=compressed) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')

        # JSON allows no comma behind the last event.
        separator = ""
        for process, (name, timeline) in enumerate(timelines.items(), start=1):
            for events in _events(process, name, timeline):
                file.write(separator + ",\n".join(events))
                separator = ",\n"

        file.write("\n]}\n")


@contextmanager
def _text_file(path: Path, *, compressed: bool) -> Iterator[IO[str]]:
    """A file for text, the same bytes every time."""
    if not compressed:
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    with (
        path.open("wb") as raw,
        # No name and no time in the header, for they differ from run to run.
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8") as file,
    ):
        yield file


def _events(
    process: int,
    name: str,
    timeline: Timeline,
) -> Iterator[list[str]]:
    """Batches of events as JSON: names first, then the spans of each chunk."""
    yield list(_names(process, name, timeline.lanes))

    for chunk in timeline.chunks():
        yield _spans(process, chunk)


def _names(
    process: int,
    name: str,
    lanes: tuple[str, ...],
) -> Iterator[str]:
    """Events that name the process and its threads, in the order of the lanes."""
    yield _metadata(process, 0, "process_name", {"name": name})
    # The index keeps the lanes in their own order.
    for lane, label in enumerate(lanes):
        yield _metadata(process, lane, "thread_name", {"name": label})
        yield _metadata(process, lane, "thread_sort_index", {"sort_index": lane})


def _metadata(
    process: int,
    thread: int,
    name: str,
    arguments: dict[str, Any],
) -> str:
    event = {
        "ph": "M",
        "pid": process,
        "tid": thread,
        "name": name,
        "args": arguments,
    }
    return json.dumps(event, separators=(",", ":"))


def _spans(
    process: int,
    chunk: Chunk,
) -> list[str]:
    """Complete events, in microseconds with three decimals."""
    columns = [chunk[name].tolist() for name in _COLUMNS]
    # Both ends are rounded before they are subtracted. A rounded length would reach
    # into the operation that follows, and Perfetto drops what overlaps.
    starts_ns, ends_ns = (
        np.rint(chunk[name] * 1e9).astype(np.int64) for name in ("start_s", "end_s")
    )
    columns += [(starts_ns / 1e3).tolist(), ((ends_ns - starts_ns) / 1e3).tolist()]
    # Formatted by hand, for a run may have millions of spans.
    return [
        f'{{"ph":"X","pid":{process},"tid":{lane},'
        f'"name":"{_title(kind, layer, expert)}","cat":"{KIND_NAMES[kind]}",'
        f'"ts":{start_us:.3f},"dur":{length_us:.3f},'
        f'"args":{{"kind":"{KIND_NAMES[kind]}",'
        f'"step":{step},"layer":{layer},"expert":{expert},"bytes":{nbytes}}}}}'
        for lane, kind, step, layer, expert, nbytes, start_us, length_us in zip(
            *columns, strict=True
        )
    ]


def _title(
    kind: int,
    layer: int,
    expert: int,
) -> str:
    return KIND_NAMES[kind] if expert < 0 else f"{KIND_NAMES[kind]} L{layer} E{expert}"
