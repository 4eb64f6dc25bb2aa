"""CSV of llama-moe-trace of llama.cpp's expert-cache forks: rows
``pos,layer,e0,…,eK-1``, best expert first, mostly without a header.

Positions of the prompt are negative and count from its end; those of generated tokens
count from 0. Prompts come layer by layer, and their last layer may hold their last
token only. Captures are joined without a mark: a position that begins again at the
first layer begins a sequence. `moesim trace export --to
moe-cache-profile` writes it.

Source: github.com/thecodacus/llama.cpp, branch perf, README and files that it wrote.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moesim.traces.format.rows import blocks
from moesim.traces.importers.readers.foreign import Foreign, first_lines, head
from moesim.traces.importers.readers.sequence_rows import phases, restarted
from moesim.traces.importers.readers.tables import csv_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

_HEADER = re.compile(rb"pos,layer(,e\d+)+")
_ROW = re.compile(rb"-?\d+(,\d+){2,}")


def recognises(path: Path) -> bool:
    """Whether the first lines are three or more integers each, equally many; or the
    first one is the header.
    """
    lines = first_lines(path)
    if _HEADER.fullmatch(lines[0].strip()):
        return True
    widths = {line.count(b",") for line in lines}
    return len(widths) == 1 and all(map(_ROW.fullmatch, lines))


def read(path: Path, _: ModelShape) -> Foreign:
    """The file's captures, a sequence each."""
    return Foreign(lambda: restarted(_rows(path)))


def _rows(path: Path) -> Iterator[Block]:
    first_line = head(path, 1 << 16).split(b"\n", 1)[0].strip()
    ids = [f"e{rank}" for rank in range(first_line.count(b",") - 1)]
    columns = {"from_end": ["pos"], "layer": ["layer"], "experts": ids}
    header = first_line.decode() if _HEADER.fullmatch(first_line) else ""
    rows = csv_rows(path, ["pos", "layer", *ids], columns, header=header)
    for block in blocks(rows):
        pos = block.pop("from_end")
        yield {**block, "pos": pos, "phase": phases(pos < 0)}
