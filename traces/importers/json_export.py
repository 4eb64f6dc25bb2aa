"""One JSON object: ``selections[token][layer][rank]``, or ``layers.<number>``
with ``executed_topk`` [rows][K] and prompts that say which rows are theirs.

The second (``glm52-routing-trace-export``) numbers layers absolutely; the last
``decode_step_rows`` of a prompt were generated, and its scores are those that experts
were selected by, which are no combine weights and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.inputs import load_json, read_text
from moesim.traces.importers.readers.arrays import integers
from moesim.traces.importers.readers.foreign import (
    PROMPT_TOKENS,
    Foreign,
    decoding,
    head,
    layout_error,
    prompt_length,
)
from moesim.traces.importers.readers.sequence_rows import dense_block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

OPTIONS = {"prompt_tokens": PROMPT_TOKENS}
_SELECTIONS = "selections"
_EXECUTED = "executed_topk"
_FACTS = ("schema", "source", "scenario", "seed")


def recognises(path: Path) -> bool:
    """Whether this is an object with ``selections``, or with layers and their
    ``executed_topk``.
    """
    start = head(path, 1 << 20)
    keys = (f'"{_SELECTIONS}"'.encode(), f'"{_EXECUTED}"'.encode())
    return start.lstrip()[:1] == b"{" and any(key in start for key in keys)


def read(path: Path, _: ModelShape, **given: str) -> Foreign:
    """The file's sequences: all tokens, or a prompt each."""
    prompt = prompt_length(path, given)
    with decoding(path, "JSON"):
        export = load_json(read_text(path))
    if not isinstance(export, dict) or not {_SELECTIONS, "layers"} & export.keys():
        raise layout_error(path, "JSON", f"{_SELECTIONS} or layers", "neither")

    facts = {key: export[key] for key in _FACTS if key in export}
    if _SELECTIONS not in export:
        return Foreign(lambda: _prompts(path, export), facts=facts)
    ids = _ids(path, _SELECTIONS, export[_SELECTIONS], 3)
    return Foreign(lambda: [dense_block(0, ids, prompt)], facts=facts)


def _prompts(path: Path, export: dict[str, Any]) -> Iterator[Block]:
    """A sequence for each prompt."""
    with decoding(path, "layers"):
        layers = {int(layer): value for layer, value in export["layers"].items()}
        rows = {
            layer: _ids(path, f"layer {layer}: {_EXECUTED}", value[_EXECUTED], 2)
            for layer, value in sorted(layers.items())
        }
        experts = np.stack(list(rows.values()), axis=1)  # [rows, L, K]
        prompts = [
            (each["start_row"], each["end_row"], each["decode_step_rows"])
            for each in export["conditional"]["prompts"]
        ]
    for number, (start, end, generated) in enumerate(prompts):
        if not 0 <= start < end <= len(experts) or not 0 <= generated <= end - start:
            raise layout_error(
                path,
                f"prompt {number}",
                f"rows within 0..{len(experts)}, the last of them generated",
                f"rows {start}..{end}, {generated} of them generated",
            )
        block = dense_block(number, experts[start:end], end - start - generated)
        block["layer"] = np.tile(np.array(list(rows), np.int32), end - start)
        yield block


def _ids(path: Path, place: str, value: Any, dimensions: int) -> np.ndarray:
    with decoding(path, place):
        return integers(path, place, np.array(value), dimensions)
