"""A recording in progress: every finished group of sequences is a trace of its own.

A recording that is killed loses the group at work and nothing else. The folder
``OUT.parts`` holds one segment per finished group, and the header of each says what is
being recorded. At the end the segments are merged into one file in their order, and the
folder goes; since rows and header are the same, so are the bytes, however often the
recording was stopped.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from moesim.base.errors import TraceError
from moesim.base.files import open_own, remove_leftovers, try_lock
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.traces.format.reader import Trace

_LOCK_NAME: Final = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A finished recording: how many sequences of how many that were planned, tokens
    and rows.

    `seconds_s` and `tokens_per_s` are of the session that finished it and include
    writing, 0 where it only merged; `resumed` sequences were there already.
    """

    path: Path
    sequences: int
    planned: int
    prompt_tokens: int
    decode_tokens: int
    rows: int
    header: TraceHeader
    seconds_s: float = 0.0
    tokens_per_s: float = 0.0
    resumed: int = 0


def parts_dir(out: Path | str) -> Path:
    """Where the segments of a recording lie until it is complete: the trace's name with
    ``.parts`` behind it.
    """
    out = Path(out)
    return out.with_name(out.name + ".parts")


def unfinished(out: Path | str) -> int | None:
    """Count the sequences of an unfinished recording; None where there is none."""
    return _count(_finished(parts_dir(out))) or None


def finish(out: Path | str) -> Recording:
    """Make a trace of what an unfinished recording has, and end it. Its header says how
    many sequences were planned.

    Raises:
        TraceError: no unfinished recording, or it is still at work.
    """
    folder = parts_dir(out)
    segments = _finished(folder)
    if not segments:
        raise TraceError(
            f"{out}: expected an unfinished recording in {folder.name}, found none"
        )
    with Segments(out, segments[0].header, segments[0].columns) as recording:
        return recording.merge()


