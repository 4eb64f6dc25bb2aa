"""A comparison as one HTML page: who is fastest, what every lane did, which expert was
where, and when.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moesim.reporting.figures import comparison_figure, placement_figure, step_figure
from moesim.reporting.pages import (
    PageTable,
    page_figure,
    page_origin,
    trace_words,
    write_page,
)
from moesim.reporting.text import (
    busy_shares,
    comparison_rows,
    ranking_lines,
    shared_setting,
)
from moesim.reporting.units import percent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pandas as pd

    from moesim.runs.result import Run

TITLE = "Policies compared"


def write_comparison(
    table: pd.DataFrame,
    runs: Mapping[str, Run],
    path: Path,
    command: str | None = None,
) -> Path:
    """Write the page of a comparison.

    Args:
        table, runs: as `moesim.sweeps.comparison.compare` returns them.
        path: of the page.
        command: the command line that made it; None for a call from Python.

    Returns:
        The same path.
    """
    # The first line names the winner, the others qualify it.
    lines = ranking_lines(table, runs)
    causal = table[~table["oracle"].astype(bool)]
    # If every policy sees the future, the fastest of them is shown nevertheless.
    best = str((causal if len(causal) else table)["policy"].iloc[0])
    return write_page(
        path,
        "comparison.html",
        title=TITLE,
        origin=origin_of(runs, command),
        setting=shared_setting(runs).split("\n"),
        answer=lines[0],
        notes=lines[1:],
        comparison=PageTable(*comparison_rows(table)),
        bars=page_figure(
            comparison_figure(table, runs),
            "Bars: speed, hit rate and bytes copied, for each policy",
        ),
        lanes=_lane_table(table, runs),
        best=best,
        **_figures_of(runs[best]),
        **closing(runs),
    )


def origin_of(runs: Mapping[Any, Run], command: str | None) -> list[tuple[str, str]]:
    """The head of a page about runs of one trace."""
    config = next(iter(runs.values())).config
    trace = trace_words(config["trace"], config["trace_digest"])
    return page_origin(command, trace=trace)


def closing(runs: Mapping[str, Run]) -> dict[str, Any]:
    """What every comparison ends with: each warning once, and the settings of all runs
    by name.
    """
    # Most warnings are about the trace or the machine, and so the same for all runs.
    warnings = dict.fromkeys(
        warning for run in runs.values() for warning in run.warnings
    )
    configs = {name: run.config for name, run in runs.items()}
    return {"warnings": list(warnings), "settings": json.dumps(configs, indent=1)}


def _figures_of(run: Run) -> dict[str, Any]:
    """Placement and one step of a run; None for a run without any step."""
    # The template leaves out the sections of figures that are None.
    if not run.metrics["steps"]:
        return {"placement": None, "step": None}
    return {
        "placement": page_figure(
            placement_figure(run),
            "Map of experts by layer, coloured by the share computed on the GPU",
        ),
        "step": page_figure(
            step_figure(run), "Timeline of all lanes in the first layers of one step"
        ),
    }


def _lane_table(table: pd.DataFrame, runs: Mapping[str, Run]) -> PageTable:
    # All runs are on one machine, so any of them names the lanes.
    lanes = next(iter(runs.values())).timeline.lanes
    rows = []
    for policy in table["policy"]:
        shares = busy_shares(runs[policy])
        rows.append([policy, *(percent(shares[lane], 0) for lane in lanes)])
    return PageTable(["policy", *lanes], rows)
