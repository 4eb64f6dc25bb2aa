"""The bench on which parts of a policy are swapped for parts that know the future, one
replay per mix.

Think of a relay team timed with any of its runners exchanged for a star. The track
(trace, machine, memories) stays.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from moesim.analysis.gap_eviction import SameStart
from moesim.policies.assignment._optimum import (
    modelled_s,
    optimal,
    optimal_scheduled,
    scheduled_s,
)
from moesim.policies.base import AssignmentPolicy
from moesim.policies.planner.planner import Planner
from moesim.policies.planner.residency import CacheSize
from moesim.policies.registry import resolve
from moesim.policies.systems import System
from moesim.sim.replay import Replay
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.base import (
        Assignment,
        CachePolicy,
        Future,
        LayerWork,
        MachineView,
    )
    from moesim.policies.planner.plan import MemoryPlan, Policies
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

EVICTION = "eviction"
ASSIGNMENT = "assignment"
PREFETCH = "prefetch"
PLANNING = "planning"
PARTS = (EVICTION, ASSIGNMENT, PREFETCH, PLANNING)
BOUND = System(
    assignment="exact:objective=scheduled", cache="belady", prefetch="clairvoyant"
)
"""What parts are replaced by. The scheduled objective knows that copies follow each
other on a link.
"""
BUDGETS = (1, 4, None)
"""Experts that the foreseeing prefetcher may copy per layer step; None for all. Knowing
what comes is not knowing how much of it the link can take: with no limit a slow link is
flooded and demand fetches wait behind it.
"""
FREE = "free planning"
PROVEN = 1e-9
"""Relative difference below which two makespans are equal: solver and simulator add in
different orders.
"""


class Choice(NamedTuple):
    """One counterpart of a part. `budget`: experts per layer step, for prefetch;
    `label` names both.
    """

    spec: str
    budget: int | None
    label: str


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

    def add(self, work: LayerWork, view: MachineView, answer: Assignment) -> None:
        """Grade one answer; layer steps that cost nothing are left out."""
        modelled = optimal(work)
        scheduled = optimal_scheduled(work, view)
        if not modelled.makespan_s or not scheduled.makespan_s:
            return
        chosen_s = modelled_s(work, answer.lanes)
        self.modelled.append(chosen_s / modelled.makespan_s)
        self.scheduled.append(
            scheduled_s(work, view, answer.lanes, answer.order) / scheduled.makespan_s
        )
        self.chosen_s += chosen_s
        self.least_s += modelled.makespan_s
        self.unproven += any(
            best.bound_s < best.makespan_s * (1.0 - PROVEN)
            for best in (modelled, scheduled)
        )

    def to_json(self) -> dict[str, Any]:
        """Mean, 95th percentile, maximum and share of optimal answers of both ratios;
        null without layer steps.
        """
        figures: dict[str, Any] = {
            "layer_steps": len(self.modelled),
            "unproven": self.unproven,
        }
        for name, ratios in (
            ("modelled", np.array(self.modelled)),
            ("scheduled", np.array(self.scheduled)),
        ):
            some = len(ratios) > 0
            figures[name] = {
                "mean": float(ratios.mean()) if some else None,
                "p95": float(np.percentile(ratios, 95)) if some else None,
                "max": float(ratios.max()) if some else None,
                "optimal_share": float(np.mean(ratios <= 1.0 + PROVEN))
                if some
                else None,
            }
        figures["total_ratio"] = self.chosen_s / self.least_s if self.least_s else None
        return figures


class Graded(AssignmentPolicy):
    """An assignment policy with somebody looking over its shoulder."""

    def __init__(self, policy: AssignmentPolicy, grades: Grades) -> None:
        self.policy = policy
        self.grades = grades
        self.needs = policy.needs
        self.start = policy.start  # type: ignore[method-assign]

    def assign(self, work: LayerWork, view: MachineView) -> Assignment:
        """Pass the question on, grade the answer, pass it back."""
        answer = self.policy.assign(work, view)
        self.grades.add(work, view, answer)
        return answer


class _FreePlanning:
    """Costs in which decisions take no time."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._costs, name)

    def planning_s(
        self, policy_name: str, active: int, copies: int = 0, *, tiered: bool = False
    ) -> float:
        """Nothing."""
        del policy_name, active, copies, tiered
        return 0.0


