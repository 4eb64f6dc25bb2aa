"""Small HTML tables, which notebooks show beneath a cell."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def small_table(
    rows: Iterable[Sequence[str]],
    *,
    heads: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> str:
    """Lay out plain text as an HTML table.

    Args:
        rows: cells; the first of each names its row.
        heads: of the columns; none for a list of facts.
        notes: lines below the table.
    """
    top = ""
    if heads:
        cells = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
        top = f"<thead><tr>{cells}</tr></thead>"
    body = "".join(_row(row) for row in rows)
    lines = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table>{top}<tbody>{body}</tbody></table>{lines}"


def _row(row: Sequence[str]) -> str:
    # Notebooks align cells to the right, which suits no words.
    name, *cells = (escape(cell) for cell in row)
    tds = "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells)
    return f'<tr><th scope="row" style="text-align:left">{name}</th>{tds}</tr>'
