"""Answers about many runs: who is fastest where, by how much for certain, and what a
reader must know before believing it. `compare` and `sweep` ask the same of the same
rows.

Time per token decides where tokens are generated, the whole run where none are; the
other stands beside it.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.options import default_of, flag_of, option_of
from moesim.base.units import is_missing, ms, number, percent
from moesim.questions.lanes import add_runs, course_drawn, placement_chart
from moesim.reporting.answers import Answer, Column, Listing, column
from moesim.reporting.figures import GPU, QUIET, Axis, Figure, names
from moesim.reporting.interactive import interactive
from moesim.reporting.pages import Choice, Facts, Page, trace_words
from moesim.runs.config import MemoryOptions, RunConfig
from moesim.runs.sweeps.ranking import (
    LEAST_SAMPLES,
    axes_of,
    cell_axes,
    competing_axes,
    measure_of,
    ranking,
)
from moesim.runs.sweeps.rows import DETAILS, FULL_SHARE, NEVER_USED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from moesim.runs.result import Run

LEAST_LEAD = 0.01
"""Share of the time by which a run must be ahead of another to be called faster, where
the profile does not state how well it predicts.
"""
MOST_CELLS = 40
"""Settings that a terminal shows one by one; a page and the table hold all of them."""

MOST_PLACES = 150_000
"""Cells of placements that a page holds; beyond it only the fastest runs have them."""

GIB = 2**30
ALL = "all"
MEMORY_AXES = ("cache_ratio", "slots_per_layer", "gpu_memory_bytes")

_SHOWN = (
    "tpot_s",
    "decode_tokens_per_s",
    "ttft_s",
    "prefill_tokens_per_s",
    "makespan_s",
    "hit_rate_active",
    "begins",
    "h2d_bytes",
    "h2d_bytes_per_s",
    "ssd_bytes",
    "gpu_bytes",
    "busiest",
    "busiest_share",
    "energy_j",
)
"""Metrics of a table of runs, in order."""

_MEASURES = (
    "tpot_s",
    "decode_tokens_per_s",
    "ttft_s",
    "prefill_tokens_per_s",
    "makespan_s",
    "hit_rate_active",
    "h2d_bytes",
    "energy_j",
)
"""What figures can show."""


def candidate(row: Mapping[Any, Any], axes: Sequence[str]) -> str:
    """What competes in a run, in words: ``greedy+lru``."""
    parts = [axis_value(name, row[name]) for name in competing_axes(axes)]
    return "+".join(part for part in parts if part != "default")


def axis_head(name: str) -> str:
    """What a report calls an axis."""
    return column(name).head


def axis_value(name: str, value: Any) -> str:
    """What a report calls a value of an axis: ``8.0 GiB``, ``12.5 %``, ``default``."""
    if value is None or value != value:  # noqa: PLR0124 - NaN is not itself
        return "default"
    if name.endswith("_bytes"):
        return MemoryOptions(gpu_memory_bytes=int(value)).size_words
    if name == "cache_ratio":
        return f"{100 * value:.6g} %"
    # Pandas turns whole numbers beside gaps into floats.
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    if name in ("code", "files_digest"):
        return text[:6]
    return Path(text).stem if name == "trace" else text


def ranked_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Rank the policies of a sweep or comparison wherever they compete.

    Args:
        frame: of `moesim.sweep`; with ``details=True`` times have intervals.

    Returns:
        What `moesim.ranking` returns, and all figures of the runs: means over
        repetitions. ``tied`` also counts leads that no model of a machine can tell: by
        less than its profile states, or 1 %. ``fastest`` marks the first of each
        setting that sees the past only.
    """
    axes: list[str] = frame.attrs.get("axes") or axes_of(frame)
    cells = cell_axes(axes)
    keys = [*cells, "candidate"]
    rows = _numbered(frame, axes)
    if "batch_decode_tokens" in frame:
        ranked = ranking(frame)
    else:
        ranked = _timed(rows, keys, measure_of(frame))
    figures = rows.drop(columns=[n for n in ("oracle",) if n in rows])
    ways = {
        name: "mean" if figures[name].dtype.kind == "f" else "first"
        for name in figures.columns
        if name not in {*ranked.columns, *keys}
    }
    means = figures.groupby(keys, sort=False, dropna=False).agg(ways).reset_index()
    table = ranked.merge(means, on=keys, how="left")
    if "prediction_error" in table:
        needed = table["prediction_error"].fillna(LEAST_LEAD).clip(lower=0)
    else:
        needed = pd.Series(LEAST_LEAD, index=table.index)
    table["tied"] |= ~table["oracle"] & (table["behind"] <= needed)
    causal = table[~table["oracle"]]
    first = causal.drop_duplicates(cells) if cells else causal.head(1)
    table["fastest"] = table.index.isin(first.index)
    table.attrs |= {"axes": axes, "cells": cells, "measure": measure_of(frame)}
    return table


