"""A sweep as one page to explore: who wins where, what memory buys, every run with its
lanes and the places of its experts.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.options import default_of, flag_of, option_of
from moesim.base.units import format_bytes, ms, number, percent
from moesim.questions.sweep_text import (
    alike_lines,
    axis_head,
    axis_value,
    candidate_rows,
    note_lines,
    setting_line,
    time_words,
)
from moesim.reporting.charts import (
    DEVICES,
    GPU,
    QUIET,
    Chart,
    Styles,
    channel,
    layer,
    records,
    shown,
)
from moesim.reporting.pages import (
    Choice,
    Facts,
    Page,
    PageTable,
    page_origin,
    trace_words,
)
from moesim.runs.config import RunConfig
from moesim.runs.sweeps.ranking import axes_of, cell_axes, measure_of, ranking
from moesim.runs.sweeps.rows import FULL_SHARE, NEVER_USED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from moesim.reporting.charts import Spec

MEMORY_AXES = ("cache_ratio", "slots_per_layer", "gpu_memory_bytes")
GIB = 2**30
MOST_PLACES = 150_000
"""Cells of placements that a page holds; beyond it only the fastest runs have them."""

ALL = "all"


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
    runs = frame.to_dict("records")
    rows = _run_rows(runs, ranked)
    traces = frame[["trace", "trace_digest"]].drop_duplicates()
    heads, *candidates = candidate_rows(ranked)
    words = [
        trace_words(name, digest)
        for name, digest in traces.itertuples(index=False, name=None)
    ]
    page = Page(
        sweep_title(frame),
        page_origin(command, trace="; ".join(words)),
        setting=[f"{_machines(frame)}: {setting_line(frame)}"],
        answer=_answer(ranked, candidates),
        notes=[*note_lines(ranked), *alike_lines(frame, ranked)],
    )
    page.add(
        "Who is fastest where?",
        *_map_choices(cells),
        _map(rows, cells),
        note="Each place names the policy that wins most of the cells there; choose"
        " what its two sides are. A click opens its best run.",
    )
    page.add(
        "What does memory buy?",
        *_filters(rows, cells),
        _front(rows, cells, ranked),
        note="A point for each run; on the line, less memory means more time. A click"
        " on a point opens its run. Drag to move, Ctrl and wheel to zoom.",
    )
    held = _with_placement(runs, rows)
    page.add(
        "One run",
        _facts(runs),
        _lanes(runs),
        _places(runs, held),
        note="Chosen on the map, among the points or in the table below."
        + ("" if len(held) == len(runs) else " Only the fastest have their experts."),
    )
    page.add("Every policy", PageTable(heads, candidates, "Every policy"))
    page.add("Every run", _run_table(runs, axes))
    page.add_warnings(line for text in frame["warnings"] for line in json.loads(text))
    return page.write(Path(path))


def sweep_title(frame: pd.DataFrame) -> str:
    """Model, machines and question, which a window's tab shows."""
    models = ", ".join(frame["model"].unique())
    return f"{models} on {_machines(frame)}: which policy where?"


def _machines(frame: pd.DataFrame) -> str:
    return ", ".join(frame["hw"].unique())


def _answer(ranked: pd.DataFrame, rows: Sequence[Sequence[str]]) -> str:
    """Who wins most cells, in a sentence."""
    causal = [row for row in rows if row[1] != "sees the future"]
    if not causal:
        return "every policy sees the future, so none wins"
    wins = {}
    for name, alone, shared, *_ in causal:
        wins[name] = int(alone.split()[0]) + int(shared)
    most = max(wins.values())
    names = " and ".join(name for name, count in wins.items() if count == most)
    cells = causal[0][1].partition(" of ")[2]
    return (
        f"fastest {time_words(ranked)} most often, ties included: {names}, in {most} of"
        f" {cells}"
    )


def _run_table(runs: Sequence[Mapping[Any, Any]], axes: Sequence[str]) -> PageTable:
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
        for run in runs
    ]
    return PageTable(heads, rows, "Every run", opens="run")


