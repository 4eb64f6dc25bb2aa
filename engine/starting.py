"""How a run starts: policies learn its sizes, and memories get their first content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.run_context import RunContext
from moesim.policies.sizes import fitting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.engine.planner import Planner
    from moesim.policies.base import Policy
    from moesim.policies.run_context import Future


def start_policies(
    planner: Planner,
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


def fill_memories(planner: Planner, calibration: np.ndarray | None) -> None:
    """Make resident what each cache policy starts with.

    That is what the policy says, else the favourites of a calibration, else nothing. In
    a unified memory everything is there.
    """
    memories = list(planner.gpu)
    if planner.host is not None:
        memories.append(planner.host.memory)
    for memory in memories:
        size = memory.size
        keys = memory.cache.initial(size.slots)
        if planner.sizes.unified:
            keys = np.arange(planner.layers * planner.experts)
        if keys is None and calibration is not None:
            served = _served(planner, memory.cache)
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
        served = _served(planner, memory.cache)
        if served is not None:
            keys = keys[served[keys // planner.experts]]
        memory.fill(keys)


def _served(planner: Planner, policy: Policy) -> np.ndarray | None:
    """Layers of the GPU whose cache policy this is, bool [L].

    None where that is all of them: GPUs do not share layers out, or it is no GPU's.
    """
    gpu = _gpu_of(planner, policy)
    if gpu is None or planner.gpus == 1 or not planner.rules.splits_layers:
        return None
    return np.array([planner.home(layer) == gpu for layer in range(planner.layers)])


def _gpu_of(planner: Planner, policy: Policy) -> int | None:
    """The GPU whose cache policy this is; None if it is no GPU's."""
    for gpu, cache in enumerate(planner.policies.caches):
        if cache is policy:
            return gpu
    return None
