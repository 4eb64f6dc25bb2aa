"""Text for models: prompts from files and data sets, and the corpus that ships with
Python.

Routing is learned from text, so anything that trains, calibrates or measures needs
some, and a machine without a network still has this one. Files belong to one of three
parts: *training* for models that we train ourselves, *calibration* for whatever a
policy may learn beforehand, *evaluation* for the numbers we report. The part of a file
follows from its name alone, so the parts never mix, whichever Python or machine splits
them.

Left out: installed packages; test suites (many distributions drop them); files
generated for one build; and `encodings` and `pydoc_data`, which are tables rather than
writing. A Python version changes the text, so what is made from it names its digest.
"""

from __future__ import annotations

import csv
import hashlib
import io
import random
import sysconfig
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.base.inputs import load_json, open_input, read_text
from moesim.traces.format.parquet import open_parquet

if TYPE_CHECKING:
    from collections.abc import Iterator

Part = Literal["calibration", "training", "evaluation"]

PARTS: Final[tuple[Part, ...]] = get_args(Part)

# Of 100 equal shares of the hash space: the first ten calibrate, the next ten evaluate,
# the rest train.
_CALIBRATION_SHARES: Final = 10
_EVALUATION_SHARES: Final = 10
_SHARES: Final = 100

_SKIPPED_FOLDERS: Final = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),
}
# Written by the build of Python, and full of its paths.
_SKIPPED_PREFIX: Final = "_sysconfigdata"


def root() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def split_of(relative_path: str) -> Part:
    """Return the part that a file belongs to.

    Only the name decides, through SHA-256 rather than Python's salted `hash`, so that a
    file stays in its part from one run, version and machine to the next.

    Args:
        relative_path: path below the library's root, with forward slashes, e.g.
            `json/decoder.py`.
    """
    digest = hashlib.sha256(relative_path.encode()).digest()
    share = int.from_bytes(digest[:8], "big") % _SHARES
    if share < _CALIBRATION_SHARES:
        return "calibration"
    if share < _CALIBRATION_SHARES + _EVALUATION_SHARES:
        return "evaluation"
    return "training"


@cache
def files(part: Part) -> tuple[str, ...]:
    """List the files of a part as relative paths with forward slashes, in ascending
    order.

    Raises:
        ValueError: `part` is not one of `PARTS`.
        FileNotFoundError: this Python came without the sources of its library.
    """
    if part not in PARTS:
        raise ValueError(f"unknown corpus part {part!r}; known: {', '.join(PARTS)}")

    base = root()
    names = (path.relative_to(base) for path in base.rglob("*.py"))
    # Sorted, because file systems list in an order of their own.
    kept = sorted(
        name.as_posix()
        for name in names
        if _SKIPPED_FOLDERS.isdisjoint(name.parts)
        and not name.name.startswith(_SKIPPED_PREFIX)
    )
    chosen = tuple(name for name in kept if split_of(name) == part)
    if not chosen:
        raise FileNotFoundError(
            f"{base}: expected the standard library's .py files, found {len(kept)} of"
            f" them and none for {part!r}; use a Python that ships its sources"
        )
    return chosen


def prompts(part: Part, count: int, length_bytes: int, seed: int) -> list[bytes]:
    """Draw prompts: excerpts that begin at the start of a line and stay inside one
    file.

    Files are drawn without repetition while they last, so that a few prompts are a few
    different texts; files shorter than a prompt are passed over.

    Args:
        part: which part.
        count: how many prompts, >= 0.
        length_bytes: length of each, >= 1.
        seed: the same seed draws the same prompts from the same corpus.

    Raises:
        ValueError: `count` or `length_bytes` is out of range, or no file of the part is
            long enough.
    """
    if count < 0 or length_bytes < 1:
        raise ValueError(
            f"expected count >= 0 and length_bytes >= 1, got {count} and {length_bytes}"
        )

    texts = [(root() / name).read_bytes() for name in files(part)]
    texts = [text for text in texts if len(text) >= length_bytes]
    if not texts:
        raise ValueError(
            f"length_bytes: no file of {part!r} has {length_bytes} bytes; ask for"
            " shorter prompts"
        )

    # Shuffle and excerpts share one generator: fewer prompts are the first of more.
    rng = random.Random(seed)  # noqa: S311 - excerpts, not secrets
    excerpts: list[bytes] = []
    while len(excerpts) < count:
        rng.shuffle(texts)
        round_texts = texts[: count - len(excerpts)]
        excerpts.extend(_excerpt(text, length_bytes, rng) for text in round_texts)
    return excerpts


