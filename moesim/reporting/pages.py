"""HTML pages, each one file that loads nothing from elsewhere.

Every question describes its `Page`: an answer, then sections of tables, charts and
text. What a reader can choose, such as a policy, is a `Choice`; charts and tables that
know a parameter of that name follow it, and the choice stands in the page's address.
``templates/page.html`` lays it out, ``templates/page.js`` makes it answer.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from moesim.base.files import write_text
from moesim.base.text import visible, visible_lines
from moesim.base.version import __version__
from moesim.reporting.interactive import Chart, config, script

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

STATIC_ROWS = 300
"""Longer tables are made by the page's script, a part at a time."""


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table on a page: a click on a head sorts, long ones can be filtered.

    Attributes:
        heads: of the columns; none is empty.
        rows: a cell of plain text for each head; the first cell names the row.
        label: what it holds, for readers who cannot see it.
        opens: the choice that a click on a row makes, with the row's number; None for
            none.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    label: str = ""
    opens: str | None = None

    @property
    def is_long(self) -> bool:
        """Whether its rows are made by the page's script."""
        return len(self.rows) > STATIC_ROWS


@dataclass(frozen=True, slots=True)
class Choice:
    """Something that a reader chooses from a list.

    Attributes:
        name: of the parameter, also in the address.
        label: stands beside the list.
        options: value and words of each; at least one.
        value: that is chosen at first.
    """

    name: str
    label: str
    options: Sequence[tuple[str, str]]
    value: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values of what is chosen: one list of them for each value.

    Attributes:
        choice: name of the `Choice`.
        names: of the facts.
        values: by value of the choice, one for each name; ``$`` in front of a value
            marks a command line, which gets a button that copies it.
    """

    choice: str
    names: Sequence[str]
    values: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Spans:
    """A timeline to zoom into, too long to be drawn at once.

    Attributes:
        chart: draws the rows of its source ``spans``; the page's script puts those
            there that can be seen.
        runs: by name, what `moesim.questions.timeline.packed` returns.
        choice: whose value names the run that is shown; None where there is one.
    """

    chart: Chart
    runs: Mapping[str, Any]
    choice: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Lines of text.

    Attributes:
        lines: a paragraph each.
        look: ``note``, ``command`` (with a button that copies it), ``plain``, or
            ``folded`` for what is long and seldom read.
    """

    lines: Sequence[str]
    look: str = "plain"


Part = PageTable | Choice | Chart | Spans | Facts | Text


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page under its own heading.

    Attributes:
        title: the heading; empty for what follows the answer at once.
        note: a sentence on how to read it; empty for none.
        parts: what stands there.
    """

    title: str
    note: str = ""
    parts: Sequence[Part] = ()


@dataclass(slots=True)
class Page:
    """A page.

    Attributes:
        title: model, machine and question; a window's tab shows it.
        origin: where its figures come from, see `page_origin`.
        setting: what was asked, a line each; the first names the machine.
        answer: in a sentence; empty for none.
        notes: what qualifies the answer.
        sections: in order.
    """

    title: str
    origin: Sequence[tuple[str, str]]
    setting: Sequence[str] = ()
    answer: str = ""
    notes: Sequence[str] = ()
    sections: list[Section] = field(default_factory=list)

    def add(self, title: str, *parts: Part | None, note: str = "") -> Self:
        """Add a section, unless nothing is in it; None among its parts is left out."""
        kept = [part for part in parts if part is not None]
        if kept:
            self.sections.append(Section(title, note, kept))
        return self

    def add_warnings(self, warnings: Iterable[str]) -> Self:
        """Add what a reader should know before believing the figures, each once."""
        lines = list(dict.fromkeys(warnings))
        parts = [Text(lines)] if lines else []
        return self.add("What to know before believing it", *parts)

    def html(self) -> str:
        """The page as text."""
        scripted = _Scripted()
        sections = [
            (
                section,
                [
                    (part, type(part).__name__, scripted.add(part))
                    for part in section.parts
                ],
            )
            for section in self.sections
        ]
        return _render(
            page=self,
            sections=sections,
            data=scripted.text(),
            vega=script() if scripted.draws else "",
        )

    def write(self, path: Path) -> Path:
        """Write the page; return its path."""
        write_text(path, self.html())
        return path


class _Scripted:
    """What the page's script reads: charts, long tables, timelines, by number."""

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self.draws = False

    def add(self, part: Part) -> int:
        """Take what the script needs of a part; return its number."""
        data: Any = None
        if isinstance(part, Spans):
            data = _chart(part.chart) | {"runs": part.runs, "choice": part.choice}
        elif isinstance(part, Chart):
            data = _chart(part)
        elif isinstance(part, Facts):
            data = {"choice": part.choice, "names": part.names, "values": part.values}
        elif isinstance(part, PageTable) and part.is_long:
            data = {"rows": part.rows}
        self.draws |= isinstance(part, Chart | Spans)
        self._parts.append(data)
        return len(self._parts) - 1

    def text(self) -> str:
        """All of it, deflated: a browser takes milliseconds to read it."""
        looks = {"light": config(), "dark": config(dark=True)}
        content = _without_nan({"looks": looks, "parts": self._parts})
        plain = json.dumps(content, separators=(",", ":"))
        return base64.b64encode(zlib.compress(plain.encode(), 9)).decode("ascii")


