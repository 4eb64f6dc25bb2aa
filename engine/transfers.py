"""Copies and reads on their way: queued, started, landed; and what waits for them.

A copy to a GPU is queued on its link once its expert is in host memory; where that is
limited, a read comes first. What waits for an expert (a product, a copy) is queued the
moment it lands. While decisions are under way nothing starts and no landing is
reported: a plan must hold for the memories it was made for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.engine.names import (
    AHEAD,
    BEHIND_DEMAND,
    COPIED,
    DEMAND,
    DROP,
    HAS_READ,
    LATE_KEEP,
    LATE_WAIT,
    REPLACEMENT,
    START,
    UNAWAITED,
    WAIT,
)
from moesim.engine.operations import Gate, Queue
from moesim.policies.arrays import zeros
from moesim.policies.names import NONE
from moesim.traces.timeline.spans import FETCH, PREFETCH, READ, REPLACE

if TYPE_CHECKING:
    from moesim.engine.operations import Clock, Machine, Operation
    from moesim.engine.plan import Plan
    from moesim.engine.planner import Planner
    from moesim.policies.arrays import Floats, Ints


class PendingRead:
    """A read that has not landed, and what follows it.

    Attributes:
        operation: the read; `started`: it has a place, and is under way.
        copies: those that are queued once it has landed; product: the CPU's, likewise.
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.started = False
        self.copies = Queue()
        self.product: Operation | None = None


class Durations:
    """Seconds of what is not an expert's product, and which lane does what.

    Attributes:
        control, ssd: lanes; compute: of the CPU and each GPU; link, back: of each GPU;
            predicts: where each GPU's predictions are evaluated.
        inline: control's thread is the first GPU's as well.
        plan_s, first_op_s, join_s: float64 [4], base, per active expert, per copy, SSD.
        split_s: more to join where CPU and GPU share a layer step, and in every step of
            layers that are `always_split`, uint8 [L].
        read_s: float64, by flat key; copy_s, back_s: float64 [G, L * E], copies to and
            from each GPU.
        …_after_read: factors on what comes straight from the SSD.
    """

    def __init__(self) -> None:
        self.control = self.ssd = 0
        self.inline = self.moves_activations = self.writes_back = False
        self.dispatch_s = self.cpu_first_s = self.gpu_first_s = self.first_read_s = 0.0
        self.split_s = 0.0
        self.always_split: Ints = zeros(0, np.uint8)
        self.dense_after_read = self.copy_after_read = self.compute_after_read = 1.0
        self.compute: Ints = zeros(0, np.int32)
        self.link: Ints = zeros(0, np.int32)
        self.back: Ints = zeros(0, np.int32)
        self.predicts: Ints = zeros(0, np.int32)
        self.plan_s: Floats = zeros(4)
        self.first_op_s: Floats = zeros(4)
        self.join_s: Floats = zeros(4)
        self.read_s: Floats = zeros(0)
        self.copy_s: Floats = zeros((0, 0))
        self.back_s: Floats = zeros((0, 0))


