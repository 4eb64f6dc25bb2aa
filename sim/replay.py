"""Replay a trace in virtual time: the layer step of the design, driven as one SimPy process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from simpy.core import Environment

from policies.base import CPU, RESIDENT
from policies.plan import FETCH, READ
from sim.contention import Operation
from sim.machine import Machine
from sim.noise import Noise
from sim.transfers import Transfers
from traces.timeline import ACTIVATION, COMPUTE, DENSE, JOIN, PLAN

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from simpy.events import Event

    from hwprofiles.costs import Costs
    from hwprofiles.profile import HardwareProfile
    from policies.plan import Plan
    from policies.planner import Planner
    from traces.batch import RoutedLayer, RoutedStep
    from traces.timeline import Timeline


class SimulationError(RuntimeError):
    """The simulation itself has failed: our bug, not the user's."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay did. `events` counts scheduled SimPy events; `makespan_s` is virtual."""

    steps: int
    layer_steps: int
    events: int
    makespan_s: float


class Replay:
    """One run: a planner, a machine, and the process that walks the layer steps in the design's order.

    `noise_seed` draws every operation's time from the profile's measured distributions; None takes the means.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        costs: Costs,
        planner: Planner,
        timeline: Timeline,
        *,
        noise_seed: int | None = None,
    ) -> None:
        self.env = Environment()
        noise = None if noise_seed is None else Noise(profile, noise_seed)
        self.machine = Machine(self.env, profile, timeline, noise)
        self.transfers = Transfers(self.machine, planner, costs)
        self._planner = planner
        self._costs = costs
        self._timeline = timeline
        lanes = profile.lanes
        self._control = lanes.index("control")
        self._gpu = [lanes.index(f"gpu{gpu}") for gpu in range(profile.gpus)]
        self._lanes = [lanes.index("cpu"), *self._gpu]
        self._lane_of = np.array(self._lanes, np.int8)  # lane code of an assignment -> lane
        self._d2h = [lanes.index(f"d2h{gpu}") for gpu in range(profile.gpus)]
        self._experts = planner.shape.experts
        self._dispatch_s = costs.dispatch_s
        self._first_s = [
            costs.first_op_s + first_s for first_s in (costs.cpu_first_s, *[costs.gpu_first_s] * profile.gpus)
        ]
        self._join_s = costs.join_s
        self._waits = 0
        self._layer_steps = 0
        self._pending = 0
        self._done: Event = self.env.event()
        self._cpu_used = False
        self._fetched = 0  # fetched experts that a serial plan's CPU still waits for
        self._held: list[Operation] = []
        self._early: dict[tuple[int, int], Operation] = {}  # (layer, expert) -> computed ahead, not yet ended
        self.machine.host_staging.free = planner.sizes.staging

    def run(self, steps: Iterable[RoutedStep], progress: Callable[[RoutedStep], None] | None = None) -> ReplayResult:
        """Replay all steps and return when the last layer step has joined.

        Raises:
            PolicyError: a policy answered something illegal.
            SimulationError: the process never ended (a lost landing would be our bug).
        """
        count = [0]
        process = self.env.process(self._run(steps, progress, count))
        self.env.run(process)
        if self._pending:
            raise SimulationError(f"{self._pending} operations were never finished")
        return ReplayResult(count[0], self._layer_steps, self.machine.contention.events + self._waits, self.env.now)

    def _run(
        self, steps: Iterable[RoutedStep], progress: Callable[[RoutedStep], None] | None, count: list[int]
    ) -> Generator[Event, None, None]:
        env, costs = self.env, self._costs
        for step in steps:
            start_s = env.now
            dense_s = costs.dense_s(step.tokens, step.context_tokens, step.sequences)
            for routed in step.layers:
                yield from self._layer(step, routed, dense_s)
            head_s = costs.head_s(step.tokens, step.sequences)
            if head_s:
                yield self._alone(self._gpu[0], DENSE, step.step, -1, head_s)
            self._timeline.step(step.step, step.phase, step.batch, step.tokens, step.sequences, start_s, env.now)
            count[0] += 1
            if progress is not None:
                progress(step)

    def _layer(self, step: RoutedStep, routed: RoutedLayer, dense_s: float) -> Generator[Event, None, None]:
        """One layer step, in the order of the contract (design §5)."""
        planner, layer = self._planner, routed.layer
        home = planner.home(layer)
        # 1. the dense part
        yield self._alone(self._gpu[home], DENSE, step.step, layer, dense_s)
        # 2. late prefetches; 3. and 4. routing and planning
        self.transfers.begin_layer(layer)
        plan = planner.plan(routed, step.step, step.phase, self.env.now, step.batch)
        work = plan.work
        lanes = self._lane_of[plan.lanes]
        self._timeline.access(step.step, layer, work.experts, work.tokens, lanes, work.state)
        yield self._alone(self._control, PLAN, step.step, layer, plan.planning_s)
        # 5. lanes work
        self._layer_steps += 1
        self._done = self.env.event()
        self._waits += 1
        self._dispatch(plan)
        yield self._done
        # 6. results join
        if self._cpu_used:
            yield self._alone(
                self._d2h[home], ACTIVATION, step.step, layer, self._costs.activation_s(len(work.routing))
            )
        yield self._alone(self._control, JOIN, step.step, layer, self._join_s)
        for copies in planner.complete(plan, self.env.now):
            self.transfers.enqueue(copies, step.step)

    def _alone(self, lane: int, kind: int, step: int, layer: int, work_s: float) -> Event:
        """Run one operation and return the event of its end."""
        done = self.env.event()
        self._waits += 1
        self.machine.submit(Operation(lane, kind, step, layer, -1, work_s, 0, lambda _: done.succeed()))
        return done

    def _dispatch(self, plan: Plan) -> None:
        """Queue copies, then what can be computed now; the rest follows its landing."""
        planner, machine = self._planner, self.machine
        work = plan.work
        layer, step = work.layer, work.step
        for gpu, slots in enumerate(plan.staging_slots):
            machine.staging[gpu].free = slots
        for copies in plan.copies:
            self.transfers.enqueue(copies, step)
        staged = {
            e for c in plan.copies if c.kind in {FETCH, READ} for e, yes in zip(c.experts, c.staged, strict=True) if yes
        }
        experts = work.experts.tolist()
        codes = plan.lanes.tolist()
        cpu_s = work.cpu_s.tolist()
        gpu_s = work.gpu_s.tolist()
        memories = [planner.host.memory if planner.host is not None else None]
        memories += [tier.memory for tier in planner.gpu]
        present = [None if memory is None else memory.state[layer] for memory in memories]
        started = set() if work.started is None else set(work.experts[work.started].tolist())
        self._pending = len(experts)
        fresh = [True] * len(present)
        for i in plan.order:
            expert, code = experts[i], codes[i]
            if expert in started:
                self._await_early(layer, expert)
                continue
            work_s = cpu_s[i] if code == CPU else gpu_s[code - 1 if len(gpu_s) > 1 else 0][i]
            work_s += self._dispatch_s
            if fresh[code]:
                fresh[code] = False
                work_s += self._first_s[code]
            compute = Operation(self._lanes[code], COMPUTE, step, layer, expert, work_s, 0, self._computed)
            if expert in staged:
                compute.frees = machine.staging[code - 1] if code else machine.host_staging
            state = present[code]
            if code == CPU and plan.serial:
                self._held.append(compute)
            elif state is None or state[expert] == RESIDENT:
                machine.submit(compute)
            elif code == CPU:
                self.transfers.when_read(layer * self._experts + expert, compute)
            else:
                if plan.serial:
                    self._fetched += 1
                    compute.on_end = self._fetched_computed
                self.transfers.when_landed(code - 1, layer * self._experts + expert, compute)
        self._cpu_used = bool(started) or not fresh[CPU]
        if not self._fetched:
            self._release_held()
        self._begin_early(plan)
        if not self._pending:
            self._done.succeed()

    def _begin_early(self, plan: Plan) -> None:
        """Queue the next layer's experts that the CPU computes ahead, after this layer's own."""
        if plan.ahead is None:
            return
        layer = plan.work.layer + 1
        for expert, work_s in zip(plan.ahead.experts.tolist(), plan.ahead_s, strict=True):
            work_s += self._dispatch_s
            compute = Operation(
                self._lanes[CPU], COMPUTE, plan.work.step, layer, expert, work_s, 0, self._early_computed
            )
            self._early[layer, expert] = compute
            self.machine.submit(compute)

    def _await_early(self, layer: int, expert: int) -> None:
        """Count an expert computed ahead: done already, or when its product ends."""
        compute = self._early.pop((layer, expert), None)
        if compute is None:
            self._pending -= 1
        else:
            compute.on_end = self._computed

    def _early_computed(self, operation: Operation) -> None:
        self._early.pop((operation.layer, operation.expert), None)

    def _fetched_computed(self, operation: Operation) -> None:
        self._fetched -= 1
        if not self._fetched:
            self._release_held()
        self._computed(operation)

    def _release_held(self) -> None:
        """Let the CPU of a serial plan begin."""
        held, self._held = self._held, []
        for compute in held:
            key = compute.layer * self._experts + compute.expert
            host = self._planner.host
            if host is None or host.memory.state[compute.layer, compute.expert] == RESIDENT:
                self.machine.submit(compute)
            else:
                self.transfers.when_read(key, compute)

    def _computed(self, _: Operation) -> None:
        """Count a finished expert; the last one ends the lanes' work on this layer step."""
        self._pending -= 1
        if not self._pending:
            self._done.succeed()
