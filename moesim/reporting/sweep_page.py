"""A comparison over several machines or memories as words, picture and page: who wins
where, and by how much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.reporting import html as page
from moesim.reporting.comparison_page import closing_sections
from moesim.reporting.figures import new_figure, svg
from moesim.reporting.text import (
    aligned,
    comparison_rows,
    ms,
    number,
    percent,
    rivalry_lines,
)
from moesim.runs.sweep import CELL

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from moesim.runs.sweep import Sweep

AXES = {
    "gpu_memory_bytes": ("GPU memory", "GPU memory"),
    "slots_per_layer": ("per layer", "cache slots per layer"),
    "cache_ratio": ("GPU cache", "GPU cache, share of all experts"),
}
"""By the way in which sizes were stated: head of a column, and words below an axis."""


def sweep_text(found: Sweep) -> str:
    """Lay out a sweep for a terminal: who wins how often, who wins where, and the time
    of every policy there.
    """
    answer, *notes = answer_lines(found)
    tables = [
        aligned([head, *rows]) for head, rows in (winner_rows(found), time_rows(found))
    ]
    return "\n".join(
        [what_words(found), "", *tables[0], "", *tables[1], "", answer, *notes]
    )


def what_words(found: Sweep) -> str:
    """The model, and how much was replayed on how much."""
    config = next(iter(found.runs.values())).config
    machines, memories = (found.table[column].nunique() for column in CELL)
    places = [
        (
            f"{machines} machines"
            if machines > 1
            else f"{config['hw']} ({config['hw_kind']} profile)"
        ),
        (
            f"{memories} memory sizes"
            if memories > 1
            else f"{_memory_head(found)} {found.table['memory'].iloc[0]}"
        ),
    ]
    return (
        f"{config['model']}, batch {config['batch']}, {len(found.by_policy())} policies"
        f" on {' with '.join(places)}"
    )


def answer_lines(found: Sweep) -> list[str]:
    """Who is fastest in how many places; then what a reader must know before believing
    it.
    """
    wins = found.fastest()["policy"].value_counts()
    words = ", ".join(
        f"{policy} in {count} of {found.cells}" for policy, count in wins.items()
    )
    answer = (
        f"fastest over the whole trace: {words or 'nobody that sees the past only'}"
    )
    return [answer, *rivalry_lines(found.by_policy())]


def winner_rows(found: Sweep) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row for every machine with every memory: the fastest
    policy there.
    """
    head = [
        "machine",
        _memory_head(found),
        "fastest",
        "first token",
        "per token",
        "decode",
        "hit rate",
        "ahead by",
        "of",
    ]
    rows = []
    for _, part in found.table[~found.table["oracle"]].groupby(CELL, sort=False):
        best, *others = part.to_dict("records")
        ahead = ["", ""]
        if others and best["makespan_s"]:
            ahead = [
                percent(others[0]["makespan_s"] / best["makespan_s"] - 1),
                others[0]["policy"],
            ]
        rows.append(
            [
                best["hw"],
                best["memory"],
                best["policy"],
                ms(best["ttft_s"]),
                ms(best["tpot_s"]),
                number(best["decode_tokens_per_s"], " tok/s"),
                percent(best["hit_rate_active"]),
                *ahead,
            ]
        )
    return head, rows


def time_rows(found: Sweep) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row for every machine with every memory: the time of each
    policy there.
    """
    column, what = time_column(found.table)
    policies = list(found.by_policy())
    rows = []
    for (machine, memory), part in found.table.groupby(CELL, sort=False):
        times = part.set_index("policy")[column]
        rows.append(
            [str(machine), str(memory), *(ms(times[policy]) for policy in policies)]
        )
    return [what, _memory_head(found), *policies], rows


def time_column(table: pd.DataFrame) -> tuple[str, str]:
    """What a sweep is about: time per token; the whole run where no token is
    generated.
    """
    return (
        ("tpot_s", "per token")
        if table["tpot_s"].notna().any()
        else ("makespan_s", "whole trace")
    )


def sweep_figure(found: Sweep) -> Figure:
    """Draw time per token over memory: a line per policy, a panel per machine; dashed
    is who sees the future.

    With one memory only, machines stand on the axis.
    """
    column, what = time_column(found.table)
    machines = list(found.table["hw"].unique())
    memories = list(found.table["memory"].unique())
    over_machines = len(memories) == 1
    panels = [
        part
        for _, part in found.table.groupby(
            "memory" if over_machines else "hw", sort=False
        )
    ]
    wide = min(3, len(panels))
    tall = -(-len(panels) // wide)
    figure = new_figure(2.2 + 3.6 * wide, 0.6 + 3.0 * tall)
    axes = figure.subplots(tall, wide, sharey=True, squeeze=False).ravel()
    for axis, part in zip(axes, panels, strict=False):
        for policy in found.by_policy():
            mine = part[part["policy"] == policy].set_index(
                "hw" if over_machines else "memory"
            )
            times_ms = (
                mine[column].reindex(machines if over_machines else memories) * 1e3
            )
            places = (
                list(range(len(machines))) if over_machines else _memory_places(found)
            )
            style = "--" if mine["oracle"].any() else "-"
            axis.plot(places, times_ms, style, marker="o", markersize=4, label=policy)
        _finish_axis(
            axis,
            found,
            memories[0] if over_machines else str(part["hw"].iloc[0]),
            over_machines=over_machines,
        )
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].set_ylabel(f"ms, {what}")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )
    return figure


def _finish_axis(axis: Axes, found: Sweep, title: str, *, over_machines: bool) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    if over_machines:
        axis.set_xticks(
            range(found.table["hw"].nunique()),
            list(found.table["hw"].unique()),
            rotation=20,
            ha="right",
        )
    else:
        axis.set_xticks(
            _memory_places(found), list(found.table["memory"].unique()), fontsize=8
        )
        axis.set_xlabel(AXES[found.axis][1])


def _memory_head(found: Sweep) -> str:
    return AXES[found.axis][0]


def _memory_places(found: Sweep) -> list[float]:
    """Where the memories lie on their axis."""
    return [options.size[1] for options in found.memories.values()]


def write_sweep(found: Sweep, path: Path) -> Path:
    """Write the page of a sweep, and return its place."""
    answer, *notes = answer_lines(found)
    parts = [
        page.paragraph(what_words(found)),
        page.paragraph(answer, "answer"),
        page.table(*winner_rows(found)),
    ]
    parts += [page.paragraph(line, "note") for line in notes]
    parts.append(svg(sweep_figure(found)))
    parts.append(
        page.section(
            f"Time of every policy, {time_column(found.table)[1]}",
            "",
            page.table(*time_rows(found)),
        )
    )
    head, rows = comparison_rows(found.table)
    where = found.table[CELL].to_numpy().tolist()
    body = page.table(
        ["machine", _memory_head(found), *head],
        [w + r for w, r in zip(where, rows, strict=True)],
    )
    parts.append(
        page.section(
            "Every run",
            "The shortest run first, on each machine with each memory.",
            body,
        )
    )
    parts += closing_sections({" | ".join(key): run for key, run in found.runs.items()})
    return page.write_page(path, "Policies compared", parts)
