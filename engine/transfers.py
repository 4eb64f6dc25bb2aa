"""Transfers: SSD to host memory to GPU, as a chain, demand before prefetch.

The life of a copy: queued, when nothing has changed; started, when it has
taken its place and its victim has left; landed. A copy to a GPU is queued on its link
once its expert is in host memory; where that is limited, a read comes first. What waits
for an expert (a product, a copy) is queued the moment it lands.

While decisions are under way nothing starts and no landing is reported: a plan must
hold for the memories it was made for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from moesim.engine.lanes import (
    DEMAND,
    DROP,
    PREFETCH,
    PRIORITY_OF,
    START,
    WAIT,
    Op,
    gpu_of_lane,
)
from moesim.policies.planner import plan as kinds
from moesim.policies.planner.plan import READ

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from moesim.engine.lanes import World
    from moesim.policies.planner.plan import Copies
    from moesim.policies.planner.planner import Planner


class QueuedCopy(Generic[Op]):
    """A copy to a GPU that has not started: on its link's queue, or behind a read."""

    __slots__ = ("gpu", "operation", "priority", "read")

    def __init__(self, operation: Op, gpu: int, priority: int) -> None:
        self.operation = operation
        self.gpu = gpu
        self.priority = priority
        self.read: PendingRead[Op] | None = None


class PendingRead(Generic[Op]):
    """A read that has not landed, and what follows it."""

    __slots__ = ("copies", "operation", "priority", "products", "started")

    def __init__(self, operation: Op, priority: int) -> None:
        self.operation = operation
        self.priority = priority
        self.started = False
        self.copies: list[QueuedCopy[Op]] = []
        self.products: list[Op] = []


