"""Where prompts come from: a text file somebody wrote, or a data set somebody
published.

A data set is read row by row and no further than `limit`, so the first hundred prompts
of a large file cost a hundred rows. Each row is one prompt; the column is found by
name, or named by the user.
"""

from __future__ import annotations

import csv
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from moesim.traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS: Final = (
    "prompt",
    "text",
    "question",
    "instruction",
    "messages",
    "conversations",
    "content",
)
"""Columns that hold prompts, the likeliest first."""

_BATCH_ROWS: Final = 64
_ANSWERS: Final = ("assistant", "gpt", "model")
_LONGEST_CELL: Final = 1 << 27


def read_prompts(path: Path | str) -> list[str]:
    """Read prompts from a text file.

    Blank lines separate prompts; in a file without blank lines between texts, every
    line is a prompt. In a `.jsonl` file every line is a JSON string, or an object with
    a column of `COLUMNS`: for prompts that hold blank lines.

    Raises:
        TraceError: no such file, not UTF-8, or no prompt in it.
    """
    file = Path(path)
    if file.suffix == ".jsonl":
        return read_dataset(file)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{file}: expected a UTF-8 text file with prompts, found: {_why(error)}"
        ) from None
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    blocks = [block for block in blocks if block]
    prompts = blocks[0] if len(blocks) == 1 else ["\n".join(block) for block in blocks]
    if not prompts:
        raise TraceError(
            f"{file}: expected prompts, found an empty file; write one prompt per line"
        )
    return prompts


def read_dataset(
    path: Path | str, column: str | None = None, limit: int | None = None
) -> list[str]:
    """Read prompts from the rows of a data set: JSON lines, CSV, TSV or Parquet, by
    suffix.

    A row of messages (objects with `content` or `value`, as chat data sets have them)
    becomes the text up to its last answer, messages separated by blank lines; no chat
    template is applied.

    Args:
        path: the file.
        column: where the prompts are; the first of `COLUMNS` that a row has when None.
        limit: read the first so many rows.

    Raises:
        TraceError: an unknown suffix, a damaged file, no such column, a row without
            text, or no row.
    """
    file = Path(path)
    reader = {
        ".jsonl": _json_rows,
        ".csv": _csv_rows,
        ".tsv": _csv_rows,
        ".parquet": _parquet_rows,
    }.get(file.suffix)
    if reader is None:
        raise TraceError(
            f"{file}: expected a name that ends in .jsonl, .csv, .tsv or .parquet;"
            " convert the data set"
        )
    try:
        prompts = [
            _prompt(f"{file}: {where}", row, column)
            for where, row in islice(reader(file), limit)
        ]
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise TraceError(
            f"{file}: expected a readable data set, found: {_why(error)}"
        ) from None
    if not prompts:
        raise TraceError(f"{file}: expected prompts, found no rows")
    return prompts


def _why(error: Exception) -> str:
    """What went wrong, on one line and without the place."""
    return (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else str(error).splitlines()[0]
    )


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a file with one per line, and where they are."""
    with file.open(encoding="utf-8") as lines:
        for at, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield f"line {at}", json.loads(line)
                except ValueError:
                    raise TraceError(
                        f"{file}: line {at}: expected a JSON string or object, found"
                        " neither"
                    ) from None


def _csv_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table with a header line."""
    csv.field_size_limit(_LONGEST_CELL)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        table = csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
        for row in table:
            yield f"line {table.line_num}", row


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield rows without reading the file as a whole."""
    with pq.ParquetFile(file) as table:
        at = 0
        for batch in table.iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                yield f"row {at}", row
                at += 1


def _prompt(where: str, row: Any, column: str | None) -> str:
    """Find the prompt in a row."""
    if isinstance(row, str) and row and column is None:
        return row
    if not isinstance(row, dict):
        raise TraceError(
            f"{where}: expected a JSON string, or an object with one of"
            f" {', '.join(COLUMNS)}"
        )
    name = (
        column
        if column is not None
        else next((one for one in COLUMNS if row.get(one)), None)
    )
    if name is None or name not in row:
        expected = (
            f"column {column!r}"
            if column is not None
            else f"one of the columns {', '.join(COLUMNS)}"
        )
        found = ", ".join(str(one) for one in row) or "none"
        raise TraceError(
            f"{where}: expected {expected}, found {found}; name it with --column"
        )
    text = _conversation(row[name]) if isinstance(row[name], list) else row[name]
    if not isinstance(text, str) or not text:
        raise TraceError(
            f"{where}: {name}: expected text or a list of messages, found"
            f" {str(row[name])[:40]!r}"
        )
    return text


def _conversation(messages: list[Any]) -> str | None:
    """Join the messages before the last answer; None where some are no messages."""
    if not all(isinstance(one, dict) for one in messages):
        return None
    if messages and messages[-1].get("role", messages[-1].get("from")) in _ANSWERS:
        messages = messages[:-1]
    texts = [one.get("content", one.get("value")) for one in messages]
    return "\n\n".join(texts) if all(isinstance(text, str) for text in texts) else None
