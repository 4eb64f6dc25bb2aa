"""A sweep of a thousand runs: 20 policies, 10 memories, 5 machines; seconds of the wall
clock on all cores, beside the same runs one by one.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import moesim
from benchmarks.replay_speed import MACHINE, ROUNDS, bench_trace
from moesim.base.host import available_cores

if TYPE_CHECKING:
    from moesim.traces.format.reader import Trace

TARGET_S = 60.0
"""For a thousand runs on two cores."""

_CACHES = (
    "lru",
    "lfu",
    "arc",
    "sieve",
    "s3-fifo",
    "clock",
    "slru",
    "lfru",
    "fifo",
    "decayed-frequency",
    "workload-window",
    "belady",
)
POLICIES = (
    *(f"greedy+{cache}" for cache in _CACHES),
    "on-demand+lru",
    "fiddler",
    "static-threshold+lru",
    "fixed-mapping+lru",
    "freetoken",
    "hybrimoe-schedule+lru",
    "smoe-balancer+lru",
    "all-cpu+none",
)
RATIOS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
MACHINES = (
    MACHINE,
    "rtx3080ti",
    "rtx4060ti",
    "rtx5060ti-ryzen9900x",
    "rtx5070ti-ryzen9600x",
)


def report() -> None:
    """Print the sweep's seconds, and how much of all cores one run after the other
    would use.
    """
    with tempfile.TemporaryDirectory() as name:
        trace = bench_trace(Path(name))
        begin_s = time.perf_counter()
        swept = moesim.sweep(
            trace, list(POLICIES), cache_ratio=list(RATIOS), hw=list(MACHINES)
        )
        swept_s = time.perf_counter() - begin_s
        single_s = min(_single_s(trace) for _ in range(ROUNDS))
    share = len(swept) * single_s / (swept_s * available_cores())
    print(
        f"sweep of {len(swept):,} runs of {trace.path.name}: {swept_s:.1f} s on"
        f" {available_cores()} cores (target {TARGET_S:.0f} on two); as many runs of"
        f" greedy with LRU alone would use {share:.0%} of that"
    )


def _single_s(trace: Trace) -> float:
    """CPU seconds of one run."""
    begin_s = time.process_time()
    moesim.replay(trace, "greedy", cache="lru", hw=MACHINE, cache_ratio=0.25)
    return time.process_time() - begin_s
