"""Replays a policy with any of its parts replaced by parts that know the future.

Trace, machine and memories stay the same; what is replaced is a *mix*: part -> its
substitute.
"""

from __future__ import annotations

from array import array
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moesim.engine.observers import observed_policy
from moesim.engine.planner import Planner
from moesim.policies.assignment._optimum import (
    modelled_s,
    optimal,
    optimal_scheduled,
    scheduled_s,
)
from moesim.policies.names import CPU
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.policies.systems import System
from moesim.questions.gap_eviction import SameStart
from moesim.sim.replay import Replay
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from moesim.engine.observers import Observer
    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.base import CachePolicy
    from moesim.policies.run_context import Future
    from moesim.policies.sizes import MemoryPlan
    from moesim.policies.systems import Policies
    from moesim.sim.results import ReplayResult
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

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


def without_planning(costs: Costs) -> Costs:
    """The same costs, with decisions that take no time."""
    free = copy(costs)
    vars(free).update(planning_terms=lambda *_, **__: (0.0,) * 4)
    return free


@dataclass(frozen=True, slots=True)
class MixReplays:
    """One trace on one machine, replayed with any of a policy's parts replaced.

    Attributes:
        shape: the model.
        profile: the machine.
        costs: its seconds.
        memory: sizes of memories, the same for all mixes.
        system: the policy under study.
        passes: gives the forward passes anew.
        future: of the same passes.
        ceiling: what parts are replaced by.
        host_cache: cache policy of limited host memory; never replaced.
        seed: for policies that draw.
        calibration: activation counts float64 [L, E] that may fill caches.
        extras: calibration artefacts by name.
        walk: carries a planner through the same passes; None takes them one by one.
    """

    shape: ModelShape
    profile: HardwareProfile
    costs: Costs
    memory: MemoryPlan
    system: System
    passes: Callable[[], Iterable[RoutedStep]]
    future: Future
    ceiling: System = CEILING
    host_cache: str = "lru"
    seed: int = 0
    calibration: np.ndarray | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    walk: Callable[[Planner, Timeline], ReplayResult] | None = None

    def specifications(self) -> dict[str, str]:
        """Part -> specification under study; planning is named after the assignment it
        is charged for.
        """
        system = self.system
        return {
            EVICTION: system.cache,
            ASSIGNMENT: system.assignment,
            PREFETCH: system.prefetch,
            PLANNING: system.assignment.partition(":")[0],
        }

    def substitutes(self) -> dict[str, str]:
        """Part -> its substitute, for parts that differ from theirs; planning always
        does.
        """
        # A part that is its own substitute would double the replays for nothing.
        ceiling = self.ceiling
        of_ceiling = {
            EVICTION: ceiling.cache,
            ASSIGNMENT: ceiling.assignment,
            PREFETCH: ceiling.prefetch,
            PLANNING: FREE,
        }
        under_study = self.specifications()
        return {
            part: substitute
            for part, substitute in of_ceiling.items()
            if substitute != under_study[part]
        }

    def replay_s(
        self,
        mix: Mapping[str, str],
        grades: Grades | None = None,
        *,
        observer: Observer | None = None,
    ) -> float:
        """Return the makespan with some parts replaced, in virtual seconds.

        A replaced cache starts with what the policy's own cache starts with, so only
        evictions and admissions differ. Decisions are charged as those of the policy's
        own assignment unless planning is replaced.

        Args:
            mix: part -> its substitute; other parts stay.
            grades: collects the quality of every assignment.
            observer: of the assignment policy's answers.

        Raises:
            PolicyError: a policy answered something illegal.
        """
        policies = self._policies(mix)
        for watching in (grades, observer):
            if watching is not None:
                policies.assignment = observed_policy(
                    policies.assignment, watching, calls=("assign",)
                )
        return self._run(policies, self.memory, free=PLANNING in mix)

    def ceiling_s(self) -> float:
        """Return the makespan with all parts replaced."""
        return self.replay_s(self.substitutes())

    def resident_s(self) -> float:
        """Return the makespan if all experts were on the GPUs from the start, with the
        ceiling's assignment and no planning time.
        """
        all_experts = CacheSize.for_model(self.shape, ratio=1.0)
        memory = replace(self.memory, gpu=all_experts, host=None)
        # A static cache is filled from the start, and asks for no copy.
        system = System(assignment=self.ceiling.assignment, cache="static:fill=lowest")
        policies = system.build(gpus=self.profile.gpus, host_cache=None)
        return self._run(policies, memory, free=True)

    def _policies(self, mix: Mapping[str, str]) -> Policies:
        system = self.system
        if ASSIGNMENT in mix:
            system = replace(system, assignment=mix[ASSIGNMENT])
        if PREFETCH in mix:
            system = replace(system, prefetch=mix[PREFETCH])
        policies = system.build(
            gpus=self.profile.gpus,
            host_cache=self.host_cache if self.memory.host else None,
        )
        # Planning seconds are looked up by this name.
        policies.names = {**policies.names, "assignment": self.system.assignment}

        if EVICTION in mix:
            # One instance per GPU: caches keep state of their own.
            spec = mix[EVICTION]
            policies.caches = [
                SameStart(cast("CachePolicy", resolve(spec, "cache")), cache)
                for cache in policies.caches
            ]
        return policies

    def _run(self, policies: Policies, memory: MemoryPlan, *, free: bool) -> float:
        costs = without_planning(self.costs) if free else self.costs
        planner = Planner(
            self.shape,
            costs,
            policies,
            memory,
            seed=self.seed,
            future=self.future,
            calibration=self.calibration,
            extras=self.extras,
        )
        timeline = Timeline(self.profile.lanes)
        if self.walk is not None:
            result = self.walk(planner, timeline)
        else:
            result = Replay(self.profile, planner, timeline).run(self.passes())
        timeline.close()
        return result.makespan_s


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

    modelled: array[float] = field(default_factory=lambda: array("d"))
    scheduled: array[float] = field(default_factory=lambda: array("d"))
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

    def to_json(self) -> dict[str, Any]:
        """Return mean, 95th percentile, maximum and share of optimal answers of both
        ratios; null without layer steps.
        """
        # Weighted by seconds: a bad plan of a short layer step costs little.
        total_ratio = self.chosen_s / self.least_s if self.least_s else None
        return {
            "layer_steps": len(self.modelled),
            "unproven": self.unproven,
            "modelled": _statistics(np.array(self.modelled)),
            "scheduled": _statistics(np.array(self.scheduled)),
            "total_ratio": total_ratio,
        }


def _statistics(ratios: np.ndarray) -> dict[str, float | None]:
    if not len(ratios):
        return dict.fromkeys(("mean", "p95", "max", "optimal_share"))
    return {
        "mean": float(ratios.mean()),
        "p95": float(np.percentile(ratios, 95)),
        "max": float(ratios.max()),
        "optimal_share": float(np.mean(ratios <= 1.0 + PROVEN)),
    }