class Segments:
    """The segments of one recording; use as a context manager. Whatever ends the block,
    finished segments stay.

    Args:
        out: the trace to be.
        header: of the complete recording; it says how many ``sequences`` are planned,
            and how many make a segment (``batch``). Where a recording goes on, the
            first one's is kept (it has the date).
        columns: optional columns.

    Attributes:
        done: sequences that lie in segments.

    Raises:
        TraceError: the unfinished recording is another one (the first difference is
            named), or is at work.
    """

    def __init__(
        self, out: Path | str, header: TraceHeader, columns: Iterable[str]
    ) -> None:
        self.out = Path(out)
        self.header = header
        self.columns = tuple(columns)
        self.done = 0
        self._folder = parts_dir(out)

    def __enter__(self) -> Self:
        """Take the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = open_own(self._folder / _LOCK_NAME, os.O_WRONLY)
        self._lock = os.fdopen(lock, "w", encoding="utf-8")
        try:
            self._check_alone()
            self._begin()
        except BaseException:
            with suppress(OSError):
                self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave what is finished; leave nothing where nothing is."""
        if not self.done:
            shutil.rmtree(self._folder, ignore_errors=True)
        # Last, so that no other recording takes a folder that is being removed.
        with suppress(OSError):
            self._lock.close()

    def write(self, sequences: list[dict[str, Any]]) -> None:
        """Write the next sequences as one segment: rows by name, as `TraceWriter.write`
        takes them.
        """
        path = self._folder / f"{self.done:09d}.parquet"
        with TraceWriter(path, self.header, self.columns) as writer:
            for number, rows in enumerate(sequences):
                writer.write(seq=self.done + number, **rows)
        self.done += len(sequences)

    def merge(self) -> Recording:
        """Copy all segments into the trace, one sequence at a time, and remove them.

        Raises:
            TraceError: there is none, or one is damaged.
        """
        planned = int(self.header.provenance["sequences"])
        if not self.done:
            raise TraceError(f"{self.out}: expected a finished sequence, found none")
        # A shorter trace says so: it is not the recording that was asked for.
        header = self.header
        if self.done < planned:
            shorter = {"sequences": self.done, "asked_sequences": planned}
            header = replace(header, provenance=header.provenance | shorter)

        rows, prompt_rows = self._copy_rows(header)
        # From its first on, so that a kill in between leaves nothing to resume.
        self._remove_segments()
        shutil.rmtree(self._folder)

        # A token has one row per MoE layer.
        tokens = rows // header.shape.layers
        prompt_tokens = prompt_rows // header.shape.layers
        return Recording(
            path=self.out,
            sequences=self.done,
            planned=planned,
            prompt_tokens=prompt_tokens,
            decode_tokens=tokens - prompt_tokens,
            rows=rows,
            header=header,
        )

    def _check_alone(self) -> None:
        """Take the folder's lock, or refuse."""
        if try_lock(self._lock.fileno()) is False:
            raise TraceError(
                f"{self.out}: another recording is at work in {self._folder.name};"
                " wait for it"
            )

    def _begin(self) -> None:
        """Go on, or begin anew."""
        segments = _finished(self._folder)
        if segments:
            self._check_same(segments[0])
            self.header = segments[0].header
            self.done = _count(segments)
            return

        self._remove_segments()
        remove_leftovers(self._folder, older_s=0)

    def _remove_segments(self) -> None:
        for path in sorted(self._folder.glob("*.parquet*")):
            path.unlink()

    def _copy_rows(self, header: TraceHeader) -> tuple[int, int]:
        """Write the trace; return its rows, and how many of them are prefill."""
        prompt_rows = 0
        with TraceWriter(self.out, header, self.columns) as writer:
            for segment in _finished(self._folder):
                for rows in segment.sequences(self.columns):
                    writer.write(**rows.arrays())
                    prompt_rows += int(np.count_nonzero(rows.phase == Phase.PREFILL))
        return writer.rows, prompt_rows

    def _check_same(self, recorded: Trace) -> None:
        """Compare what was recorded so far with what is to be recorded now."""
        before = _facts(recorded.header, recorded.columns)
        now = _facts(self.header, self.columns)
        # Another model changes nearly every fact: name it first.
        names = sorted(
            before.keys() | now.keys(), key=lambda name: (name != "model", name)
        )
        for name in names:
            if before.get(name) != now.get(name):
                raise TraceError(
                    f"{self.out}: {name}: expected {before.get(name)!r} as in"
                    f" the unfinished recording, got {now.get(name)!r}; use the same"
                    f" model, prompts and options, or remove {self._folder.name}"
                )


def _facts(header: TraceHeader, columns: Iterable[str]) -> dict[str, Any]:
    """Return what two recordings of the same thing have in common: everything but the
    date.
    """
    facts = json.loads(header.to_json())
    provenance = facts.pop("provenance")
    provenance.pop("date", None)
    return facts | provenance | {"columns": ", ".join(sorted(columns))}


def _finished(folder: Path) -> list[Trace]:
    """The leading segments that are complete; what a crash of the machine tore is done
    again.

    Raises:
        TraceError: they are no segments of a recording.
    """
    segments: list[Trace] = []
    batch = 0
    for path in sorted(folder.glob("*.parquet")):
        try:
            segment = open_trace(path)
        except TraceError:
            break
        if not segments:
            batch = min(_number(segment, name) for name in ("batch", "sequences"))
        first = segments[0] if segments else segment
        is_next = path.stem == f"{len(segments) * batch:09d}"
        if not is_next or segment.header != first.header:
            break
        segments.append(segment)
    return segments


def _number(segment: Trace, name: str) -> int:
    """A fact of the recording that a segment belongs to."""
    number = segment.header.provenance.get(name)
    if not (isinstance(number, int) and number > 0):
        raise TraceError(
            f"{segment.path}: header: provenance.{name}: expected a number above 0,"
            f" found {number!r}; remove {segment.path.parent.name}"
        )
    return number


def _count(segments: list[Trace]) -> int:
    """Sequences of complete segments: the last one may be smaller."""
    if not segments:
        return 0
    first = segments[0]
    return min(len(segments) * _number(first, "batch"), _number(first, "sequences"))
