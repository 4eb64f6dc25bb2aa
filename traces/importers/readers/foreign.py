"""What importers of foreign files share: errors of one line, options, names of columns,
and a parsed file kept from one call to the next.
"""

from __future__ import annotations

import functools
import struct
import tokenize
import zipfile
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.base.inputs import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


# -- errors ----------------------------------------------------------------------------
# Errors of foreign files: whatever a damaged file provokes becomes one line.

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
        reason = reason or type(error).__name__

        if isinstance(error, RecursionError):
            reason = "more lists and objects in each other than can be read"

        raise TraceError(
            f"{path}: {part}: expected a whole, well-formed file, found: {reason}; was"
            " it cut off while copying?"
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
# Options of importers, and notes that several of them leave.

# Said in the same words by every importer.
NO_WEIGHTS = "no combine weights in the source"
NO_PHASES = "the source does not tell prompt from generated tokens"
PROMPT_TOKENS = "how many of the first tokens of every sequence are prompt"
PROMPT_TOKENS_NOTE = (
    f"{NO_PHASES}: all are taken as generated; --prompt-tokens N says more"
)


RESTARTS = (
    "passes: rows are those of forward passes, and each that begins again at the first"
    " position is a prompt of its own"
)
TWICE = (
    "positions restart: tell sequences apart by a column seq, or say --option"
    " restarts=passes where they count the rows of a pass"
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


def are_passes(path: Path, given: Mapping[str, str]) -> bool:
    """Whether the option ``restarts`` says that rows are those of forward passes."""
    restarts = given.get("restarts", "")
    if restarts not in ("", "passes"):
        raise layout_error(path, "--option restarts", "passes", repr(restarts), "")
    return bool(restarts)


# -- names -----------------------------------------------------------------------------
# Names that engines write for our columns, and options that add others.

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
"""Our column -> names of it, the most explicit first."""


def named_by(
    path: Path, given: Mapping[str, str], known: tuple[str, ...]
) -> dict[str, str]:
    """Read the option ``map``: our column -> theirs.

    Args:
        path: the file, for errors.
        given: options; ``map`` has words ``ours=theirs``, joined by commas.
        known: our columns.

    Raises:
        TraceError: a word that is no mapping.
    """
    words: dict[str, str] = {}
    for word in filter(None, given.get("map", "").split(",")):
        name, equals, source = (part.strip() for part in word.partition("="))
        if not equals or not source or name not in known:
            raise layout_error(
                path,
                f"--map: {word!r}",
                f"column=theirs with {', '.join(known)}",
                name or "nothing",
                "",
            )
        words[name] = source
    return words


def layout_names(
    path: Path, given: Mapping[str, str], meanings: Mapping[str, str]
) -> dict[str, str]:
    """Read the option ``map`` for a layout with names of its own: its name -> theirs.

    Args:
        path: the file, for errors.
        given: options; ``map`` has words ``ours=theirs``, joined by commas.
        meanings: what may stand on the left -> the layout's name of it.

    Returns:
        All names of the layout; those that are not mapped stand for themselves.

    Raises:
        TraceError: a word that is no mapping, or two for one name.
    """
    words = named_by(path, given, tuple(meanings))
    names = {name: name for name in meanings.values()}
    # Two words may mean one column, ours and the layout's own.
    mapped: set[str] = set()
    for word, source in words.items():
        name = meanings[word]
        if name in mapped or source in [names[other] for other in mapped]:
            raise layout_error(
                path, "--map", "each column once", f"{word}={source}", ""
            )
        mapped.add(name)
        names[name] = source
    return names


# -- parse cache -----------------------------------------------------------------------
# A parsed file, kept from one call to the next.


class ParseCache:
    """Keeps what one file parsed to, so that `provenance` and `read` share the work.

    Args:
        parse: reads a file; its result is kept until another file is asked for.
    """

    def __init__(self, parse: Callable[[Path], Any]) -> None:
        self._parse = parse
        self._entry: tuple[tuple[Path, int, int], Any] | None = None

    def get(self, path: Path) -> Any:
        """Return what the file holds, and keep it for the next call."""
        status = path.stat()
        # Size and time too: the same name may hold another file by now.
        key = (path, status.st_size, status.st_mtime_ns)

        if self._entry is None or self._entry[0] != key:
            self._entry = (key, self._parse(path))

        return self._entry[1]

    def pop(self, path: Path) -> Any:
        """Return what the file holds, and keep it no longer."""
        value = self.get(path)
        self._entry = None
        return value


# -- bfloat16 --------------------------------------------------------------------------
# bfloat16, which numpy has no type for: its bits are the upper half of a float's.

# In place of a name of numpy's.
BF16 = "bf16"


@functools.cache
def raw_dtype(dtype: str) -> np.dtype:
    """Return the type of numbers as a file has them; `dtype` may be ``bf16``."""
    return np.dtype("<u2" if dtype == BF16 else dtype)


@functools.cache
def row_dtype(dtype: str) -> np.dtype:
    """Return the type of numbers once they are read; `dtype` may be ``bf16``."""
    return np.dtype("<f4" if dtype == BF16 else dtype)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16 numbers, given as uint16, as float32."""
    return np.asarray(bits.astype(np.uint32, order="C") << 16).view(np.float32)
