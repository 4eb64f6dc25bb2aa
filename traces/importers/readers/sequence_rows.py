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
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]


def layer_numbers(
    path: Path, numbers: Iterable[int], shape: ModelShape
) -> dict[int, int]:
    """Map the file's layer numbers to MoE layers 0..L-1.

    Some engines count all layers of the model, some only those with experts, some from
    one. Accepted are, in this order: absolute numbers that avoid the model's dense
    layers; numbers below L; any L distinct numbers.

    Raises:
        TraceError: none of these fits.
    """
    used = sorted(set(numbers))
    sparse = shape.layer_numbers

    # The engine counts all layers of the model.
    if used and shape.dense_layers and set(used) <= set(sparse):
        return {layer: index for index, layer in enumerate(sparse)}

    # It counts layers with experts only; some may have no token here.
    if used and used[0] >= 0 and used[-1] < shape.layers:
        return {layer: layer for layer in range(shape.layers)}

    # From one, or with gaps: as many numbers as layers leave no doubt.
    if len(used) == shape.layers and used[0] >= 0:
        return {layer: index for index, layer in enumerate(used)}

    if used and used[0] < 0:
        raise layout_error(
            path, "layer", "numbers >= 0", used[0], "is this the layer column?"
        )

    summary = f"{len(used)} layers {used[0]}..{used[-1]}" if used else "none"
    raise layout_error(
        path,
        "layer",
        f"{shape.layers} MoE layers as in {shape.name}",
        summary,
        "is the shape right?",
    )


def finished(
    path: Path,
    shape: ModelShape,
    block: Block,
    names: Sequence[str] = (),
    prompt: int | None = None,
    way_out: str = "tell sequences apart by a column seq",
) -> Block:
    """Give a whole, sorted sequence MoE layers instead of the file's numbers, and a
    phase.

    Args:
        path: the file, for errors.
        shape: the model.
        block: seq, pos, layer (the file's own numbers), experts [N, K], and optional
            columns.
        names: columns of `block` that belong to a token and must agree at all its
            layers.
        prompt: how many of the first tokens are prompt; None where the rows say so, or
            nobody knows.
        way_out: where a token is there twice.

    Raises:
        TraceError: layers that do not fit, a token twice at a layer.
    """
    layer = _moe_layers(path, shape, block)
    pos = block["pos"]
    same_token = pos[1:] == pos[:-1]

    twice = same_token & (layer[1:] == layer[:-1])
    if twice.any():
        row = int(twice.argmax())
        raise layout_error(
            path,
            f"pos {pos[row]}, layer {layer[row]}",
            "one row per token and layer",
            "two",
            way_out,
        )

    for name in names:
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

    if prompt is not None:
        number = np.cumsum(np.concatenate(([0], ~same_token)))
        phase = np.where(number < prompt, Phase.PREFILL, Phase.DECODE).astype(np.int8)
        return {**block, "layer": layer, "phase": phase}

    # Without prompts a trace replays as decode, and the report says so.
    phase = block.get("phase", np.full(len(pos), Phase.DECODE, np.int8))
    return {**block, "layer": layer, "phase": phase}


class Restarts:
    """Numbers sequences by where positions begin again at the first layer.

    Args:
        from_end: prompts have negative positions that end at -1, without gaps.
    """

    def __init__(self, *, from_end: bool = False) -> None:
        self._from_end = from_end
        self._first_layer: int | None = None
        self._last = 0
        self._sequence = -1

    def restart(self) -> None:
        """Begin another sequence with the next row, whatever it is."""
        self._first_layer = None

    def sequences(self, pos: np.ndarray, layer: np.ndarray) -> np.ndarray:
        """Return the sequence of each row int32 [N], in the order of the file."""
        if self._first_layer is None:
            self._first_layer = int(layer[0])
            self._last = int(pos[0]) - 1
            self._sequence += 1
        rows = np.flatnonzero(layer == self._first_layer)
        step = np.diff(pos[rows], prepend=self._last)
        begins = np.zeros(len(pos), bool)
        begins[rows] = step <= 0
        if self._from_end:
            begins[rows] |= (pos[rows] < 0) & (step != 1)
        if len(rows):
            self._last = int(pos[rows[-1]])

        sequences = (self._sequence + np.cumsum(begins)).astype(np.int32)
        self._sequence = int(sequences[-1])
        return sequences


