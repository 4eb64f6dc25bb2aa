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
from moesim.traces.errors import TraceError
from moesim.traces.files import written_beside
from moesim.traces.format.batch import compose

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace

SUFFIX = ".oracleGeneral"
RECORD = np.dtype(
    [("time", "<u4"), ("object", "<u8"), ("bytes", "<u4"), ("next", "<i8")]
)
NEVER = -1
_STEPS = 2048


def export(trace: Trace, out: Path, progress: Callable[[int], None]) -> int:
    """Write all requests; what is needed next is filled in from behind, a stretch of
    the file at a time.

    Raises:
        TraceError: an expert of 4 GiB or more, which the layout cannot hold.
    """
    if trace.shape.max_expert_bytes >= 1 << 32:
        raise TraceError(
            f"{trace.path}: expert bytes: expected < 4 GiB for oracleGeneral, got"
            f" {trace.shape.max_expert_bytes}"
        )
    with written_beside(out) as part:
        starts = [0]
        with part.open("wb") as file:
            steps: list[RoutedStep] = []
            for step in compose(trace):
                steps.append(step)
                if len(steps) == _STEPS:
                    starts.append(starts[-1] + _write(file, steps, trace))
                    steps = []
                    progress(starts[-1])
            if steps:
                starts.append(starts[-1] + _write(file, steps, trace))
        _link(part, starts, trace.shape.layers * trace.shape.experts)
    progress(starts[-1])
    return starts[-1]


def _write(file: object, steps: list[RoutedStep], trace: Trace) -> int:
    sizes = np.array(trace.shape.expert_bytes, np.uint32)
    experts = [layer.experts for step in steps for layer in step.layers]
    counts = np.array([len(active) for active in experts])
    layer = np.repeat(
        np.array([layer.layer for step in steps for layer in step.layers]), counts
    )
    records = np.empty(int(counts.sum()), RECORD)
    records["time"] = np.repeat(
        np.repeat([step.step for step in steps], [len(step.layers) for step in steps]),
        counts,
    )
    records["object"] = layer * trace.shape.experts + np.concatenate(experts)
    records["bytes"] = sizes[layer]
    file.write(records)  # type: ignore[attr-defined]
    return len(records)


def _link(path: Path, starts: list[int], objects: int) -> None:
    """Fill in `next`, from the last stretch to the first."""
    records = np.memmap(path, RECORD, "r+")
    following = np.full(objects, NEVER, np.int64)
    for start, stop in zip(starts[-2::-1], starts[:0:-1], strict=True):
        keys = records["object"][start:stop].astype(np.int64)
        order = np.argsort(keys, kind="stable")
        ranked = keys[order]
        last = np.append(np.diff(ranked) != 0, [True])
        later = np.empty(len(keys), np.int64)
        later[order[:-1]] = order[1:] + start + 1
        later[order[last]] = following[ranked[last]]
        records["next"][start:stop] = later
        first = np.concatenate(([True], np.diff(ranked) != 0))
        following[ranked[first]] = order[first] + start + 1
    records.flush()
