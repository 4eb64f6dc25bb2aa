"""Caches alone, in accesses per second of CPU time, beside libCacheSim on the same
stream.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from benchmarks.replay_speed import SHARED, SHIPPED
from moesim.policies import cache_replay
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import layer_steps
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape

if TYPE_CHECKING:
    from moesim.policies.base import CachePolicy


def report() -> None:
    """Print our rate (trace reading and composing included) and libCacheSim's (its own
    reader, mapped file).
    """
    with tempfile.TemporaryDirectory() as name:
        trace = _trace(Path(name))
        shape = trace.shape
        size = CacheSize.of(
            shape.expert_bytes, shape.experts, scope="global", ratio=0.25
        )
        per_layer = CacheSize.of(shape.expert_bytes, shape.experts, ratio=0.25)
        print(
            f"caches alone on {trace.path.name}, a quarter of the experts; million"
            " accesses per second"
        )
        future = RecordedFuture.of(trace)
        for spec in ("lru", "belady"):
            for scope, sized in (("per layer", per_layer), ("global", size)):
                rates = []
                for _ in range(3):
                    begin_s = time.process_time()
                    counts = cache_replay.replay(
                        cast("CachePolicy", resolve(spec, "cache")),
                        spec,
                        shape,
                        sized,
                        layer_steps(trace),
                        future=future,
                    )
                    rates.append(
                        counts.accesses / (time.process_time() - begin_s) / 1e6
                    )
                print(
                    f"  {spec:6} {scope:9} {np.median(rates):6.2f}  (target 1), hit"
                    f" rate {counts.hit_rate:.4f}"
                )
        _libcachesim(trace, int(size.slots[0]), Path(name))


def _trace(folder: Path) -> Trace:
    source = SHARED / "gpt_oss_20b.parquet"
    if not source.is_file():
        return open_trace(SHIPPED)
    import_trace(source, folder / "g.parquet", shape=model_shape("gpt-oss-20b"))
    return open_trace(folder / "g.parquet")


def _libcachesim(trace: Trace, capacity: int, folder: Path) -> None:
    """The yardstick's rate over the same accesses, one request each."""
    try:
        import libcachesim as lcs
    except ImportError:
        print("  libCacheSim is not installed: not measured")
        return
    record = np.dtype(
        [("time", "<u4"), ("key", "<u8"), ("bytes", "<u4"), ("next", "<i8")]
    )
    keys = np.concatenate(
        [
            np.repeat(b.layer * trace.shape.experts, np.diff(b.edges)) + b.experts
            for b in layer_steps(trace)
        ]
    )
    rows = np.zeros(len(keys), record)
    rows["time"] = np.arange(len(keys))
    rows["key"] = keys + 1
    rows["bytes"] = 1
    last: dict[int, int] = {}
    following = np.full(len(keys), -1, np.int64)
    for i in range(len(keys) - 1, -1, -1):
        key = int(keys[i])
        following[i] = last.get(key, -1)
        last[key] = i
    rows["next"] = following
    path = folder / "accesses.oracleGeneral"
    path.write_bytes(rows.tobytes())
    params = lcs.ReaderInitParam(ignore_obj_size=True)
    for name, kind in (("LRU", lcs.LRU), ("Belady", lcs.Belady)):
        rates = []
        for _ in range(3):
            reader = lcs.TraceReader(
                str(path), lcs.TraceType.ORACLE_GENERAL_TRACE, params
            )
            cache = kind(cache_size=capacity)
            begin_s = time.process_time()
            miss, _ = cache.process_trace(reader)
            rates.append(len(keys) / (time.process_time() - begin_s) / 1e6)
        print(
            f"  libCacheSim {name:6} global {np.median(rates):6.2f}, hit rate"
            f" {1 - miss:.4f}"
        )
