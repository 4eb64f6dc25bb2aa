"""Rows of one sequence as `TraceWriter` takes them: MoE layers instead of the
engine's layer numbers, a phase, no token twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.format.sorting import joined
from moesim.traces.importers.readers.foreign import layout_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

# The rows of a token and layer agree in these, and may differ in all others.
_CELL = ("seq", "pos", "layer", "phase", "token")
_LISTED = {"expert": "experts", "weight": "weights"}
_TWICE = (
    "positions restart: tell sequences apart by a column seq, or say --option"
    " restarts=passes where they count the rows of a pass"
)


def finished(path: Path, shape: ModelShape, prompt: int | None, block: Block) -> Block:
    """Give a whole, sorted sequence a row for each token and layer, MoE layers instead
    of the file's numbers, positions from 0 where those of the prompt count from its
    end, and a phase where it is known.

    Args:
        path: the file, for errors.
        shape: the model.
        prompt: how many of the first tokens are prompt; None where the rows say so, or
            nobody knows.
        block: the sequence, as `Foreign.pieces` describes its rows.

    Raises:
        TraceError: layers that do not fit, a token twice at a layer.
    """
    pos = block["pos"]
    same_token = pos[1:] == pos[:-1]
    for name in ("phase", "token"):
        if name not in block:
            continue
        change = same_token & (block[name][1:] != block[name][:-1])
        if change.any():
            raise layout_error(
                path,
                f"pos {pos[int(change.argmax())]}: {name}",
                "one value at all layers",
                "several",
            )

    if "expert" in block:
        block = _gathered(path, block)
        pos = block["pos"]
        same_token = pos[1:] == pos[:-1]
    layer = _moe_layers(path, shape, block)
    twice = same_token & (layer[1:] == layer[:-1])
    if twice.any():
        row = int(twice.argmax())
        raise layout_error(
            path,
            f"pos {pos[row]}, layer {layer[row]}",
            "one row per token and layer",
            "two",
            _TWICE,
        )

    if pos[0] < 0:
        if not (pos == -1).any():
            raise layout_error(
                path,
                f"sequence {block['seq'][0]}: prompt",
                "positions up to -1",
                f"none above {pos[pos < 0].max()}",
                "was the capture cut off? leave its rows out",
            )
        block = {**block, "pos": pos - pos[0]}
    if prompt is not None:
        number = np.cumsum(np.concatenate(([0], ~same_token)))
        block = {**block, "phase": phases(number < prompt)}
    return {**block, "layer": layer}


def phases(is_prompt: np.ndarray) -> np.ndarray:
    """Return int8 codes of `Phase`, of rows of a prompt and of all others."""
    return np.where(is_prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE))


def ranked(blocks: Iterable[Block]) -> Iterator[Block]:
    """Rows of one expert each with their number where they have no rank: the experts of
    a token are then as the file orders them.
    """
    first = 0
    for block in blocks:
        count = len(block["seq"])
        if "expert" in block and "rank" not in block:
            block["row"] = np.arange(first, first + count)
        first += count
        yield block


def _gathered(path: Path, block: Block) -> Block:
    """Rows of one expert each, sorted, as rows of all experts of a token and layer."""
    changes = (np.diff(block["pos"]) != 0) | (np.diff(block["layer"]) != 0)
    edges = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(changes) + 1]))
    sizes = np.diff(edges)
    top_k = int(sizes[0])
    wrong = sizes != top_k
    if not wrong.any():
        cells = {name: column.reshape(-1, top_k) for name, column in block.items()}
        cells.pop("row", None)
        ranks = cells.pop("rank", None)
        if ranks is not None:
            wrong = (ranks - ranks[0, 0] != np.arange(top_k)).any(axis=1)
    if wrong.any():
        row = edges[int(wrong.argmax())]
        place = ", ".join(f"{name} {block[name][row]}" for name in _CELL[:3])
        ids = block["expert"][block["pos"] == block["pos"][row]]
        expected = f"{top_k} rows, one per expert and rank"
        raise layout_error(path, place, expected, f"experts {ids[:20].tolist()}")

    # A copy lets go of the other values.
    return {
        _LISTED.get(name, name): column[:, 0].copy() if name in _CELL else column
        for name, column in cells.items()
    }


def counted(blocks: Iterable[Block], *names: str) -> Iterator[Block]:
    """Rows without positions, which count those with the same numbers in these
    columns.
    """
    seen: dict[int, int] = {}
    for block in blocks:
        key = np.zeros(len(block["seq"]), np.int64)
        for name in names:
            key = key << 32 | block[name]
        yield {**block, "pos": occurrences(key, seen)}


def occurrences(key: np.ndarray, seen: dict[int, int]) -> np.ndarray:
    """Return how often the key int64 [N] of each row came before; `seen` has how often
    it did in earlier blocks.
    """
    keys, place, counts = np.unique(key, return_inverse=True, return_counts=True)
    starts = np.cumsum(counts) - counts
    order = np.argsort(place, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order)) - np.repeat(starts, counts)

    before = np.array([seen.get(each, 0) for each in keys.tolist()])
    seen |= zip(keys.tolist(), (before + counts).tolist(), strict=True)
    return number + before[place]


def restarted(blocks: Iterable[Block]) -> Iterator[Block]:
    """Rows numbered by where positions begin again at the first layer; those of a
    prompt may be negative, and then end at -1 without gaps.
    """
    number = -1
    file = None
    first_layer = last_pos = 0
    for block in blocks:
        pos = block["pos"]
        if block["seq"][0] != file:
            # Whatever comes first in a file begins a sequence.
            file = block["seq"][0]
            first_layer = block["layer"][0]
            last_pos = pos[0] - 1
            number += 1
        rows = np.flatnonzero(block["layer"] == first_layer)
        step = np.diff(pos[rows], prepend=last_pos)
        begins = np.zeros(len(pos), bool)
        begins[rows] = (step <= 0) | ((pos[rows] < 0) & (step != 1))
        if len(rows):
            last_pos = pos[rows[-1]]
        seq = (number + np.cumsum(begins)).astype(np.int32)
        number = int(seq[-1])
        yield {**block, "seq": seq}


def of_passes(path: Path, blocks: Iterable[Block]) -> Iterator[Block]:
    """Rows whose positions count those of a forward pass: each pass is a sequence, all
    prompt, because nothing says whose tokens it has.
    """
    for block in restarted(_of_one(path, blocks)):
        yield {**block, "phase": np.full(len(block["seq"]), Phase.PREFILL, np.int8)}


def _of_one(path: Path, blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        if block["seq"].any():
            raise layout_error(
                path, "--option restarts=passes", "rows of one sequence", "several", ""
            )
        yield block


def without_cut_token(block: Block, layers: int, left_out: list[str]) -> Block:
    """A sequence without its last generated token, where a layer of it is missing, as
    it is in a dump that was cut off.

    Args:
        block: a whole, sorted sequence.
        layers: L.
        left_out: gets a remark where a token is left out.
    """
    start = int(np.searchsorted(block["pos"], block["pos"][-1]))
    # The last layer of a prompt may have its last token only.
    is_prompt = "phase" in block and block["phase"][start] == Phase.PREFILL
    if is_prompt or len(block["pos"]) - start == layers:
        return block
    left_out.append(
        f"sequence {block['seq'][0]}: token {block['pos'][start]} lacks layers and was"
        " left out"
    )
    return {name: column[:start] for name, column in block.items()}


def _moe_layers(path: Path, shape: ModelShape, block: Block) -> np.ndarray:
    """int16 [N]: the MoE layer of each row, by the file's own layer numbers.

    Some engines count all layers of the model, some only those with experts, some from
    one. Accepted are, in this order: absolute numbers that avoid the model's dense
    layers; numbers below L; any L distinct numbers.

    Raises:
        TraceError: none of these fits.
    """
    layer = block["layer"]
    low = int(layer.min())
    high = int(layer.max())
    # Counting is faster than sorting, but its table is as long as the largest number.
    is_small = 0 <= low <= high < 1 << 16
    used = np.flatnonzero(np.bincount(layer)) if is_small else np.unique(layer)

    if shape.dense_layers and set(used.tolist()) <= set(shape.layer_numbers):
        used = np.array(shape.layer_numbers)
    elif 0 <= low <= high < shape.layers:
        # Some may have no token here.
        return layer.astype(np.int16)
    elif low < 0:
        way_out = "is this the layer column?"
        raise layout_error(path, "layer", "numbers >= 0", low, way_out)
    elif len(used) != shape.layers:
        expected = f"{shape.layers} MoE layers as in {shape.name}"
        actual = f"{len(used)} layers {low}..{high}"
        raise layout_error(path, "layer", expected, actual, "is the shape right?")
    return np.searchsorted(used, layer).astype(np.int16)


def dense_block(
    number: int,
    experts: np.ndarray,
    prompt: int | None = None,
    first: int = 0,
    **columns: np.ndarray,
) -> Block:
    """Return rows of a sequence in which every token has every layer.

    Args:
        number: sequence.
        experts: [T, L, K] ids.
        prompt: tokens before this position are prefill; None where nobody knows.
        first: position of the first token.
        columns: optional columns, [T, L, …].
    """
    tokens, layers = experts.shape[:2]
    pos = np.repeat(np.arange(first, first + tokens, dtype=np.int32), layers)
    block = {
        "seq": np.full(tokens * layers, number, np.int32),
        "pos": pos,
        "layer": np.tile(np.arange(layers, dtype=np.int16), tokens),
    }
    if prompt is not None:
        block["phase"] = phases(pos < prompt)
    for name, values in {"experts": experts, **columns}.items():
        block[name] = values.reshape(tokens * layers, -1)
    return block


# -- forward passes --------------------------------------------------------------------
# Sequences out of forward passes.
#
# An engine runs forward passes, a trace holds sequences. `ForwardPasses` turns the
# former into the latter where a file does not say which request a token belongs to.


def ended(blocks: Iterable[Block], end_of: Callable[[Block], int]) -> Iterator[Block]:
    """Rows of whole passes, some at a time.

    Args:
        blocks: rows that are cut anywhere.
        end_of: rows of a block up to its last pass, which may go on in the next block.
    """
    rest: Block = {}
    for block in blocks:
        rows = joined([rest, block]) if rest else block
        end = end_of(rows)
        if end:
            yield {name: column[:end] for name, column in rows.items()}
        rest = {name: column[end:] for name, column in rows.items()}
    if rest:
        yield rest


class UnclearError(Exception):
    """Two passes may be pieces of one prompt or two prompts."""


class ForwardPasses:
    """Deals the tokens of forward passes to sequences.

    A pass of several tokens is a prompt, a pass of one token continues the sequence. A
    layer may hold fewer tokens than its pass, and then they are the last ones: some
    engines compute the last layer only where logits are wanted, so of a prompt in
    several passes only the last one has all layers.

    Args:
        layers: of the model, where prompts come in several passes; 0 where every pass
            of several tokens is a prompt of its own.
        joins: whether passes of a prompt that all have every token at every layer are
            pieces of one; None refuses such passes.
    """

    def __init__(self, *, layers: int = 0, joins: bool | None = None) -> None:
        self._layers = layers
        self._joins = joins
        self._sequence = -1
        self._next_pos = 0
        # Whether the prompt goes on: of the last pass that was read.
        self._is_open = False
        self._is_unclear = False
        self._restarts = True

    def restart(self) -> None:
        """Begin another sequence with the next pass, whatever it is."""
        self._restarts = True
        self._is_open = False
        self._is_unclear = False

    def rows(
        self,
        number: np.ndarray,
        layer: np.ndarray,
        tokens: np.ndarray,
        experts: np.ndarray,
    ) -> Block:
        """Return the rows of some whole passes. R layer runs, N rows in all.

        Args:
            number: int [R], ascending: pass of each run.
            layer: int [R], layer of each run.
            tokens: int [R], tokens of each run.
            experts: int [N, K], rows of all runs, one run after the other.

        Raises:
            UnclearError: the passes do not say where a prompt ends.
        """
        new_pass = np.concatenate(([True], np.diff(number) != 0))
        pass_starts = np.flatnonzero(new_pass)
        pass_of_run = np.cumsum(new_pass) - 1

        # The fullest layer says how many tokens a pass has.
        size = np.maximum.reduceat(tokens, pass_starts)
        is_prompt = size > 1
        begins = self._begins(pass_starts, tokens, size)
        # Whatever comes first in a file begins a sequence, a single token too.
        begins[0] |= self._restarts
        self._restarts = False

        sequence = self._sequence + np.cumsum(begins)
        # Tokens since the sequence that was open when this call began; the running
        # maximum is that count where the pass's own sequence began.
        tokens_before = self._next_pos + np.cumsum(size) - size
        sequence_start = np.maximum.accumulate(np.where(begins, tokens_before, 0))
        first_pos = tokens_before - sequence_start

        self._sequence = int(sequence[-1])
        self._next_pos = int(first_pos[-1] + size[-1])

        # A run's tokens are the last ones of its pass.
        run_start = np.cumsum(tokens) - tokens
        run_pos = (first_pos + size)[pass_of_run] - tokens
        pos = np.repeat(run_pos - run_start, tokens) + np.arange(len(experts))

        phase = np.where(is_prompt, Phase.PREFILL, Phase.DECODE)[pass_of_run]

        return {
            "seq": np.repeat(sequence[pass_of_run], tokens).astype(np.int32),
            "pos": pos.astype(np.int32),
            "phase": np.repeat(phase, tokens).astype(np.int8),
            "layer": np.repeat(layer, tokens).astype(np.int32),
            "experts": experts,
        }

    def _begins(
        self, pass_starts: np.ndarray, tokens: np.ndarray, size: np.ndarray
    ) -> np.ndarray:
        """Bool [P]: whether each pass begins a sequence."""
        is_prompt = size > 1
        if not self._layers:
            return is_prompt

        runs = np.diff(np.append(pass_starts, len(tokens)))
        last_run = tokens[pass_starts + runs - 1]
        is_whole = runs == self._layers
        is_unclear = is_prompt & is_whole & (last_run == size)
        is_open = is_prompt & (~is_whole | (is_unclear & bool(self._joins)))

        goes_on = np.concatenate(([self._is_open], is_open[:-1]))
        after_unclear = np.concatenate(([self._is_unclear], is_unclear[:-1]))
        if self._joins is None and (after_unclear & is_prompt).any():
            raise UnclearError
        self._is_open = bool(is_open[-1])
        self._is_unclear = bool(is_unclear[-1])
        return is_prompt & ~goes_on
