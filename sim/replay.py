"""Replay a trace in virtual time: the layer step of the design, driven as one SimPy
process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.planner.plan import FETCH, READ
from moesim.sim.contention import Operation
from moesim.sim.dispatch import Computes
from moesim.sim.machine import Machine
from moesim.sim.noise import Noise
from moesim.sim.transfers import Transfers
from moesim.traces.timeline.spans import ACTIVATION, DENSE, JOIN, PLAN
from simpy.core import Environment
from simpy.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.planner.planner import Planner
    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.timeline.spans import Timeline


class SimulationError(RuntimeError):
    """The simulation itself has failed: our bug, not the user's."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay did. `events` counts scheduled SimPy events; `makespan_s` is
    virtual.
    """

    steps: int
    layer_steps: int
    events: int
    makespan_s: float


class _Turn(Event):
    """The process's next turn: like a bell, hung up again for each wait. As
    `Operation`, triggered from birth.
    """

    _ok = True
    _value = None
    _defused = False


class Replay:
    """One run: a planner, a machine, and the process that walks the layer steps in the
    design's order.

    `noise_seed` draws every operation's time from the profile's measured distributions;
    None takes the means.
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
        tiered = planner.host is not None
        self._join_s = cache(
            lambda active, copies: costs.join_s(active, copies, tiered=tiered)
        )
        self._activation_s = cache(costs.activation_s)
        self._timeline = timeline
        lanes = profile.lanes
        self._control = lanes.index("control")
        self._gpu = [lanes.index(f"gpu{gpu}") for gpu in range(profile.gpus)]
        compute_lanes = [lanes.index("cpu"), *self._gpu]
        # Lane code of an assignment -> lane.
        self._lane_of = np.array(compute_lanes, np.int8)
        self._d2h = [lanes.index(f"d2h{gpu}") for gpu in range(profile.gpus)]
        # Whose memory is shared.
        self._moves_activations = profile.accelerator != "host"
        self._computes = Computes(
            self.machine, self.transfers, planner, costs, compute_lanes, self._wake
        )
        self._after_read = costs.after_read("dense") if planner.host else 1.0
        self._has_read = False  # whether the layer step before read from the SSD
        self._turn = _Turn(self.env)
        self._turns = 0
        self._layer_steps = 0
        self.machine.host_staging.free = planner.sizes.staging

    def run(
        self,
        steps: Iterable[RoutedStep],
        progress: Callable[[RoutedStep], None] | None = None,
    ) -> ReplayResult:
        """Replay all steps and return when the last layer step has joined.

        Raises:
            PolicyError: a policy answered something illegal.
            SimulationError: the process never ended (a lost landing would be our bug).
        """
        count = [0]
        process = self.env.process(self._run(steps, progress, count))
        self.env.run(process)
        if self._computes.pending:
            raise SimulationError(
                f"{self._computes.pending} operations were never finished"
            )
        return ReplayResult(
            count[0],
            self._layer_steps,
            self.machine.contention.events + self._turns,
            self.env.now,
        )

    def _run(
        self,
        steps: Iterable[RoutedStep],
        progress: Callable[[RoutedStep], None] | None,
        count: list[int],
    ) -> Generator[Event, None, None]:
        env = self.env
        costs = self._costs
        for step in steps:
            start_s = env.now
            self._has_read = False
            dense_s = costs.dense_s(step.tokens, step.context_tokens, step.sequences)
            for routed in step.layers:
                yield from self._layer(step, routed, dense_s)
            head_s = costs.head_s(step.tokens, step.sequences)
            if head_s:
                yield self._alone(self._gpu[0], DENSE, step.step, -1, head_s)
            self._timeline.step(
                step.step,
                step.phase,
                step.batch,
                step.tokens,
                step.sequences,
                start_s,
                env.now,
            )
            count[0] += 1
            if progress is not None:
                progress(step)

    def _layer(
        self, step: RoutedStep, routed: RoutedLayer, dense_s: float
    ) -> Generator[Event, None, None]:
        """One layer step, in the order of the contract (design §5)."""
        planner = self._planner
        layer = routed.layer
        home = planner.home(layer)
        # 1. the dense part
        yield self._alone(
            self._gpu[home],
            DENSE,
            step.step,
            layer,
            dense_s * self._after_read if self._has_read else dense_s,
        )
        # 2. late prefetches; 3. and 4. routing and planning
        self.transfers.begin_layer(layer, routed.experts)
        plan = planner.plan(routed, step.step, step.phase, self.env.now, step.batch)
        work = plan.work
        lanes = self._lane_of.take(plan.lanes)
        self._timeline.access(
            step.step, layer, work.experts, work.tokens, lanes, work.state
        )
        yield self._alone(self._control, PLAN, step.step, layer, plan.planning_s)
        # 5. lanes work
        self._layer_steps += 1
        for gpu, slots in enumerate(plan.staging_slots):
            self.machine.staging[gpu].free = slots
        for copies in plan.copies:
            self.transfers.enqueue(copies, step.step)
        self._has_read = self._after_read != 1.0 and any(
            copies.kind == READ or (copies.kind == FETCH and any(copies.read))
            for copies in plan.copies
        )
        self._turn.callbacks = []
        cpu_used = self._computes.dispatch(plan)
        yield self._turn
        # 6. results join
        if cpu_used and self._moves_activations:
            yield self._alone(
                self._d2h[home],
                ACTIVATION,
                step.step,
                layer,
                self._activation_s(len(work.routing)),
            )
        yield self._alone(
            self._control,
            JOIN,
            step.step,
            layer,
            self._join_s(len(work.experts), plan.copied),
        )
        for copies in planner.complete(plan, self.env.now):
            self.transfers.enqueue(copies, step.step)

    def _alone(
        self, lane: int, kind: int, step: int, layer: int, work_s: float
    ) -> Event:
        """Run one operation and return the process's turn after it."""
        self._turn.callbacks = []
        self.machine.submit(
            Operation(lane, kind, step, layer, -1, work_s, 0, self._wake)
        )
        return self._turn

    def _wake(self, _: Operation | None) -> None:
        """Give the process its turn, now."""
        self._turns += 1
        self.env.schedule(self._turn)
