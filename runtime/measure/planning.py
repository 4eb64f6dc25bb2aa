"""Measures what planning one layer costs on this machine: the real planner, timed.

All of it is timed (costs, assignment, holds, accesses, victims), since all of it delays
the lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from moesim.hwprofiles.calibration.fit_curves import fit_line
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import load_profile
from moesim.policies.parameters import REQUIRED
from moesim.policies.planner.at_once import carry_out
from moesim.policies.planner.plan import MemoryPlan
from moesim.policies.planner.planner import Planner
from moesim.policies.planner.residency import CacheSize
from moesim.policies.registry import describe
from moesim.policies.systems import System
from moesim.runtime.measure.timing import Operation, Timer, once_s, sample
from moesim.traces.format.batch import RoutedLayer
from moesim.traces.format.schema import ModelShape, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.planner.plan import Plan
    from moesim.runtime.measure.measurements import Measurements

DEFAULT: Final = "greedy"
_KEYS: Final = ("base_s", "per_expert_s")

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
        measurements.line(f"costs.planning.{name}", _KEYS, line, source)
        if len(by_active) > 2:  # a line meets two points whatever they are
            measurements.report(f"planning-{name}", line.report)
        if name == DEFAULT:
            measurements.line(
                "costs.planning.default",
                _KEYS,
                line,
                f"{source}; taken for policies that were not measured",
            )


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
    plans: list[Plan] = []

    def once(_: Operation, index: int) -> float:
        plans.clear()
        step, layer = divmod(index, _LAYERS)
        # Any clock will do, as long as it does not stand still.
        now_s = float(index)
        spent_s = once_s(
            lambda _: plans.append(
                planner.plan(layers[layer], step, Phase.DECODE, now_s)
            ),
            index,
        )
        carry_out(planner, plans[0], now_s + 0.5)
        return spent_s

    # Two steps first: kernels are compiled, and the cache fills.
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
