"""What importers share: one line for whatever a damaged file provokes, layer numbers, and the way from passes to rows.

An engine thinks in forward passes, a trace in sequences. `sequences_of` turns the one into the other where
the file does not say which request a token belongs to.
"""

from __future__ import annotations

import binascii
import json
import struct
import tokenize
import zipfile
import zlib
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from traces.arrow import flat, values
from traces.errors import TraceError
from traces.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from traces.schema import ModelShape

    Block = dict[str, np.ndarray]

DAMAGE = (
    ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, EOFError, MemoryError, OSError,
    RecursionError, NotImplementedError, RuntimeError, SyntaxError, tokenize.TokenError,
    struct.error, zipfile.BadZipFile, zlib.error, binascii.Error, pa.ArrowException,
)  # fmt: skip
"""What decoding somebody else's bytes may raise."""

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
        raise TraceError(
            f"{path}: {what}: expected a whole, well-formed file, found: {reason}; was it cut off while copying?"
        ) from None


def bad(path: Path, place: str, expected: str, found: object, way_out: str = "dump it again") -> TraceError:
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
    """Parse a file once for `provenance` and `read`: one keeps the result, the other takes it."""

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


def json_table(path: Path, schema: pa.Schema, needed: Sequence[str]) -> pa.Table | None:
    """Objects in lines as a table, parsed by Arrow; None where a line is not as `schema` says or lacks a needed value.

    Callers then read line by line, which is slow and knows what is wrong.
    """
    from pyarrow import json as lines  # noqa: PLC0415 - not every import is of text

    size = path.stat().st_size
    if not 0 < size < 1 << 31:
        return None
    try:
        table = lines.read_json(
            path,
            read_options=lines.ReadOptions(use_threads=False, block_size=size + 1),
            parse_options=lines.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except (pa.ArrowException, OSError, ValueError):
        return None
    if not table.num_rows or any(table.column(name).null_count for name in needed):
        return None
    return table.combine_chunks()


def list_rows(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Lengths and values of a list column; None where a value is null."""
    array = table.column(name).chunk(0)
    inner = flat(array)
    if inner.null_count or array.null_count:
        return None
    return np.diff(values(array.offsets)), np.asarray(inner)


def whole_number(path: Path, name: str, value: object, least: int = 1) -> int:
    """An option such as ``prompt_tokens=28`` as a number.

    Raises:
        TraceError: not a whole number, or below `least`.
    """
    text = str(value).strip()
    if not text.isdecimal() or int(text) < least:
        raise TraceError(f"{path}: option {name}: expected a whole number >= {least}, got {text!r}")
    return int(text)


def layer_numbers(path: Path, found: Iterable[int], shape: ModelShape) -> dict[int, int]:
    """Map the file's layer numbers to MoE layers 0..L-1.

    Some engines count all layers of the model, some only those with experts, some from one. Accepted are, in this
    order: absolute numbers that avoid the model's dense layers; numbers below L; any L distinct numbers.

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
        raise bad(path, "layer", "numbers >= 0", numbers[0], "is this the layer column?")
    few = f"{len(numbers)} layers {numbers[0]}..{numbers[-1]}" if numbers else "none"
    raise bad(path, "layer", f"{shape.layers} MoE layers as in {shape.name}", few, "is the shape right?")


def sequences_of(
    number: np.ndarray, layer: np.ndarray, tokens: np.ndarray, experts: np.ndarray, *, chunked: bool
) -> Iterator[Block]:
    """Rows of sequences out of forward passes that do not name their requests. R layer runs, N rows in all.

    A pass of several tokens is a prompt, a pass of one token continues the sequence. A layer may hold fewer tokens than
    its pass, and then they are the last ones: some engines compute the last layer only where logits are wanted.

    Args:
        number: int [R], ascending: pass of each run.
        layer: int [R], MoE layer of each run, ascending within a pass.
        tokens: int [R], tokens of each run.
        experts: int [N, K], rows of all runs behind each other.
        chunked: whether passes of several tokens behind each other are pieces of one prompt; otherwise each begins
            a sequence.
    """
    starts = np.flatnonzero(np.concatenate(([True], np.diff(number) != 0)))
    size = np.maximum.reduceat(tokens, starts)
    prompt = size > 1
    begins = prompt.copy()
    if chunked:
        begins[1:] &= ~prompt[:-1]
    begins[0] = True
    sequence = np.cumsum(begins) - 1
    ahead = np.cumsum(size) - size
    first = ahead - ahead[begins][sequence]  # position of a pass in its sequence
    of_run = np.cumsum(np.concatenate(([0], np.diff(number) != 0)))
    run_start = np.cumsum(tokens) - tokens
    pos = np.repeat((first + size)[of_run] - tokens - run_start, tokens) + np.arange(len(experts))
    rows: Block = {
        "seq": np.repeat(sequence[of_run], tokens).astype(np.int32),
        "pos": pos.astype(np.int64),
        "phase": np.repeat(np.where(prompt, Phase.PREFILL, Phase.DECODE)[of_run], tokens).astype(np.int8),
        "layer": np.repeat(layer, tokens).astype(np.int16),
        "experts": experts,
    }
    edges = np.searchsorted(rows["seq"], np.arange(sequence[-1] + 2))
    for start, stop in pairwise(edges.tolist()):
        part = {name: values[start:stop] for name, values in rows.items()}
        order = np.lexsort((part["layer"], part["pos"]))
        yield {name: values[order] for name, values in part.items()}


def long_blocks(path: Path, rows: Block, shape: ModelShape, names: Sequence[str] = ()) -> Iterator[Block]:
    """Sequences of rows in any order, told apart by an integer column ``seq`` and kept in order of appearance.

    Args:
        path: the file, for errors.
        rows: seq, pos, layer (the file's own numbers), experts [N, K], and optional columns; phase, or generated.
        shape: the model.
        names: columns of `rows` that belong to a token and must agree at all its layers.

    Raises:
        TraceError: layers that do not fit, a token twice at a layer.
    """
    number_of = layer_numbers(path, np.unique(rows["layer"]).tolist(), shape)
    known = np.array(sorted(number_of))
    index = np.minimum(np.searchsorted(known, rows["layer"]), len(known) - 1)
    if (strange := known[index] != rows["layer"]).any():
        row = int(strange.argmax())
        raise bad(path, f"row {row}: layer", "an MoE layer", rows["layer"][row], "is the shape right?")
    layer = np.array([number_of[one] for one in known.tolist()], np.int16)[index]
    _, first, label = np.unique(rows["seq"], return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    sequence = rank[label.reshape(-1)]
    order = np.lexsort((layer, rows["pos"], sequence))
    phase = rows.get("phase", np.full(len(order), Phase.DECODE, np.int8))
    whole = {**rows, "seq": sequence.astype(np.int32), "layer": layer, "phase": phase}
    whole = {name: values[order] for name, values in whole.items()}
    same = (np.diff(whole["seq"]) == 0) & (np.diff(whole["pos"]) == 0)
    if (twice := same & (np.diff(whole["layer"]) == 0)).any():
        row = int(twice.argmax())
        place = f"pos {whole['pos'][row]}, layer {whole['layer'][row]}"
        raise bad(path, place, "one row per token and layer", "two", "tell sequences apart by a column seq")
    for name in names:
        if name in whole and (change := same & (np.diff(whole[name]) != 0)).any():
            row = int(change.argmax())
            raise bad(path, f"pos {whole['pos'][row]}: {name}", "one value at all layers", "several")
    edges = np.searchsorted(whole["seq"], np.arange(len(first) + 1))
    for start, stop in pairwise(edges.tolist()):
        yield {name: values[start:stop] for name, values in whole.items()}


def dense_block(number: int, experts: np.ndarray, prompt: int, first: int = 0, **columns: np.ndarray) -> Block:
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
        "phase": np.where(pos < first + prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE)),
        "layer": np.tile(np.arange(layers, dtype=np.int16), tokens),
        "experts": experts.reshape(tokens * layers, -1),
        **{name: values.reshape(tokens * layers, -1) for name, values in columns.items()},
    }
