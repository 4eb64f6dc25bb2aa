"""How a run starts: policies learn its sizes, and memories get their first content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moesim.policies.base import PolicyError, RunContext
from moesim.policies.planner.initial_content import fitting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.hwprofiles.costs import Costs
    from moesim.policies.base import Future, Policy
    from moesim.policies.planner.host_memory import HostMemory
    from moesim.policies.planner.memory_level import MemoryLevel
    from moesim.policies.planner.plan import MemoryPlan, Policies
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
    for policy in planner.policies.all():
        if policy.oracle and future is None:
            module = type(policy).__module__.rpartition(".")[2]
            raise PolicyError(
                f"policy {module.replace('_', '-')!r} is an oracle: it needs the"
                " future, which only the replay of a trace has; choose a policy that"
                " sees the past only"
            )
        size = sizes.host if policy is planner.policies.host_cache else sizes.gpu
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
                pool_bytes=size.pool_bytes,
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
    if planner.gpus == 1 or not planner.splits_layers:
        return None
    for gpu, cache in enumerate(planner.policies.caches):
        if cache is policy:
            homes = [planner.home(layer) == gpu for layer in range(planner.layers)]
            return np.array(homes)
    return None
