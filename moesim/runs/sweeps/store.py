"""Results that are never lost: a folder of Parquet files, a row for each run.

Every row is named by the digest of its run, so what is there need not be run again.
Files have random names and are never changed; several processes may add to a folder at
the same time, and a kill loses only what was not yet written.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.base.files import remove_leftovers
from moesim.base.seals import check_seal
from moesim.runs.sweeps.rows import DETAILS, as_table, row_schema
from moesim.traces.format.parquet import open_parquet, read_table, write_table

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import pandas as pd

LEAST_INTERVAL_S = 1.0
"""Seconds between two writes at the beginning of a sweep."""

SHARE_AT_RISK = 0.01
"""Of a long sweep, the share that a kill may cost: files stay few."""


_NAMING = ("digest", "trace_digest", "hw_digest")
"""Columns without which nobody could tell what was run."""


class ResultsError(ValueError):
    """A folder that holds no results, a damaged file in it, or a wrong query."""


class ResultStore:
    """A folder of results.

    Args:
        folder: is made if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._waiting: list[Mapping[str, Any]] = []
        self._begin_s = time.monotonic()
        self._written_s = self._begin_s
        remove_leftovers(self.folder)

    def digests(self) -> set[str]:
        """Names of all runs that are there."""
        columns = [
            _read(file, columns=["digest"]).column("digest") for file in self._files()
        ]
        return {digest for column in columns for digest in column.to_pylist()}

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row; it is written at once or with the next ones."""
        self._waiting.append(row)
        now_s = time.monotonic()
        interval_s = max(LEAST_INTERVAL_S, SHARE_AT_RISK * (now_s - self._begin_s))
        if now_s - self._written_s >= interval_s:
            self.flush()

    def flush(self) -> None:
        """Write all rows that wait."""
        if self._waiting:
            file = self.folder / f"{uuid.uuid4().hex}.parquet"
            write_table(file, as_table(self._waiting), compression="zstd")
        self._waiting = []
        self._written_s = time.monotonic()

    def table(self, digests: Collection[str] | None = None) -> pa.Table:
        """Read all rows, or those with certain digests, each once.

        Raises:
            ResultsError: a file is damaged.
        """
        return read_results(self.folder, digests)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.parquet"))


def read_results(
    folder: str | Path, digests: Collection[str] | None = None
) -> pa.Table:
    """Read the rows of a folder of results, each run once, in an order that does not
    depend on when they were written.

    Args:
        folder: of results.
        digests: rows to read; None reads all.

    Raises:
        ResultsError: no such folder, nothing in it, or a damaged file.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.parquet"))
    if not files and digests is None:
        raise ResultsError(
            f"{folder}: expected a folder of results, found none; `moesim sweep TRACE"
            f" --results {folder}` makes one"
        )
    # Rows of an older moesim may lack columns.
    tables = [as_table([]), *map(_read, files)]
    table = pa.concat_tables(tables, promote_options="default")

    first: dict[str, int] = {}
    for place, digest in enumerate(table.column("digest").to_pylist()):
        if digests is None or digest in digests:
            first.setdefault(digest, place)
    places = [first[digest] for digest in sorted(first)]
    return table.take(pa.array(places, pa.int64()))


def _read(file: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        check_seal(file)
        with open_parquet(file) as opened:
            _check_columns(file, opened.schema_arrow)
            return read_table(opened, file, columns)
    except (pa.ArrowException, OSError, TraceError) as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise ResultsError(
            f"{file}: not a readable table of results: {reason}; remove it, and the"
            " sweep runs what it held again"
        ) from None


def _check_columns(file: Path, schema: pa.Schema) -> None:
    """Refuse a table that no sweep has written.

    Raises:
        ResultsError: naming it, and what is strange in it.
    """
    known = {field.name: (field.type, pa.null()) for field in row_schema()}
    faults = [f"none called {name}" for name in _NAMING if name not in schema.names]
    faults += [
        f"{name} of {kind}"
        for name, kind in zip(schema.names, schema.types, strict=True)
        if kind not in known.get(name, (kind,))
    ]
    if len(set(schema.names)) < len(schema.names):
        faults.append("two of one name")
    if faults:
        raise ResultsError(
            f"{file}: expected columns as `moesim sweep --results` writes them, found"
            f" {faults[0]}; keep results in a folder of their own"
        )


def results(folder: str | Path, *, details: bool = False) -> pd.DataFrame:
    """Read a folder of results as a data frame: one row for each run.

    Args:
        folder: of results, as ``moesim sweep --results`` fills it.
        details: keep the columns that only pages and statistics read.

    Raises:
        ResultsError: no such folder, nothing in it, or a damaged file.
    """
    from moesim.runs.sweeps.store import as_frame  # noqa: PLC0415 - pandas

    return as_frame(read_results(folder), details=details)


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


def as_frame(
    table: pa.Table, *, axes: Sequence[str] = (), details: bool = False
) -> pd.DataFrame:
    """One row for each run.

    Traces and machines that share a name get the beginning of their digests behind it.

    Args:
        table: with the columns of `moesim.runs.sweeps.rows.row_schema`.
        axes: columns that come first; ``attrs["axes"]`` names them.
        details: keep the columns that only pages and statistics read.
    """
    names = [*axes, *(name for name in table.column_names if name not in axes)]
    if not details:
        names = [name for name in names if name not in DETAILS]
    frame: pd.DataFrame = table.select(names).to_pandas()
    for name in ("trace", "hw"):
        digest = frame[f"{name}_digest"]
        is_shared = digest.groupby(frame[name]).transform("nunique") > 1
        frame[name] = frame[name].where(
            ~is_shared, frame[name] + " (" + digest.str[:6] + ")"
        )
    frame.attrs["axes"] = list(axes)
    return frame
