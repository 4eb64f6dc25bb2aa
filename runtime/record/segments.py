"""A recording in progress: every finished group of sequences is a trace of its own.

A recording that is killed loses the group at work and nothing else. The folder
``OUT.parts`` holds a plan, which says what is being recorded (the trace's header), and
one segment per finished group. At the end the segments are merged into one file in
their order, and the folder goes; since rows and header are the same, so are the bytes,
however often the recording was stopped.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from moesim.base.errors import TraceError
from moesim.base.files import open_own, remove_leftovers, try_lock, write_text
from moesim.base.inputs import read_json
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import OPTIONAL_COLUMNS, Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Iterable

# The name that unfinished recordings have on disk.
_PLAN_NAME: Final = "journal.json"
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
    folder = parts_dir(out)
    if not (folder / _PLAN_NAME).is_file():
        return None
    return _count_finished(folder, _read_plan(folder))


def finish(out: Path | str) -> Recording:
    """Make a trace of what an unfinished recording has, and end it. Its header says how
    many sequences were planned.

    Raises:
        TraceError: no unfinished recording, not one finished sequence in it, or it is
            still at work.
    """
    out = Path(out)
    folder = parts_dir(out)
    if not (folder / _PLAN_NAME).is_file():
        raise TraceError(
            f"{out}: expected an unfinished recording in {folder.name}, found none"
        )
    plan = _read_plan(folder)
    with Segments(
        out, plan.trace_header, plan.columns, plan.batch, resume=True
    ) as segments:
        return segments.merge()


class Segments:
    """The segments of one recording; use as a context manager. Whatever ends the block,
    finished segments stay.

    Args:
        out: the trace to be.
        header: of the complete recording. Where a recording goes on, the first one's is
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
        path = _segment(self._folder, self.done)
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
            raise TraceError(
                f"{self.out}: expected a finished sequence, found none; --resume"
                " goes on"
            )
        # A shorter trace says so: it is not the recording that was asked for.
        header = self.header
        if self.done < planned:
            shorter = {"sequences": self.done, "asked_sequences": planned}
            header = replace(header, provenance=header.provenance | shorter)

        rows, prompt_rows = self._copy_rows(header)
        # The plan goes first, so that a kill from here on leaves nothing to resume.
        (self._folder / _PLAN_NAME).unlink()
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
        if self._resume and (self._folder / _PLAN_NAME).is_file():
            plan = _read_plan(self._folder)
            self._check_same(plan)
            self.header = plan.trace_header
            self.done = _count_finished(self._folder, plan)
            return

        # The old plan goes before its segments: a kill in between must not leave it
        # with some of them.
        (self._folder / _PLAN_NAME).unlink(missing_ok=True)
        for path in self._folder.glob("*.parquet*"):
            path.unlink()
        remove_leftovers(self._folder, older_s=0)
        body = {
            "header": self.header.to_json(),
            "columns": self.columns,
            "batch": self.batch,
        }
        write_text(self._folder / _PLAN_NAME, json.dumps(body))

    def _copy_rows(self, header: TraceHeader) -> tuple[int, int]:
        """Write the trace; return its rows, and how many of them are prefill."""
        prompt_rows = 0
        with TraceWriter(self.out, header, self.columns) as writer:
            for first in range(0, self.done, self.batch):
                segment = open_trace(_segment(self._folder, first))
                for rows in segment.sequences(self.columns):
                    writer.write(**rows.arrays())
                    prompt_rows += int(np.count_nonzero(rows.phase == Phase.PREFILL))
        return writer.rows, prompt_rows

    def _check_same(self, plan: _Plan) -> None:
        """Compare what was recorded so far with what is to be recorded now."""
        before = _facts(plan.trace_header, plan.columns)
        now = _facts(self.header, self.columns)
        # Another model changes nearly every fact: name it first.
        names = sorted(
            before.keys() | now.keys(), key=lambda name: (name != "model", name)
        )
        for name in names:
            if before.get(name) != now.get(name):
                raise TraceError(
                    f"{self.out}: --resume: {name}: expected {before.get(name)!r} as in"
                    f" the unfinished recording, got {now.get(name)!r}; use the same"
                    f" model, prompts and options, or remove {self._folder.name}"
                )


@dataclass
class _Plan:
    """The task of an unfinished recording, as its journal holds it."""

    header: str
    columns: list[str]
    batch: int

    def __post_init__(self) -> None:
        """Refuse groups of no sequence, columns that no trace has, and a header that
        does not say how many sequences are planned.
        """
        if self.batch < 1:
            raise TraceError(f"batch: expected a number above 0, found {self.batch}")
        unknown = sorted(set(self.columns) - set(OPTIONAL_COLUMNS))
        if unknown:
            raise TraceError(f"columns: unknown column {unknown[0]!r}")
        if not (isinstance(self.planned, int) and self.planned > 0):
            raise TraceError(
                "header: provenance.sequences: expected a number above 0, found"
                f" {self.planned!r}"
            )

    @cached_property
    def trace_header(self) -> TraceHeader:
        """Of the complete recording."""
        return TraceHeader.from_json(self.header, where="header")

    @property
    def planned(self) -> Any:
        """How many sequences."""
        return self.trace_header.provenance.get("sequences")


def _facts(header: TraceHeader, columns: Iterable[str]) -> dict[str, Any]:
    """Return what two recordings of the same thing have in common: everything but the
    date.
    """
    facts = json.loads(header.to_json())
    provenance = facts.pop("provenance")
    provenance.pop("date", None)
    return facts | provenance | {"columns": ", ".join(columns)}


def _segment(folder: Path, first: int) -> Path:
    return folder / f"{first:09d}.parquet"


def _read_plan(folder: Path) -> _Plan:
    return read_json(
        folder / _PLAN_NAME,
        _Plan,
        error=TraceError,
        expected="the journal of a recording",
        way_out=f"remove {folder.name}",
    )


def _count_finished(folder: Path, plan: _Plan) -> int:
    """Count the sequences of the leading segments that are complete; what a crash of
    the machine tore is done again.
    """
    done = 0
    while done < plan.planned:
        try:
            segment = open_trace(_segment(folder, done))
        except TraceError:
            break
        if segment.header != plan.trace_header or segment.columns != frozenset(
            plan.columns
        ):
            break
        # The last group may be smaller.
        done += min(plan.batch, plan.planned - done)
    return done
