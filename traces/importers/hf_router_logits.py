"""Hugging Face `output_router_logits`: a float array [batch * seq, E] per MoE layer, as
safetensors, npz or torch zip.

Since transformers 5 several models put softmaxed values under that name; rows that sum
to one are taken as such. The selected experts are not in the file: they are the top-k
of the logits only where the gate is a plain softmax or top-k gate, and every other gate
is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.arrays import to_float16, top_k
from moesim.traces.format.sorting import BATCH_ROWS
from moesim.traces.importers.readers.arrays import BF16, floats, kind_of, read_arrays
from moesim.traces.importers.readers.foreign import (
    PROMPT_TOKENS,
    Foreign,
    layout_error,
    one_of,
    prompt_length,
    whole_number,
)
from moesim.traces.importers.readers.sequence_rows import dense_block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

GENERIC = True
OPTIONS = {
    "batch": "sequences in the batch (rows are sequence by sequence); default 1",
    "lengths": "tokens of each sequence of a padded batch, such as 12,7,9",
    "padding": "left (default) or right: where the batch was padded",
    "prompt_tokens": PROMPT_TOKENS,
}
_TOP_K_IS_SELECTION = (
    "softmax",
    "softmax_topk",
    "softmax_topk_renormalised",
    "topk_then_softmax",
)
# Rows of 16-bit probabilities add up to 1 only so nearly.
_SUM_TOLERANCE = 0.02
_SAMPLE_ROWS = 4096


def recognises(path: Path) -> bool:
    """Whether this is safetensors, npz, a torch zip, or an npy of floats; reading says
    what is wrong with its content.
    """
    return kind_of(path) in ("npy", "npz", "safetensors", "torch")


def read(path: Path, shape: ModelShape, **given: str) -> Foreign:
    """Sequences in parts: ids, combine weights and probabilities.

    Raises:
        TraceError: a gate whose selection is not the top-k of these values, or arrays
            that do not fit the shape.
    """
    if shape.scoring not in _TOP_K_IS_SELECTION:
        raise layout_error(
            path,
            "gate",
            "a model that selects the top-k of its router logits",
            f"{shape.scoring} in {shape.name}",
            "groups, biases or another score decide its selection: record the gate's"
            " returned ids with `moesim record`",
        )
    layers = list(_layers(path).values())
    rows, experts = layers[0].shape
    for place, expected, count in (
        ("layers", f"{shape.layers} arrays", len(layers)),
        ("columns", f"{shape.experts} experts", experts),
    ):
        if not expected.startswith(f"{count} "):
            way_out = "is the shape right?"
            raise layout_error(
                path, place, f"{expected} as in {shape.name}", count, way_out
            )
    # Rows of all sequences stand in one array: only the user knows how many.
    sequences = whole_number(path, "batch", given.get("batch", "1"))
    if rows % sequences:
        way_out = "state --batch N as it was run"
        raise layout_error(
            path, "rows", f"a multiple of batch={sequences}", rows, way_out
        )
    tokens = rows // sequences
    spans = _spans(path, sequences, tokens, given)

    are_probabilities = _are_probabilities(layers[0])
    notes = []
    if are_probabilities:
        notes.append("the values are softmaxed already (rows sum to 1)")
    if sequences != 1 and "lengths" not in given:
        notes.append(
            "all sequences are taken to be as long as the batch; where it was padded,"
            " --option lengths=N,N,... says how long each is"
        )
    notes.append(
        "experts are the top-k of the values, not what the model was seen to select"
    )
    return Foreign(
        lambda: _blocks(path, shape, layers, tokens, spans),
        prompt=prompt_length(path, given),
        notes=notes,
        facts={"values": "probabilities" if are_probabilities else "logits"},
    )


def _spans(
    path: Path, sequences: int, tokens: int, given: dict[str, str]
) -> list[tuple[int, int]]:
    """Where each sequence's own tokens begin and end among those of the batch."""
    padding = one_of(path, given, "padding", ("left", "right"))
    if "lengths" not in given:
        return [(0, tokens)] * sequences

    counts = [
        whole_number(path, "lengths", word) for word in given["lengths"].split(",")
    ]
    if len(counts) != sequences or max(counts) != tokens:
        raise layout_error(
            path,
            "--option lengths",
            f"{sequences} lengths, the longest of {tokens} tokens",
            f"{len(counts)}, the longest of {max(counts)}",
            "",
        )
    if padding == "right":
        return [(0, length) for length in counts]
    return [(tokens - length, tokens) for length in counts]