def _run_rows(
    runs: Sequence[Mapping[Any, Any]], ranked: pd.DataFrame
) -> list[dict[str, Any]]:
    """What charts show of each run: its time and memory, and the cell that it is in."""
    axes: list[str] = ranked.attrs["axes"]
    cells: list[str] = ranked.attrs["cells"]
    competing = [name for name in axes if name in ranked.columns and name not in cells]
    winners = {
        (_cell(row, cells), row["candidate"])
        for row in ranked[ranked["tied"]].to_dict("records")
    }
    rows = []
    for index, run in enumerate(runs):
        policy = "+".join(
            str(run[name])
            for name in competing or ["policy"]
            if axis_value(name, run[name]) != "default"
        )
        cell = _cell(run, cells)
        seconds = run[ranked.attrs["measure"]]
        rows.append(
            {
                "run": index,
                "policy": policy,
                "ms": None if seconds is None else float(f"{1e3 * seconds:.5g}"),
                "gib": round(run["gpu_bytes"] / GIB, 4),
                "oracle": bool(run["oracle"]),
                "wins": (cell, policy) in winners,
                "cell": " | ".join(cell),
                **{name: axis_value(name, run[name]) for name in cells},
            }
        )
    return rows


def _cell(row: Mapping[Any, Any], cells: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis_value(name, row[name]) for name in cells)


def _styles(rows: Sequence[Mapping[str, Any]]) -> Styles:
    oracles = frozenset(row["policy"] for row in rows if row["oracle"])
    return Styles(list(dict.fromkeys(row["policy"] for row in rows)), oracles)


# Who is fastest where.


def _map_choices(cells: Sequence[str]) -> list[Choice]:
    sides = [("", "nothing"), *((name, axis_head(name)) for name in cells)]
    defaults = [*cells, "", ""]
    return [
        Choice("across", "across", sides, defaults[0]),
        Choice("down", "down", sides, defaults[1]),
    ]


def _map(rows: Sequence[Mapping[str, Any]], cells: Sequence[str]) -> Chart:
    """Winners over two axes: of equally frequent ones all are named."""
    across, down = (choice.value for choice in _map_choices(cells))
    orders = {
        name: list(dict.fromkeys(row[name] for row in rows)) for name in cells
    } or {"": [""]}
    every_value = [value for values in orders.values() for value in values]
    place = ["x", "y"]
    x = channel(
        "x", None, "N", sort=every_value, axis={"orient": "top", "labelAngle": 0}
    )
    y = channel("y", None, "N", sort=every_value)
    words = shown(
        ("names", "fastest"),
        ("wins", "cells won"),
        ("cells", "of"),
        ("best", "from, ms", ".4g"),
    )
    colour = _styles(rows).colour("first", legend=None)
    boxes = layer(
        {"type": "rect", "fillOpacity": 0.28, "cursor": "pointer"},
        x=x,
        y=y,
        color=colour,
        tooltip=words,
    )
    text = {
        "type": "text",
        "lineBreak": "\n",
        "dy": -6,
        "cursor": "pointer",
        "limit": 190,
    }
    names = layer(text, x=x, y=y, text={"field": "words"}, tooltip=words)
    spec = {
        "data": {"name": "winners"},
        "params": [
            {"name": "across", "value": across},
            {"name": "down", "value": down},
        ],
        "transform": [
            {"calculate": "across == '' ? '' : datum[across]", "as": "x"},
            {"calculate": "down == '' ? '' : datum[down]", "as": "y"},
            {
                "joinaggregate": [{"op": "distinct", "field": "cell", "as": "cells"}],
                "groupby": place,
            },
            {
                "aggregate": [
                    {"op": "distinct", "field": "cell", "as": "wins"},
                    {"op": "max", "field": "cells", "as": "cells"},
                    {"op": "min", "field": "ms", "as": "best"},
                    {"op": "argmin", "field": "ms", "as": "best_run"},
                ],
                "groupby": [*place, "policy"],
            },
            {
                "joinaggregate": [{"op": "max", "field": "wins", "as": "most"}],
                "groupby": place,
            },
            {"filter": "datum.wins == datum.most"},
            {
                "aggregate": [
                    {"op": "values", "as": "rows"},
                    {"op": "max", "field": "wins", "as": "wins"},
                    {"op": "max", "field": "cells", "as": "cells"},
                    {"op": "min", "field": "best", "as": "best"},
                ],
                "groupby": place,
            },
            {"calculate": "join(pluck(datum.rows, 'policy'), ' = ')", "as": "names"},
            {"calculate": "datum.rows[0].policy", "as": "first"},
            {"calculate": "datum.rows[0].best_run.run", "as": "run"},
            {
                "calculate": "datum.names + '\\n' + (datum.cells > 1 ? datum.wins +"
                " ' of ' + datum.cells + ', from ' : '') + format(datum.best, '.3~r')"
                " + ' ms'",
                "as": "words",
            },
        ],
        "width": 800,
        "height": 46 * max(map(len, orders.values())),
        "layer": [boxes, names],
    }
    winners = [row for row in rows if row["wins"]]
    return Chart(spec, {"winners": records(winners)}, "Map of the fastest policies")


