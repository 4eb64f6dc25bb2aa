"""CSV ``pos,layer,e0,…,eK-1`` without a header, which llama.cpp's expert-cache forks
take as ``--moe-cache-profile``; comes back by `llama_moe_trace`.

Layers are the model's own numbers, dense ones counted. Prompts come layer by layer, at
negative positions that count from their end; generated tokens count from 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyarrow import csv

from moesim.base.errors import TraceError
from moesim.base.files import written_beside
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
    names = ["pos", "layer", *(f"e{rank}" for rank in range(trace.shape.top_k))]
    schema = pa.schema([(name, pa.int32()) for name in names])
    plain = csv.WriteOptions(include_header=False)
    written = 0
    is_open = False  # the sequence before has a prompt alone

    with (
        written_beside(out) as part,
        part.open("wb") as file,
        csv.CSVWriter(file, schema, write_options=plain) as writer,
    ):
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
            columns = [
                (rows.pos - begin)[order],
                layer_numbers[rows.layer[order]],
                *rows.experts[order].T.astype(np.int32),
            ]
            arrays = [numbers(np.ascontiguousarray(each, np.int32)) for each in columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            written += len(order)
            progress(written)
    return written