def _blocks(
    path: Path,
    shape: ModelShape,
    layers: list[np.ndarray],
    tokens: int,
    spans: list[tuple[int, int]],
) -> Iterator[Block]:
    """Parts of sequences: all layers are read side by side.

    Args:
        path: the file.
        shape: the model.
        layers: [rows, E] floats of every layer.
        tokens: rows of each sequence, padding included.
        spans: where its own tokens begin and end among them.
    """
    probabilities = _are_probabilities(layers[0])
    # A token has a row in every layer.
    part_tokens = max(1, BATCH_ROWS // len(layers))
    for number, (begin, end) in enumerate(spans):
        for start in range(begin, end, part_tokens):
            row = number * tokens + start
            part = slice(row, row + min(part_tokens, end - start))
            values = np.stack([floats(layer[part]) for layer in layers], axis=1)
            values = values.astype(np.float32, copy=False)  # [T, L, E]
            _check_finite(path, row, values)
            experts, weights, scores = _selected(values, shape, probabilities)
            yield dense_block(
                number,
                experts,
                first=start - begin,
                weights=to_float16(weights)[0],
                scores=to_float16(scores)[0],
            )


def _check_finite(path: Path, start: int, values: np.ndarray) -> None:
    finite = np.isfinite(values)
    if finite.all():
        return

    token, layer, expert = np.argwhere(~finite)[0]
    place = f"layer {layer}, row {start + token}"
    actual = values[token, layer, expert]
    raise layout_error(path, place, "finite numbers", actual)


def _selected(
    values: np.ndarray,
    shape: ModelShape,
    probabilities: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Experts int32 [T, L, K], best first, their combine weights and the probabilities
    [T, L, E] of a gate's values [T, L, E].

    Equal values go to the lower id. Softmax over the chosen logits only is softmax over
    all, renormalised.
    """
    scores = values
    if not probabilities:
        # The difference of two logits may be below any float: its power is then 0.
        with np.errstate(over="ignore"):
            scores = np.exp(values - values.max(axis=2, keepdims=True))
    scores = scores / scores.sum(axis=2, keepdims=True)

    tokens, layers, width = values.shape
    # The values themselves decide, not the scores, which rounding may make equal.
    flat = np.ascontiguousarray(values.reshape(-1, width), np.float32)
    experts = top_k(flat, min(shape.top_k, width)).reshape(tokens, layers, -1)

    weights = np.take_along_axis(scores, experts, axis=2)
    if shape.norm_topk or shape.scoring == "topk_then_softmax":
        total = weights.sum(axis=2, keepdims=True)
        weights = weights / np.maximum(total, np.finfo(np.float32).tiny)

    return experts, weights, scores


def _layers(path: Path) -> dict[str, np.ndarray]:
    """Name -> [rows, E] floats of every layer, in order."""
    arrays = read_arrays(path)
    if not arrays:
        raise layout_error(path, "content", "one array per MoE layer", "no array")

    first = next(iter(arrays.values()))
    if len(arrays) == 1 and first.ndim == 3:
        ((name, stacked),) = arrays.items()
        arrays = {f"{name}.{index}": layer for index, layer in enumerate(stacked)}
        first = stacked[0]
    for name, layer in arrays.items():
        is_float = layer.dtype.kind == "f" or layer.dtype == BF16
        if layer.ndim != 2 or not is_float or not layer.size:
            raise layout_error(
                path,
                f"array {name!r}",
                "floats [batch * seq, experts]",
                f"{floats(layer).dtype} {list(layer.shape)}",
                "",
            )
        if layer.shape != first.shape:
            raise layout_error(
                path,
                f"array {name!r}",
                f"shape {list(first.shape)} as in the other layers",
                list(layer.shape),
            )

    return arrays


def _are_probabilities(layer: np.ndarray) -> bool:
    """Whether values are >= 0 and every row sums to one, as far as 16-bit floats do."""
    sample = floats(layer[:_SAMPLE_ROWS]).astype(np.float32)
    sums_to_one = np.abs(sample.sum(axis=1) - 1) < _SUM_TOLERANCE
    return bool((sample >= 0).all() and sums_to_one.all())
