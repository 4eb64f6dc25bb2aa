"""CSV ``pos,layer,e0,…,eK-1`` without a header, which llama.cpp's expert-cache forks
take as ``--moe-cache-profile``; comes back by `llama_moe_trace`.

Layers are the model's own numbers, dense ones counted. Prompts come layer by layer, at
negative positions that count from their end; generated tokens count from 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.base.errors import TraceError
from moesim.traces.exporters.csv import csv_file
from moesim.traces.format.parquet import numbers
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.traces.format.reader import Trace

SUFFIX = ".csv"


def export(trace: Trace, out: Path, progress: Callable[[int], None]) -> int:
    """Write one line per token and layer, sequence after sequence.

    Raises:
        TraceError: generated tokens without a prompt behind a prompt without generated
            tokens, which the layout cannot tell apart.
    """
    layer_numbers = np.array(trace.shape.layer_numbers, np.int32)
    written = 0
    is_open = False  # the sequence before has a prompt alone

    with csv_file(out, has_header=False) as write:
        for rows in trace.sequences():
            prompt = int(np.searchsorted(rows.phase, Phase.DECODE))
            if is_open and not prompt:
                raise TraceError(
                    f"{trace.path}: sequence {rows.seq}: expected a prompt behind a"
                    " sequence without generated tokens, found none; this layout joins"
                    " both"
                )
            is_open = prompt == len(rows.pos)
            begin = rows.pos[-1] + 1 if is_open else rows.pos[prompt]

            by_layer = np.argsort(rows.layer[:prompt], kind="stable")
            order = np.concatenate((by_layer, np.arange(prompt, len(rows.pos))))
            columns = {
                "pos": numbers((rows.pos - begin)[order]),
                "layer": numbers(layer_numbers[rows.layer[order]]),
            }
            experts = rows.experts[order]
            columns |= {f"e{rank}": numbers(ids) for rank, ids in enumerate(experts.T)}
            write(columns)
            written += len(order)
            progress(written)
    return written
