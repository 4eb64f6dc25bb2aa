"""One layer step, for any clock: dense part, plan, launch, compute, join.

The order is a contract. It is written as a generator: each wait that it yields ends
before it goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.engine.names import (
    AHEAD,
    AWAITED_AHEAD,
    COMPUTED,
    COPIED,
    DEMAND,
    FETCHED,
    HAS_READ,
    KEPT,
    PREDICTED,
    TURN,
    UNAWAITED,
    WHOLLY,
)
from moesim.engine.operations import Consequences
from moesim.engine.transfers import Transfers
from moesim.policies.arrays import zeros
from moesim.policies.names import CPU, NONE, RESIDENT, SERIAL, WAITS
from moesim.traces.timeline.spans import (
    ACTIVATION,
    COMPUTE,
    DENSE,
    FETCH,
    JOIN,
    PLAN,
    READ,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.engine.block import Block
    from moesim.engine.operations import Clock, Machine, Operation
    from moesim.engine.plan import Plan
    from moesim.engine.planner import Planner
    from moesim.engine.transfers import Durations
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work


class LayerStep(Consequences):
    """Walks through layer steps in one world, asking one planner.

    Attributes:
        transfers: copies and reads under way.
        pending: products of the layer step that have not ended.
        fetched: fetched experts that the CPU of a serial plan still waits for.
        cpu_used: whether the CPU has a part in the layer step.
        gates, dense_parts: int64 [2 * L], by phase and layer: what predicting evaluates
            (`Evaluations`).
    """

    def __init__(
        self, machine: Machine, clock: Clock, planner: Planner, durations: Durations
    ) -> None:
        rules = planner.rules
        self.machine = machine
        self.clock = clock
        self.planner = planner
        self.durations = durations
        self.transfers = Transfers(machine, clock, planner, durations)
        self.layers = rules.layers
        self.experts = rules.experts
        self.pending = 0
        self.step = 0
        self.has_read = False
        self.gates: Ints = zeros(2 * rules.layers, np.int64)
        self.dense_parts: Ints = zeros(2 * rules.layers, np.int64)
        self.cpu_used = False
        # What the CPU of a serial plan starts with.
        self._held: list[Operation] = []
        self.fetched = 0
        # By flat key: products that nobody awaits yet; keys that the next step awaits.
        self._ahead: list[Operation | None] = [None] * (rules.layers * rules.experts)
        self._awaited: list[int] = []
        self._unused: Ints = zeros(rules.gpus + 1, np.uint8)

    def run(self, s: int) -> Iterator[None]:
        """Run one layer step of the planner's block; each wait that it yields ends
        before it goes on.
        """
        planner = self.planner
        block = planner.block
        durations = self.durations
        machine = self.machine
        work = planner.work
        layer = block.layer[s]
        self.step = block.step[s]
        at_home = planner.home(layer)

        # Dense part; then control plans. Nothing starts meanwhile.
        self.alone(durations.compute[1 + at_home], DENSE, layer, self.dense_s(block, s))
        yield
        if not durations.inline and not machine.take(durations.control):
            yield
        self.begin(s)
        plan = planner.plan(s, self.clock.now_s)
        copied = plan.copies.count + plan.promoted.count
        plan_s = plan.exposed_s + self.control_s(durations.plan_s, work, copied)
        self.controls(PLAN, layer, plan_s)
        yield

        # Lanes work, and control serves them meanwhile.
        self.launch(s)
        machine.give(durations.control)
        yield

        # Results join, holds are released, and the cache may replace what it likes.
        if self.cpu_used and durations.moves_activations:
            self.alone(
                durations.back[at_home], ACTIVATION, layer, block.activation_s[s]
            )
            yield
        self.controls(JOIN, layer, self.join_s(work, copied))
        yield
        self.complete()
        if not durations.inline:
            machine.give(durations.control)

    def join_s(self, work: Work, copied: int) -> float:
        """Seconds of joining: more where CPU and GPU share the layer step."""
        durations = self.durations
        join_s = self.control_s(durations.join_s, work, copied)
        shared = self.cpu_used and self._gpu_used()
        if shared or durations.always_split[work.layer]:
            join_s += durations.split_s
            # A graph that is built once wakes the CPU even where it has nothing to do.
            if not self.cpu_used:
                join_s += durations.cpu_first_s
        return join_s

    def begin(self, s: int) -> None:
        """The gate has spoken: nothing starts until the plan is launched."""
        block = self.planner.block
        self.step = block.step[s]
        active = block.experts[block.edges[s] : block.edges[s + 1]]
        self.transfers.begin_decisions(block.layer[s], active)

    def dense_s(self, block: Block, s: int) -> float:
        """Seconds of a layer's dense part, with gates that predict."""
        dense_s = block.dense_s[s]
        if self.has_read:
            dense_s *= self.durations.dense_after_read
        gates = self.gates[block.phase[s] * self.layers + block.layer[s]]
        if gates:
            dense_s += gates * block.gate_s[s]
        return dense_s

    def launch(self, s: int) -> None:
        """Queue copies and products of the layer step that was planned."""
        planner = self.planner
        plan = planner.planned
        work = planner.work
        transfers = self.transfers
        if planner.host is not None:
            self._note_reads(plan)
        promoted = plan.promoted
        for n in range(promoted.count):
            transfers.promote(promoted.gpu[n], promoted.key[n])
        transfers.enqueue(plan, self.step)
        self.cpu_used = self._dispatch(work, plan)
        if plan.begins_ahead:
            self._begin_ahead(plan, work.layer + 1)
        self._predict(work, planner.block, s)
        if not self.pending:
            self.all_computed()
        transfers.end_decisions()

    def complete(self) -> None:
        """The layer step has joined: holds end, and the cache may replace."""
        planner = self.planner
        plan = planner.complete(planner.work, self.clock.now_s)
        if plan.copies.count:
            self.transfers.enqueue(plan, self.step)
        self.machine.offer()

    # -- operations of control and of the model ---------------------------------------

    def control_s(self, cost: Floats, work: Work, copied: int) -> float:
        """Seconds of control: base, per active expert, per copy, and of an SSD."""
        return cost[0] + cost[1] * work.active + cost[2] * copied + cost[3]

    def alone(self, lane: int, kind: int, layer: int, work_s: float) -> None:
        """Start one operation; the process's turn comes after it."""
        machine = self.machine
        # One thread may serve the first GPU's lane and control: then the model's, until
        # it asks for experts. Results are brought back while control waits to join.
        taken = self.durations.inline or kind == ACTIVATION
        inline = taken and machine.shares(lane, self.durations.control)
        follows = KEPT if inline else TURN
        operation = machine.operation(
            lane, kind, self.step, layer, NONE, work_s, 0, follows
        )
        if inline:
            self.clock.start(operation)
        else:
            machine.submit(operation, DEMAND)

    def controls(self, kind: int, layer: int, work_s: float) -> None:
        """Let control, which was taken, work; the process's turn comes after it."""
        control = self.durations.control
        operation = self.machine.operation(
            control, kind, self.step, layer, NONE, work_s, 0, KEPT
        )
        self.clock.start(operation)

    # -- products ---------------------------------------------------------------------

    def _note_reads(self, plan: Plan) -> None:
        """Note whether the layer step demands a read."""
        copies = plan.copies
        self.has_read = False
        for n in range(copies.count):
            if copies.kind[n] == READ or (copies.kind[n] == FETCH and copies.other[n]):
                self.has_read = True

    def _dispatch(self, work: Work, plan: Plan) -> bool:
        """Queue products in launch order; whether the CPU has one."""
        planner = self.planner
        durations = self.durations
        machine = self.machine
        transfers = self.transfers
        several = planner.rules.rows > 1
        copied = plan.copies.count + plan.promoted.count
        first_op_s = self.control_s(durations.first_op_s, work, copied)
        for code in range(len(self._unused)):
            self._unused[code] = 1
        if plan.has_precomputed:
            for i in range(work.active):
                if plan.precomputed[i]:
                    self._awaited.append(work.first + work.experts[i])
        # Products of earlier layer steps are the CPU's, ended or not.
        cpu_used = len(self._awaited) > 0
        if cpu_used:
            self._await()
        count = 0
        for n in range(work.active):
            i = plan.order[n]
            if plan.has_precomputed and plan.precomputed[i] == WHOLLY:
                continue
            code = plan.lanes[i]
            key = work.first + work.experts[i]
            if code == CPU:
                seconds = work.cpu_s[i]
                if planner.host is not None and planner.host.cpu_reads[key]:
                    seconds *= durations.compute_after_read
                first_s = durations.cpu_first_s
            else:
                seconds = work.gpu_s[code - 1 if several else 0, i]
                first_s = durations.gpu_first_s
            work_s = durations.dispatch_s + seconds
            # The first product of a lane takes longer: its worker has to be woken.
            if self._unused[code]:
                self._unused[code] = 0
                work_s += first_op_s + first_s
            product = machine.operation(
                durations.compute[code],
                COMPUTE,
                self.step,
                work.layer,
                work.experts[i],
                work_s,
                0,
                COMPUTED,
            )
            if code == CPU:
                cpu_used = True
                if plan.defers and plan.deferred[i]:
                    product.follows = AHEAD
                    self._ahead[key] = product
                    self._awaited.append(key)
                else:
                    count += 1
                if plan.flags & SERIAL:
                    self._held.append(product)
                elif planner.host is None:
                    machine.submit(product, DEMAND)
                else:
                    transfers.start_on_cpu(product)
                continue
            count += 1
            memory = planner.gpu[code - 1]
            if plan.flags & SERIAL and memory.state[key] != RESIDENT:
                self.fetched += 1
                product.follows = FETCHED
            if plan.flags & WAITS:
                transfers.barred.append(product)
            else:
                transfers.start_on_gpu(code - 1, product)
        self.pending += count
        if plan.flags & WAITS:
            transfers.open_when_landed(work.layer)
        if self._held and not self.fetched:
            self._release_held()
        return cpu_used

    def _gpu_used(self) -> bool:
        """Whether a GPU has had a product in this layer step."""
        for code in range(1, len(self._unused)):
            if not self._unused[code]:
                return True
        return False

    def _await(self) -> None:
        """Count products of earlier layer steps, unless they have ended."""
        for key in self._awaited:
            product = self._ahead[key]
            if product is not None:
                product.follows = AWAITED_AHEAD
                self._ahead[key] = None
                self.pending += 1
        self._awaited.clear()

    def _release_held(self) -> None:
        """Let the CPU of a serial plan begin."""
        held = self._held
        self._held = []
        for product in held:
            self.transfers.start_on_cpu(product)

    def _begin_ahead(self, plan: Plan, layer: int) -> None:
        """Queue products of the next layer's experts, after this layer's own."""
        durations = self.durations
        planner = self.planner
        for expert in range(self.experts):
            tokens = plan.ahead_tokens[expert]
            if not tokens:
                continue
            key = layer * self.experts + expert
            work_s = planner.cpu_s[planner.size_of[key], tokens] + durations.dispatch_s
            product = self.machine.operation(
                durations.compute[CPU],
                COMPUTE,
                self.step,
                layer,
                expert,
                work_s,
                0,
                AHEAD,
            )
            self._ahead[key] = product
            self.machine.submit(product, DEMAND)

    def _predict(self, work: Work, block: Block, s: int) -> None:
        """Queue the evaluation of coming layers' dense parts, to predict them."""
        parts = self.dense_parts[block.phase[s] * self.layers + work.layer]
        if not parts:
            return
        durations = self.durations
        work_s = parts * block.dense_s[s] + durations.dispatch_s
        operation = self.machine.operation(
            durations.predicts[self.planner.home(work.layer)],
            DENSE,
            self.step,
            work.layer,
            NONE,
            work_s,
            0,
            PREDICTED,
        )
        self.pending += 1
        self.transfers.predicting = True
        self.machine.submit(operation, DEMAND)

    # -- ends -------------------------------------------------------------------------

    def follow(self, operation: Operation) -> None:
        """Let happen what follows an operation's end."""
        follows = operation.follows
        if follows == COPIED:
            self.transfers.copied(operation)
        elif follows == COMPUTED:
            self._computed(operation)
        elif follows == TURN:
            self.clock.wake()
        elif follows == KEPT:
            lane = self.machine.lanes[operation.lane]
            lane.worker.kept = True
            self.clock.wake()
        elif follows == HAS_READ:
            self.transfers.has_read(operation)
        elif follows == AHEAD:
            self._unawaited_ended(operation)
        elif follows == FETCHED:
            self.fetched -= 1
            if not self.fetched:
                self._release_held()
            self._computed(operation)
        elif follows != UNAWAITED:
            if follows == AWAITED_AHEAD:
                key = operation.layer * self.experts + operation.expert
                self.transfers.report(AHEAD, NONE, key)
            else:
                self.transfers.predicting = False
                self.machine.offer()
            self._count()

    def _computed(self, operation: Operation) -> None:
        """Let go of the weights, then count the product."""
        lane = self.machine.lanes[operation.lane]
        planner = self.planner
        # Where nothing is staged there is nothing to let go of.
        lets_go = planner.host is not None
        if lane.gpu != NONE:
            memory = planner.gpu[lane.gpu]
            lets_go = memory.staged_total > 0
        if lets_go:
            key = operation.layer * self.experts + operation.expert
            self.transfers.report(COMPUTED, lane.gpu, key)
        self._count()

    def _count(self) -> None:
        """The last product ends the layer step's work."""
        self.pending -= 1
        if not self.pending:
            self.all_computed()

    def _unawaited_ended(self, operation: Operation) -> None:
        """Let go of a product that nobody has awaited yet."""
        key = operation.layer * self.experts + operation.expert
        # A wrong guess of an earlier step may end after its successor has begun.
        if self._ahead[key] is operation:
            self._ahead[key] = None
        self.transfers.report(AHEAD, NONE, key)

    def all_computed(self) -> None:
        """Give the process its turn once control is free: it joins before it serves its
        lanes again.
        """
        if self.machine.take(self.durations.control):
            self.clock.wake()
