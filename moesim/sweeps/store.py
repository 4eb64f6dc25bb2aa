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
import pyarrow.parquet as pq

from moesim.sweeps.rows import as_table
from moesim.traces.files import part_path, written_beside

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import pandas as pd

LEAST_INTERVAL_S = 1.0
"""Seconds between two writes at the beginning of a sweep."""

SHARE_AT_RISK = 0.01
"""Of a long sweep, the share that a kill may cost: files stay few."""

ABANDONED_AFTER_S = 600
"""Age of a half-written file that nobody can still be writing."""


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
        self._remove_abandoned()

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
            with written_beside(file) as part:
                pq.write_table(
                    as_table(self._waiting),
                    part,
                    compression="zstd",
                    write_page_checksum=True,
                )
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

    def _remove_abandoned(self) -> None:
        # Younger ones may belong to a sweep that runs at the same time.
        for part in self.folder.glob(part_path(Path("*.parquet")).name):
            if time.time() - part.stat().st_mtime > ABANDONED_AFTER_S:
                part.unlink(missing_ok=True)


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
            f" --store {folder}` makes one"
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
        return pq.read_table(
            file,
            columns=columns,
            page_checksum_verification=True,
            partitioning=None,
        )
    except (pa.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise ResultsError(
            f"{file}: not a readable table of results: {reason}; remove it, and the"
            " sweep runs what it held again"
        ) from None


def results(folder: str | Path, *, details: bool = False) -> pd.DataFrame:
    """Read a folder of results as a data frame: one row for each run.

    Args:
        folder: of results, as ``moesim sweep --store`` fills it.
        details: keep the columns that only pages and statistics read.

    Raises:
        ResultsError: no such folder, nothing in it, or a damaged file.
    """
    from moesim.sweeps.frames import as_frame  # noqa: PLC0415 - pandas

    return as_frame(read_results(folder), details=details)
