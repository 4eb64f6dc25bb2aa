"""One row of a results table for each run: its options, its figures, and what pages and
statistics read of it.
"""

from __future__ import annotations

import json
import time
import uuid
import warnings
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from moesim.base.options import ConfigError, option_of
from moesim.base.seals import check_seal
from moesim.policies.base import PolicyError
from moesim.policies.faults import PolicyFault, policy_faults
from moesim.runs.config import RunConfig
from moesim.runs.replay import replay, share_of
from moesim.runs.result import busiest
from moesim.runs.sweeps.execution import open_shared
from moesim.runs.sweeps.plan import Point, code_digest, contents_of
from moesim.traces.format.parquet import open_parquet, read_table, write_table
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.metrics import (
    METRICS,
    REQUEST_METRICS,
    ROW_METRICS,
    RUN_METRICS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import pandas as pd

    from moesim.runs.result import Run
    from moesim.traces.timeline.spans import Chunk

DIGESTS = ("digest", "trace_digest", "hw_digest", "files_digest", "code")
"""Columns that say exactly what was run."""

DETAILS: dict[str, Any] = {
    "lanes": pa.string(),
    "warnings": pa.string(),
    "batch_decode_s": pa.list_(pa.float64()),
    "batch_decode_tokens": pa.list_(pa.int64()),
    "batch_makespan_s": pa.list_(pa.float64()),
}
"""Columns that pages and statistics read: figures of lanes and warnings as JSON, and
times of each batch (see `times_of_batches`).
"""

_KINDS: dict[type, Any] = {
    str: pa.string(),
    Path: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
}

_BY_LANE = [name for name, metric in METRICS.items() if " per " in metric.unit]
"""Metrics with a figure for each lane; machines differ in lanes, so all share one
column.
"""

_OF_CONFIG: dict[str, Any] = {
    "model": pa.string(),
    "hw_kind": pa.string(),
    "assignment": pa.string(),
    "oracle": pa.bool_(),
    "begins": pa.string(),
    "prediction_error": pa.float64(),
    "cache_bytes": pa.int64(),
    "gpu_bytes": pa.int64(),
    "host_bytes": pa.int64(),
}
"""Columns of the effective configuration beyond the options."""

_OF_RUN: dict[str, Any] = {
    "routing_altered": pa.bool_(),
    "approximate": pa.bool_(),
    "gate_mass_kept": pa.float64(),
    "filling_share": pa.float64(),
    "h2d_bytes": pa.int64(),
    "ssd_bytes": pa.int64(),
    "h2d_bytes_per_s": pa.float64(),
    "busiest": pa.string(),
    "busiest_share": pa.float64(),
}

_OF_REQUESTS = {
    name: pa.float64() if metric.unit else pa.int64()
    for name, metric in REQUEST_METRICS.items()
}
"""Columns that a run with arrivals adds."""


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
        name: pa.int64() if metric.unit in ("", "tokens") else pa.float64()
        for name, metric in METRICS.items()
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


def directions() -> dict[str, str]:
    """Columns that can be sought, each with whether ``larger`` or ``smaller`` is
    better.
    """
    columns = row_schema().names
    known = METRICS | RUN_METRICS | REQUEST_METRICS | ROW_METRICS
    return {
        name: metric.better
        for name, metric in known.items()
        if metric.better and name in columns
    }


def carry_out(
    point: Point, progress: Callable[[float], None]
) -> dict[str, Any] | PolicyError | PolicyFault:
    """Replay one point of a sweep, and return its row; else why it cannot be: its
    options contradict each other, the trace or the machine, or a policy of somebody
    else failed.
    """
    trace = open_shared(point.trace, point.trace_digest)
    contents = contents_of(point.config) | {"code": code_digest()}
    for name, digest in contents.items():
        planned = point.contents[name]
        # What was edited while a process runs is not what it imported.
        if digest != planned and None not in (digest, planned):
            raise ConfigError(
                f"{name}: expected what the sweep was planned with, found something"
                " else in a worker; start again, with the same moesim and files"
                " everywhere"
            )
    config = point.config.replaced(trace=trace, hw=point.profile)
    # One impossible cell of many is a result, too.
    try:
        with policy_faults():
            return observed(point, config, progress)[0]
    except PolicyFault as fault:
        return fault
    except ValueError as error:
        return PolicyError(str(error))


def observed(
    point: Point,
    config: RunConfig,
    progress: Callable[[float], None],
    *,
    out: Path | None = None,
    keep: bool = False,
) -> tuple[dict[str, Any], Run]:
    """Replay a configuration; the row of its run, and the run.

    Args:
        point: that it belongs to.
        config: with the trace opened.
        progress: called with the share that is done.
        out, keep: where its tables go, as `replay` takes them.
    """
    steps: list[Chunk] = []

    def watch(table: str, chunk: Chunk) -> None:
        if table == "steps":
            steps.append(chunk)

    run = replay(
        config,
        out=out,
        keep=keep,
        watch=watch,
        progress=share_of(config, progress),
    )
    # One that is kept is not watched.
    return row_of(point, run, steps or list(run.timeline.step_chunks())), run


def row_of(point: Point, run: Run, steps: Sequence[Chunk]) -> dict[str, Any]:
    """The row of a run; cache, prefetch and routing name what ran, which a system may
    have brought.
    """
    metrics = run.metrics
    served = metrics["requests"] or {}
    lane, share = busiest(run)
    options = {name: getattr(point.config, name) for name in options_schema()}
    options |= {"trace": point.trace_name, "hw": point.profile.name}
    for name in ("warm", "artefacts"):
        options[name] = None if options[name] is None else str(options[name])
    return {
        **options,
        **{name: run.config[name] for name in ("cache", "prefetch", "routing")},
        **{name: run.config[name] for name in _OF_CONFIG},
        **{name: metrics[name] for name in METRICS if name not in _BY_LANE},
        "routing_altered": metrics["routing"] != "recorded",
        "approximate": metrics["approximate"],
        "gate_mass_kept": metrics["gate_mass_kept"],
        "filling_share": metrics["filling_share"],
        "h2d_bytes": moved_bytes(metrics, "h2d"),
        "ssd_bytes": moved_bytes(metrics, "ssd"),
        "h2d_bytes_per_s": bytes_per_s(metrics, "h2d"),
        **{name: served.get(name) for name in _OF_REQUESTS},
        "busiest": lane,
        "busiest_share": share,
        "digest": point.digest,
        "trace_digest": point.trace_digest,
        "hw_digest": point.profile.digest,
        "files_digest": point.files_digest,
        "code": code_digest(),
        "lanes": json.dumps({name: metrics[name] for name in _BY_LANE}),
        "warnings": json.dumps(run.warnings),
        **times_of_batches(steps),
        **_sample_of_requests(metrics),
    }


def _sample_of_requests(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The times of a run with arrivals: one sample, as its requests wait for each
    other.
    """
    if metrics["requests"] is None:
        return {}
    return {
        "batch_decode_s": [metrics["tpot_s"] or 0.0],
        "batch_decode_tokens": [int(metrics["tpot_s"] is not None)],
        "batch_makespan_s": [metrics["makespan_s"]],
    }


def moved_bytes(metrics: Mapping[str, Any], link: str) -> int:
    """Bytes over all links of a kind."""
    return sum(
        count for lane, count in metrics["bytes"].items() if lane.startswith(link)
    )


def bytes_per_s(metrics: Mapping[str, Any], link: str) -> float | None:
    """Bandwidth of the links of a kind, over the seconds in which each was busy."""
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


def times_of_batches(steps: Sequence[Chunk]) -> dict[str, list[Any]]:
    """Seconds of each batch's decode steps, tokens that a sequence got in them (several
    of a step that verifies a draft), and seconds of the whole batch.

    Args:
        steps: chunks of a run's table of forward passes, in order.
    """
    names = ("batch", "phase", "tokens", "sequences", "start_s", "end_s")
    batch, phase, tokens, sequences, start_s, end_s = (
        np.concatenate([[], *(chunk[name] for chunk in steps)]) for name in names
    )
    first = np.flatnonzero(np.diff(batch, prepend=-1))
    last = np.append(first, len(batch))[1:] - 1
    # What lies between two steps belongs to the later one.
    before_s = np.append(0.0, end_s)[:-1]
    before_s[first] = start_s[first]
    is_decode = phase != Phase.PREFILL
    each = np.rint(tokens / sequences).astype(np.int64)
    return {
        "batch_decode_s": np.add.reduceat(
            (end_s - before_s) * is_decode, first
        ).tolist(),
        "batch_decode_tokens": np.add.reduceat(each * is_decode, first).tolist(),
        "batch_makespan_s": (end_s[last] - start_s[first]).tolist(),
    }


# -- a folder of results ---------------------------------------------------------------
# Results that are never lost: a folder of Parquet files, a row for each run.
#
# Every row is named by the digest of its run, so what is there need not be run again.
# Files have random names and are never changed; several processes may add to a folder
# at the same time, and a kill loses only what was not yet written.


LEAST_INTERVAL_S = 1.0
"""Seconds between two writes at the beginning of a sweep."""

SHARE_AT_RISK = 0.01
"""Of a long sweep, the share that a kill may cost: files stay few."""


class ResultsError(ValueError):
    """A folder that holds no results, a damaged file in it, or a wrong query."""


class ResultStore:
    """A folder of results.

    Args:
        folder: is made if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        if not str(folder):
            raise ResultsError(
                "results: expected a folder of results, got an empty name"
            )
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._waiting: list[Mapping[str, Any]] = []
        self._begin_s = time.monotonic()
        self._written_s = self._begin_s

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row; it is written at once or with the next ones."""
        self._waiting.append(row)
        now_s = time.monotonic()
        interval_s = max(LEAST_INTERVAL_S, SHARE_AT_RISK * (now_s - self._begin_s))
        if now_s - self._written_s >= interval_s:
            self.flush()

    def flush(self) -> None:
        """Write all rows that wait."""
        if self._waiting:
            file = self.folder / f"{uuid.uuid4().hex}.parquet"
            write_table(file, as_table(self._waiting), compression="zstd")
        self._waiting = []
        self._written_s = time.monotonic()


def read_results(
    folder: str | Path, digests: Collection[str] | None = None
) -> pa.Table:
    """Read the rows of a folder of results, each run once, in an order that does not
    depend on when they were written.

    A damaged file costs what it held: it is named in a warning, and the rest is read.

    Args:
        folder: of results.
        digests: rows to read; None reads all.

    Raises:
        ResultsError: no such folder, or nothing in it that can be read.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.parquet"))
    if not files and digests is None:
        raise ResultsError(
            f"{folder}: expected a folder of results, found none; `moesim sweep TRACE"
            f" --results {folder}` makes one"
        )
    # Rows of an older moesim may lack columns.
    tables = [as_table([])]
    damaged = []
    for file in files:
        try:
            tables.append(_read(file))
        except ResultsError as error:
            damaged.append(error)
    if digests is None and len(damaged) == len(files):
        raise damaged[0]
    for fault in damaged:
        warnings.warn(str(fault), stacklevel=2)
    table = pa.concat_tables(tables, promote_options="default")

    first: dict[str, int] = {}
    for place, digest in enumerate(table.column("digest").to_pylist()):
        if digests is None or digest in digests:
            first.setdefault(digest, place)
    places = [first[digest] for digest in sorted(first)]
    return table.take(pa.array(places, pa.int64()))


def _read(file: Path) -> pa.Table:
    try:
        check_seal(file)
        with open_parquet(file) as opened:
            # No column of another kind than ours, and none twice.
            pa.unify_schemas([row_schema(), opened.schema_arrow])
            table = read_table(opened, file)
        # Without them nobody could tell what was run.
        for name in ("digest", "trace_digest", "hw_digest"):
            if table.column(name).null_count:
                raise ResultsError(f"a row without {name}")
    # What Arrow raises of columns has no class of its own.
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise ResultsError(
            f"{file}: not a readable table of results: {reason}; remove it, and the"
            " sweep runs what it held again, or keep results in a folder of their own"
        ) from None
    return table


def results(folder: str | Path, *, details: bool = False) -> pd.DataFrame:
    """Read a folder of results as a data frame: one row for each run.

    Args:
        folder: of results, as ``moesim sweep --results`` fills it.
        details: keep the columns that only pages and statistics read.

    Raises:
        ResultsError: as `read_results`.
    """
    return as_frame(read_results(folder), details=details)


def query(folder: str | Path, sql: str) -> pd.DataFrame:
    """Answer a question.

    Args:
        folder: of results.
        sql: to the table ``runs``, in the dialect of DuckDB. Files cannot be read.

    Raises:
        ResultsError: no results, or a question that is no SQL or asks for what is not
            there.
    """
    # A tenth of a second that only questions need pay.
    import duckdb  # noqa: PLC0415

    with duckdb.connect(config={"enable_external_access": False}) as connection:
        connection.register("runs", read_results(folder))
        try:
            answer: pd.DataFrame = connection.sql(sql).df()
        except duckdb.Error as error:
            reason = str(error).split("\n\n")[0]
            raise ResultsError(f"--sql: {reason}") from None
        except AttributeError:
            # A statement that answers nothing.
            raise ResultsError("--sql: expected a question, got a command") from None
    return answer


def as_frame(
    table: pa.Table, *, axes: Sequence[str] = (), details: bool = False
) -> pd.DataFrame:
    """One row for each run.

    Traces and machines that share a name get the beginning of their digests behind it.

    Args:
        table: with the columns of `moesim.runs.sweeps.rows.row_schema`.
        axes: columns that come first; ``attrs["axes"]`` names them.
        details: keep the columns that only pages and statistics read.
    """
    names = [*axes, *(name for name in table.column_names if name not in axes)]
    if not details:
        names = [name for name in names if name not in DETAILS]
    frame: pd.DataFrame = table.select(names).to_pandas()
    for name in ("trace", "hw"):
        digest = frame[f"{name}_digest"]
        is_shared = digest.groupby(frame[name]).transform("nunique") > 1
        frame[name] = frame[name].where(
            ~is_shared, frame[name] + " (" + digest.str[:6] + ")"
        )
    frame.attrs["axes"] = list(axes)
    return frame
