"""Measures what the control thread does: handing work out, and planning one layer with
the real planner.

All of it is timed (costs, assignment, holds, accesses, victims), since all of it delays
the lanes.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from moesim.engine.at_once import carry_out
from moesim.engine.planner import Planner
from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.fit_curves import fit_line
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import load_profile
from moesim.policies.parameters import REQUIRED
from moesim.policies.registry import describe
from moesim.policies.sizes import CacheSize, MemoryPlan
from moesim.policies.systems import System
from moesim.runtime.measure.sampling import Operation, Timer, once_s, sample
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.schema import ModelShape, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.runtime.measure.sampling import Measurements

_OPERATIONS: Final = 64
_FEWEST: Final = 20

# The first hand-offs map pages and meet cold caches.
_WARM_UP: Final = 5

# About as long as planning a layer: meanwhile the lane's thread goes to sleep.
_PLANNING_S: Final = 2e-4

_Operations: TypeAlias = "list[Callable[[], None]] | None"
_SOURCES: Final = {
    "first_op_s": "from handing a list of operations to a sleeping thread until it"
    " starts",
    "per_op_s": f"each of {_OPERATIONS} empty operations with its two time stamps",
    "join_s": "from the thread's end until the waiting thread runs again",
}


def measure_dispatch(measurements: Measurements, *, seconds: float) -> None:
    """Measure a hand-off of a list of empty operations to a waiting thread, and the way
    back.
    """
    inbox: SimpleQueue[_Operations] = SimpleQueue()
    outbox: SimpleQueue[tuple[int, int]] = SimpleQueue()
    thread = threading.Thread(
        target=_lane, args=(inbox, outbox), name="measured-lane", daemon=True
    )
    thread.start()

    times_ns: dict[str, list[float]] = {key: [] for key in _SOURCES}
    operations: list[Callable[[], None]] = [_nothing] * _OPERATIONS
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(times_ns["first_op_s"]) < _FEWEST:
        _busy_wait(_PLANNING_S)
        handed_ns = time.perf_counter_ns()
        inbox.put(operations)
        started_ns, ended_ns = outbox.get()
        joined_ns = time.perf_counter_ns()
        times_ns["first_op_s"].append(started_ns - handed_ns)
        times_ns["per_op_s"].append((ended_ns - started_ns) / _OPERATIONS)
        times_ns["join_s"].append(joined_ns - ended_ns)
    inbox.put(None)
    thread.join()

    for key, source in _SOURCES.items():
        samples = np.asarray(times_ns[key][_WARM_UP:]) * 1e-9
        measurements.number(f"costs.dispatch.{key}", samples, source)


def _lane(
    inbox: SimpleQueue[_Operations], outbox: SimpleQueue[tuple[int, int]]
) -> None:
    """Do operations as a lane does, two time stamps each, until None comes."""
    while (operations := inbox.get()) is not None:
        begin_ns = time.perf_counter_ns()
        spans = []
        for operation in operations:
            start_ns = time.perf_counter_ns()
            operation()
            spans.append((start_ns, time.perf_counter_ns()))
        outbox.put((begin_ns, time.perf_counter_ns()))


def _busy_wait(seconds: float) -> None:
    """Keep this thread's core busy, as planning does."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def _nothing() -> None:
    """Do nothing: the operation is free, its hand-off is not."""


DEFAULT: Final = "greedy"

_LAYERS: Final = 8
_EXPERTS: Final = 128
_CACHE_RATIO: Final = 0.25
_PROFILE: Final = "rtx3090-epyc7532"

# Qwen3-30B-A3B's, in bfloat16.
_HIDDEN: Final = 2048
_INTERMEDIATE: Final = 768
_EXPERT_BYTES: Final = 9_437_184

_SLOW_S: Final = 0.01
"""An exact solver's time grows fast: layers larger than one that took this long are
extrapolated.
"""