def _numbered(frame: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """The runs with what competes in them, and their numbers."""
    rows = frame.reset_index(drop=True)
    words = [candidate(row, axes) for row in rows.to_dict("records")]
    return rows.assign(candidate=words, run=rows.index)


def _timed(rows: pd.DataFrame, keys: list[str], measure: str) -> pd.DataFrame:
    """The ranking of a frame without the times of batches: no intervals."""
    rows = rows if "oracle" in rows else rows.assign(oracle=False)
    by = rows.groupby(keys, sort=False, dropna=False)
    table = by.agg(
        seconds=(measure, "mean"), oracle=("oracle", "any"), runs=(measure, "size")
    ).reset_index()
    table = table.sort_values([*keys[:-1], "oracle", "seconds"], ignore_index=True)
    least = table["seconds"].min()
    if keys[:-1]:
        least = table.groupby(keys[:-1], dropna=False)["seconds"].transform("first")
    behind = table["seconds"] / least - 1
    tied = ~table["oracle"] & (behind == 0)
    return table.assign(
        low_s=np.nan, high_s=np.nan, behind=behind, tied=tied, samples=1
    )


def ranked_answer(
    frame: pd.DataFrame,
    runs: Mapping[Any, Run] | None = None,
    table: pd.DataFrame | None = None,
) -> Answer:
    """Say who is fastest where.

    Args:
        frame: of `moesim.sweep`, with ``details=True``.
        runs: with their timelines, for the page; None for none.
        table: of `ranked_runs`; None makes it.
    """
    table = ranked_runs(frame) if table is None else table
    cells: list[str] = table.attrs["cells"]
    traces = frame.get("trace_digest", pd.Series("", index=frame.index))
    sources = dict.fromkeys(
        trace_words(name, digest)
        for name, digest in zip(frame.get("trace", traces), traces, strict=True)
    )
    machines = ", ".join(frame["hw"].unique()) if "hw" in frame else ""
    models = ", ".join(frame["model"].unique())
    answer = Answer(
        question="which policy is fastest where?"
        if cells
        else "which policy is fastest?",
        subject=f"{models} on {machines}",
        setting=_setting(frame, table, machines),
        sentences=_sentences(table, runs),
        notes=_notes(table, runs),
        figures=_figures(table),
        data={
            "fastest": _records(
                table.loc[table["fastest"], [*cells, "candidate"]].rename(
                    columns={"candidate": "policy"}
                )
            ),
            "table": _records(_figures_of(table)),
        },
        all_rows=_figures_of(table),
        sources={"trace": "; ".join(sources)},
        warnings=_warnings(frame),
    )
    answer.tables = [_policies_table(table)]
    if cells:
        answer.tables = [
            *([_winners(table)] if _count(table) <= MOST_CELLS else []),
            _times(table),
            _how_often(table),
        ]
    if "lanes" in frame:
        answer.on_page = lambda page: _add_page(page, frame, table, runs)
    if runs is not None:
        answer.data |= _runs_data(table, runs)
        if not cells:
            named = {str(name): run for name, run in runs.items()}
            answer.figures["passes"] = lambda: course_drawn(named)
        configs = {str(name): run.config for name, run in runs.items()}
        answer.settings = json.dumps(configs, indent=1)
    return answer


def _runs_data(table: pd.DataFrame, runs: Mapping[Any, Run]) -> dict[str, Any]:
    """Every run, and the bound of the fastest of one setting, for JSON."""
    heads = [*table.attrs["cells"], "policy"]
    listed = [
        dict(zip(heads, [key] if isinstance(key, str) else key, strict=True))
        | run.to_json()
        for key, run in runs.items()
    ]
    bounds = [
        run.bound.to_json() | {"share": run.bound.share(run.metrics["makespan_s"])}
        for run in runs.values()
        if run.bound is not None
    ]
    return {"runs": listed, "bound": bounds[0] if bounds else None}


def _warnings(frame: pd.DataFrame) -> list[str]:
    texts: list[str] = list(frame["warnings"]) if "warnings" in frame else []
    return list(dict.fromkeys(line for text in texts for line in json.loads(text)))


def _figures_of(table: pd.DataFrame) -> pd.DataFrame:
    """The table without what only statistics, pictures and pages read."""
    kept = [name for name in table.columns if name not in (*DETAILS, "run")]
    return table[kept]


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {str(name): _plain(value) for name, value in row.items()}
        for row in table.to_dict("records")
    ]


