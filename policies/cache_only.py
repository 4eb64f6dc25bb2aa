"""A cache alone: which accesses hit, with no machine and no time.

Every miss is fetched and offered to the cache, as with on-demand assignment and nothing
in flight. Any cache policy can be driven so; LRU and Belady also have a compiled loop
over whole blocks of layer steps, which the tests hold equal to the policies themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.policies.base import ABSENT, LayerWork, RunContext
from moesim.policies.kernels import lowest, outscored, soonest
from moesim.policies.planner.initial_content import fitting
from moesim.policies.planner.memory_level import MemoryLevel
from moesim.policies.planner.residency import GLOBAL, CacheSize, Residency
from moesim.traces.compilation import compiled
from numba import types as nb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moesim.policies.base import CachePolicy, Future
    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.future import RecordedFuture
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.schema import ModelShape, Phase

_LRU, _BELADY, _BELADY_ADMITTING = range(3)


@dataclass(slots=True)
class CacheCounts:
    """What a cache alone did. `hits_by_layer` and `accesses_by_layer`: int64 [L]."""

    hits_by_layer: np.ndarray
    accesses_by_layer: np.ndarray

    @property
    def hits(self) -> int:
        """Accesses that found their expert resident."""
        return int(self.hits_by_layer.sum())

    @property
    def accesses(self) -> int:
        """Distinct active experts, summed over layer steps."""
        return int(self.accesses_by_layer.sum())

    @property
    def hit_rate(self) -> float | None:
        """Hits over accesses; None without accesses."""
        return self.hits / self.accesses if self.accesses else None


def drive(
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
    """Drive any cache policy, step-atomic: look, note, then let misses in among unheld
    residents.

    Raises:
        PolicyError: the policy answered something illegal.
    """
    memory = Residency(shape.layers, shape.experts, shape.expert_bytes, size)
    level = MemoryLevel(memory, cache, name, staging=shape.experts)
    seen = future if cache.oracle else None
    cache.start(
        RunContext(
            shape, 1, size.slots, size.scope, seed, calibration, seen, extras or {}
        )
    )
    keys = cache.initial(size.slots)
    if keys is None and calibration is not None:
        keys = fitting(-calibration, size.slots, size.scope)
    if keys is not None:
        level.fill(keys)
    counts = CacheCounts(
        np.zeros(shape.layers, np.int64), np.zeros(shape.layers, np.int64)
    )
    for step in steps:
        for routed in step.layers:
            _drive_layer(level, step, routed, counts)
    return counts


def _drive_layer(
    level: MemoryLevel, step: RoutedStep, routed: RoutedLayer, counts: CacheCounts
) -> None:
    memory = level.memory
    layer = routed.layer
    experts = routed.experts
    work = _bare_work(step.step, routed, memory.state[layer][experts], step.phase)
    memory.hold(layer, experts)
    level.cache.accessed(work)
    missing = experts[work.state == ABSENT]
    counts.hits_by_layer[layer] += len(experts) - len(missing)
    counts.accesses_by_layer[layer] += len(experts)
    if len(missing):
        keys = missing.astype(np.int64) + layer * memory.experts
        level.demand(work, layer, keys)
        for key in keys.tolist():
            level.start(key, 0.0, reserve=0)
        for expert in missing.tolist():
            memory.land(layer, expert)
    memory.release(layer, experts)
    for expert in memory.staged_of(layer) if memory.staged_count[layer] else ():
        memory.drop_staged(layer, expert)


def _bare_work(
    step: int, routed: RoutedLayer, state: np.ndarray, phase: Phase
) -> LayerWork:
    """A layer step without costs."""
    nothing = np.zeros(len(routed.experts))
    return LayerWork(
        step,
        routed.layer,
        phase,
        routed.experts,
        routed.tokens,
        state,
        nothing,
        nothing,
        nothing[None],
        nothing[None],
        routed.routing,
        routed.weights,
        routed.scores,
        routed.predicted,
    )


def has_compiled_loop(spec: str, shape: ModelShape, size: CacheSize) -> bool:
    """Whether `replay_compiled` knows this policy: LRU and Belady, over equal slots."""
    return spec in _MODES and (
        size.scope != GLOBAL or len(set(shape.expert_bytes)) == 1
    )


_MODES = {"lru": _LRU, "belady": _BELADY, "belady:must_admit=true": _BELADY_ADMITTING}


def replay_compiled(
    spec: str,
    shape: ModelShape,
    size: CacheSize,
    blocks: Iterable[LayerSteps],
    *,
    future: RecordedFuture | None = None,
) -> CacheCounts:
    """The same counts as `drive`, by the compiled loop. `future` is needed for
    Belady.
    """
    loop = _Loop(_MODES[spec], shape, size, future)
    for block in blocks:
        loop.run(block)
    return CacheCounts(loop.hits, loop.accesses)


class _Loop:
    """State between blocks of the compiled loop."""

    def __init__(
        self,
        mode: int,
        shape: ModelShape,
        size: CacheSize,
        future: RecordedFuture | None,
    ) -> None:
        keys = shape.layers * shape.experts
        self._mode = mode
        self._experts = shape.experts
        self._future = future
        self._layers = shape.layers
        self._slots = np.ascontiguousarray(size.slots)
        self._resident = np.zeros(keys, np.bool_)
        self._score = np.zeros(keys)
        self._used = np.zeros(len(size.slots), np.int64)
        self._now = np.zeros(1)
        self.hits = np.zeros(shape.layers, np.int64)
        self.accesses = np.zeros(shape.layers, np.int64)
        self._done = 0

    def run(self, block: LayerSteps) -> None:
        """Run the loop over the next layer steps."""
        _loop(
            self._mode,
            self._experts,
            block.layer,
            block.edges,
            block.experts,
            self._next_places(block.layer, np.diff(block.edges)),
            self._slots,
            self._resident,
            self._score,
            self._used,
            self._now,
            self.hits,
            self.accesses,
        )

    def _next_places(self, where: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Belady's scores, float64 [accesses of the block]: minus the place, by step
        and layer, of the next use.
        """
        if self._mode == _LRU:
            return np.empty(0)
        assert self._future is not None, "Belady needs the future"
        begin = self._done
        self._done = self._done + int(sizes.sum())
        uses = self._future.following[begin : self._done].astype(np.float64)
        return np.where(
            uses >= self._future.never,
            -np.inf,
            -(uses * self._layers + np.repeat(where, sizes)),
        )


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
def _loop(  # noqa: C901, PLR0912 - one loop, compiled
    mode: int,
    width: int,
    where: np.ndarray,
    edges: np.ndarray,
    experts: np.ndarray,
    next_place: np.ndarray,
    slots: np.ndarray,
    resident: np.ndarray,
    score: np.ndarray,
    used: np.ndarray,
    now: np.ndarray,
    hits: np.ndarray,
    accesses: np.ndarray,
) -> None:
    """Layer steps ``where[i]`` with experts ``experts[edges[i]:edges[i + 1]]``; keys
    are layer * width + expert.
    """
    whole = len(slots) == 1 and len(hits) > 1
    active = np.zeros(len(resident), np.bool_)
    for i in range(len(where)):
        layer = where[i]
        pool = 0 if whole else layer
        now[0] += 1.0
        missing = np.empty(edges[i + 1] - edges[i], np.int64)
        misses = 0
        for j in range(edges[i], edges[i + 1]):
            key = layer * width + experts[j]
            active[key] = True
            score[key] = now[0] if mode == 0 else next_place[j]
            if resident[key]:
                hits[layer] += 1
            else:
                missing[misses] = key
                misses += 1
        accesses[layer] += edges[i + 1] - edges[i]
        room = min(misses, slots[pool] - used[pool])
        used[pool] += room
        if mode != 0 and misses > room:
            missing = soonest(missing[:misses], score)
        late = missing[room:misses]
        if len(late):
            first, end = (
                (0, len(resident)) if whole else (layer * width, (layer + 1) * width)
            )
            candidates = np.empty(end - first, np.int64)
            count = 0
            for key in range(first, end):
                if resident[key] and not active[key]:
                    candidates[count] = key
                    count += 1
            late = late[:count]
            if mode == 1:
                victims = outscored(late, candidates[:count], score)
            else:
                victims = lowest(candidates[:count], score, score, len(late))
            for n in range(len(late)):
                if victims[n] >= 0:
                    resident[victims[n]] = False
                    resident[late[n]] = True
        for n in range(room):
            resident[missing[n]] = True
        for j in range(edges[i], edges[i + 1]):
            active[layer * width + experts[j]] = False
