"""Replays a policy with any of its parts replaced by parts that know the future.

Trace, machine and memories stay the same; what is replaced is a *mix*: part -> its
substitute.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from moesim.engine.observers import observed_policy
from moesim.engine.planner import Planner
from moesim.policies.assignment._optimum import (
    modelled_s,
    optimal,
    optimal_scheduled,
    scheduled_s,
)
from moesim.policies.delegating import DelegatingCache, context_for
from moesim.policies.names import CPU
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.policies.systems import System
from moesim.reporting.parts import records
from moesim.runs.setup import load_artefacts
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moesim.engine.observers import Observer
    from moesim.hwprofiles.costs import Costs
    from moesim.policies.base import CachePolicy
    from moesim.policies.run_context import Future, RunContext
    from moesim.runs.setup import Setup
    from moesim.sim.results import ReplayResult

EVICTION = "eviction"
ASSIGNMENT = "assignment"
PREFETCH = "prefetch"
PLANNING = "planning"
PARTS = (EVICTION, ASSIGNMENT, PREFETCH, PLANNING)
CEILING = System(
    assignment="exact:objective=scheduled", cache="foresight", prefetch="foresight"
)
"""What parts are replaced by, unless the clairvoyant system's rules are searched. The
scheduled objective knows that copies follow each other on a link.
"""
FREE = "in no time"


class SameStart(DelegatingCache):
    """One policy's rules from another one's initial content."""

    def __init__(self, rule: CachePolicy, start_of: CachePolicy) -> None:
        super().__init__(rule)
        # Whatever the rules are, they must be given the future to hand it on.
        self.oracle = True  # type: ignore[misc] # for this pair of rules
        self.start_of = start_of
        self.needs = (*rule.needs, *start_of.needs)

    def start(self, context: RunContext) -> None:
        """Start both."""
        # Its random draws and calibration may decide what it begins with.
        self.start_of.start(context_for(self.start_of, context))
        super().start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Return what the other one would begin with."""
        return self.start_of.initial(capacity_slots)


def cache_of(spec: str) -> CachePolicy:
    """A fresh cache policy."""
    return cast("CachePolicy", resolve(spec, "cache"))


@dataclass(frozen=True, slots=True)
class MixReplays:
    """One run, replayed with any of its policy's parts replaced.

    Attributes:
        setup: trace, machine, memories and the policy under study.
        walk: walks a planner through the trace.
        future: of the same passes.
        ceiling: what parts are replaced by.
    """

    setup: Setup
    walk: Callable[[Planner, Timeline], ReplayResult]
    future: Future
    ceiling: System = CEILING

    def parts(self) -> dict[str, tuple[str, str]]:
        """Part -> its specification and its substitute, where they differ; planning is
        named after the assignment it is charged for, and always replaced.
        """
        ours, theirs = self.setup.system, self.ceiling
        parts = {
            EVICTION: (ours.cache, theirs.cache),
            ASSIGNMENT: (ours.assignment, theirs.assignment),
            PREFETCH: (ours.prefetch, theirs.prefetch),
            PLANNING: (ours.assignment.partition(":")[0], FREE),
        }
        # A part that is its own substitute would double the replays for nothing.
        return {part: both for part, both in parts.items() if both[0] != both[1]}

    def replay_s(self, mix: Mapping[str, str], *observers: Observer) -> float:
        """Return the makespan with some parts replaced, in virtual seconds.

        A replaced cache starts with what the policy's own cache starts with, so only
        evictions and admissions differ. Decisions are charged as those of the policy's
        own assignment unless planning is replaced. The cache of limited host memory is
        never replaced.

        Args:
            mix: part -> its substitute; other parts stay.
            observers: of the assignment policy's answers.

        Raises:
            PolicyError: a policy answered something illegal.
        """
        setup = self.setup
        ours = setup.system
        system = replace(
            ours,
            assignment=mix.get(ASSIGNMENT, ours.assignment),
            prefetch=mix.get(PREFETCH, ours.prefetch),
        )
        host_cache = setup.config.host_cache if setup.memory.host else None
        policies = system.build(gpus=setup.profile.gpus, host_cache=host_cache)
        # Planning seconds are looked up by this name.
        policies.names = {**policies.names, "assignment": ours.assignment}
        if EVICTION in mix:
            # One instance per GPU: caches keep state of their own.
            policies.caches = [
                SameStart(cache_of(mix[EVICTION]), cache) for cache in policies.caches
            ]
        for observer in observers:
            policies.assignment = observed_policy(
                policies.assignment, observer, calls=("assign",)
            )
        costs = setup.costs()
        planner = Planner(
            setup.shape,
            without_planning(costs) if PLANNING in mix else costs,
            policies,
            setup.memory,
            seed=setup.config.seed,
            future=self.future,
            calibration=setup.calibration,
            extras=load_artefacts(setup.config.artefacts),
        )
        timeline = Timeline(setup.profile.lanes)
        result = self.walk(planner, timeline)
        timeline.close()
        return result.makespan_s

    def ceiling_s(self) -> float:
        """Return the makespan with all parts replaced."""
        return self.replay_s({part: both[1] for part, both in self.parts().items()})

    def resident_s(self) -> float:
        """Return the makespan if all experts were on the GPUs from the start, with the
        ceiling's assignment and no planning time.
        """
        setup = copy(self.setup)
        all_experts = CacheSize.for_model(setup.shape, ratio=1.0)
        setup.memory = replace(setup.memory, gpu=all_experts, host=None)
        # A static cache is filled from the start, and asks for no copy.
        setup.system = System(self.ceiling.assignment, cache="static:fill=lowest")
        return replace(self, setup=setup).replay_s({PLANNING: FREE})