def _plain(value: Any) -> Any:
    """A value as JSON has it; what is missing is null."""
    value = value.item() if hasattr(value, "item") else value
    return None if value != value else value  # noqa: PLR0124 - NaN is not itself


def _setting(
    frame: pd.DataFrame, table: pd.DataFrame, machines: str
) -> list[tuple[str, str]]:
    """What all runs share, and over what they were multiplied."""
    axes: list[str] = table.attrs["axes"]
    facts = [("model", ", ".join(frame["model"].unique()))]
    if machines:
        kinds = ", ".join(frame["hw_kind"].unique())
        facts.append(("machine", f"{machines} ({kinds} profile)"))
    counts = [
        f"{frame[name].nunique(dropna=False)} x {axis_head(name)}" for name in axes
    ]
    facts.append(
        ("runs", f"{len(frame)}{' over ' if counts else ''}{', '.join(counts)}")
    )
    stated = [name for name in MEMORY_AXES if name in frame and name not in axes]
    given = [
        f"{axis_head(name)} {axis_value(name, frame[name].iloc[0])}"
        for name in stated
        if frame[name].notna().all()
    ]
    if stated and not any(name in axes for name in MEMORY_AXES):
        facts.append(
            ("memory", ", ".join(given) or "not stated: what the card has left")
        )
    if "batch" in frame and "batch" not in axes:
        facts.append(("batch", str(frame["batch"].iloc[0])))
    if "begins" in frame:
        counts_of = frame["begins"].value_counts()
        words = ", ".join(f"{name}: {count}" for name, count in counts_of.items())
        warm = frame["warm"].notna().all() if "warm" in frame else False
        facts.append(("caches began", words + ("" if warm else "; --warm fills them")))
    return facts


def time_words(table: pd.DataFrame) -> str:
    """What is compared, in words."""
    return "per token" if table.attrs["measure"] == "tpot_s" else "over the whole run"


def _count(table: pd.DataFrame) -> int:
    """Number of settings."""
    cells: list[str] = table.attrs["cells"]
    return len(table[cells].drop_duplicates()) if cells else 1


# Sentences.


def _sentences(table: pd.DataFrame, runs: Mapping[Any, Run] | None) -> list[str]:
    """Who is fastest, and what limits it."""
    causal = table[~table["oracle"]]
    if causal.empty:
        return ["every policy sees the future, so none is a rival"]
    if _count(table) > 1:
        return [_wins(table)]
    best = causal.iloc[0].to_dict()
    near = causal[causal["tied"]]
    words = time_words(table)
    if len(near) > 1:
        each = ", ".join(
            f"{row['candidate']} {_speed(row)}" for row in near.to_dict("records")
        )
        lines = [f"a tie {words}: {each}"]
    else:
        lines = [f"fastest {words}: {best['candidate']}, {_speed(best)}"]
        if "busiest" in table:
            busy = percent(best["busiest_share"], 0)
            lines[0] += f"; its {best['busiest']} works {busy} of the time"
    if len(causal) > 1 and causal["behind"].max() <= LEAST_LEAD and "busiest" in table:
        lines.append(
            _alike(best, None if runs is None else runs.get(best["candidate"]))
        )
    # A long prompt can hide who generates faster, and the other way round.
    if table.attrs["measure"] == "tpot_s" and "makespan_s" in table:
        shortest = causal.sort_values("makespan_s", kind="stable").iloc[0]
        if best["makespan_s"] > shortest["makespan_s"] * (1 + LEAST_LEAD):
            lines.append(
                f"fastest with prompts included: {shortest['candidate']},"
                f" {ms(shortest['makespan_s'])} where {best['candidate']} takes"
                f" {ms(best['makespan_s'])}"
            )
    return lines


def _wins(table: pd.DataFrame) -> str:
    """Who is fastest in how many settings."""
    cells: list[str] = table.attrs["cells"]
    wins: Counter[str] = Counter()
    for _, cell in table[table["tied"]].groupby(cells, sort=False, dropna=False):
        wins[" = ".join(cell["candidate"])] += 1
    count = _count(table)
    listed = ", ".join(
        f"{name} in {won} of {count}" for name, won in wins.most_common()
    )
    return f"fastest {time_words(table)}: {listed}"


