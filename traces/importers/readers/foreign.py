"""What importers of foreign files share: what they return, errors of one line, options,
names of columns, and the lines of text.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import struct
import tempfile
import tokenize
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.base.inputs import InputError, open_input

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy as np

    from moesim.traces.format.schema import ModelShape, TraceHeader

    Block = dict[str, np.ndarray]

# Said in the same words by every importer.
NO_WEIGHTS = "no combine weights in the source"


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a foreign file holds: a table, and what its columns mean.

    Attributes:
        pieces: begins to read the rows, some at a time, each time it is called; all
            pieces have the same columns and widths. A row has seq (numbered by its
            first row), pos, layer (as the file counts them) and experts [N, K]; or an
            expert, one row each, and a rank where the file's order is not theirs. Rows
            stand in any order.
        prompt: how many of the first tokens of every sequence are prompt; None where
            rows have a phase, or nobody knows.
        passes: whether positions count the rows of a pass, each of which is a prompt.
        shape: the model, as far as the file knows it better than the user said.
        notes: oddities, a line each.
        facts: what the file says about itself, JSON values only.
        header: of a file that has one; it then takes the place of the three above.
        no_weights: the note of rows without weights.
    """

    pieces: Callable[[], Iterable[Block]]
    prompt: int | None = None
    passes: bool = False
    shape: ModelShape | None = None
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    header: TraceHeader | None = None
    no_weights: str = NO_WEIGHTS


def head(path: Path, count: int = 65_536) -> bytes:
    """Return the first bytes of a file; none where it cannot be read."""
    try:
        with open_input(path) as file:
            return file.read(count)
    except OSError:
        return b""


# -- errors ----------------------------------------------------------------------------

# What decoding bytes of another program may raise. A `RecursionError` is a
# `RuntimeError`; numpy's npy headers are parsed as Python, hence the tokenizer's.
DECODING_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    EOFError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    struct.error,
    pickle.PickleError,
    zipfile.BadZipFile,
    zlib.error,
    pa.ArrowException,
)

# A library may quote the file at length; one line holds no more than this.
_REASON_LETTERS = 200


@contextmanager
def decoding(path: Path, part: str) -> Iterator[None]:
    """Turn whatever decoding raises into one line.

    Args:
        path: the file.
        part: what is being read, for the error.

    Raises:
        TraceError: naming the file, `part`, and the reason.
    """
    try:
        yield
    except TraceError:
        raise
    except InputError as error:
        raise TraceError(f"{path}: {part}: {error}") from None
    except DECODING_ERRORS as error:
        reason = " ".join(str(error).split())[:_REASON_LETTERS]
        if isinstance(error, RecursionError):
            reason = "more lists and objects in each other than can be read"
        raise TraceError(
            f"{path}: {part}: expected a whole, well-formed file, found:"
            f" {reason or type(error).__name__}; was it cut off while copying?"
        ) from None


def layout_error(
    path: Path,
    place: str,
    expected: object,
    actual: object,
    way_out: str = "dump it again",
) -> TraceError:
    """Return the one-line error of a file that does not keep to its own layout."""
    return TraceError(
        f"{path}: {place}: expected {expected}, found {actual}; {way_out}"
    )


# -- options ---------------------------------------------------------------------------

PROMPT_TOKENS = "how many of the first tokens of every sequence are prompt"
RESTARTS = (
    "passes: rows are those of forward passes, and each that begins again at the first"
    " position is a prompt of its own"
)
_FLAGS = ("map", "prompt_tokens", "batch")


def spelled(name: str) -> str:
    """Return how the command line calls an option of an importer."""
    return f"--{name.replace('_', '-')}" if name in _FLAGS else f"--option {name}"


def whole_number(path: Path, name: str, value: object, least: int = 1) -> int:
    """Return an option such as ``prompt_tokens=28`` as a number.

    Raises:
        TraceError: not a whole number, or below `least`.
    """
    text = str(value).strip()
    if not text.isdecimal() or int(text) < least:
        raise TraceError(
            f"{path}: {spelled(name)}: expected a whole number >= {least}, got {text!r}"
        )
    return int(text)


def prompt_length(path: Path, given: Mapping[str, str]) -> int | None:
    """Return the option ``prompt_tokens`` as a number; None where it is not given."""
    if "prompt_tokens" not in given:
        return None
    return whole_number(path, "prompt_tokens", given["prompt_tokens"], least=0)


