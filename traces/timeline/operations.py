"""Operations of a real run's workers, from instant to instant.

A span says when an operation ran. Between being chosen and being counted more happens:
a thread is woken, a lock is waited for, work is handed out. In a real run all of that
lies between *instants*, at which the run's one lock was taken, and one row says between
which two an operation kept its worker. A replay with these rows in place of predicted
times differs from the run in structure alone (`python -m benchmarks.structure`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moesim.base.errors import TraceError
from moesim.base.files import written_beside
from moesim.traces.format.parquet import open_parquet, read_table
from moesim.traces.timeline.spans import KIND_NAMES

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME: Final = "operations.parquet"

REQUEST: Final = len(KIND_NAMES)
LAUNCH: Final = REQUEST + 1
RETURN: Final = REQUEST + 2
NOTE: Final = REQUEST + 3
PART_NAMES: Final = (*KIND_NAMES, "request", "launch", "return", "note")
"""Names of kinds of rows: those of spans, and what control does between its spans.

Request: from the end of the dense part until decisions begin. Launch: from the first
operation that a plan has queued until control serves its lanes. Return: from the join
until then. Note: what control writes down after a forward pass.
"""


class Part(NamedTuple):
    """One row.

    Attributes:
        lane: index of the lane.
        kind: place of its name in `PART_NAMES`.
        step: forward pass.
        layer: MoE layer; -1 where there is none.
        expert: expert; -1 where there is none.
        picked_s: instant from which it kept its worker, seconds since the run began.
        start_s: when its work began.
        end_s: when its work ended.
        ended_s: instant at which its consequences queued and its worker was free.
        cpu_s: seconds of its work that its thread had a core; NaN if not counted.
        waited_s: seconds of its work in which its thread could have run and others did;
            NaN if not counted.
        switches: how often its thread was made to stop; -1 if not counted.
    """

    lane: int
    kind: int
    step: int
    layer: int
    expert: int
    picked_s: float
    start_s: float
    end_s: float
    ended_s: float
    cpu_s: float = float("nan")
    waited_s: float = float("nan")
    switches: int = -1


_COLUMNS: Final = Part._fields
_ROW: Final = np.dtype(
    [(name, np.float64 if name.endswith("_s") else np.int32) for name in _COLUMNS]
)


class OperationTable:
    """Rows of one run, in the order in which they ended."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []

    def add(self, part: Part) -> None:
        """Append a row."""
        self._rows.append(part)

    def __len__(self) -> int:
        """Count the rows."""
        return len(self._rows)

    def columns(self) -> dict[str, np.ndarray]:
        """All rows, by column [N]."""
        rows = np.array(self._rows, _ROW)
        return {name: rows[name].copy() for name in _COLUMNS}

    def save(self, folder: Path) -> None:
        """Write ``operations.parquet``; beside it first, then renamed."""
        table = pa.table(self.columns())
        with written_beside(folder / FILE_NAME) as part:
            pq.write_table(table, part)

    @classmethod
    def load(cls, folder: Path) -> OperationTable:
        """Read the rows of a finished run.

        Raises:
            TraceError: there are none, or they are foreign.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            raise TraceError(
                f"{path}: no such file: expected the folder of a real run; make one"
                " with `moesim run --out`"
            )
        try:
            with open_parquet(path) as file:
                table = read_table(file, path)
        except (pa.ArrowException, OSError) as error:
            reason = (str(error).splitlines() or ["unreadable"])[0]
            raise TraceError(
                f"{path}: not a readable table of operations: {reason}; run again with"
                " --out"
            ) from None
        absent = [name for name in _COLUMNS if name not in table.column_names]
        if absent:
            raise TraceError(
                f"{path}: expected columns {', '.join(_COLUMNS)}, found no"
                f" {', '.join(absent)}; run again with --out"
            )
        read = cls()
        columns = (table.column(name).to_pylist() for name in _COLUMNS)
        read._rows = list(zip(*columns, strict=True))
        return read


def lost_shares(operations: OperationTable | None, lengths_s: np.ndarray) -> np.ndarray:
    """Share of each step's time that its threads waited for a core.

    Args:
        operations: of a run; None where nothing was counted.
        lengths_s: float64 [S], seconds of each forward pass.

    Returns:
        float64 [S]; zero where nothing was counted.
    """
    lost_s = np.zeros(len(lengths_s))
    if operations is None:
        return lost_s
    columns = operations.columns()
    counted = np.isfinite(columns["waited_s"]) & (columns["kind"] < REQUEST)
    np.add.at(lost_s, columns["step"][counted], columns["waited_s"][counted])
    return lost_s / np.maximum(lengths_s, 1e-9)
