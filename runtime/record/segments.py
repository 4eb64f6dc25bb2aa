"""A recording in progress: finished sequences lie beside the trace to be, each group of
them a whole small trace.

Whoever pulls the plug loses the group at work and nothing else. The folder
``OUT.parts`` holds a journal, which says what is being recorded (the trace's header),
and one segment per finished group. At the end the segments are poured into one file in
their order, and the folder goes; since rows and header are the same, so are the bytes,
however often the recording was stopped.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
from moesim.traces.errors import TraceError
from moesim.traces.files import written_beside
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

_JOURNAL: Final = "journal.json"
_LOCK: Final = "lock"


class Merged(NamedTuple):
    """A trace made of segments: how many sequences of how many asked for, tokens and
    rows.
    """

    path: Path
    sequences: int
    asked: int
    prompt_tokens: int
    decode_tokens: int
    rows: int
    header: TraceHeader


def parts_dir(out: Path | str) -> Path:
    """Where the segments of a recording lie until it is whole: the trace's name with
    ``.parts`` behind it.
    """
    out = Path(out)
    return out.with_name(out.name + ".parts")


def unfinished(out: Path | str) -> int | None:
    """How many sequences an unfinished recording holds; None where there is none."""
    folder = parts_dir(out)
    if not (folder / _JOURNAL).is_file():
        return None
    header, columns, batch = _read_journal(folder)
    return _count(folder, header, columns, batch)


def finish(out: Path | str) -> Merged:
    """Make a trace of what an unfinished recording has, and end it. Its header says how
    many sequences were asked for.

    Raises:
        TraceError: no unfinished recording, not one finished sequence in it, or it is
            still at work.
    """
    out, folder = Path(out), parts_dir(out)
    if not (folder / _JOURNAL).is_file():
        raise TraceError(
            f"{out}: expected an unfinished recording in {folder.name}, found none"
        )
    header, columns, batch = _read_journal(folder)
    with Segments(out, header, columns, batch, resume=True) as segments:
        return segments.merge()


class Segments:
    """The segments of one recording; use as a context manager. Whatever ends the block,
    finished segments stay.

    Args:
        out: the trace to be.
        header: of the whole recording. Where a recording goes on, the first one's is
            kept (it has the date).
        columns: optional columns.
        batch: sequences per segment.
        resume: go on where there is something to go on with; else begin anew.

    Attributes:
        done: sequences that lie in segments.

    Raises:
        TraceError: the unfinished recording is another one (the first difference is
            named), or is at work.
    """

    def __init__(
        self,
        out: Path | str,
        header: TraceHeader,
        columns: Iterable[str],
        batch: int,
        *,
        resume: bool,
    ) -> None:
        self.out = Path(out)
        self.header = header
        self.columns = tuple(columns)
        self.batch = batch
        self.done = 0
        self._folder = parts_dir(out)
        self._resume = resume

    def __enter__(self) -> Self:
        """Take the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self._folder / _LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise TraceError(
                f"{self.out}: another recording is at work in {self._folder.name}; wait"
                " for it"
            ) from None
        try:
            self._begin()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave what is finished; leave nothing where nothing is."""
        if not self.done:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _begin(self) -> None:
        """Go on, or begin anew."""
        if self._resume and (self._folder / _JOURNAL).is_file():
            header, columns, batch = _read_journal(self._folder)
            self._check_same(header, columns)
            self.header = header
            self.done = _count(self._folder, header, columns, batch)
            return
        (self._folder / _JOURNAL).unlink(missing_ok=True)
        for path in self._folder.glob("*.parquet*"):
            path.unlink()
        journal = {
            "header": self.header.to_json(),
            "columns": self.columns,
            "batch": self.batch,
        }
        with written_beside(self._folder / _JOURNAL) as part:
            part.write_text(json.dumps(journal), encoding="utf-8")

    def write(self, sequences: list[dict[str, Any]]) -> None:
        """Write the next sequences as one segment: rows by name, as `TraceWriter.write`
        takes them.
        """
        with TraceWriter(
            _segment(self._folder, self.done), self.header, self.columns
        ) as writer:
            for one, rows in enumerate(sequences):
                writer.write(seq=self.done + one, **rows)
        self.done += len(sequences)

    def merge(self) -> Merged:
        """Pour all segments into the trace, one sequence at a time, and remove them.

        Raises:
            TraceError: there is none, or one is damaged.
        """
        asked = int(self.header.provenance["sequences"])
        if not self.done:
            raise TraceError(
                f"{self.out}: expected a finished sequence, found none; --resume"
                " goes on"
            )
        header = self.header
        if self.done < asked:
            facts = header.provenance | {
                "sequences": self.done,
                "asked_sequences": asked,
            }
            header = replace(header, provenance=facts)
        prompt_rows = 0
        with TraceWriter(self.out, header, self.columns) as writer:
            for first in range(0, self.done, self.batch):
                for rows in open_trace(_segment(self._folder, first)).sequences(
                    self.columns
                ):
                    writer.write(
                        rows.seq,
                        rows.pos,
                        rows.phase,
                        rows.layer,
                        rows.experts,
                        **rows.columns,
                    )
                    prompt_rows += int(np.count_nonzero(rows.phase == Phase.PREFILL))
        layers = header.shape.layers
        (
            self._folder / _JOURNAL
        ).unlink()  # first, so that a kill from here on leaves nothing to go on with
        shutil.rmtree(self._folder)
        prompt = prompt_rows // layers
        tokens = writer.rows // layers
        return Merged(
            self.out, self.done, asked, prompt, tokens - prompt, writer.rows, header
        )

    def _check_same(self, header: TraceHeader, columns: tuple[str, ...]) -> None:
        """Compare what was recorded so far with what is asked for now."""
        before = _facts(header, columns)
        now = _facts(self.header, self.columns)
        for name in sorted(
            before.keys() | now.keys(), key=lambda name: (name != "model", name)
        ):
            if before.get(name) != now.get(name):
                raise TraceError(
                    f"{self.out}: --resume: {name}: expected {before.get(name)!r} as in"
                    f" the unfinished recording, got {now.get(name)!r}; use the same"
                    f" model, prompts and options, or remove {self._folder.name}"
                )


def _facts(header: TraceHeader, columns: Iterable[str]) -> dict[str, Any]:
    """What two recordings of the same thing have in common: everything but the date."""
    facts = json.loads(header.to_json())
    provenance = facts.pop("provenance")
    provenance.pop("date", None)
    return facts | provenance | {"columns": ", ".join(columns)}


def _segment(folder: Path, first: int) -> Path:
    return folder / f"{first:09d}.parquet"


def _read_journal(folder: Path) -> tuple[TraceHeader, tuple[str, ...], int]:
    place = folder / _JOURNAL
    try:
        raw = json.loads(place.read_text(encoding="utf-8"))
        return (
            TraceHeader.from_json(raw["header"], where=str(place)),
            tuple(raw["columns"]),
            int(raw["batch"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{place}: not the journal of a recording: {error}; remove {folder.name}"
        ) from None


def _count(
    folder: Path, header: TraceHeader, columns: Iterable[str], batch: int
) -> int:
    """Count the sequences of the leading segments that are whole; what a crash of the
    machine tore is done again.
    """
    asked = int(header.provenance["sequences"])
    done = 0
    while done < asked:
        try:
            segment = open_trace(_segment(folder, done))
        except TraceError:
            break
        if segment.header != header or segment.columns != frozenset(columns):
            break
        done += min(batch, asked - done)
    return done