def measure_planning(
    measurements: Measurements, active: Sequence[int], *, seconds: float
) -> None:
    """Measure every assignment policy by the number of active experts, with an LRU
    cache and no prefetch.

    Policies that read optional trace columns are left out: what they do depends on what
    those hold.

    Args:
        measurements: receive ``costs.planning``.
        active: numbers of active experts, ascending.
        seconds: to spend.
    """
    # A policy with a required parameter has no default to be measured with.
    names = [
        policy.name
        for policy in describe("assignment")
        if not policy.needs
        and not any(parameter.default is REQUIRED for parameter in policy.parameters)
    ]
    share_s = seconds / (len(names) * len(active))
    for name in names:
        by_active = _by_active(name, active, share_s)
        line = fit_line(by_active)
        counts = ", ".join(map(str, by_active))
        source = (
            f"the planner with {name} and lru, line through {counts} active experts"
        )
        measurements.put_fit(paths.planning(name)[:2], line, source)
        if len(by_active) > 2:  # a line meets two points whatever they are
            measurements.report(f"planning-{name}", line.report)
        if name == DEFAULT:
            others = f"{source}; taken for policies that were not measured"
            default = paths.planning(paths.DEFAULT_POLICY)
            measurements.put_fit(default[:2], line, others)


def _by_active(
    name: str, active: Sequence[int], seconds: float
) -> dict[int, np.ndarray]:
    """Time planned layer steps of each size until one, but at least two, took long."""
    times: dict[int, np.ndarray] = {}
    for count in active:
        times[count] = sample(
            lambda _: None, seconds, once=_planning_timer(name, count)
        )
        # Two sizes at least: a line needs them.
        if len(times) > 1 and np.median(times[count]) > _SLOW_S:
            break
    return times


def _planning_timer(name: str, active: int) -> Timer:
    """Return a timer of one planned layer step; its copies land and it joins outside
    the timing.
    """
    planner = _planner(name)
    rng = np.random.default_rng(0)
    layers = [_routed(rng, layer, active) for layer in range(_LAYERS)]
    step = RoutedStep(
        step=0,
        phase=Phase.DECODE,
        batch=0,
        tokens=1,
        context_tokens=1,
        sequences=1,
        layers=layers,
    )
    planner.put(planner.block_of(step))

    def once(_: Operation, index: int) -> float:
        # Any clock will do, as long as it does not stand still.
        now_s = float(index)
        layer = index % _LAYERS
        spent_s = once_s(lambda _: planner.plan(layer, now_s), index)
        carry_out(planner, now_s + 0.5)
        return spent_s

    # Two steps first: the cache fills.
    warm_up = 2 * _LAYERS
    for index in range(warm_up):
        once(lambda _: None, index)
    return lambda work, index: once(work, index + warm_up)


def _planner(name: str) -> Planner:
    """Build a planner for one GPU with a quarter of the experts."""
    expert_bytes = (_EXPERT_BYTES,) * _LAYERS
    shape = ModelShape(
        name="planning",
        layers=_LAYERS,
        experts=_EXPERTS,
        top_k=8,
        hidden=_HIDDEN,
        expert_intermediate=_INTERMEDIATE,
        expert_bytes=expert_bytes,
        other_bytes=0,
    )
    return Planner(
        shape,
        Costs(load_profile(_PROFILE), shape),
        System(name).build(gpus=1, host_cache=None),
        MemoryPlan(gpu=CacheSize.of(expert_bytes, _EXPERTS, ratio=_CACHE_RATIO)),
    )


def _routed(rng: np.random.Generator, layer: int, active: int) -> RoutedLayer:
    """Draw a layer with `active` experts, one to four tokens each."""
    experts = np.sort(rng.choice(_EXPERTS, active, replace=False)).astype(np.int32)
    tokens = rng.integers(1, 5, active).astype(np.int32)
    # One expert per token gives each expert exactly its workload.
    routing = np.repeat(experts, tokens).astype(np.uint16).reshape(-1, 1)
    return RoutedLayer(
        layer=layer,
        experts=experts,
        tokens=tokens,
        routing=routing,
        weights=None,
        scores=None,
        predicted={},
    )