# Time over memory.


def _filters(rows: Sequence[Mapping[str, Any]], cells: Sequence[str]) -> list[Choice]:
    choices = []
    for name in _filtered(cells):
        values = list(dict.fromkeys(row[name] for row in rows))
        options = [(ALL, ALL), *((value, value) for value in values)]
        choices.append(Choice(f"only_{name}", axis_head(name), options, values[0]))
    policies = [(name, name) for name in _styles(rows).names]
    choices.append(Choice("only_policy", "policy", [(ALL, ALL), *policies], ALL))
    return choices


def _filtered(cells: Sequence[str]) -> list[str]:
    return [name for name in cells if name not in MEMORY_AXES]


def _front(
    rows: Sequence[Mapping[str, Any]], cells: Sequence[str], ranked: pd.DataFrame
) -> Chart:
    choices = _filters(rows, cells)
    styles = _styles(rows)
    x = channel(
        "gib", "memory that the run takes of each GPU, GiB", scale={"zero": False}
    )
    y = channel("ms", f"ms {time_words(ranked)}", scale={"zero": False})
    hover = shown(
        ("policy", "policy"),
        ("ms", "ms"),
        ("gib", "GiB"),
        *((name, axis_head(name)) for name in cells),
    )
    zoom = {
        "name": "zoom",
        "select": {
            "type": "interval",
            "zoom": "wheel![event.ctrlKey || event.metaKey]",
        },
        "bind": "scales",
    }
    points = layer(
        {"type": "point", "cursor": "pointer", "strokeWidth": 1.5},
        x=x,
        y=y,
        color=styles.colour(legend={"orient": "top", "columns": 4}),
        shape=styles.mark(),
        # Later policies are smaller, so that none hides another at the same place.
        size=styles.width(sizes=(160, 40)),
        fillOpacity={"condition": {"test": "datum.oracle", "value": 0}, "value": 0.8},
        tooltip=hover,
        params=[zoom],
    )
    front = layer(
        {
            "type": "line",
            "interpolate": "step-after",
            "strokeDash": [4, 3],
            "color": QUIET,
        },
        x=x,
        y=y,
        order={"field": "gib"},
        transform=[
            {"filter": "!datum.oracle"},
            {
                "window": [{"op": "min", "field": "ms", "as": "least"}],
                "sort": [{"field": "gib"}, {"field": "ms"}],
                "frame": [None, 0],
            },
            {"filter": "datum.ms <= datum.least"},
        ],
    )
    spec = {
        "data": {"name": "runs"},
        "params": [{"name": each.name, "value": each.value} for each in choices],
        "transform": [
            {
                "filter": f"{each.name} == '{ALL}' ||"
                f" datum['{each.name.removeprefix('only_')}'] == {each.name}"
            }
            for each in choices
        ],
        "width": 800,
        "height": 340,
        "layer": [points, front],
    }
    label = "Time over memory of the GPU; hollow marks see the future"
    return Chart(spec, {"runs": records(rows)}, label)


# One run.


def _facts(runs: Sequence[Mapping[Any, Any]]) -> Facts:
    """What each run was, and what came out."""
    names = [
        *("model", "machine", "policy", "first token", "per token", "hit rate"),
        *("GPU memory", "to GPU", "digest", "again"),
    ]
    values = {
        str(index): [
            run["model"],
            f"{run['hw']} ({run['hw_kind']} profile)",
            run["policy"],
            ms(run["ttft_s"]),
            f"{ms(run['tpot_s'])}, 95 % within {ms(run['tpot_p95_s'])}",
            percent(run["hit_rate_active"]),
            format_bytes(run["gpu_bytes"]),
            format_bytes(run["h2d_bytes"]),
            run["digest"],
            f"$ {_command(run)}",
        ]
        for index, run in enumerate(runs)
    }
    return Facts("run", names, values)


