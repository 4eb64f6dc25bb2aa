"""Questions in SQL to a folder of results, answered by DuckDB."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.sweeps.store import ResultsError, read_results

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd


def query(folder: str | Path, sql: str) -> pd.DataFrame:
    """Answer a question.

    Args:
        folder: of results.
        sql: to the table ``runs``, in the dialect of DuckDB. Files cannot be read.

    Raises:
        ResultsError: no results, or a question that is no SQL or asks for what is not
            there.
    """
    # A tenth of a second that only questions need pay.
    import duckdb  # noqa: PLC0415

    with duckdb.connect(config={"enable_external_access": False}) as connection:
        connection.register("runs", read_results(folder))
        try:
            answer: pd.DataFrame = connection.sql(sql).df()
        except duckdb.Error as error:
            reason = str(error).split("\n\n")[0]
            raise ResultsError(f"--sql: {reason}") from None
        except AttributeError:
            # A statement that answers nothing.
            raise ResultsError("--sql: expected a question, got a command") from None
    return answer
