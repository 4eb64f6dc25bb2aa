"""A comparison as one HTML page: who is fastest, what every lane did, which expert was
where, and when.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moesim.base.sizes import format_bytes
from moesim.base.units import number, percent
from moesim.questions.compare import CELL, comparison_rows
from moesim.questions.compare_text import (
    answer_lines,
    cells_setting,
    memory_head,
    ranking_lines,
    time_column,
    time_rows,
    winner_rows,
)
from moesim.questions.replay import placement_figure, shared_setting, step_figure
from moesim.reporting.figures import QUIET, STRONG, new_figure, policy_styles
from moesim.reporting.pages import (
    PageTable,
    page_figure,
    page_origin,
    trace_words,
    write_page,
)
from moesim.runs.result import busy_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from moesim.questions.compare import Comparison
    from moesim.runs.result import Run


def write_comparison(
    table: pd.DataFrame,
    runs: Mapping[str, Run],
    path: Path,
    command: str | None = None,
) -> Path:
    """Write the page of a comparison.

    Args:
        table, runs: as `moesim.questions.compare.compare` returns them.
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
        title=_title(runs),
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


def _title(runs: Mapping[Any, Run]) -> str:
    """Model, machines and question, which a window's tab shows."""
    configs = [run.config for run in runs.values()]
    machines = ", ".join(dict.fromkeys(config["hw"] for config in configs))
    return f"{configs[0]['model']} on {machines}: policies compared"


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
        title=_title(compared.runs),
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


MEMORY_LABELS = {
    "gpu_memory_bytes": "GPU memory",
    "slots_per_layer": "cache slots per layer",
    "cache_ratio": "GPU cache, share of all experts",
}
"""By the way in which sizes were stated: label of their axis."""
MOST_PANELS_ABREAST = 3


def cells_figure(compared: Comparison) -> Figure:
    """Draw the time of the whole trace over memory: a line per policy, a panel per
    machine. It is the measure by which winners are named.

    Policies that see the future are dashed. With one memory size only, machines stand
    on the axis.
    """
    machines = list(compared.table["hw"].unique())
    memories = list(compared.table["memory"].unique())
    over_machines = len(memories) == 1
    axis_column = "hw" if over_machines else "memory"
    panel_column = "memory" if over_machines else "hw"
    ticks = machines if over_machines else memories
    positions = list(range(len(machines))) if over_machines else _sizes(compared)

    # One limit for all: panels that share an axis would keep that of the first.
    longest_s = float(compared.table["makespan_s"].max())
    panels = [panel for _, panel in compared.table.groupby(panel_column, sort=False)]
    columns = min(MOST_PANELS_ABREAST, len(panels))
    rows = -(-len(panels) // columns)  # rounded up
    figure = new_figure(2.2 + 3.6 * columns, 0.6 + 3.0 * rows)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for axis, panel in zip(axes, panels, strict=False):
        styles = policy_styles(compared.by_policy())
        for policy, style in styles.items():
            of_policy = panel[panel["policy"] == policy].set_index(axis_column)
            times_s = of_policy["makespan_s"].reindex(ticks)
            axis.plot(
                positions,
                times_s,
                "--" if of_policy["oracle"].any() else style.line,
                color=style.colour,
                linewidth=style.width,
                marker=style.mark,
                markersize=5,
                label=policy,
            )
        _finish_axis(axis, str(panel[panel_column].iloc[0]), longest_s)
        if over_machines:
            axis.set_xticks(positions, ticks, rotation=20, ha="right")
        else:
            axis.set_xticks(positions, ticks, fontsize=8)
            axis.set_xlabel(MEMORY_LABELS[compared.axis])

    # The last row of the grid may have places without a panel.
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("s, whole trace")
    figure.suptitle(cells_setting(compared), fontsize=9, x=0.01, ha="left")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )
    return figure


def _finish_axis(axis: Axes, title: str, longest_s: float) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    # From zero, so that heights can be compared.
    axis.set_ylim(0, 1.05 * longest_s or 1.0)
    axis.spines[["top", "right"]].set_visible(False)


def _sizes(compared: Comparison) -> list[float]:
    """Memory sizes as numbers, in the unit in which they were stated."""
    return [options.size[1] for options in compared.memories.values()]


def comparison_figure(table: pd.DataFrame, runs: Mapping[str, Run]) -> Figure:
    """Draw a comparison as three rows of bars that share their policies: speed, hit
    rate, bytes.
    """
    has_decode = table["decode_tokens_per_s"].notna().any()
    phase = "decode" if has_decode else "prefill"
    panels: tuple[tuple[pd.Series, str, Callable[[float], str], str], ...] = (
        (table[f"{phase}_tokens_per_s"], f"{phase}, tokens/s", number, STRONG),
        (table["hit_rate_active"], "hit rate of active experts", percent, QUIET),
        (
            table["h2d_bytes"] + table["ssd_bytes"],
            "copied to the GPU and read from SSD",
            format_bytes,
            QUIET,
        ),
    )
    figure = new_figure(11, 1.4 + 0.42 * len(table))
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (column, title, label, colour) in zip(axes, panels, strict=True):
        values = column.astype(float).fillna(0.0)
        bars = axis.barh(range(len(values)), values, color=colour, height=0.65)
        axis.bar_label(bars, [label(value) for value in values], padding=3, fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        # Room for the label of the longest bar.
        axis.margins(x=0.18)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)

    axes[0].set_yticks(range(len(table)), table["policy"])
    # From top to bottom in the order of the table, fastest first.
    axes[0].invert_yaxis()
    setting = shared_setting(runs).replace("\n", "; ")
    # A figure travels without its table, so it says what was compared.
    figure.suptitle(setting, fontsize=9, x=0.01, ha="left")
    return figure
