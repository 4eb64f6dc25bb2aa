"""What answers and their pages consist of: columns, tables, choices, figures and
timelines.

What a reader can choose on a page, such as a policy, is a `Choice`; figures and facts
that name the choice follow it, and the choice stands in the page's address.

Columns of tables come from the one list of metrics (`moesim.traces.timeline.metrics`),
so the same figure has the same name, unit and direction wherever it is printed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.base.units import (
    bandwidth,
    format_bytes,
    is_missing,
    ms,
    number,
    percent,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from moesim.reporting.figures import Figure

LONGEST_NUMBER = 26
"""Letters of a cell, its interval included, that is set as a number is."""

HEADS = {
    "trace": "trace",
    "hw": "machine",
    "hw_kind": "profile",
    "policy": "policy",
    "candidate": "policy",
    "cache_ratio": "GPU cache",
    "slots_per_layer": "experts per layer",
    "gpu_memory_bytes": "GPU memory",
    "host_memory_bytes": "host memory",
    "files_digest": "other files",
    "tpot_s": "per token",
    "tpot_p95_s": "95th percentile",
    "ttft_s": "first token",
    "decode_tokens_per_s": "decode",
    "prefill_tokens_per_s": "prefill",
    "hit_rate_active": "hit rate",
    "h2d_bytes": "copied to GPU",
    "h2d_bytes_per_s": "copy speed",
    "ssd_bytes": "read from SSD",
    "gpu_bytes": "GPU memory taken",
    "busiest": "busiest lane",
    "busiest_share": "busy",
    "makespan_s": "whole run",
    "begins": "cache began",
    "filling_share": "copies to fill it",
    "energy_j": "energy",
}
"""Heads of columns; others are called by their names."""

_UNITS: dict[str, Callable[[Any], str]] = {
    "s": ms,
    "bytes": format_bytes,
    "bytes/s": bandwidth,
    "share": percent,
    "tokens/s": lambda value: number(value, " tok/s"),
    "J": lambda value: number(value, " J"),
    "times": lambda value: f"{value:.2f} times",
    "ratio": lambda value: f"{value:.2f}",
    "": lambda value: f"{value:,}" if isinstance(value, int) else number(value),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: in frames and JSON.
        head: in words.
        unit: of its values in frames: ``s``, ``bytes``, ``bytes/s``, ``share``,
            ``tokens/s``, ``J``, ``times``, ``ratio``, or empty.
    """

    name: str
    head: str
    unit: str = ""

    def cell(self, value: Any) -> str:
        """A value as people read it."""
        if isinstance(value, str):
            return value
        if value is None or (isinstance(value, float) and is_missing(value)):
            return "-" if self.unit else ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        # Pandas turns whole numbers beside gaps into floats.
        if not self.unit and float(value).is_integer():
            value = int(value)
        return _UNITS.get(self.unit, _UNITS[""])(value)


def column(name: str, head: str | None = None) -> Column:
    """A column of the list of metrics, or of options."""
    # They load PyArrow, which advice does without.
    from moesim.traces.timeline import metrics  # noqa: PLC0415

    known = metrics.METRICS | metrics.RUN_METRICS
    known |= metrics.REQUEST_METRICS | metrics.ROW_METRICS
    words = HEADS.get(name, name.removesuffix("_bytes").replace("_", " "))
    if name in known:
        return Column(name, head or words, known[name].unit)
    unit = "bytes" if name.endswith("_bytes") else "s" if name.endswith("_s") else ""
    unit = "share" if name == "cache_ratio" else unit
    return Column(name, head or words, unit)


