"""Hit rates of caches of every size, in one pass over a trace.

The caches are those of `moesim hits`: cold at the start, *step-atomic* (a layer
step looks up all its active experts first, holds them, and only then lets misses in),
equal slots, prompt and generated tokens in replay order. Their contents obey inclusion:
what C slots hold, C + 1 slots hold too. So one stack per pool tells the contents of
every size (its top C entries), and an access hits all sizes above its depth. A layer
step rebuilds the stack from the top: at depth C stands what C slots keep and C - 1
slots do not,

- the old entry, if it is active (it is held), else
- the best of the *displaced*: active experts that C slots did not hold, and old entries
  pushed out above.

LRU prefers the later use, Belady the earlier next use; among equals, active experts
come first (the lower id before others), then the higher id. Belady may decline. While
slots are still empty, misses enter: LRU's by id, Belady's by next use. So both curves
of every layer equal `moesim.policies.cache_replay` at every size, oversized prefills
included.

Over all layers together (global), Belady has one stack of all experts, whose untouched
parts are passed over; it too equals the replay at every size. LRU counts the later-used
experts instead (`reuse_distance`): equal to the replay in every cache that holds at
least the largest layer step, the sizes below being plain sequential LRU by (step, id).

Belady looks at least `BLOCK_ACCESSES` accesses ahead; later uses count as never.
Shorter traces are exact.

Source: Mattson, Gecsei, Slutz, Traiger (1970) for stack algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.layer_steps import join, layer_steps
from moesim.traces.stats.loops import later_used, rebuild_stacks

if TYPE_CHECKING:
    from collections.abc import Collection

    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

    # What a kernel carries from call to call: so many arrays.
    Arrays4 = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    Arrays5 = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]

CURVES = ("lru", "belady", "lru_global", "belady_global")
# Belady's least horizon in accesses.
BLOCK_ACCESSES = 1 << 22
# The place of a use that does not come: later than all others.
_NEVER = 1 << 40
# Depths of a stack that are passed over together where nothing in them changes.
_DEPTHS = 16
# Places of uses per key; when they are used up, those without a mark are removed.
_PLACES = 3
# Marks that have a common sum.
_MARKS = 64


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
        """Return hits at every size from 0 slots: int64 [..., size]; `phase` None adds
        both up.
        """
        depths = self._depths(name, phase)
        # A cache of d slots hits what stood above depth d; one of none hits nothing.
        hits = np.cumsum(depths[..., :-1], axis=-1)
        none = np.zeros((*hits.shape[:-1], 1), np.int64)
        return np.concatenate((none, hits), axis=-1)

    def accesses(self, name: str, phase: int | None = None) -> np.ndarray:
        """Return how many there were: int64 [...]."""
        return self._depths(name, phase).sum(axis=-1)

    def rates(self, name: str, phase: int | None = None) -> np.ndarray:
        """Return the hit rate over all layers at every size (per layer, or in all for
        global): float64 [size], nan without any access.
        """
        hits = self.hits(name, phase)
        by_size = hits.reshape(-1, hits.shape[-1]).sum(axis=0)
        total = self.accesses(name, phase).sum()
        with np.errstate(invalid="ignore"):
            return np.asarray(by_size / total)

    def _depths(self, name: str, phase: int | None) -> np.ndarray:
        depths: np.ndarray = getattr(self, name)
        chosen: np.ndarray = depths.sum(axis=0) if phase is None else depths[phase]
        return chosen


def curves(trace: Trace, *, batch: int = 1) -> Curves:
    """Return the hit-rate curves of a trace, in one pass over it.

    Raises:
        TraceError: `batch` below 1, or a damaged trace.
    """
    aggregator = CurveAggregator(trace.shape)
    for block in layer_steps(trace, batch=batch):
        aggregator.add(block)

    return aggregator.end()


class CurveAggregator:
    """Makes hit-rate curves block by block; memory is that of two Belady blocks,
    whatever the length of the trace.

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
        # Each curve costs a pass of its own, so those not wanted are left out.
        self._names = frozenset(names)

        self.curves = Curves(
            lru=np.zeros((2, layers, experts + 1), np.int64),
            belady=np.zeros((2, layers, experts + 1), np.int64),
            lru_global=np.zeros((2, keys + 1), np.int64),
            belady_global=np.zeros((2, keys + 1), np.int64),
        )

        # What the kernels carry from call to call, in the order of their arguments.
        self._lru = _stacks(pools=layers, width=experts)
        self._belady = _stacks(pools=layers, width=experts)
        self._belady_global = _stacks(pools=1, width=keys)
        self._lru_global = rows_of_marks(pools=1, width=keys)

        # Belady settles a block once it knows the first uses behind it.
        self._unsettled: LayerSteps | None = None
        self._pending: list[LayerSteps] = []
        self._pending_accesses = 0

    def add(self, block: LayerSteps) -> None:
        """Take the next block."""
        if "lru" in self._names:
            rebuild_stacks(
                block.phase,
                block.layer,
                block.edges,
                block.experts,
                self._latest_first(block),
                *self._lru,
                self.curves.lru,
            )
        if "lru_global" in self._names:
            later_used(
                block.phase,
                np.zeros(len(block.layer), np.int64),  # one pool
                block.edges,
                self._keys(block),
                *self._lru_global,
                self.curves.lru_global.reshape(2, 1, -1),
            )
        if self._names.isdisjoint(("belady", "belady_global")):
            return

        self._pending.append(block)
        self._pending_accesses += len(block.experts)
        if self._pending_accesses >= self._horizon:
            self._advance()

    def end(self) -> Curves:
        """Return the curves: nothing follows."""
        if self._pending:
            self._advance()
        if self._unsettled is not None:
            self._settle(self._unsettled, self._no_use())
            self._unsettled = None

        return self.curves

    def _advance(self) -> None:
        """Settle the block before the one that is complete now."""
        block = join(self._pending)
        self._pending = []
        self._pending_accesses = 0

        if self._unsettled is not None:
            first_use = self._no_use()
            self._next_places(block, first_use)
            self._settle(self._unsettled, first_use)
        self._unsettled = block

    def _settle(self, block: LayerSteps, first_use: np.ndarray) -> None:
        """Run Belady over one block, given the places of the first uses behind it."""
        following = self._next_places(block, first_use)

        if "belady" in self._names:
            rebuild_stacks(
                block.phase,
                block.layer,
                block.edges,
                block.experts,
                following,
                *self._belady,
                self.curves.belady,
            )
        if "belady_global" in self._names:
            rebuild_stacks(
                block.phase,
                np.zeros(len(block.layer), np.int64),  # one pool
                block.edges,
                self._keys(block),
                following,
                *self._belady_global,
                self.curves.belady_global.reshape(2, 1, -1),
            )

    def _latest_first(self, block: LayerSteps) -> np.ndarray:
        """int64 [A]: ranks of accesses, of which the later is the better."""
        place = block.step * self.layers + block.layer
        return np.repeat(_NEVER - place, np.diff(block.edges))

    def _no_use(self) -> np.ndarray:
        return np.full(self.layers * self.experts, _NEVER, np.int64)

    def _next_places(self, block: LayerSteps, first_use: np.ndarray) -> np.ndarray:
        """The place of each access's next use; `first_use` then says those of the
        block's own first uses.
        """
        place = block.step * self.layers + block.layer
        of_access = np.repeat(place, np.diff(block.edges))
        # Backwards: what was met last is what comes next.
        following = before(self._keys(block)[::-1], of_access[::-1], first_use)
        return np.ascontiguousarray(following[::-1])

    def _keys(self, block: LayerSteps) -> np.ndarray:
        """int32 [A]: accesses of all layers told apart."""
        # 32 bits hold any model, and halve what the kernels read.
        base = (block.layer * self.experts).astype(np.int32)
        return np.repeat(base, np.diff(block.edges)) + block.experts


