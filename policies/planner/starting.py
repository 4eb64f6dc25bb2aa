"""How a run starts: policies learn its sizes, and memories get their first content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.planner.residency import GLOBAL
from moesim.policies.run_context import RunContext

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.hwprofiles.costs import Costs
    from moesim.policies.base import Policy
    from moesim.policies.planner.host_memory import HostMemory
    from moesim.policies.planner.memory_level import MemoryLevel
    from moesim.policies.planner.plan import MemoryPlan, Policies
    from moesim.policies.run_context import Future
    from moesim.traces.format.schema import ModelShape


class StartingPlanner(Protocol):
    """What a planner must have before its policies can start: see `Planner`."""

    shape: ModelShape
    costs: Costs
    policies: Policies
    sizes: MemoryPlan
    layers: int
    experts: int
    gpus: int
    splits_layers: bool
    gpu: list[MemoryLevel]
    host: HostMemory | None

    def home(self, layer: int) -> int:
        """GPU that runs a layer's dense part."""


def start_policies(
    planner: StartingPlanner,
    *,
    seed: int,
    future: Future | None,
    calibration: np.ndarray | None,
    extras: Mapping[str, Any],
) -> None:
    """Tell every policy of a run its sizes, once.

    Raises:
        PolicyError: a policy needs the future and there is none.
    """
    sizes = planner.sizes
    shared: dict[Any, Any] = {}
    for policy in planner.policies.all():
        if policy.oracle and future is None:
            module = type(policy).__module__.rpartition(".")[2]
            raise PolicyError(
                f"policy {module.replace('_', '-')!r} is an oracle: it needs the"
                " future, which only the replay of a trace has; choose a policy that"
                " sees the past only"
            )
        of_host = policy is planner.policies.host_cache
        size = sizes.host if of_host else sizes.gpu
        assert size is not None
        policy.start(
            RunContext(
                shape=planner.shape,
                gpus=planner.gpus,
                capacity_slots=size.slots,
                scope=size.scope,
                seed=seed,
                calibration=calibration,
                future=future if policy.oracle else None,
                extras=extras,
                costs=planner.costs,
                served=_served(planner, policy),
                gpu=_gpu_of(planner, policy) or 0,
                pool_bytes=size.pool_bytes,
                # Host memory's cache is told of some active experts only.
                shared={} if of_host else shared,
            )
        )


def fill_memories(planner: StartingPlanner, calibration: np.ndarray | None) -> None:
    """Make resident what each cache policy starts with.

    That is what the policy says, else the favourites of a calibration, else nothing. In
    a unified memory everything is there.
    """
    levels = list(planner.gpu)
    if planner.host is not None:
        levels.append(planner.host.level)
    for level in levels:
        size = level.memory.size
        keys = level.cache.initial(size.slots)
        if planner.sizes.unified:
            keys = np.arange(planner.layers * planner.experts)
        if keys is None and calibration is not None:
            served = _served(planner, level.cache)
            keys = fitting(
                -calibration,
                size.slots,
                size.scope,
                served,
                pool_bytes=size.pool_bytes,
                shape=planner.shape,
            )
        if keys is None:
            continue
        served = _served(planner, level.cache)
        if served is not None:
            keys = keys[served[keys // planner.experts]]
        level.fill(keys)


def _served(planner: StartingPlanner, policy: Policy) -> np.ndarray | None:
    """Layers of the GPU whose cache policy this is, bool [L].

    None where that is all of them: GPUs do not share layers out, or it is no GPU's.
    """
    gpu = _gpu_of(planner, policy)
    if gpu is None or planner.gpus == 1 or not planner.splits_layers:
        return None
    return np.array([planner.home(layer) == gpu for layer in range(planner.layers)])


def _gpu_of(planner: StartingPlanner, policy: Policy) -> int | None:
    """The GPU whose cache policy this is; None if it is no GPU's."""
    for gpu, cache in enumerate(planner.policies.caches):
        if cache is policy:
            return gpu
    return None


def fitting(
    rank: np.ndarray,
    capacity_slots: np.ndarray,
    scope: str,
    served: np.ndarray | None = None,
    *,
    pool_bytes: np.ndarray | None = None,
    shape: ModelShape | None = None,
) -> np.ndarray:
    """Flat keys, int64 ascending, of the most wanted experts that fit.

    Args:
        rank: float64 [L, E], lowest for the most wanted; ties go to the lower key.
        capacity_slots: slots of each layer, or one entry for the global scope, which
            ranks the whole model at once.
        scope: ``layer`` or ``global``.
        served: bool [L], layers that may be there; None for all.
        pool_bytes: bytes of each pool, with which a pool of unequal experts is filled
            to less than one expert; None counts slots.
        shape: the model, whose experts have sizes, if `pool_bytes` are given.
    """
    layers, experts = rank.shape
    here = np.ones(layers, np.bool_) if served is None else served
    if scope == GLOBAL:
        order = np.argsort(rank, axis=None, kind="stable")
        order = order[here[order // experts]]
        if pool_bytes is None or shape is None:
            return np.sort(order[: int(capacity_slots[0])])
        sizes = np.array(shape.sizes_by_expert(), np.int64).reshape(-1)[order]
        return np.sort(order[first_fit(sizes, int(pool_bytes[0]))])
    by_layer = np.argsort(rank, axis=1, kind="stable")
    if shape is not None and shape.bytes_by_expert and pool_bytes is not None:
        taken = np.zeros(rank.shape, np.bool_)
        for layer in np.flatnonzero(here).tolist():
            order = by_layer[layer]
            sizes = np.array(shape.bytes_by_expert[layer], np.int64)[order]
            taken[layer, order] = first_fit(sizes, int(pool_bytes[layer]))
        return np.flatnonzero(taken)
    slots = np.where(here, capacity_slots, 0).tolist()
    filled = [
        layer * experts + by_layer[layer, : slots[layer]] for layer in range(layers)
    ]
    return np.sort(np.concatenate(filled)).astype(np.int64)


def first_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Bool [N]: which of `sizes`, int64 [N], are taken if each that still fits is."""
    taken = np.zeros(len(sizes), np.bool_)
    start = 0
    # One round per size that does not fit: all of it is skipped, so rounds are few.
    while start < len(sizes):
        filled = np.cumsum(sizes[start:])
        count = int(np.searchsorted(filled, room, side="right"))
        taken[start : start + count] = True
        if count:
            room -= int(filled[count - 1])
        start += count
        smaller = np.flatnonzero(sizes[start:] <= room)
        if not len(smaller):
            break
        start += int(smaller[0])
    return taken
