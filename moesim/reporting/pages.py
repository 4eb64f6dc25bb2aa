"""HTML pages from templates, each one file that loads nothing from elsewhere.

`templates/base.html` holds what all pages share: language, viewport, colours for light
and dark screens. A page's own template extends it and lays out text, tables and figures
that the modules beside this one prepare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.reporting.figures import svg
from moesim.traces.files import write_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure


class PageTable(NamedTuple):
    """A table on a page.

    Attributes:
        heads: of the columns.
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
    return PageFigure(svg(figure), label)


def render(template: str, **content: Any) -> str:
    """Fill a template of this package.

    Args:
        template: file name within ``templates/``.
        content: what the template names. Text is escaped; figures are not.

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
        # A forgotten name is an error, not an empty place on the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**content)


def write_page(path: Path, template: str, **content: Any) -> Path:
    """Fill a template and write the page; return its path."""
    text = render(template, **content)
    write_text(path, text)
    return path