def _speed(row: Mapping[Any, Any]) -> str:
    """Tokens per second, or seconds of the whole run, of one run."""
    rate = row.get("decode_tokens_per_s")
    if rate is None or is_missing(rate):
        return ms(row["seconds"])
    return f"{number(rate)} tokens/s"


def _alike(best: Mapping[Any, Any], run: Run | None) -> str:
    """Why all policies take the same time: what the fastest one's busiest lane does."""
    lane, share = best["busiest"], best["busiest_share"]
    line = (
        f"all within 1 %: under {best['candidate']} {lane} works"
        f" {percent(share, 0)} of the time"
    )
    spans = pd.DataFrame() if run is None else run.timeline.frame()
    if run is None or spans.empty:
        return line
    spans = spans[spans["lane"] == lane]
    seconds = (spans["end_s"] - spans["start_s"]).groupby(spans["kind"]).sum()
    dense = float(seconds.get("dense", 0.0) / (run.metrics["makespan_s"] or 1.0))
    if dense < share / 2:
        return f"{line}, most of it on experts"
    return (
        f"{line}, {percent(dense, 0)} on attention, norms, gates and launches, which no"
        " policy changes"
    )


def _notes(table: pd.DataFrame, runs: Mapping[Any, Run] | None) -> list[str]:
    """What a reader must know before believing a ranking."""
    lines = [_certainty(table)]
    if "begins" in table:
        lines += _start_notes(table)
    for row in table[table["oracle"]].drop_duplicates("candidate").to_dict("records"):
        parts = _oracles_of(row)
        lines.append(
            f"{row['candidate']}: sees the future{f' ({parts})' if parts else ''},"
            " so it is a bound and no rival"
        )
    marks = {
        "changes the routing, so answers differ": table.get("routing_altered"),
        "computes experts before their gate, or adds them a layer late, so answers"
        " differ": table.get("approximate"),
    }
    for words, mark in marks.items():
        if mark is not None and mark.any():
            who = ", ".join(dict.fromkeys(table.loc[mark.astype(bool), "candidate"]))
            lines.append(f"{who}: {words}")
    lines += [
        f"bound: {name} is {run.bound.words(run.metrics['makespan_s'])}"
        for name, run in (runs or {}).items()
        if run.bound is not None
    ]
    return [*lines, "hit rate: of active experts, those that the CPU computes included"]


def _oracles_of(row: Mapping[Any, Any]) -> str:
    """The parts of a policy that see the future."""
    # Finding a policy imports it; few comparisons have one of these.
    from moesim.policies.registry import resolve  # noqa: PLC0415

    return ", ".join(
        f"{part} {row[part]}"
        for part in ("assignment", "cache", "prefetch", "routing")
        if part in row and resolve(row[part], part).oracle
    )


def _certainty(table: pd.DataFrame) -> str:
    """How certain the order is."""
    samples = int(table["samples"].min())
    count = int(table["runs"].max())
    lead = LEAST_LEAD
    if "prediction_error" in table and table["prediction_error"].notna().any():
        lead = float(table["prediction_error"].max())
    alike = f"times less than {percent(lead, 0)} apart are called a tie"
    if table["low_s"].notna().all():
        return (
            f"95 % intervals over {samples} batches and {count} seeds; what they cannot"
            f" tell apart, and {alike}"
        )
    counts = f"{samples} and {count}"
    # Such seeds repeat one run.
    if max(samples, count) >= LEAST_SAMPLES:
        counts += ", which change nothing"
    return (
        f"no intervals: they need {LEAST_SAMPLES} batches or seeds, got {counts};"
        f" {alike}"
    )


def _start_notes(table: pd.DataFrame) -> list[str]:
    """Runs of which much shows how their caches began."""
    started = table[~table["oracle"]].drop_duplicates("candidate")
    lines = []
    if len(set(started["begins"])) > 1:
        groups = started.groupby("begins", sort=False)["candidate"].agg(", ".join)
        lines.append(
            "caches did not begin alike: "
            + "; ".join(f"{words}: {who}" for words, who in groups.items())
        )
    if "warm_tpot_s" not in started:
        return lines
    full = started[started["warm_tpot_s"].notna()]
    return [
        *lines,
        *(
            f"{row['candidate']}: {percent(row['filling_share'], 0)} of its copies"
            " filled an empty cache; begun full of this trace's most used experts it"
            f" takes {ms(row['warm_tpot_s'])} per token"
            for _, row in full.iterrows()
        ),
    ]


