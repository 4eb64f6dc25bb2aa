"""The planner: the one place that asks policies, in one fixed order.

For every layer step it looks at the active experts, asks for their assignment, holds
them, notes the accesses, and wishes for copies: what is missing, what the next layers
may need, what the cache wants to replace. A copy takes its place when it starts.

The planner keeps no clock: it is told the time, and what has started and landed, so the
same reports always give the same plans.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.engine.block import Block, read_by
from moesim.engine.gate_mass import gate_mass_kept
from moesim.engine.host import Host
from moesim.engine.memory import Link, Memory, contains
from moesim.engine.names import (
    LATE_DROP,
    LATE_KEEP,
    LATE_WAIT,
    NO_PLACE,
)
from moesim.engine.plan import Plan, decisions
from moesim.engine.starting import fill, start_policies
from moesim.policies.arrays import read_only, view_of, zeros
from moesim.policies.base import Gate, Late, MachineView, PolicyError, Work
from moesim.policies.names import (
    ABSENT,
    CPU,
    DECODE,
    DEFERRED,
    IN_FLIGHT,
    NONE,
    RESIDENT,
    WAITS,
)
from moesim.policies.parameters import expect_choice
from moesim.policies.run_context import Evaluations
from moesim.policies.sizes import LAYERS
from moesim.traces.format.layer_steps import of_step
from moesim.traces.timeline.spans import FETCH, PREFETCH, READ, REPLACE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moesim.engine.plan import Copies
    from moesim.hwprofiles.costs import Costs
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import (
        AssignmentPolicy,
        PrefetchPolicy,
        RoutingPolicy,
    )
    from moesim.policies.run_context import Future
    from moesim.policies.sizes import MemoryPlan
    from moesim.policies.systems import Policies
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape, Phase

INFINITE_S = float("inf")

KEPT_LAYERS = 3
"""Layers of a pass whose routing is kept for those that look back."""

_LATE = {"drop": LATE_DROP, "keep": LATE_KEEP, "wait": LATE_WAIT}


class Rules:
    """What is fixed for a run: sizes, and what its policies do.

    Attributes:
        layers, experts, gpus: of the model and the machine.
        rows: GPUs that compute the experts of one layer.
        splits_layers: whether each layer is computed by one GPU.
        late: of prefetches (`moesim.engine.names`).
        budget_bytes: most bytes prefetched per layer step; -1 for no limit.
        choosing_s: of a cache's choice of victims.
        looks_back: whether somebody asks for the routing of earlier layers.
        names: of the policies, by kind, for messages.
    """

    def __init__(
        self, shape: ModelShape, policies: Policies, memory: MemoryPlan
    ) -> None:
        prefetch = policies.prefetch
        assignment = policies.assignment
        # The caches of all GPUs are of one kind.
        cache = policies.caches[0]
        self.layers = shape.layers
        self.experts = shape.experts
        self.gpus = len(policies.caches)
        self.splits_layers = memory.gpu_split == LAYERS or self.gpus == 1
        self.rows = 1 if self.splits_layers else self.gpus
        expect_choice("late", prefetch.late, Late)
        self.late = _LATE[prefetch.late]
        budget = memory.prefetch_budget_bytes
        self.budget_bytes = NONE if budget is None else budget
        self.choosing_s = cache.choosing_s
        self.prefetches = prefetch.prefetches
        self.requeues = prefetch.requeue
        self.sees_future = prefetch.oracle
        self.reads_routing = prefetch.reads_routing
        self.alters = policies.routing.alters
        self.places_on_gpu = assignment.places_on_gpu
        self.precomputes = assignment.precomputes
        self.defers = assignment.defers
        self.replaces_first = cache.replaces and cache.replaces_first
        self.looks_back = self.alters or self.reads_routing
        self.names: dict[str, str] = dict(policies.names)


class UsedRouting:
    """Experts of every token of one layer step, as they are really used.

    Attributes:
        experts: uint16 [T, K].
    """

    def __init__(self) -> None:
        self._make(0, 0)
        self.experts: Ints = self._shown

    def keep(self, routing: Ints, rows: int, columns: int) -> None:
        """Take an answer, token by token."""
        if len(self._own) != rows or self._own.shape[1] != columns:
            self._make(rows, columns)
        for t in range(rows):
            for place in range(columns):
                self._own[t, place] = routing[t * columns + place]
        self.experts = self._shown

    def _make(self, rows: int, columns: int) -> None:
        answer = np.zeros((rows, columns), np.uint16)
        self._own: Ints = answer.data
        # As policies see it.
        self._shown: Ints = read_only(answer)


class Planner:
    """Asks the policies about every layer step, and keeps the books of the memories.

    Args:
        shape: the model.
        costs: what operations take on the machine.
        policies: who decides.
        memory: sizes.
        seed: for policies that draw.
        future: the whole routing, for oracles.
        calibration: activation counts float64 [L, E], or None.
        extras: calibration artefacts by name.

    Attributes:
        gpu: memories of each GPU.
        host: books of host memory where it is limited, else None.
        view: what policies see of the machine.
        reads: what the policies read of a trace (`read_by`).
        alters_now: whether the last layer step's tokens got other experts than their
            gates chose.
        routed: uint16, experts predicted for each token of the layer to come, in rows
            of `routed_columns`, where a plan begins something ahead.
        gate_mass: share of the gate's weight that altered routing kept, by layer step.
        observers: told of every report and answer (`moesim.engine.observers`).

    Raises:
        PolicyError: an oracle without a future, or an impossible memory.
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
        if memory.staging < 1:
            raise PolicyError(
                "staging: no room to stage even one expert; give at least one slot"
                " beside the cache"
            )
        self.shape = shape
        self.costs = costs
        self.policies = policies
        self.sizes = memory
        self.reads = read_by(policies)
        self.observers: list[Any] = []
        self.gate_mass: list[float] = []
        rules = Rules(shape, policies, memory)
        self.rules = rules
        self.layers = rules.layers
        experts = self.experts = rules.experts
        self.gpus = rules.gpus
        keys = rules.layers * experts
        rows = rules.rows
        self.assignment: AssignmentPolicy = policies.assignment
        self.prefetch: PrefetchPolicy = policies.prefetch
        self.routing: RoutingPolicy = policies.routing
        self.now_s = self.joined_s = 0.0
        self.place = 0
        self.planned = Plan(rules.gpus, keys, experts)
        self.gate = Gate()
        self._next_gate = Gate()
        self.alters_now = False

        # One expert of each size stands for all of them.
        sizes = np.array(shape.sizes_by_expert(), np.int64).reshape(-1)
        _, firsts, size_of = np.unique(sizes, return_index=True, return_inverse=True)
        self._firsts = [divmod(key, experts) for key in firsts.tolist()]
        self.size_of: Ints = view_of(size_of, np.int64)
        # Seconds of experts by size and tokens; as many tokens as blocks have.
        self.cpu_s: Floats = zeros((1, 1))
        self.gpu_s: Floats = zeros((1, 1))
        self._most_tokens = NONE
        self.block: Block | None = None
        self._make_memories(memory)
        self.work = Work(rows, experts)
        self.nobody = Work(rows, experts)
        self.work.first_cpu_s = costs.cpu_first_s
        self._make_work(rows, experts)
        self._keys: Ints = zeros(keys, np.int64)
        self._named: Ints = zeros(keys, np.int64)
        self._outgoing: Ints = zeros(keys, np.int64)
        self._incoming: Ints = zeros(keys, np.int64)
        self._unread: Ints = zeros(keys, np.int64)
        self._seen: Ints = zeros(experts, np.uint8)
        self._deferred_last: Ints = zeros(experts, np.int64)
        # By flat key: whether the CPU was told to compute it ahead; by layer: any.
        self._started: Ints = zeros(keys, np.uint8)
        self._started_in: Ints = zeros(rules.layers, np.uint8)
        self._counts: Ints = zeros(experts, np.int32)
        self.routed: Ints = zeros(0, np.uint16)
        self.routed_columns = 0
        # By layer, modulo: experts of every token, as they are really used.
        self._recent = [UsedRouting() for _ in range(KEPT_LAYERS)]
        self._predicted: Floats = zeros((0, 0))

        home = None
        if self.gpus > 1 and rules.splits_layers:
            home = np.array([self.home(layer) for layer in range(self.layers)])
        start_policies(
            shape,
            costs,
            policies,
            memory,
            home,
            seed=seed,
            future=future,
            calibration=calibration,
            extras=extras or {},
        )
        # What policies do may depend on what they have learned by now.
        self.rules = Rules(shape, policies, memory)
        for gpu, books in enumerate(self.gpu):
            served = None if home is None else home == gpu
            fill(books, shape, calibration, served, unified=memory.unified)
        if self.host is not None:
            books = self.host.memory
            fill(books, shape, calibration, None, unified=memory.unified)

    def _make_memories(self, memory: MemoryPlan) -> None:
        """Make the empty books of all memories, and what policies see of them."""
        shape = self.shape
        costs = self.costs
        policies = self.policies
        name = policies.names.get("cache", "cache")
        levels = self.gpus + (memory.host is not None)
        states = np.zeros((levels, self.layers * self.experts), np.int8)
        view = self.view = MachineView(self.gpus, self.layers, self.experts)
        view.states = read_only(states[: self.gpus])
        view.first_cpu_s = costs.cpu_first_s
        copy_s = [costs.copy_s(layer) for layer in range(self.layers)]
        view.copy_s = read_only(copy_s, np.float64)
        self.gpu: list[Memory] = [
            Memory(
                shape,
                memory.gpu,
                states[gpu],
                staging=memory.staging,
                cache=cache,
                name=name,
                link=Link(self.by_key(partial(costs.copy_s, gpu=gpu))),
            )
            for gpu, cache in enumerate(policies.caches)
        ]
        self.host: Host | None = None
        if memory.host is not None:
            assert policies.host_cache is not None, (
                "limited host memory needs a host cache policy"
            )
            books = Memory(
                shape,
                memory.host,
                states[self.gpus],
                staging=memory.staging,
                cache=policies.host_cache,
                name=name,
                link=Link(self.by_key(costs.read_s)),
            )
            self.host = Host(books, self.rules.rows)

    def by_key(self, seconds_of: Callable[..., float]) -> np.ndarray:
        """Seconds of every expert, float64 [L * E], asked once for each size."""
        seconds = [seconds_of(layer, expert=expert) for layer, expert in self._firsts]
        return np.array(seconds, np.float64)[np.asarray(self.size_of)]

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
    def assignment_name(self) -> str:
        """The assignment policy as a user has named it."""
        return str(self.policies.names.get("assignment", ""))

    def evaluations(self, layer: int, phase: Phase) -> Evaluations:
        """What predicting in a layer step evaluates on the GPU."""
        following = self.layers - 1 - layer
        if not self.rules.prefetches or not following:
            return Evaluations()
        return self.prefetch.evaluations(following, phase)

    def _make_work(self, rows: int, experts: int) -> None:
        arrays = self.work.show_new(rows, experts)
        self.state: Ints = arrays["state"].data
        self.work_cpu_s: Floats = arrays["cpu_s"].data
        self.host_s: Floats = arrays["host_s"].data
        self.work_gpu_s: Floats = arrays["gpu_s"].data
        self.arrive_s: Floats = arrays["arrive_s"].data
        self.link_s: Floats = arrays["link_s"].data
        self.gpu_state: Ints = arrays["gpu_state"].data
        self.ranks: Ints = arrays["ranks"].data

    def block_of(self, step: RoutedStep) -> Block:
        """One forward pass, or single layers of it, to be planned."""
        reads = self.reads
        if self.rules.alters:
            # Outputs are combined with them, whatever the policies read.
            reads = {**reads, "columns": (*reads["columns"], "weights")}
        given = of_step(step, experts=self.experts, **reads)
        return Block(given, self.experts, alters=self.rules.alters)

    def put(self, block: Block) -> None:
        """Take a block of the trace, with what as many tokens cost."""
        self.block = block
        given = block.source
        # Predictions may give an expert more tokens than it gets.
        most = int(max(given.rows.max(initial=0), given.tokens.max(initial=0)))
        if self.rules.alters or self.rules.precomputes:
            if len(self.routed) < most * self.experts:
                self.routed = zeros(most * self.experts, np.uint16)
        if most > self._most_tokens:
            self._most_tokens = most
            self._look_costs_up(np.arange(most + 1))

    def _look_costs_up(self, tokens: np.ndarray) -> None:
        costs = self.costs
        layers = range(self.layers)
        self.cpu_s = self._by_size(costs.cpu_s, tokens).data
        self.gpu_s = self._by_size(costs.gpu_s, tokens).data
        view = self.view
        view.cpu_s = read_only([costs.cpu_s(layer, tokens) for layer in layers])
        view.gpu_s = read_only([costs.gpu_s(layer, tokens) for layer in layers])

    def _by_size(
        self, seconds_of: Callable[..., np.ndarray], tokens: np.ndarray
    ) -> np.ndarray:
        """Seconds of one expert of each size, float64 [S, T + 1]."""
        return np.array(
            [
                seconds_of(layer, tokens, experts=np.full(len(tokens), expert))
                for layer, expert in self._firsts
            ]
        )

    def home(self, layer: int) -> int:
        """The GPU that runs a layer's dense part."""
        rules = self.rules
        if rules.splits_layers:
            return layer * rules.gpus // rules.layers
        return 0

    # -- the plan ---------------------------------------------------------------------

    def plan(self, s: int, now_s: float) -> Plan:
        """Plan one layer step in the order of the contract: routing, assignment, holds,
        accesses, demand, prefetches, work ahead, replacements.

        Args:
            s: the layer step's place in the block.
            now_s: the time.

        Raises:
            PolicyError: a policy answered something illegal; the message names it.
        """
        rules = self.rules
        plan = self.planned
        work = self.work
        layer = self.block.layer[s]
        self.now_s = now_s
        self.place = s
        # Before a pass's first layer other things happen too: a head, another batch.
        if layer:
            self.view.gap_s = now_s - self.joined_s
        plan.copies.count = plan.promoted.count = plan.released.count = 0
        plan.swaps.count = plan.asked.count = 0
        plan.exposed_s = 0.0
        plan.has_precomputed = plan.begins_ahead = plan.defers = False
        if rules.alters:
            self._route(s)
        elif rules.looks_back:
            self._kept(layer).experts = self._recorded(s)
        self._look(s)
        if rules.defers:
            self._rank(s)
        if rules.precomputes:
            self._take_precomputed(work, plan)
        if rules.replaces_first:
            self._replace_first(work, plan)
        self._assign(work, plan)
        if plan.asked.count:
            self._keep_computed(work, plan)
        self._note_accesses(work, plan)
        self._promote_due(layer, plan)
        if plan.asked.count:
            self._wish_first(work, plan)
        at_home = self.home(layer)
        if rules.places_on_gpu:
            for gpu in range(at_home, at_home + rules.rows):
                self._demand(work, plan, gpu)
        if self.host is not None:
            self._read_for_cpu(work, plan)
            self.host.release_gpu_experts(work, plan.lanes)
        if rules.prefetches:
            self._prefetch(work, plan, s)
        # Products that wait free no slot: staging must hold all that they wait for.
        waits = plan.flags & WAITS or rules.late == LATE_WAIT
        plan.flags &= ~WAITS
        if waits and self._can_stage_all(layer, plan):
            plan.flags |= WAITS
        if rules.precomputes and layer + 1 < rules.layers:
            self._precompute(s, plan)
        if not rules.replaces_first:
            self._ask_replacements(work, plan.swaps)
        if self.observers:
            self._tell_plan(work, plan)
        return plan

    def _tell_plan(self, work: Work, plan: Plan) -> None:
        """Tell observers what was planned."""
        arguments = (work.step, work.layer, self.now_s)
        self._tell("plan", arguments, decisions(work, plan))

    def _tell(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Tell observers of a report and what was answered."""
        for observer in self.observers:
            observer.reported(call, arguments, answer)

    def complete(self, work: Work, now_s: float) -> Plan:
        """Note that a layer step has joined: release its holds, forget what was staged
        for it, and wish for the copies that carry out the cache's replacements.
        """
        plan = self.planned
        self.now_s = now_s
        plan.copies.count = plan.promoted.count = 0
        for n in range(plan.released.count):
            # What follows ends one hold of every active expert.
            memory = self.gpu[plan.released.gpu[n]]
            memory.holds[plan.released.key[n]] += 1
        for memory in self.gpu:
            for i in range(work.active):
                key = work.first + work.experts[i]
                memory.holds[key] -= 1
                memory.used[key] = 0
            if memory.staged_of[work.layer]:
                for key in range(work.first, work.first + self.rules.experts):
                    if memory.staged[key]:
                        memory.forget_staged(key)
        if self.host is not None:
            self.host.complete(work.first)
        self.joined_s = now_s
        for n in range(plan.swaps.count):
            gpu = plan.swaps.gpu[n]
            self._wish_swap(
                work, plan, gpu, plan.swaps.other[n], plan.swaps.key[n], False
            )
        if self.observers:
            self._tell("complete", (now_s,), plan.copies.count)
        return plan

    # -- routing ----------------------------------------------------------------------

    def _kept(self, layer: int) -> UsedRouting:
        """The routing of a layer of this pass, among the last ones."""
        return self._recent[layer % KEPT_LAYERS]

    def _routing_of(self, s: int) -> Any:
        """Experts of every token of a layer step, as they are really used."""
        if self.rules.alters:
            return self._kept(self.block.layer[s]).experts
        return self._recorded(s)

    def used_routing(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Experts uint16 [T, K'] that serve the tokens of the last layer step, and
        their combine weights, where a routing policy alters them.
        """
        used = np.array(self._kept(self.work.layer).experts)
        return used, self.routing.weigh(self.gate, used)

    def _recorded(self, s: int) -> Any:
        """A layer step's rows of the routing; none where nobody has read it."""
        block = self.block
        routing = block.routing
        if not len(routing):
            return routing
        return routing[block.row_edges[s] : block.row_edges[s + 1]]

    def _rows_of(self, column: Any, s: int) -> Any:
        """The same of another column."""
        block = self.block
        if not len(column):
            return column
        return column[block.row_edges[s] : block.row_edges[s + 1]]

    def _route(self, s: int) -> None:
        """Let the routing policy choose the experts of every token."""
        block = self.block
        gate = self.gate
        experts = self.rules.experts
        layer = block.layer[s]
        gate.step = block.step[s]
        gate.layer = layer
        gate.phase = block.phase[s]
        gate.rows = block.rows[s]
        gate.experts = self._recorded(s)
        gate.weights = self._rows_of(block.weights, s)
        gate.scores = self._rows_of(block.scores, s)
        # The gate's scores on the input of the layer before.
        gate.predicted = self._predicted if layer else block.predicted[:0]
        self._predicted = self._rows_of(block.predicted, s)
        routing = self.routed
        columns = self.routing.route(gate, self.view, routing)
        first = block.new_edges[s]
        count = 0
        if columns:
            for expert in range(experts):
                self._counts[expert] = 0
            for n in range(gate.rows * columns):
                # Larger ids mark unused places.
                if routing[n] < experts:
                    self._counts[routing[n]] += 1
            for expert in range(experts):
                if self._counts[expert]:
                    block.new_served[first + count] = expert
                    block.new_tokens[first + count] = self._counts[expert]
                    count += 1
            self._kept(layer).keep(routing, gate.rows, columns)
        else:
            for n in range(block.edges[s], block.edges[s + 1]):
                block.new_served[first + count] = block.experts[n]
                block.new_tokens[first + count] = block.tokens[n]
                count += 1
            self._kept(layer).experts = gate.experts
        block.new_edges[s + 1] = first + count
        self.alters_now = columns > 0
        if len(gate.scores) or len(gate.weights):
            self.gate_mass.append(gate_mass_kept(gate, self._routing_of(s)))

    # -- what a layer step asks for ---------------------------------------------------

    def _look(self, s: int) -> None:
        """Look the active experts up: states, costs and expected arrivals."""
        block = self.block
        work = self.work
        host = self.host
        now_s = self.now_s
        begin = block.served_edges[s]
        end = block.served_edges[s + 1]
        active = end - begin
        layer = block.layer[s]
        first = layer * self.rules.experts
        work.step = block.step[s]
        work.layer = layer
        work.phase = block.phase[s]
        work.batch = block.batch[s]
        work.rows = block.rows[s]
        work.active = active
        work.first = first
        work.experts = block.served[begin:end]
        work.tokens = block.served_tokens[begin:end]
        if len(block.mean_scores):
            work.scores = block.mean_scores[
                s * self.rules.experts : (s + 1) * self.rules.experts
            ]
        if len(block.first_scores) and work.rows:
            row = block.row_edges[s] * self.rules.experts
            work.first_scores = block.first_scores[row : row + self.rules.experts]
        experts = work.experts
        tokens = work.tokens
        for i in range(active):
            key = first + experts[i]
            self.work_cpu_s[i] = self.cpu_s[self.size_of[key], tokens[i]]
            self.host_s[i] = 0.0
            if host is not None:
                self.host_s[i] = host.wait_s(key, now_s)
            self.state[i] = ABSENT
        at_home = self.home(layer)
        several = self.rules.rows > 1
        for row in range(self.rules.rows):
            memory = self.gpu[at_home + row]
            link = memory.link
            left_s = link.left_s(now_s)
            self.link_s[row] = left_s
            for i in range(active):
                key = first + experts[i]
                here = memory.state[key]
                self.work_gpu_s[row, i] = self.gpu_s[self.size_of[key], tokens[i]]
                if here == RESIDENT:
                    arrive_s = 0.0
                elif here == ABSENT:
                    # A copy starts when link and expert are there.
                    arrive_s = max(left_s, self.host_s[i]) + link.copy_s[key]
                else:
                    arrive_s = max(0.0, memory.landing_s[key] - now_s)
                self.arrive_s[row, i] = arrive_s
                self.state[i] = max(self.state[i], here)
                if several and arrive_s == 0.0:
                    here = RESIDENT
                self.gpu_state[row, i] = here

    def _rank(self, s: int) -> None:
        """Find the best place of each active expert among the experts of any token."""
        experts = self.rules.experts
        routing = self._routing_of(s)
        rows = len(routing)
        columns = routing.shape[1]
        for expert in range(experts):
            self._counts[expert] = columns
        for t in range(rows):
            for place in range(columns):
                expert = routing[t, place]
                # Larger ids mark unused places.
                if expert < experts and place < self._counts[expert]:
                    self._counts[expert] = place
        work = self.work
        for i in range(work.active):
            self.ranks[i] = self._counts[work.experts[i]]

    def _assign(self, work: Work, plan: Plan) -> None:
        """Ask for lanes and launch order, and check them.

        Raises:
            PolicyError: naming policy and layer step.
        """
        active = work.active
        lanes = plan.lanes[:active]
        order = plan.order[:active]
        for i in range(active):
            lanes[i] = CPU
            order[i] = i
            self._seen[i] = 0
        plan.flags = self.assignment.assign(work, self.view, lanes, order)
        if self.rules.defers:
            self._defer(work, plan)
        most = self.rules.rows if self.rules.places_on_gpu else 0
        legal = True
        for i in range(active):
            place = order[i]
            if lanes[i] < 0 or lanes[i] > most or place < 0 or place >= active:
                legal = False
                break
            legal = legal and not self._seen[place]
            self._seen[place] = 1
        if not legal:
            raise PolicyError(
                f"assignment policy {self.rules.names.get('assignment')!r}: step"
                f" {work.step}, layer {work.layer}: expected a lane in 0..{most} for"
                f" each of {active} active experts and an order that is a permutation"
            )
        at_home = self.home(work.layer)
        if at_home:
            for i in range(active):
                if lanes[i] > 0:
                    lanes[i] += at_home
        if plan.has_precomputed:
            for i in range(active):
                if plan.precomputed[i]:
                    lanes[i] = CPU
        if plan.defers:
            self._launch_deferred_last(plan, order)

    def _defer(self, work: Work, plan: Plan) -> None:
        """Read out of an assignment's lanes whose results join one layer later."""
        plan.defers = work.phase == DECODE and work.layer + 1 < self.rules.layers
        for i in range(work.active):
            deferred = plan.defers and plan.lanes[i] == DEFERRED
            if plan.lanes[i] == DEFERRED:
                plan.lanes[i] = CPU
            if plan.has_precomputed and plan.precomputed[i]:
                deferred = False
            if deferred and self.host is not None:
                key = work.first + work.experts[i]
                deferred = self._is_kept_in_host(key)
            plan.deferred[i] = deferred

    def _is_kept_in_host(self, key: int) -> bool:
        """Whether the CPU can compute an expert without a place in staging: that is for
        reads that a layer step waits for.
        """
        memory = self.host.memory
        return memory.state[key] == RESIDENT and not memory.staged[key]

    def _launch_deferred_last(self, plan: Plan, order: Ints) -> None:
        """Reorder positions so that what joins later goes last; either part keeps its
        order.
        """
        last = self._deferred_last
        count = 0
        for n in range(len(order)):
            if plan.deferred[order[n]]:
                last[count] = order[n]
                count += 1
            else:
                order[n - count] = order[n]
        for n in range(count):
            order[len(order) - count + n] = last[n]

    def _note_accesses(self, work: Work, plan: Plan) -> None:
        """Hold every active expert before any victim is named, then tell the caches.

        Else one miss would evict the next hit.
        """
        rules = self.rules
        block = self.block
        for gpu in range(rules.gpus):
            memory = self.gpu[gpu]
            for i in range(work.active):
                key = work.first + work.experts[i]
                memory.holds[key] += 1
                if plan.lanes[i] == 1 + gpu:
                    memory.used[key] = 1
            if memory.staged_of[work.layer]:
                self._forget_wrong_guesses(memory, work.first)
        if self.host is not None:
            self.host.note_accesses(work, plan.lanes)
            if plan.defers:
                # Needed until the product has ended, which the layer step may not see.
                for i in range(work.active):
                    if plan.deferred[i]:
                        memory = self.host.memory
                        memory.holds[work.first + work.experts[i]] += 1
        at_home = self.home(work.layer)
        for gpu in range(at_home, at_home + rules.rows):
            memory = self.gpu[gpu]
            memory.cache.accessed(work)
        first = block.served_edges[self.place]
        for i in range(work.active):
            block.state_of[first + i] = self.state[i]
            block.lane_of[first + i] = plan.lanes[i]

    def _forget_wrong_guesses(self, memory: Memory, first: int) -> None:
        """Free staging slots of prefetches that a GPU does not compute after all."""
        for key in range(first, first + self.rules.experts):
            if not memory.staged[key]:
                continue
            if memory.used[key]:
                # It may be on its way since a step that no longer needed it.
                memory.orphan[key] = 0
            else:
                memory.forget_staged(key)

    # -- demand -----------------------------------------------------------------------

    def _queue(self, plan: Plan, kind: int, gpu: int, key: int, read: bool) -> None:
        """Put a copy on the plan and on the books of its link."""
        memory = self.gpu[gpu]
        memory.link.enqueue(key)
        plan.copies.add(kind, gpu, key, read)

    def _note_promoted(self, plan: Plan, gpu: int, key: int) -> None:
        """Put a promotion on the plan, once."""
        promoted = plan.promoted
        for n in range(promoted.count):
            if promoted.gpu[n] == gpu and promoted.key[n] == key:
                return
        promoted.add(NONE, gpu, key, 0)

    def _promote_due(self, layer: int, plan: Plan) -> None:
        """Promote queued copies of a layer that should have landed before it came.

        That is all of them if its products wait for them, else replacements of caches
        with a deadline. Only what earlier plans have queued can be promoted.
        """
        rules = self.rules
        everything = rules.late == LATE_WAIT
        first = layer * rules.experts
        for gpu in range(rules.gpus):
            memory = self.gpu[gpu]
            if not (everything or memory.hurries) or not memory.link.queued:
                continue
            count = 0
            for key in range(first, first + rules.experts):
                if not memory.wished[key]:
                    continue
                # In the order of the wishes.
                n = count
                while n > 0 and memory.order[self._keys[n - 1]] > memory.order[key]:
                    self._keys[n] = self._keys[n - 1]
                    n -= 1
                self._keys[n] = key
                count += 1
            for n in range(count):
                self._promote_one(plan, memory, gpu, self._keys[n], everything)

    def _promote_one(
        self, plan: Plan, memory: Memory, gpu: int, key: int, everything: bool
    ) -> None:
        """Promote a queued copy, if it is due."""
        if everything:
            memory.demanded[key] = 1
            if self.host is not None:
                self.host.promote(key)
            self._note_promoted(plan, gpu, key)
            return
        replaced = memory.replaces[key]
        if replaced == NONE or memory.hurried[key]:
            return
        # A guess must not block the SSD.
        if self.host is not None and not self.host.holds_expert(key):
            return
        if memory.may_leave(replaced):
            memory.hurried[key] = 1
            plan.promoted.add(NONE, gpu, key, 0)

    def _demand(self, work: Work, plan: Plan, gpu: int) -> None:
        """Wish for what a GPU lacks; what is queued already is promoted."""
        memory = self.gpu[gpu]
        count = 0
        for n in range(work.active):
            i = plan.order[n]
            key = work.first + work.experts[i]
            if plan.lanes[i] != gpu + 1 or memory.state[key] != ABSENT:
                continue
            if not memory.wished[key]:
                self._keys[count] = key
                count += 1
            elif not memory.demanded[key]:
                memory.demanded[key] = 1
                if self.host is not None:
                    self.host.promote(key)
                self._note_promoted(plan, gpu, key)
        if not count:
            return
        keys = self._keys[:count]
        memory.demand(work, keys)
        if self.rules.choosing_s > 0.0:
            self._note_exposed(work, plan, gpu, keys)
        host = self.host
        if host is None:
            for n in range(count):
                self._queue(plan, FETCH, gpu, keys[n], False)
            return
        host.need(work, keys, True)
        for n in range(count):
            read = contains(host.reads[: host.unread], keys[n])
            self._queue(plan, FETCH, gpu, keys[n], read)

    def _note_exposed(self, work: Work, plan: Plan, gpu: int, keys: Ints) -> None:
        """Note by how much the choice of victims outlasts the first load."""
        row = 0 if self.rules.splits_layers else gpu
        first_s = INFINITE_S
        for i in range(work.active):
            if contains(keys, work.first + work.experts[i]):
                first_s = min(first_s, self.arrive_s[row, i])
        exposed_s = max(0.0, self.rules.choosing_s - first_s)
        plan.exposed_s = max(plan.exposed_s, exposed_s)

    def _read_for_cpu(self, work: Work, plan: Plan) -> None:
        """Wish for reads of what the CPU computes; the layer step itself holds it."""
        host = self.host
        memory = host.memory
        count = 0
        unread = 0
        for n in range(work.active):
            i = plan.order[n]
            key = work.first + work.experts[i]
            if plan.lanes[i] != CPU or memory.state[key] != ABSENT:
                continue
            self._keys[count] = key
            count += 1
            if not memory.wished[key]:
                self._unread[unread] = key
                unread += 1
        for n in range(count):
            host.promote(self._keys[n])
        reads = self._unread[:unread]
        if unread:
            memory.demand(work, reads)
        for n in range(count):
            key = self._keys[n]
            host.cpu_reads[key] = 1
            plan.copies.add(READ, NONE, key, contains(reads, key))

    def _can_stage_all(self, layer: int, plan: Plan) -> bool:
        """Whether staging could hold every queued copy of a layer at once, beside what
        it holds already.
        """
        experts = self.rules.experts
        at_home = self.home(layer)
        for gpu in range(at_home, at_home + self.rules.rows):
            memory = self.gpu[gpu]
            # Slots of prefetches for other layers can be taken from them.
            count = memory.staged_of[layer]
            for n in range(plan.copies.count):
                here = plan.copies.key[n] // experts == layer
                if plan.copies.gpu[n] == gpu and here:
                    count += 1
            for n in range(plan.promoted.count):
                if plan.promoted.gpu[n] == gpu:
                    count += 1
            if count > memory.staging:
                return False
        return True

    # -- prefetches -------------------------------------------------------------------

    def _show(self, s: int) -> None:
        """Show the machine what a layer step knows, and what the trace says ahead."""
        rules = self.rules
        block = self.block
        view = self.view
        layer = block.layer[s]
        memory = self.gpu[0]
        view.link_wait_s = memory.link.left_s(self.now_s) + memory.link.queued_s
        if rules.reads_routing:
            nobody = block.routing[:0]
            view.routing = self._kept(layer).experts
            view.before = self._kept(layer - 1).experts if layer else nobody
            view.before_that = self._kept(layer - 2).experts if layer > 1 else nobody
        if block.predictors:
            first = s * block.predictors
            view.workload = block.workload[first : first + block.predictors]
            view.score_sums = block.score_sums[first : first + block.predictors]
        if len(block.predicted):
            view.predicted = block.predicted[
                block.row_edges[s] : block.row_edges[s + 1]
            ]
        if rules.sees_future:
            view.coming = block.experts
            view.coming_edges = block.edges[s + 1 : s + 1 + rules.layers - layer]

    def _prefetch(self, work: Work, plan: Plan, s: int) -> None:
        """Wish for what the prefetch policy names, within its byte budget."""
        self._show(s)
        count = self.prefetch.prefetch(work, self.view, self._named)
        named = self._checked(count)
        # A new prediction of a layer takes the place of the last one.
        self._unshield(work.layer)
        last = NONE
        for n in range(len(named)):
            layer = named[n] // self.rules.experts
            if layer != last:
                last = layer
                self._unshield(layer)
        self._wish_for(work, plan, named)

    def foretell(self, drafted: int, draft_s: float, now_s: float) -> Plan:
        """Wish for what a drafted token foretells.

        Args:
            drafted: number of the token among those of the block.
            draft_s: seconds that a drafted token takes.
            now_s: the time.
        """
        plan = self.planned
        plan.copies.count = plan.promoted.count = 0
        self.now_s = now_s
        view = self.view
        view.forget()
        memory = self.gpu[0]
        view.link_wait_s = memory.link.left_s(now_s) + memory.link.queued_s
        first = drafted * self.rules.layers
        predicted = self.block.drafts[first : first + self.rules.layers]
        count = self.prefetch.foretold(predicted, draft_s, view, self._named)
        self._wish_for(self.nobody, plan, self._checked(count))
        return plan

    def _checked(self, count: int) -> Ints:
        """The keys that a prefetch policy has named.

        Raises:
            PolicyError: some are none.
        """
        named = self._named[:count]
        for n in range(len(named)):
            if named[n] < 0 or named[n] >= len(self._named):
                raise PolicyError(
                    f"prefetch policy {self.rules.names.get('prefetch')!r}: layer"
                    f" {named[n] // self.rules.experts}, expert"
                    f" {named[n] % self.rules.experts}: no such expert"
                )
        return named

    def _wish_for(self, work: Work, plan: Plan, named: Ints) -> None:
        """Wish for named experts that are absent, and shield all of them."""
        rules = self.rules
        for n in range(len(named)):
            memory = self.gpu[self.home(named[n] // rules.experts)]
            memory.shielded[named[n]] = 1
        left_bytes = rules.budget_bytes
        for n in range(len(named)):
            key = named[n]
            layer = key // rules.experts
            gpu = self.home(layer)
            memory = self.gpu[gpu]
            if memory.state[key] != ABSENT or memory.wished[key]:
                continue
            if rules.budget_bytes >= 0:
                if left_bytes < memory.bytes_of[key]:
                    break
                left_bytes -= memory.bytes_of[key]
            memory.prefetch(work, key)
            # The products of this very layer may wait for it: then it is no guess.
            awaited = layer == work.layer and rules.late == LATE_WAIT
            memory.demanded[key] = awaited
            read = self._needs_read(work, key, awaited)
            self._queue(plan, FETCH if awaited else PREFETCH, gpu, key, read)

    def _needs_read(self, work: Work, key: int, demanded: bool) -> bool:
        """Hold an expert in host memory for a queued copy; whether it must be read."""
        if self.host is None:
            return False
        self._keys[0] = key
        self.host.need(work, self._keys[:1], demanded)
        return self.host.unread > 0

    def _unshield(self, layer: int) -> None:
        memory = self.gpu[self.home(layer)]
        first = layer * self.rules.experts
        for key in range(first, first + self.rules.experts):
            memory.shielded[key] = 0

    # -- replacements -----------------------------------------------------------------

    def _ask_replacements(self, work: Work, swaps: Copies) -> None:
        """Ask caches for their own copies, and check them.

        Raises:
            PolicyError: a swap of experts that are not where it says.
        """
        at_home = self.home(work.layer)
        for gpu in range(at_home, at_home + self.rules.rows):
            memory = self.gpu[gpu]
            if not memory.replaces_itself:
                continue
            count = memory.cache.replacements(
                work, memory.state, self._outgoing, self._incoming
            )
            for n in range(count):
                going = self._outgoing[n]
                coming = self._incoming[n]
                enters = memory.state[coming] != RESIDENT or memory.staged[coming]
                if memory.state[going] != RESIDENT or not enters:
                    raise PolicyError(
                        f"cache policy {memory.name!r}: step {work.step}, layer"
                        f" {work.layer}: swap of {going} for {coming}: the first must"
                        " be resident and the second must not be"
                    )
                swaps.add(NONE, gpu, coming, going)

    def _wish_swap(
        self, work: Work, plan: Plan, gpu: int, going: int, key: int, demanded: bool
    ) -> None:
        """Wish for one replacement, unless a copy has overtaken it."""
        memory = self.gpu[gpu]
        if memory.state[key] != ABSENT or memory.wished[key]:
            return
        if memory.state[going] != RESIDENT:
            return
        memory.wish(key, True, demanded)
        memory.replaces[key] = going
        read = self._needs_read(work, key, demanded)
        self._queue(plan, FETCH if demanded else REPLACE, gpu, key, read)

    def _place_of(self, work: Work, key: int) -> int:
        """Position of an expert among the active ones; -1 if it is none of them."""
        for i in range(work.active):
            if work.first + work.experts[i] == key:
                return i
        return NONE

    def _replace_first(self, work: Work, plan: Plan) -> None:
        """Let caches replace residents before their layer step is assigned; its work
        then tells of the new content.
        """
        asked = plan.asked
        self._ask_replacements(work, asked)
        if not asked.count:
            return
        rows = self.rules.rows
        at_home = self.home(work.layer)
        for row in range(rows):
            gpu = at_home + row
            memory = self.gpu[gpu]
            lands_s = self.link_s[row]
            for n in range(asked.count):
                if asked.gpu[n] != gpu:
                    continue
                lands_s += memory.link.copy_s[asked.key[n]]
                coming = self._place_of(work, asked.key[n])
                if coming != NONE:
                    self.state[coming] = IN_FLIGHT
                    self.arrive_s[row, coming] = lands_s
                    if rows > 1 and memory.state[asked.key[n]] != IN_FLIGHT:
                        self.gpu_state[row, coming] = ABSENT
                going = self._place_of(work, asked.other[n])
                if going != NONE:
                    self.arrive_s[row, going] = INFINITE_S
                    self.gpu_state[row, going] = ABSENT
        # What leaves every GPU that has it is a miss.
        for i in range(work.active):
            gone = True
            for row in range(rows):
                gone = gone and self.arrive_s[row, i] == INFINITE_S
            if gone:
                self.state[i] = ABSENT
            if rows == 1:
                self.gpu_state[0, i] = self.state[i]

    def _keep_computed(self, work: Work, plan: Plan) -> None:
        """Note that outgoing experts are there which this step computes where they are:
        they leave after it.
        """
        at_home = self.home(work.layer)
        asked = plan.asked
        for n in range(asked.count):
            going = self._place_of(work, asked.other[n])
            if going != NONE and plan.lanes[going] == 1 + asked.gpu[n]:
                self.state[going] = RESIDENT
                self.arrive_s[asked.gpu[n] - at_home, going] = 0.0

    def _wish_first(self, work: Work, plan: Plan) -> None:
        """Wish for what `_replace_first` found; demand, where this step awaits it. What
        it computes on that GPU all the same leaves after it.
        """
        asked = plan.asked
        for n in range(asked.count):
            gpu = asked.gpu[n]
            key = asked.key[n]
            outgoing = asked.other[n]
            going = self._place_of(work, outgoing)
            if going != NONE and plan.lanes[going] == 1 + gpu:
                plan.swaps.add(NONE, gpu, key, outgoing)
                continue
            if going != NONE:
                memory = self.gpu[gpu]
                memory.holds[outgoing] -= 1
                plan.released.add(NONE, gpu, outgoing, 0)
            coming = self._place_of(work, key)
            awaited = coming != NONE and plan.lanes[coming] == 1 + gpu
            self._wish_swap(work, plan, gpu, outgoing, key, awaited)

    # -- products ahead of their gate -------------------------------------------------

    def _take_precomputed(self, work: Work, plan: Plan) -> None:
        """Note which active experts the CPU has started one layer ahead."""
        plan.has_precomputed = self._started_in[work.layer] != 0
        if not plan.has_precomputed:
            return
        self._started_in[work.layer] = 0
        for i in range(work.active):
            plan.precomputed[i] = self._started[work.first + work.experts[i]]
        for key in range(work.first, work.first + self.rules.experts):
            self._started[key] = 0

    def _precompute(self, s: int, plan: Plan) -> None:
        """Let the assignment name experts of the next layer; those that are not in host
        memory are left to their own layer.
        """
        block = self.block
        gate = self._next_gate
        tokens = plan.ahead_tokens
        for expert in range(self.rules.experts):
            tokens[expert] = 0
        layer = block.layer[s] + 1
        gate.step = block.step[s]
        gate.layer = layer
        gate.phase = block.phase[s]
        gate.rows = block.rows[s]
        gate.experts = self._routing_of(s)
        gate.weights = block.weights[:0]
        gate.scores = block.scores[:0]
        gate.predicted = self._rows_of(block.predicted, s)
        columns = self.assignment.precompute(gate, self.view, self.routed, tokens)
        self.routed_columns = columns
        if not columns:
            return
        host = self.host
        for expert in range(self.rules.experts):
            if not tokens[expert]:
                continue
            self._started_in[layer] = 1
            key = layer * self.rules.experts + expert
            if host is not None:
                # Staging is for reads that somebody waits for, not for guesses.
                if not self._is_kept_in_host(key):
                    tokens[expert] = 0
                    continue
                # Needed until the product has ended and its layer step is over.
                memory = host.memory
                memory.holds[key] += 2
                host.held_ahead[key] = 1
            self._started[key] = 1
            plan.begins_ahead = True

    # -- what the engine reports ------------------------------------------------------

    def start_copy(self, gpu: int, key: int, now_s: float) -> bool:
        """Take a place for a queued copy to a GPU that starts now."""
        memory = self.gpu[gpu]
        link = memory.link
        landing_s = now_s + link.copy_s[key]
        demanded = memory.demanded[key] != 0
        place = memory.start(key, landing_s)
        if place == NO_PLACE and demanded:
            # A prefetch that waits in staging is a guess; demand is not.
            idle = memory.idle_prefetch(key // self.rules.experts, NONE)
            if idle != NONE:
                memory.drop_staged(idle)
                place = memory.start(key, landing_s)
        if place != NO_PLACE:
            link.withdraw(key)
            link.busy_until_s = landing_s
        if self.observers:
            self._tell("start_copy", (gpu, key, now_s), place)
        return place != NO_PLACE

    def gives_up(self, gpu: int, key: int) -> bool:
        """Whether a queued copy that finds no place is dropped; else it waits."""
        memory = self.gpu[gpu]
        if memory.demanded[key]:
            return False
        replaced = memory.replaces[key]
        if replaced != NONE:
            left = memory.state[replaced] != RESIDENT
            fits = memory.swap_fits(key, replaced)
            return left or memory.hurried[key] or not fits
        return not memory.staging_will_have_room()

    def cancel_copy(self, gpu: int, key: int) -> None:
        """Forget the wish for a queued copy to a GPU."""
        memory = self.gpu[gpu]
        memory.cancel(key)
        memory.link.withdraw(key)
        if self.host is not None:
            self.host.unneed(key)
        if self.observers:
            self._tell("cancel_copy", (gpu, key), None)

    def landed(self, gpu: int, key: int) -> bool:
        """Note that a copy has landed; whether a staging slot is free again."""
        memory = self.gpu[gpu]
        freed = memory.land(key)
        # Host memory is told in any case.
        if self.host is not None and self.host.unneed(key):
            freed = True
        if self.observers:
            self._tell("landed", (gpu, key), freed)
        return freed

    def start_read(self, key: int, now_s: float) -> bool:
        """Take a place in host memory for a read that starts now."""
        memory = self.host.memory
        link = memory.link
        landing_s = now_s + link.copy_s[key]
        place = memory.start(key, landing_s)
        if place != NO_PLACE:
            link.busy_until_s = landing_s
        if self.observers:
            self._tell("start_read", (key, now_s), place)
        return place != NO_PLACE

    def cancel_read(self, key: int) -> None:
        """Forget the wish for a queued read."""
        self.host.memory.cancel(key)
        if self.observers:
            self._tell("cancel_read", (key,), None)

    def read_done(self, key: int) -> bool:
        """Note that an expert was read; whether a staging slot is free again."""
        freed = self.host.land(key)
        if self.observers:
            self._tell("read_done", (key,), freed)
        return freed

    def computed(self, gpu: int, key: int) -> bool:
        """Note that an active expert's product has ended, on a GPU or (-1) the CPU;
        whether a staging slot is free again.
        """
        freed = False
        if gpu != NONE:
            memory = self.gpu[gpu]
            freed = memory.computed(key)
        elif self.host is not None:
            freed = self.host.computed(key)
        if self.observers:
            self._tell("computed", (gpu, key), freed)
        return freed

    def unawaited_ended(self, key: int) -> bool:
        """Note that a product has ended for which its plan did not wait: ahead of its
        gate, or one that joins one layer later; whether a staging slot is free again.
        """
        freed = self.host is not None and self.host.unneed(key)
        if self.observers:
            self._tell("unawaited_ended", (key,), freed)
        return freed
