"""A sweep as one page to explore: who wins where, what memory buys, every run with its
lanes and the places of its experts.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.sizes import format_bytes
from moesim.base.units import ms, number, percent
from moesim.questions.sweep_text import (
    axis_head,
    axis_value,
    candidate_rows,
    note_lines,
    setting_line,
    time_words,
)
from moesim.reporting.figures import CPU, GPU, new_figure, policy_styles
from moesim.reporting.pages import PageTable, page_origin, trace_words, write_page
from moesim.runs.sweeps.ranking import ranking
from moesim.runs.sweeps.rows import FULL_SHARE, NEVER_USED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from moesim.reporting.figures import Style

MEMORY_AXES = ("cache_ratio", "slots_per_layer", "gpu_memory_bytes")
LEVELS = 25
"""Steps in which a page shows shares: finer ones would not be seen, only downloaded."""


def write_sweep(
    frame: pd.DataFrame, path: Path | str, command: str | None = None
) -> Path:
    """Write the page of a sweep.

    Args:
        frame: of `moesim.sweep`, with ``details=True``.
        path: of the page.
        command: the command line that made it; None for a call from Python.

    Returns:
        The same path.
    """
    ranked = ranking(frame)
    axes: list[str] = ranked.attrs["axes"]
    cells: list[str] = ranked.attrs["cells"]
    records = frame.to_dict("records")
    traces = frame[["trace", "trace_digest"]].drop_duplicates()
    heads, *rows = candidate_rows(ranked)
    warnings = [line for text in frame["warnings"] for line in json.loads(text)]
    return write_page(
        Path(path),
        "sweep.html",
        title=sweep_title(frame),
        origin=page_origin(
            command,
            trace="; ".join(
                trace_words(name, digest)
                for name, digest in traces.itertuples(index=False, name=None)
            ),
        ),
        setting=setting_line(frame),
        answer=_answer(ranked, rows),
        notes=note_lines(ranked),
        candidates=PageTable(heads, rows),
        runs=_run_table(records, axes),
        warnings=list(dict.fromkeys(warnings)),
        data=_script_text(_data(records, ranked, cells)),
    )


def sweep_title(frame: pd.DataFrame) -> str:
    """Model, machines and question, which a window's tab shows."""
    models = ", ".join(frame["model"].unique())
    machines = ", ".join(frame["hw"].unique())
    return f"{models} on {machines}: which policy where?"


def _answer(ranked: pd.DataFrame, rows: Sequence[Sequence[str]]) -> str:
    """Who wins most cells, in a sentence."""
    causal = [row for row in rows if row[1] != "sees the future"]
    if not causal:
        return "every policy sees the future, so none wins"
    wins = {row[0]: int(row[1].split()[0]) + int(row[2]) for row in causal}
    most = max(wins.values())
    names = " and ".join(name for name, count in wins.items() if count == most)
    cells = causal[0][1].partition(" of ")[2]
    return (
        f"fastest {time_words(ranked)} most often, ties included: {names}, in {most} of"
        f" {cells}"
    )


def _run_table(records: Sequence[Mapping[Any, Any]], axes: Sequence[str]) -> PageTable:
    named = list(axes) or ["policy"]
    heads = [
        *map(axis_head, named),
        "first token",
        "per token",
        "decode",
        "hit rate",
        "takes of GPU",
        "to GPU",
        "busiest lane",
        "run",
    ]
    rows = [
        [
            *(axis_value(name, run[name]) for name in named),
            ms(run["ttft_s"]),
            ms(run["tpot_s"]),
            number(run["decode_tokens_per_s"], " tok/s"),
            percent(run["hit_rate_active"]),
            format_bytes(run["gpu_bytes"]),
            format_bytes(run["h2d_bytes"]),
            f"{run['busiest']} {percent(run['busiest_share'], 0)}",
            ms(run["makespan_s"]),
        ]
        for run in records
    ]
    return PageTable(heads, rows)


def _data(
    records: Sequence[Mapping[Any, Any]], ranked: pd.DataFrame, cells: Sequence[str]
) -> dict[str, Any]:
    """What the page's script reads."""
    axes: list[str] = ranked.attrs["axes"]
    measure: str = ranked.attrs["measure"]
    competing = [name for name in axes if name in ranked.columns and name not in cells]
    named = competing or ["policy"]
    winners = {
        (_cell(row, cells), row["candidate"])
        for row in ranked[ranked["tied"]].to_dict("records")
    }
    runs = []
    for index, run in enumerate(records):
        policy = "+".join(
            str(run[name]) for name in named if axis_value(name, run[name]) != "default"
        )
        cell = _cell(run, cells)
        words = [axis_value(name, run[name]) for name in axes]
        lanes = json.loads(run["lanes"])
        runs.append(
            {
                "index": index,
                "name": ", ".join(words) or policy,
                "policy": policy,
                "cell": " | ".join(cell),
                "at": {name: axis_value(name, run[name]) for name in cells},
                "s": run[measure],
                "makespan_s": run["makespan_s"],
                "gpu_bytes": run["gpu_bytes"],
                "oracle": run["oracle"],
                "wins": (cell, policy) in winners,
                "facts": _facts(run),
                "lanes": [
                    [lane, busy_s, lanes["stall_s"].get(lane)]
                    for lane, busy_s in lanes["busy_s"].items()
                ],
                "experts": run["placement_experts"],
                "placement": _packed(run["placement"]),
            }
        )
    return {
        "axes": [[name, axis_head(name)] for name in cells],
        "memory_axes": [name for name in cells if name in MEMORY_AXES],
        "measure": f"time {time_words(ranked)}",
        "policies": list(dict.fromkeys(run["policy"] for run in runs)),
        "colours": {
            name: style.colour
            for name, style in policy_styles(run["policy"] for run in runs).items()
        },
        "devices": [CPU, GPU],
        "never_used": NEVER_USED,
        "full_share": FULL_SHARE,
        "runs": runs,
    }


