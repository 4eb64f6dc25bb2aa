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
from moesim.traces.timeline.spans import FETCH, KIND_NAMES, READ
from moesim.traces.timeline.totals import consumer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd

    from moesim.traces.timeline.spans import Timeline

_THREADS = 1000
"""More than a process has."""

_COPIES = KIND_NAMES[FETCH : READ + 1]

Event = dict[str, Any]


def write_perfetto(
    path: Path | str,
    timelines: Mapping[str, Timeline],
) -> None:
    """Write all spans of named timelines to one JSON file.

    Args:
        path: file to make; it appears only when it is whole. Compressed if its name
            ends in ``.gz``, which Perfetto opens as well.
        timelines: name of the process in Perfetto -> timeline.
    """
    compressed = Path(path).suffix == ".gz"
    with written_beside(path) as part, _text_file(part, compressed=compressed) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        # JSON allows no comma behind the last event.
        separator = "\n"
        encode = json.JSONEncoder(separators=(",", ":")).encode
        for process, (name, timeline) in enumerate(timelines.items(), start=1):
            for event in _Process(process, timeline).events(name):
                file.write(separator + encode(event))
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


class _Process:
    """The events of one timeline."""

    def __init__(self, number: int, timeline: Timeline) -> None:
        self._number = number
        self._timeline = timeline
        # Lanes keep their own numbers; what stands above them comes behind.
        self._lanes = {lane: thread for thread, lane in enumerate(timeline.lanes)}
        self._passes = len(self._lanes)
        self._layers = self._passes + 1

    def events(self, name: str) -> Iterator[Event]:
        """Names first, then spans with their arrows and counters, layers, and passes
        with their hits.
        """
        yield self._event("M", 0, "process_name", args={"name": name})
        above = {"forward passes": self._passes, "MoE layers": self._layers}
        for place, (label, thread) in enumerate((above | self._lanes).items()):
            yield self._event("M", thread, "thread_name", args={"name": label})
            place_of = {"sort_index": place}
            yield self._event("M", thread, "thread_sort_index", args=place_of)

        spans = _in_ns(self._timeline.frame()).sort_values("start_ns", kind="stable")
        yield from self._of_spans(spans)
        yield from self._of_layers(spans)
        yield from self._of_passes()

    def _event(self, form: str, thread: int, name: str, **rest: Any) -> Event:
        # Perfetto's own thread 0 is nobody's, and one that equals its process would be
        # the main thread.
        tid = _THREADS * self._number + thread
        return {"ph": form, "pid": self._number, "tid": tid, "name": name, **rest}

    def _bar(
        self, thread: int, name: str, row: Any, end_ns: int, *fields: str, **more: str
    ) -> Event:
        """A row of a table as a bar, with some of its fields."""
        # Both ends are rounded before they are subtracted. A rounded length would reach
        # into the operation that follows, and Perfetto drops what overlaps.
        start_ns = row.start_ns
        ends = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
        args = {field: getattr(row, field) for field in fields}
        return self._event("X", thread, name, **ends, args=args, **more)

    def _counter(self, subject: str, unit: str, at_ns: int, value: float) -> Event:
        # Perfetto calls a counter by its name and that of its argument.
        level = {unit: float(f"{value:.4g}")}
        return self._event("C", 0, subject, ts=at_ns / 1e3, args=level)

    def _of_spans(self, spans: pd.DataFrame) -> Iterator[Event]:
        """Operations; what links carry while they copy; an arrow from each copy to the
        first product that used it.
        """
        # By lane, layer and expert: the last copy that nothing has used yet.
        landed: dict[tuple[str, int, int], Any] = {}
        arrows = 0
        fields = ("kind", "step", "layer", "expert", "bytes")
        for span in _rows(spans):
            kind = span.kind
            lane = self._lanes[span.lane]
            title = kind if span.expert < 0 else f"{kind} L{span.layer} E{span.expert}"
            yield self._bar(lane, title, span, span.end_ns, *fields, cat=kind)

            if span.bytes and span.end_s > span.start_s:
                rate = span.bytes / (span.end_s - span.start_s) / 1e9
                yield self._counter(span.lane, "GB/s", span.start_ns, rate)
                yield self._counter(span.lane, "GB/s", span.end_ns, 0.0)
            if kind in _COPIES:
                landed[consumer(span.lane), span.layer, span.expert] = span
            elif kind == "compute":
                copy = landed.pop((span.lane, span.layer, span.expert), None)
                if copy:
                    arrows += 1
                    ends = {"cat": "copy", "id": self._number << 32 | arrows}
                    begin = copy.start_ns / 1e3
                    from_lane = self._lanes[copy.lane]
                    yield self._event("s", from_lane, "copy", **ends, ts=begin)
                    ends = {"bp": "e", **ends}
                    yield self._event("f", lane, "copy", **ends, ts=span.start_ns / 1e3)

    def _of_layers(self, spans: pd.DataFrame) -> Iterator[Event]:
        """MoE layers, each from its dense part to the next one's."""
        dense = spans[spans["kind"] == "dense"]
        place = dense[["step", "layer"]]
        begins = dense[(place != place.shift()).any(axis=1)]
        ends_ns = [*begins["start_ns"].iloc[1:].tolist(), spans["end_ns"].max()]
        for span, end_ns in zip(_rows(begins), ends_ns, strict=False):
            # Heads of passes are no layers.
            if span.layer >= 0:
                title = f"layer {span.layer}"
                yield self._bar(self._layers, title, span, end_ns, "step", "layer")

    def _of_passes(self) -> Iterator[Event]:
        """Forward passes, and the share of hits in each."""
        accesses = self._timeline.access_frame()
        shares = (accesses["state"] == "hit").groupby(accesses["step"]).mean()
        for step in _rows(_in_ns(self._timeline.step_frame())):
            fields = ("step", "tokens", "sequences")
            title = f"{step.phase} {step.step}"
            yield self._bar(self._passes, title, step, step.end_ns, *fields)
            if step.step in shares.index:
                share = float(shares[step.step])
                yield self._counter("hit", "rate", step.start_ns, share)


def _rows(frame: pd.DataFrame) -> Iterator[Any]:
    return iter(frame.itertuples(index=False))


def _in_ns(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with their times in whole nanoseconds, too."""
    return rows.assign(
        **{
            f"{end}_ns": np.rint(rows[f"{end}_s"] * 1e9).astype(np.int64)
            for end in ("start", "end")
        }
    )
