"""What planning one layer costs on this machine: the real planner, asked again and
again.

The whole of it is timed (costs, assignment, holds, accesses, victims), since all of it
delays the lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from moesim.hwprofiles.calibration.fit_curves import fit_line
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import load_profile
from moesim.policies.parameters import REQUIRED
from moesim.policies.planner.plan import MemoryPlan
from moesim.policies.planner.planner import Planner
from moesim.policies.planner.residency import CacheSize
from moesim.policies.registry import describe
from moesim.policies.systems import System
from moesim.runtime.measure.timing import Findings, once_s, sample
from moesim.traces.format.batch import RoutedLayer
from moesim.traces.format.schema import ModelShape, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.policies.planner.plan import Plan

DEFAULT: Final = "greedy"
_LAYERS = 8
_EXPERTS = 128
_SLOW_S: Final = 0.01
"""An exact solver's time grows fast: layers larger than one that took this long are
extrapolated.
"""


def measure_planning(
    findings: Findings, active: Sequence[int], *, seconds: float
) -> None:
    """Measure every assignment policy by the number of active experts, with an LRU
    cache and no prefetch.

    Policies that read optional trace columns are left out: what they do depends on what
    those hold.
    """
    names = [
        policy.name
        for policy in describe("assignment")
        if not policy.needs
        and not any(one.default is REQUIRED for one in policy.parameters)
    ]
    for name in names:
        by_active = _by_active(name, active, seconds / (len(names) * len(active)))
        line = fit_line(by_active)
        source = (
            f"the planner with {name} and lru, line through"
            f" {', '.join(map(str, by_active))} active experts"
        )
        findings.line(
            f"costs.planning.{name}", ("base_s", "per_expert_s"), line, source
        )
        if len(by_active) > 2:  # a line meets two points whatever they are
            findings.report(f"planning-{name}", line.report)
        if name == DEFAULT:
            words = f"{source}; taken for policies that were not measured"
            findings.line(
                "costs.planning.default", ("base_s", "per_expert_s"), line, words
            )


def _by_active(
    name: str, active: Sequence[int], seconds: float
) -> dict[int, np.ndarray]:
    """Time planned layer steps of each size until one, but at least two, took long."""
    found: dict[int, np.ndarray] = {}
    for count in active:
        found[count] = sample(lambda _: None, seconds, once=_planning(name, count))
        if len(found) > 1 and np.median(found[count]) > _SLOW_S:
            break
    return found


def _planning(
    name: str, active: int
) -> Callable[[Callable[[int], object], int], float]:
    """Return a timer of one planned layer step; its copies land and it joins outside
    the timing.
    """
    shape = ModelShape(
        "planning",
        _LAYERS,
        _EXPERTS,
        8,
        2048,
        768,
        (9_437_184,) * _LAYERS,
        other_bytes=0,
    )
    size = CacheSize.of(shape.expert_bytes, _EXPERTS, ratio=0.25)
    costs = Costs(load_profile("rtx3090-epyc7532"), shape)
    planner = Planner(
        shape, costs, System(name).build(gpus=1, host_cache=None), MemoryPlan(gpu=size)
    )
    rng = np.random.default_rng(0)
    layers = [_routed(rng, layer, active) for layer in range(_LAYERS)]
    plans: list[Plan] = []

    def once(_: Callable[[int], object], index: int) -> float:
        plans.clear()
        step, layer = divmod(index, _LAYERS)
        now_s = float(index)
        spent_s = once_s(
            lambda _: plans.append(
                planner.plan(layers[layer], step, Phase.DECODE, now_s)
            ),
            index,
        )
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