def _excerpt(text: bytes, length_bytes: int, rng: random.Random) -> bytes:
    """Cut `length_bytes` out of `text`, moved back to the start of the line where the
    draw fell.
    """
    drawn = rng.randint(0, len(text) - length_bytes)
    start = text.rfind(b"\n", 0, drawn) + 1
    return text[start : start + length_bytes]


COLUMNS: Final = (
    *("prompt", "text", "question", "instruction"),
    *("messages", "conversations", "content"),
)
"""Columns that hold prompts, the likeliest first."""

_ASSISTANTS: Final = ("assistant", "gpt", "model")
"""Roles whose message is an answer, in the chat formats in use."""

# Rows decoded at once: few, because the reader may stop at any of them.
_BATCH_ROWS: Final = 64

# Python's own limit is 128 KiB, which long documents exceed.
_LONGEST_CELL: Final = 1 << 27


def read_prompts(
    path: Path | str, column: str | None = None, limit: int | None = None
) -> list[str]:
    """Read prompts from a text file, or from the rows of a data set: JSON lines, CSV,
    TSV or Parquet, by suffix.

    Blank lines separate prompts of a text; in a file without blank lines between texts,
    every line is a prompt. A row of messages (objects with `content` or `value`, as
    chat data sets have them) becomes the text up to its last answer, messages separated
    by blank lines; no chat template is applied.

    Args:
        path: the file.
        column: of a data set, where the prompts are; the first of `COLUMNS` that a row
            has when None. Texts have none.
        limit: take the first so many prompts.

    Raises:
        TraceError: no such file, damaged, not UTF-8, no prompt in it or in a row, no
            such column, or a column of a text.
    """
    file = Path(path)
    if file.suffix in _READERS:
        return _of_dataset(file, column, limit)
    if column is not None:
        raise TraceError(
            f"{file}: expected a data set ({', '.join(_READERS)}), which has the column"
            f" {column!r}, found a text"
        )
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{file}: expected a UTF-8 text file with prompts, found: {_reason(error)}"
        ) from None

    blocks = _blocks(text)
    if not blocks:
        raise TraceError(
            f"{file}: expected prompts, found an empty file; write one prompt per line"
        )
    texts = ["\n".join(block) for block in blocks] if blocks[1:] else blocks[0]
    return texts[:limit]


def _of_dataset(file: Path, column: str | None, limit: int | None) -> list[str]:
    """Read prompts from the rows of a data set."""
    reader = _READERS[file.suffix]
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
    with io.TextIOWrapper(open_input(file), encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", load_json(line)
            except ValueError as error:
                raise TraceError(
                    f"{file}: line {number}: expected a JSON string or object, found:"
                    f" {error}"
                ) from None


def _csv_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table with a header line, and where they are."""
    csv.field_size_limit(_LONGEST_CELL)
    # Spreadsheets put a byte-order mark before the first column's name.
    mark = "\t" if file.suffix == ".tsv" else ","
    with io.TextIOWrapper(open_input(file), encoding="utf-8-sig", newline="") as lines:
        table = csv.DictReader(lines, delimiter=mark)
        for row in table:
            yield f"line {table.line_num}", row


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield rows, and where they are, without loading the file at once."""
    with open_parquet(file) as table:
        number = 0
        for batch in table.iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                yield f"row {number}", row
                number += 1


_READERS: Final = {
    ".jsonl": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}


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
