"""Replay a trace in virtual time: the engine's layer steps, as one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.engine.layer_step import LayerStep
from moesim.hwprofiles.lanes import GPU
from moesim.sim.clock import Clock
from moesim.sim.machine import Machine
from moesim.sim.noise import Noise
from moesim.sim.results import ReplayResult, SimulationError, draft_seconds
from moesim.sim.world import TURN, VirtualWorld
from moesim.traces.format.arrivals import Idle
from moesim.traces.timeline.spans import DENSE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.planner.planner import Planner
    from moesim.sim.clock import Operation
    from moesim.sim.machine import Durations, Measurements
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.timeline.spans import Timeline


class Replay:
    """One run: a planner, a machine, and the process that walks the layer steps.

    `noise_seed` draws every operation's time from the profile's measured distributions;
    None takes the means. `measured` knows how long every operation really took, parts
    of control included; it needs a profile without contention.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        costs: Costs,
        planner: Planner,
        timeline: Timeline,
        *,
        noise_seed: int | None = None,
        measured: Measurements | None = None,
    ) -> None:
        self.clock = Clock()
        durations: Durations | None = measured
        if noise_seed is not None:
            durations = Noise(profile, noise_seed)
        self.machine = Machine(self.clock, profile, timeline, durations)
        self._world = VirtualWorld(
            self.clock,
            self.machine,
            profile,
            costs,
            planner,
            timeline,
            measured=measured,
        )
        self._layer_step: LayerStep[Operation] = LayerStep(self._world, planner)
        self._planner = planner
        self._costs = costs
        self._timeline = timeline
        self._gpu = [profile.lanes.index(lane) for lane in GPU.lanes(profile.gpus)]
        self._after_read = costs.after_read("dense") if planner.host else 1.0
        self._steps = 0
        self._layer_steps = 0

    def run(
        self,
        steps: Iterable[RoutedStep | Idle],
        progress: Callable[[RoutedStep], None] | None = None,
    ) -> ReplayResult:
        """Replay all steps and return when the last layer step has joined.

        A step is asked for when the one before has ended, so that steps may depend on
        the time; between them nothing may be to do.

        Raises:
            PolicyError: a policy answered something illegal.
            SimulationError: the process never ended (a lost landing would be our bug).
        """
        self.clock.drive(self._run(steps, progress))
        pending = self._layer_step.dispatch.pending
        if pending:
            raise SimulationError(f"{pending} operations were never finished")
        return ReplayResult(
            steps=self._steps,
            layer_steps=self._layer_steps,
            events=self.machine.contention.events + self.clock.turns,
            makespan_s=self.clock.now_s,
        )

    def _run(
        self,
        steps: Iterable[RoutedStep | Idle],
        progress: Callable[[RoutedStep], None] | None,
    ) -> Generator[str, None, None]:
        """Walk forward passes: the dense part of each layer, its experts, the head."""
        clock = self.clock
        costs = self._costs
        world = self._world
        planner = self._planner
        for step in steps:
            if isinstance(step, Idle):
                clock.wake_after(step.until_s - clock.now_s)
                yield TURN
                continue
            start_s = clock.now_s
            # Nothing was read since the last pass's head: caches are as without reads.
            world.has_read = False
            dense_s = costs.dense_s(step.tokens, step.context_tokens, step.sequences)
            world.dense_s = dense_s
            if step.drafted:
                yield from self._draft(step)
            for routed in step.layers:
                lane = self._gpu[planner.home(routed.layer)]
                work_s = dense_s * self._after_read if world.has_read else dense_s
                gates = planner.evaluations(routed.layer, step.phase).gates
                if gates:
                    work_s += gates * costs.gate_s(step.tokens)
                yield world.alone(lane, DENSE, step.step, routed.layer, work_s)
                yield from world.asked(step.step, routed.layer)
                yield from self._layer_step.run(
                    routed, step.step, step.phase, step.batch
                )
                self._layer_steps += 1
            # Of a draft every token is compared with what the model says.
            outputs = step.tokens if step.drafted else step.sequences
            head_s = costs.head_s(step.tokens, outputs)
            # A real run notes its head whatever a profile says of it.
            if head_s or world.parts:
                yield world.alone(self._gpu[0], DENSE, step.step, -1, head_s)
            world.noted(step.step)
            self._timeline.step(
                step.step,
                step.phase,
                step.batch,
                step.made,
                step.sequences,
                start_s=start_s,
                end_s=clock.now_s,
            )
            self._steps += 1
            if progress is not None:
                progress(step)

    def _draft(self, step: RoutedStep) -> Generator[str, None, None]:
        """Draft tokens one by one on the first GPU, and prefetch what each foretells.

        The model that drafts is taken to have the same dense parts, and to be on the
        GPU as a whole.
        """
        context_tokens = np.array([step.context_tokens])
        (draft_s,) = draft_seconds(self._costs, self._planner, context_tokens).tolist()
        for token in range(step.drafted):
            yield self._world.alone(self._gpu[0], DENSE, step.step, -1, draft_s)
            self._layer_step.foretell(step, token, draft_s)