def without_planning(costs: Costs) -> Costs:
    """The same costs, with decisions that take no time."""
    free = copy(costs)
    vars(free).update(planning_terms=lambda *_, **__: (0.0,) * 4)
    return free


PROVEN = 1e-9
"""Relative difference below which two makespans are equal: solver and simulator add in
different orders.
"""


@dataclass(slots=True)
class Grades:
    """How far each layer step's assignment is from the best lanes for the same state of
    the machine.

    Attributes:
        modelled: chosen makespan over the least, with lanes as sums of costs (what most
            policies minimise).
        scheduled: the same with copies that follow each other on their link.
        chosen_s: modelled makespan, summed over layer steps.
        least_s: the least modelled makespan, likewise.
        unproven: layer steps for which the solver ran out of memory; their ratio may be
            too small.
    """

    modelled: list[float] = field(default_factory=list)
    scheduled: list[float] = field(default_factory=list)
    chosen_s: float = 0.0
    least_s: float = 0.0
    unproven: int = 0

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Grade one answer; layer steps that cost nothing are left out.

        An observer of `AssignmentPolicy.assign` (`moesim.engine.observers`).
        """
        del call, answer
        work, _, given_lanes, given_order = arguments
        modelled = optimal(work)
        scheduled = optimal_scheduled(work)
        if not modelled.makespan_s or not scheduled.makespan_s:
            return

        # Both ratios compare like with like: each model prices both plans. The CPU
        # computes what is deferred, too.
        lanes = np.maximum(np.asarray(given_lanes), CPU)
        chosen_s = modelled_s(work, lanes)
        chosen_scheduled_s = scheduled_s(work, lanes, np.asarray(given_order))
        self.modelled.append(chosen_s / modelled.makespan_s)
        self.scheduled.append(chosen_scheduled_s / scheduled.makespan_s)
        self.chosen_s += chosen_s
        self.least_s += modelled.makespan_s

        # A solver that stopped early knows a bound below its best answer.
        self.unproven += any(
            best.bound_s < best.makespan_s * (1.0 - PROVEN)
            for best in (modelled, scheduled)
        )

    def statistics(self) -> pd.DataFrame:
        """Mean, 95th percentile, maximum and share of optimal answers, a row for each
        ratio.
        """
        ratios = pd.DataFrame(
            {"modelled": self.modelled, "scheduled": self.scheduled}, dtype=float
        )
        columns = {
            "mean": ratios.mean(),
            "p95": ratios.quantile(0.95),
            "max": ratios.max(),
            "optimal_share": (ratios <= 1.0 + PROVEN).mean(),
        }
        return pd.DataFrame(columns)

    def to_json(self) -> dict[str, Any]:
        """Return `statistics` by ratio; null without layer steps."""
        rows = records(self.statistics())
        return {
            "layer_steps": len(self.modelled),
            "unproven": self.unproven,
            **dict(zip(("modelled", "scheduled"), rows, strict=True)),
            # Weighted by seconds: a bad plan of a short layer step costs little.
            "total_ratio": self.chosen_s / self.least_s if self.least_s else None,
        }
