"""Replay of a trace: the process that walks layer steps, and what it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.engine.block import Block
from moesim.engine.durations import durations_of
from moesim.engine.layer_step import LayerStep
from moesim.engine.operations import machine_of
from moesim.policies.arrays import view_of
from moesim.policies.names import NONE
from moesim.sim.clock import FastClock
from moesim.sim.noise import Noise
from moesim.sim.results import ReplayResult, SimulationError, draft_seconds
from moesim.traces.format.arrivals import Idle
from moesim.traces.format.batch import RoutedStep
from moesim.traces.format.layer_steps import of_step
from moesim.traces.format.schema import Phase
from moesim.traces.timeline import spans
from moesim.traces.timeline.spans import DENSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from moesim.engine.planner import Planner
    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.sim.clock import VirtualClock
    from moesim.traces.format.batch import LayerSteps
    from moesim.traces.timeline.spans import Chunk, Timeline


class Replay:
    """One run: planner, machine, and the process that walks the layer steps.

    Args:
        profile: the machine.
        planner: its policies and memories, with the costs that its decisions see.
        timeline: takes what happens.
        noise_seed: draws every operation's time from the profile's measured
            distributions; None takes the means.
        costs: how long all but planning and products takes, where that is not what
            decisions see.
        clock: spends the time: `FastClock`, or SimPy's
            (`moesim.sim.simpy_clock.SimpyClock`).

    Attributes:
        steps_of: what walks single layer steps.
        notes_heads: whether a pass has a head that takes no time, too.
    """

    steps_of = LayerStep
    notes_heads = False

    def __init__(
        self,
        profile: HardwareProfile,
        planner: Planner,
        timeline: Timeline,
        *,
        noise_seed: int | None = None,
        costs: Costs | None = None,
        clock: Callable[[HardwareProfile, Noise | None], VirtualClock] = FastClock,
    ) -> None:
        self._costs = costs or planner.costs
        self._timeline = timeline
        self._shape = planner.shape
        noise = None if noise_seed is None else Noise(profile, noise_seed)
        self.clock = clock(profile, noise)
        self.machine = machine_of(profile.lanes, profile.workers.values())
        self.planner = planner
        durations = durations_of(profile, planner, costs)
        self.layer_step = self.steps_of(self.machine, self.clock, planner, durations)
        self.machine.clock = self.clock
        self.machine.consequences = self.layer_step
        self.machine.gate = self.layer_step.transfers
        durations.inline = self.machine.shares(durations.control, durations.compute[1])
        if durations.inline:
            self.machine.take(durations.control)
        self._predicts = self._note_evaluations()
        self._full_spans = spans.CHUNK_SPANS
        self._full_accesses = spans.CHUNK_ACCESSES
        self._steps = self._steps_given = self._layer_steps = 0
        self._accesses: list[Chunk] = []
        self._accesses_held = 0
        self._passes: list[Chunk] = []
        self._pass_s = 0.0
        self._activation_s = np.zeros(0)
        self.block: Block | None = None

    def _note_evaluations(self) -> bool:
        """Note what predicting evaluates; whether any gate."""
        layers = self._shape.layers
        gates = False
        for phase in Phase:
            for layer in range(layers):
                costs = self.planner.evaluations(layer, phase)
                self.layer_step.gates[int(phase) * layers + layer] = costs.gates
                parts = costs.dense_parts
                self.layer_step.dense_parts[int(phase) * layers + layer] = parts
                gates |= costs.gates > 0
        return gates

    # -- the run ----------------------------------------------------------------------

    def run(
        self,
        walk: Iterable[LayerSteps | RoutedStep | Idle],
        progress: Callable[[RoutedStep], None] | None = None,
    ) -> ReplayResult:
        """Replay all forward passes and return when the last layer step has joined.

        Args:
            walk: blocks as `moesim.traces.format.layer_steps.layer_steps` cuts them, or
                single passes. Each is asked for when the one before has ended, so that
                passes may depend on the time; between them nothing may be to do.
            progress: called after each forward pass, whose layers it is not told.

        Raises:
            PolicyError: a policy answered something illegal.
            SimulationError: nothing runs, although something is awaited: our bug.
        """
        if not self.clock.drive(self._process(walk, progress), self.machine):
            raise SimulationError("nothing runs, although something is awaited")
        self._give_spans()
        self._give_accesses()
        self._give_passes()
        return ReplayResult(
            steps=self._steps,
            layer_steps=self._layer_steps,
            events=self.clock.scheduled + self.clock.turns,
            makespan_s=self.clock.now_s,
        )

    def _process(
        self,
        walk: Iterable[LayerSteps | RoutedStep | Idle],
        progress: Callable[[RoutedStep], None] | None,
    ) -> Iterator[None]:
        layer_step = self.layer_step
        clock = self.clock
        for given in walk:
            if isinstance(given, Idle):
                clock.sleep(given.until_s)
                yield
                continue
            self._put(given)
            block = self.block
            noted = 0
            drafted = 0
            begins = True
            for s in range(block.count):
                if begins:
                    begins = False
                    self._pass_s = clock.now_s
                    # Nothing was read since the last pass's head.
                    layer_step.has_read = False
                    for _ in range(block.drafted[s]):
                        self._draft(block, s)
                        yield
                        self._drafted(block, s, drafted)
                        drafted += 1
                yield from layer_step.run(s)
                if block.head_s[s] < 0.0:
                    continue
                # The pass is over.
                begins = True
                if block.head_s[s] > 0.0 or self.notes_heads:
                    home = layer_step.durations.compute[1]
                    layer_step.alone(home, DENSE, NONE, block.head_s[s])
                    yield
                self.noted(block.step[s])
                block.start_s[s] = self._pass_s
                block.end_s[s] = clock.now_s
                if clock.spans.count >= self._full_spans:
                    self._give_spans()
                if self._accesses_held + s + 1 - noted >= self._full_accesses:
                    self._note(block, noted, s + 1, progress)
                    noted = s + 1
            self._note(block, noted, block.count, progress)

    def noted(self, step: int) -> None:
        """A forward pass has ended."""

    def _draft(self, block: Block, s: int) -> None:
        """Start drafting one token on the first GPU."""
        self.layer_step.step = block.step[s]
        home = self.layer_step.durations.compute[1]
        self.layer_step.alone(home, DENSE, NONE, block.draft_s[s])

    def _drafted(self, block: Block, s: int, drafted: int) -> None:
        """Prefetch what a drafted token foretells."""
        if len(block.drafts):
            plan = self.planner.foretell(drafted, block.draft_s[s], self.clock.now_s)
            self.layer_step.transfers.enqueue(plan, block.step[s])
        self.machine.offer()

    # -- blocks -----------------------------------------------------------------------

    def _put(self, given: LayerSteps | RoutedStep) -> None:
        """Take a block of the trace, with what it costs."""
        costs = self._costs
        shape = self._shape
        planner = self.planner
        if isinstance(given, RoutedStep):
            given = of_step(given, experts=shape.experts, **planner.reads)
        block = Block(given, shape.experts, alters=planner.rules.alters)
        last = np.flatnonzero(np.diff(given.step, append=-1))
        layers = np.diff(last, prepend=-1)
        tokens = given.pass_tokens[last]
        context_tokens = given.context_tokens[last]
        dense_s, head_s = costs.dense_of_passes(
            tokens, context_tokens, given.sequences[last]
        )
        if given.drafted is not None:
            # Of a draft every token is compared with what the model says.
            outputs = np.where(given.drafted[last], tokens, given.sequences[last])
            _, head_s = costs.dense_of_passes(tokens, context_tokens, outputs)
        heads = np.full(block.count, -1.0)
        heads[last] = head_s
        block.head_s = heads.data
        block.dense_s = np.repeat(dense_s, layers).data
        if self._predicts:
            gate_s = np.array([costs.gate_s(count) for count in tokens.tolist()])
            block.gate_s = np.repeat(gate_s, layers).data
        self._put_drafts(block, last)
        most = int(given.rows.max(initial=0))
        if most >= len(self._activation_s):
            by_rows = [costs.activation_s(count) for count in range(most + 1)]
            self._activation_s = np.array(by_rows)
        block.activation_s = self._activation_s[given.rows].data
        planner.put(block)
        self.block = block

    def _put_drafts(self, block: Block, last: np.ndarray) -> None:
        """Note what is drafted before each pass of a block."""
        given = block.source
        if given.drafted is None:
            return
        layers = self._shape.layers
        drafted = np.zeros(block.count, np.int64)
        draft_s = np.zeros(block.count)
        first = last - (layers - 1)
        drafted[first] = given.drafted[last]
        draft_s[first] = draft_seconds(
            self._costs, self.planner, given.context_tokens[last]
        )
        block.drafted = drafted.data
        block.draft_s = draft_s.data
        prefetch = self.planner.policies.prefetch
        if not prefetch.foretells:
            return
        row_edges = np.asarray(block.row_edges)
        # Rows of each drafted token, layer by layer: [D, L].
        rows = [
            row_edges[place : place + layers] + token
            for place, count in zip(first, drafted[first], strict=True)
            for token in range(count)
        ]
        if rows:
            known = prefetch.drafted(np.asarray(block.routing)[np.array(rows)])
            block.drafts = view_of(known.reshape(-1, known.shape[2]), np.int32)

    # -- results ----------------------------------------------------------------------

    def _note(
        self,
        block: Block,
        begin: int,
        end: int,
        progress: Callable[[RoutedStep], None] | None,
    ) -> None:
        """Note accesses and passes of layer steps that have ended."""
        if end == begin:
            return
        given = block.source
        edges = np.asarray(block.served_edges)[begin : end + 1]
        counts = np.diff(edges)
        first, last = int(edges[0]), int(edges[len(counts)])
        compute = np.asarray(self.layer_step.durations.compute).astype(np.int8)
        self._accesses.append(
            {
                "step": np.repeat(given.step[begin:end].astype(np.int32), counts),
                "layer": np.repeat(given.layer[begin:end].astype(np.int16), counts),
                "expert": np.asarray(block.served)[first:last],
                "tokens": np.asarray(block.served_tokens)[first:last],
                "lane": compute[np.asarray(block.lane_of)[first:last]],
                "state": np.asarray(block.state_of)[first:last],
            }
        )
        self._accesses_held += end - begin
        if self._accesses_held >= self._full_accesses:
            self._give_accesses()
        ended = begin + np.flatnonzero(np.asarray(block.head_s)[begin:end] >= 0.0)
        made = given.pass_tokens if given.made is None else given.made
        self._passes.append(
            {
                "step": given.step[ended].astype(np.int32),
                "phase": given.phase[ended],
                "batch": given.batch[ended].astype(np.int32),
                "tokens": made[ended].astype(np.int32),
                "sequences": given.sequences[ended].astype(np.int32),
                "start_s": np.asarray(block.start_s)[ended],
                "end_s": np.asarray(block.end_s)[ended],
            }
        )
        self._steps += len(ended)
        self._layer_steps += end - begin
        if self._steps - self._steps_given >= spans.CHUNK_STEPS:
            self._give_passes()
        if progress is not None:
            for place in ended.tolist():
                progress(_pass(given, place))

    def _give_spans(self) -> None:
        self._timeline.take("timeline", self.clock.spans.cut())

    def _give_accesses(self) -> None:
        self._give("accesses", self._accesses)
        self._accesses = []
        self._accesses_held = 0

    def _give_passes(self) -> None:
        self._give("steps", self._passes)
        self._passes = []
        self._steps_given = self._steps

    def _give(self, table: str, parts: list[Chunk]) -> None:
        if parts:
            chunk = {
                name: np.concatenate([part[name] for part in parts])
                for name in parts[0]
            }
            self._timeline.take(table, chunk)


def _pass(given: LayerSteps, place: int) -> RoutedStep:
    """A forward pass that has ended, by its last layer step, without its layers."""
    return RoutedStep(
        step=int(given.step[place]),
        phase=Phase(int(given.phase[place])),
        batch=int(given.batch[place]),
        tokens=int(given.pass_tokens[place]),
        context_tokens=int(given.context_tokens[place]),
        sequences=int(given.sequences[place]),
        layers=[],
        kept=None if given.made is None else int(given.made[place]),
    )