def of_passes(path: Path, blocks: Iterable[Block]) -> Iterator[Block]:
    """Rows whose positions count those of a forward pass: each pass is a sequence, all
    prompt, because nothing says whose tokens it has.
    """
    restarts = Restarts()
    for block in blocks:
        if block["seq"].any():
            raise layout_error(
                path, "--option restarts=passes", "rows of one sequence", "several", ""
            )
        seq = restarts.sequences(block["pos"], block["layer"])
        phase = np.full(len(seq), Phase.PREFILL, np.int8)
        yield {**block, "seq": seq, "phase": phase}


def without_cut_tokens(
    blocks: Iterable[Block], layers: int, dropped: list[str]
) -> Iterator[Block]:
    """Leave out the last generated token of a sequence where a layer of it is missing,
    as it is in a dump that was cut off.

    Args:
        blocks: rows of sequences, each sorted; a sequence may come in parts.
        layers: L.
        dropped: gets a remark for each token that is left out.
    """
    held: Block | None = None
    for block in blocks:
        if held is not None and held["seq"][0] == block["seq"][0]:
            block = joined([held, block])  # noqa: PLW2901 - the rest of one token
        elif held is not None:
            yield from _complete(held, layers, dropped)

        # Whether a token is complete shows when the next one begins.
        start = int(np.searchsorted(block["pos"], block["pos"][-1]))
        held = {name: values[start:] for name, values in block.items()}
        if start:
            yield {name: values[:start] for name, values in block.items()}
    if held is not None:
        yield from _complete(held, layers, dropped)


def _complete(block: Block, layers: int, dropped: list[str]) -> Iterator[Block]:
    """The rows of one token; none if it lacks a layer."""
    # The last layer of a prompt may have its last token only.
    generated = block["phase"][0] == Phase.DECODE
    if generated and len(np.unique(block["layer"])) < layers:
        dropped.append(
            f"sequence {block['seq'][0]}: token {block['pos'][0]} lacks layers and was"
            " left out"
        )
        return
    yield block


def _moe_layers(path: Path, shape: ModelShape, block: Block) -> np.ndarray:
    """int16 [N]: the MoE layer of each row, by the file's own layer numbers."""
    layer = block["layer"]
    low = int(layer.min())
    high = int(layer.max())

    # Counting is faster than sorting, but its table is as long as the largest number.
    if 0 <= low <= high < 1 << 16:
        used = np.flatnonzero(np.bincount(layer)).tolist()
    else:
        used = np.unique(layer).tolist()

    number_of = layer_numbers(path, used, shape)
    unknown = [number for number in used if number not in number_of]
    if unknown:
        row = int((layer == unknown[0]).argmax())
        raise layout_error(
            path,
            f"sequence {block['seq'][0]}: row {row}: layer",
            "an MoE layer",
            unknown[0],
            "is the shape right?",
        )

    table = np.zeros(used[-1] + 1, np.int16)
    table[used] = [number_of[number] for number in used]
    moe_layers: np.ndarray = table[layer]
    return moe_layers


def dense_block(
    number: int, experts: np.ndarray, prompt: int, first: int = 0, **columns: np.ndarray
) -> Block:
    """Return rows of a sequence in which every token has every layer.

    Args:
        number: sequence.
        experts: [T, L, K] ids.
        prompt: how many of the first tokens are prefill.
        first: position of the first token.
        columns: optional columns, [T, L, …].
    """
    tokens, layers = experts.shape[:2]
    pos = np.repeat(np.arange(first, first + tokens, dtype=np.int32), layers)
    is_prompt = pos < first + prompt

    block = {
        "seq": np.full(tokens * layers, number, np.int32),
        "pos": pos,
        "phase": np.where(is_prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE)),
        "layer": np.tile(np.arange(layers, dtype=np.int16), tokens),
        "experts": experts.reshape(tokens * layers, -1),
    }
    for name, values in columns.items():
        block[name] = values.reshape(tokens * layers, -1)

    return block


# -- forward passes --------------------------------------------------------------------
# Sequences out of forward passes.
#
# An engine runs forward passes, a trace holds sequences. `ForwardPasses` turns the
# former into the latter where a file does not say which request a token belongs to.


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
