"""A comparison as one HTML page: who is fastest, what every lane did, which expert was
where, and when.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moesim.base.units import format_bytes, number, percent
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
from moesim.questions.replay import shared_setting
from moesim.questions.replay_page import add_runs, origin_of
from moesim.reporting.charts import (
    GPU,
    QUIET,
    Chart,
    Styles,
    channel,
    columns_of,
    layer,
    shown,
)
from moesim.reporting.pages import Page, PageTable, Text
from moesim.runs.result import busy_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pandas as pd

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
    answer, *notes = ranking_lines(table, runs)
    page = Page(
        _title(runs),
        origin_of(runs, command),
        setting=shared_setting(runs).split("\n"),
        answer=answer,
        notes=notes,
    )
    page.add("", PageTable(*comparison_rows(table), "All policies"))
    page.add("", comparison_figure(table, runs))
    page.add(
        "What did every lane do?",
        _lane_table(table, runs),
        note="Share of the run in which it worked.",
    )
    # Fastest first, and policies that see the future last: they are no rivals.
    order = table.sort_values("oracle", kind="stable")["policy"]
    add_runs(page, {policy: runs[policy] for policy in order})
    return _close(page, runs).write(path)


def _title(runs: Mapping[Any, Run]) -> str:
    """Model, machines and question, which a window's tab shows."""
    configs = [run.config for run in runs.values()]
    machines = ", ".join(dict.fromkeys(config["hw"] for config in configs))
    return f"{configs[0]['model']} on {machines}: policies compared"


def _close(page: Page, runs: Mapping[str, Run]) -> Page:
    """What every comparison ends with: warnings, and the settings of all runs."""
    page.add_warnings(text for run in runs.values() for text in run.warnings)
    configs = {name: run.config for name, run in runs.items()}
    return page.add("Settings", Text([json.dumps(configs, indent=1)], "folded"))


def _lane_table(table: pd.DataFrame, runs: Mapping[str, Run]) -> PageTable:
    # All runs are on one machine, so any of them names the lanes.
    lanes = next(iter(runs.values())).timeline.lanes
    rows = []
    for policy in table["policy"]:
        shares = busy_shares(runs[policy])
        rows.append([policy, *(percent(shares[lane], 0) for lane in lanes)])
    return PageTable(["policy", *lanes], rows, "Share in which each lane worked")


def write_cells(compared: Comparison, path: Path, command: str | None = None) -> Path:
    """Write the page of a comparison, and return its path.

    Args:
        compared: what it shows.
        path: of the page.
        command: the command line that made it; None for a call from Python.
    """
    # The first line names the winners, the others qualify them.
    answer, *notes = answer_lines(compared)
    meaning = time_column(compared.table)[1]
    page = Page(
        _title(compared.runs),
        origin_of(compared.runs, command),
        setting=[cells_setting(compared)],
        answer=answer,
        notes=notes,
    )
    winners = "The fastest policy on each machine with each memory"
    page.add("", PageTable(*winner_rows(compared), winners))
    page.add("", cells_figure(compared))
    times = PageTable(*time_rows(compared), "Time of every policy")
    page.add(f"Time of every policy, {meaning}", times)
    page.add(
        "Every run",
        _run_table(compared),
        note="The shortest run first, on each machine with each memory.",
    )
    # Keys of runs are machine, memory and policy.
    named = {" | ".join(key): run for key, run in compared.runs.items()}
    return _close(page, named).write(path)


def _run_table(compared: Comparison) -> PageTable:
    """Every run, led by the machine and the memory that it ran on."""
    heads, rows = comparison_rows(compared.table)
    cells = compared.table[CELL].to_numpy().tolist()
    return PageTable(
        ["machine", memory_head(compared), *heads],
        [cell + row for cell, row in zip(cells, rows, strict=True)],
        "Every run",
    )


MEMORY_LABELS = {
    "gpu_memory_bytes": "GPU memory, GiB",
    "slots_per_layer": "cache slots per layer",
    "cache_ratio": "GPU cache, share of all experts",
}
"""By the way in which sizes were stated: label of their axis."""
GIB = 2**30
MOST_PANELS_ABREAST = 3


