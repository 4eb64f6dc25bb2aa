"""What importers share: one line for whatever a damaged file provokes, layer numbers,
and the way from passes to rows.

An engine thinks in forward passes, a trace in sequences. `Passes` turns the one into
the other where the file does not say which request a token belongs to.
"""

from __future__ import annotations

import json
import struct
import tokenize
import zipfile
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from moesim.traces.errors import TraceError
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

DAMAGE = (
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
"""What decoding somebody else's bytes may raise; a `RecursionError` is a
`RuntimeError`.
"""

TEXT_BYTES = 1 << 19
"""Of a text parsed at a time."""

NO_WEIGHTS = "no combine weights in the source"
NO_PHASES = "the source does not tell prompt from generated tokens"


@contextmanager
def decoding(path: Path, what: str) -> Iterator[None]:
    """Turn whatever decoding raises into one line.

    Raises:
        TraceError: naming the file, `what` was being read, and the reason.
    """
    try:
        yield
    except TraceError:
        raise
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, RecursionError):
            reason = "more lists and objects in each other than can be read"
        raise TraceError(
            f"{path}: {what}: expected a whole, well-formed file, found: {reason}; was"
            " it cut off while copying?"
        ) from None


def bad(
    path: Path,
    place: str,
    expected: object,
    found: object,
    way_out: str = "dump it again",
) -> TraceError:
    """The one line of a foreign file that does not keep its own layout."""
    return TraceError(f"{path}: {place}: expected {expected}, found {found}; {way_out}")


