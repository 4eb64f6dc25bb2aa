"""`moesim results`: ask questions of the results that sweeps have kept."""

from dataclasses import dataclass
from pathlib import Path

from moesim.base.options import (
    REQUIRED,
    TABLES,
    Options,
    file_option,
    json_option,
    option,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsOptions(Options):
    """What is asked of which results."""

    folder: Path = option(
        REQUIRED,
        "Results of `moesim sweep --store`.",
        kind=Path,
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
    as_json: bool = json_option()


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
    from moesim.runs.sweeps.store import query

    frame = query(options.folder, options.sql)
    if options.table is not None:
        save_table(frame, options.table)
    if options.as_json:
        print(frame.to_json(orient="records", indent=2))
        return
    rows = [list(map(str, row)) for row in frame.itertuples(index=False, name=None)]
    print("\n".join(aligned([list(map(str, frame.columns)), *rows])))
    output.print_written([options.table])
