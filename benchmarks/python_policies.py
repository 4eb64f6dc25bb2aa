"""Policies written in Python, in the compiled engine and in SimPy: layer steps per CPU
second of one core.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.replay_speed import MACHINE, ROUNDS, bench_trace
from moesim.policies.base import AssignmentPolicy, CachePolicy, PrefetchPolicy
from moesim.policies.registry import register
from moesim.runs.replay import replay

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext
    from moesim.traces.format.reader import Trace

TARGET = 30_000
"""Layer steps per second of any policy of a user."""


class OwnLRU(CachePolicy):
    """Evict the expert whose last use is oldest."""

    def start(self, context: RunContext) -> None:
        """Begin with no uses."""
        self._last_use = [0] * (context.shape.layers * context.shape.experts)
        self._layer_steps = 0

    def accessed(self, work: Work) -> None:
        """Note a use of each active expert."""
        self._layer_steps += 1
        for i in range(work.active):
            self._last_use[work.first + work.experts[i]] = self._layer_steps

    def admitted(self, key: int) -> None:
        """Count an entry as a use."""
        self._last_use[key] = self._layer_steps

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        """Name the oldest."""
        oldest_first = sorted(candidates, key=self._last_use.__getitem__)
        for n in range(len(incoming)):
            chosen[n] = oldest_first[n]


class OwnAssignment(AssignmentPolicy):
    """Compute what is resident on the GPU, and one expert more."""

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        """Place them."""
        del view, order
        for i in range(work.active):
            lanes[i] = work.state[i] > 0
        lanes[0] = 1
        return 0


class OwnPrefetch(PrefetchPolicy):
    """Prefetch, for the next layer, the experts with this layer's ids."""

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Name them."""
        if work.layer + 1 >= view.layers:
            return 0
        for i in range(work.active):
            named[i] = work.first + view.experts + work.experts[i]
        return work.active


def report() -> None:
    """Print both engines' layer steps per second, least seconds of several turns."""
    register("cache", "bench-own", OwnLRU)
    register("assignment", "bench-own", OwnAssignment)
    register("prefetch", "bench-own", OwnPrefetch)
    print(f"policies in Python, target {TARGET:,} layer steps/s")
    with tempfile.TemporaryDirectory() as name:
        trace = bench_trace(Path(name))
        for policy, cache, prefetch in (
            ("greedy", "bench-own", "none"),
            ("bench-own", "lru", "none"),
            ("bench-own", "bench-own", "none"),
            ("bench-own", "bench-own", "bench-own"),
        ):
            rates = {}
            for engine in ("fast", "simpy"):
                turns = [
                    _turn(trace, engine, policy, cache, prefetch)
                    for _ in range(ROUNDS + 1)
                ]
                rates[engine] = 1.0 / min(turns[1:])
            times = rates["fast"] / rates["simpy"]
            print(
                f"  {policy}+{cache}+{prefetch}: {rates['fast']:,.0f} layer"
                f" steps/s, {times:.1f} times SimPy's {rates['simpy']:,.0f}"
            )


def _turn(trace: Trace, engine: str, policy: str, cache: str, prefetch: str) -> float:
    """CPU seconds per layer step of one replay."""
    gc.collect()
    begin_s = time.process_time()
    run = replay(
        trace,
        policy,
        cache=cache,
        prefetch=prefetch,
        hw=MACHINE,
        engine=engine,
        cache_ratio=0.25,
        keep=False,
    )
    return (time.process_time() - begin_s) / run.metrics["layer_steps"]
