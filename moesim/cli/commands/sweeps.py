"""`moesim sweep`, `search` and `results`: many runs, and questions to them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moesim.base.options import (
    PAGES,
    PICTURES,
    REQUIRED,
    TABLES,
    JsonOptions,
    file_option,
    folder_option,
    input_option,
    jobs_option,
    minutes_option,
    option,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyRunsOptions(JsonOptions):
    """What many runs are made of, and where they happen."""

    source: Path | None = input_option(
        "A moesim trace, or a TOML file in which every list is an axis.",
        metavar="TRACE|CONFIG",
        argument=True,
    )
    results: Path | None = folder_option(
        "Keep results there; runs that are there are not run again."
    )
    jobs: int | None = jobs_option()
    cluster: str | None = option(
        None,
        "Run on a Dask cluster: tcp://HOST:8786.",
        metavar="ADDRESS",
    )
    table: Path | None = file_option("Write the table.", *TABLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(ManyRunsOptions):
    """What `moesim sweep` writes beside the table."""

    png: Path | None = file_option("Draw it.", *PICTURES)
    html: Path | None = file_option("Write a page to explore it.", *PAGES)


@from_dataclass()
def sweep(axes: dict[str, Any], options: SweepOptions) -> None:
    """Replay every combination of policies, memories, machines, traces, batches and
    whatever else has several values, and say who is fastest where.

    A sweep that was stopped goes on where it was, if it is given the same --results.

    \b
    Examples:
      moesim sweep q.parquet --policy greedy,fiddler --gpu-memory 4GiB,8GiB --hw rtx4060ti,rtx3080ti
      moesim sweep q.parquet --policy systems --batch 1,4,16 --results results --html q.html
      moesim sweep exp.toml --seed 0,1,2,3 --results results
      moesim sweep exp.toml --cluster tcp://192.168.0.5:8786 --results results
    """
    from moesim.questions.ranked import ranked_answer
    from moesim.runs.sweeps.plan import planned
    from moesim.runs.sweeps.sweep import configs_of, run_sweep

    plan = planned(configs_of(sources(options.source, axes), axes))
    with output.bar("replaying", 1.0) as show:
        swept = run_sweep(
            plan,
            results=options.results,
            jobs=options.jobs,
            cluster=options.cluster,
            progress=show,
        )

    frame = swept.frame(details=True)
    answer = ranked_answer(frame)
    answer.all_rows = swept.frame()
    notes = swept.refusal_lines()
    if swept.stored:
        stored = f"{swept.stored} of {len(frame)} runs were in {options.results}"
        notes.insert(0, stored)
    output.present(answer, options, more=[options.results], notes=notes)


def sources(source: Path | None, axes: dict[str, Any]) -> Any:
    """The trace or file that is named first, else the traces of an option.

    Raises:
        typer.BadParameter: neither, or both.
    """
    traces = axes.pop("trace", None)
    if source is None and traces is None:
        raise typer.BadParameter(
            "expected a trace, or a configuration that names one",
            param_hint="TRACE|CONFIG",
        )
    if source is None:
        return list(traces)
    if traces is not None:
        # A configuration may be run on other traces than its own.
        axes["trace"] = traces
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(ManyRunsOptions):
    """What is sought, and how long."""

    objective: tuple[str, ...] = option(
        ("tpot_s",),
        "What is to be best; several metrics give a Pareto front.",
        metavar="METRIC",
    )
    trials: int = option(60, "Runs that are proposed.", minimum=1)
    over: tuple[str, ...] = option(
        (),
        "Choose a number, such as cache_ratio=0.05:0.5, or a parameter of a policy,"
        " such as cache.decay=0.5:0.99.",
        metavar="NAME=LOW:HIGH",
    )
    minutes: float | None = minutes_option(
        "A limit: proposals that do not fit are left out; with --results the next call"
        " goes on."
    )


@from_dataclass()
def search(axes: dict[str, Any], options: SearchOptions) -> None:
    """Search for the best policy parameters, memory and machine with Optuna.

    Options with several values are choices, --over gives ranges.

    \b
    Examples:
      moesim search q.parquet --policy greedy,fiddler --over cache_ratio=0.05:0.5 --objective tpot_s,gpu_bytes
      moesim search q.parquet --policy on-demand --cache lfu --over cache.decay=0.5:0.99
    """
    from moesim.questions.search import search as search_for
    from moesim.questions.search import search_answer

    (trace,) = _single(sources(options.source, axes))
    ranges = dict(map(_range, options.over))
    with output.bar("searching", 1.0) as show:
        searched = search_for(
            trace,
            objectives=options.objective,
            progress=show,
            **options.arguments(search_for) | axes | {"over": ranges},
        )
    output.present(search_answer(searched), options, more=[options.results])


def _single(source: Any) -> list[Any]:
    """The one trace or file to search on.

    Raises:
        typer.BadParameter: several.
    """
    named = source if isinstance(source, list) else [source]
    if len(named) != 1:
        raise typer.BadParameter("expected one trace", param_hint="--trace")
    return named


def _range(text: str) -> tuple[str, tuple[float, float]]:
    """Parse ``cache_ratio=0.05:0.5``; whole numbers stay whole.

    Raises:
        typer.BadParameter: it is no range.
    """
    name, _, ends = text.partition("=")
    low, _, high = ends.partition(":")
    try:
        return name.strip().replace("-", "_"), (_number(low), _number(high))
    except ValueError:
        raise typer.BadParameter(
            f"expected NAME=LOW:HIGH such as cache_ratio=0.05:0.5, got {text!r}",
            param_hint="--over",
        ) from None


def _number(text: str) -> float:
    return int(text) if text.strip().isdecimal() else float(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsOptions(JsonOptions):
    """What is asked of which results."""

    folder: Path = input_option(
        "Results that `moesim sweep --results` keeps.",
        REQUIRED,
        metavar="DIR",
        argument=True,
    )
    sql: str = option(
        "SELECT model, policy, hw, count(*) AS runs, min(tpot_s) AS best_tpot_s,"
        " median(tpot_s) AS median_tpot_s FROM runs GROUP BY ALL ORDER BY ALL",
        "A question in SQL to the table `runs` (DuckDB).",
        metavar="QUERY",
    )
    table: Path | None = file_option("Write the answer.", *TABLES)


@from_dataclass(from_file=False)
def results(options: ResultsOptions) -> None:
    """Answer a question in SQL from the results of sweeps.

    Without --sql, list what is there. Columns are the options of a run and its metrics
    (`moesim results DIR --sql "DESCRIBE runs"` names them).

    \b
    Examples:
      moesim results results
      moesim results results --sql "SELECT policy, avg(hit_rate_active) FROM runs GROUP BY policy"
      moesim results results --sql "FROM runs WHERE batch = 4" --table batch4.csv
    """
    from moesim.reporting.tables import aligned, save_table
    from moesim.runs.sweeps.rows import query

    frame = query(options.folder, options.sql)
    if options.table is not None:
        save_table(frame, options.table)
    if options.as_json:
        print(frame.to_json(orient="records", indent=2))
        return
    print("\n".join(aligned(_texts(frame))))
    output.print_written([options.table])


def _texts(frame: "pd.DataFrame") -> list[list[str]]:
    """A frame's columns and rows."""
    rows: list[Any] = [frame.columns, *frame.itertuples(index=False, name=None)]
    return [list(map(str, row)) for row in rows]