class Transfers(Gate):
    """Carries out copies, and starts what waits for their landing."""

    def __init__(
        self, machine: Machine, clock: Clock, planner: Planner, durations: Durations
    ) -> None:
        rules = planner.rules
        keys = rules.layers * rules.experts
        self.machine = machine
        self.clock = clock
        self.planner = planner
        self.durations = durations
        self.model = keys
        self.experts = rules.experts
        # By GPU and flat key: a copy in its queue, one under way, and who waits for it.
        self.queued: list[Operation | None] = [None] * (keys * rules.gpus)
        self.awaiting: list[Operation | None] = [None] * (keys * rules.gpus)
        self.copying: Ints = zeros(keys * rules.gpus, np.uint8)
        self.reads: list[PendingRead | None] = [None] * keys
        self.under_way = 0
        self.prefetches = 0
        self.predicting = False
        # By layer: copies that have not landed, and those that nobody waits for.
        self.outstanding: Ints = zeros(rules.layers, np.int64)
        self.unawaited: Ints = zeros(rules.layers, np.int64)
        # Layers in the order in which prefetches for them were first queued.
        self.prefetched: list[int] = []
        self._is_prefetched: Ints = zeros(rules.layers, np.uint8)
        self.barred: list[Operation] = []
        self.barred_layer = NONE
        # What was reported while decisions were under way.
        self._reports: list[tuple[int, int, int]] = []
        self._read_at = NONE
        self._read_in = NONE

    # -- decisions --------------------------------------------------------------------

    def begin_decisions(self, layer: int, active: Ints) -> None:
        """Stop starts, and settle what becomes of queued prefetches.

        Args:
            layer: whose gate has just chosen.
            active: int32 [A], the experts that it chose.
        """
        self.machine.closed = True
        if not self.prefetches:
            return
        if not self.planner.rules.requeues:
            self._drop_late(layer, layer, active)
            return
        # Sums of seconds depend on the order in which copies leave the link's queue.
        for target in self.prefetched:
            self._drop_late(target, layer, active)

    def _drop_late(self, target: int, layer: int, active: Ints) -> None:
        """Drop queued prefetches for a layer, but those that stay."""
        rules = self.planner.rules
        if target == layer and rules.late == LATE_WAIT:
            return
        first = target * self.experts
        for gpu in range(rules.gpus):
            for key in range(first, first + self.experts):
                copy = self.queued[gpu * self.model + key]
                if copy is None or copy.kind != PREFETCH:
                    continue
                if target == layer and rules.late == LATE_KEEP:
                    awaited = False
                    for i in range(len(active)):
                        awaited = awaited or first + active[i] == key
                    if not awaited:
                        continue
                self._take_back(gpu, key)

    def end_decisions(self) -> None:
        """Report what has landed meanwhile, and let queued operations start."""
        self.machine.closed = False
        if self._reports:
            for follows, gpu, key in self._reports:
                self._note(follows, gpu, key)
            self._reports.clear()
        self.machine.offer()

    def report(self, follows: int, gpu: int, key: int) -> None:
        """Tell the planner what has ended, now or when it has decided."""
        if self.machine.closed:
            self._reports.append((follows, gpu, key))
        elif self._note(follows, gpu, key):
            self.machine.offer()

    def _note(self, follows: int, gpu: int, key: int) -> bool:
        """Tell the planner; whether a staging slot is free again."""
        planner = self.planner
        if follows == COPIED:
            return planner.landed(gpu, key)
        if follows == HAS_READ:
            return planner.read_done(key)
        if follows == AHEAD:
            return planner.unawaited_ended(key)
        return planner.computed(gpu, key)

    # -- queueing ---------------------------------------------------------------------

    def enqueue(self, plan: Plan, step: int) -> None:
        """Queue the copies of a plan in their order."""
        durations = self.durations
        copies = plan.copies
        planner = self.planner
        for n in range(copies.count):
            key = copies.key[n]
            kind = copies.kind[n]
            read = copies.other[n] != 0
            if kind == READ:
                self._read(step, key, DEMAND, read)
                continue
            gpu = copies.gpu[n]
            memory = planner.gpu[gpu]
            layer = key // self.experts
            copy_s = durations.copy_s[gpu, key]
            if read:
                copy_s *= durations.copy_after_read
            copy = self.machine.operation(
                durations.link[gpu],
                kind,
                step,
                layer,
                key - layer * self.experts,
                copy_s + durations.dispatch_s,
                memory.bytes_of[key],
                COPIED,
            )
            priority = REPLACEMENT
            if kind == FETCH:
                priority = DEMAND
            elif kind == PREFETCH:
                priority = BEHIND_DEMAND
                self.prefetches += 1
                if not self._is_prefetched[layer]:
                    self._is_prefetched[layer] = 1
                    self.prefetched.append(layer)
            copy.priority = priority
            self.queued[gpu * self.model + key] = copy
            self.under_way += 1
            self.outstanding[layer] += 1
            if priority != DEMAND:
                self.unawaited[layer] += 1
            # Somebody else's read may be pending.
            if read or self.reads[key] is not None:
                self._read(step, key, priority, read)
                self._wait_for_read(copy, key)
            else:
                self.machine.submit(copy, priority)

    def promote(self, gpu: int, key: int) -> None:
        """Let a queued copy go first: a layer step waits for it."""
        copy = self.queued[gpu * self.model + key]
        was = copy.priority
        if copy.behind_read:
            self._promote_read(key)
        elif was != DEMAND:
            self.machine.withdraw(copy, was)
            self.machine.submit(copy, DEMAND)
        if was != DEMAND:
            self.unawaited[copy.layer] -= 1
        copy.priority = DEMAND

    def start_on_gpu(self, gpu: int, product: Operation) -> None:
        """Start a product as soon as its expert is on a GPU."""
        if self.under_way:
            place = product.layer * self.experts + product.expert
            place += gpu * self.model
            if self.queued[place] is not None or self.copying[place]:
                self.awaiting[place] = product
                return
        self.machine.submit(product, DEMAND)

    def start_on_cpu(self, product: Operation) -> None:
        """Start a product as soon as its expert is in host memory."""
        read = self.reads[product.layer * self.experts + product.expert]
        if read is not None:
            read.product = product
        else:
            self.machine.submit(product, DEMAND)

    # -- reads ------------------------------------------------------------------------

    def _read(self, step: int, key: int, priority: int, new: bool) -> None:
        """Queue a read from the SSD, or hurry the one that is pending."""
        if not new:
            if priority == DEMAND:
                self._promote_read(key)
            return
        durations = self.durations
        layer = key // self.experts
        work_s = durations.read_s[key] + durations.dispatch_s
        # The first one that a layer step demands takes longer.
        if priority == DEMAND and (self._read_at != step or self._read_in != layer):
            self._read_at = step
            self._read_in = layer
            work_s += durations.first_read_s
        memory = self.planner.host.memory
        operation = self.machine.operation(
            durations.ssd,
            READ,
            step,
            layer,
            key - layer * self.experts,
            work_s,
            memory.bytes_of[key],
            HAS_READ,
        )
        operation.priority = priority
        self.reads[key] = PendingRead(operation)
        # It may start at once: then it has a place, and is under way.
        self.machine.submit(operation, priority)

    def _wait_for_read(self, copy: Operation, key: int) -> None:
        """Let a queued copy wait for the read of its expert."""
        copy.behind_read = True
        read = self.reads[key]
        read.copies.push(copy)

    def _promote_read(self, key: int) -> None:
        """Let a pending read go first: a layer step waits for it."""
        read = self.reads[key]
        operation = read.operation
        was = operation.priority
        if not read.started and was != DEMAND:
            self.machine.withdraw(operation, was)
            self.machine.submit(operation, DEMAND)
        operation.priority = DEMAND

    def _leave_read(self, copy: Operation, key: int) -> None:
        """Withdraw the read behind a copy if nothing else needs it."""
        read = self.reads[key]
        read.copies.remove(copy)
        if read.started or read.copies.first is not None or read.product is not None:
            return
        operation = read.operation
        self.machine.withdraw(operation, operation.priority)
        self.machine.forget(operation)
        self.reads[key] = None
        self.planner.cancel_read(key)

    def has_read(self, operation: Operation) -> None:
        """Queue what waited for an expert in host memory."""
        key = operation.layer * self.experts + operation.expert
        self.report(HAS_READ, NONE, key)
        read = self.reads[key]
        self.reads[key] = None
        while read.copies.first is not None:
            copy = read.copies.first
            read.copies.remove(copy)
            copy.behind_read = False
            self.machine.submit(copy, copy.priority)
        if read.product is not None:
            self.machine.submit(read.product, DEMAND)

    # -- starts -----------------------------------------------------------------------

    def admit(self, operation: Operation) -> int:
        """Take a place for a copy that could start; say whether it may."""
        if self.predicting and operation.kind == PREFETCH:
            return WAIT
        planner = self.planner
        key = operation.layer * self.experts + operation.expert
        if operation.kind == READ:
            return START if self._start_read(operation.layer, key) else WAIT
        lane = self.machine.lanes[operation.lane]
        gpu = lane.gpu
        if not planner.start_copy(gpu, key, self.clock.now_s):
            if not planner.gives_up(gpu, key):
                return WAIT
            planner.cancel_copy(gpu, key)
            self._unqueue(gpu, key)
            self._settle(operation.layer)
            return DROP
        self._unqueue(gpu, key)
        self.copying[gpu * self.model + key] = 1
        if self.durations.writes_back:
            self._write_back(gpu, operation.step)
        return START

    def _write_back(self, gpu: int, step: int) -> None:
        """Copy back what has left for the copy that starts; nobody waits for it."""
        durations = self.durations
        memory = self.planner.gpu[gpu]
        key = memory.evicted
        while key != NONE:
            # Another copy may start meanwhile, with victims of its own.
            following = memory.next_victim[key]
            layer = key // self.experts
            copy = self.machine.operation(
                durations.back[gpu],
                REPLACE,
                step,
                layer,
                key - layer * self.experts,
                durations.back_s[gpu, key] + durations.dispatch_s,
                memory.bytes_of[key],
                UNAWAITED,
            )
            self.machine.submit(copy, DEMAND)
            key = following

    def _start_read(self, layer: int, key: int) -> bool:
        """Take a place in host memory for a read that starts now."""
        planner = self.planner
        started = planner.start_read(key, self.clock.now_s)
        if not started and self._yields(layer, key):
            started = planner.start_read(key, self.clock.now_s)
        if not started:
            return False
        read = self.reads[key]
        read.started = True
        return True

    def _yields(self, layer: int, wanted: int) -> bool:
        """Give up a prefetch for a read that finds no place; whether there was one.

        A read that a layer step waits for goes before guesses whose experts lie in host
        memory's staging area until a link takes them.
        """
        planner = self.planner
        host = planner.host.memory
        if not host.demanded[wanted]:
            return False
        key = host.idle_prefetch(layer, NONE)
        while key != NONE:
            copies = 0
            demanded = False
            for gpu in range(planner.rules.gpus):
                memory = planner.gpu[gpu]
                if memory.wished[key]:
                    copies += 1
                    demanded = demanded or memory.demanded[key] != 0
            # Staging itself is one hold. More holds than copies: another need.
            if copies and not demanded and host.holds[key] == 1 + copies:
                for gpu in range(planner.rules.gpus):
                    memory = planner.gpu[gpu]
                    if memory.wished[key]:
                        self._take_back(gpu, key)
                return True
            key = host.idle_prefetch(layer, key)
        return False

    def _take_back(self, gpu: int, key: int) -> None:
        """Cancel a queued copy, with the read that only it needs."""
        copy = self.queued[gpu * self.model + key]
        self.planner.cancel_copy(gpu, key)
        self._unqueue(gpu, key)
        self._settle(copy.layer)
        if copy.behind_read:
            self._leave_read(copy, key)
        else:
            self.machine.withdraw(copy, copy.priority)
        self.machine.forget(copy)

    def _unqueue(self, gpu: int, key: int) -> None:
        """Forget that a copy is queued; its operation stays."""
        place = gpu * self.model + key
        copy = self.queued[place]
        if copy.kind == PREFETCH:
            self.prefetches -= 1
        if copy.priority != DEMAND:
            self.unawaited[copy.layer] -= 1
        self.queued[place] = None

    # -- ends -------------------------------------------------------------------------

    def copied(self, operation: Operation) -> None:
        """Start the product that waited for an expert on a GPU."""
        lane = self.machine.lanes[operation.lane]
        gpu = lane.gpu
        layer = operation.layer
        key = layer * self.experts + operation.expert
        self.report(COPIED, gpu, key)
        place = gpu * self.model + key
        self.copying[place] = 0
        product = self.awaiting[place]
        if product is not None:
            self.awaiting[place] = None
            self.machine.submit(product, DEMAND)
        self._settle(layer)

    def _settle(self, layer: int) -> None:
        """Count a copy that has landed or was given up."""
        self.under_way -= 1
        self.outstanding[layer] -= 1
        if self.barred_layer == layer:
            if self.outstanding[layer] == self.unawaited[layer]:
                self._open()

    def open_when_landed(self, layer: int) -> None:
        """Start barred products once all copies of their layer have landed, or now.

        Queued ones that nobody waits for may need a place that this layer step holds.
        """
        if not self.barred:
            return
        if self.outstanding[layer] > self.unawaited[layer]:
            self.barred_layer = layer
        else:
            self._open()

    def _open(self) -> None:
        """Start the GPU products that waited for all copies of their layer."""
        self.barred_layer = NONE
        barred = self.barred
        self.barred = []
        for product in barred:
            lane = self.machine.lanes[product.lane]
            self.start_on_gpu(lane.gpu, product)
