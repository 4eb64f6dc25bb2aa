"""A comparison over several machines or memories as one HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.reporting.comparison_page import TITLE, closing, origin_of
from moesim.reporting.pages import PageTable, page_figure, write_page
from moesim.reporting.sweep_figure import sweep_figure
from moesim.reporting.sweep_text import (
    answer_lines,
    memory_head,
    sweep_setting,
    time_column,
    time_rows,
    winner_rows,
)
from moesim.reporting.text import comparison_rows
from moesim.runs.sweep import CELL

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.runs.sweep import Sweep


def write_sweep(sweep: Sweep, path: Path, command: str | None = None) -> Path:
    """Write the page of a sweep, and return its path.

    Args:
        sweep: what it shows.
        path: of the page.
        command: the command line that made it; None for a call from Python.
    """
    # The first line names the winners, the others qualify them.
    lines = answer_lines(sweep)
    meaning = time_column(sweep.table)[1]
    return write_page(
        path,
        "sweep.html",
        title=TITLE,
        origin=origin_of(sweep.runs, command),
        setting=sweep_setting(sweep),
        answer=lines[0],
        winners=PageTable(*winner_rows(sweep)),
        notes=lines[1:],
        curves=page_figure(
            sweep_figure(sweep), "Time of each policy over memory, a panel per machine"
        ),
        meaning=meaning,
        times=PageTable(*time_rows(sweep)),
        runs=_run_table(sweep),
        # Keys of runs are machine, memory and policy.
        **closing({" | ".join(key): run for key, run in sweep.runs.items()}),
    )


def _run_table(sweep: Sweep) -> PageTable:
    """Every run, led by the machine and the memory that it ran on."""
    heads, rows = comparison_rows(sweep.table)
    cells = sweep.table[CELL].to_numpy().tolist()
    return PageTable(
        ["machine", memory_head(sweep), *heads],
        [cell + row for cell, row in zip(cells, rows, strict=True)],
    )
