"""What planning one layer costs on this machine: the real planner, asked again and again.

The whole of it is timed (costs, assignment, holds, accesses, victims), since all of it delays the lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from hwprofiles.costs import Costs
from hwprofiles.fit import fit_line
from hwprofiles.profile import load_profile
from policies.plan import MemoryPlan
from policies.planner import Planner
from policies.residency import CacheSize
from policies.systems import System
from runtime.measure_timing import Findings, once_s, sample
from traces.batch import RoutedLayer
from traces.schema import ModelShape, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policies.plan import Plan

ACTIVE: Final = (4, 8, 32, 128)
ACTIVE_SOLVER: Final = (2, 4, 8)
"""An exact solver's time grows fast; larger layers are extrapolated."""

POLICIES: Final = ("greedy", "all-cpu", "on-demand", "static-threshold", "beam", "ilp")
DEFAULT: Final = "greedy"
_LAYERS, _EXPERTS = 8, 128


def measure_planning(findings: Findings, names: Sequence[str], *, seconds: float) -> None:
    """Measure each assignment policy by the number of active experts, with an LRU cache and no prefetch."""
    for name in names:
        counts = ACTIVE_SOLVER if name == "ilp" else ACTIVE
        by_active = {
            count: sample(lambda _: None, seconds / (len(names) * len(counts)), once=_planning(name, count))
            for count in counts
        }
        line = fit_line(by_active)
        source = f"the planner with {name} and lru, line through {', '.join(map(str, counts))} active experts"
        findings.line(f"costs.planning.{name}", ("base_s", "per_expert_s"), line, source)
        findings.report(f"planning-{name}", line.report)
        if name == DEFAULT:
            words = f"{source}; taken for policies that were not measured"
            findings.line("costs.planning.default", ("base_s", "per_expert_s"), line, words)


def _planning(name: str, active: int) -> Callable[[Callable[[int], object], int], float]:
    """Return a timer of one planned layer step; its copies land and it joins outside the timing."""
    shape = ModelShape("planning", _LAYERS, _EXPERTS, 8, 2048, 768, (9_437_184,) * _LAYERS, other_bytes=0)
    size = CacheSize.of(shape.expert_bytes, _EXPERTS, ratio=0.25)
    costs = Costs(load_profile("rtx3090-epyc7532"), shape)
    planner = Planner(shape, costs, System(name).build(gpus=1, host_cache=None), MemoryPlan(gpu=size))
    rng = np.random.default_rng(0)
    layers = [_routed(rng, layer, active) for layer in range(_LAYERS)]
    plans: list[Plan] = []

    def once(_: Callable[[int], object], index: int) -> float:
        plans.clear()
        step, layer = divmod(index, _LAYERS)
        now_s = float(index)
        spent_s = once_s(lambda _: plans.append(planner.plan(layers[layer], step, Phase.DECODE, now_s)), index)
        for copies in plans[0].copies:
            for expert in copies.experts:
                planner.landed(copies.gpu, copies.layer, expert)
        planner.complete(plans[0], now_s + 0.5)
        return spent_s

    for index in range(2 * _LAYERS):  # compile what is compiled, fill what is filled
        once(lambda _: None, index)
    return lambda work, index: once(work, index + 2 * _LAYERS)


def _routed(rng: np.random.Generator, layer: int, active: int) -> RoutedLayer:
    """Draw a layer with `active` experts, one to four tokens each."""
    experts = np.sort(rng.choice(_EXPERTS, active, replace=False)).astype(np.int32)
    tokens = rng.integers(1, 5, active).astype(np.int32)
    routing = np.repeat(experts, tokens).astype(np.uint16).reshape(-1, 1)
    return RoutedLayer(layer, experts, tokens, routing, None, None, {})