def _chart(chart: Chart) -> dict[str, Any]:
    return {
        "spec": chart.spec | {"description": chart.label},
        "data": chart.data,
        "measures": chart.measures,
        "canLog": chart.can_log,
    }


def _without_nan(content: Any) -> Any:
    """What JSON can say: nothing in place of what is no number."""
    if isinstance(content, dict):
        return {str(key): _without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    # NaN is the only value that is not itself.
    return None if content != content else content  # noqa: PLR0124


def page_origin(command: str | None, **sources: str | None) -> list[tuple[str, str]]:
    """Say in a page's head where its figures come from: name and text of each line.

    Args:
        command: the command line that made them; None for a call from Python.
        sources: what they were made of, such as ``trace``; None is left out.
    """
    lines = [(name, text) for name, text in sources.items() if text is not None]
    lines.append(("command", command or "a call from Python"))
    lines.append(("made", f"{_now():%Y-%m-%d %H:%M} UTC by moesim {__version__}"))
    return lines


def trace_words(name: str, digest: str | None) -> str:
    """A trace with the beginning of its SHA-256, which tells equal names apart."""
    return name if digest is None else f"{name}, SHA-256 {digest:.12}…"


def _now() -> datetime:
    # The convention of reproducible builds: same input, same bytes.
    stated = os.environ.get("SOURCE_DATE_EPOCH", "")
    if stated.isdecimal():
        return datetime.fromtimestamp(int(stated), UTC)
    return datetime.now(UTC)


def _render(**content: Any) -> str:
    # jinja2 costs some 50 ms to import, which only pages should.
    from jinja2 import (  # noqa: PLC0415 - as said above
        Environment,
        PackageLoader,
        StrictUndefined,
    )
    from markupsafe import escape  # noqa: PLC0415 - comes with jinja2

    environment = Environment(
        loader=PackageLoader("moesim.reporting"),
        autoescape=True,
        # Names from files may hold control characters.
        finalize=_shown,
        # A forgotten name is an error, not an empty place on the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Of names within such a text, line ends cannot be told from its own.
    environment.filters["words"] = _words
    environment.filters["lines"] = lambda text: escape(visible_lines(text))
    return environment.get_template("page.html").render(**content)


def _words(text: str) -> Any:
    """A sentence, in which backticks mark code."""
    from markupsafe import Markup, escape  # noqa: PLC0415 - as in `_render`

    parts = [escape(visible(part)) for part in text.split("`")]
    marked = [
        Markup("<code>{}</code>").format(part) if place % 2 else part
        for place, part in enumerate(parts)
    ]
    return Markup("").join(marked) if len(parts) % 2 else escape(visible(text))


def _shown(value: Any) -> Any:
    """Text as a page shows it; markup of ours stays as it is."""
    return visible(value) if type(value) is str else value
