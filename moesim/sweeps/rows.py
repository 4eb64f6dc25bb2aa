"""One row of a results table for each run: its options, its figures, and what pages and
statistics read of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from moesim.reporting.text import busiest
from moesim.runs.config import RunConfig, option_of
from moesim.runs.replay import replay, share_of
from moesim.sweeps.observer import RunObserver
from moesim.sweeps.shared_files import open_shared
from moesim.traces.timeline.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runs.result import Run

DIGESTS = ("digest", "trace_digest", "hw_digest", "code")
"""Columns that say exactly what was run."""

DETAILS: dict[str, Any] = {
    "lanes": pa.string(),
    "warnings": pa.string(),
    "batch_ttft_s": pa.list_(pa.float64()),
    "batch_decode_s": pa.list_(pa.float64()),
    "batch_decode_steps": pa.list_(pa.int64()),
    "batch_makespan_s": pa.list_(pa.float64()),
    "placement_experts": pa.int64(),
    "placement": pa.binary(),
}
"""What pages and statistics read: figures of lanes and warnings as JSON, times of each
batch, and where each expert was (see `RunObserver.columns`).
"""

_KINDS: dict[type, Any] = {
    str: pa.string(),
    Path: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
}

_BY_LANE = ("busy_s", "stall_s", "bytes", "bandwidth")
"""Metrics with a figure for each lane; machines differ in lanes, so all share one
column.
"""

_COUNTS = {
    "steps",
    "layer_steps",
    "batches",
    "accesses",
    "hits",
    "delayed_hits",
    "misses",
    "prefill_tokens",
    "decode_tokens",
    "prefetched",
}
"""Metrics that are whole numbers."""

_OF_CONFIG: dict[str, Any] = {
    "model": pa.string(),
    "hw_kind": pa.string(),
    "assignment": pa.string(),
    "oracle": pa.bool_(),
    "cache_bytes": pa.int64(),
    "gpu_bytes": pa.int64(),
    "host_bytes": pa.int64(),
}
"""What the effective configuration says beyond the options."""

_OF_RUN: dict[str, Any] = {
    "routing_altered": pa.bool_(),
    "approximate": pa.bool_(),
    "gate_mass_kept": pa.float64(),
    "h2d_bytes": pa.int64(),
    "ssd_bytes": pa.int64(),
    "h2d_bytes_per_s": pa.float64(),
    "busiest": pa.string(),
    "busiest_share": pa.float64(),
}

_OF_REQUESTS: dict[str, Any] = {
    "requests": pa.int64(),
    "ttft_p50_s": pa.float64(),
    "ttft_p95_s": pa.float64(),
    "ttft_p99_s": pa.float64(),
    "tpot_p99_s": pa.float64(),
    "slo_attainment": pa.float64(),
    "goodput_per_s": pa.float64(),
}
"""What a run with arrivals adds."""


def options_schema() -> dict[str, Any]:
    """Columns of the options, by name, with their Arrow types."""
    return {
        declared.name: _KINDS[option_of(declared).kind]
        for declared in fields(RunConfig)
        # Digests have columns of their own.
        if not declared.name.endswith("_digest")
    }


def row_schema() -> pa.Schema:
    """Columns of a results table, in their order."""
    metrics = {
        name: pa.int64() if name in _COUNTS else pa.float64()
        for name in METRICS
        if name not in _BY_LANE
    }
    columns = {
        **options_schema(),
        **_OF_CONFIG,
        **metrics,
        **_OF_RUN,
        **_OF_REQUESTS,
        **dict.fromkeys(DIGESTS, pa.string()),
        **DETAILS,
    }
    return pa.schema(list(columns.items()))


def figure_names() -> list[str]:
    """Columns that hold results and not what was asked for."""
    asked = {*options_schema(), *DIGESTS, *DETAILS}
    return [name for name in row_schema().names if name not in asked]


@dataclass(frozen=True, slots=True)
class Point:
    """One run that a sweep asks for, ready to travel to a worker.

    Attributes:
        config: what it is made with, without its trace and machine.
        trace: path of the trace, and its name in results.
        trace_digest: SHA-256 of the trace.
        profile: the machine.
        digest: names the run, see `moesim.sweeps.digests.run_digest`.
        code: digest of the code.
    """

    config: RunConfig
    trace: str
    trace_name: str
    trace_digest: str
    profile: HardwareProfile
    digest: str
    code: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A run that cannot be: its options contradict each other, the trace or the
    machine.
    """

    reason: str


def carry_out(
    point: Point, progress: Callable[[float], None]
) -> dict[str, Any] | Refusal:
    """Replay one point of a sweep, and return its row."""
    trace = open_shared(point.trace, point.trace_digest)
    observer = RunObserver(trace.shape, point.profile.lanes)
    config = point.config.replaced(trace=trace, hw=point.profile)
    try:
        run = replay(
            config,
            keep=False,
            watch=observer.add,
            progress=share_of(config, progress),
        )
    except ValueError as error:
        # One impossible cell of many is a result, too.
        return Refusal(str(error))
    return _row(point, run, observer)


def _row(point: Point, run: Run, observer: RunObserver) -> dict[str, Any]:
    metrics = run.metrics
    served = metrics["requests"] or {}
    lane, share = busiest(run)
    options = {name: getattr(point.config, name) for name in options_schema()}
    options |= {"trace": point.trace_name, "hw": point.profile.name}
    for name in ("warm", "artefacts"):
        options[name] = None if options[name] is None else str(options[name])
    return {
        **options,
        **{name: run.config[name] for name in _OF_CONFIG},
        **{name: metrics[name] for name in METRICS if name not in _BY_LANE},
        "routing_altered": metrics["routing"] != "recorded",
        "approximate": metrics["approximate"],
        "gate_mass_kept": metrics["gate_mass_kept"],
        "h2d_bytes": moved_bytes(metrics, "h2d"),
        "ssd_bytes": moved_bytes(metrics, "ssd"),
        "h2d_bytes_per_s": bytes_per_s(metrics, "h2d"),
        **{name: served.get(name) for name in _OF_REQUESTS},
        "busiest": lane,
        "busiest_share": share,
        "digest": point.digest,
        "trace_digest": point.trace_digest,
        "hw_digest": point.profile.digest,
        "code": point.code,
        "lanes": json.dumps({name: metrics[name] for name in _BY_LANE}),
        "warnings": json.dumps(run.warnings),
        **observer.columns(),
    }


def moved_bytes(metrics: Mapping[str, Any], link: str) -> int:
    """Bytes over all links of a kind."""
    return sum(
        count for lane, count in metrics["bytes"].items() if lane.startswith(link)
    )


def bytes_per_s(metrics: Mapping[str, Any], link: str) -> float | None:
    """Bandwidth of all links of a kind while they were busy."""
    lanes = [
        lane
        for lane, count in metrics["bytes"].items()
        if lane.startswith(link) and count
    ]
    busy_s = sum(metrics["busy_s"][lane] for lane in lanes)
    return moved_bytes(metrics, link) / busy_s if busy_s else None


def as_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as Arrow, in the columns of `row_schema`."""
    return pa.Table.from_pylist(list(rows), schema=row_schema())
