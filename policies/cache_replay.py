"""Replays layer steps through a cache alone, without machine or time: which accesses
hit?

Every miss is fetched and offered to the cache, as with on-demand assignment and nothing
in flight. Any cache policy can be replayed so; LRU and Belady also have a compiled loop
over whole blocks of layer steps, which the tests hold equal to the policies themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.policies.base import ABSENT, LayerWork, RunContext
from moesim.policies.cache._kernels import (
    by_descending_score,
    lowest_scores,
    outscored_victims,
)
from moesim.policies.planner.memory_level import MemoryLevel
from moesim.policies.planner.residency import GLOBAL, CacheSize, Residency
from moesim.policies.planner.starting import fitting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moesim.policies.base import CachePolicy, Future
    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.future import RecordedFuture
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.schema import ModelShape, Phase

# Rules of `replay_accesses`. Plain numbers, as a kernel takes no enumeration.
REPLAY_LRU = 0
"""Evicts the least recently used."""

REPLAY_BELADY = 1
"""Evicts the farthest next use; declines what would come back even later."""

REPLAY_BELADY_ADMITTING = 2
"""Evicts the farthest next use; every miss enters as long as a candidate is left."""


@compiled(
    nb.void(
        nb.int64,
        nb.int64,
        nb.int64[::1],
        nb.int64[::1],
        nb.int32[::1],
        nb.float64[::1],
        nb.int64[::1],
        nb.boolean[::1],
        nb.float64[::1],
        nb.int64[::1],
        nb.float64[::1],
        nb.int64[::1],
        nb.int64[::1],
    )
)
def replay_accesses(  # noqa: C901, PLR0912 - one loop, compiled
    rule: int,
    width: int,
    layer_of: np.ndarray,
    edges: np.ndarray,
    experts: np.ndarray,
    next_use: np.ndarray,
    slots: np.ndarray,
    resident: np.ndarray,
    score: np.ndarray,
    used: np.ndarray,
    now: np.ndarray,
    hits: np.ndarray,
    accesses: np.ndarray,
) -> None:
    """Run a block of layer steps through an LRU or Belady cache; update its state.

    Args:
        rule: `REPLAY_LRU`, `REPLAY_BELADY` or `REPLAY_BELADY_ADMITTING`.
        width: experts per layer.
        layer_of: int64 [layer steps].
        edges: int64 [layer steps + 1]; step i uses ``experts[edges[i]:edges[i + 1]]``.
        experts: int32 [accesses], ascending within a layer step.
        next_use: float64 [accesses], Belady's scores; empty for LRU.
        slots: int64 [L] capacity of each layer, or [1] for the global scope.
        resident: bool [keys].
        score: float64 [keys].
        used: int64, as `slots`: slots in use.
        now: float64 [1], layer steps so far.
        hits, accesses: int64 [L], counts so far.
    """
    is_global = len(slots) == 1 and len(hits) > 1
    active = np.zeros(len(resident), np.bool_)

    for i in range(len(layer_of)):
        layer = layer_of[i]
        pool = 0 if is_global else layer
        now[0] += 1.0

        begin = edges[i]
        end = edges[i + 1]
        missing = np.empty(end - begin, np.int64)
        misses = 0
        for j in range(begin, end):
            key = layer * width + experts[j]
            active[key] = True
            score[key] = now[0] if rule == REPLAY_LRU else next_use[j]
            if resident[key]:
                hits[layer] += 1
            else:
                missing[misses] = key
                misses += 1
        accesses[layer] += end - begin

        free = min(misses, slots[pool] - used[pool])
        used[pool] += free
        # Where slots run short, Belady gives them to what is needed soonest.
        if rule != REPLAY_LRU and misses > free:
            missing = by_descending_score(missing[:misses], score)

        evicting = missing[free:misses]
        if len(evicting):
            first_key = 0 if is_global else layer * width
            end_key = len(resident) if is_global else (layer + 1) * width
            candidates = np.empty(end_key - first_key, np.int64)
            count = 0
            for key in range(first_key, end_key):
                # Active experts are held: none of them leaves in its own layer step.
                if resident[key] and not active[key]:
                    candidates[count] = key
                    count += 1

            evicting = evicting[:count]
            candidates = candidates[:count]
            if rule == REPLAY_BELADY:
                victims = outscored_victims(evicting, candidates, score)
            else:
                victims = np.empty(len(evicting), np.int64)
                lowest_scores(candidates, score, score, victims)
            for n in range(len(evicting)):
                if victims[n] >= 0:
                    resident[victims[n]] = False
                    resident[evicting[n]] = True

        # Entered last: what took a free slot is active, and was no candidate anyway.
        for n in range(free):
            resident[missing[n]] = True
        for j in range(begin, end):
            active[layer * width + experts[j]] = False


# Specifications that the compiled loop answers.
_RULES = {
    "lru": REPLAY_LRU,
    "belady": REPLAY_BELADY,
    "belady:must_admit=true": REPLAY_BELADY_ADMITTING,
}


@dataclass(slots=True)
class CacheCounts:
    """Hits and accesses of a cache alone, both int64 [L] by layer."""

    hits_by_layer: np.ndarray
    accesses_by_layer: np.ndarray

    @property
    def hits(self) -> int:
        """Accesses to resident experts."""
        return int(self.hits_by_layer.sum())

    @property
    def accesses(self) -> int:
        """Distinct active experts, summed over layer steps."""
        return int(self.accesses_by_layer.sum())

    @property
    def hit_rate(self) -> float | None:
        """Hits over accesses; None without accesses."""
        return self.hits / self.accesses if self.accesses else None


def replay(
    cache: CachePolicy,
    name: str,
    shape: ModelShape,
    size: CacheSize,
    steps: Iterable[RoutedStep],
    *,
    future: Future | None = None,
    seed: int = 0,
    calibration: np.ndarray | None = None,
    extras: Mapping[str, Any] | None = None,
) -> CacheCounts:
    """Replay layer steps through any cache policy, step-atomic: look up all active
    experts, note them, then let misses enter among residents that are not held.

    Raises:
        PolicyError: the policy answered something illegal.
    """
    memory = Residency.for_model(shape, size)
    level = MemoryLevel(memory, cache, name, staging=shape.experts)
    cache.start(
        RunContext(
            shape=shape,
            gpus=1,
            capacity_slots=size.slots,
            scope=size.scope,
            seed=seed,
            calibration=calibration,
            # Given to oracles alone, so that no other rule can profit by accident.
            future=future if cache.oracle else None,
            extras=extras or {},
            pool_bytes=size.pool_bytes,
        )
    )
    # As the planner fills it: the policy's content first, else the calibration's.
    keys = cache.initial(size.slots)
    if keys is None and calibration is not None:
        keys = fitting(
            -calibration,
            size.slots,
            size.scope,
            pool_bytes=size.pool_bytes,
            shape=shape,
        )
    if keys is not None:
        level.fill(keys)

    counts = CacheCounts(
        hits_by_layer=np.zeros(shape.layers, np.int64),
        accesses_by_layer=np.zeros(shape.layers, np.int64),
    )
    for step in steps:
        for routed in step.layers:
            _replay_layer(level, step, routed, counts)
    return counts


def _replay_layer(
    level: MemoryLevel,
    step: RoutedStep,
    routed: RoutedLayer,
    counts: CacheCounts,
) -> None:
    """Replay one layer step."""
    memory = level.memory
    layer = routed.layer
    experts = routed.experts
    state = memory.state[layer][experts]
    work = _work_without_costs(step.step, routed, state, step.phase)

    # All active experts are held first, or one miss would evict the next hit.
    memory.hold(layer, experts)
    level.cache.accessed(work)
    missing = experts[work.state == ABSENT]
    counts.hits_by_layer[layer] += len(experts) - len(missing)
    counts.accesses_by_layer[layer] += len(experts)
    if len(missing):
        keys = missing.astype(np.int64) + layer * memory.experts
        level.demand(work, layer, keys)
        # Copies take no time here: all have landed when the layer step ends.
        for key in keys.tolist():
            level.start(key, 0.0)
        for expert in missing.tolist():
            memory.land(layer, expert)

    memory.release(layer, experts)
    # What was declined ran from staging and is gone after its layer step.
    if memory.staged_count[layer]:
        for expert in memory.staged_of(layer):
            memory.drop_staged(layer, expert)


def _work_without_costs(
    step: int,
    routed: RoutedLayer,
    state: np.ndarray,
    phase: Phase,
) -> LayerWork:
    """A layer step in which nothing takes time."""
    zeros = np.zeros(len(routed.experts))
    return LayerWork(
        step=step,
        layer=routed.layer,
        phase=phase,
        experts=routed.experts,
        tokens=routed.tokens,
        state=state,
        cpu_s=zeros,
        host_s=zeros,
        gpu_s=zeros[None],
        arrive_s=zeros[None],
        routing=routed.routing,
        weights=routed.weights,
        scores=routed.scores,
        predicted=routed.predicted,
    )


def has_compiled_loop(spec: str, shape: ModelShape, size: CacheSize) -> bool:
    """Whether `replay_compiled` knows this policy: LRU and Belady, over equal slots."""
    # Experts of unequal size in one pool would need bytes instead of slots.
    equal_in_pools = size.scope != GLOBAL or len(set(shape.expert_bytes)) == 1
    return spec in _RULES and equal_in_pools and not shape.bytes_by_expert


def replay_compiled(
    spec: str,
    shape: ModelShape,
    size: CacheSize,
    blocks: Iterable[LayerSteps],
    *,
    future: RecordedFuture | None = None,
) -> CacheCounts:
    """The same counts as `replay`, by the compiled loop. `future` is needed for
    Belady.
    """
    loop = _CompiledLoop(_RULES[spec], shape, size, future)
    for block in blocks:
        loop.run(block)
    return CacheCounts(loop.hits, loop.accesses)


class _CompiledLoop:
    """State between blocks of the compiled loop."""

    def __init__(
        self,
        rule: int,
        shape: ModelShape,
        size: CacheSize,
        future: RecordedFuture | None,
    ) -> None:
        keys = shape.layers * shape.experts
        self._rule = rule
        self._layers = shape.layers
        self._experts = shape.experts
        self._future = future
        self._slots = np.ascontiguousarray(size.slots)
        self._resident = np.zeros(keys, np.bool_)
        self._score = np.zeros(keys)
        self._used = np.zeros(len(size.slots), np.int64)
        # One element, because a kernel cannot change a number in place.
        self._now = np.zeros(1)
        self.hits = np.zeros(shape.layers, np.int64)
        self.accesses = np.zeros(shape.layers, np.int64)
        self._done = 0

    def run(self, block: LayerSteps) -> None:
        """Run the loop over the next layer steps."""
        replay_accesses(
            rule=self._rule,
            width=self._experts,
            layer_of=block.layer,
            edges=block.edges,
            experts=block.experts,
            next_use=self._next_uses(block.layer, np.diff(block.edges)),
            slots=self._slots,
            resident=self._resident,
            score=self._score,
            used=self._used,
            now=self._now,
            hits=self.hits,
            accesses=self.accesses,
        )

    def _next_uses(
        self,
        layer_of: np.ndarray,
        lengths: np.ndarray,
    ) -> np.ndarray:
        """Belady's scores, float64 [accesses of the block]: minus the time, by step and
        layer, of the next use.
        """
        if self._rule == REPLAY_LRU:
            return np.empty(0)

        assert self._future is not None, "Belady needs the future"
        begin = self._done
        self._done += int(lengths.sum())
        uses = self._future.following[begin : self._done].astype(np.float64)
        time = uses * self._layers + np.repeat(layer_of, lengths)
        return np.where(uses >= self._future.never, -np.inf, -time)
