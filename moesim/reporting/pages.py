"""HTML pages from templates, each one file that loads nothing from elsewhere.

`templates/base.html` holds what all pages share: language, viewport, colours for light
and dark screens, a head that says where the figures come from, and tables that sort and
filter. A page's own template extends it and lays out text, tables and figures that the
modules beside this one prepare.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.base.files import write_text
from moesim.base.text import visible_lines
from moesim.base.version import __version__
from moesim.reporting.figures import svg

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure


class PageTable(NamedTuple):
    """A table on a page.

    Attributes:
        heads: of the columns; none is empty, for a click on it sorts.
        rows: a cell of plain text for each head; the first cell names the row.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


class PageFigure(NamedTuple):
    """A figure on a page.

    Attributes:
        svg: the figure as an SVG element.
        label: what it shows, for readers who cannot see it.
    """

    svg: str
    label: str


def page_figure(figure: Figure, label: str) -> PageFigure:
    """Prepare a matplotlib figure for a page."""
    return PageFigure(svg(figure, label), label)


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


def render(template: str, **content: Any) -> str:
    """Fill a template of this package.

    Args:
        template: file name within ``templates/``.
        content: what the template names; ``title`` and ``origin`` (see `page_origin`)
            in every case. Text is escaped; figures are not.

    Raises:
        jinja2.UndefinedError: the template names something that is missing.
    """
    # jinja2 costs some 50 ms to import, which only pages should.
    from jinja2 import (  # noqa: PLC0415 - as said above
        Environment,
        PackageLoader,
        StrictUndefined,
    )

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
    return environment.get_template(template).render(**content)


def _shown(value: Any) -> Any:
    """Text as a page shows it; markup of ours, such as figures, stays as it is."""
    return visible_lines(value) if type(value) is str else value


def write_page(path: Path, template: str, **content: Any) -> Path:
    """Fill a template and write the page; return its path."""
    text = render(template, **content)
    write_text(path, text)
    return path
