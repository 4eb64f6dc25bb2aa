"""What importers of foreign files share: what they return, errors of one line, options,
and names of columns.
"""

from __future__ import annotations

import pickle
import struct
import tokenize
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.base.inputs import InputError, open_input

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

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
"""What the option ``map`` says: a layout's name -> the file's."""


def mapped(path: Path, words: str, meanings: Mapping[str, str]) -> Mapped:
    """Read the option ``map`` of a layout.

    Args:
        path: the file, for errors.
        words: ``ours=theirs``, joined by commas.
        meanings: what may stand on the left -> the layout's name of it.

    Raises:
        TraceError: a word that is no mapping, or two for one name.
    """
    names: Mapped = {}
    for word in filter(None, words.split(",")):
        ours, _, theirs = (part.strip() for part in word.partition("="))
        if not theirs or ours not in meanings:
            expected = f"column=theirs with {', '.join(meanings)}"
            raise layout_error(
                path, f"--map: {word!r}", expected, ours or "nothing", ""
            )
        # Two words may mean one column, ours and the layout's own.
        if meanings[ours] in names:
            raise layout_error(path, "--map", "each column once", word, "")
        names[meanings[ours]] = theirs
    return names
