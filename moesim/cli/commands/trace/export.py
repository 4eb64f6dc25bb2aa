"""`moesim trace export`: a trace in the layout of another tool."""

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.checks import check_places
from moesim.cli.options import TraceFile


def export(
    trace: TraceFile,
    target: Annotated[
        Path,
        typer.Argument(metavar="DST", help="The file to write.", show_default=False),
    ],
    layout: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="LAYOUT",
            help="csv, oracle-general (libCacheSim) or statistics.",
            show_default=False,
        ),
    ],
) -> None:
    """Write a trace in the layout of another tool.

    \b
    Examples:
      moesim trace export trace.parquet trace.oracleGeneral --to oracle-general
      moesim trace export trace.parquet trace.csv --to csv
    """
    # A layout of the same name would replace the trace that it is made from.
    check_places(files=[target], inputs=[trace])
    from moesim.cli.output import bar
    from moesim.traces.exporters import export_trace
    from moesim.traces.format.reader import open_trace

    with bar("exporting") as show:
        records = export_trace(open_trace(trace), target, layout, progress=show)
    print(f"wrote {target}: {records:,} records")
