"""Policies written in Python, in the compiled engine and in SimPy: layer steps per CPU
second of one core.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.replay_speed import MACHINE, ROUNDS, bench_trace
from moesim.policies.base import AssignmentPolicy, CachePolicy, PrefetchPolicy
from moesim.policies.planner.records import Assignment, ExpertKey
from moesim.policies.registry import register
from moesim.runs.replay import replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import MachineView
    from moesim.policies.planner.records import LayerWork
    from moesim.policies.run_context import RunContext
    from moesim.traces.format.reader import Trace

TARGET = 30_000
"""Layer steps per second of any policy of a user."""


class OwnLRU(CachePolicy):
    """Evict the expert whose last use is oldest."""

    def start(self, context: RunContext) -> None:
        """Begin with no uses."""
        self._experts = context.shape.experts
        self._last_use = np.zeros(context.shape.layers * self._experts)
        self._layer_steps = 0

    def accessed(self, work: LayerWork) -> None:
        """Note a use of each active expert."""
        self._layer_steps += 1
        self._last_use[work.layer * self._experts + work.experts] = self._layer_steps

    def admitted(self, keys: np.ndarray) -> None:
        """Count an entry as a use."""
        self._last_use[keys] = self._layer_steps

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Name the oldest."""
        oldest_first = np.argsort(self._last_use[candidates], kind="stable")
        return candidates[oldest_first[: len(incoming)]]


class OwnAssignment(AssignmentPolicy):
    """Compute what is resident on the GPU, and one expert more."""

    def assign(self, work: LayerWork, view: MachineView) -> Assignment:
        """Place them."""
        del view
        lanes = (work.state > 0).astype(np.int8)
        lanes[:1] = 1
        return Assignment(lanes)


class OwnPrefetch(PrefetchPolicy):
    """Prefetch, for the next layer, the experts with this layer's ids."""

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Name them."""
        following = work.layer + 1
        if following >= view.layers:
            return ()
        return [ExpertKey(following, expert) for expert in work.experts.tolist()]


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