def head(path: Path, count: int = 65_536) -> bytes:
    """The first bytes of a file; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""


def first_object(path: Path) -> Any:
    """The JSON value on the first line that is not empty, or None; never raises."""
    for line in head(path).splitlines():
        if line.strip():
            try:
                return json.loads(line)
            except (ValueError, RecursionError):
                return None
    return None


class Once:
    """Parse a file once for `provenance` and `read`: one keeps the result, the other
    takes it.
    """

    def __init__(self, parse: Callable[[Path], Any]) -> None:
        self._parse = parse
        self._kept: tuple[tuple[Path, int, int], Any] | None = None

    def kept(self, path: Path) -> Any:
        """What the file holds; remembered for the next call."""
        facts = path.stat()
        key = (path, facts.st_size, facts.st_mtime_ns)
        if self._kept is None or self._kept[0] != key:
            self._kept = (key, self._parse(path))
        return self._kept[1]

    def taken(self, path: Path) -> Any:
        """What the file holds; not remembered any longer."""
        found = self.kept(path)
        self._kept = None
        return found


def line_chunks(path: Path, *, skip: int = 0) -> Iterator[tuple[int, bytes]]:
    """Whole lines of a text behind the first `skip`, some at a time, with the number of
    the first one, from 1.
    """
    number = 1 + skip
    with path.open("rb") as file:
        for _ in range(skip):
            file.readline()
        while data := file.read(TEXT_BYTES):
            data += file.readline()
            yield number, data
            # Faster than count.
            number += int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))


def whole_number(path: Path, name: str, value: object, least: int = 1) -> int:
    """An option such as ``prompt_tokens=28`` as a number.

    Raises:
        TraceError: not a whole number, or below `least`.
    """
    text = str(value).strip()
    if not text.isdecimal() or int(text) < least:
        raise TraceError(
            f"{path}: option {name}: expected a whole number >= {least}, got {text!r}"
        )
    return int(text)


def layer_numbers(
    path: Path, found: Iterable[int], shape: ModelShape
) -> dict[int, int]:
    """Map the file's layer numbers to MoE layers 0..L-1.

    Some engines count all layers of the model, some only those with experts, some from
    one. Accepted are, in this order: absolute numbers that avoid the model's dense
    layers; numbers below L; any L distinct numbers.

    Raises:
        TraceError: none of these fits.
    """
    numbers = sorted(set(found))
    total = shape.layers + len(shape.dense_layers)
    sparse = [layer for layer in range(total) if layer not in shape.dense_layers]
    if numbers and shape.dense_layers and set(numbers) <= set(sparse):
        return {layer: index for index, layer in enumerate(sparse)}
    if numbers and numbers[0] >= 0 and numbers[-1] < shape.layers:
        return {layer: layer for layer in range(shape.layers)}
    if len(numbers) == shape.layers and numbers[0] >= 0:
        return {layer: index for index, layer in enumerate(numbers)}
    if numbers and numbers[0] < 0:
        raise bad(
            path, "layer", "numbers >= 0", numbers[0], "is this the layer column?"
        )
    few = f"{len(numbers)} layers {numbers[0]}..{numbers[-1]}" if numbers else "none"
    raise bad(
        path,
        "layer",
        f"{shape.layers} MoE layers as in {shape.name}",
        few,
        "is the shape right?",
    )


class Passes:
    """Rows of sequences out of forward passes that do not name their requests.

    A pass of several tokens is a prompt, a pass of one token continues the sequence. A
    layer may hold fewer tokens than its pass, and then they are the last ones: some
    engines compute the last layer only where logits are wanted.

    Args:
        chunked: whether passes of several tokens behind each other are pieces of one
            prompt; otherwise each begins a sequence.
    """

    def __init__(self, *, chunked: bool) -> None:
        self._chunked = chunked
        self._sequence = -1
        self._next_pos = 0
        self._in_prompt = False

    def rows(
        self,
        number: np.ndarray,
        layer: np.ndarray,
        tokens: np.ndarray,
        experts: np.ndarray,
    ) -> Block:
        """The rows of some whole passes. R layer runs, N rows in all.

        Args:
            number: int [R], ascending: pass of each run.
            layer: int [R], layer of each run.
            tokens: int [R], tokens of each run.
            experts: int [N, K], rows of all runs behind each other.
        """
        starts = np.flatnonzero(np.concatenate(([True], np.diff(number) != 0)))
        size = np.maximum.reduceat(tokens, starts)
        prompt = size > 1
        begins = prompt.copy()
        if self._chunked:
            begins &= ~np.concatenate(([self._in_prompt], prompt[:-1]))
        begins[0] |= self._sequence < 0
        sequence = self._sequence + np.cumsum(begins)
        ahead = self._next_pos + np.cumsum(size) - size
        # Position of a pass in its sequence.
        first = ahead - np.maximum.accumulate(np.where(begins, ahead, 0))
        self._sequence = int(sequence[-1])
        self._in_prompt = bool(prompt[-1])
        self._next_pos = int(first[-1] + size[-1])
        of_run = np.cumsum(np.concatenate(([0], np.diff(number) != 0)))
        run_start = np.cumsum(tokens) - tokens
        pos = np.repeat(
            (first + size)[of_run] - tokens - run_start, tokens
        ) + np.arange(len(experts))
        return {
            "seq": np.repeat(sequence[of_run], tokens).astype(np.int32),
            "pos": pos.astype(np.int32),
            "phase": (
                np.repeat(
                    np.where(prompt, Phase.PREFILL, Phase.DECODE)[of_run], tokens
                ).astype(np.int8)
            ),
            "layer": np.repeat(layer, tokens).astype(np.int32),
            "experts": experts,
        }


def finished(
    path: Path, shape: ModelShape, block: Block, names: Sequence[str] = ()
) -> Block:
    """A whole, sorted sequence as the writer takes it: MoE layers instead of the file's
    numbers, and a phase.

    Args:
        path: the file, for errors.
        shape: the model.
        block: seq, pos, layer (the file's own numbers), experts [N, K], and optional
            columns.
        names: columns of `block` that belong to a token and must agree at all its
            layers.

    Raises:
        TraceError: layers that do not fit, a token twice at a layer.
    """
    pos = block["pos"]
    layer = block["layer"]
    low = int(layer.min())
    high = int(layer.max())
    known = (
        np.flatnonzero(np.bincount(layer))
        if 0 <= low <= high < 1 << 16
        else np.unique(layer)
    )
    number_of = layer_numbers(path, known.tolist(), shape)
    if strange := [one for one in known.tolist() if one not in number_of]:
        row = int((layer == strange[0]).argmax())
        raise bad(
            path,
            f"sequence {block['seq'][0]}: row {row}: layer",
            "an MoE layer",
            strange[0],
            "is the shape right?",
        )
    mapped = np.zeros(int(known[-1]) + 1, np.int16)
    mapped[known] = [number_of[one] for one in known.tolist()]
    same = pos[1:] == pos[:-1]
    if (twice := same & (layer[1:] == layer[:-1])).any():
        row = int(twice.argmax())
        place = f"pos {pos[row]}, layer {mapped[layer[row]]}"
        raise bad(
            path,
            place,
            "one row per token and layer",
            "two",
            "tell sequences apart by a column seq",
        )
    for name in names:
        if (
            name in block
            and (change := same & (block[name][1:] != block[name][:-1])).any()
        ):
            raise bad(
                path,
                f"pos {pos[int(change.argmax())]}: {name}",
                "one value at all layers",
                "several",
            )
    phase = block.get("phase", np.full(len(pos), Phase.DECODE, np.int8))
    return {**block, "layer": mapped[layer], "phase": phase}


def dense_block(
    number: int, experts: np.ndarray, prompt: int, first: int = 0, **columns: np.ndarray
) -> Block:
    """Rows of a sequence in which every token has every layer.

    Args:
        number: sequence.
        experts: [T, L, K] ids.
        prompt: how many of the first tokens are prefill.
        first: position of the first token.
        columns: optional columns, [T, L, …].
    """
    tokens, layers = experts.shape[:2]
    pos = np.repeat(np.arange(first, first + tokens, dtype=np.int32), layers)
    return {
        "seq": np.full(tokens * layers, number, np.int32),
        "pos": pos,
        "phase": np.where(
            pos < first + prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE)
        ),
        "layer": np.tile(np.arange(layers, dtype=np.int16), tokens),
        "experts": experts.reshape(tokens * layers, -1),
        **{
            name: values.reshape(tokens * layers, -1)
            for name, values in columns.items()
        },
    }
