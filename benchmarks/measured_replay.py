"""A replay in which every operation takes as long as it took in a real run, control's
parts between its spans included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from moesim.engine.layer_step import LayerStep
from moesim.engine.names import UNAWAITED
from moesim.policies.names import NONE
from moesim.sim.clock import FastClock
from moesim.sim.replay import Replay
from moesim.traces.timeline.operations import LAUNCH, NOTE, REQUEST, RETURN
from moesim.traces.timeline.spans import ACTIVATION, DENSE, JOIN, PLAN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.engine.operations import Operation, Worker
    from moesim.engine.planner import Planner
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.sim.noise import Noise
    from moesim.traces.timeline.spans import Timeline


class Measurements(Protocol):
    """Knows how long operations of a real run took."""

    def scatter(self, operation: Operation) -> None:
        """Set the work of an operation that starts now."""

    def has(self, operation: Operation) -> bool:
        """Whether the run had this operation."""


class MeasuredClock(FastClock):
    """Virtual time in which operations take what they took.

    Attributes:
        measured: says how long.
        note: what control writes down as soon as it is free; nobody waits for it.
        wanted: whether the process waits for control.
    """

    def __init__(self, profile: HardwareProfile, noise: Noise | None) -> None:
        super().__init__(profile, noise)
        self.measured: Measurements | None = None
        self.note: Operation | None = None
        self.wanted = False

    def start(self, operation: Operation) -> None:
        """Begin an operation now."""
        assert self.measured is not None
        self.measured.scatter(operation)
        super().start(operation)

    def end(self, operation: Operation) -> None:
        """Let an operation end now; what control does between its spans is none."""
        super().end(operation)
        if operation.kind > JOIN:
            self.spans.count -= 1

    def taken(self, worker: Worker) -> None:
        """Let control write down what is due, then plan."""
        if self.note is None:
            self.wanted = False
            self.wake()
            return
        note = self.note
        self.note = None
        worker.takes = self.wanted
        self.start(note)


class MeasuredLayerStep(LayerStep):
    """Layer steps with the parts of control: it is asked, launches, lets go on, and
    writes a forward pass down.
    """

    clock: MeasuredClock

    def run(self, s: int) -> Iterator[None]:
        """As `LayerStep.run`."""
        planner = self.planner
        block = planner.block
        durations = self.durations
        work = planner.work
        layer = block.layer[s]
        self.step = block.step[s]
        at_home = planner.home(layer)
        dense_s = self.dense_s(block, s)
        self.alone(durations.compute[1 + at_home], DENSE, layer, dense_s)
        yield
        yield from self._asked(layer)
        self.begin(s)
        plan = planner.plan(s, self.clock.now_s)
        copied = plan.copies.count + plan.promoted.count
        plan_s = plan.exposed_s + self.control_s(durations.plan_s, work, copied)
        self.controls(PLAN, layer, plan_s)
        yield
        self.launch(s)
        self.clock.start(self._part(LAUNCH, layer))
        yield
        if self.cpu_used and durations.moves_activations:
            back = durations.back[at_home]
            self.alone(back, ACTIVATION, layer, block.activation_s[s])
            yield
        self.controls(JOIN, layer, self.join_s(work, copied))
        yield
        self.complete()
        if not durations.inline:
            part = self._part(RETURN, layer)
            # Else control was asked again before it served anything.
            self.holds_control = not self.clock.measured.has(part)
            if not self.holds_control:
                self.clock.start(part)

    holds_control = False

    def _asked(self, layer: int) -> Iterator[None]:
        """Wait for control, which is asked then."""
        clock = self.clock
        if not self.durations.inline and not self.holds_control:
            clock.wanted = True
            if not self.machine.take(self.durations.control):
                yield
            clock.wanted = False
        self.holds_control = False
        self.controls(REQUEST, layer, 0.0)
        yield

    def noted(self, step: int) -> None:
        """A forward pass has ended: control writes it down."""
        if self.durations.inline:
            return
        self.step = step
        note = self._part(NOTE, NONE)
        if self.holds_control:
            if self.clock.measured.has(note):
                self.holds_control = False
                self.clock.start(note)
        elif self.machine.take(self.durations.control):
            self.clock.start(note)
        else:
            self.clock.note = note

    def _part(self, kind: int, layer: int) -> Operation:
        control = self.durations.control
        return self.machine.operation(
            control, kind, self.step, layer, NONE, 0.0, 0, UNAWAITED
        )


class MeasuredReplay(Replay):
    """A replay with the times of a real run.

    Args:
        profile: the machine, without contention: what lanes cost each other is in the
            measured times.
        planner, timeline: as of `Replay`.
        measured: how long every operation really took.
    """

    steps_of = MeasuredLayerStep
    notes_heads = True

    def __init__(
        self,
        profile: HardwareProfile,
        planner: Planner,
        timeline: Timeline,
        measured: Measurements,
    ) -> None:
        super().__init__(profile, planner, timeline, clock=MeasuredClock)
        self.clock.measured = measured

    def noted(self, step: int) -> None:
        """A forward pass has ended."""
        self.layer_step.noted(step)
