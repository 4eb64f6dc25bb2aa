"""`moesim results`: ask questions of the results that sweeps have kept."""

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import output
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson


def results(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Results of `moesim sweep --store`.", show_default=False
        ),
    ],
    *,
    sql: Annotated[
        str,
        typer.Option(
            metavar="QUERY", help="A question in SQL to the table `runs` (DuckDB)."
        ),
    ] = (
        "SELECT model, policy, hw, count(*) AS runs, min(tpot_s) AS best_tpot_s,"
        " median(tpot_s) AS median_tpot_s FROM runs GROUP BY ALL ORDER BY ALL"
    ),
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the answer, .csv or .parquet."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer a question in SQL from the results of sweeps.

    Without --sql, list what is there. Columns are the options of a run and its metrics
    (`moesim results DIR --sql "DESCRIBE runs"` names them).

    \b
    Examples:
      moesim results results
      moesim results results --sql "SELECT policy, avg(hit_rate_active) FROM runs GROUP BY policy"
      moesim results results --sql "FROM runs WHERE batch = 4" --table batch4.csv
    """
    from moesim.reporting.tables import aligned
    from moesim.reporting.text import save_table
    from moesim.sweeps.queries import query

    check_places(files=[table])
    frame = query(folder, sql)
    if table is not None:
        save_table(frame, table)
    if as_json:
        print(frame.to_json(orient="records", indent=2))
        return
    rows = [list(map(str, row)) for row in frame.itertuples(index=False, name=None)]
    print("\n".join(aligned([list(map(str, frame.columns)), *rows])))
    output.print_written([table])
