"""Copies that really happen: SSD to host memory to device, as a chain, demand before
prefetch.

The counterpart of `sim/transfers.py`, step by step the same. What differs is that a
landing is known in two places: here, the moment it happens (computations that wait for
it start at once), and in the planner's books, when the control thread has reported it
(before it plans again, and when it joins a layer).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from moesim.policies.planner.plan import FETCH, READ, REPLACE
from moesim.runtime.executor.lanes import AHEAD, DEMAND, REPLACING, Operation
from moesim.traces.timeline import spans as kinds

if TYPE_CHECKING:
    import numpy as np
    from moesim.policies.planner.plan import Copies
    from moesim.policies.planner.planner import Planner
    from moesim.runtime.executor.lanes import Lanes
    from moesim.runtime.executor.slot_map import HostPlaces, Places
    from moesim.runtime.store.store import ExpertStore


class Copier(Protocol):
    """The device's way of taking bytes in."""

    def copy(
        self, slot: int, record: object, nbytes: int
    ) -> tuple[float, float] | None:
        """Copy a record into a slot; return when it is there, with start and end if the
        device has its own clock.
        """


class Read(Operation):
    """An expert on its way from the SSD into host memory."""

    __slots__ = ("key", "owner")

    def __init__(
        self, owner: Transfers, step: int, layer: int, expert: int, *, staged: bool
    ) -> None:
        super().__init__(
            owner.ssd_lane, kinds.READ, step, layer, expert, owner.nbytes[layer]
        )
        self.owner = owner
        self.key = layer * owner.experts + expert
        self.staged = staged

    def run(self) -> None:
        """Read around the page cache into the expert's slot."""
        self.owner.store.read_into(
            self.layer, self.expert, self.owner.host.record(self.key)
        )

    def ended(self) -> None:
        """Start what waits for the expert in host memory."""
        for operation, priority in self.owner.reading.pop(self.key):
            self.owner.lanes.submit(operation, priority)


class Copy(Operation):
    """An expert on its way from host memory into a device slot."""

    __slots__ = ("key", "owner")

    def __init__(
        self, owner: Transfers, kind: int, step: int, layer: int, expert: int
    ) -> None:
        super().__init__(
            owner.link_lane, kind, step, layer, expert, owner.nbytes[layer]
        )
        self.owner = owner
        self.key = layer * owner.experts + expert

    def run(self) -> tuple[float, float] | None:
        """Copy the record into the expert's slot."""
        owner = self.owner
        return owner.copier.copy(
            owner.device.slot(self.key), owner.host.record(self.key), self.nbytes
        )

    def ended(self) -> None:
        """Let go of host memory and start the computation that waits for this
        landing.
        """
        owner = self.owner
        owner.flying.remove(self.key)
        owner.host.unuse(self.key)
        compute = owner.landing.pop(self.key, None)
        if compute is not None:
            owner.lanes.submit(compute)


