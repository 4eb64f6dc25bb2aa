"""libCacheSim's oracleGeneral: 24 bytes per request: u32 time, u64 object, u32 bytes,
i64 next request of the object.

A request is one active expert of one layer step, ascending by id as the planner looks
them up; the object is ``layer * E + expert``, time is the step. Requests are numbered
from 1, as libCacheSim counts them, and -1 says never again. The file does not know that
the experts of a layer step are needed together.

Source: libCacheSim traceReader/customizedReader/oracle/oracleGeneralBin.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.base.errors import TraceError
from moesim.base.files import written_beside
from moesim.traces.format.layer_steps import layer_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.traces.format.reader import Trace

RECORD = np.dtype(
    [("time", "<u4"), ("object", "<u8"), ("bytes", "<u4"), ("next", "<i8")]
)
NEVER = -1


def export_requests(trace: Trace, out: Path, progress: Callable[[int], None]) -> int:
    """Write all requests; what is needed next is filled in from the end, a part of the
    file at a time.

    Raises:
        TraceError: an expert of 4 GiB or more, which the layout cannot hold.
    """
    if trace.shape.max_expert_bytes >= 1 << 32:
        raise TraceError(
            f"{trace.path}: expert bytes: expected < 4 GiB for oracleGeneral, got"
            f" {trace.shape.max_expert_bytes}"
        )

    experts = trace.shape.experts
    sizes = np.array(trace.shape.sizes_by_expert(), np.uint32)
    with written_beside(out) as part:
        # Requests before each part, and behind the last one.
        edges = [0]
        with part.open("wb") as file:
            for block in layer_steps(trace):
                uses = np.diff(block.edges)
                layer = np.repeat(block.layer, uses)
                records = np.empty(len(layer), RECORD)
                records["time"] = np.repeat(block.step, uses)
                records["object"] = layer * experts + block.experts
                records["bytes"] = sizes[layer, block.experts]
                file.write(records.tobytes())
                edges.append(edges[-1] + len(records))
                progress(edges[-1])

        _link(part, edges, trace.shape.layers * experts)

    progress(edges[-1])
    return edges[-1]


def _link(path: Path, edges: list[int], objects: int) -> None:
    """Fill in `next`, from the last part to the first."""
    records = np.memmap(path, RECORD, "r+")
    # The next request of each object behind the part at hand.
    following = np.full(objects, NEVER, np.int64)

    for start, stop in zip(edges[-2::-1], edges[:0:-1], strict=True):
        keys = records["object"][start:stop].astype(np.int64)
        by_key = np.argsort(keys, kind="stable")
        sorted_keys = keys[by_key]
        change = np.diff(sorted_keys) != 0
        is_first = np.concatenate(([True], change))
        is_last = np.append(change, [True])

        # Within the part it is the next of the same object; requests count from 1.
        later = np.empty(len(keys), np.int64)
        later[by_key[:-1]] = by_key[1:] + start + 1
        later[by_key[is_last]] = following[sorted_keys[is_last]]
        records["next"][start:stop] = later
        following[sorted_keys[is_first]] = by_key[is_first] + start + 1

    records.flush()