def cells_figure(compared: Comparison) -> Chart:
    """Draw the time of the whole trace over memory: a line per policy, a panel per
    machine. It is the measure by which winners are named.

    Policies that see the future are dashed. With one memory size only, machines stand
    on the axis.
    """
    table = compared.table
    machines = list(table["hw"].unique())
    over_machines = len(compared.memories) == 1
    sizes = {name: options.size[1] for name, options in compared.memories.items()}
    unit = GIB if compared.axis == "gpu_memory_bytes" else 1
    rows = table[["hw", "memory", "policy", "makespan_s"]].assign(
        size=table["memory"].map(sizes).astype(float) / unit
    )
    policies = list(compared.by_policy())
    oracles = frozenset(table.loc[table["oracle"], "policy"])
    if over_machines:
        x = channel("hw", None, "N", sort=machines, axis={"labelAngle": -20})
    else:
        x = channel("size", MEMORY_LABELS[compared.axis], scale={"nice": False})
    y = channel("makespan_s", "s, whole trace")
    hover = shown(
        ("policy", "policy"),
        ("hw", "machine"),
        ("memory", "memory"),
        ("makespan_s", "s, whole trace", ".4g"),
    )
    panel = {"layer": Styles(policies, oracles).lines(x, y, hover)}
    spec: dict[str, Any] = {"data": {"name": "runs"}, "title": cells_setting(compared)}
    if over_machines or len(machines) == 1:
        spec |= {"width": 560, "height": 260, **panel}
    else:
        spec |= {
            "facet": channel("hw", None, "N", sort=machines),
            "columns": min(MOST_PANELS_ABREAST, len(machines)),
            "spec": {"width": 250, "height": 230, **panel},
        }
    label = "Time of the whole trace of each policy over memory, a panel per machine"
    return Chart(spec, {"runs": columns_of(rows)}, label)


def comparison_figure(table: pd.DataFrame, runs: Mapping[str, Run]) -> Chart:
    """Draw a comparison as three rows of bars that share their policies: speed, hit
    rate, bytes.
    """
    has_decode = table["decode_tokens_per_s"].notna().any()
    phase = "decode" if has_decode else "prefill"
    moved = table["h2d_bytes"] + table["ssd_bytes"]
    panels: tuple[tuple[str, pd.Series, Callable[[float], str], str], ...] = (
        (f"{phase}, tokens/s", table[f"{phase}_tokens_per_s"], number, GPU),
        ("hit rate of active experts", table["hit_rate_active"], percent, QUIET),
        ("copied to the GPU and read from SSD", moved, format_bytes, QUIET),
    )
    policies = table["policy"].tolist()
    charts = []
    data = {}
    for place, (title, column, words, colour) in enumerate(panels):
        values = column.astype(float).fillna(0.0)
        name = f"panel{place}"
        data[name] = {
            "policy": policies,
            "value": values.tolist(),
            "words": [words(value) for value in values],
        }
        # One set of names for all panels, and room for the label of the longest bar.
        y = channel(
            "policy", None, "N", sort=policies, axis={"domain": False, "ticks": False}
        )
        if place:
            y["axis"] = None
        x = channel(
            "value", None, axis=None, scale={"domain": [0, 1.35 * (values.max() or 1)]}
        )
        hover = shown(("policy", "policy"), ("words", title))
        bars = layer({"type": "bar", "color": colour}, x=x, y=y, tooltip=hover)
        labels = layer(
            {"type": "text", "align": "left", "dx": 4},
            x=x,
            y=y,
            text={"field": "words"},
        )
        charts.append(
            {
                "title": {"text": title, "fontSize": 12},
                "data": {"name": name},
                "width": 240,
                "height": {"step": 26},
                "layer": [bars, labels],
            }
        )
    # A picture travels without its table, so it says what was compared.
    setting = shared_setting(runs).replace("\n", "; ")
    spec = {"title": setting, "hconcat": charts, "spacing": 12}
    return Chart(spec, data, "Speed, hit rate and bytes copied, for each policy")
