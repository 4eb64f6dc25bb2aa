"""Residency: where every expert is. The only bookkeeper of bytes, slots and holds.

One `Residency` stands for one memory: a GPU's expert cache, or host memory in front of
the SSD. Beside the cache lies a small staging area for experts that get no place in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.names import ABSENT, IN_FLIGHT, RESIDENT
from moesim.policies.planner.lookups import count_holds, unheld

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.traces.format.schema import ModelShape


PER_LAYER = "layer"
GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How large an expert cache is, for one memory.

    Attributes:
        scope: ``layer`` (every layer has slots of its own) or ``global`` (one pool of
            bytes).
        slots: int64 [L] slots of each layer; for the global scope, one entry: how many
            of the largest experts fit.
        pool_bytes: int64 [L] or [1]: bytes of each pool.
    """

    scope: str
    slots: np.ndarray
    pool_bytes: np.ndarray

    @classmethod
    def of(
        cls,
        expert_bytes: tuple[int, ...],
        experts: int,
        *,
        scope: str = PER_LAYER,
        ratio: float | None = None,
        slots_per_layer: int | None = None,
        total_bytes: int | None = None,
        by_expert: Sequence[Sequence[int]] = (),
    ) -> CacheSize:
        """Size a cache by exactly one of a ratio of all experts, slots per layer, or
        bytes.

        A ratio is the same number of bytes in both scopes, less than one expert apart:
        slots that do not divide evenly are spread over the layers. Bytes with the
        per-layer scope follow FlashMoE eq. 1: the same number of slots in every layer,
        ``floor(total_bytes / bytes of one expert index across all layers)``.

        Where experts of one layer differ in size, `expert_bytes` are the layers' means
        and `by_expert` [L][E] the sizes. Pools have the bytes that they would have with
        experts of the mean size; slots count the largest.

        Raises:
            PolicyError: none or several of the three are given, or one is out of range.
        """
        given = sum(
            value is not None for value in (ratio, slots_per_layer, total_bytes)
        )
        if given != 1:
            raise PolicyError(
                "cache size: give exactly one of a ratio, slots per layer, or bytes"
            )
        if scope not in (PER_LAYER, GLOBAL):
            raise PolicyError(
                f"cache scope: expected 'layer' or 'global', got {scope!r}"
            )
        sizes = np.asarray(expert_bytes, dtype=np.int64)
        largest = np.array(
            [max(layer) for layer in by_expert] or expert_bytes, np.int64
        )
        all_bytes = sum(map(sum, by_expert)) or int(sizes.sum()) * experts
        slots: int | np.ndarray
        if ratio is not None:
            if not 0 <= ratio <= 1:
                raise PolicyError(f"cache ratio: expected 0 <= ratio <= 1, got {ratio}")
            slots = _spread(sizes, experts, ratio)
            pool = round(ratio * experts * float(sizes.sum()))
            if by_expert:
                pool = round(ratio * all_bytes)
        elif slots_per_layer is not None:
            if not 0 <= slots_per_layer <= experts:
                raise PolicyError(
                    f"slots per layer: expected 0 <= slots <= {experts}, got"
                    f" {slots_per_layer}"
                )
            slots = slots_per_layer
            pool = slots_per_layer * all_bytes // experts
        else:
            assert total_bytes is not None
            pool = max(0, total_bytes)
            slots = min(experts, pool * experts // all_bytes)
        if scope == GLOBAL:
            count = pool // int(largest.max())
            return cls(scope, np.array([count], np.int64), np.array([pool], np.int64))
        by_layer = np.broadcast_to(np.asarray(slots, np.int64), sizes.shape).copy()
        if not by_expert:
            return cls(scope, by_layer, by_layer * sizes)
        pools = _pools(by_layer, by_expert)
        return cls(scope, pools // largest, pools)

    @classmethod
    def for_model(
        cls,
        shape: ModelShape,
        *,
        scope: str = PER_LAYER,
        ratio: float | None = None,
        slots_per_layer: int | None = None,
        total_bytes: int | None = None,
    ) -> CacheSize:
        """Size a cache for the experts of one model; arguments as in `of`."""
        return cls.of(
            shape.expert_bytes,
            shape.experts,
            scope=scope,
            ratio=ratio,
            slots_per_layer=slots_per_layer,
            total_bytes=total_bytes,
            by_expert=shape.bytes_by_expert,
        )

    def held_in_part(self, shape: ModelShape) -> np.ndarray:
        """Bool [L]: layers that have slots for some of their experts; none in the
        global scope, whose slots are no layer's own.
        """
        if self.scope == GLOBAL:
            return np.zeros(shape.layers, np.bool_)
        return (self.slots > 0) & (self.slots < shape.experts)

    @property
    def total_bytes(self) -> int:
        """Bytes the cache may occupy."""
        return int(self.pool_bytes.sum())


def _pools(slots: np.ndarray, by_expert: Sequence[Sequence[int]]) -> np.ndarray:
    """Bytes of slots that are as large as the mean expert of their layer, int64 [L]."""
    # Not by the rounded mean, so that all slots of a layer hold exactly its experts.
    layers = zip(slots.tolist(), by_expert, strict=True)
    return np.array(
        [count * sum(sizes) // len(sizes) for count, sizes in layers], np.int64
    )


def _spread(sizes: np.ndarray, experts: int, ratio: float) -> np.ndarray:
    """Slots of each layer, int64 [L], that together hold `ratio` of all experts' bytes,
    less than the largest expert short.

    What is left over in one layer goes to the next: rounding every layer by itself
    would give 128 or 96 of 256 slots to a ratio of 120 / 256, and favour one scope.
    """
    # Bytes up to and including each layer, rounded so that 0.3 x 10 are three slots.
    budget = np.rint(ratio * experts * np.cumsum(sizes).astype(np.float64))
    slots = np.zeros(len(sizes), np.int64)
    used = 0
    for layer, size in enumerate(sizes.tolist()):
        slots[layer] = min(experts, (int(budget[layer]) - used) // size)
        used += int(slots[layer]) * size
    return slots


class Residency:
    """State of every expert in one memory.

    A place is taken when a copy starts: `enter` or `stage` puts an absent expert in
    flight, `land` makes it resident, `evict` and `drop_staged` make it absent again.

    Attributes:
        state: int8 [L, E], ABSENT, IN_FLIGHT or RESIDENT.
        holds: int16 [L, E], reasons why an expert must not be evicted: active in the
            current layer step, needed by a queued copy, staged.
        landing_s: float64 [L, E], when a copy in flight is expected.
        staged: bool [L, E], experts outside the cache.
        state_of, holds_of, landing_of_s, is_staged: the first four by flat key,
            for whoever asks for one expert at a time: a third of the time of an array.
        staged_total: how many of these there are.
        staged_count: the same by layer.
        expert_bytes: bytes of one expert by layer, of mean size where they differ.
        bytes_of: bytes of every expert, by flat key.
        equal_in_layers: whether all experts of a layer weigh the same.
        equal_sizes: whether all experts of a pool do.
        on_leave: called with the flat key of every expert that has left, if set.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        expert_bytes: tuple[int, ...],
        size: CacheSize,
        *,
        by_expert: Sequence[Sequence[int]] = (),
        states: np.ndarray | None = None,
    ) -> None:
        self.layers = layers
        self.experts = experts
        self.expert_bytes = expert_bytes
        sizes = by_expert or [(each,) * experts for each in expert_bytes]
        self.bytes_of = [nbytes for layer in sizes for nbytes in layer]
        self.size = size
        if states is None:
            states = np.full(layers * experts, ABSENT, np.int8)
        self.state = states.reshape(layers, experts)
        self.holds = np.zeros((layers, experts), np.int16)
        self.landing_s = np.zeros((layers, experts), np.float64)
        self.staged = np.zeros((layers, experts), np.bool_)
        self.state_of = self.state.reshape(-1).data
        self.holds_of = self.holds.reshape(-1).data
        self.landing_of_s = cast("memoryview[float]", self.landing_s.reshape(-1).data)
        self.is_staged = cast("memoryview[bool]", self.staged.reshape(-1).data)
        self.staged_total = 0
        self.staged_count = [0] * layers
        self.on_leave: Callable[[int], None] | None = None
        self.used_high_bytes = 0
        self._used_bytes = 0
        self._free_bytes: list[int] = size.pool_bytes.tolist()
        self._global = size.scope == GLOBAL
        self.equal_in_layers = not by_expert
        one_size = not self._global or len(set(expert_bytes)) == 1
        self.equal_sizes = self.equal_in_layers and one_size

    @classmethod
    def for_model(
        cls, shape: ModelShape, size: CacheSize, states: np.ndarray | None = None
    ) -> Residency:
        """Empty books for the experts of one model, in `states` int8 [L * E]."""
        return cls(
            shape.layers,
            shape.experts,
            shape.expert_bytes,
            size,
            by_expert=shape.bytes_by_expert,
            states=states,
        )

    def pool(self, layer: int) -> int:
        """Index of the pool that serves a layer."""
        return 0 if self._global else layer

    def free_bytes(self, layer: int) -> int:
        """Free bytes of the pool that serves this layer."""
        return self._free_bytes[0 if self._global else layer]

    def candidates(self, layer: int) -> np.ndarray:
        """Flat keys, ascending, of unheld residents of this layer's pool."""
        first = layer
        end = layer + 1
        if self._global:
            first = 0
            end = self.layers
        keys = np.empty((end - first) * self.experts, np.int64)
        return keys[: unheld(self.state, self.holds, first, end, keys)]

    def fill(self, keys: np.ndarray) -> None:
        """Make absent experts resident before the run starts, without a copy."""
        for key in keys.tolist():
            self._take(key)
        self.state.reshape(-1)[keys] = RESIDENT

    def enter(self, layer: int, expert: int, landing_s: float) -> None:
        """Give an absent expert its place in the cache; its copy starts now."""
        key = layer * self.experts + expert
        assert self.state_of[key] == ABSENT, "a copy of what is there already"
        self.state_of[key] = IN_FLIGHT
        self.landing_of_s[key] = landing_s
        self._take(key)

    def stage(self, layer: int, expert: int, landing_s: float) -> None:
        """Give an absent expert a staging slot; its copy starts now.

        It is held until `drop_staged`.
        """
        key = layer * self.experts + expert
        assert self.state_of[key] == ABSENT, "a copy of what is there already"
        self.state_of[key] = IN_FLIGHT
        self.is_staged[key] = True
        self.holds_of[key] += 1
        self.landing_of_s[key] = landing_s
        self.staged_total += 1
        self.staged_count[layer] += 1

    def land(self, layer: int, expert: int) -> None:
        """Complete the copy in flight."""
        key = layer * self.experts + expert
        assert self.state_of[key] == IN_FLIGHT, "landed without a copy in flight"
        self.state_of[key] = RESIDENT

    def evict(self, key: int) -> None:
        """Free the place of an unheld resident."""
        assert self.state_of[key] == RESIDENT, "an absent expert was evicted"
        assert self.holds_of[key] == 0, "a held expert was evicted"
        self.state_of[key] = ABSENT
        nbytes = self.bytes_of[key]
        self._free_bytes[0 if self._global else key // self.experts] += nbytes
        self._used_bytes -= nbytes
        if self.on_leave is not None:
            self.on_leave(key)

    def drop_staged(self, layer: int, expert: int) -> None:
        """Forget a staged expert that has landed and is needed no more."""
        key = layer * self.experts + expert
        assert self.is_staged[key], "an expert of the cache was dropped"
        assert self.state_of[key] == RESIDENT, "dropped before it landed"
        self.is_staged[key] = False
        self.holds_of[key] -= 1
        self.state_of[key] = ABSENT
        self.staged_total -= 1
        self.staged_count[layer] -= 1
        if self.on_leave is not None:
            self.on_leave(key)

    def staged_of(self, layer: int) -> list[int]:
        """This layer's experts outside the cache, ascending."""
        return np.flatnonzero(self.staged[layer]).tolist()

    def hold(self, layer: int, experts: np.ndarray) -> None:
        """Protect experts from eviction."""
        count_holds(self.holds, layer, experts.astype(np.int32, copy=False), 1)

    def release(self, layer: int, experts: np.ndarray) -> None:
        """End the protection of one `hold`."""
        count_holds(self.holds, layer, experts.astype(np.int32, copy=False), -1)

    def _take(self, key: int) -> None:
        pool = 0 if self._global else key // self.experts
        nbytes = self.bytes_of[key]
        free = self._free_bytes[pool] - nbytes
        assert free >= 0, "more was placed than fits"
        self._free_bytes[pool] = free
        used = self._used_bytes + nbytes
        self._used_bytes = used
        if used > self.used_high_bytes:  # noqa: PLR1730 - `max` takes as long as the rest
            self.used_high_bytes = used