def one_of(
    path: Path, given: Mapping[str, str], name: str, words: tuple[str, ...]
) -> str:
    """Return an option that is one of some words, empty where it is not given.

    Raises:
        TraceError: another word.
    """
    word = given.get(name, "")
    if word not in ("", *words):
        raise layout_error(path, spelled(name), " or ".join(words), repr(word), "")
    return word


# -- names -----------------------------------------------------------------------------

NAMES = {
    "seq": (
        "seq",
        "seq_id",
        "sequence",
        "sequence_id",
        "request",
        "request_id",
        "req_id",
        "rid",
        "problem_id",
        "prompt_id",
        "sample_id",
        "conversation_id",
    ),
    "phase": ("phase",),
    "pos": ("pos", "position", "token_idx", "token_index"),
    "layer": ("layer", "layer_idx", "layer_id"),
    "experts": (
        "experts",
        "selected_ids",
        "expert_ids",
        "ids",
        "topk_ids",
        "topk_experts",
    ),
    "weights": ("weights", "gate_weights", "expert_weights", "topk_weights"),
}
"""Our column -> names that engines write for it, the most explicit first."""


Mapped = dict[str, str]
"""What the option ``map`` says: our column -> the file's."""


def mapped(path: Path, words: str) -> Mapped:
    """Read the option ``map``: ``ours=theirs``, joined by commas.

    Raises:
        TraceError: a word that is no mapping, or two for one column.
    """
    names: Mapped = {}
    for word in filter(None, words.split(",")):
        ours, _, theirs = (part.strip() for part in word.partition("="))
        if not ours or not theirs or ours in names:
            expected = "ours=theirs, each column once"
            raise layout_error(path, "--map", expected, repr(word), "")
        names[ours] = theirs
    return names


# -- lines -----------------------------------------------------------------------------

# Text that is searched several times stays in the processor's cache; more would be in
# memory that is new each time.
_CHUNK_BYTES = 1 << 16
# A line that is longer than this is no row of a dump.
_LONGEST_LINE = 1 << 23


def first_object(path: Path) -> Any:
    """Return the JSON value on the first line that is not empty, or None; never
    raises.
    """
    for _, line in filled(io.BytesIO(head(path))):
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None
    return None


def first_lines(path: Path) -> list[bytes]:
    """Return up to 50 lines, without their ends; enough to tell layouts apart."""
    lines = head(path).replace(b"\r", b"").split(b"\n")
    # The last line of what was read may be cut.
    return (lines[:-1] or lines)[:50]


def first_line(path: Path, skip: int = 0) -> tuple[int, bytes] | None:
    """Return the first line of a file that is not blank, with its number; None without
    one.

    Args:
        path: the file.
        skip: how many such lines are left out.
    """
    with path.open("rb") as file:
        return next(islice(filled(file), skip, None), None)


def filled(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number lines from 1, and leave out those that are blank."""
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def line_chunks(path: Path) -> Iterator[bytes]:
    """Read whole lines, about `_CHUNK_BYTES` at a time."""
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            yield data + file.readline()


def sections(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Return first byte and length of the rows below each line `header`, and of those
    above the first one: people join files.
    """
    line = re.compile(rb"^%s[ \t\r]*(?:\n|\Z)" % re.escape(header), re.MULTILINE)
    starts = [0]
    ends = []
    size = 0
    for chunk in line_chunks(path):
        if header in chunk:
            for match in line.finditer(chunk):
                ends.append(size + match.start())
                starts.append(size + match.end())
        size += len(chunk)
    pairs = zip(starts, [*ends, size], strict=True)
    return [(start, end - start) for start, end in pairs if start < end]


@contextmanager
def whole_lines(path: Path, beside: Path) -> Iterator[tuple[Path, list[str]]]:
    """A text without a last line that was cut off, and a remark about it; the file
    itself where nothing is missing.

    Args:
        path: the file.
        beside: a copy without that line lies in a folder beside this one meanwhile.
    """
    end = _end_of_lines(path)
    if end is None:
        yield path, []
        return
    beside.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside.parent, prefix=".import-") as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        os.truncate(copy, end)
        yield copy, ["the last line was cut off and was left out"]


def _end_of_lines(path: Path) -> int | None:
    """Bytes up to the end of the last whole line; None where none is cut off, or where
    this is no text.
    """
    start = head(path)
    if not start or b"\0" in start or start.startswith(b"PAR1"):
        return None
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LONGEST_LINE))
        tail = file.read()
    newline = tail.rfind(b"\n")
    cut = len(tail) - newline - 1
    return size - cut if cut and newline >= 0 else None