class Transfers(Generic[Op]):
    """Carries out the planner's copies, and starts what waits for their landing.

    Args:
        world: makes operations, starts them and reports their ends.
        planner: gives places, and decides about late prefetches.
    """

    def __init__(self, world: World[Op], planner: Planner) -> None:
        self._world = world
        self._submit = world.submit
        self._admission = world.admission
        self._planner = planner
        self._experts = planner.shape.experts
        self._writes_back = planner.policies.writes_back
        self._gpu_of = [gpu_of_lane(lane) for lane in world.lanes]
        # Keys are layer * E + expert; per GPU they are shifted by the whole model.
        self._model = planner.shape.layers * planner.shape.experts
        self._queued: dict[int, QueuedCopy[Op]] = {}
        self._coming: set[int] = set()  # queued or in flight
        self._awaiting_gpu: dict[int, Op] = {}  # product that waits for a copy
        self._reads: dict[int, PendingRead[Op]] = {}
        # Layer -> queued prefetches for it: (GPU, layer, expert) in queue order.
        self._prefetches: dict[int, dict[tuple[int, int, int], None]] = {}
        # Layer -> copies to it that have not landed; queued ones that no layer step
        # waits for; and what to call when all but those have landed.
        self._outstanding = [0] * planner.shape.layers
        self._unawaited = [0] * planner.shape.layers
        self._when_landed: dict[int, Callable[[], None]] = {}
        self._predicting = False
        # Reports of what happened while decisions were under way.
        self._unreported: list[tuple[Callable[..., bool], tuple[int, ...]]] = []
        self._admission.decide = self._admit

    # -- queueing ---------------------------------------------------------------------

    def enqueue(self, copies: Copies, step: int) -> None:
        """Queue copies of one kind in their order."""
        layer = copies.layer
        priority = PRIORITY_OF[copies.kind]
        if copies.kind == READ:
            for expert, read in zip(copies.experts, copies.read, strict=True):
                self._read(step, layer, expert, priority, new=read)
            return

        gpu = copies.gpu
        self._outstanding[layer] += len(copies.experts)
        if priority != DEMAND:
            self._unawaited[layer] += len(copies.experts)
        for position, expert in enumerate(copies.experts):
            key = layer * self._experts + expert
            operation = self._world.copy(copies, position, step)
            operation.on_end = self._copied
            copy = QueuedCopy(operation, gpu, priority)
            self._queued[gpu * self._model + key] = copy
            self._coming.add(gpu * self._model + key)
            if priority == PREFETCH:
                place = (gpu, layer, expert)
                self._prefetches.setdefault(layer, {})[place] = None
            if copies.read[position] or key in self._reads:
                new = copies.read[position]
                copy.read = self._read(step, layer, expert, priority, new=new)
                copy.read.copies.append(copy)
            else:
                self._submit(operation, priority)

    def promote(self, gpu: int, layer: int, expert: int) -> None:
        """Let a queued copy go first: a layer step waits for it."""
        key = layer * self._experts + expert
        copy = self._queued[gpu * self._model + key]
        if copy.read is not None:
            self._promote_read(copy.read)
        elif copy.priority != DEMAND:
            self._world.withdraw(copy.operation, copy.priority)
            self._submit(copy.operation, DEMAND)
        if copy.priority != DEMAND:
            self._unawaited[layer] -= 1
        copy.priority = DEMAND

    @property
    def all_copied(self) -> bool:
        """Whether no copy to a GPU is queued or on its way."""
        return not self._coming

    @property
    def all_read(self) -> bool:
        """Whether no read is queued or on its way."""
        return not self._reads

    def when_on_gpu(self, gpu: int, product: Op) -> None:
        """Start a product as soon as its expert is on a GPU."""
        # As `_key`, whose call would be made for every product.
        key = gpu * self._model + product.layer * self._experts + product.expert
        if key in self._coming:
            self._awaiting_gpu[key] = product
        else:
            self._submit(product)

    def when_in_host_memory(self, product: Op) -> None:
        """Start a product as soon as its expert is in host memory."""
        read = self._reads.get(self._key(product))
        if read is None:
            self._submit(product)
        else:
            read.products.append(product)

    def when_all_on_gpu(self, layer: int, call: Callable[[], None]) -> None:
        """Call once all copies of a layer have landed, or now if there is none.

        Queued ones that nobody waits for may need a place that this layer step holds.
        """
        if self._outstanding[layer] > self._unawaited[layer]:
            self._when_landed[layer] = call
        else:
            call()

    def _settle(self, layer: int) -> None:
        """Count a copy that has landed or was given up."""
        self._outstanding[layer] -= 1
        if layer not in self._when_landed:
            return
        if self._outstanding[layer] == self._unawaited[layer]:
            self._when_landed.pop(layer)()

    def _read(
        self, step: int, layer: int, expert: int, priority: int, *, new: bool
    ) -> PendingRead[Op]:
        """Queue a read from the SSD, or hurry the one that is pending."""
        key = layer * self._experts + expert
        if not new:
            pending = self._reads[key]
            if priority == DEMAND:
                self._promote_read(pending)
            return pending
        demanded = priority == DEMAND
        operation = self._world.read(step, layer, expert, demanded=demanded)
        operation.on_end = self._read_ended
        pending = self._reads[key] = PendingRead(operation, priority)
        self._submit(operation, priority)
        return pending

    def _promote_read(self, read: PendingRead[Op]) -> None:
        if not read.started and read.priority != DEMAND:
            self._world.withdraw(read.operation, read.priority)
            self._submit(read.operation, DEMAND)
        read.priority = DEMAND

    # -- decisions --------------------------------------------------------------------

    def begin_decisions(self, layer: int, active: np.ndarray) -> None:
        """Stop starts, and settle what becomes of queued prefetches.

        Args:
            layer: MoE layer whose gate has just chosen.
            active: int32 [A], the experts that it chose.
        """
        self._admission.closed = True
        if not self._prefetches:
            return
        if self._planner.requeues:
            queued = [place for places in self._prefetches.values() for place in places]
        else:
            queued = list(self._prefetches.get(layer, ()))
        if not queued:
            return
        for gpu, target, expert in self._planner.drop_late(
            queued, layer, active.tolist()
        ):
            self._take_back(gpu, target, expert)

    def end_decisions(self) -> None:
        """Report what has landed meanwhile, and let queued operations start."""
        self._admission.closed = False
        if self._unreported:
            for report, arguments in self._unreported:
                report(*arguments)
            self._unreported.clear()
        self._world.offer()

    def begin_prediction(self) -> None:
        """Let no prefetch start until `end_prediction`: nobody knows it before."""
        self._predicting = True

    def end_prediction(self) -> None:
        """Let prefetches start."""
        self._predicting = False
        self._world.offer()

    def _take_back(self, gpu: int, layer: int, expert: int) -> None:
        """Forget a queued copy; the planner has forgotten it already."""
        key = gpu * self._model + layer * self._experts + expert
        copy = self._forget(key)
        self._coming.remove(key)
        self._settle(layer)
        if copy.read is None:
            self._world.withdraw(copy.operation, copy.priority)
        else:
            self._leave_read(copy)

    def _forget(self, key: int) -> QueuedCopy[Op]:
        """Take a copy off the books of the queue, by its key on its GPU."""
        copy = self._queued.pop(key)
        operation = copy.operation
        layer = operation.layer
        if copy.priority != DEMAND:
            self._unawaited[layer] -= 1
        if operation.kind == kinds.PREFETCH:
            del self._prefetches[layer][copy.gpu, layer, operation.expert]
        return copy

    def _leave_read(self, copy: QueuedCopy[Op]) -> None:
        """Withdraw the read behind a copy if nothing else needs it."""
        read = copy.read
        assert read is not None
        read.copies.remove(copy)
        if read.started or read.copies or read.products:
            return
        operation = read.operation
        self._world.withdraw(operation, read.priority)
        del self._reads[self._key(operation)]
        self._planner.cancel_read(operation.layer, operation.expert)

    # -- starts -----------------------------------------------------------------------

    def _admit(self, operation: Op) -> int:
        """Take a place for an operation that could start; say whether it may."""
        # What a prefetch predicts is not known yet.
        if self._predicting and operation.kind == kinds.PREFETCH:
            return WAIT
        layer = operation.layer
        expert = operation.expert
        now_s = self._world.now_s()
        if operation.kind == READ:
            place = self._planner.start_read(layer, expert, now_s)
            if place is None and self._yield_to(layer, expert):
                place = self._planner.start_read(layer, expert, now_s)
            if place is None:
                return WAIT
            self._reads[self._key(operation)].started = True
            self._world.placed(operation, -1)
            return START

        gpu = self._gpu_of[operation.lane]
        key = gpu * self._model + layer * self._experts + expert
        planner = self._planner
        place = planner.start_copy(gpu, layer, expert, now_s)
        if place is None:
            if not planner.gives_up(gpu, layer, expert):
                return WAIT
            planner.cancel_copy(gpu, layer, expert)
            self._forget(key)
            self._coming.remove(key)
            self._settle(layer)
            return DROP
        self._forget(key)
        self._world.placed(operation, gpu)
        if self._writes_back:
            for key in place.evicted:
                self._world.write_back(operation, *divmod(key, self._experts))
        return START

    def _yield_to(self, layer: int, expert: int) -> bool:
        """Give up a prefetch for a read that finds no place; whether there was one."""
        copies = self._planner.yielding_copies(layer, expert)
        for copy in copies:
            self._planner.cancel_copy(*copy)
            self._take_back(*copy)
        return bool(copies)

    # -- ends -------------------------------------------------------------------------

    def _key(self, operation: Op) -> int:
        return operation.layer * self._experts + operation.expert

    def _read_ended(self, operation: Op) -> None:
        """Queue what waited for an expert in host memory."""
        layer = operation.layer
        expert = operation.expert
        self.report(self._planner.read_done, layer, expert)
        read = self._reads.pop(self._key(operation))
        for copy in read.copies:
            copy.read = None
            self._submit(copy.operation, copy.priority)
        for product in read.products:
            self._submit(product)

    def _copied(self, operation: Op) -> None:
        """Start the product that waited for an expert on a GPU."""
        gpu = self._gpu_of[operation.lane]
        layer = operation.layer
        expert = operation.expert
        # As `report`, whose call would be made for every copy.
        landed = self._planner.landed
        if self._admission.closed:
            self._unreported.append((landed, (gpu, layer, expert)))
        elif landed(gpu, layer, expert):
            self._world.offer()
        key = gpu * self._model + layer * self._experts + expert
        self._coming.remove(key)
        product = self._awaiting_gpu.pop(key, None)
        if product is not None:
            self._submit(product)
        self._settle(layer)

    def report(self, report: Callable[..., bool], *arguments: int) -> None:
        """Tell the planner what has ended, now or when it has decided.

        Args:
            report: one of its methods; answers whether a staging slot is free again.
            arguments: of it.
        """
        if self._admission.closed:
            self._unreported.append((report, arguments))
        elif report(*arguments):
            self._world.offer()