def _command(run: Mapping[Any, Any]) -> str:
    """The command line that repeats a run, with its page."""
    words = ["moesim", "replay", str(run["trace"])]
    for declared in fields(RunConfig):
        value: Any = run.get(declared.name)
        is_missing = value is None or value != value  # noqa: PLR0124 - NaN
        if is_missing or declared.name == "trace" or declared.name.endswith("_digest"):
            continue
        if value == default_of(declared) and declared.name not in ("policy", "hw"):
            continue
        # Pandas turns whole numbers beside gaps into floats.
        if option_of(declared).kind is int:
            value = int(value)
        text = str(value)
        if option_of(declared).is_size:
            text = f"{value / GIB:g}GiB"
        words += [flag_of(declared), text]
    return shlex.join([*words, "--html", "run.html"])


def _lanes(runs: Sequence[Mapping[Any, Any]]) -> Chart:
    rows = []
    for index, run in enumerate(runs):
        lanes = json.loads(run["lanes"])
        whole_s = run["makespan_s"] or 1.0
        for lane, busy_s in lanes["busy_s"].items():
            shares = {"busy": busy_s, "stalled": lanes["stall_s"].get(lane) or 0.0}
            rows += [
                {
                    "run": index,
                    "lane": lane,
                    "what": activity,
                    "share": round(s / whole_s, 4),
                }
                for activity, s in shares.items()
                if s
            ]
    # Waiting is no device, so it has the colour of none.
    scale = {"domain": ["busy", "stalled"], "range": [GPU, QUIET]}
    spec = {
        "data": {"name": "lanes"},
        "params": [{"name": "run", "value": "0"}],
        "transform": [{"filter": "datum.run == toNumber(run)"}],
        "width": 560,
        "height": 22 * len({row["lane"] for row in rows}),
        **layer(
            "bar",
            x=channel(
                "share",
                "share of the run",
                scale={"domain": [0, 1]},
                axis={"format": "%"},
            ),
            y=channel("lane", None, "N"),
            color=channel("what", None, "N", scale=scale),
            tooltip=shown(
                ("lane", "lane"), ("what", "is"), ("share", "of the run", ".1%")
            ),
        ),
    }
    return Chart(spec, {"lanes": records(rows)}, "What every lane of the run did")


