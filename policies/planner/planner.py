"""The planner: the one place that asks policies, in one fixed order, for both worlds.

For every layer step it looks at the active experts, asks for their assignment, holds
them, notes the accesses, and wishes for copies: what is missing, what the next layers
may need, what the cache wants to replace. A copy takes its place when it starts.

The planner keeps no clock: the engine passes the time and reports what has started and
landed, so the same reports always give the same plans.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.names import CPU, DEFERRED
from moesim.policies.planner import copies as wanted
from moesim.policies.planner import questions
from moesim.policies.planner.layer_work import (
    Rerouting,
    WorkAhead,
    deferrable,
    look,
)
from moesim.policies.planner.lookups import is_legal
from moesim.policies.planner.machine_state import MachineState
from moesim.policies.planner.plan import Copies, Launch, MemoryPlan, Plan, Policies
from moesim.policies.planner.starting import fill_memories, start_policies
from moesim.policies.run_context import Evaluations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.hwprofiles.costs import Costs
    from moesim.policies.planner.records import LayerWork
    from moesim.policies.run_context import Future
    from moesim.traces.format.batch import RoutedLayer
    from moesim.traces.format.schema import ModelShape, Phase

_NO_EVALUATIONS: Final = Evaluations()
_NOBODY: Final = np.empty(0, np.int32)


class Planner(MachineState):
    """Asks the policies about every layer step, and keeps the state of their machine.

    Attributes:
        rerouting: asks the routing policy.
    """

    def __init__(
        self,
        shape: ModelShape,
        costs: Costs,
        policies: Policies,
        memory: MemoryPlan,
        *,
        seed: int = 0,
        future: Future | None = None,
        calibration: np.ndarray | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(shape, costs, policies, memory)
        self._joined_s = 0.0  # when the last layer step ended
        self._prefetches = policies.prefetch.prefetches
        self.rerouting = Rerouting()
        self.future = future
        self._work_ahead = WorkAhead()
        self._precomputes = policies.assignment.precomputes
        self._defers = policies.assignment.defers

        # Most runs have none of these, so that nobody is asked in every layer step.
        # The caches of all GPUs are of one kind.
        replaces = any(cache.replaces for cache in policies.caches)
        self._replace_first = replaces and policies.caches[0].replaces_first
        self._replace_after = replaces and not self._replace_first
        self._follows_all = policies.prefetch.late == "wait"
        self._hurries = any(cache.lands_by_next_visit for cache in policies.caches)

        # Lanes that an assignment may name beside the CPU's.
        self._gpu_lanes = 1 if self.splits_layers else self.gpus
        self._places_on_gpu = policies.assignment.places_on_gpu
        if not self._places_on_gpu:
            self._gpu_lanes = 0

        start_policies(
            self, seed=seed, future=future, calibration=calibration, extras=extras or {}
        )
        fill_memories(self, calibration)

        # What policies take may depend on the model, which they know now.
        limited = self.host is not None
        self._planning_s = cache(
            partial(
                costs.planning_s,
                self.assignment_name,
                tiered=limited,
                own_s=self.own_planning_s,
            )
        )

    @property
    def own_planning_s(self) -> float:
        """Seconds of a layer step that policies take beyond the machine's planning."""
        return sum(policy.own_planning_s for policy in self.policies.all())

    @property
    def always_split(self) -> np.ndarray:
        """Bool [L]: layers that CPU and GPU share in every step, as the system's graph
        is fixed.
        """
        return self.policies.fixed_graph & self.sizes.gpu.held_in_part(self.shape)

    @property
    def gate_mass(self) -> list[float]:
        """Share of the gate's weight that altered routing kept, by layer step."""
        return self.rerouting.gate_mass

    @property
    def requeues(self) -> bool:
        """Whether queued prefetches of all layers are chosen anew before each one."""
        return self.policies.prefetch.requeue

    def evaluations(self, layer: int, phase: Phase) -> Evaluations:
        """What predicting in a layer step evaluates on the GPU."""
        if not self._prefetches:
            return _NO_EVALUATIONS
        following = self.layers - 1 - layer
        if not following:
            return _NO_EVALUATIONS
        return self.policies.prefetch.evaluations(following, phase)

    # -- what the engine asks ---------------------------------------------------------

    def drop_late(
        self,
        queued: Sequence[tuple[int, int, int]],
        layer: int,
        active: Sequence[int],
    ) -> list[tuple[int, int, int]]:
        """Decide about queued prefetches, now that a gate has spoken.

        Args and result: see `moesim.policies.planner.copies.drop_late`.
        """
        return wanted.drop_late(self, queued, layer, active)

    def plan(
        self,
        routed: RoutedLayer,
        step: int,
        phase: Phase,
        now_s: float,
        batch: int = 0,
    ) -> Plan:
        """Plan one layer step in the order of the contract.

        Assignment, holds, accesses, demand, prefetches, work ahead, replacements.

        Raises:
            PolicyError: a policy answered something illegal; the message names it.
        """
        self.now_s = now_s
        # Before a pass's first layer other things happen too: a head, another batch.
        if routed.layer:
            self.gap_s = now_s - self._joined_s
        if self.policies.routing.alters:
            routed = self.rerouting.route(self, routed, step, phase)
        work = look(self, routed, step, phase, batch)
        if self._precomputes:
            work.precomputed = self._work_ahead.take(work.layer, work.experts)
        first = wanted.replace_first(self, work) if self._replace_first else []
        launch = self._assign(work)
        lanes = launch.lanes
        wanted.keep_computed(self, work, lanes, first)
        self._note_accesses(work, launch)

        copies: list[Copies] = []
        promoted: list[tuple[int, int]] = []
        follows_all = self._follows_all
        if follows_all or self._hurries:
            # Only what earlier plans have queued can be promoted, so this comes first.
            wanted.promote_due(self, work.layer, promoted, everything=follows_all)
        released, postponed = (
            wanted.wish_first(self, work, lanes, first, copies) if first else ([], [])
        )
        exposed_s = self._demand(work, launch, copies, promoted)
        dense_parts = 0
        if self._prefetches:
            wanted.wish_for_named(self, work, copies)
            dense_parts = self.evaluations(work.layer, phase).dense_parts
        # Products that wait free no slot: staging must hold all that they wait for.
        waits = launch.waits or follows_all
        waits = waits and wanted.can_stage_all(self, work.layer, copies, promoted)

        copied = len(promoted)
        for part in copies:
            copied += len(part.experts)
        plan = Plan(
            work,
            lanes,
            launch.order.tolist(),
            copies,
            promoted,
            copied,
            planning_s=exposed_s + self._planning_s(len(lanes), copied),
            serial=launch.serial,
            waits=waits,
            dense_parts=dense_parts,
            released=released,
            swaps=postponed,
            deferred=launch.deferred.tolist(),
        )
        if self._precomputes and work.layer + 1 < self.layers:
            self._work_ahead.ask(self, plan)
        if self._replace_after:
            for gpu in self.serving[work.layer]:
                swaps = wanted.ask(self, gpu, work)
                plan.swaps += [(gpu, swap) for swap in swaps]
        return plan

    def foretell(
        self, experts: np.ndarray, draft_s: float, now_s: float
    ) -> list[Copies]:
        """Wish for what a drafted token foretells.

        Args:
            experts: uint16 [L, K], those that the token really uses.
            draft_s: seconds that a drafted token takes.
            now_s: the time.

        Returns:
            Prefetches, most wanted first.
        """
        self.now_s = now_s
        copies: list[Copies] = []
        named = questions.foretold(self, experts, draft_s)
        wanted.wish_for_foretold(self, named, copies)
        return copies

    def complete(self, plan: Plan, now_s: float) -> list[Copies]:
        """Note that a layer step has joined: release its holds, forget what was staged
        for it.

        Returns:
            The copies that carry out the cache's replacements.
        """
        layer = plan.work.layer
        experts = plan.work.experts
        for gpu, expert in plan.released:
            # `release` ends one hold of every active expert.
            self.gpu[gpu].memory.holds[layer, expert] += 1
        for gpu, level in enumerate(self.gpu):
            memory = level.memory
            memory.release(layer, experts)
            level.end_use(layer)
            if not memory.staged_count[layer]:
                continue
            for expert in memory.staged_of(layer):
                self.drop_staged(gpu, layer, expert)
        if self.host is not None:
            self._work_ahead.release(self.host, layer)
            self.host.complete(layer)
        self.now_s = now_s
        self._joined_s = now_s
        copies: list[Copies] = []
        for gpu, swap in plan.swaps:
            wanted.wish(self, plan.work, gpu, swap, copies)
        return copies

    def _demand(
        self,
        work: LayerWork,
        launch: Launch,
        copies: list[Copies],
        promoted: list[tuple[int, int]],
    ) -> float:
        """Wish for what the lanes lack; seconds by which choosing victims outlasts the
        first load.
        """
        exposed_s = 0.0
        for gpu in self.serving[work.layer] if self._places_on_gpu else ():
            keys = wanted.wish_for_missing(self, work, gpu, launch, copies, promoted)
            if self.gpu[gpu].cache.choosing_s:
                exposed_s = max(exposed_s, wanted.exposed_s(self, work, gpu, keys))
        if self.host is not None:
            wanted.read_for_cpu(self, self.host, work, launch, copies)
            # What a GPU computes is needed in host memory until its copy has landed,
            # for which the copy holds it. A longer hold would keep a staging slot from
            # the next read, for which the same GPU may be waiting.
            self.host.memory.release(work.layer, work.experts[launch.lanes != CPU])
        return exposed_s

    def _assign(self, work: LayerWork) -> Launch:
        """Ask for lanes and launch order, and check them."""
        lanes, order, serial, waits = questions.assign(self, work)
        gpus = self._gpu_lanes
        # Whatever whole numbers a policy answers with.
        numbers = (lanes.astype(np.int64), order.astype(np.int64, copy=False))
        marked = None
        if self._defers:
            marked = numbers[0] == DEFERRED
            numbers[0][marked] = CPU
        if not is_legal(*numbers, len(work.experts), gpus):
            raise PolicyError(
                f"assignment policy {self.assignment_name!r}: step {work.step}, layer"
                f" {work.layer}: expected a lane in 0..{gpus} for each of"
                f" {len(work.experts)} active experts and an order that is a"
                " permutation"
            )
        lanes = numbers[0].astype(np.int8)
        order = numbers[1]
        home = self.home(work.layer)
        if home:
            lanes = np.where(lanes > 0, lanes + home, lanes).astype(np.int8)
        if work.precomputed is not None:
            lanes = np.where(work.precomputed, CPU, lanes).astype(np.int8)
        deferred = _NOBODY
        if marked is not None and marked.any():
            is_deferred = marked & deferrable(self, work)
            deferred = work.experts[is_deferred]
            # Launched last; either part keeps its order.
            order = order[np.argsort(is_deferred[order], kind="stable")]
        return Launch(lanes, order, serial, waits, deferred)

    def _note_accesses(self, work: LayerWork, launch: Launch) -> None:
        """Hold every active expert before any victim is named, then tell the caches.

        Else one miss would evict the next hit.
        """
        lanes = launch.lanes
        for gpu, level in enumerate(self.gpu):
            level.memory.hold(work.layer, work.experts)
            level.begin_use(work, lanes, 1 + gpu)
            if level.memory.staged_count[work.layer]:
                self._forget_wrong_guesses(gpu, work.layer)
        if self.host is not None:
            self.host.memory.hold(work.layer, work.experts)
            # Once more until the product has ended, which the layer step may not see.
            self.host.memory.hold(work.layer, launch.deferred)
            self.host.level.begin_use(work, lanes, CPU)
            self.host.accessed(work, lanes)
        for gpu in self.serving[work.layer]:
            self.gpu[gpu].accessed(work)

    def _forget_wrong_guesses(self, gpu: int, layer: int) -> None:
        """Free the staging slots of prefetches that a GPU does not compute after all.

        What is under way is forgotten when it lands.
        """
        for expert in self.gpu[gpu].memory.staged_of(layer):
            if self.gpu[gpu].used[layer, expert]:
                # It may be on its way since a step that no longer needed it.
                self.orphans[gpu].discard(layer * self.experts + expert)
            else:
                self.drop_staged(gpu, layer, expert)
