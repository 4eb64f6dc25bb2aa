"""Timelines as Chrome-trace JSON, which opens in Perfetto: one process per timeline,
one thread per lane.

Simulated and measured runs given together lie one below the other on the same clock.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moesim.traces.files import written_beside
from moesim.traces.timeline.spans import KIND_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from moesim.traces.timeline.spans import Chunk, Timeline

_COLUMNS = ("lane", "kind", "step", "layer", "expert", "start_s", "end_s", "bytes")


def write_perfetto(
    path: Path | str,
    timelines: Mapping[str, Timeline],
) -> None:
    """Write all spans of named timelines to one JSON file, a chunk at a time.

    Args:
        path: file to make; it appears only when it is whole.
        timelines: name of the process in Perfetto -> timeline.
    """
    with written_beside(path) as part, part.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')

        # JSON allows no comma behind the last event.
        separator = ""
        for process, (name, timeline) in enumerate(timelines.items(), start=1):
            for events in _events(process, name, timeline):
                file.write(separator + ",\n".join(events))
                separator = ",\n"

        file.write("\n]}\n")


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
    """Complete events, in microseconds."""
    columns = [chunk[name].tolist() for name in _COLUMNS]
    # Formatted by hand, for a run may have millions of spans.
    return [
        f'{{"ph":"X","pid":{process},"tid":{lane},'
        f'"name":"{_title(kind, layer, expert)}","cat":"{KIND_NAMES[kind]}",'
        f'"ts":{start_s * 1e6:.3f},"dur":{(end_s - start_s) * 1e6:.3f},'
        f'"args":{{"kind":"{KIND_NAMES[kind]}",'
        f'"step":{step},"layer":{layer},"expert":{expert},"bytes":{nbytes}}}}}'
        for lane, kind, step, layer, expert, start_s, end_s, nbytes in zip(
            *columns, strict=True
        )
    ]


def _title(
    kind: int,
    layer: int,
    expert: int,
) -> str:
    return KIND_NAMES[kind] if expert < 0 else f"{KIND_NAMES[kind]} L{layer} E{expert}"