class Transfers:
    """Carries out the planner's copies on real lanes. Methods are called by the control
    thread with the lock held.

    Args:
        lanes: who does the work.
        planner: decides about late prefetches.
        store: where experts are read from.
        host: host memory.
        device: slots of the accelerator.
        copier: how bytes get there.
    """

    def __init__(
        self,
        lanes: Lanes,
        planner: Planner,
        store: ExpertStore,
        host: HostPlaces,
        device: Places,
        copier: Copier,
    ) -> None:
        self.lanes = lanes
        self.store = store
        self.host = host
        self.device = device
        self.copier = copier
        self.experts = planner.shape.experts
        self.nbytes = [store.record_bytes(layer) for layer in range(store.layers)]
        self.link_lane, self.ssd_lane = (
            lanes.names.index("h2d0"),
            lanes.names.index("ssd"),
        )
        self.flying: set[int] = set()  # copies to the device that have not ended
        self.landing: dict[int, Operation] = {}  # key -> computation that waits for it
        self.reading: dict[
            int, list[tuple[Operation, int]]
        ] = {}  # key -> what waits for host memory
        self._planner = planner
        self._waiting: dict[
            int, dict[int, Operation]
        ] = {}  # layer -> key -> first operation of a prefetch

    def enqueue(self, copies: Copies, step: int) -> None:
        """Queue copies in their order."""
        layer = copies.layer
        priority = (
            DEMAND
            if copies.kind in {FETCH, READ}
            else REPLACING
            if copies.kind == REPLACE
            else AHEAD
        )
        keys = [layer * self.experts + expert for expert in copies.experts]
        if copies.kind != READ:
            # Staged demand fetches win their slot when they start.
            gated = copies.kind == FETCH
            self.device.assign(
                [
                    key
                    for key, staged in zip(keys, copies.staged, strict=True)
                    if not (gated and staged)
                ]
            )
        for i, (key, expert) in enumerate(zip(keys, copies.experts, strict=True)):
            if copies.kind == READ:
                self._read(step, layer, expert, priority, staged=copies.host_staged[i])
                continue
            link = Copy(self, copies.kind, step, layer, expert)
            link.staged = copies.kind == FETCH and copies.staged[i]
            self.flying.add(key)
            self.host.use(key)
            first: Operation = link
            if copies.read[i]:
                first = self._read(
                    step, layer, expert, priority, staged=copies.host_staged[i]
                )
                self.reading[key].append((link, priority))
            elif key in self.reading:
                self.reading[key].append((link, priority))
            else:
                self.lanes.submit(link, priority)
            if priority == AHEAD:
                self._waiting.setdefault(layer, {})[key] = first

    def vacate(self, plan: list[Copies]) -> None:
        """Before any copy of a plan: take back the slots of what had left a memory and
        is brought there again.
        """
        for copies in plan:
            for expert, read in zip(copies.experts, copies.read, strict=True):
                key = copies.layer * self.experts + expert
                if copies.kind != READ:
                    self.device.forget(key)
                if read:
                    self.host.forget(key)

    def when_landed(self, key: int, compute: Operation) -> None:
        """Submit `compute` when a copy in flight lands; now, if it just has."""
        if key in self.flying:
            self.landing[key] = compute
        else:
            self.lanes.submit(compute)

    def when_read(self, key: int, compute: Operation) -> None:
        """Submit `compute` when an expert on its way from the SSD is in host memory;
        now, if it just has come.
        """
        if key in self.reading:
            self.reading[key].append((compute, DEMAND))
        else:
            self.lanes.submit(compute)

    def begin_layer(self, layer: int, active: np.ndarray) -> None:
        """Take back the prefetches for this layer whose chain has not started: the
        planner drops them or demands them.

        Where the queue is sorted anew at every layer, those for other layers are taken
        back and dropped as well. `active` int32 [A]: the experts that the gate chose.
        """
        if not self._waiting:
            return
        unstarted: dict[tuple[int, int, int], Operation] = {}
        for own in list(self._waiting) if self._planner.requeues else [layer]:
            waiting = self._waiting.get(own, {})
            taken = {
                key: operation
                for key, operation in waiting.items()
                if self._idle(key, operation) and self.lanes.withdraw(operation, AHEAD)
            }
            self._waiting[own] = {
                key: operation for key, operation in waiting.items() if key not in taken
            }
            unstarted |= {
                (0, *divmod(key, self.experts)): operation
                for key, operation in taken.items()
            }
        self._waiting.pop(layer, None)
        if not unstarted:
            return
        for dropped in self._planner.late(list(unstarted), layer, active.tolist()):
            operation = unstarted.pop(dropped)
            key = operation.layer * self.experts + operation.expert
            self.flying.remove(key)
            self.host.unuse(key)
            if operation.kind == kinds.READ:
                del self.reading[key]
        for operation in unstarted.values():
            if operation.kind == kinds.READ:
                key = layer * self.experts + operation.expert
                self.reading[key] = [(link, DEMAND) for link, _ in self.reading[key]]
            self.lanes.submit(operation, DEMAND)

    def _idle(self, key: int, operation: Operation) -> bool:
        """Whether a prefetch's first operation has not started and serves nothing
        else.
        """
        if operation.start_s >= 0.0:
            return False
        return operation.kind != kinds.READ or len(self.reading[key]) == 1

    def _read(
        self, step: int, layer: int, expert: int, priority: int, *, staged: bool
    ) -> Operation:
        operation = Read(self, step, layer, expert, staged=staged)
        self.host.expect(operation.key, staged=staged)
        self.reading[operation.key] = []
        self.lanes.submit(operation, priority)
        return operation
