"""Reads a folder of measured rows: probes, models, decode and prefill speeds.

The files are those of ``moesim validate --machines DIR``; `docs/advise.md` lists their
columns. Any of them may be missing. Cells are text until somebody asks for a number.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.advice.errors import AdviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# File -> columns that its rows cannot do without.
FILES = {
    "platforms.csv": ("platform", "kind", "threads_or_mode", "value_gbs"),
    "models.csv": ("model", "quant", "n_layers", "n_moe_layers", "n_experts", "top_k"),
    "decode.csv": ("platform", "model", "quant", "n_cpu_moe", "tok_s"),
    "cache_runs.csv": ("platform", "model", "quant", "policy", "slots_per_layer"),
    "layer_events.csv": ("host", "model", "config", "tok_s"),
    "policy_reads.csv": ("model", "slots", "experts", "policy"),
    "llama_bench.csv": ("id", "model", "quant", "cpu", "gpu", "flags"),
}
UNSTATED = {"", "n/s", "n/a", "none stated", "?", "unknown", "nan"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file: cells by column, and where it stands."""

    file: str
    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return a cell; empty where the row does not state it."""
        value = (self.cells.get(column) or "").strip()
        return "" if value.lower() in UNSTATED else value

    def number(self, column: str) -> float | None:
        """Return a cell as a number; None where it states none.

        Raises:
            AdviceError: something else than a number stands there.
        """
        text = self.text(column).replace(",", "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise AdviceError(
                f"{self.place}: {column}: expected a number, found {text!r}"
            ) from None
        # NaN and infinities are numbers to Python, but not to us.
        if not abs(value) < 1e18:
            raise AdviceError(
                f"{self.place}: {column}: expected a number, found {text}"
            )
        return value

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class MeasuredFolder:
    """All rows of a folder by file name."""

    path: Path
    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> tuple[Row, ...]:
        """Return the rows of one file; none where the folder lacks it."""
        return self.rows.get(name, ())


def read_folder(path: Path) -> MeasuredFolder:
    """Read every known file of a folder.

    Raises:
        AdviceError: no such folder, none of the files in it, or a file without a column
            that its rows need.
    """
    if not path.is_dir():
        raise AdviceError(f"{path}: expected a folder with {', '.join(FILES)}")

    # A folder need not have every file: cases without rows say so.
    rows = {
        name: tuple(_rows(path / name, needed))
        for name, needed in FILES.items()
        if (path / name).is_file()
    }
    if not rows:
        raise AdviceError(
            f"{path}: found none of {', '.join(FILES)};"
            " docs/how-to/advise.md shows the columns"
        )
    return MeasuredFolder(path, rows)


def _rows(path: Path, needed: Iterable[str]) -> Iterable[Row]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            missing = [name for name in needed if name not in columns]
            if missing:
                raise AdviceError(
                    f"{path}: expected the columns {', '.join(needed)}; missing:"
                    f" {', '.join(missing)}"
                )
            for cells in reader:
                yield Row(path.name, reader.line_num, cells)
    except (UnicodeDecodeError, csv.Error) as error:
        raise AdviceError(f"{path}: not a CSV file in UTF-8: {error}") from None


def size_in_label(text: str) -> int | None:
    """Read the size out of ``UD-Q4_K_M (20.61 GiB)``, in bytes."""
    match = re.search(r"\(([\d.]+)\s*(GiB|GB)\)", text)
    if match is None:
        return None
    unit = 1024**3 if match.group(2) == "GiB" else 10**9
    return round(float(match.group(1)) * unit)
