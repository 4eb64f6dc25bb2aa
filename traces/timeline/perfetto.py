"""Timelines as Chrome-trace JSON, which opens in Perfetto: one process per timeline,
one thread per lane.

Above the lanes stand forward passes and MoE layers. An arrow leads from each copy of an
expert to the product that used it; counters show the hits of each pass and what links
carry. Simulated and measured runs given together lie one below the other on the same
clock.
"""

from __future__ import annotations

import gzip
import io
import json
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from moesim.base.files import written_beside
from moesim.traces.timeline.spans import (
    COMPUTE,
    DENSE,
    FETCH,
    HIT,
    KIND_NAMES,
    PHASE_NAMES,
    READ,
)
from moesim.traces.timeline.stalls import consumer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moesim.traces.timeline.spans import Chunk, Timeline

_THREADS = 1000
"""More than a process has."""

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
            for events in filter(None, _events(process, name, timeline)):
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
    """Batches of events as JSON: names first, then the spans of each chunk with their
    arrows and counters, then passes with their hits.
    """
    passes = len(timeline.lanes)
    yield list(_names(process, name, timeline.lanes))

    arrows = _Arrows(process, timeline.lanes)
    layers = _Layers(process, passes + 1)
    links = {
        lane: f"{label} GB/s"
        for lane, label in enumerate(timeline.lanes)
        if label.startswith(("h2d", "d2h", "ssd"))
    }
    for chunk in timeline.chunks():
        events = _spans(process, chunk)
        events += _traffic(process, chunk, links)
        events += arrows.of(chunk)
        events += layers.of(chunk)
        yield events
    yield layers.close(_end_us(timeline))

    shares = _hit_shares(timeline)
    for chunk in timeline.step_chunks():
        yield _passes(process, passes, chunk, shares)


def _names(
    process: int,
    name: str,
    lanes: tuple[str, ...],
) -> Iterator[str]:
    """Events that name the process and its threads: passes and layers, then the lanes
    in their order.
    """
    yield _metadata(process, 0, "process_name", {"name": name})
    # Lanes keep their own numbers; what stands above them comes behind.
    above = {len(lanes): "forward passes", len(lanes) + 1: "MoE layers"}
    threads = above | dict(enumerate(lanes))
    for place, (thread, label) in enumerate(threads.items()):
        yield _metadata(process, thread, "thread_name", {"name": label})
        yield _metadata(process, thread, "thread_sort_index", {"sort_index": place})


def _us(seconds: float) -> float:
    return round(seconds * 1e9) / 1e3


def _slice(
    process: int, thread: int, title: str, start_us: float, end_us: float, args: str
) -> str:
    return (
        f'{{"ph":"X","pid":{process},"tid":{_tid(process, thread)},"name":"{title}",'
        f'"ts":{start_us:.3f},"dur":{end_us - start_us:.3f},"args":{{{args}}}}}'
    )


def _tid(process: int, thread: int) -> int:
    """Number of a thread in Perfetto. Its own 0 is nobody's, and one that equals its
    process would be the main thread.
    """
    return _THREADS * process + thread


def _counter(process: int, name: str, at_us: float, value: float) -> str:
    # Perfetto calls a counter by its name and that of its argument.
    subject, _, unit = name.rpartition(" ")
    return (
        f'{{"ph":"C","pid":{process},"name":"{subject}","ts":{at_us:.3f},'
        f'"args":{{"{unit}":{value:.4g}}}}}'
    )


def _end_us(timeline: Timeline) -> float:
    ends = [chunk["end_s"].max() for chunk in timeline.chunks()]
    return _us(float(max(ends, default=0.0)))


def _traffic(process: int, chunk: Chunk, links: Mapping[int, str]) -> list[str]:
    """Yield counters of what each link carries while it copies."""
    events = []
    columns = (chunk[name].tolist() for name in ("lane", "bytes", "start_s", "end_s"))
    for lane, nbytes, start_s, end_s in zip(*columns, strict=True):
        if lane in links and nbytes and end_s > start_s:
            rate = nbytes / (end_s - start_s) / 1e9
            events.append(_counter(process, links[lane], _us(start_s), rate))
            events.append(_counter(process, links[lane], _us(end_s), 0.0))
    return events


def _hit_shares(timeline: Timeline) -> dict[int, float]:
    """Hits ÷ accesses of each forward pass."""
    chunks = list(timeline.access_chunks())
    if not chunks:
        return {}
    step = np.concatenate([chunk["step"] for chunk in chunks])
    hits = np.concatenate([chunk["state"] == HIT for chunk in chunks])
    steps, number, counts = np.unique(step, return_inverse=True, return_counts=True)
    shares = np.bincount(number, hits) / counts
    return dict(zip(steps.tolist(), shares.tolist(), strict=True))


