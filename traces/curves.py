"""How often would a cache of any size have hit? One pass answers for all sizes at once.

The caches are those of `replay --cache-only`: cold at the start, *step-atomic* (a layer step looks up all its active
experts first, holds them, and only then lets misses in), equal slots, prompt and generated tokens in replay order.
Their contents obey inclusion: what C slots hold, C + 1 slots hold too. So one stack per pool tells the contents of
every size (its top C entries), and an access hits all sizes above its depth. A layer step rebuilds the stack from the
top: at depth C stands what C slots keep and C - 1 slots do not,

- the old entry, if it is active (it is held), else
- the best of the *bag*: active experts that C slots did not hold, and old entries pushed out above.

LRU prefers active experts (lower id first), then later use, then higher id. Belady prefers the earlier next use, then
active experts (lower id first), then the higher id; it may decline. While slots are still empty, misses enter by id.
So the LRU curve of every layer equals `policies.cache_only` at *every* size, oversized prefills included. Belady's
equals it at every size that holds the largest layer step; in a smaller cache the replay offers only as many misses as
could enter, by id, where the curve offers all and keeps the best. (That cut-off has no inclusion, hence no one pass.)

Over all layers together (global), LRU counts the later-used experts with a tree of sums instead: equal to the replay in
every cache that holds at least the largest layer step, the sizes below being plain sequential LRU by (step, id).

Belady looks at least `BLOCK_ACCESSES` accesses ahead; later uses count as never. Shorter traces are exact.

Source: Mattson, Gecsei, Slutz, Traiger (1970) for stack algorithms; Bennett and Kruskal (1975) for the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numba import types as nb

from traces.compiled import compiled
from traces.layer_steps import join, layer_steps

if TYPE_CHECKING:
    from traces.layer_steps import LayerSteps
    from traces.reader import Trace
    from traces.schema import ModelShape

BLOCK_ACCESSES = 1 << 22
"""Belady's least horizon in accesses."""

_I64 = nb.Array(nb.int64, 1, "C", readonly=True)
_I32 = nb.Array(nb.int32, 1, "C", readonly=True)
_I8 = nb.Array(nb.int8, 1, "C", readonly=True)
_NEVER = 1 << 62


@dataclass(slots=True)
class Curves:
    """Depths of accesses. P phases (prefill, decode), L layers, E experts.

    Attributes:
        lru: int64 [P, L, E + 1]: accesses that hit per-layer caches of more than d slots, by d; E: never before seen.
        belady: the same for Belady.
        lru_global: int64 [P, L * E + 1], for one cache shared by all layers; depth L * E: never before seen.
    """

    lru: np.ndarray
    belady: np.ndarray
    lru_global: np.ndarray

    def hits(self, name: str, phase: int | None = None) -> np.ndarray:
        """int64 [..., size]: hits at every size from 0 slots; `phase` None adds both up."""
        depths = getattr(self, name)
        chosen = depths.sum(axis=0) if phase is None else depths[phase]
        found = np.cumsum(chosen[..., :-1], axis=-1)
        return np.concatenate((np.zeros((*found.shape[:-1], 1), np.int64), found), axis=-1)

    def accesses(self, name: str, phase: int | None = None) -> np.ndarray:
        """int64 [...]: how many there were."""
        depths = getattr(self, name)
        return (depths.sum(axis=0) if phase is None else depths[phase]).sum(axis=-1)

    def rates(self, name: str, phase: int | None = None) -> np.ndarray:
        """float64 [size]: hit rate over all layers at every size (per layer, or in all for global); nan without any."""
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
    """State between blocks; memory is that of two Belady blocks, whatever the length of the trace."""

    def __init__(self, shape: ModelShape, horizon: int = BLOCK_ACCESSES) -> None:
        layers, experts = shape.layers, shape.experts
        keys = layers * experts
        self.layers, self.experts, self._horizon = layers, experts, horizon
        self.found = Curves(
            np.zeros((2, layers, experts + 1), np.int64),
            np.zeros((2, layers, experts + 1), np.int64),
            np.zeros((2, keys + 1), np.int64),
        )
        self._lru, self._belady = (
            (
                np.zeros((layers, experts), np.int32),  # stacks
                np.zeros(layers, np.int64),  # their filled part
                np.zeros((layers, experts), np.int64),  # scores
                np.zeros(1, np.int64),  # layer steps
            )
            for _ in range(2)
        )
        self._tree = np.zeros(4 * keys + 1, np.int64)
        self._last = np.full(keys, -1, np.int64)
        self._held = np.full(4 * keys, -1, np.int64)
        self._clock = np.zeros(2, np.int64)
        self._waiting: LayerSteps | None = None
        self._pending: list[LayerSteps] = []
        self._count = 0

    def add(self, block: LayerSteps) -> None:
        """Fold the next block."""
        access = self._access(block)
        _stack(*access, np.zeros(0, np.int64), *self._lru, self.found.lru)
        _tree_distances(*access, self._tree, self._last, self._held, self._clock, self.experts, self.found.lru_global)
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
        self._pending, self._count = [], 0
        if self._waiting is not None:
            first = self._never()
            _next_places(*self._places(fresh), first)
            self._settle(self._waiting, first)
        self._waiting = fresh

    def _settle(self, block: LayerSteps, first: np.ndarray) -> None:
        """Belady over one block, given the places of the first uses after it."""
        following = _next_places(*self._places(block), first)
        _stack(*self._access(block), following, *self._belady, self.found.belady)

    def _never(self) -> np.ndarray:
        return np.full(self.layers * self.experts, _NEVER, np.int64)

    def _places(self, block: LayerSteps) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
        return block.step * self.layers + block.layer, block.edges, block.experts, self.layers, self.experts

    @staticmethod
    def _access(block: LayerSteps) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return block.phase, block.layer, block.edges, block.experts


