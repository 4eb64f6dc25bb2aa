"""One HTML file that shows words, tables and pictures and loads nothing from
elsewhere.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from moesim.traces.files import written_beside

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0"
    " 1em;color:#222}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin:2em 0"
    " .2em}svg{max-width:100%;height:auto}"
    "table{border-collapse:collapse}td,th{padding:.15em .9em .15em 0;text-align:right}"
    "td:first-child,th:first-child{text-align:left}.answer{font-size:1.25em;font-weight:600}.note{color:#555}"
    "pre{white-space:pre-wrap}div.wide{overflow-x:auto;font-size:.85em}"
)


def write_page(path: Path, title: str, parts: Iterable[str]) -> Path:
    """Write a page of ready-made parts below its title; return its place."""
    name = html.escape(title)
    head = (
        "<!doctype html><meta"
        f" charset=utf-8><title>{name}</title><style>{_STYLE}</style><h1>{name}</h1>"
    )
    with written_beside(path) as part:
        part.write_text("\n".join([head, *parts]) + "\n", encoding="utf-8")
    return path


def paragraph(text: str, kind: str = "") -> str:
    """Plain words; `kind` is ``answer`` or ``note``."""
    return (
        f'<p class="{kind}">{html.escape(text)}</p>'
        if kind
        else f"<p>{html.escape(text)}</p>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells of plain words."""
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def section(title: str, note: str, body: str) -> str:
    """A picture, table or text of its own under a heading, with a line of
    explanation.
    """
    return (
        f"<h2>{html.escape(title)}</h2>{paragraph(note, 'note') if note else ''}{body}"
    )


def verbatim(text: str) -> str:
    """Text as it is, such as JSON."""
    return f"<pre>{html.escape(text)}</pre>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return (
        f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
    )