@dataclass(frozen=True, slots=True)
class Listing:
    """A table of an answer.

    Attributes:
        rows: a frame in SI units; or words, a cell for each column.
        columns: those that are printed, in order.
        title: of its section on a page; empty for the answer's own.
        note: how to read it.
        lead: columns that name a row.
        opens: on a page, the number of the run that a click on each row chooses.
        printed: whether it stands in the text as well as on the page.
    """

    rows: pd.DataFrame | Sequence[Sequence[Any]] = field(repr=False)
    columns: Sequence[Column]
    title: str = ""
    note: str = ""
    lead: int = 1
    opens: Sequence[int] = ()
    printed: bool = True

    @classmethod
    def of(
        cls, heads: Sequence[str], rows: Iterable[Sequence[Any]], **more: Any
    ) -> Listing:
        """A table of words."""
        columns = [
            Column(head if heads.index(head) == place else f"{head} {place}", head)
            for place, head in enumerate(heads)
        ]
        return cls(list(rows), columns, **more)

    @property
    def frame(self) -> pd.DataFrame:
        """Its rows as a frame."""
        # Half a second that printing words need not cost.
        import pandas as pd  # noqa: PLC0415

        if isinstance(self.rows, pd.DataFrame):
            return self.rows
        names = [each.name for each in self.columns]
        return pd.DataFrame(list(self.rows), columns=names)

    def cells(self) -> list[list[str]]:
        """Rows of words."""
        rows: Any = self.rows
        if not isinstance(rows, list):
            names = [each.name for each in self.columns]
            rows = self.frame[names].astype(object).to_numpy().tolist()
        return [
            [each.cell(value) for each, value in zip(self.columns, row, strict=True)]
            for row in rows
        ]

    def prose(self) -> set[str]:
        """Heads of columns with long words, which are read from the left."""
        columns = zip(
            self.heads(), *replace(self, rows=self.rows[:100]).cells(), strict=False
        )
        return {
            head
            for head, *cells in columns
            if max(map(len, cells), default=0) > LONGEST_NUMBER
        }

    def heads(self) -> list[str]:
        """Heads of its columns."""
        return [each.head for each in self.columns]


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows for JSON; what is missing or infinite is null."""
    finite = frame.replace([math.inf, -math.inf], math.nan).astype(object)
    rows: list[dict[Any, Any]] = finite.where(finite.notna(), None).to_dict("records")
    return rows


# Parts of pages.


class Choice(NamedTuple):
    """Something that a reader chooses from a list.

    Attributes:
        name: of the choice, also in the address.
        label: stands beside the list.
        options: value and words of each; at least one.
        value: that is chosen at first.
    """

    name: str
    label: str
    options: Sequence[tuple[str, str]]
    value: str


class Facts(NamedTuple):
    """The row of a table that is chosen, as names and values.

    Attributes:
        choice: name of the `Choice`, whose value is the place of a row.
        table: a cell that begins with ``$`` is a command line, which gets a button that
            copies it.
    """

    choice: str
    table: Listing


class Shown(NamedTuple):
    """A figure that follows choices.

    Attributes:
        figure: what is drawn.
        where: by column, the choice whose value it must have.
    """

    figure: Figure
    where: Mapping[str, Choice] = {}


class Spans(NamedTuple):
    """A timeline to zoom into, too long to be drawn at once.

    Attributes:
        lanes: rows, from top to bottom.
        colours: by kind of operation.
        runs: by name, what `moesim.questions.timeline.packed` returns.
        choice: whose value names the run that is shown; None where there is one.
    """

    lanes: Sequence[str]
    colours: Mapping[str, str]
    runs: Mapping[str, Any]
    choice: str | None = None

    @property
    def label(self) -> str:
        """What it shows, for readers who cannot see it."""
        return "What every lane did; the numbers are those of experts"


class Section(NamedTuple):
    """A part of a page under its own heading.

    Attributes:
        title: the heading; empty for what follows the answer at once.
        parts: what stands there.
        note: a sentence on how to read it; empty for none.
    """

    title: str
    parts: Sequence[Listing | Figure | Shown | Choice | Facts | Spans]
    note: str = ""


def trace_words(name: str, digest: str | None) -> str:
    """A trace with the beginning of its SHA-256, which tells equal names apart."""
    return name if digest is None else f"{name}, SHA-256 {digest:.12}…"
