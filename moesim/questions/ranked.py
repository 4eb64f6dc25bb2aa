"""Answers about many runs: who is fastest where, by how much for certain, and what a
reader must know before believing it. `compare` and `sweep` ask the same of the same
rows.

Time per token decides where tokens are generated, the whole run where none are; the
other stands beside it.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.options import default_of, flag_of, option_of
from moesim.base.units import format_bytes, is_missing, ms, number, percent
from moesim.questions.timeline import run_sections
from moesim.reporting.answers import Answer
from moesim.reporting.figures import Axis, Figure, names
from moesim.reporting.parts import (
    Choice,
    Column,
    Facts,
    Listing,
    Section,
    column,
    records,
    trace_words,
)
from moesim.runs.config import MemoryOptions, RunConfig
from moesim.runs.sweeps.ranking import (
    LEAST_LEAD,
    LEAST_SAMPLES,
    candidate,
    competing_axes,
    ranking,
)
from moesim.runs.sweeps.rows import DETAILS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.runs.result import Run

MOST_CELLS = 40
"""Settings that a terminal shows one by one; a page and the table hold all of them."""

STILL_FILLING = 0.1
"""Share of its copies that only filled an empty cache, beyond which the figures of a
run show how it began.
"""

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
"""Metrics of a table of runs, in order; figures can show those that are numbers."""


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


def ranked_answer(
    frame: pd.DataFrame,
    runs: Mapping[Any, Run] | None = None,
    table: pd.DataFrame | None = None,
) -> Answer:
    """Say who is fastest where.

    Args:
        frame: of `moesim.sweep`, with ``details=True``.
        runs: with their timelines, for the page; None for none.
        table: of `moesim.ranking`; None makes it.
    """
    table = ranking(frame) if table is None else table
    runs = runs or {}
    cells: list[str] = table.attrs["cells"]
    shown = table.drop(columns=[*DETAILS, "run"], errors="ignore")
    winners = table.loc[table["fastest"], [*cells, "candidate"]]
    traces = map(trace_words, frame["trace"], frame["trace_digest"])
    models, machines = (", ".join(frame[name].unique()) for name in ("model", "hw"))
    answer = Answer(
        question=f"which policy is fastest{' where' if cells else ''}?",
        subject=f"{models} on {machines}",
        setting=_setting(frame, table.attrs["axes"], models, machines),
        tables=[_winners(table), _how_often(table)]
        if cells
        else [_policies_table(table)],
        sentences=[_fastest(table)],
        notes=_notes(table, runs),
        figures={"times" if cells else "policies": lambda: _times_drawn(table)},
        data={
            "fastest": records(winners.rename(columns={"candidate": "policy"})),
            "table": records(shown),
        },
        all_rows=shown,
        sources={"trace": "; ".join(dict.fromkeys(traces))},
    )
    if "warnings" in frame:
        listed = [line for text in frame["warnings"] for line in json.loads(text)]
        answer.warnings = list(dict.fromkeys(listed))
        answer.on_page = lambda: _sections(frame, table, runs)
    if runs:
        answer.data |= _runs_data([*cells, "policy"], runs)
        configs = {str(name): run.config for name, run in runs.items()}
        answer.settings = json.dumps(configs, indent=1)
    return answer


def _runs_data(heads: Sequence[str], runs: Mapping[Any, Run]) -> dict[str, Any]:
    """Every run, and the bound of the fastest of one setting, for JSON."""
    listed = [
        dict(zip(heads, [key] if isinstance(key, str) else key, strict=True))
        | run.to_json()
        for key, run in runs.items()
    ]
    bounds = [
        run.bound.to_json(run.metrics["makespan_s"])
        for run in runs.values()
        if run.bound is not None
    ]
    return {"runs": listed, "bound": bounds[0] if bounds else None}


def _setting(
    frame: pd.DataFrame, axes: Sequence[str], models: str, machines: str
) -> list[tuple[str, str]]:
    """What all runs share, and over what they were multiplied."""
    first = frame.iloc[0]
    counts = [
        f"{frame[name].nunique(dropna=False)} x {column(name).head}" for name in axes
    ]
    over = f" over {', '.join(counts)}" if counts else ""
    facts = [
        ("model", models),
        ("machine", f"{machines} ({', '.join(frame['hw_kind'].unique())} profile)"),
        ("runs", f"{len(frame)}{over}"),
    ]
    if not set(axes) & set(MEMORY_AXES):
        given = [
            f"{column(name).head} {axis_value(name, first[name])}"
            for name in MEMORY_AXES
            if not is_missing(first[name])
        ]
        held = sorted({frame["cache_bytes"].min(), frame["cache_bytes"].max()})
        caches = " to ".join(format_bytes(int(size)) for size in held)
        default = f"not stated: GPU caches of {caches}"
        facts.append(("memory", ", ".join(given) or default))
    if "batch" not in axes:
        facts.append(("batch", str(first["batch"])))
    begun = [f"{how}: {count}" for how, count in frame["begins"].value_counts().items()]
    warm = "" if frame["warm"].notna().all() else "; --warm fills them"
    return [*facts, ("caches began", ", ".join(begun) + warm)]


def time_words(table: pd.DataFrame) -> str:
    """What is compared, in words."""
    return "per token" if table.attrs["measure"] == "tpot_s" else "over the whole run"


# Sentences.


def _fastest(table: pd.DataFrame) -> str:
    """Who is fastest, and what limits it."""
    causal = table[~table["oracle"]]
    words = f"fastest {time_words(table)}"
    if causal.empty:
        return "every policy sees the future, so none is a rival"
    cells: list[str] = table.attrs["cells"]
    if cells and (count := len(table[cells].drop_duplicates())) > 1:
        tied = table[table["tied"]].groupby(cells, sort=False, dropna=False)
        wins = tied["candidate"].agg(" = ".join).value_counts().items()
        return f"{words}: {', '.join(f'{who} in {n} of {count}' for who, n in wins)}"
    near = causal[causal["tied"]].to_dict("records")
    each = ", ".join(f"{row['candidate']} {_speed(row)}" for row in near)
    if len(near) > 1:
        return f"a tie {time_words(table)}: {each}"
    best = causal.iloc[0]
    return (
        f"{words}: {best['candidate']}, {_speed(best)}; its {best['busiest']} works"
        f" {percent(best['busiest_share'], 0)} of the time"
    )


def _speed(row: Any) -> str:
    """Tokens per second, or seconds of the whole run, of one run."""
    rate = row["decode_tokens_per_s"]
    return ms(row["seconds"]) if is_missing(rate) else f"{number(rate)} tokens/s"


_MARKS = {
    "oracle": "sees the future, so it is a bound and no rival",
    "routing_altered": "changes the routing, so answers differ",
    "approximate": "computes experts before their gate, or adds them a layer late, so"
    " answers differ",
    "filling": "much was copied only to fill an empty cache; --warm fills it before",
}
"""Columns that set a policy apart, and what they say of it."""


def _notes(table: pd.DataFrame, runs: Mapping[Any, Run]) -> list[str]:
    """What a reader must know before believing a ranking."""
    lines = [_certainty(table)]
    is_filling = (table["filling_share"] > STILL_FILLING) & table["warm"].isna()
    table = table.assign(filling=is_filling)
    for mark in table.columns.intersection(list(_MARKS)):
        marked = table.loc[table[mark].fillna(0).astype(bool), "candidate"].unique()
        if len(marked):
            lines.append(f"{', '.join(marked)}: {_MARKS[mark]}")
    lines += [
        f"bound: {name} is {run.bound.words(run.metrics['makespan_s'])}"
        for name, run in runs.items()
        if run.bound is not None
    ]
    return [*lines, "hit rate: of active experts, those that the CPU computes included"]


def _certainty(table: pd.DataFrame) -> str:
    """How certain the order is."""
    samples = int(table["samples"].min())
    count = int(table["runs"].max())
    error = table["prediction_error"].astype(float).max()
    lead = LEAST_LEAD if is_missing(error) else error
    alike = f"times less than {percent(lead, 0)} apart are called a tie"
    if table["low_s"].notna().all():
        seeds = f" and {count} seeds" if count > 1 else ""
        return (
            f"95 % intervals over {samples} batches{seeds}; what they cannot tell"
            f" apart, and {alike}"
        )
    # Such seeds repeat one run.
    repeated = max(samples, count) >= LEAST_SAMPLES
    return (
        f"no intervals: they need {LEAST_SAMPLES} batches or seeds, got {samples} and"
        f" {count}{', which change nothing' if repeated else ''}; {alike}"
    )


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
    columns = [column("candidate"), *_metric_columns(table)]
    columns.insert(2, Column("behind", "behind", "share"))
    if table["low_s"].notna().any():
        ends = zip(table["low_s"], table["high_s"], strict=True)
        table = table.assign(
            interval=[f"{ms(low)} to {ms(high)}" for low, high in ends]
        )
        columns.insert(2, Column("interval", "95 %"))
    return Listing(table, columns)


def _metric_columns(table: pd.DataFrame) -> list[Column]:
    """Columns of metrics that say something here."""
    rarely = {"ssd_bytes", "energy_j"}
    kept = [n for n in _SHOWN if n not in rarely or table[n].fillna(0).any()]
    return list(map(column, kept))


def _winners(table: pd.DataFrame) -> Listing:
    """A row for each setting: who is fastest there, and the time of everybody."""
    cells: list[str] = table.attrs["cells"]
    rows = _worded(table, cells)
    tied = rows[rows["tied"]].groupby(cells, sort=False)
    slower = rows[~rows["tied"] & ~rows["oracle"]].groupby(cells, sort=False)
    frame = rows.groupby(cells, sort=False)[["run", "candidate"]].first()
    # In the order of their times, which is no order for certain.
    frame["fastest"] = tied["candidate"].agg(" = ".join)
    frame["fastest"] = frame["fastest"].fillna(frame.pop("candidate"))
    frame["lead"] = slower["behind"].first()
    frame["second"] = slower["candidate"].first()
    times = rows.pivot_table(index=cells, columns="candidate", values="seconds")
    columns = [
        *map(column, cells),
        Column("fastest", "fastest"),
        Column("lead", "ahead by", "share"),
        Column("second", "second"),
        *(Column(name, name, "s") for name in rows["candidate"].unique()),
    ]
    return Listing(
        frame.join(times).reset_index(),
        columns,
        title=f"Who is fastest where, and time {time_words(table)}",
        note="Ties are in the order of their times.",
        lead=len(cells),
        opens=frame["run"].tolist(),
        printed=len(frame) <= MOST_CELLS,
    )


def _how_often(table: pd.DataFrame) -> Listing:
    """A row for each policy: how often it wins, and how far behind it is elsewhere."""
    frame = table.groupby("candidate", sort=False).agg(
        tied=("tied", "sum"), median=("behind", "median"), worst=("behind", "max")
    )
    columns = [
        column("candidate"),
        Column("tied", "fastest or tied"),
        Column("median", "behind, median", "share"),
        Column("worst", "behind, worst", "share"),
    ]
    frame = frame.sort_values("median", kind="stable").reset_index()
    count = len(table[table.attrs["cells"]].drop_duplicates())
    return Listing(frame, columns, title=f"How often, of {count} settings")


# Figures.


def _drawn(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Axis], dict[str, Any]]:
    """Rows in units that people read, axes of their numbers, the first of the time that
    decides, and what all figures have in common.
    """
    cells: list[str] = table.attrs["cells"]
    rows = table.assign(words=table["seconds"].map(ms))
    rows[["low_s", "high_s"]] *= 1e3
    time = Column("seconds", time_words(table), "s")
    axes = {}
    for each in [time, *_metric_columns(table), *map(column, cells)]:
        values = table[each.name]
        if values.dtype.kind not in "iuf" or values.isna().all():
            continue
        scale, unit = {"s": (1e-3, "ms"), "share": (1, "")}.get(
            each.unit, (1, each.unit)
        )
        if unit == "bytes":
            scale, unit = (2**30, "GiB") if values.max() >= 2**30 else (2**20, "MiB")
        rows[each.name] = values.astype(float) / scale
        words = f"{each.head}, {unit}" if unit else each.head
        form = ".0%" if each.unit == "share" else ""
        axes[each.name] = Axis(each.name, words, form, zero=True)
    low, high = ("low_s", "high_s") if table["low_s"].notna().any() else (None, None)
    measures = [axis for name, axis in axes.items() if name not in cells]
    hollow = frozenset(table.loc[table["oracle"], "candidate"])
    common = {"dashed": hollow, "low": low, "high": high, "measures": measures}
    return rows, axes, common


def _times_drawn(table: pd.DataFrame) -> Figure:
    """The time of each policy: a bar in one setting; else over the axis with the most
    values, with a panel for each combination of the others.
    """
    cells: list[str] = table.attrs["cells"]
    rows, axes, common = _drawn(table)
    time = axes["seconds"]
    if not cells:
        policies = names("candidate", "", table["candidate"])
        # Room for the words beside the longest bar.
        longest = float(np.nanmax(rows[["seconds", "high_s"]].to_numpy(float)))
        time = replace(time, limits=(0.0, 1.3 * longest))
        return Figure(
            rows, time, policies, "Time of every policy", mark="bar", text="words",
            **common,
        )  # fmt: skip
    worded = _worded(table, cells)
    across = max(cells, key=lambda n: (n in MEMORY_AXES, table[n].nunique()))
    # A bare number does not say of what.
    panels = [f"{column(n).head} " + worded[n] for n in cells if n != across]
    if panels:
        rows["panel"] = pd.concat(panels, axis=1).agg(", ".join, axis=1)
    if across in axes and table[across].notna().all():
        rows = rows.sort_values(across, kind="stable")
        x = replace(axes[across], zero=False)
    else:
        rows[across] = worded[across]
        x = names(across, column(across).head, rows[across])
    return Figure(
        rows, x, time, "Time of every policy",
        series="candidate", panel="panel" if panels else None, **common,
    )  # fmt: skip


# The page of many runs.


def _sections(
    frame: pd.DataFrame, table: pd.DataFrame, runs: Mapping[Any, Run]
) -> list[Section]:
    """Figures that follow choices, one run beside another, every run."""
    cells: list[str] = table.attrs["cells"]
    # A system brings cache and prefetch, which tell candidates apart.
    axes = table.attrs["axes"] or ["policy"]
    shown = dict.fromkeys([*axes, "policy", "cache", "prefetch"])
    columns = [*map(column, shown), *_metric_columns(frame)]
    opens = list(range(len(frame))) if cells else []
    every = Listing(_worded(frame, axes), columns, title="Every run", opens=opens)
    sections = [Section("", [_times_drawn(table)])]
    if cells:
        sections.append(_one_run(frame, table, every))
    elif runs and all(len(run.timeline.frame()) for run in runs.values()):
        sections += run_sections({n: runs[n] for n in table["candidate"] if n in runs})
    return [*sections, Section("Every run", [every])]


def _one_run(frame: pd.DataFrame, table: pd.DataFrame, every: Listing) -> Section:
    """The run that is chosen, with the command that repeats it."""
    competing = competing_axes(table.attrs["axes"])
    rows = frame.to_dict("records")
    settings = _worded(frame, table.attrs["cells"])[table.attrs["cells"]]
    heads = settings.assign(candidate=[candidate(row, competing) for row in rows])
    options = list(enumerate(heads.agg(" | ".join, axis=1)))
    best = table[table["fastest"]].sort_values("seconds")["run"]
    first = best.iloc[0] if len(best) else 0
    choice = Choice(
        "run", "run", [(str(place), head) for place, head in options], str(first)
    )
    facts = replace(
        every,
        rows=every.frame.assign(again=[f"$ {_command(row)}" for row in rows]),
        columns=[*every.columns, column("digest"), Column("again", "again")],
    )
    return Section(
        "One run",
        [choice, Facts("run", facts)],
        "Opened on the fastest; choose others in the figure or in the tables.",
    )


def _exact(size_bytes: int) -> str:
    """A size for a command line, to the byte: ``8GiB``."""
    power = next(power for power in (3, 2, 1, 0) if size_bytes % 1024**power == 0)
    return f"{size_bytes // 1024**power}{('B', 'KiB', 'MiB', 'GiB')[power]}"


def _command(run: Mapping[Any, Any]) -> str:
    """The command line that repeats a run, with its page."""
    line = ["moesim", "replay", str(run["trace"])]
    for declared in fields(RunConfig):
        name, value = declared.name, run.get(declared.name)
        if name == "trace" or name.endswith("_digest") or pd.isna(value):
            continue
        if value == default_of(declared) and name not in ("policy", "hw"):
            continue
        option = option_of(declared)
        # Pandas turns whole numbers beside gaps into floats.
        text = str(int(value) if option.kind is int else value)
        line += [flag_of(declared), _exact(int(value)) if option.is_size else text]
    return shlex.join([*line, "--html", "run.html"])
