"""An answer, stated once: text, JSON, frame, page, notebook view and figures are made
of it here, whatever was asked.

Columns of tables come from the one list of metrics (`moesim.traces.timeline.metrics`),
so the same figure has the same name, unit and direction wherever it is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.options import ConfigError
from moesim.base.units import (
    bandwidth,
    format_bytes,
    is_missing,
    ms,
    number,
    percent,
)
from moesim.reporting.interactive import interactive
from moesim.reporting.pages import Facts, Page, PageTable, Text, page_origin
from moesim.reporting.tables import aligned, facts_lines, markdown_table, small_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pandas as pd

    from moesim.reporting.figures import Figure

HEADS = {
    "trace": "trace",
    "hw": "machine",
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
    "": lambda value: f"{value:,}" if isinstance(value, int) else number(value),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: in frames and JSON.
        head: in words.
        unit: of its values in frames: ``s``, ``bytes``, ``bytes/s``, ``share``,
            ``tokens/s``, ``J``, ``times``, or empty.
        better: ``larger``, ``smaller`` or empty.
    """

    name: str
    head: str
    unit: str = ""
    better: str = ""

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
        return Column(name, head or words, known[name].unit, known[name].better)
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
        opens: on a page, the choice that a click on a row makes.
        printed: whether it stands in the text as well as on the page.
    """

    rows: pd.DataFrame | Sequence[Sequence[Any]] = field(repr=False)
    columns: Sequence[Column]
    title: str = ""
    note: str = ""
    lead: int = 1
    opens: str | None = None
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

    def heads(self) -> list[str]:
        """Heads of its columns."""
        return [each.head for each in self.columns]

    def on_page(self, label: str = "") -> PageTable | None:
        """The table for a page; None without rows."""
        if not len(self.rows):
            return None
        heads = [head or "name" for head in self.heads()]
        return PageTable(heads, self.cells(), self.title or label, opens=self.opens)


@dataclass(slots=True, kw_only=True)
class Answer:
    """What was asked, and everything that there is to say.

    Attributes:
        question: in words.
        subject: what it was asked of: model and machine.
        setting: name and words of each thing that the figures depend on.
        facts: name and words of each thing that was found, where no table holds it.
        tables: the one that answers first.
        sentences: the first is the answer.
        notes: what qualifies it.
        figures: what makes each, by name; the one that shows the answer first.
        all_rows: the frame of them, where tables show a part of it.
        data: the question's own figures, for JSON.
        sources: of its figures, such as ``trace``.
        command: the command line that repeats it; None for a call from Python.
        commands: what it is for, and the line, of each command to type next.
        on_page: adds what only a page can show, in place of `figures`.
        warnings: what to know before believing it.
        settings: everything that decided, folded on the page.
    """

    question: str
    subject: str
    setting: Sequence[tuple[str, str]] = ()
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Listing] = ()
    sentences: Sequence[str] = ()
    notes: Sequence[str] = ()
    figures: dict[str, Callable[..., Figure]] = field(default_factory=dict)
    all_rows: pd.DataFrame | None = None
    data: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    commands: Sequence[tuple[str, str]] = ()
    on_page: Callable[[Page], object] | None = None
    warnings: Sequence[str] = ()
    settings: str = ""

    @property
    def frame(self) -> pd.DataFrame:
        """The table that answers, in SI units."""
        return self.tables[0].frame if self.all_rows is None else self.all_rows

    def asked_by(self, command: str) -> Answer:
        """The same, with the command line that repeats it."""
        return replace(self, command=command)

    def figure(self, name: str | None = None, **options: Any) -> Figure:
        """A figure; the first without a name.

        Args:
            name: one of `figures`.
            options: what it takes, such as ``step`` and ``layers`` of a run's ``step``.

        Raises:
            ConfigError: there is none of this name.
        """
        name = next(iter(self.figures), "") if name is None else name
        if name not in self.figures:
            known = ", ".join(self.figures) or "none"
            raise ConfigError(f"figure: expected one of {known}, got {name!r}")
        return self.figures[name](**options)

    def plot(
        self,
        name: str | None = None,
        ax: Any = None,
        *,
        measure: str | None = None,
        **options: Any,
    ) -> Any:
        """Draw a figure with matplotlib; return its Axes.

        Args:
            name, options: as `figure` takes them.
            ax, measure: as `moesim.reporting.figures.Figure.draw` takes them.
        """
        return self.figure(name, **options).draw(ax, measure=measure)

    # Views.

    def text(self) -> str:
        """The answer for a terminal: setting, tables, sentences, notes."""
        named = [*self.setting, *([("", "")] if self.setting and self.facts else [])]
        named += self.facts
        blocks = [facts_lines(named)] if named else []
        blocks += [_lines(each) for each in self.tables if each.printed]
        blocks.append([*self.sentences, *self.notes])
        typed = [(f"{words}:", f"  {line}") for words, line in self.commands]
        blocks.append([line for pair in typed for line in pair])
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    __str__ = text

    def markdown(self) -> str:
        """The answer as a Markdown page."""
        blocks = [f"# {self.title}"]
        blocks.append("\n".join(f"- {name}: {words}" for name, words in self.setting))
        if self.facts:
            blocks.append("\n".join(markdown_table(("", "value"), self.facts)))
        blocks += ["\n\n".join([*self.sentences, *self.notes])]
        for each in self.tables:
            blocks += [f"## {each.title}"] if each.title else []
            blocks += [each.note] if each.note else []
            blocks.append("\n".join(markdown_table(each.heads(), each.cells())))
        blocks += [f"{words}:\n\n    {line}" for words, line in self.commands]
        blocks.append("\n".join(f"- {warning}" for warning in self.warnings))
        return "\n\n".join(filter(None, blocks)) + "\n"

    def to_json(self) -> dict[str, Any]:
        """The question's own figures, and the answer in words."""
        words = {
            "question": self.question,
            "setting": dict(self.setting),
            "facts": dict(self.facts),
            "sentences": list(self.sentences),
            "notes": list(self.notes),
            "command": self.command,
            "commands": [{"for": words, "line": line} for words, line in self.commands],
        }
        return {**self.data, "answer": words}

    def _repr_html_(self) -> str:
        """The answer for a notebook."""
        lines = [*self.sentences, *self.notes]
        if self.facts or not self.tables:
            return small_table([*self.setting, *self.facts], notes=lines)
        first = self.tables[0]
        return small_table(first.cells(), heads=first.heads(), notes=lines)

    @property
    def title(self) -> str:
        """Model, machine and question: what a window's tab shows."""
        return f"{self.subject}: {self.question}" if self.subject else self.question

    def page(self) -> Page:
        """The answer as a page that loads nothing from elsewhere."""
        answer, *more = [*self.sentences, *self.notes] or [""]
        page = Page(
            self.title,
            page_origin(self.command, **self.sources),
            setting=[f"{name}: {words}" for name, words in self.setting],
            answer=answer,
            notes=more,
        )
        if self.facts:
            heads, values = zip(*self.facts, strict=True)
            page.add("", Facts("", heads, {"": values}))
        commands = [
            part
            for words, line in reversed(self.commands)
            for part in (Text([words], "note"), Text([line], "command"))
        ]
        page.add("What to type", *commands)
        if self.tables:
            first = self.tables[0]
            page.add(first.title, first.on_page(self.question), note=first.note)
        if self.on_page is None:
            page.add("", *(interactive(make()) for make in self.figures.values()))
        else:
            self.on_page(page)
        for each in self.tables[1:]:
            page.add(each.title, each.on_page(), note=each.note)
        page.add_warnings(self.warnings)
        return page.add(
            "Settings", Text([self.settings], "folded") if self.settings else None
        )

    def write(self, path: str | Path) -> Path:
        """Write the page; return its path."""
        return self.page().write(Path(path))


def _lines(table: Listing) -> list[str]:
    rows = table.cells()
    if not rows:
        return []
    lines = aligned([table.heads(), *rows], lead=table.lead)
    lines = [f"{table.title}:", *lines] if table.title else lines
    return [*lines, table.note] if table.note else lines
