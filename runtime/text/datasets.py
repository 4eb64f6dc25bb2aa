"""Reads prompts: from a plain text file, or from the rows of a published data set.

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

_ASSISTANTS: Final = ("assistant", "gpt", "model")
"""Roles whose message is an answer, in the chat formats in use."""

# Rows decoded at once: few, because the reader may stop at any of them.
_BATCH_ROWS: Final = 64

# Python's own limit is 128 KiB, which long documents exceed.
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
            f"{file}: expected a UTF-8 text file with prompts, found: {_reason(error)}"
        ) from None

    blocks = _blocks(text)
    if not blocks:
        raise TraceError(
            f"{file}: expected prompts, found an empty file; write one prompt per line"
        )
    return blocks[0] if len(blocks) == 1 else ["\n".join(block) for block in blocks]


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
    readers = {
        ".jsonl": _json_rows,
        ".csv": _csv_rows,
        ".tsv": _csv_rows,
        ".parquet": _parquet_rows,
    }
    reader = readers.get(file.suffix)
    if reader is None:
        raise TraceError(
            f"{file}: expected a name that ends in .jsonl, .csv, .tsv or .parquet;"
            " convert the data set"
        )

    try:
        prompts = [
            _prompt(f"{file}: {position}", row, column)
            for position, row in islice(reader(file), limit)
        ]
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise TraceError(
            f"{file}: expected a readable data set, found: {_reason(error)}"
        ) from None
    if not prompts:
        raise TraceError(f"{file}: expected prompts, found no rows")
    return prompts


def _blocks(text: str) -> list[list[str]]:
    """Split a text at blank lines into blocks of lines."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    # A file may end with blank lines.
    return [block for block in blocks if block]


def _reason(error: Exception) -> str:
    """Say what went wrong, on one line and without the file's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0]


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a file with one per line, and where they are."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line)
            except ValueError:
                raise TraceError(
                    f"{file}: line {number}: expected a JSON string or object, found"
                    " neither"
                ) from None


def _csv_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table with a header line, and where they are."""
    csv.field_size_limit(_LONGEST_CELL)
    # Spreadsheets put a byte-order mark before the first column's name.
    with file.open(encoding="utf-8-sig", newline="") as lines:
        table = csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
        for row in table:
            yield f"line {table.line_num}", row


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield rows, and where they are, without loading the file at once."""
    with pq.ParquetFile(file) as table:
        number = 0
        for batch in table.iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                yield f"row {number}", row
                number += 1


def _prompt(position: str, row: Any, column: str | None) -> str:
    """Find the prompt in a row."""
    if isinstance(row, str) and row and column is None:
        return row
    if not isinstance(row, dict):
        raise TraceError(
            f"{position}: expected a JSON string, or an object with one of"
            f" {', '.join(COLUMNS)}"
        )

    name = column
    expected = f"column {column!r}"
    if column is None:
        # The first that is filled: a data set may leave some of them empty.
        name = next((known for known in COLUMNS if row.get(known)), None)
        expected = f"one of the columns {', '.join(COLUMNS)}"
    if name is None or name not in row:
        columns = ", ".join(str(key) for key in row) or "none"
        raise TraceError(
            f"{position}: expected {expected}, found {columns}; name it with --column"
        )

    value = row[name]
    text = _conversation(value) if isinstance(value, list) else value
    if not isinstance(text, str) or not text:
        raise TraceError(
            f"{position}: {name}: expected text or a list of messages, found"
            f" {str(value)[:40]!r}"
        )
    return text


def _conversation(messages: list[Any]) -> str | None:
    """Join the messages before the last answer; None where some are no messages."""
    if not all(isinstance(message, dict) for message in messages):
        return None
    # A prompt ends where the model's answer would begin.
    if messages and messages[-1].get("role", messages[-1].get("from")) in _ASSISTANTS:
        messages = messages[:-1]

    texts = [message.get("content", message.get("value")) for message in messages]
    if not all(isinstance(text, str) for text in texts):
        return None
    return "\n\n".join(texts)
