"""How often would a cache of any size have hit? One pass answers for all sizes at once.

The caches are those of `replay --cache-only`: cold at the start, *step-atomic* (a layer
step looks up all its active experts first, holds them, and only then lets misses in),
equal slots, prompt and generated tokens in replay order. Their contents obey inclusion:
what C slots hold, C + 1 slots hold too. So one stack per pool tells the contents of
every size (its top C entries), and an access hits all sizes above its depth. A layer
step rebuilds the stack from the top: at depth C stands what C slots keep and C - 1
slots do not,

- the old entry, if it is active (it is held), else
- the best of the *bag*: active experts that C slots did not hold, and old entries
  pushed out above.

LRU prefers active experts (lower id first), then later use, then higher id. Belady
prefers the earlier next use, then active experts (lower id first), then the higher id;
it may decline. While slots are still empty, misses enter: LRU's by id, Belady's by next
use. So both curves of every layer equal `moesim.policies.cache_replay` at every size,
oversized prefills included.

Over all layers together (global), Belady has one stack of all experts, whose untouched
parts are passed over; it too equals the replay at every size. LRU counts the later-used
experts instead (`recency`): equal to the replay in every cache that holds at least the
largest layer step, the sizes below being plain sequential LRU by (step, id).

Belady looks at least `BLOCK_ACCESSES` accesses ahead; later uses count as never.
Shorter traces are exact.

Source: Mattson, Gecsei, Slutz, Traiger (1970) for stack algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from moesim.traces.compilation import compiled
from moesim.traces.format.layer_steps import join, layer_steps
from moesim.traces.stats.reuse_distance import PLACES, later_used
from moesim.traces.stats.stack_distance import BLOCK, NEVER, belady_stack, lru_stack
from numba import types as nb

if TYPE_CHECKING:
    from collections.abc import Collection

    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

CURVES = ("lru", "belady", "lru_global", "belady_global")
BLOCK_ACCESSES = 1 << 22
"""Belady's least horizon in accesses."""

_I64 = nb.Array(nb.int64, 1, "C", readonly=True)
_I32 = nb.Array(nb.int32, 1, "C", readonly=True)


@dataclass(slots=True)
class Curves:
    """Depths of accesses. P phases (prefill, decode), L layers, E experts.

    Attributes:
        lru: int64 [P, L, E + 1]: accesses that hit per-layer caches of more than d
            slots, by d; E: never before seen.
        belady: the same for Belady.
        lru_global: int64 [P, L * E + 1], for one cache shared by all layers; depth L *
            E: never before seen.
        belady_global: the same for Belady.
    """

    lru: np.ndarray
    belady: np.ndarray
    lru_global: np.ndarray
    belady_global: np.ndarray

    def hits(self, name: str, phase: int | None = None) -> np.ndarray:
        """int64 [..., size]: hits at every size from 0 slots; `phase` None adds both
        up.
        """
        depths = getattr(self, name)
        chosen = depths.sum(axis=0) if phase is None else depths[phase]
        found = np.cumsum(chosen[..., :-1], axis=-1)
        return np.concatenate(
            (np.zeros((*found.shape[:-1], 1), np.int64), found), axis=-1
        )

    def accesses(self, name: str, phase: int | None = None) -> np.ndarray:
        """int64 [...]: how many there were."""
        depths = getattr(self, name)
        return (depths.sum(axis=0) if phase is None else depths[phase]).sum(axis=-1)

    def rates(self, name: str, phase: int | None = None) -> np.ndarray:
        """float64 [size]: hit rate over all layers at every size (per layer, or in all
        for global); nan without any.
        """
        hits = self.hits(name, phase)
        total = self.accesses(name, phase).sum()
        with np.errstate(invalid="ignore"):
            return np.asarray(hits.reshape(-1, hits.shape[-1]).sum(axis=0) / total)


def curves(trace: Trace, *, batch: int = 1) -> Curves:
    """Hit-rate curves of a trace, in one pass over it.

    Raises:
        TraceError: `batch` below 1, or a damaged trace.
    """
    fold = CurveFold(trace.shape)
    for block in layer_steps(trace, batch=batch):
        fold.add(block)
    return fold.end()


