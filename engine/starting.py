"""How a run starts: policies learn its sizes, and memories get their first content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.run_context import RunContext
from moesim.policies.sizes import fitting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.engine.memory import Memory
    from moesim.hwprofiles.costs import Costs
    from moesim.policies.run_context import Future
    from moesim.policies.sizes import MemoryPlan
    from moesim.policies.systems import Policies
    from moesim.traces.format.schema import ModelShape


def start_policies(
    shape: ModelShape,
    costs: Costs,
    policies: Policies,
    sizes: MemoryPlan,
    home: np.ndarray | None,
    *,
    seed: int,
    future: Future | None,
    calibration: np.ndarray | None,
    extras: Mapping[str, Any],
) -> None:
    """Tell every policy of a run its sizes, once; `home` is the GPU of each layer, int
    [L], where GPUs share the layers out.

    Raises:
        PolicyError: a policy needs the future and there is none.
    """
    shared: dict[Any, Any] = {}
    gpu_of = {id(cache): gpu for gpu, cache in enumerate(policies.caches)}
    for policy in policies.all():
        if policy.oracle and future is None:
            module = type(policy).__module__.rpartition(".")[2]
            raise PolicyError(
                f"policy {module.replace('_', '-')!r} is an oracle: it needs the"
                " future, which only the replay of a trace has; choose a policy that"
                " sees the past only"
            )
        of_host = policy is policies.host_cache
        size = sizes.host if of_host else sizes.gpu
        assert size is not None
        gpu = gpu_of.get(id(policy))
        policy.start(
            RunContext(
                shape=shape,
                gpus=len(policies.caches),
                capacity_slots=size.slots,
                scope=size.scope,
                seed=seed,
                calibration=calibration,
                future=future if policy.oracle else None,
                extras=extras,
                costs=costs,
                served=None if home is None or gpu is None else home == gpu,
                gpu=gpu or 0,
                pool_bytes=size.pool_bytes,
                # Host memory's cache is told of some active experts only.
                shared={} if of_host else shared,
            )
        )


def fill(
    memory: Memory,
    shape: ModelShape,
    calibration: np.ndarray | None,
    served: np.ndarray | None,
    *,
    unified: bool,
) -> None:
    """Make resident what a memory starts with.

    That is what its policy says, else the favourites of a calibration among the layers
    that are `served`, bool [L], else nothing. In a unified memory everything is there.
    """
    size = memory.size
    keys = memory.cache.initial(size.slots)
    if unified:
        keys = np.arange(shape.layers * shape.experts)
    if keys is None and calibration is not None:
        keys = fitting(
            -calibration,
            size.slots,
            size.scope,
            served,
            pool_bytes=size.pool_bytes,
            shape=shape,
        )
    if keys is None:
        return
    if served is not None:
        keys = keys[served[keys // shape.experts]]
    memory.fill(keys)
