"""Demand: the copies and reads that a layer step waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import CPU
from moesim.policies.planner.plan import FETCH, READ, Copies
from moesim.policies.planner.residency_kernels import missing

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork
    from moesim.policies.planner.host_memory import HostMemory
    from moesim.policies.planner.machine_state import MachineState
    from moesim.policies.planner.plan import Launch
    from moesim.policies.planner.residency import Residency


def wish_for_missing(
    machine: MachineState,
    work: LayerWork,
    gpu: int,
    launch: Launch,
    copies: list[Copies],
    promoted: list[tuple[int, int]],
) -> np.ndarray:
    """Wish for what a GPU lacks; what is queued already is promoted.

    Returns:
        Flat keys of what must be fetched.
    """
    level = machine.gpu[gpu]
    layer = work.layer
    keys = _missing(work, launch, gpu + 1, level.memory)
    key_list = keys.tolist()
    queued = level.wished_among(key_list)
    if queued:
        for key in queued:
            if not level.is_demanded(key):
                _promote(machine, gpu, key, promoted)
        key_list = [key for key in key_list if key not in queued]
        keys = np.array(key_list, np.int64)
    if not key_list:
        return keys
    level.demand(work, layer, keys)
    read = machine.need_in_host(work, layer, keys, demanded=True)
    copies.append(machine.queue(FETCH, gpu, layer, key_list, read))
    return keys


def promote_due(
    machine: MachineState,
    layer: int,
    promoted: list[tuple[int, int]],
    *,
    everything: bool,
) -> None:
    """Promote queued copies of a layer that should have landed before it came.

    That is `everything` if its products wait for all of them, else what caches with
    a deadline asked for. A replacement whose predecessor is in use stays behind,
    and so does one that must be read first: a guess must not block the SSD.
    """
    for gpu, level in enumerate(machine.gpu):
        hurries = level.cache.lands_by_next_visit
        if not everything and not hurries:
            continue
        for key in level.wished_of(layer):
            if everything:
                _promote(machine, gpu, key, promoted)
            elif machine.is_in_host_memory(key) and level.hurry(key):
                promoted.append((gpu, key % machine.experts))


def can_stage_all(
    machine: MachineState,
    layer: int,
    copies: list[Copies],
    promoted: list[tuple[int, int]],
) -> bool:
    """Whether staging could hold every queued copy of a layer at once, beside what
    it holds already.
    """
    for gpu in machine.serving[layer]:
        memory = machine.gpu[gpu].memory
        coming = [part for part in copies if (part.gpu, part.layer) == (gpu, layer)]
        count = sum(len(part.experts) for part in coming)
        count += sum(copied_to == gpu for copied_to, _ in promoted)
        # Slots of prefetches for other layers can be taken from them.
        if count + memory.staged_count[layer] > machine.sizes.staging:
            return False
    return True


def exposed_s(
    machine: MachineState, work: LayerWork, gpu: int, keys: np.ndarray
) -> float:
    """Seconds by which a cache's choice of victims outlasts the first load."""
    level = machine.gpu[gpu]
    if not len(keys):
        return 0.0
    row = 0 if machine.splits_layers else gpu
    position = np.searchsorted(work.experts, keys - work.layer * machine.experts)
    first_s = float(work.arrive_s[row][position].min())
    return level.cache.exposed_s(first_s)


def read_for_cpu(
    machine: MachineState,
    host: HostMemory,
    work: LayerWork,
    launch: Launch,
    copies: list[Copies],
) -> None:
    """Wish for reads of what the CPU computes; the layer step itself holds it."""
    layer = work.layer
    keys = _missing(work, launch, CPU, host.memory)
    if not len(keys):
        return
    read = [not host.level.is_wished(key) for key in keys.tolist()]
    for key in keys.tolist():
        host.promote(key)
    host.demand(work, layer, keys[read])
    experts = (keys - layer * machine.experts).tolist()
    copies.append(Copies(READ, -1, layer, experts, read))


def _missing(
    work: LayerWork, launch: Launch, lane: int, memory: Residency
) -> np.ndarray:
    """Flat keys, in launch order, of what a lane computes and its memory lacks."""
    keys = np.empty(len(work.experts), np.int64)
    count = missing(
        launch.lanes, launch.order, lane, memory.state, work.layer, work.experts, keys
    )
    return keys[:count]


def _promote(
    machine: MachineState, gpu: int, key: int, promoted: list[tuple[int, int]]
) -> None:
    """Note that a layer step waits for a queued copy and for the read before."""
    machine.gpu[gpu].promote(key)
    if machine.host is not None:
        machine.host.promote(key)
    place = gpu, key % machine.experts
    if place not in promoted:
        promoted.append(place)