def _passes(
    process: int, thread: int, chunk: Chunk, shares: Mapping[int, float]
) -> list[str]:
    """Forward passes as spans, and the share of hits in each."""
    events = []
    names = ("step", "phase", "tokens", "sequences", "start_s", "end_s")
    columns = (chunk[name].tolist() for name in names)
    for step, phase, tokens, sequences, start_s, end_s in zip(*columns, strict=True):
        args = f'"step":{step},"tokens":{tokens},"sequences":{sequences}'
        title = f"{PHASE_NAMES[phase]} {step}"
        start_us = _us(start_s)
        events.append(_slice(process, thread, title, start_us, _us(end_s), args))
        if step in shares:
            events.append(_counter(process, "hit rate", start_us, shares[step]))
    return events


class _Layers:
    """MoE layers as spans: each from its dense part to the next one's."""

    def __init__(self, process: int, thread: int) -> None:
        self._process = process
        self._thread = thread
        self._open: tuple[int, int, float] | None = None

    def of(self, chunk: Chunk) -> list[str]:
        """The layers that have ended within a chunk."""
        events: list[str] = []
        rows = np.flatnonzero(chunk["kind"] == DENSE)
        names = ("step", "layer", "start_s")
        columns = (chunk[name][rows].tolist() for name in names)
        for step, layer, start_s in sorted(
            zip(*columns, strict=True), key=lambda row: row[2]
        ):
            if self._open is not None and self._open[:2] == (step, layer):
                continue
            events += self.close(_us(start_s))
            self._open = step, layer, _us(start_s)
        return events

    def close(self, end_us: float) -> list[str]:
        """End the layer that is open, if there is one; heads of passes are none."""
        if self._open is None:
            return []
        step, layer, start_us = self._open
        self._open = None
        if layer < 0 or end_us < start_us:
            return []
        args = f'"step":{step},"layer":{layer}'
        title = f"layer {layer}"
        return [_slice(self._process, self._thread, title, start_us, end_us, args)]


class _Arrows:
    """Flow events from a copy to the first product that used it."""

    def __init__(self, process: int, lanes: tuple[str, ...]) -> None:
        self._process = process
        self._target = {
            lane: lanes.index(target)
            for lane, label in enumerate(lanes)
            if (target := consumer(label)) in lanes
        }
        # By lane, layer and expert: the last copy that nothing has used yet.
        self._landed: dict[tuple[int, int, int], tuple[int, float]] = {}
        self._number = 0

    def of(self, chunk: Chunk) -> list[str]:
        """Arrows to the products of a chunk."""
        events: list[str] = []
        kind = chunk["kind"]
        rows = np.flatnonzero(((kind >= FETCH) & (kind <= READ)) | (kind == COMPUTE))
        rows = rows[np.argsort(chunk["start_s"][rows], kind="stable")]
        names = ("lane", "kind", "layer", "expert", "start_s")
        columns = (chunk[name][rows].tolist() for name in names)
        for lane, code, layer, expert, start_s in zip(*columns, strict=True):
            if code != COMPUTE:
                if lane in self._target:
                    key = self._target[lane], layer, expert
                    self._landed[key] = lane, _us(start_s)
                continue
            copy = self._landed.pop((lane, layer, expert), None)
            if copy is not None:
                self._number += 1
                events += self._arrow(copy, lane, _us(start_s))
        return events

    def _arrow(
        self, copy: tuple[int, float], lane: int, start_us: float
    ) -> tuple[str, str]:
        common = (
            f'"pid":{self._process},"id":{self._process << 32 | self._number},'
            '"cat":"copy","name":"copy"'
        )
        link, copied_us = copy
        source = _tid(self._process, link)
        target = _tid(self._process, lane)
        return (
            f'{{"ph":"s",{common},"tid":{source},"ts":{copied_us:.3f}}}',
            f'{{"ph":"f","bp":"e",{common},"tid":{target},"ts":{start_us:.3f}}}',
        )


def _metadata(
    process: int,
    thread: int,
    name: str,
    arguments: dict[str, Any],
) -> str:
    event = {
        "ph": "M",
        "pid": process,
        "tid": _tid(process, thread),
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
        f'{{"ph":"X","pid":{process},"tid":{_tid(process, lane)},'
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