def _cell(row: Mapping[Any, Any], cells: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis_value(name, row[name]) for name in cells)


def _facts(run: Mapping[Any, Any]) -> list[list[str]]:
    """What the run was, and what came out."""
    return [
        ["model", run["model"]],
        ["machine", f"{run['hw']} ({run['hw_kind']} profile)"],
        ["policy", run["policy"]],
        ["first token", ms(run["ttft_s"])],
        ["per token", f"{ms(run['tpot_s'])}, 95 % within {ms(run['tpot_p95_s'])}"],
        ["hit rate", percent(run["hit_rate_active"])],
        ["GPU memory", format_bytes(run["gpu_bytes"])],
        ["to GPU", format_bytes(run["h2d_bytes"])],
        ["digest", run["digest"]],
    ]


def _packed(placement: bytes) -> str:
    """Shares in `LEVELS` steps, deflated, as text."""
    shares = np.frombuffer(placement, np.uint8)
    step = FULL_SHARE // LEVELS
    coarse = np.where(shares == NEVER_USED, NEVER_USED, shares // step * step)
    packed = zlib.compress(coarse.astype(np.uint8).tobytes(), 9)
    return base64.b64encode(packed).decode("ascii")


def _script_text(content: Any) -> str:
    """JSON that may stand in a script element: nothing in it ends the element."""
    # What is no number has no place in JSON.
    text = json.dumps(_without_nan(content), separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _without_nan(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_nan(value) for value in content]
    # NaN is the only value that is not itself.
    return None if content != content else content  # noqa: PLR0124


MOST_PANELS = 12
"""Panels that a picture can hold; a page shows the rest."""

MOST_PANELS_ABREAST = 4


def sweep_figure(frame: pd.DataFrame) -> Figure:
    """Draw the time of each policy over the axis with the most values, a panel for each
    combination of the others; bands are 95 % intervals, policies that see the future
    are dashed.

    Args:
        frame: of `moesim.sweep`, with ``details=True``.
    """
    ranked = ranking(frame)
    cells: list[str] = ranked.attrs["cells"]
    axis = max(cells, key=lambda name: ranked[name].nunique(), default=None)
    others = [name for name in cells if name != axis]
    panels: list[tuple[Any, pd.DataFrame]] = [((), ranked)]
    if others:
        panels = list(ranked.groupby(others, sort=False, dropna=False))[:MOST_PANELS]

    columns = min(MOST_PANELS_ABREAST, len(panels))
    rows = -(-len(panels) // columns)  # rounded up
    figure = new_figure(2.2 + 3.2 * columns, 0.6 + 2.8 * rows)
    # One scale for all panels, from zero, so that heights can be compared.
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    styles = policy_styles(map(str, ranked["candidate"]))
    for place, (key, panel) in zip(grid, panels, strict=False):
        _draw(place, panel, axis, styles)
        values = zip(others, key, strict=True)
        words = [axis_value(name, value) for name, value in values]
        place.set_title(", ".join(words), fontsize=9, loc="left")
    for place in grid[len(panels) :]:
        place.set_visible(False)

    per_token = ranked.attrs["measure"] == "tpot_s"
    grid[0].set_ylabel("ms per token" if per_token else "ms, whole trace")
    figure.suptitle(sweep_title(frame), fontsize=9, x=0.01, ha="left")
    grid[0].set_ylim(0, 1e3 * ranked["seconds"].max() * 1.05)
    figure.legend(
        *grid[0].get_legend_handles_labels(),
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw(
    place: Axes, panel: pd.DataFrame, axis: str | None, styles: Mapping[str, Style]
) -> None:
    # Without an axis every policy has one point.
    values = [None] if axis is None else list(panel[axis].unique())
    positions = {value: position for position, value in enumerate(values)}
    for candidate, line in panel.groupby("candidate", sort=True):
        style = styles[str(candidate)]
        at = [0] * len(line) if axis is None else line[axis].map(positions)
        place.plot(
            at,
            1e3 * line["seconds"],
            "--" if line["oracle"].any() else style.line,
            color=style.colour,
            linewidth=style.width,
            marker=style.mark,
            markersize=5,
            label=str(candidate),
        )
        place.fill_between(
            at,
            1e3 * line["low_s"],
            1e3 * line["high_s"],
            color=style.colour,
            alpha=0.2,
            linewidth=0,
        )
    place.spines[["top", "right"]].set_visible(False)
    if axis is not None:
        labels = [axis_value(axis, value) for value in values]
        place.set_xticks(range(len(values)), labels, fontsize=8, rotation=20)
        place.set_xlabel(axis_head(axis))
