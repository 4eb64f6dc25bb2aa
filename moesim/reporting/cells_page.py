"""A comparison over several machines or memories as one HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.reporting.cells_figure import cells_figure
from moesim.reporting.cells_text import (
    answer_lines,
    cells_setting,
    memory_head,
    time_column,
    time_rows,
    winner_rows,
)
from moesim.reporting.comparison_page import TITLE, closing, origin_of
from moesim.reporting.pages import PageTable, page_figure, write_page
from moesim.reporting.text import comparison_rows
from moesim.sweeps.comparison import CELL

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.sweeps.comparison import Comparison


def write_cells(compared: Comparison, path: Path, command: str | None = None) -> Path:
    """Write the page of a comparison, and return its path.

    Args:
        compared: what it shows.
        path: of the page.
        command: the command line that made it; None for a call from Python.
    """
    # The first line names the winners, the others qualify them.
    lines = answer_lines(compared)
    meaning = time_column(compared.table)[1]
    return write_page(
        path,
        "cells.html",
        title=TITLE,
        origin=origin_of(compared.runs, command),
        setting=cells_setting(compared),
        answer=lines[0],
        winners=PageTable(*winner_rows(compared)),
        notes=lines[1:],
        curves=page_figure(
            cells_figure(compared),
            "Time of each policy over memory, a panel per machine",
        ),
        meaning=meaning,
        times=PageTable(*time_rows(compared)),
        runs=_run_table(compared),
        # Keys of runs are machine, memory and policy.
        **closing({" | ".join(key): run for key, run in compared.runs.items()}),
    )


def _run_table(compared: Comparison) -> PageTable:
    """Every run, led by the machine and the memory that it ran on."""
    heads, rows = comparison_rows(compared.table)
    cells = compared.table[CELL].to_numpy().tolist()
    return PageTable(
        ["machine", memory_head(compared), *heads],
        [cell + row for cell, row in zip(cells, rows, strict=True)],
    )
