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

    from moesim.traces.timeline.spans import Timeline

_COLUMNS = ("lane", "kind", "step", "layer", "expert", "start_s", "end_s", "bytes")


def write_perfetto(path: Path | str, timelines: Mapping[str, Timeline]) -> None:
    """Write all spans of named timelines to one JSON file, a chunk at a time.

    Args:
        path: file to make; it appears only when it is whole.
        timelines: name of the process in Perfetto -> timeline.
    """
    with written_beside(path) as part, part.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for process, (name, timeline) in enumerate(timelines.items(), start=1):
            for lines in _events(process, name, timeline):
                file.write(separator + ",\n".join(lines))
                separator = ",\n"
        file.write("\n]}\n")


def _events(process: int, name: str, timeline: Timeline) -> Iterator[list[str]]:
    """Batches of events as JSON: names first, then complete events in microseconds."""
    meta: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": name})]
    for lane, label in enumerate(timeline.lanes):
        meta += [
            ("thread_name", lane, {"name": label}),
            ("thread_sort_index", lane, {"sort_index": lane}),
        ]
    yield [
        json.dumps(
            {"ph": "M", "pid": process, "tid": lane, "name": what, "args": args},
            separators=(",", ":"),
        )
        for what, lane, args in meta
    ]
    for chunk in timeline.chunks():
        rows = zip(*(chunk[column].tolist() for column in _COLUMNS), strict=True)
        yield [
            f'{{"ph":"X","pid":{process},"tid":{lane},'
            f'"name":"{_title(kind, layer, expert)}","cat":"{KIND_NAMES[kind]}",'
            f'"ts":{start_s * 1e6:.3f},"dur":{(end_s - start_s) * 1e6:.3f},'
            f'"args":{{"kind":"{KIND_NAMES[kind]}",'
            f'"step":{step},"layer":{layer},"expert":{expert},"bytes":{nbytes}}}}}'
            for lane, kind, step, layer, expert, start_s, end_s, nbytes in rows
        ]


def _title(kind: int, layer: int, expert: int) -> str:
    return KIND_NAMES[kind] if expert < 0 else f"{KIND_NAMES[kind]} L{layer} E{expert}"
