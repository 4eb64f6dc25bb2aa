"""`moesim sweep`: every combination of the values of any options."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli import output
from moesim.cli.axes import with_axes
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson

if TYPE_CHECKING:
    import pandas as pd

Source = Annotated[
    Path | None,
    typer.Argument(
        metavar="TRACE|CONFIG",
        help="A moesim trace, or a TOML file in which every list is an axis.",
        show_default=False,
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep results there; runs that are there are not run again.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run on a Dask cluster: tcp://HOST:8786, or local:N for N processes here.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Replays at the same time. Default: as many as pay, one per core at most.",
    ),
]

Table = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the table, .csv or .parquet."),
]


@with_axes()
def sweep(
    source: Source = None,
    *,
    axes: dict[str, Any],
    store: Store = None,
    jobs: Jobs = None,
    cluster: Cluster = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, as .png, .svg or .pdf."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page to explore it."),
    ] = None,
    table: Table = None,
    as_json: AsJson = False,
) -> None:
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
    from moesim.cli.progress import bar
    from moesim.reporting.sweeps.text import sweep_text
    from moesim.sweeps.plan import planned
    from moesim.sweeps.sweep import configs_of, run_sweep

    check_places(folder=store, files=[png, html, table], inputs=[source])
    plan = planned(configs_of(sources(source, axes), axes))
    with bar("replaying", 1.0) as show:
        swept = run_sweep(plan, store=store, jobs=jobs, cluster=cluster, progress=show)

    frame = swept.frame(details=True)
    _write(frame, png=png, html=html, table=table)
    if as_json:
        print(swept.frame().to_json(orient="records", indent=2))
        return
    print(sweep_text(frame))
    if swept.stored:
        print(f"{swept.stored} of {len(frame)} runs were in {store}")
    output.print_written([store, png, html, table])
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


def _write(
    frame: "pd.DataFrame", *, png: Path | None, html: Path | None, table: Path | None
) -> None:
    from moesim.reporting.figures import save
    from moesim.reporting.sweeps.figure import sweep_figure
    from moesim.reporting.sweeps.page import write_sweep
    from moesim.reporting.text import save_table
    from moesim.sweeps.rows import DETAILS

    if table is not None:
        names = [name for name in frame.columns if name not in DETAILS]
        save_table(frame[names], table)
    if html is not None:
        write_sweep(frame, html, output.command_line())
    if png is not None:
        save(sweep_figure(frame), png)