def _with_placement(
    runs: Sequence[Mapping[Any, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[int]:
    """The runs whose placement the page holds: all, or the fastest of their cells."""

    def rank(run: int) -> tuple[bool, float]:
        row = rows[run]
        return not row["wins"], row["ms"] or 0

    order = sorted(range(len(runs)), key=rank)
    held = []
    cells = 0
    for run in order:
        cells += len(runs[run]["placement"]) // 2
        if cells > MOST_PLACES:
            break
        held.append(run)
    return sorted(held)


def _places(runs: Sequence[Mapping[Any, Any]], held: Sequence[int]) -> Chart | None:
    columns: dict[str, list[Any]] = {
        name: [] for name in ("run", "layer", "expert", "on_gpu", "resident")
    }
    for index in held:
        shares = np.frombuffer(runs[index]["placement"], np.uint8)
        experts = int(runs[index]["placement_experts"] or 1)
        on_gpu, resident = shares.reshape(2, -1)
        used = np.flatnonzero(on_gpu != NEVER_USED)
        columns["run"] += [index] * len(used)
        columns["layer"] += (used // experts).tolist()
        columns["expert"] += (used % experts).tolist()
        columns["on_gpu"] += np.round(on_gpu[used] / FULL_SHARE, 3).tolist()
        columns["resident"] += np.round(resident[used] / FULL_SHARE, 3).tolist()
    if not columns["run"]:
        return None
    scale = {"domain": [0, 0.5, 1], "range": list(DEVICES)}
    spec = {
        "data": {"name": "places"},
        "params": [{"name": "run", "value": "0"}],
        "transform": [{"filter": "datum.run == toNumber(run)"}],
        "width": 800,
        "height": 9 * (max(columns["layer"]) + 1),
        **layer(
            "rect",
            x=channel("expert", "expert", "O", axis={"labelOverlap": True}),
            y=channel("layer", "layer", "O", axis={"labelOverlap": True}),
            color=channel("on_gpu", "on GPU", scale=scale, legend={"format": ".0%"}),
            tooltip=shown(
                ("layer", "layer"),
                ("expert", "expert"),
                ("on_gpu", "computed on a GPU", ".1%"),
                ("resident", "resident when used", ".1%"),
            ),
        ),
    }
    label = "Where the run computed each expert: blue on the GPU, orange on the CPU"
    return Chart(spec, {"places": columns}, label)


# The picture.


MOST_PANELS = 12
"""Panels that a picture can hold; a page shows the rest."""

MOST_PANELS_ABREAST = 4


def sweep_figure(frame: pd.DataFrame) -> Chart:
    """Draw the time of each policy over the axis with the most values, a panel for each
    combination of the others; bands are 95 % intervals, policies that see the future
    are dashed.

    Args:
        frame: of `moesim.sweep`; with ``details=True`` it has intervals.
    """
    ranked = _timed(frame)
    cells: list[str] = ranked.attrs["cells"]
    axis = max(cells, key=lambda name: ranked[name].nunique(), default=None)
    others = [name for name in cells if name != axis]
    rows = [
        {
            "policy": str(row["candidate"]),
            "at": "" if axis is None else axis_value(axis, row[axis]),
            "panel": ", ".join(axis_value(name, row[name]) for name in others),
            "ms": 1e3 * row["seconds"],
            "low": 1e3 * row["low_s"] if row["low_s"] == row["low_s"] else None,
            "high": 1e3 * row["high_s"] if row["high_s"] == row["high_s"] else None,
            "oracle": bool(row["oracle"]),
        }
        for row in ranked.to_dict("records")
    ]
    panels = list(dict.fromkeys(row["panel"] for row in rows))[:MOST_PANELS]
    rows = [row for row in rows if row["panel"] in panels]
    styles = _styles(rows)
    head = None if axis is None else axis_head(axis)
    order = list(dict.fromkeys(row["at"] for row in rows))
    x = channel("at", head, "O", sort=order, axis={"labelAngle": -20})
    y = channel("ms", f"ms {time_words(ranked)}", scale={"zero": True})
    hover = shown(("policy", "policy"), ("at", head or "run"), ("ms", "ms", ".4g"))
    band = layer(
        {"type": "area", "opacity": 0.2},
        x=x,
        y={"field": "low", "type": "quantitative"},
        y2={"field": "high"},
        color=styles.colour(),
        transform=[{"filter": "datum.low !== null"}],
    )
    panel = {"layer": [band, *styles.lines(x, y, hover)]}
    spec: Spec = {"data": {"name": "runs"}, "title": sweep_title(frame)}
    if len(panels) == 1:
        spec |= {"width": 520, "height": 260, **panel}
    else:
        spec |= {
            "facet": channel("panel", None, "N", sort=panels),
            "columns": min(MOST_PANELS_ABREAST, len(panels)),
            "spec": {"width": 220, "height": 200, **panel},
        }
    return Chart(spec, {"runs": records(rows)}, "Time of every policy of a sweep")


def _timed(frame: pd.DataFrame) -> pd.DataFrame:
    """The ranking; of a frame without details the times alone."""
    if "batch_decode_tokens" in frame:
        return ranking(frame)
    axes: list[str] = frame.attrs.get("axes") or axes_of(frame)
    cells = cell_axes(axes)
    measure = measure_of(frame)
    rows = _named_candidates(frame, axes, cells)
    means = rows.groupby([*cells, "candidate"], sort=False, dropna=False)
    table = means.agg(seconds=(measure, "mean"), oracle=("oracle", "any")).reset_index()
    table = table.assign(low_s=np.nan, high_s=np.nan)
    table.attrs |= {"axes": axes, "measure": measure, "cells": cells}
    return table


def _named_candidates(
    frame: pd.DataFrame, axes: Sequence[str], cells: Sequence[str]
) -> pd.DataFrame:
    repeated = ("seed", "noise_seed")
    named = [name for name in axes if name not in cells and name not in repeated]
    names = [
        "+".join(
            str(row[name])
            for name in named or ["policy"]
            if axis_value(name, row[name]) != "default"
        )
        for row in frame.to_dict("records")
    ]
    return frame.assign(candidate=names, oracle=frame.get("oracle", False))
