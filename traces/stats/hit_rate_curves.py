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
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.layer_steps import joined
from moesim.traces.stats.loops import later_used, rebuild_stacks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.traces.format.batch import LayerSteps
    from moesim.traces.format.schema import ModelShape

    Marks = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]

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
        depths: by name of the curve. ``lru``: int64 [P, L, E + 1], accesses that hit
            per-layer caches of more than d slots, by d; E: never before seen.
            ``belady``: the same for Belady. ``lru_global``, ``belady_global``: [P, L *
            E + 1], for one cache shared by all layers.
    """

    depths: dict[str, np.ndarray]

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
        depths = self.depths[name]
        chosen: np.ndarray = depths.sum(axis=0) if phase is None else depths[phase]
        return chosen


def curves(  # noqa: C901 - one pass
    blocks: Iterable[LayerSteps],
    shape: ModelShape,
    names: Iterable[str] = CURVES,
    horizon: int = BLOCK_ACCESSES,
) -> Curves:
    """Return the hit-rate curves of a trace, in one pass over it; memory is that of two
    Belady blocks, whatever its length.

    Args:
        blocks: the layer steps of the trace.
        shape: the model.
        names: which of `CURVES` to make; each costs a pass of its own.
        horizon: the accesses that Belady sees ahead, at least.
    """
    layers = shape.layers
    experts = shape.experts
    keys = layers * experts
    depths = {}
    carried: dict[str, Any] = {}
    for name in names:
        pools, width = (1, keys) if name.endswith("_global") else (layers, experts)
        depths[name] = np.zeros((2, pools, width + 1), np.int64)
        empty = rows_of_marks if name == "lru_global" else _stacks
        carried[name] = empty(pools, width)

    def keys_of(block: LayerSteps) -> np.ndarray:
        """int32 [A]: accesses of all layers told apart."""
        # 32 bits hold any model, and halve what the kernels read.
        base = (block.layer * experts).astype(np.int32)
        return np.repeat(base, np.diff(block.edges)) + block.experts

    def places_of(block: LayerSteps) -> np.ndarray:
        """int64 [A]: where each access stands among all layer steps of the trace."""
        return np.repeat(block.step * layers + block.layer, np.diff(block.edges))

    def next_places(block: LayerSteps, first_use: np.ndarray) -> np.ndarray:
        """int64 [A]: of each access's next use; `first_use` then says those of the
        block's own first uses.
        """
        # Backwards: what was met last is what comes next.
        following = before(keys_of(block)[::-1], places_of(block)[::-1], first_use)
        return np.ascontiguousarray(following[::-1])

    looks_ahead = {name for name in depths if name.startswith("belady")}

    # Belady settles a block once it knows the first uses behind it.
    for block, later in pairwise(chain(joined(blocks, horizon), [None])):
        assert block is not None
        rank = {"lru": _NEVER - places_of(block)}
        if looks_ahead:
            first_use = np.full(keys, _NEVER, np.int64)
            if later is not None:
                next_places(later, first_use)
            rank |= dict.fromkeys(looks_ahead, next_places(block, first_use))

        for name, counts in depths.items():
            pool, accesses = block.layer, block.experts
            if name.endswith("_global"):
                pool, accesses = np.zeros_like(block.layer), keys_of(block)
            steps: Any = (block.phase, pool, block.edges, accesses)
            if name in rank:
                rebuild_stacks(*(*steps, rank[name], *carried[name], counts))
            else:
                later_used(*(*steps, *carried[name], counts))

    return Curves(
        {
            name: counts[:, 0] if name.endswith("_global") else counts
            for name, counts in depths.items()
        }
    )


def _stacks(pools: int, width: int) -> Any:
    """Empty stacks of some pools of `width` keys, as `rebuild_stacks` carries them."""
    # Rounded up: the last block of depths may be part empty.
    blocks = -(-width // _DEPTHS)
    return (
        np.zeros((pools, blocks * _DEPTHS), np.int64),
        np.full((pools, width), -1, np.int32),
        np.zeros(pools, np.int64),
        np.zeros((pools, blocks), np.int64),
    )


def rows_of_marks(pools: int, width: int) -> Marks:
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
