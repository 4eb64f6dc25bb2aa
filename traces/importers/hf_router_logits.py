"""Hugging Face `output_router_logits`: a float array [batch * seq, E] per MoE layer, as
safetensors, npz or torch zip.

Since transformers 5 several models put softmaxed values under that name; rows that sum
to one are taken as such. The selected experts are not in the file: they are the top-k
of the logits only where the gate is a plain softmax or top-k gate, and every other gate
is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.format.sorting import BATCH_ROWS
from moesim.traces.importers.readers.array_stream import in_memory, streams
from moesim.traces.importers.readers.foreign import (
    NO_PHASES,
    bad,
    dense_block,
    whole_number,
)
from moesim.traces.importers.readers.tensors import kind_of, load_named
from moesim.traces.importers.readers.top_k import top_k

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.importers.readers.array_stream import Stream

    Block = dict[str, np.ndarray]

GENERIC = True
OPTIONS = {
    "batch": "sequences in the batch (rows are sequence by sequence); default 1",
    "prompt_tokens": "how many of the first tokens of every sequence are prompt",
}
_TOP_K_IS_SELECTION = (
    "softmax",
    "softmax_topk",
    "softmax_topk_renormalised",
    "topk_then_softmax",
)
_SUM_TOLERANCE = 0.02
_SAMPLE = 4096


def recognises(path: Path) -> bool:
    """Whether this is safetensors, npz, a torch zip, or an npy of floats: damaged
    content is told later.
    """
    return kind_of(path) in ("npy", "npz", "safetensors", "torch")


def provenance(
    path: Path, *, batch: str = "1", prompt_tokens: str = ""
) -> dict[str, Any]:
    """What the values are, and remarks."""
    del batch
    notes = (
        []
        if prompt_tokens
        else [
            f"{NO_PHASES}: all are taken as generated; option prompt_tokens=N says more"
        ]
    )
    probabilities = _are_probabilities(next(iter(_layers(path).values())))
    if probabilities:
        notes.append("the values are softmaxed already (rows sum to 1)")
    notes.append(
        "experts are the top-k of the values, not what the model was seen to select"
    )
    return {"values": "probabilities" if probabilities else "logits", "notes": notes}


def read(
    path: Path, shape: ModelShape, *, batch: str = "1", prompt_tokens: str = ""
) -> Iterator[Block]:
    """Sequences in parts: ids, combine weights and probabilities.

    Raises:
        TraceError: a gate whose selection is not the top-k of these values, or arrays
            that do not fit the shape.
    """
    if shape.scoring not in _TOP_K_IS_SELECTION:
        raise bad(
            path,
            "gate",
            "a model that selects the top-k of its router logits",
            f"{shape.scoring} in {shape.name}",
            "groups, biases or another score decide its selection: record the gate's"
            " returned ids with `moesim record`",
        )
    layers = list(_layers(path).values())
    if len(layers) != shape.layers:
        raise bad(
            path,
            "layers",
            f"{shape.layers} arrays as in {shape.name}",
            len(layers),
            "is the shape right?",
        )
    rows, experts = layers[0].shape
    if experts != shape.experts:
        raise bad(
            path,
            "columns",
            f"{shape.experts} experts as in {shape.name}",
            experts,
            "is the shape right?",
        )
    sequences = whole_number(path, "batch", batch)
    if rows % sequences:
        raise bad(
            path,
            "rows",
            f"a multiple of batch={sequences}",
            rows,
            "state option batch=N as it was run",
        )
    prompt = (
        whole_number(path, "prompt_tokens", prompt_tokens, 0) if prompt_tokens else 0
    )
    return _blocks(path, shape, layers, rows // sequences, prompt)


def _blocks(
    path: Path, shape: ModelShape, layers: list[Stream], tokens: int, prompt: int
) -> Iterator[Block]:
    """Parts of sequences of `tokens` tokens: all layers are read side by side."""
    probabilities = _are_probabilities(layers[0])
    start = 0
    for parts in zip(
        *(layer.rows(max(1, BATCH_ROWS // len(layers))) for layer in layers),
        strict=True,
    ):
        values = np.stack(parts, axis=1).astype(np.float32, copy=False)  # [T, L, E]
        if not np.isfinite(values).all():
            token, layer, expert = np.argwhere(~np.isfinite(values))[0]
            raise bad(
                path,
                f"layer {layer}, row {start + token}",
                "finite numbers",
                values[token, layer, expert],
            )
        found = selected(values, shape, probabilities=probabilities)
        at = 0
        while at < len(values):  # a part may hold the end of a sequence
            number, first = divmod(start + at, tokens)
            stop = min(len(values), at + tokens - first)
            experts, weights, scores = (one[at:stop] for one in found)
            yield dense_block(
                number,
                experts,
                max(0, prompt - first),
                first,
                weights=weights,
                scores=scores,
            )
            at = stop
        start += len(values)


def selected(
    values: np.ndarray, shape: ModelShape, *, probabilities: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids [T, L, K] best first, combine weights [T, L, K] and probabilities [T, L, E]
    of gate values [T, L, E].

    Equal values go to the lower id. Softmax over the chosen logits only is softmax over
    all, renormalised.
    """
    with np.errstate(over="ignore"):
        scores = (
            values
            if probabilities
            else np.exp(values - values.max(axis=2, keepdims=True))
        )
    scores = scores / scores.sum(axis=2, keepdims=True)
    flat = np.ascontiguousarray(values.reshape(-1, values.shape[2]), np.float32)
    experts = top_k(flat, min(shape.top_k, values.shape[2])).reshape(
        *values.shape[:2], -1
    )
    weights = np.take_along_axis(scores, experts, axis=2)
    if shape.norm_topk or shape.scoring == "topk_then_softmax":
        weights = weights / np.maximum(
            weights.sum(axis=2, keepdims=True), np.finfo(np.float32).tiny
        )
    return experts, weights, scores


def _layers(path: Path) -> dict[str, Stream]:
    """Name -> [rows, E] floats of every layer, in order."""
    found = streams(path)
    if not found:
        raise bad(path, "content", "one array per MoE layer", "no array")
    if len(found) == 1 and len(next(iter(found.values())).shape) == 3:
        (name,) = found
        found = {
            f"{name}.{index}": layer
            for index, layer in enumerate(map(in_memory, load_named(path)[name]))
        }
    rows = None
    for name, layer in found.items():
        if len(layer.shape) != 2 or layer.dtype.kind != "f" or 0 in layer.shape:
            raise bad(
                path,
                f"array {name!r}",
                "floats [batch * seq, experts]",
                f"{layer.dtype} {list(layer.shape)}",
                "",
            )
        rows = layer.shape if rows is None else rows
        if layer.shape != rows:
            raise bad(
                path,
                f"array {name!r}",
                f"shape {list(rows)} as in the other layers",
                list(layer.shape),
            )
    return found


def _are_probabilities(layer: Stream) -> bool:
    """Whether values are >= 0 and every row sums to one, as far as 16-bit floats do."""
    some = next(layer.rows(min(_SAMPLE, layer.shape[0]))).astype(np.float32)
    return bool(
        (some >= 0).all() and (np.abs(some.sum(axis=1) - 1) < _SUM_TOLERANCE).all()
    )
