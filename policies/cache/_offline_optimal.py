"""Base of oracles that solve before the run which expert stays after each use, and then
follow that plan.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.cache._compiled import CompiledCache
from moesim.policies.cache._offline_bounds import Stays, Uses, best_stays
from moesim.policies.kernels import (
    ACCESSED,
    ADMITS,
    VICTIMS,
    CacheKernels,
    State,
    Work,
    state,
)
from moesim.traces.compilation import compiled

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

# 115,200 uses took 8 s on one core, and 46 s where beginnings cost extra (measured).
MOST_USES = 120_000
"""Uses that one pool may have."""

# Rows of the state's marks.
_KEEP = 0
"""By key: whether it stays."""

_EDGES = 1
"""By layer step: where its uses begin."""

_KEYS = 2
_PLAN = 3
"""By use: the expert, and whether it stays after it."""


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    """Look up which of the active experts stay."""
    time = work.step * state.integers[0] + work.layer
    marks = state.marks
    for use in range(marks[_EDGES, time], marks[_EDGES, time + 1]):
        marks[_KEEP, marks[_KEYS, use]] = marks[_PLAN, use]


@compiled(ADMITS)
def _admits(
    state: State, work: Work, incoming: np.ndarray, answers: np.ndarray
) -> None:
    """Admit what is to stay."""
    for n in range(len(incoming)):
        answers[n] = state.marks[_KEEP, incoming[n]] != 0


@compiled(VICTIMS)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Evict what is not to stay, lower ids first; decline when nothing is left."""
    count = 0
    for key in candidates:
        if count < len(incoming) and not state.marks[_KEEP, key]:
            chosen[count] = key
            count += 1
    for n in range(count, len(incoming)):
        chosen[n] = -1


def sizes_in_slots(key: np.ndarray, context: RunContext) -> np.ndarray:
    """Sizes of experts in slots of their pool, which count its largest: float64, same
    shape as the flat keys `key`.
    """
    sizes = np.array(context.shape.sizes_by_expert(), np.float64)
    is_global = len(context.capacity_slots) == 1
    largest = sizes.max() if is_global else sizes.max(axis=1, keepdims=True)
    return np.asarray((sizes / largest).reshape(-1)[key])


class OfflineOptimalCache(CompiledCache):
    """Follows `best_stays`; subclasses price the uses in `uses`.

    The plan may let an expert leave in the very step that uses it. The planner holds
    active experts, so a planned entry may find no slot; then the expert runs from
    staging and the run does worse than the plan (2 % fewer hits than planned on OLMoE,
    a quarter of each layer; 0.2 % in global scope). Content that was filled in before
    the run is not planned: it serves until it is evicted, so bounds hold for an empty
    start only.

    Attributes:
        stays: the solved pools, one per layer or one in global scope.
    """

    oracle: ClassVar[bool] = True
    stays: list[Stays]

    def bring(self, context: RunContext) -> CacheKernels:
        """Solve every pool.

        Raises:
            PolicyError: the future is not available, or too long.
        """
        future = context.future
        if future is None:
            raise PolicyError(
                f"cache policy {self._label!r} must see the future; only a replay of a"
                " whole trace has one"
            )

        # All uses of the run, in order: a time is a step, then a layer.
        layers = context.shape.layers
        experts = context.shape.experts
        step_layers = [divmod(time, layers) for time in range(future.never * layers)]
        active = [future.active(step, layer) for step, layer in step_layers]
        workloads = [future.tokens(step, layer) for step, layer in step_layers]
        lengths = [len(experts_of_time) for experts_of_time in active]
        # Uses of time t are numbered from edge t to edge t + 1.
        edges = np.zeros(len(active) + 1, np.int64)
        edges[1:] = np.cumsum(lengths)
        time = np.repeat(np.arange(len(active)), lengths)
        # The empty array in front keeps a run without any layer step legal.
        empty = np.empty(0, np.int32)
        ids = np.concatenate([empty, *active])
        tokens = np.concatenate([empty, *workloads])

        layer_of = time % layers
        keys = layer_of * experts + ids.astype(np.int64)
        plan = np.zeros(len(keys), np.bool_)

        if len(context.capacity_slots) == 1:
            pools = [np.arange(len(time))]
        else:
            pools = [np.flatnonzero(layer_of == layer) for layer in range(layers)]

        self.stays = []
        capacities = context.capacity_slots.tolist()
        for slots, members in zip(capacities, pools, strict=True):
            if len(members) > MOST_USES:
                raise PolicyError(
                    f"cache policy {self._label!r}: {len(members)} uses in one pool,"
                    f" at most {MOST_USES} can be solved; cut the replay with --steps"
                )
            uses, capacity = self.uses(
                time=time[members],
                key=keys[members],
                tokens=tokens[members],
                slots=slots,
                context=context,
            )
            stays = best_stays(uses, capacity)
            self.stays.append(stays)
            plan[members] = stays.kept

        marks = np.zeros((4, max(layers * experts, len(edges), len(keys))), np.int64)
        marks[_EDGES, : len(edges)] = edges
        marks[_KEYS, : len(keys)] = keys
        marks[_PLAN, : len(keys)] = plan
        return CacheKernels(
            state(marks=marks, integers=[layers]),
            victims=_victims,
            accessed=_accessed,
            admits=_admits,
        )

    @property
    def _label(self) -> str:
        """Its registered name; the class's where it was made without the registry."""
        return self.name or type(self).__name__

    @abstractmethod
    def uses(
        self,
        time: np.ndarray,
        key: np.ndarray,
        tokens: np.ndarray,
        slots: int,
        context: RunContext,
    ) -> tuple[Uses, float]:
        """Price the uses of one pool, `time`, `key` int64 [U], `tokens` int32 [U];
        return them and the pool's capacity.
        """