@compiled(nb.int64[::1](_I64, _I64, _I32, nb.int64, nb.int64, nb.int64[::1]))
def _next_places(
    place: np.ndarray, edges: np.ndarray, experts: np.ndarray, layers: int, width: int, first: np.ndarray
) -> np.ndarray:
    """The place, step * L + layer, of each access's next use, int64 [A]; `first`, by key, ends at the block's begin."""
    following = np.empty(len(experts), np.int64)
    for i in range(len(place) - 1, -1, -1):
        base = place[i] % layers * width
        for j in range(edges[i], edges[i + 1]):
            following[j] = first[base + experts[j]]
            first[base + experts[j]] = place[i]
    return following


@compiled(
    nb.void(
        _I8, _I64, _I64, _I32, _I64,
        nb.int32[:, ::1], nb.int64[::1], nb.int64[:, ::1], nb.int64[::1], nb.int64[:, :, ::1],
    )
)  # fmt: skip
def _stack(  # noqa: C901, PLR0912, PLR0915 - one loop, compiled
    phase: np.ndarray,
    layer: np.ndarray,
    edges: np.ndarray,
    experts: np.ndarray,
    following: np.ndarray,
    stacks: np.ndarray,
    filled: np.ndarray,
    scores: np.ndarray,
    clock: np.ndarray,
    depths: np.ndarray,
) -> None:
    """Rebuild the stack of each layer step; an empty `following` means LRU, else it holds Belady's next places."""
    lru = len(following) == 0
    width = stacks.shape[1]
    active, met, placed = np.zeros(width, np.bool_), np.zeros(width, np.bool_), np.zeros(width, np.bool_)
    bag = np.empty(width + 1, np.int32)  # worst first
    for i in range(len(layer)):
        stack, score, where = stacks[layer[i]], scores[layer[i]], depths[phase[i], layer[i]]
        kept = 0
        for j in range(edges[i + 1] - 1, edges[i] - 1, -1):  # higher ids are worse
            expert = experts[j]
            active[expert], met[expert], placed[expert] = True, False, False
            score[expert] = clock[0] if lru else -following[j]
            at = kept
            while not lru and at > 0 and score[bag[at - 1]] > score[expert]:
                bag[at] = bag[at - 1]
                at -= 1
            bag[at] = expert
            kept += 1
        clock[0] += 1
        seen, depth = filled[layer[i]], 0
        while kept > 0:
            if depth == seen:  # those never seen before stand below all others, by id
                for j in range(edges[i], edges[i + 1]):
                    if not met[experts[j]]:
                        stack[filled[layer[i]]] = experts[j]
                        filled[layer[i]] += 1
            old = stack[depth]
            if active[old]:
                met[old] = True
                where[depth if depth < seen else width] += 1
                if not placed[old]:  # held
                    at = kept - 1
                    while bag[at] != old:
                        at -= 1
                    for n in range(at, kept - 1):
                        bag[n] = bag[n + 1]
                    bag[kept - 1] = old
            else:
                at = kept
                while at > 0:
                    other = bag[at - 1]
                    if score[old] == score[other] or (lru and active[other]):
                        better = not active[other] and old > other
                    else:
                        better = score[old] > score[other]
                    if better:
                        break
                    bag[at] = other
                    at -= 1
                bag[at] = old
                kept += 1
            kept -= 1
            stack[depth] = bag[kept]
            placed[bag[kept]] = True
            depth += 1
        for j in range(edges[i], edges[i + 1]):
            active[experts[j]] = False


@compiled(
    nb.void(
        _I8, _I64, _I64, _I32, nb.int64[::1], nb.int64[::1], nb.int64[::1], nb.int64[::1], nb.int64, nb.int64[:, ::1],
    )
)  # fmt: skip
def _tree_distances(  # noqa: C901, PLR0912 - one loop, compiled
    phase: np.ndarray,
    layer: np.ndarray,
    edges: np.ndarray,
    experts: np.ndarray,
    tree: np.ndarray,
    last: np.ndarray,
    held: np.ndarray,
    clock: np.ndarray,
    width: int,
    depths: np.ndarray,
) -> None:
    """Count, before each layer step, the keys used later than each of its own: `tree` sums marks at last uses.

    `last` int64 [keys]: place of each key's last use; `held` int64 [places]: its inverse; ``clock[0]`` next place,
    ``clock[1]`` keys seen.
    """
    places = len(held)
    for i in range(len(layer)):
        base = layer[i] * width
        if clock[0] + edges[i + 1] - edges[i] > places:  # squeeze out the places of outdated uses
            end = 0
            tree[:] = 0
            for place in range(places):
                key = held[place]
                held[place] = -1
                if key >= 0 and last[key] == place:
                    held[end], last[key] = key, end
                    end += 1
            for place in range(1, places + 1):
                tree[place] += place <= end
                up = place + (place & -place)
                if up <= places:
                    tree[up] += tree[place]
            clock[0] = end
        for j in range(edges[i], edges[i + 1]):
            place = last[base + experts[j]]
            depth = len(last)
            if place >= 0:
                depth, at = clock[1], place + 1
                while at > 0:
                    depth -= tree[at]
                    at -= at & -at
            depths[phase[i], depth] += 1
        for j in range(edges[i], edges[i + 1]):
            key = base + experts[j]
            if last[key] >= 0:
                held[last[key]] = -1
                at = last[key] + 1
                while at <= places:
                    tree[at] -= 1
                    at += at & -at
            else:
                clock[1] += 1
            place = clock[0]
            last[key], held[place] = place, key
            clock[0] += 1
            at = place + 1
            while at <= places:
                tree[at] += 1
                at += at & -at
