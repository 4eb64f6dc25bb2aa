"""`answer`: whatever a function of moesim returned, as text, page, JSON and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from moesim.questions.gap import Gap, gap_answer
from moesim.questions.hit_rates import hits_answer
from moesim.questions.quality import Quality, quality_answer
from moesim.questions.ranked import ranked_answer
from moesim.questions.replay import run_answer
from moesim.questions.search import search_answer
from moesim.questions.trace_stats import stats_answer
from moesim.runs.result import Run
from moesim.traces.format.reader import Trace
from moesim.traces.stats.trace_summary import summarise_trace

if TYPE_CHECKING:
    from moesim.reporting.answers import Answer


def answer(result: Any) -> Answer:
    """Put a result into words, tables and figures.

    ``print(moesim.answer(run))`` prints them, ``.write("run.html")`` writes the page,
    ``.plot()`` draws the first figure and ``.figures`` names all, ``.frame`` is the
    table.

    Args:
        result: of `replay`, `compare`, `sweep` (with ``details=True``), `search`,
            `gap`, `hit_rates`, `sensitivity` or `quality`; or an opened trace.

    Raises:
        TypeError: anything else.
    """
    if isinstance(result, pd.DataFrame):
        if "objectives" in result.attrs:
            return search_answer(result)
        counts_hits = result.index.name == "cache_ratio"
        return hits_answer(result) if counts_hits else ranked_answer(result)
    if isinstance(result, Trace):
        return stats_answer(result, summarise_trace(result))
    for kind, view in _VIEWS.items():
        if isinstance(result, kind):
            return view(result)
    if hasattr(result, "answer"):
        answered: Answer = result.answer()
        return answered
    raise TypeError(
        "answer: expected what replay, compare, sweep, search, gap, hit_rates,"
        f" sensitivity or quality returned, or a trace, got {type(result).__name__}"
    )


_VIEWS: dict[type, Any] = {Run: run_answer, Gap: gap_answer, Quality: quality_answer}
