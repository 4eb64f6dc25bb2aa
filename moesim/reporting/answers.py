"""An answer, stated once: text, JSON, frame, page, notebook view and figures are made
of it here, whatever was asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.files import write_text
from moesim.base.options import ConfigError
from moesim.reporting.parts import Section
from moesim.reporting.tables import aligned, facts_lines, markdown_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd

    from moesim.reporting.figures import Figure
    from moesim.reporting.parts import Listing


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
        figures: each, or what makes it, by name; the one that shows the answer first.
        all_rows: the frame of them, where tables show a part of it.
        data: the question's own figures, for JSON.
        sources: of its figures, such as ``trace``.
        command: the command line that repeats it; None for a call from Python.
        commands: what it is for, and the line, of each command to type next.
        on_page: makes what only a page can show, in place of `figures`.
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
    figures: Mapping[str, Figure | Callable[..., Figure]] = field(default_factory=dict)
    all_rows: pd.DataFrame | None = None
    data: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    commands: Sequence[tuple[str, str]] = ()
    on_page: Callable[[], Sequence[Section]] | None = None
    warnings: Sequence[str] = ()
    settings: str = ""

    @property
    def frame(self) -> pd.DataFrame:
        """The table that answers, in SI units."""
        return self.tables[0].frame if self.all_rows is None else self.all_rows

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
        figure = self.figures[name]
        return figure(**options) if callable(figure) else figure

    def plot(self, name: str | None = None, ax: Any = None, **options: Any) -> Any:
        """Draw a figure with matplotlib; return its Axes.

        Args:
            name, options: as `figure` takes them.
            ax: as `moesim.reporting.figures.Figure.draw` takes it.
        """
        return self.figure(name, **options).draw(ax)

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

    def _repr_markdown_(self) -> str:
        """The answer for a notebook."""
        return self.markdown().partition("\n\n")[2]

    @property
    def title(self) -> str:
        """Model, machine and question: what a window's tab shows."""
        return f"{self.subject}: {self.question}" if self.subject else self.question

    def sections(self) -> list[Section]:
        """What a page shows below the sentences."""
        tables = [Section(each.title, [each], each.note) for each in self.tables]
        if self.on_page is not None:
            shown = self.on_page()
        else:
            shown = [Section("", [self.figure(name) for name in self.figures])]
        return [*tables[:1], *shown, *tables[1:]]

    def html(self) -> str:
        """The answer as a page that loads nothing from elsewhere."""
        # Altair takes half a second, which only pages should cost.
        from moesim.reporting.pages import page_html  # noqa: PLC0415

        return page_html(self)

    def write(self, path: str | Path) -> Path:
        """Write the page; return its path."""
        write_text(Path(path), self.html())
        return Path(path)


def _lines(table: Listing) -> list[str]:
    rows = table.cells()
    if not rows:
        return []
    lines = aligned([table.heads(), *rows], lead=table.lead)
    lines = [f"{table.title}:", *lines] if table.title else lines
    return [*lines, table.note] if table.note else lines
