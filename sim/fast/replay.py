"""Replay of a trace: the process that walks layer steps, and what it is made of."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles import lanes
from moesim.policies.arrays import view_of
from moesim.policies.base import MachineView
from moesim.policies.names import NONE
from moesim.policies.planner.residency import GLOBAL
from moesim.sim.fast.block import Block
from moesim.sim.fast.clock import FastClock
from moesim.sim.fast.host import Host
from moesim.sim.fast.layer_step import LayerStep
from moesim.sim.fast.memory import Link, Memory
from moesim.sim.fast.names import (
    LATE_DROP,
    LATE_KEEP,
    LATE_WAIT,
    NO_PLACE_DROP,
    NO_PLACE_STAGE,
    NO_PLACE_WAIT,
)
from moesim.sim.fast.operations import machine_of
from moesim.sim.fast.planner import Planner, Rules
from moesim.sim.fast.transfers import Durations
from moesim.sim.noise import Noise
from moesim.sim.results import ReplayResult, SimulationError, draft_seconds
from moesim.traces.format.batch import RoutedStep
from moesim.traces.format.schema import Phase
from moesim.traces.timeline import spans
from moesim.traces.timeline.spans import DENSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.planner.memory_level import MemoryLevel
    from moesim.policies.planner.planner import Planner as OldPlanner
    from moesim.sim.fast.clock import VirtualClock
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.timeline.spans import Chunk, Timeline

_LATE = {
    "drop": LATE_DROP,
    "active": LATE_DROP,
    "keep": LATE_KEEP,
    "wait": LATE_WAIT,
}
_NO_PLACE = {"stage": NO_PLACE_STAGE, "wait": NO_PLACE_WAIT, "drop": NO_PLACE_DROP}


class Replay:
    """One run: planner, machine, and the process that walks the layer steps.

    Args:
        profile: the machine.
        costs: how long operations take on it.
        planner: its policies and memories, started and filled.
        timeline: takes what happens.
        noise_seed: draws every operation's time from the profile's measured
            distributions; None takes the means.
        clock: spends the time.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        costs: Costs,
        planner: OldPlanner,
        timeline: Timeline,
        *,
        noise_seed: int | None = None,
        clock: type[VirtualClock] = FastClock,
    ) -> None:
        self._profile = profile
        self._costs = costs
        self._source = planner
        self._timeline = timeline
        shape = planner.shape
        self._shape = shape
        noise = None if noise_seed is None else Noise(profile, noise_seed)
        self.clock = clock(profile, noise)
        self.machine = machine_of(profile)

        sizes = np.array(shape.sizes_by_expert(), np.int64).reshape(-1)
        # One expert of each size stands for all of them.
        _, self._firsts, size_of = np.unique(
            sizes, return_index=True, return_inverse=True
        )
        self._size_of = size_of
        rules = self._rules()
        view = MachineView(rules.gpus, shape.layers, shape.experts)
        states = np.zeros((len(self._levels), shape.layers * shape.experts), np.int8)
        memories = [
            self._memory(level, states[m], sizes, m)
            for m, level in enumerate(self._levels)
        ]
        host = None
        if planner.host is not None:
            host = Host(memories.pop(), rules.rows)
        view.states = states[: rules.gpus].data
        view.first_cpu_s = costs.cpu_first_s
        copy_s = [costs.copy_s(layer) for layer in range(shape.layers)]
        view.copy_s = np.array(copy_s).data
        policies = planner.policies
        self.planner = Planner(
            rules,
            memories,
            host,
            view,
            policies.assignment,
            policies.prefetch,
            policies.routing,
        )
        self.planner.size_of = view_of(size_of, np.int64)
        self.planner.work.first_cpu_s = costs.cpu_first_s
        durations = self._durations()
        self.layer_step = LayerStep(self.machine, self.clock, self.planner, durations)
        self.machine.clock = self.clock
        self.machine.consequences = self.layer_step
        self.machine.gate = self.layer_step.transfers
        durations.inline = self.machine.shares(durations.control, durations.compute[1])
        if durations.inline:
            self.machine.take(durations.control)
        self._predicts = self._note_evaluations()
        self._most_tokens = -1
        self._full_spans = spans.CHUNK_SPANS
        self._full_accesses = spans.CHUNK_ACCESSES
        self._steps = self._steps_given = self._layer_steps = 0
        self._accesses: list[Chunk] = []
        self._accesses_held = 0
        self._passes: list[Chunk] = []
        self._pass_s = 0.0
        self.block: Block | None = None

    @property
    def _levels(self) -> list[MemoryLevel]:
        """Memories: GPUs, then limited host memory."""
        host = self._source.host
        return self._source.gpu + ([] if host is None else [host.level])

    # -- what a run is made of --------------------------------------------------------

    def _rules(self) -> Rules:
        planner = self._source
        policies = planner.policies
        prefetch = policies.prefetch
        cache = policies.caches[0]
        budget = planner.sizes.prefetch_budget_bytes
        rules = Rules(self._shape.layers, self._shape.experts, planner.gpus)
        rules.splits_layers = planner.splits_layers
        rules.rows = 1 if planner.splits_layers else planner.gpus
        rules.late = _LATE[prefetch.late]
        rules.no_place = _NO_PLACE[prefetch.no_place]
        rules.budget_bytes = NONE if budget is None else budget
        rules.choosing_s = cache.choosing_s
        rules.prefetches = prefetch.prefetches
        rules.requeues = prefetch.requeue
        rules.sees_future = prefetch.oracle
        rules.reads_routing = prefetch.reads_routing
        rules.alters = policies.routing.alters
        rules.places_on_gpu = policies.assignment.places_on_gpu
        rules.precomputes = policies.assignment.precomputes
        rules.defers = policies.assignment.defers
        rules.replaces_first = cache.replaces and cache.replaces_first
        rules.names = dict(policies.names)
        return rules

    def _memory(
        self, level: MemoryLevel, state: np.ndarray, sizes: np.ndarray, m: int
    ) -> Memory:
        """Books like those of a level that is filled for the run."""
        costs = self._costs
        books = level.memory
        shape = self._shape
        of_host = m == self._source.gpus
        seconds_of = costs.read_s if of_host else partial(costs.copy_s, gpu=m)
        state[:] = books.state.ravel()
        is_global = books.size.scope == GLOBAL
        pools = range(1 if is_global else shape.layers)
        memory = Memory(
            shape.layers,
            shape.experts,
            sizes,
            state,
            pool_bytes=np.array([books.free_bytes(layer) for layer in pools]),
            is_global=is_global,
            equal_sizes=books.equal_sizes,
            staging=self._source.sizes.staging,
            cache=level.cache,
            name=level.name,
            link=Link(self._by_key(seconds_of)),
        )
        # What it starts with is all that it ever held.
        memory.used_bytes = memory.used_high_bytes = books.used_high_bytes
        return memory

    def _by_key(self, seconds_of: Callable[..., float]) -> np.ndarray:
        """Seconds of every expert, float64 [L * E], asked once for each size."""
        places = [divmod(key, self._shape.experts) for key in self._firsts.tolist()]
        seconds = [seconds_of(layer, expert=expert) for layer, expert in places]
        return np.array(seconds, np.float64)[self._size_of]

    def _durations(self) -> Durations:
        profile = self._profile
        costs = self._costs
        planner = self._source
        gpus = planner.gpus
        tiered = planner.host is not None
        made = Durations()
        index = profile.lanes.index
        made.control = index(lanes.CONTROL.lane())
        made.ssd = index(lanes.SSD.lane())
        for name, kinds in (
            ("compute", [lanes.CPU.lane(), *lanes.GPU.lanes(gpus)]),
            ("link", lanes.H2D.lanes(gpus)),
            ("back", lanes.D2H.lanes(gpus)),
            ("predicts", lanes.GPU.lanes(gpus)),
        ):
            numbers = np.array([index(lane) for lane in kinds], np.int32)
            setattr(made, name, numbers.data)
        plan_s = costs.planning_terms(
            planner.assignment_name, tiered=tiered, own_s=planner.own_planning_s
        )
        made.plan_s = view_of(plan_s, np.float64)
        made.first_op_s = view_of(costs.first_op_terms(tiered=tiered), np.float64)
        made.join_s = view_of(costs.join_terms(tiered=tiered), np.float64)
        made.split_s = costs.split_s
        made.always_split = view_of(planner.always_split, np.uint8)
        made.dispatch_s = costs.dispatch_s
        made.cpu_first_s = costs.cpu_first_s
        made.gpu_first_s = costs.gpu_first_s
        # Where all memory is shared, results need no way back.
        made.moves_activations = not profile.shares_memory
        made.writes_back = planner.policies.writes_back
        if made.writes_back:
            back_s = [
                self._by_key(partial(costs.writeback_s, gpu=gpu)) for gpu in range(gpus)
            ]
            made.back_s = np.array(back_s).data
        if tiered:
            made.read_s = self._by_key(costs.read_s).data
            made.first_read_s = costs.ssd_first_s
            made.dense_after_read = costs.after_read("dense")
            made.copy_after_read = costs.after_read("h2d")
            made.compute_after_read = costs.after_read("cpu")
        return made

    def _note_evaluations(self) -> bool:
        """Note what predicting evaluates; whether any gate."""
        layers = self._shape.layers
        gates = False
        for phase in Phase:
            for layer in range(layers):
                costs = self._source.evaluations(layer, phase)
                self.layer_step.gates[int(phase) * layers + layer] = costs.gates
                parts = costs.dense_parts
                self.layer_step.dense_parts[int(phase) * layers + layer] = parts
                gates |= costs.gates > 0
        return gates

    # -- the run ----------------------------------------------------------------------

    def run(
        self,
        blocks: Iterable[LayerSteps],
        progress: Callable[[RoutedStep], None] | None = None,
    ) -> ReplayResult:
        """Replay all blocks and return when the last layer step has joined.

        Args:
            blocks: as `moesim.traces.format.layer_steps.layer_steps` cuts them.
            progress: called after each forward pass, whose layers it is not told.

        Raises:
            PolicyError: a policy answered something illegal.
            SimulationError: nothing runs, although something is awaited: our bug.
        """
        if not self.clock.drive(self._process(blocks, progress), self.machine):
            raise SimulationError("nothing runs, although something is awaited")
        self._give_spans()
        self._give_accesses()
        self._give_passes()
        books = list(self.planner.gpu)
        if self.planner.host is not None:
            books.append(self.planner.host.memory)
        for level, memory in zip(self._levels, books, strict=True):
            level.memory.used_high_bytes = memory.used_high_bytes
        return ReplayResult(
            steps=self._steps,
            layer_steps=self._layer_steps,
            events=self.clock.scheduled + self.clock.turns,
            makespan_s=self.clock.now_s,
        )

    def _process(
        self,
        blocks: Iterable[LayerSteps],
        progress: Callable[[RoutedStep], None] | None,
    ) -> Iterator[None]:
        layer_step = self.layer_step
        clock = self.clock
        layers = self._shape.layers
        for given in blocks:
            self._put(given)
            block = self.block
            passes = 0
            drafted = 0
            for s in range(block.count):
                if block.layer[s] == 0:
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
                if block.head_s[s] > 0.0:
                    home = layer_step.durations.compute[1]
                    layer_step.alone(home, DENSE, NONE, block.head_s[s])
                    yield
                block.start_s[s] = self._pass_s
                block.end_s[s] = clock.now_s
                passes += 1
                if clock.spans.count >= self._full_spans:
                    self._give_spans()
                if self._accesses_held + passes * layers >= self._full_accesses:
                    self._note(block, s + 1 - passes * layers, s + 1, progress)
                    passes = 0
            self._note(block, block.count - passes * layers, block.count, progress)

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

    def _put(self, given: LayerSteps) -> None:
        """Take a block of the trace, with what it costs."""
        costs = self._costs
        shape = self._shape
        block = Block(given, shape.experts, alters=self.planner.rules.alters)
        last = np.flatnonzero(given.layer == shape.layers - 1)
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
        block.dense_s = np.repeat(dense_s, shape.layers).data
        if self._predicts:
            gate_s = np.array([costs.gate_s(count) for count in tokens.tolist()])
            block.gate_s = np.repeat(gate_s, shape.layers).data
        self._put_drafts(block, last)
        self._put_costs(block)
        self.planner.put(block)
        self.block = block

    def _put_costs(self, block: Block) -> None:
        """Look seconds up for as many tokens as the block's layer steps have."""
        rows = np.asarray(block.rows)
        most = int(rows.max(initial=0))
        costs = self._costs
        # Predictions may give an expert more tokens than it gets.
        if most > self._most_tokens:
            tokens = np.arange(most + 1)
            layers = range(self._shape.layers)
            planner = self.planner
            planner.cpu_s = self._by_size(costs.cpu_s, tokens).data
            planner.gpu_s = self._by_size(costs.gpu_s, tokens).data
            view = planner.view
            view.cpu_s = np.array([costs.cpu_s(layer, tokens) for layer in layers]).data
            view.gpu_s = np.array([costs.gpu_s(layer, tokens) for layer in layers]).data
            by_rows = [costs.activation_s(count) for count in range(most + 1)]
            self._activation_s = np.array(by_rows)
            self._most_tokens = most
        block.activation_s = self._activation_s[rows].data

    def _by_size(
        self, seconds_of: Callable[..., np.ndarray], tokens: np.ndarray
    ) -> np.ndarray:
        """Seconds of one expert of each size, float64 [S, T + 1]."""
        rows = []
        for key in self._firsts.tolist():
            layer, expert = divmod(key, self._shape.experts)
            experts = np.full(len(tokens), expert)
            rows.append(seconds_of(layer, tokens, experts=experts))
        return np.array(rows)

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
            self._costs, self._source, given.context_tokens[last]
        )
        block.drafted = drafted.data
        block.draft_s = draft_s.data
        prefetch = self._source.policies.prefetch
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
        if self.planner.rules.alters:
            mass = np.asarray(block.gate_mass)[begin:end]
            self._source.gate_mass.extend(mass[~np.isnan(mass)].tolist())
        layers = self._shape.layers
        ended = np.arange(begin + layers - 1, end, layers)
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