# Tables.


def _worded(table: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """The table with the values of axes in words."""
    words = {
        name: [axis_value(name, value) for value in table[name].astype(object)]
        for name in axes
    }
    return table.assign(**words)


def _policies_table(table: pd.DataFrame) -> Listing:
    """A row for each policy of one setting."""
    columns = [Column("candidate", "policy"), *_metric_columns(table)]
    columns.insert(2, Column("behind", "behind", "share"))
    if table["low_s"].notna().any():
        interval = [
            f"{ms(low)} to {ms(high)}"
            for low, high in zip(table["low_s"], table["high_s"], strict=True)
        ]
        table = table.assign(interval=interval)
        columns.insert(2, Column("interval", "95 %"))
    return Listing(table, columns)


def _metric_columns(table: pd.DataFrame) -> list[Column]:
    """Columns of metrics that say something here."""
    rarely = {"ssd_bytes", "energy_j"}
    kept = []
    for name in _SHOWN:
        if name not in table or (name in rarely and not table[name].fillna(0).any()):
            continue
        kept.append(column(name))
        begun_full = name == "tpot_s" and "warm_tpot_s" in table
        if begun_full and table["warm_tpot_s"].notna().any():
            kept.append(Column("warm_tpot_s", "begun full", "s", "smaller"))
    return kept


def _winners(table: pd.DataFrame) -> Listing:
    """A row for each setting: who is fastest there."""
    cells: list[str] = table.attrs["cells"]
    rows = []
    for _, cell in _worded(table, cells).groupby(cells, sort=False):
        best = cell.iloc[0].to_dict()
        rivals = cell[~cell["oracle"]]
        slower = rivals[~rivals["tied"]]
        # In the order of their times, which is no order for certain.
        best["names"] = " = ".join(rivals.loc[rivals["tied"], "candidate"])
        best["names"] = best["names"] or best["candidate"]
        best["lead"] = slower["behind"].min() if len(slower) else None
        best["second"] = slower["candidate"].iloc[0] if len(slower) else ""
        rows.append(best)
    known = ("decode_tokens_per_s", "ttft_s", "hit_rate_active")
    columns = [
        *map(column, cells),
        Column("names", "fastest"),
        Column("seconds", time_words(table), "s", "smaller"),
        *(column(name) for name in known if name in table),
        Column("lead", "ahead by", "share"),
        Column("second", "of"),
    ]
    title = "Who is fastest where"
    return Listing(pd.DataFrame(rows), columns, title=title, lead=len(cells))


def _times(table: pd.DataFrame) -> Listing:
    """A row for each setting: the time of every policy there."""
    cells: list[str] = table.attrs["cells"]
    frame = (
        _worded(table, cells)
        .pivot_table(index=cells, columns="candidate", values="seconds", sort=False)
        .reset_index()
    )
    names = [name for name in dict.fromkeys(table["candidate"]) if name in frame]
    columns = [
        *map(column, cells),
        *(Column(name, name, "s", "smaller") for name in names),
    ]
    title = f"Time {time_words(table)}"
    few = _count(table) <= MOST_CELLS
    return Listing(frame, columns, title=title, lead=len(cells), printed=few)


def _how_often(table: pd.DataFrame) -> Listing:
    """A row for each policy: how often it wins, and how far behind it is elsewhere."""
    tied = table[table["tied"]]
    alone = tied[~tied.duplicated(table.attrs["cells"], keep=False)]
    frame = (
        table.groupby("candidate", sort=False)
        .agg(
            median=("behind", "median"),
            worst=("behind", "max"),
            oracle=("oracle", "any"),
        )
        .sort_values("median", kind="stable")
        .reset_index()
    )
    won, first = (
        frame["candidate"].map(part["candidate"].value_counts()).fillna(0).astype(int)
        for part in (tied, alone)
    )
    frame["alone"] = [f"{count} of {_count(table)}" for count in first]
    frame["shared"] = (won - first).astype(str)
    frame.loc[frame["oracle"], ["alone", "shared"]] = ["sees the future", ""]
    columns = [
        Column("candidate", "policy"),
        Column("alone", "fastest"),
        Column("shared", "tied"),
        Column("median", "behind, median", "share"),
        Column("worst", "behind, worst", "share"),
    ]
    return Listing(frame, columns, title="How often")


# Figures.


def _figures(table: pd.DataFrame) -> dict[str, Callable[[], Figure]]:
    of_times = {"times": lambda: _lines(table)}
    if not table.attrs["cells"]:
        of_times = {"policies": lambda: _bars(table)}
    return of_times | {"memory": lambda: _front(table)}


_SCALES = {"s": (1e3, "ms"), "bytes": (1 / GIB, "GiB"), "share": (1, "")}


def _scaled(table: pd.DataFrame, name: str, *, zero: bool) -> tuple[pd.Series, Axis]:
    """A column in a unit that people read, and an axis for it."""
    each = column(name)
    scale, unit = _SCALES.get(each.unit, (1, each.unit))
    unit = "share of all experts" if name == "cache_ratio" else unit
    words = f"{each.head}, {unit}" if unit else each.head
    form = ".0%" if each.unit == "share" else ""
    return scale * table[name].astype(float), Axis(name, words, form, zero=zero)


def _drawn(table: pd.DataFrame) -> tuple[pd.DataFrame, Axis, dict[str, Any]]:
    """Rows in units that people read, the axis of the time that decides, and what all
    figures have in common.
    """
    rows = table.copy()
    time = Axis("seconds", f"ms {time_words(table)}", zero=True)
    measures = [time]
    for name in _MEASURES:
        if name in table and table[name].notna().any():
            rows[name], axis = _scaled(table, name, zero=True)
            measures.append(axis)
    for name in ("seconds", "low_s", "high_s"):
        rows[name] = 1e3 * table[name]
    has_interval = table["low_s"].notna().any()
    common = {
        "dashed": frozenset(table.loc[table["oracle"], "candidate"]),
        "low": "low_s" if has_interval else None,
        "high": "high_s" if has_interval else None,
        "measures": measures,
    }
    return rows, time, common


def _bars(table: pd.DataFrame) -> Figure:
    """A bar for each policy of one setting, with its interval."""
    rows, time, common = _drawn(table)
    axes = common["measures"][1:]
    return Figure(
        rows.assign(words=[ms(value) for value in table["seconds"]]),
        time,
        names("candidate", "", table["candidate"]),
        "Time of every policy",
        mark="bar",
        text="words",
        hover=[(axis.column, axis.words, axis.form or ".4~g") for axis in axes],
        **common,
    )


def _lines(table: pd.DataFrame) -> Figure:
    """The time of each policy over the axis with the most values, a panel for each
    combination of the others.
    """
    cells: list[str] = table.attrs["cells"]
    memory = [name for name in cells if name in MEMORY_AXES]
    across = memory[0] if memory else max(cells, key=lambda n: table[n].nunique())
    others = [name for name in cells if name != across]
    rows, time, common = _drawn(table)
    if others:
        rows["panel"] = _worded(table, others)[others].agg(", ".join, axis=1)
    values = table[across]
    is_number = column(across).unit or values.dtype.kind in "iuf"
    if is_number and values.notna().all():
        rows[across], x = _scaled(table, across, zero=False)
        rows = rows.sort_values(across, kind="stable")
    else:
        rows = _worded(rows, [across])
        x = names(across, axis_head(across), rows[across])
    return Figure(
        rows,
        x,
        time,
        "Time of every policy; dashed: sees the future",
        series="candidate",
        panel="panel" if others else None,
        **common,
    )


def _front(table: pd.DataFrame) -> Figure:
    """A point for each run: time over the memory that it takes."""
    cells: list[str] = table.attrs["cells"]
    rows, time, common = _drawn(_worded(table, cells))
    rows["gib"] = 0.0
    if "gpu_bytes" in table:
        rows["gib"] = table["gpu_bytes"].astype(float) / GIB
    return Figure(
        rows,
        Axis("gib", "GPU memory that the run takes, GiB"),
        replace(time, zero=False),
        "Time over memory of the GPU; hollow: sees the future",
        mark="point",
        series="candidate",
        hover=[(name, axis_head(name), "") for name in cells],
        **common,
    )


# The page of many runs.


def _add_page(
    page: Page,
    frame: pd.DataFrame,
    table: pd.DataFrame,
    runs: Mapping[Any, Run] | None,
) -> None:
    """Charts that follow choices, one run with its lanes and places, every run."""
    cells: list[str] = table.attrs["cells"]
    page.add("", interactive(_lines(table) if cells else _bars(table)))
    if cells:
        _add_cells(page, frame, table)
    elif runs is not None and all(len(run.timeline.frame()) for run in runs.values()):
        order = [name for name in table["candidate"] if name in runs]
        add_runs(page, {name: runs[name] for name in order})
    # A system brings cache and prefetch, which tell candidates apart.
    axes = table.attrs["axes"] or ["policy"]
    shown = dict.fromkeys([*axes, "policy", "cache", "prefetch"])
    columns = [column(name) for name in shown if name in frame]
    columns += _metric_columns(frame)
    opens = "run" if cells else None
    title = "Every run"
    every = Listing(_worded(frame, axes), columns, title=title, opens=opens)
    page.add(title, every.on_page())


def _add_cells(page: Page, frame: pd.DataFrame, table: pd.DataFrame) -> None:
    """The map of winners, time over memory, and the run that is chosen."""
    cells: list[str] = table.attrs["cells"]
    runs = _numbered(frame, table.attrs["axes"])
    seconds = runs[table.attrs["measure"]].astype(float)
    runs = runs.assign(seconds=seconds, low_s=np.nan, high_s=np.nan)
    runs.attrs = dict(table.attrs)
    words = _worded(runs, cells)
    tied = table[table["tied"]].groupby(cells, sort=False, dropna=False)["candidate"]
    best = table[table["fastest"]]
    best = best.merge(tied.agg(" = ".join).rename("tied_names"), on=cells)
    best = _worded(best, cells)

    across = sorted(cells, key=lambda name: -words[name].nunique())[:2]
    places = {name: _choice(name, words[name]) for name in cells if name not in across}
    page.add(
        "Who is fastest where?",
        *places.values(),
        _following(_map(best, words, across), places, opens=True),
        note="Each place names the fastest policy, ties in the order of their times. A"
        " click opens its run.",
    )
    kinds = [name for name in cells if name not in MEMORY_AXES]
    parts = {
        name: _choice(name, words[name], ALL, "at_") for name in [*kinds, "candidate"]
    }
    page.add(
        "What does memory buy?",
        *parts.values(),
        _following(_front(runs), parts, zooms=True, opens=True, front=True),
        note="A point for each run; on the line, less memory means more time."
        " A click on a point opens its run, one on a name hides it. Drag to"
        " move, Ctrl and wheel to zoom.",
    )
    first = int(best.sort_values("seconds")["run"].iloc[0]) if len(best) else 0
    options = [
        (
            str(row["run"]),
            " | ".join([*(row[name] for name in cells), row["candidate"]]),
        )
        for row in words.to_dict("records")
    ]
    beside = {
        "run": Choice("run", "run", options, str(first)),
        "other_run": Choice(
            "other_run", "beside", options, str(_another(words, first, cells))
        ),
    }
    held = _with_placement(runs, best["run"])
    placed = _places(frame, held)
    page.add(
        "One run beside another",
        *beside.values(),
        *(_facts(frame, choice) for choice in beside),
        *(_lanes(frame, choice) for choice in beside),
        *(placement_chart(placed, choice) for choice in beside if held),
        note="Opened on the fastest; choose others on the map, among the points or in"
        " the table below."
        + ("" if len(held) == len(frame) else " Only the fastest show their experts."),
    )


def _following(figure: Figure, choices: Mapping[str, Choice], **more: Any) -> Any:
    """A figure that shows what is chosen, by column."""
    where = {name: choice.name for name, choice in choices.items()}
    chosen = {choice.name: choice.value for choice in choices.values()}
    return interactive(figure, where=where, chosen=chosen, **more)


def _choice(
    name: str, values: pd.Series, value: str | None = None, prefix: str = "only_"
) -> Choice:
    listed = list(dict.fromkeys(map(str, values)))
    options = [(ALL, ALL), *((each, each) for each in listed)]
    return Choice(f"{prefix}{name}", axis_head(name), options, value or listed[0])


def _another(words: pd.DataFrame, first: int, cells: Sequence[str]) -> int:
    """The run of another policy in the same setting; the first of all others."""
    places = words[list(cells)].agg(" | ".join, axis="columns")
    others = words.index[(places == places[first]) & (words.index != first)]
    return int(others[0]) if len(others) else int(first == 0 and len(words) > 1)


def _map(best: pd.DataFrame, words: pd.DataFrame, across: Sequence[str]) -> Figure:
    """The fastest policy over one or two axes of settings."""
    rows = best.assign(
        none="",
        words=[
            f"{row['tied_names']}\n{ms(row['seconds'])}"
            for row in best.to_dict("records")
        ],
    )
    sides = [names(name, axis_head(name), words[name]) for name in across]
    x, y = [*sides, names("none", "", [""])][:2]
    return Figure(
        rows, x, y, "The fastest policy of each setting", mark="tile",
        series="candidate", text="words", hover=[("seconds", "seconds", ".4~g")],
    )  # fmt: skip


_FACTS = (
    *("policy", "cache", "prefetch", "model", "hw", "hw_kind", "begins"),
    *("ttft_s", "tpot_s", "tpot_p95_s", "hit_rate_active", "gpu_bytes", "h2d_bytes"),
    "digest",
)
"""What a page says of one run."""


def _facts(frame: pd.DataFrame, choice: str) -> Facts:
    """What each run was, and what came out."""
    columns = [column(name) for name in _FACTS if name in frame]
    values = {
        str(place): [
            *(each.cell(run[each.name]) for each in columns),
            f"$ {_command(run)}",
        ]
        for place, run in enumerate(frame.to_dict("records"))
    }
    return Facts(choice, [*(each.head for each in columns), "again"], values)


def _command(run: Mapping[Any, Any]) -> str:
    """The command line that repeats a run, with its page."""
    line = ["moesim", "replay", str(run["trace"])]
    for declared in fields(RunConfig):
        value: Any = run.get(declared.name)
        missing = value is None or value != value  # noqa: PLR0124 - NaN
        if missing or declared.name == "trace" or declared.name.endswith("_digest"):
            continue
        if value == default_of(declared) and declared.name not in ("policy", "hw"):
            continue
        # Pandas turns whole numbers beside gaps into floats.
        if option_of(declared).kind is int:
            value = int(value)
        text = str(value)
        if option_of(declared).is_size:
            text = f"{value / GIB:g}GiB"
        line += [flag_of(declared), text]
    return shlex.join([*line, "--html", "run.html"])


def _lanes(frame: pd.DataFrame, choice: str) -> Any:
    rows = []
    for place, run in enumerate(frame.to_dict("records")):
        lanes = json.loads(run["lanes"])
        whole_s = run["makespan_s"] or 1.0
        for lane, busy_s in lanes["busy_s"].items():
            stall_s = lanes["stall_s"].get(lane) or 0.0
            for activity, seconds, start in (
                ("busy", busy_s, 0.0),
                ("waits for copies", stall_s, busy_s),
            ):
                if seconds:
                    ends = (start / whole_s, (start + seconds) / whole_s)
                    rows.append((place, lane, activity, *ends))
    table = pd.DataFrame(rows, columns=["at_run", "lane", "what", "from", "to"])
    figure = Figure(
        table.assign(share=table["to"] - table["from"]),
        Axis("to", "share of the run", ".0%", limits=(0, 1)),
        names("lane", "", table["lane"]),
        f"What every lane did: {'the run' if choice == 'run' else 'beside it'}",
        mark="span",
        series="what",
        colours={"busy": GPU, "waits for copies": QUIET},
        start="from",
        hover=[("share", "share", ".1%")],
    )
    return interactive(figure, where={"at_run": choice})


def _with_placement(runs: pd.DataFrame, winners: Iterable[int]) -> list[int]:
    """The runs whose placement the page holds: all, or the fastest first."""
    order = [*winners, *runs.sort_values("seconds")["run"]]
    held = []
    count = 0
    for run in dict.fromkeys(map(int, order)):
        count += len(runs["placement"].iloc[run]) // 2
        if count > MOST_PLACES:
            break
        held.append(run)
    return sorted(held)


def _places(frame: pd.DataFrame, held: Sequence[int]) -> pd.DataFrame:
    """Where every expert was, in the columns of `Run.placement`, of some runs."""
    parts = []
    for place in held:
        run = frame.iloc[place]
        shares = np.frombuffer(run["placement"], np.uint8)
        experts = int(run["placement_experts"] or 1)
        on_gpu, resident = shares.reshape(2, -1)
        used = np.flatnonzero(on_gpu != NEVER_USED)
        parts.append(
            pd.DataFrame(
                {
                    "policy": str(place),
                    "layer": used // experts,
                    "expert": used % experts,
                    "on_gpu": np.round(on_gpu[used] / FULL_SHARE, 3),
                    "resident": np.round(resident[used] / FULL_SHARE, 3),
                }
            )
        )
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
