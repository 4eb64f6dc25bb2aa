"""Tables and lists of facts as text, laid out by rich.

Nothing is wider than the screen. If a table is, its heads wrap; if that is not enough,
the columns that are left continue in a second block, which repeats the leading columns.
Where standard output is not a terminal, the text is plain and `PLAIN_WIDTH` wide, so
that files, pipes and tests get the same bytes everywhere.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from moesim.base.files import write_bytes, write_text
from moesim.base.text import cell, visible
from moesim.reporting.parts import LONGEST_NUMBER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import pandas as pd

PLAIN_WIDTH = 80
"""Columns of a screen of which nothing is known."""

GAP = 2
"""Spaces between two columns."""

NARROWEST = 20
"""Narrower screens get lines of this width: below it, wrapping cuts words apart."""

# A private-use character stands for a space at which a line must not break. rich breaks
# at every white-space character, the no-break space included.
_NO_BREAK = "\ue000"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµun]?s|[KMGT]?i?B|GB/s|k?J)(?![\w]))")


class Screen(NamedTuple):
    """What standard output shows.

    Attributes:
        width: columns.
        styled: whether escape sequences for bold text are understood.
    """

    width: int
    styled: bool


def screen() -> Screen:
    """Ask the environment and standard output.

    `COLUMNS` decides the width wherever it is set, as it does for other programs.
    """
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
    console = Console(file=sys.stdout)
    # Old Windows consoles print escape sequences instead of obeying them.
    obeys = not (console.is_dumb_terminal or console.legacy_windows)
    return Screen(max(width, NARROWEST), sys.stdout.isatty() and obeys)


def aligned(rows: Sequence[Sequence[str]], *, lead: int = 1) -> list[str]:
    """Lay out a table: the first column to the left, the others to the right.

    Args:
        rows: the heads of the columns, then the cells of each row; at least one row.
        lead: columns that say what a row is about, and so lead every block.

    Returns:
        Lines without trailing spaces; an empty one between two blocks.
    """
    shown = screen()
    rows = [[visible(text) for text in row] for row in rows]
    columns = list(zip(*rows, strict=True))
    natural = [_natural_width(cells, shown.width) for cells in columns]
    narrow = [
        min(width, _narrow_width(cells))
        for width, cells in zip(natural, columns, strict=True)
    ]
    # Unwrapped heads read better, unless they cost a block more.
    groups = min(
        (_groups(widths, shown.width, lead) for widths in (natural, narrow)), key=len
    )
    blocks = []
    for group in groups:
        widths = natural if _total(natural, group) <= shown.width else narrow
        table = _grid(show_header=True)
        for column in group:
            head, *cells = columns[column]
            # Long words are read from the left, as names are; numbers end alike.
            is_prose = max(map(cell_len, cells), default=0) > LONGEST_NUMBER
            table.add_column(
                head,
                justify="left" if column == 0 or is_prose else "right",
                vertical="bottom",
                # The end of a name is often what tells two rows apart.
                overflow="fold",
                width=widths[column],
            )
        for row in rows[1:]:
            table.add_row(*(row[column] for column in group))
        blocks.append("\n".join(_rendered(table, shown)))
    return "\n\n".join(blocks).split("\n")


def facts_lines(facts: Iterable[tuple[str, str]], *, indent: int = 0) -> list[str]:
    """Lay out facts: a name, and beside it what is to be said about it.

    Long texts wrap within their own column. A pair of empty strings is an empty line.
    """
    pairs = [(visible(name), visible(text)) for name, text in facts]
    shown = screen()
    # A very long name wraps too, or nothing is left for the texts.
    longest = max(cell_len(name) for name, _ in pairs)
    names_width = min(longest, shown.width // 2)
    table = _grid(show_header=False)
    table.add_column(width=names_width)
    table.add_column(
        overflow="fold", width=max(shown.width - indent - names_width - GAP, 10)
    )
    for name, text in pairs:
        table.add_row(name, _BEFORE_UNIT.sub(_NO_BREAK, text))
    margin = " " * indent
    return [f"{margin}{line}".rstrip() for line in _rendered(table, shown)]


def _grid(*, show_header: bool) -> Table:
    """A table without lines around its cells."""
    return Table(
        box=None,
        show_header=show_header,
        header_style="bold",
        pad_edge=False,
        padding=(0, GAP, 0, 0),
    )


def _rendered(table: Table, shown: Screen) -> list[str]:
    console = Console(
        file=io.StringIO(),
        # rich counts the gap behind the last column, which is stripped below.
        width=shown.width + GAP,
        force_terminal=shown.styled,
        color_system="standard" if shown.styled else None,
        legacy_windows=False,
        # Policy names may hold brackets and colons. They are no markup.
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as capture:
        console.print(table)
    text = capture.get().replace(_NO_BREAK, " ")
    return [line.rstrip() for line in text.splitlines()]


def _natural_width(cells: Sequence[str], screen_width: int) -> int:
    """The width at which nothing wraps, but for cells longer than half the screen."""
    # A name has no spaces, so it would be cut within a word. It may be wider.
    longest_part = max(cell_len(part) for each in cells for part in f"{each} x".split())
    most = max(screen_width // 2, min(longest_part, 3 * screen_width // 4))
    return min(max(map(cell_len, cells)), most)


def _narrow_width(cells: Sequence[str]) -> int:
    """The width at which only the head wraps, between its words."""
    head, *others = cells
    # A column without a visible character would be dropped by rich.
    return max(1, *map(cell_len, [*head.split(), *others]))


def _total(widths: Sequence[int], group: Sequence[int]) -> int:
    return sum(widths[column] + GAP for column in group) - GAP


def _groups(widths: Sequence[int], limit: int, lead: int) -> list[list[int]]:
    """Columns that fit side by side, the first `lead` of them in every group."""
    leading = list(range(lead))
    groups = [leading]
    for column in range(lead, len(widths)):
        group = [*groups[-1], column]
        # A group shows one column beside the leading ones, however wide they are.
        if _total(widths, group) > limit and len(group) > lead + 1:
            groups.append([*leading, column])
        else:
            groups[-1] = group
    return groups


def save_table(table: pd.DataFrame, path: Path) -> Path:
    """Write a comparison, in seconds and bytes.

    Args:
        table: one row per run.
        path: Parquet if it ends in ``.parquet``, else CSV.
    """
    if path.suffix != ".parquet":
        safe = table.map(lambda value: cell(value) if type(value) is str else value)
        write_text(path, safe.to_csv(index=False, lineterminator="\n"))
        return path

    # Columns of None and numbers are objects, which Parquet refuses.
    content = table.convert_dtypes().to_parquet(index=False)
    write_bytes(path, content)
    return path


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    body = (heads, ["---"] * len(heads), *rows)
    return [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        for row in body
    ]
