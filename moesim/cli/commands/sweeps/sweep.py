"""`moesim sweep`: every combination of the values of any options."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moesim.base.options import (
    PAGES,
    PICTURES,
    TABLES,
    Options,
    file_option,
    folder_option,
    json_option,
    option,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyRunsOptions(Options):
    """What many runs are made of, and where they happen."""

    source: Path | None = option(
        None,
        "A moesim trace, or a TOML file in which every list is an axis.",
        kind=Path,
        metavar="TRACE|CONFIG",
        argument=True,
        place="input",
    )
    store: Path | None = folder_option(
        "Keep results there; runs that are there are not run again."
    )
    jobs: int | None = option(
        None,
        "Replays at the same time. Default: as many as pay, one per core at most.",
        kind=int,
        metavar="N",
        minimum=1,
    )
    cluster: str | None = option(
        None,
        "Run on a Dask cluster: tcp://HOST:8786, or local:N for N processes here.",
        metavar="ADDRESS",
    )
    table: Path | None = file_option("Write the table.", *TABLES)
    as_json: bool = json_option()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(ManyRunsOptions):
    """What `moesim sweep` writes beside the table."""

    png: Path | None = file_option("Draw it.", *PICTURES)
    html: Path | None = file_option("Write a page to explore it.", *PAGES)


@from_dataclass()
def sweep(axes: dict[str, Any], options: SweepOptions) -> None:
    """Replay every combination of policies, memories, machines, traces, batches and
    whatever else has several values, and say who is fastest where.

    A sweep that was stopped goes on where it was, if it is given the same --store.

    \b
    Examples:
      moesim sweep q.parquet --policies greedy,fiddler --gpu-memory 4GiB,8GiB --hw rtx4060ti,rtx3080ti
      moesim sweep q.parquet --policies systems --batches 1,4,16 --store results --html q.html
      moesim sweep exp.toml --seeds 0,1,2,3 --store results
      moesim sweep exp.toml --cluster tcp://192.168.0.5:8786 --store results
    """
    from moesim.cli.output import bar
    from moesim.questions.sweep_text import sweep_text
    from moesim.runs.sweeps.plan import planned
    from moesim.runs.sweeps.sweep import configs_of, run_sweep

    plan = planned(configs_of(sources(options.source, axes), axes))
    with bar("replaying", 1.0) as show:
        swept = run_sweep(
            plan,
            store=options.store,
            jobs=options.jobs,
            cluster=options.cluster,
            progress=show,
        )

    frame = swept.frame(details=True)
    _write(frame, options)
    if options.as_json:
        print(swept.frame().to_json(orient="records", indent=2))
        return
    print(sweep_text(frame))
    if swept.stored:
        print(f"{swept.stored} of {len(frame)} runs were in {options.store}")
    output.print_written([options.store, options.png, options.html, options.table])
    warnings = [line for text in frame["warnings"] for line in json.loads(text)]
    # Runs share most of their warnings; each is worth one line.
    output.print_notes([*swept.refusal_lines(), *dict.fromkeys(warnings)])


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


def _write(frame: "pd.DataFrame", options: SweepOptions) -> None:
    from moesim.questions.sweep_page import sweep_figure, write_sweep
    from moesim.reporting.tables import save_table
    from moesim.runs.sweeps.rows import DETAILS

    if options.table is not None:
        names = [name for name in frame.columns if name not in DETAILS]
        save_table(frame[names], options.table)
    if options.html is not None:
        write_sweep(frame, options.html, output.command_line())
    if options.png is not None:
        sweep_figure(frame).save(options.png)
