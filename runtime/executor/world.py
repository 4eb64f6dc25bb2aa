"""The real world: operations that really read, copy and compute, on real workers.

Everything that follows from a plan is the engine's (`moesim.engine`). Two things exist
only here. Experts have places: before the planner's word gives a place away, whoever
still computes with what lies there finishes. And products ahead of the gate are made
for certain tokens: a token that needs such an expert without having been predicted for
it is served in the expert's own layer, on its own input.

A landing is known in two places: here at the moment it happens (products that wait for
it start at once), and in the planner's books when the control thread has reported it,
before it plans again and when it joins a layer.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch
from moesim.policies.base import CPU, RESIDENT
from moesim.policies.planner.plan import FETCH, READ, REPLACE
from moesim.runtime.executor.layer_job import PrecomputedRows
from moesim.runtime.executor.operations import Compute, Copy, Precompute, Read
from moesim.traces.timeline.spans import (
    ACTIVATION,
    DENSE,
    JOIN,
    PLAN,
    pack_span,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.policies.planner.plan import Copies, Plan
    from moesim.policies.planner.planner import Planner
    from moesim.runtime.executor.lanes import Lanes, Operation, WakingLock
    from moesim.runtime.executor.operations import Memories
    from moesim.traces.timeline.spans import Timeline

NO_WAITS = ()


class RealWorld:
    """Makes real operations and hands them to workers.

    Between two layer steps products ahead of the gate run where the CPU lane has a
    thread that is free: its own, or the control thread, which waits. Where that thread
    also runs the model (one core for everything), they begin with the next layer step.

    Attributes:
        lanes: names of the lanes, by index.
        fetched_left: fetched experts that a serial plan's CPU still waits for.
        is_computed: whether all products of the layer step have ended.
        dispatch_s: per layer step, seconds from the end of planning until all work was
            handed out.
        hand_off_s: per layer step, seconds from the end of planning to the first start
            of another worker; NaN where there was none.
    """

    def __init__(
        self, lanes: Lanes, memories: Memories, planner: Planner, timeline: Timeline
    ) -> None:
        self.lanes = lanes.names
        self.submit = lanes.submit
        self.withdraw = lanes.withdraw
        self.now_s = lanes.clock_s
        self.fetched_left: Callable[[], int] = lambda: 0
        self.is_computed: Callable[[], bool] = lambda: True
        self.dispatch_s = array("d")
        self.hand_off_s = array("d")
        self._lanes = lanes
        self._memories = memories
        self._planner = planner
        self._timeline = timeline
        self._cpu = self.lanes.index("cpu")
        self._gpu = self.lanes.index("gpu0")
        self._link = self.lanes.index("h2d0")
        self._back_link = self.lanes.index("d2h0")
        self._ssd = self.lanes.index("ssd")
        self._control = self.lanes.index("control")
        self._lane_of = np.array([self._cpu, self._gpu], np.int8)
        self._link_worker = lanes.worker("h2d0")
        self._device_worker = lanes.worker("gpu0")
        self._elsewhere = [
            lanes.worker(name) is not lanes.control for name in self.lanes
        ]
        self._begun_s = 0.0
        self._planned_s = 0.0
        self._step = 0

        # What is made ready outside the lock and queued inside it.
        self._products: list[Compute] = []
        self._new_precomputes: list[Precompute] = []
        # Products ahead of the gate: for the layer step to come, by key; for the one
        # under way; and all that are queued or being made.
        self._coming: dict[int, Precompute] = {}
        self._current: list[Precompute] = []
        self._running: list[Precompute] = []

    # -- operations -------------------------------------------------------------------

    def read(
        self, step: int, layer: int, expert: int, *, staged: bool, demanded: bool
    ) -> Read:
        """Make the read of an expert, with its place in host memory."""
        del demanded  # real reads take as long as they take
        operation = Read(self._memories, self._ssd, step, layer, expert)
        operation.staged = staged
        self._memories.host.expect(self._memories.key(operation), staged=staged)
        return operation

    def copy(self, copies: Copies, position: int, step: int) -> Copy:
        """Make the copy of an expert; host memory is in use until it has ended."""
        expert = copies.experts[position]
        operation = Copy(
            self._memories, self._link, copies.kind, step, copies.layer, expert
        )
        operation.staged = copies.kind == FETCH and copies.staged[position]
        self._memories.host.use(self._memories.key(operation))
        return operation

    def computes(self, plan: Plan) -> list[Compute]:
        """The products that `launching` has made; host memory is in use until then."""
        on_gpu = self._planner.gpu[0].memory.state[plan.work.layer]
        for product in self._products:
            if product.lane == self._cpu:
                self._memories.host.use(self._memories.key(product))
            elif plan.serial and on_gpu[product.expert] != RESIDENT:
                # The last fetched expert lets the CPU begin: then it must be there.
                product.settles = lambda: self.fetched_left() == 1
        return self._products

    def precomputes(self, _: Plan) -> list[Precompute]:
        """The products ahead of the gate that `launching` has made."""
        for product in self._new_precomputes:
            self._memories.host.use(product.key)
            self._running.append(product)
        return self._new_precomputes

    # -- what the engine reports ------------------------------------------------------

    def enqueuing(self, copies: Copies) -> None:
        """Give copies into the cache their slots.

        Staged demand fetches win theirs when they start.
        """
        if copies.kind == READ:
            return
        first_key = copies.layer * self._memories.experts
        self._memories.slots.assign(
            [
                first_key + expert
                for expert, staged in zip(copies.experts, copies.staged, strict=True)
                if not (staged and copies.kind == FETCH)
            ]
        )

    def read_done(self, operation: Operation) -> None:
        """Nothing: the planner is told when it is next asked."""

    def landed(self, operation: Operation, _: int) -> None:
        """Let go of host memory; the planner is told when it is next asked."""
        self._memories.host.unuse(self._memories.key(operation))

    def dropped(self, layer: int, expert: int) -> None:
        """Let go of host memory."""
        self._memories.host.unuse(layer * self._memories.experts + expert)

    def computed(self, _: Operation | None) -> None:
        """Wake the control thread, which joins the results."""
        self._lanes.control.wake()

    # -- one layer step ---------------------------------------------------------------

    def exclusive(self) -> WakingLock:
        """The lanes' lock: nothing starts or ends while it is held."""
        return self._lanes.lock

    def begin_layer(self) -> None:
        """Report what has landed; from here on no place is given back."""
        self._begun_s = self._lanes.clock_s()
        with self._lanes.lock:
            self._memories.host.freeze()
        self.take_in()

    def planned(self, plan: Plan) -> tuple[()]:
        """Note the plan and every access; planning has taken its time already."""
        work = plan.work
        self._planned_s = self._lanes.clock_s()
        self._step = work.step
        self._note(PLAN, work.layer, self._begun_s, self._planned_s)
        lanes = self._lane_of[plan.lanes]
        self._timeline.access(
            work.step, work.layer, work.experts, work.tokens, lanes, work.state
        )
        job = self._memories.job
        if work.routing is not job.routed.routing:
            job.reroute(work)
        self.hand_off_s.append(np.nan)
        return NO_WAITS

    def launching(self, plan: Plan) -> None:
        """Make the products, and bring hidden states to where the CPU reads."""
        work = plan.work
        job = self._memories.job
        job.results = [None] * len(work.experts)
        self._products = self._make_products(plan)
        cpu_used = any(product.lane == self._cpu for product in self._products)
        if plan.precompute is not None or cpu_used:
            self._hand_to_cpu(work.layer)
        self._new_precomputes = self._make_precomputes(plan)
        self._make_way(plan.copies)
        with self._lanes.lock:
            self._memories.slots.free_staging = plan.staging_slots[0]
            self._vacate(plan.copies)

    def all_computed(self) -> Callable[[], bool]:
        """Wait for the last product; meanwhile places may be given back."""
        with self._lanes.lock:
            self._memories.host.thaw()
        self.dispatch_s.append(self._lanes.clock_s() - self._planned_s)
        return self.is_computed

    def joined(self, plan: Plan, *, cpu_used: bool) -> tuple[()]:
        """Add up the results."""
        del cpu_used  # the device brings the CPU's results over as it joins them
        memories = self._memories
        with self._lanes.lock:
            memories.host.freeze()
        self.take_in()
        start_s = self._lanes.clock_s()
        memories.job.gather()
        memories.job.answer = memories.device.join(memories.job)
        self._note(JOIN, plan.work.layer, start_s, self._lanes.clock_s())
        return NO_WAITS

    def replacing(self, copies: Sequence[Copies]) -> None:
        """Free the places of what has left, and of what was computed ahead."""
        self._make_way(copies)
        with self._lanes.lock:
            for product in self._current:
                product.over = True
                if product.done:
                    self._memories.host.unuse(product.key)
            self._current.clear()
            self._vacate(copies)

    def end_layer(self) -> None:
        """Let the model go on."""
        self._memories.host.thaw()
        self._memories.job.answered = True
        self._device_worker.wake()

    def take_in(self) -> None:
        """Report landings to the planner in the order in which they happened, and write
        spans down.
        """
        finished = self._lanes.finished
        planner = self._planner
        while finished:
            operation = finished.popleft()
            if operation.kind == READ:
                planner.read_done(operation.layer, operation.expert)
            elif FETCH <= operation.kind <= REPLACE:
                planner.landed(0, operation.layer, operation.expert)
            if operation.end_s < 0.0:
                continue  # the device tells when, later
            self._timeline.spans.extend(
                pack_span(
                    operation.lane,
                    operation.kind,
                    operation.step,
                    operation.layer,
                    operation.expert,
                    operation.start_s,
                    operation.end_s,
                    operation.nbytes,
                )
            )
            self._note_hand_off(operation)

    # -- products ---------------------------------------------------------------------

    def _make_products(self, plan: Plan) -> list[Compute]:
        """One product per active expert, but for what was computed ahead."""
        work = plan.work
        experts = work.experts.tolist()
        codes = plan.lanes.tolist()
        staged = {
            expert
            for copies in plan.copies
            if copies.kind == FETCH
            for expert, is_staged in zip(copies.experts, copies.staged, strict=True)
            if is_staged
        }
        precomputed = None if work.precomputed is None else work.precomputed.tolist()
        ahead = self._coming
        self._coming = {}
        self._current = list(ahead.values())
        first_key = work.layer * self._memories.experts

        products = []
        for position in plan.order:
            expert = experts[position]
            on_cpu = codes[position] == CPU
            only = None
            if precomputed is not None and precomputed[position]:
                rows = ahead[first_key + expert].rows
                missing = self._memories.job.take_precomputed(position, rows)
                if not len(missing):
                    continue
                only = torch.from_numpy(missing)
            product = Compute(
                self._memories,
                self._cpu if on_cpu else self._gpu,
                (work.step, work.layer, expert),
                position,
                on_cpu=on_cpu,
                staged=expert in staged,
                released=self._link_worker.offer,
            )
            product.only = only
            products.append(product)
        return products

    def _make_precomputes(self, plan: Plan) -> list[Precompute]:
        """Products of the next layer's experts, for tokens predicted to need them."""
        precompute = plan.precompute
        work = plan.work
        if precompute is None:
            return []
        hidden = self._memories.job.hidden_cpu
        products = []
        for expert, tokens in zip(
            precompute.experts.tolist(), precompute.tokens.tolist(), strict=True
        ):
            if precompute.routing is None:
                rows = np.arange(min(tokens, len(hidden)))
            else:
                rows = np.flatnonzero((precompute.routing == expert).any(axis=1))
            product = Precompute(
                self._memories,
                self._cpu,
                (work.step, work.layer + 1, expert),
                hidden,
                PrecomputedRows(rows - len(hidden), hidden),
                self._precompute_ended,
            )
            self._coming[product.key] = product
            products.append(product)
        return products

    def _precompute_ended(self, product: Precompute) -> None:
        """Wake control: it may wait for the product, or for the weights' place."""
        self._running.remove(product)
        self._lanes.control.wake()

    def _hand_to_cpu(self, layer: int) -> None:
        """Bring hidden states to where the CPU reads."""
        job = self._memories.job
        start_s = self._lanes.clock_s()
        job.hidden_cpu, nbytes = self._memories.device.to_host(job.hidden)
        if nbytes:
            end_s = self._lanes.clock_s()
            self._timeline.span(
                self._back_link,
                ACTIVATION,
                self._step,
                layer,
                -1,
                start_s,
                end_s,
                nbytes,
            )

    # -- places -----------------------------------------------------------------------

    def _make_way(self, copies: Sequence[Copies]) -> None:
        """Wait for products whose weights have left host memory by the books.

        They are wrong guesses, but what is read next may be read into their place.
        """
        host = self._planner.host
        if host is None or not self._running:
            return
        if not any(True in part.read for part in copies):
            return
        state = host.memory.state.reshape(-1)
        leaving = [
            product for product in self._running if state[product.key] != RESIDENT
        ]
        self._lanes.control.serve(lambda: all(product.done for product in leaving))

    def _vacate(self, copies: Sequence[Copies]) -> None:
        """Take back the slots of what had left a memory and is brought there again."""
        for part in copies:
            for expert, read in zip(part.experts, part.read, strict=True):
                key = part.layer * self._memories.experts + expert
                if part.kind != READ:
                    self._memories.slots.forget(key)
                if read:
                    self._memories.host.forget(key)

    # -- spans ------------------------------------------------------------------------

    def _note(self, kind: int, layer: int, start_s: float, end_s: float) -> None:
        """Write a span of control down."""
        self._timeline.span(
            self._control, kind, self._step, layer, -1, start_s, end_s, 0
        )

    def _note_hand_off(self, operation: Operation) -> None:
        """Note when the first other worker has begun after planning."""
        if not self.hand_off_s or operation.kind == DENSE:
            return
        if not self._elsewhere[operation.lane] or not np.isnan(self.hand_off_s[-1]):
            return
        if operation.start_s >= self._planned_s:
            self.hand_off_s[-1] = operation.start_s - self._planned_s
