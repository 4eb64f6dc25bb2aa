"""Advice as one HTML page: the command line, speed over layers with its band and
measured points, memory and cliff, terms, changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.advice.plan.commands import server_command
from moesim.advice.report.text import (
    bound_words,
    grade_words,
    model_words,
    setting_rows,
    term_rows,
    what_if_rows,
)
from moesim.advice.report.words import interval_words, memory_words, speed_words
from moesim.reporting.pages import PageTable, page_figure, page_origin, write_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moesim.advice.advise import Advice


def write_advice(advice: Advice, path: Path, command: str | None = None) -> Path:
    """Write the page; return its path.

    Args:
        advice: what it shows.
        path: of the page.
        command: the command line that made it; None for a call from Python.
    """
    # matplotlib takes a second to import, which only pages should.
    from moesim.advice.report.charts import (  # noqa: PLC0415 - as said above
        memory_chart,
        speed_chart,
    )

    best = advice.best
    # A machine without a card has no such curve.
    speed = None
    if advice.curve:
        label = "Speed over the number of layers on the CPU, with 90 % bands"
        speed = page_figure(speed_chart(advice), label)
    memory = page_figure(memory_chart(advice), "Memory of the advised setting")
    return write_page(
        path,
        "advice.html",
        title=f"{advice.model.name} on {advice.machine.name}",
        origin=page_origin(command),
        model=model_words(advice.model),
        machine=advice.machine.name + memory_words(advice.machine),
        grade=grade_words(advice),
        assumed=advice.machine.assumed,
        command=server_command(
            best.candidate.setting, advice.model, advice.machine, advice.job
        ),
        decode=speed_words(best.decode),
        prefill=speed_words(best.prefill),
        job=interval_words(best.job, "s"),
        bound=bound_words(advice),
        speed=speed,
        memory=memory,
        settings=_table(setting_rows(advice)),
        terms=_table(term_rows(best)),
        what_ifs=_table(what_if_rows(advice)),
        contradicting=[
            f"{row.words}: {reason}" for row, reason in advice.observed.contradicting
        ],
        questions=advice.questions,
    )


def _table(rows: Sequence[Sequence[str]]) -> PageTable:
    return PageTable(rows[0], rows[1:])
