"""Transfers: SSD to host memory to GPU, as a chain, demand before prefetch.

A copy to a GPU starts when its expert is in host memory; where that is limited, a read
comes first. What waits for an expert (a product, a copy) is queued the moment it lands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple

from moesim.engine.lanes import Op, gpu_of_lane
from moesim.engine.operations import DEMAND, PREFETCH, PRIORITY_OF
from moesim.policies.planner.plan import READ

if TYPE_CHECKING:
    import numpy as np
    from moesim.engine.world import World
    from moesim.policies.planner.plan import Copies
    from moesim.policies.planner.planner import Planner


class Follower(NamedTuple, Generic[Op]):
    """What follows once an expert is in host memory, and with which priority."""

    operation: Op
    priority: int


class Transfers(Generic[Op]):
    """Carries out the planner's copies, and starts what waits for their landing.

    Args:
        world: makes operations, starts them and reports their ends.
        planner: decides about late prefetches.
    """

    def __init__(self, world: World[Op], planner: Planner) -> None:
        self._world = world
        self._submit = world.submit
        self._planner = planner
        self._experts = planner.shape.experts
        self._gpu_of = [gpu_of_lane(lane) for lane in world.lanes]
        # Keys are layer * E + expert; per GPU they are shifted by the whole model.
        self._model = planner.shape.layers * planner.shape.experts
        self._in_flight: set[int] = set()  # copies to GPUs, queued ones included
        self._awaiting_gpu: dict[int, Op] = {}  # product that waits for a copy
        self._followers: dict[int, list[Follower[Op]]] = {}  # read -> what follows it
        # Layer -> prefetches for it, by the first operation of their chain.
        self._prefetches: dict[int, dict[tuple[int, int, int], Op]] = {}

    def enqueue(self, copies: Copies, step: int) -> None:
        """Queue copies of one kind in their order."""
        world = self._world
        layer = copies.layer
        priority = PRIORITY_OF[copies.kind]
        world.enqueuing(copies)
        if copies.kind == READ:
            for expert, host_staged in zip(
                copies.experts, copies.host_staged, strict=True
            ):
                self._read(step, layer, expert, priority, staged=host_staged)
            return

        gpu = copies.gpu
        first_key = layer * self._experts
        for position, expert in enumerate(copies.experts):
            key = first_key + expert
            copy = world.copy(copies, position, step)
            copy.on_end = self._landed
            self._in_flight.add(gpu * self._model + key)
            first = copy
            if copies.read[position]:
                staged = copies.host_staged[position]
                first = self._read(step, layer, expert, priority, staged=staged)
                self._followers[key].append(Follower(copy, priority))
            elif key in self._followers:
                self._followers[key].append(Follower(copy, priority))
            else:
                self._submit(copy, priority)
            if priority == PREFETCH:
                self._prefetches.setdefault(layer, {})[gpu, layer, expert] = first

    def when_on_gpu(self, gpu: int, product: Op) -> None:
        """Start a product as soon as its expert is on a GPU."""
        if not self._in_flight:
            self._submit(product)
            return
        key = gpu * self._model + self._key(product)
        if key in self._in_flight:
            self._awaiting_gpu[key] = product
        else:
            self._submit(product)

    def when_in_host_memory(self, product: Op) -> None:
        """Start a product as soon as its expert is in host memory."""
        if not self._followers:
            self._submit(product)
            return
        followers = self._followers.get(self._key(product))
        if followers is None:
            self._submit(product)
        else:
            followers.append(Follower(product, DEMAND))

    def begin_layer(self, layer: int, active: np.ndarray) -> None:
        """Take back this layer's prefetches whose chain has not started.

        The planner drops them or makes them demand fetches. Where the prefetch policy
        sorts its queue anew at every layer, those for other layers are taken back and
        dropped as well.

        Args:
            layer: MoE layer whose gate has just chosen.
            active: int32 [A], the experts that it chose.
        """
        if not self._prefetches:
            return
        unstarted: dict[tuple[int, int, int], Op] = {}
        layers = list(self._prefetches) if self._planner.requeues else [layer]
        for target in layers:
            queued = self._prefetches.get(target, {})
            taken = {
                place: operation
                for place, operation in queued.items()
                if self._is_idle(operation)
                and self._world.withdraw(operation, PREFETCH)
            }
            self._prefetches[target] = {
                place: operation
                for place, operation in queued.items()
                if place not in taken
            }
            unstarted |= taken
        # What has started is no longer a prefetch that anybody could take back.
        self._prefetches.pop(layer, None)
        if not unstarted:
            return

        for place in self._planner.late(list(unstarted), layer, active.tolist()):
            operation = unstarted.pop(place)
            gpu, target, expert = place
            key = target * self._experts + expert
            self._in_flight.remove(gpu * self._model + key)
            if operation.kind == READ:
                del self._followers[key]
            self._world.dropped(target, expert)
        for operation in unstarted.values():
            if operation.kind == READ:
                key = self._key(operation)
                self._followers[key] = [
                    Follower(follower.operation, DEMAND)
                    for follower in self._followers[key]
                ]
            self._world.submit(operation, DEMAND)

    def _is_idle(self, operation: Op) -> bool:
        """Whether a prefetch's first operation has not started and serves nothing
        else.
        """
        if operation.start_s >= 0.0:
            return False
        return operation.kind != READ or len(self._followers[self._key(operation)]) == 1

    def _key(self, operation: Op) -> int:
        return operation.layer * self._experts + operation.expert

    def _read(
        self, step: int, layer: int, expert: int, priority: int, *, staged: bool
    ) -> Op:
        """Queue a read from the SSD."""
        demanded = priority == DEMAND
        operation = self._world.read(
            step, layer, expert, staged=staged, demanded=demanded
        )
        operation.on_end = self._read_done
        self._followers[layer * self._experts + expert] = []
        self._world.submit(operation, priority)
        return operation

    def _read_done(self, operation: Op) -> None:
        """Queue what waited for an expert in host memory."""
        self._world.read_done(operation)
        for follower in self._followers.pop(self._key(operation)):
            self._submit(follower.operation, follower.priority)

    def _landed(self, operation: Op) -> None:
        """Start the product that waited for an expert on a GPU."""
        gpu = self._gpu_of[operation.lane]
        key = gpu * self._model + self._key(operation)
        self._in_flight.remove(key)
        self._world.landed(operation, gpu)
        product = self._awaiting_gpu.pop(key, None)
        if product is not None:
            self._submit(product)
