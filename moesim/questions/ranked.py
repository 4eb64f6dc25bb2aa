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
from moesim.questions.timeline import course_drawn, placement_drawn, run_sections
from moesim.reporting.answers import Answer
from moesim.reporting.figures import GPU, QUIET, Axis, Figure, names
from moesim.reporting.parts import (
    Choice,
    Column,
    Facts,
    Listing,
    Section,
    Shown,
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
from moesim.runs.sweeps.rows import DETAILS, FULL_SHARE, NEVER_USED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.runs.result import Run

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
    cells: list[str] = table.attrs["cells"]
    shown = table[[n for n in table.columns if n not in (*DETAILS, "run")]]
    winners = table.loc[table["fastest"], [*cells, "candidate"]]
    traces = map(trace_words, frame["trace"], frame["trace_digest"])
    models, machines = (", ".join(frame[name].unique()) for name in ("model", "hw"))
    figures: dict[str, Any] = {
        "times" if cells else "policies": lambda: _times_drawn(table),
        "memory": lambda: _memory_drawn(table),
    }
    if runs is not None and not cells:
        figures["passes"] = lambda: course_drawn(runs)
    answer = Answer(
        question=f"which policy is fastest{' where' if cells else ''}?",
        subject=f"{models} on {machines}",
        setting=_setting(frame, table, models, machines),
        tables=[_winners(table), _how_often(table)]
        if cells
        else [_policies_table(table)],
        sentences=_sentences(table, runs),
        notes=_notes(table, runs),
        figures=figures,
        data={
            "fastest": records(winners.rename(columns={"candidate": "policy"})),
            "table": records(shown),
        },
        all_rows=shown,
        sources={"trace": "; ".join(dict.fromkeys(traces))},
    )
    if "lanes" in frame:
        listed = [line for text in frame["warnings"] for line in json.loads(text)]
        answer.warnings = list(dict.fromkeys(listed))
        answer.on_page = lambda: _sections(frame, table, runs)
    if runs is not None:
        answer.data |= _runs_data(table, runs)
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


def _setting(
    frame: pd.DataFrame, table: pd.DataFrame, models: str, machines: str
) -> list[tuple[str, str]]:
    """What all runs share, and over what they were multiplied."""
    axes: list[str] = table.attrs["axes"]
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
    if not any(name in axes for name in MEMORY_AXES):
        given = [
            f"{column(name).head} {axis_value(name, first[name])}"
            for name in MEMORY_AXES
            if frame[name].notna().all()
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


def _sentences(table: pd.DataFrame, runs: Mapping[Any, Run] | None) -> list[str]:
    """Who is fastest, and what limits it."""
    causal = table[~table["oracle"]]
    words = f"fastest {time_words(table)}"
    if causal.empty:
        return ["every policy sees the future, so none is a rival"]
    cells: list[str] = table.attrs["cells"]
    if cells and (count := len(table[cells].drop_duplicates())) > 1:
        tied = table[table["tied"]].groupby(cells, sort=False, dropna=False)
        wins = tied["candidate"].agg(" = ".join).value_counts().items()
        return [f"{words}: {', '.join(f'{who} in {n} of {count}' for who, n in wins)}"]
    best = causal.iloc[0].to_dict()
    name = best["candidate"]
    near = causal[causal["tied"]].to_dict("records")
    busy = f"{best['busiest']} works {percent(best['busiest_share'], 0)} of the time"
    if len(near) > 1:
        each = ", ".join(f"{row['candidate']} {_speed(row)}" for row in near)
        lines = [f"a tie {time_words(table)}: {each}"]
    else:
        lines = [f"{words}: {name}, {_speed(best)}; its {busy}"]
    if len(causal) > 1 and causal["behind"].max() <= LEAST_LEAD:
        why = _why_alike(best, (runs or {}).get(name))
        lines.append(f"all within 1 %: under {name} {busy}{why}")
    # A long prompt can hide who generates faster, and the other way round.
    shortest = causal.sort_values("makespan_s", kind="stable").iloc[0]
    if best["makespan_s"] > shortest["makespan_s"] * (1 + LEAST_LEAD):
        lines.append(
            f"fastest with prompts included: {shortest['candidate']},"
            f" {ms(shortest['makespan_s'])} where {name} takes"
            f" {ms(best['makespan_s'])}"
        )
    return lines


def _speed(row: Mapping[Any, Any]) -> str:
    """Tokens per second, or seconds of the whole run, of one run."""
    rate = row["decode_tokens_per_s"]
    return ms(row["seconds"]) if is_missing(rate) else f"{number(rate)} tokens/s"


def _why_alike(best: Mapping[Any, Any], run: Run | None) -> str:
    """Why all policies take the same time: what the fastest one's busiest lane does."""
    spans = pd.DataFrame() if run is None else run.timeline.frame()
    if run is None or spans.empty:
        return ""
    spans = spans[(spans["lane"] == best["busiest"]) & (spans["kind"] == "dense")]
    dense_s = float((spans["end_s"] - spans["start_s"]).sum())
    dense = dense_s / (run.metrics["makespan_s"] or 1.0)
    if dense < best["busiest_share"] / 2:
        return ", most of it on experts"
    return (
        f", {percent(dense, 0)} on attention, norms, gates and launches, which no"
        " policy changes"
    )


def _notes(table: pd.DataFrame, runs: Mapping[Any, Run] | None) -> list[str]:
    """What a reader must know before believing a ranking."""
    lines = [_certainty(table), *_start_notes(table)]
    for row in table[table["oracle"]].drop_duplicates("candidate").to_dict("records"):
        parts = _oracles_of(row)
        lines.append(
            f"{row['candidate']}: sees the future{f' ({parts})' if parts else ''},"
            " so it is a bound and no rival"
        )
    marks = {
        "routing_altered": "changes the routing, so answers differ",
        "approximate": "computes experts before their gate, or adds them a layer late,"
        " so answers differ",
    }
    for mark, words in marks.items():
        marked = table[table[mark].fillna(0).astype(bool)]
        if len(marked):
            lines.append(f"{', '.join(marked['candidate'].unique())}: {words}")
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
        if resolve(row[part], part).oracle
    )


def _certainty(table: pd.DataFrame) -> str:
    """How certain the order is."""
    samples = int(table["samples"].min())
    count = int(table["runs"].max())
    errors = table["prediction_error"].dropna()
    lead = float(errors.max()) if len(errors) else LEAST_LEAD
    alike = f"times less than {percent(lead, 0)} apart are called a tie"
    if table["low_s"].notna().all():
        seeds = f" and {count} seeds" if count > 1 else ""
        return (
            f"95 % intervals over {samples} batches{seeds}; what they cannot tell"
            f" apart, and {alike}"
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
    groups = started.groupby("begins", sort=False)["candidate"].agg(", ".join)
    if len(groups) > 1:
        each = "; ".join(f"{words}: {who}" for words, who in groups.items())
        lines.append(f"caches did not begin alike: {each}")
    if "warm_tpot_s" in started:
        lines += [
            f"{row['candidate']}: {percent(row['filling_share'], 0)} of its copies"
            " filled an empty cache; begun full of this trace's most used experts it"
            f" takes {ms(row['warm_tpot_s'])} per token"
            for row in started.dropna(subset="warm_tpot_s").to_dict("records")
        ]
    return lines


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
    columns = list(map(column, kept))
    if "warm_tpot_s" in table and table["warm_tpot_s"].notna().any():
        columns.insert(1, Column("warm_tpot_s", "begun full", "s"))
    return columns


def _winners(table: pd.DataFrame) -> Listing:
    """A row for each setting: who is fastest there, and the time of everybody."""
    cells: list[str] = table.attrs["cells"]
    rows = _worded(table, cells)
    tied = rows[rows["tied"]].groupby(cells, sort=False)
    slower = rows[~rows["tied"] & ~rows["oracle"]].groupby(cells, sort=False)
    frame = rows.groupby(cells, sort=False)[["run", "candidate"]].first()
    # In the order of their times, which is no order for certain.
    frame["fastest"] = tied["candidate"].agg(" = ".join)
    frame["fastest"] = frame["fastest"].fillna(frame["candidate"])
    frame["lead"] = slower["behind"].first()
    frame["second"] = slower["candidate"].first()
    times = rows.pivot_table(index=cells, columns="candidate", values="seconds")
    frame = frame.drop(columns="candidate").join(times)
    columns = [
        *map(column, cells),
        Column("fastest", "fastest"),
        Column("lead", "ahead by", "share"),
        Column("second", "second"),
        *(Column(name, name, "s") for name in rows["candidate"].unique()),
    ]
    return Listing(
        frame.reset_index(),
        columns,
        title=f"Who is fastest where, and time {time_words(table)}",
        note="Ties are in the order of their times.",
        lead=len(cells),
        opens=frame["run"].tolist(),
        printed=len(frame) <= MOST_CELLS,
    )


def _how_often(table: pd.DataFrame) -> Listing:
    """A row for each policy: how often it wins, and how far behind it is elsewhere."""
    cells: list[str] = table.attrs["cells"]
    ties = table.groupby(cells, dropna=False)["tied"].transform("sum")
    rows = table.assign(
        alone=table["tied"] & (ties == 1), shared=table["tied"] & (ties > 1)
    )
    frame = rows.groupby("candidate", sort=False).agg(
        alone=("alone", "sum"),
        shared=("shared", "sum"),
        median=("behind", "median"),
        worst=("behind", "max"),
        oracle=("oracle", "any"),
    )
    frame = frame.sort_values("median", kind="stable").reset_index()
    count = len(table[cells].drop_duplicates())
    words = frame.astype({"alone": str, "shared": str})
    words["alone"] += f" of {count}"
    words.loc[frame["oracle"], ["alone", "shared"]] = ["sees the future", ""]
    columns = [
        column("candidate"),
        Column("alone", "fastest"),
        Column("shared", "tied"),
        Column("median", "behind, median", "share"),
        Column("worst", "behind, worst", "share"),
    ]
    return Listing(words, columns, title="How often")


# Figures.


_SCALES = {"s": (1e3, "ms"), "bytes": (1 / GIB, "GiB"), "share": (1, "")}


def _drawn(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Axis], dict[str, Any]]:
    """Rows in units that people read, axes of their numbers, the first of the time that
    decides, and what all figures have in common.
    """
    rows = table.assign(words=[ms(value) for value in table["seconds"]])
    times = ["seconds", "low_s", "high_s"]
    rows[times] *= 1e3
    axes = {"seconds": Axis("seconds", f"ms {time_words(table)}", zero=True)}
    for each in [*_metric_columns(table), *map(column, table.attrs["cells"])]:
        values = table[each.name]
        if values.dtype.kind not in "iuf" or values.isna().all():
            continue
        scale, unit = _SCALES.get(each.unit, (1, each.unit))
        unit = "share of all experts" if each.name == "cache_ratio" else unit
        words = f"{each.head}, {unit}" if unit else each.head
        form = ".0%" if each.unit == "share" else ""
        rows[each.name] = scale * values.astype(float)
        axes[each.name] = Axis(each.name, words, form, zero=True)
    low, high = times[1:] if table["low_s"].notna().any() else (None, None)
    measures = [axis for name, axis in axes.items() if name not in table.attrs["cells"]]
    hollow = frozenset(table.loc[table["oracle"], "candidate"])
    common = {"dashed": hollow, "low": low, "high": high, "measures": measures}
    return rows, axes, common


def _foreseeing(common: Mapping[str, Any], looks: str) -> str:
    """How to tell the policies that see the future, where there are some."""
    return f"; {looks}: sees the future" if common["dashed"] else ""


def _times_drawn(table: pd.DataFrame) -> Figure:
    """The time of each policy: a bar in one setting; else over the axis with the most
    values, with a panel for each combination of the others.
    """
    cells: list[str] = table.attrs["cells"]
    rows, axes, common = _drawn(table)
    time = axes["seconds"]
    if not cells:
        others = common["measures"][1:]
        policies = names("candidate", "", table["candidate"])
        # Room for the words beside the longest bar.
        longest = float(np.nanmax(rows[["seconds", "high_s"]].to_numpy(float)))
        time = replace(time, limits=(0.0, 1.3 * longest))
        return Figure(
            rows, time, policies, "Time of every policy", mark="bar", text="words",
            hover=[(each.column, each.words, each.form or ".4~g") for each in others],
            **common,
        )  # fmt: skip
    memory = [name for name in cells if name in MEMORY_AXES]
    across = memory[0] if memory else max(cells, key=lambda n: table[n].nunique())
    others = [name for name in cells if name != across]
    if others:
        # A bare number does not say of what.
        named = _worded(table, others)[others].apply(
            lambda values: values.where(
                ~values.str[0].str.isdigit(), f"{column(values.name).head} " + values
            )
        )
        rows["panel"] = named.agg(", ".join, axis=1)
    if across in axes and table[across].notna().all():
        rows = rows.sort_values(across, kind="stable")
        x = replace(axes[across], zero=False)
    else:
        rows[across] = _worded(table, [across])[across]
        x = names(across, column(across).head, rows[across])
    return Figure(
        rows, x, time, f"Time of every policy{_foreseeing(common, 'dashed')}",
        series="candidate", panel="panel" if others else None, **common,
    )  # fmt: skip


def _memory_drawn(table: pd.DataFrame) -> Figure:
    """A point for each run: time over the memory that it takes."""
    cells: list[str] = table.attrs["cells"]
    rows, axes, common = _drawn(table)
    rows[cells] = _worded(table, cells)[cells]
    taken = table["gpu_bytes"].astype(float)
    unit, words = (GIB, "GiB") if taken.max() >= GIB else (2**20, "MiB")
    return Figure(
        rows.assign(memory=taken / unit),
        Axis("memory", f"GPU memory that the run takes, {words}"),
        replace(axes["seconds"], zero=False),
        f"Time over memory of the GPU{_foreseeing(common, 'hollow')}",
        mark="point",
        series="candidate",
        hover=[(name, column(name).head, "") for name in cells],
        **common,
    )


# The page of many runs.


def _sections(
    frame: pd.DataFrame, table: pd.DataFrame, runs: Mapping[Any, Run] | None
) -> list[Section]:
    """Figures that follow choices, one run with its lanes and places, every run."""
    sections = [Section("", [_times_drawn(table)])]
    cells: list[str] = table.attrs["cells"]
    if cells:
        sections += _runs_beside(frame, table)
    elif runs is not None and all(len(run.timeline.frame()) for run in runs.values()):
        sections += run_sections({n: runs[n] for n in table["candidate"] if n in runs})
    # A system brings cache and prefetch, which tell candidates apart.
    axes = table.attrs["axes"] or ["policy"]
    shown = dict.fromkeys([*axes, "policy", "cache", "prefetch"])
    columns = [*map(column, shown), *_metric_columns(frame)]
    opens = list(range(len(frame))) if cells else []
    every = Listing(_worded(frame, axes), columns, title="Every run", opens=opens)
    return [*sections, Section("Every run", [every])]


def _runs_beside(frame: pd.DataFrame, table: pd.DataFrame) -> list[Section]:
    """Time over memory, and the run that is chosen beside another."""
    cells: list[str] = table.attrs["cells"]
    runs = frame.reset_index(drop=True)
    competing = competing_axes(table.attrs["axes"])
    runs = runs.assign(
        run=runs.index,
        candidate=[candidate(row, competing) for row in runs.to_dict("records")],
        seconds=runs[table.attrs["measure"]].astype(float),
        low_s=np.nan,
        high_s=np.nan,
    )
    runs.attrs = table.attrs
    words = _worded(runs, cells)
    parts = {}
    for name in (*cells, "candidate"):
        if name not in MEMORY_AXES:
            options = [(each, each) for each in (ALL, *words[name].unique())]
            parts[name] = Choice(f"at_{name}", column(name).head, options, ALL)
    best = table[table["fastest"]].sort_values("seconds")["run"].tolist()
    first = best[0] if best else 0
    # Another policy in the same setting; the first of all others where there is none.
    here = (words[cells] == words.loc[first, cells]).all(axis=1)
    order = [*words.index[here], *words.index]
    other = next((run for run in order if run != first), first)
    heads = words[[*cells, "candidate"]].agg(" | ".join, axis=1)
    options = [(str(run), head) for run, head in heads.items()]
    beside = [
        Choice("run", "run", options, str(first)),
        Choice("other_run", "beside", options, str(other)),
    ]
    held, placed = _places(frame, [*best, *runs.sort_values("seconds")["run"]])
    few = "" if held == len(frame) else " Only the fastest show their experts."
    lanes = _lanes_drawn(frame)
    experts = [placement_drawn(placed)] if held else []
    return [
        Section(
            "What does memory buy?",
            [
                *parts.values(),
                Shown(_memory_drawn(runs), parts, explores=True),
            ],
            "A point for each run; on the line, less memory means more time. A click on"
            " a point opens its run, one on a name hides it. Drag to move, Ctrl and"
            " wheel to zoom.",
        ),
        Section(
            "One run beside another",
            [
                *beside,
                *(_facts(frame, choice.name) for choice in beside),
                *(Shown(lanes, {"at_run": choice}) for choice in beside),
                *(Shown(each, {"policy": c}) for c in beside for each in experts),
            ],
            "Opened on the fastest; choose others among the points or in the tables."
            + few,
        ),
    ]


_FACTS = (
    *("policy", "cache", "prefetch", "model", "hw", "hw_kind", "begins"),
    *("ttft_s", "tpot_s", "tpot_p95_s", "hit_rate_active", "gpu_bytes", "h2d_bytes"),
    "digest",
)
"""What a page says of one run."""


def _facts(frame: pd.DataFrame, choice: str) -> Facts:
    """What each run was, and what came out."""
    columns = list(map(column, _FACTS))
    values = {
        str(place): [*(c.cell(run[c.name]) for c in columns), f"$ {_command(run)}"]
        for place, run in enumerate(frame.to_dict("records"))
    }
    return Facts(choice, [*(each.head for each in columns), "again"], values)


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


def _lanes_drawn(frame: pd.DataFrame) -> Figure:
    """What every lane of each run did: a share of it busy, then waiting."""
    rows = []
    for place, run in enumerate(frame.to_dict("records")):
        lanes = json.loads(run["lanes"])
        whole_s = run["makespan_s"] or 1.0
        for lane, busy_s in lanes["busy_s"].items():
            busy = busy_s / whole_s
            waits = (lanes["stall_s"].get(lane) or 0.0) / whole_s
            rows.append((place, lane, "busy", 0.0, busy, busy))
            rows.append((place, lane, "waits for copies", busy, busy + waits, waits))
    heads = ["at_run", "lane", "what", "from", "to", "share"]
    table = pd.DataFrame(rows, columns=heads)
    return Figure(
        table[table["share"] > 0],
        Axis("to", "share of the run", ".0%", limits=(0, 1)),
        names("lane", "", table["lane"]),
        "What every lane did",
        mark="bar",
        series="what",
        colours={"busy": GPU, "waits for copies": QUIET},
        start="from",
        hover=[("share", "share", ".1%")],
    )


def _places(frame: pd.DataFrame, order: Iterable[int]) -> tuple[int, pd.DataFrame]:
    """Where every expert was, in the columns of `Run.placement`, of as many runs as a
    page holds; and how many these are.
    """
    parts: list[pd.DataFrame] = []
    count = 0
    for place in dict.fromkeys(order):
        run = frame.iloc[place]
        on_gpu, resident = np.frombuffer(run["placement"], np.uint8).reshape(2, -1)
        count += len(on_gpu)
        if count > MOST_PLACES:
            break
        used = np.flatnonzero(on_gpu != NEVER_USED)
        layer, expert = np.divmod(used, int(run["placement_experts"] or 1))
        columns = {
            "policy": str(place),
            "layer": layer,
            "expert": expert,
            "on_gpu": on_gpu[used] / FULL_SHARE,
            "resident": resident[used] / FULL_SHARE,
        }
        parts.append(pd.DataFrame(columns))
    return len(parts), pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