def _stacks(pools: int, width: int) -> Arrays4:
    """Empty stacks of some pools of `width` keys, as `rebuild_stacks` carries them."""
    # Rounded up: the last block of depths may be part empty.
    blocks = -(-width // _DEPTHS)
    return (
        np.zeros((pools, blocks * _DEPTHS), np.int64),
        np.full((pools, width), -1, np.int32),
        np.zeros(pools, np.int64),
        np.zeros((pools, blocks), np.int64),
    )


def rows_of_marks(pools: int, width: int) -> Arrays5:
    """Empty rows of some pools of `width` keys, as `later_used` carries them."""
    blocks = _PLACES * width // _MARKS + 2
    return (
        np.zeros((pools, blocks * _MARKS), np.uint8),
        np.zeros((pools, blocks), np.int32),
        np.full((pools, width), -1, np.int64),
        np.zeros((pools, blocks * _MARKS), np.int32),
        np.zeros(pools, np.int64),
    )


def before(key: np.ndarray, place: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the place of each key's occurrence before.

    Args:
        key: int [A], in order.
        place: int64 [A].
        last: int64 by key, the places of occurrences before all these; afterwards those
            of the last ones.
    """
    # Sixteen bits are sorted in linear time, and hold the experts of nearly any model.
    order = np.argsort(key.astype(np.min_scalar_type(len(last))), kind="stable")
    keys = key[order]
    places = place[order]
    is_first = np.diff(keys, prepend=-1) != 0
    earlier = np.roll(places, 1)
    earlier[is_first] = last[keys[is_first]]
    is_last = np.roll(is_first, -1)
    last[keys[is_last]] = places[is_last]

    result = np.empty_like(earlier)
    result[order] = earlier
    return result