@dataclass(frozen=True, slots=True)
class Bench:
    """One trace on one machine, replayed with any of a policy's parts replaced.

    Attributes:
        shape: the model.
        profile: the machine.
        costs: its seconds.
        memory: sizes of memories, the same for all mixes.
        system: the policy under study.
        passes: gives the forward passes anew.
        future: of the same passes.
        bound: what parts are replaced by.
        host_cache: cache policy of limited host memory; never replaced.
        seed: for policies that draw.
        calibration: activation counts float64 [L, E] that may fill caches.
        extras: calibration artefacts by name.
    """

    shape: ModelShape
    profile: HardwareProfile
    costs: Costs
    memory: MemoryPlan
    system: System
    passes: Callable[[], Iterable[RoutedStep]]
    future: Future
    bound: System = BOUND
    host_cache: str = "lru"
    seed: int = 0
    calibration: np.ndarray | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def own(self) -> dict[str, str]:
        """Part -> specification under study; planning is named after the assignment it
        is charged for.
        """
        system = self.system
        name = system.assignment.partition(":")[0]
        return {
            EVICTION: system.cache,
            ASSIGNMENT: system.assignment,
            PREFETCH: system.prefetch,
            PLANNING: name,
        }

    def choices(self) -> dict[str, list[Choice]]:
        """Part -> counterparts, for parts that differ from theirs; planning always
        does.
        """
        bound = {
            EVICTION: self.bound.cache,
            ASSIGNMENT: self.bound.assignment,
            PREFETCH: self.bound.prefetch,
        }
        own = self.own()
        found = {
            part: [Choice(spec, None, spec)]
            for part, spec in bound.items()
            if spec != own[part]
        }
        if PREFETCH in found:
            spec = bound[PREFETCH]
            found[PREFETCH] = [
                Choice(spec, n, spec if n is None else f"{spec}, {n} a layer")
                for n in BUDGETS
            ]
        return {part: found[part] for part in PARTS if part in found} | {
            PLANNING: [Choice(FREE, None, FREE)]
        }

    def replay_s(
        self,
        mix: Mapping[str, Choice],
        grades: Grades | None = None,
        *,
        observer: AssignmentPolicy | None = None,
    ) -> float:
        """Makespan with some parts replaced, in virtual seconds.

        A replaced cache starts with what the policy's own cache starts with, so only
        evictions and admissions differ. Decisions are charged as those of the policy's
        own assignment unless planning is replaced.

        Args:
            mix: part -> its counterpart; other parts stay.
            grades: collects the quality of every assignment.
            observer: asked instead of the assignment policy; it starts the ones it asks
                itself.

        Raises:
            PolicyError: a policy answered something illegal.
        """
        budget = self.memory.prefetch_budget_bytes
        if PREFETCH in mix and mix[PREFETCH].budget is not None:
            most = cast("int", mix[PREFETCH].budget) * self.shape.max_expert_bytes
            budget = most if budget is None else min(budget, most)
        memory = replace(self.memory, prefetch_budget_bytes=budget)
        policies = self._policies(mix)
        if observer is not None:
            policies.assignment = observer
        if grades is not None:
            policies.assignment = Graded(policies.assignment, grades)
        return self._run(policies, memory, free=PLANNING in mix)

    def resident_s(self) -> float:
        """Makespan if all experts were on the GPUs from the start, with the bound's
        assignment and free planning.
        """
        everything = CacheSize.of(
            self.shape.expert_bytes, self.shape.experts, ratio=1.0
        )
        memory = replace(self.memory, gpu=everything, host=None)
        system = System(assignment=self.bound.assignment, cache="static:fill=lowest")
        return self._run(
            system.build(gpus=self.profile.gpus, host_cache=None), memory, free=True
        )

    def _policies(self, mix: Mapping[str, Choice]) -> Policies:
        system = replace(
            self.system,
            assignment=mix[ASSIGNMENT].spec
            if ASSIGNMENT in mix
            else self.system.assignment,
            prefetch=mix[PREFETCH].spec if PREFETCH in mix else self.system.prefetch,
        )
        policies = system.build(
            gpus=self.profile.gpus,
            host_cache=self.host_cache if self.memory.host else None,
        )
        policies.names = {**policies.names, "assignment": self.system.assignment}
        if EVICTION in mix:
            rules = [
                cast("CachePolicy", resolve(mix[EVICTION].spec, "cache"))
                for _ in policies.caches
            ]
            policies.caches = [
                SameStart(rule, own)
                for rule, own in zip(rules, policies.caches, strict=True)
            ]
        return policies

    def _run(self, policies: Policies, memory: MemoryPlan, *, free: bool) -> float:
        costs = cast("Costs", _FreePlanning(self.costs)) if free else self.costs
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
        result = Replay(self.profile, costs, planner, timeline).run(self.passes())
        timeline.close()
        return result.makespan_s
