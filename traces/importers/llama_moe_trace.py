"""CSV of llama-moe-trace of llama.cpp's expert-cache forks: rows
``pos,layer,e0,…,eK-1``, best expert first, mostly without a header.

Positions of the prompt are negative and count from its end; those of generated tokens
count from 0. Prompts come layer by layer, and their last layer may hold their last
token only. Captures are joined without a mark: a position that begins again at the
first layer begins a sequence. `moesim.traces.exporters.moe_cache_profile` writes it.

Source: github.com/thecodacus/llama.cpp, branch perf, README and files that it wrote.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.format.sorting import Unordered
from moesim.traces.importers.readers.foreign import (
    NO_WEIGHTS,
    Foreign,
    head,
    layout_error,
)
from moesim.traces.importers.readers.sequence_rows import Restarts, finished
from moesim.traces.importers.readers.tables import blocks, csv_rows
from moesim.traces.importers.readers.text import sections

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

_HEADER = re.compile(rb"pos,layer(,e\d+)+")
_ROW = re.compile(rb"-?\d+(,\d+){2,}")
# So many lines of bare numbers are enough to tell this layout from others.
_RECOGNISED_LINES = 50


def recognises(path: Path) -> bool:
    """Whether the first lines are three or more integers each, equally many; or the
    first one is the header.
    """
    lines = head(path, 1 << 16).replace(b"\r", b"").split(b"\n")
    if _HEADER.fullmatch(lines[0].strip()):
        return True
    # The last line of what was read may be cut.
    lines = (lines[:-1] or lines)[:_RECOGNISED_LINES]
    widths = {line.count(b",") for line in lines}
    return len(widths) == 1 and all(_ROW.fullmatch(line) for line in lines)


def read(path: Path, shape: ModelShape) -> Foreign:
    """The file's captures, a sequence each."""
    rows = Unordered(lambda: _pieces(path), lambda block: _whole(path, shape, block))
    return Foreign(rows, notes=[NO_WEIGHTS])


def _pieces(path: Path) -> Iterator[Block]:
    first_line = head(path, 1 << 16).split(b"\n", 1)[0].strip()
    ids = [f"e{rank}" for rank in range(first_line.count(b",") - 1)]
    mapping = {"from_end": ["pos"], "layer": ["layer"], "experts": ids}
    types = dict.fromkeys(["pos", "layer", *ids], "int32")
    restarts = Restarts(from_end=True)
    for part in sections(path, first_line) if _HEADER.fullmatch(first_line) else [None]:
        restarts.restart()
        for block in blocks(csv_rows(path, list(types), mapping, part, types=types)):
            block["pos"] = block.pop("from_end")
            block["seq"] = restarts.sequences(block["pos"], block["layer"])
            yield block


def _whole(path: Path, shape: ModelShape, block: Block) -> Block:
    """One capture with positions from 0 and phases."""
    pos = block["pos"]
    prompt_tokens = max(0, -int(pos[0]))
    if prompt_tokens and not (pos == -1).any():
        raise layout_error(
            path,
            f"sequence {block['seq'][0]}: prompt",
            "positions up to -1",
            f"none above {pos[pos < 0].max()}",
            "was the capture cut off? leave its rows out",
        )
    phase = np.where(pos < 0, Phase.PREFILL, Phase.DECODE).astype(np.int8)
    capture = {**block, "pos": pos + np.int32(prompt_tokens), "phase": phase}
    return finished(path, shape, capture)