class CurveFold:
    """State between blocks; memory is that of two Belady blocks, whatever the length of
    the trace.

    Args:
        shape: the model.
        horizon: the accesses that Belady sees ahead, at least.
        names: which of `CURVES` to make; the others stay empty.
    """

    def __init__(
        self,
        shape: ModelShape,
        horizon: int = BLOCK_ACCESSES,
        names: Collection[str] = CURVES,
    ) -> None:
        layers = shape.layers
        experts = shape.experts
        keys = layers * experts
        self.layers = layers
        self.experts = experts
        self._horizon = horizon
        self._names = frozenset(names)
        self.found = Curves(
            np.zeros((2, layers, experts + 1), np.int64),
            np.zeros((2, layers, experts + 1), np.int64),
            np.zeros((2, keys + 1), np.int64),
            np.zeros((2, keys + 1), np.int64),
        )
        self._lru = (
            np.zeros((layers, experts), np.int64),
            np.zeros((layers, experts), np.bool_),
            np.zeros(layers, np.int64),
            np.zeros(1, np.int64),
        )
        self._belady, self._belady_global = (
            (
                np.zeros((pools, -(-width // BLOCK) * BLOCK), np.int64),
                np.full((pools, width), -1, np.int32),
                np.zeros(pools, np.int64),
                np.zeros((pools, -(-width // BLOCK)), np.int64),
            )
            for pools, width in ((layers, experts), (1, keys))
        )
        words = max(PLACES * keys // 64, 2) + 1
        self._recency = (
            np.zeros(words, np.uint64),
            np.zeros(words, np.int32),
            np.full(keys, -1, np.int64),
            np.zeros(64 * words, np.int64),
            np.zeros(2, np.int64),
        )
        self._waiting: LayerSteps | None = None
        self._pending: list[LayerSteps] = []
        self._count = 0

    def add(self, block: LayerSteps) -> None:
        """Fold the next block."""
        if "lru" in self._names:
            lru_stack(
                block.phase,
                block.layer,
                block.edges,
                block.experts,
                *self._lru,
                self.found.lru,
            )
        if "lru_global" in self._names:
            later_used(
                block.phase,
                block.edges,
                self._keys(block),
                *self._recency,
                self.found.lru_global,
            )
        if self._names.isdisjoint(("belady", "belady_global")):
            return
        self._pending.append(block)
        self._count += len(block.experts)
        if self._count >= self._horizon:
            self._advance()

    def end(self) -> Curves:
        """Nothing follows; return the curves."""
        if self._pending:
            self._advance()
        if self._waiting is not None:
            self._settle(self._waiting, self._never())
            self._waiting = None
        return self.found

    def _advance(self) -> None:
        fresh = join(self._pending)
        self._pending = []
        self._count = 0
        if self._waiting is not None:
            first = self._never()
            _next_places(*self._places(fresh), first)
            self._settle(self._waiting, first)
        self._waiting = fresh

    def _settle(self, block: LayerSteps, first: np.ndarray) -> None:
        """Belady over one block, given the places of the first uses after it."""
        following = _next_places(*self._places(block), first)
        if "belady" in self._names:
            belady_stack(
                block.phase,
                block.layer,
                block.edges,
                block.experts,
                following,
                *self._belady,
                self.found.belady,
            )
        if "belady_global" in self._names:
            depths = self.found.belady_global.reshape(2, 1, -1)
            one = np.zeros(len(block.layer), np.int64)
            belady_stack(
                block.phase,
                one,
                block.edges,
                self._keys(block),
                following,
                *self._belady_global,
                depths,
            )

    def _never(self) -> np.ndarray:
        return np.full(self.layers * self.experts, NEVER, np.int64)

    def _places(
        self, block: LayerSteps
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
        return (
            block.step * self.layers + block.layer,
            block.edges,
            block.experts,
            self.layers,
            self.experts,
        )

    def _keys(self, block: LayerSteps) -> np.ndarray:
        """int32 [A]: accesses of all layers told apart."""
        base = (block.layer * self.experts).astype(np.int32)
        return np.repeat(base, np.diff(block.edges)) + block.experts


@compiled(nb.int64[::1](_I64, _I64, _I32, nb.int64, nb.int64, nb.int64[::1]))
def _next_places(
    place: np.ndarray,
    edges: np.ndarray,
    experts: np.ndarray,
    layers: int,
    width: int,
    first: np.ndarray,
) -> np.ndarray:
    """The place, step * L + layer, of each access's next use, int64 [A]; `first`, by
    key, ends at the block's begin.
    """
    following = np.empty(len(experts), np.int64)
    for i in range(len(place) - 1, -1, -1):
        base = place[i] % layers * width
        for j in range(edges[i], edges[i + 1]):
            following[j] = first[base + experts[j]]
            first[base + experts[j]] = place[i]
    return following
