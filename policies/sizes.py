"""How much memory experts may use, and which of them fit into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import PolicyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.format.schema import ModelShape

LAYERS = "layers"
EXPERTS = "experts"
"""Readings of several GPUs: each layer lives on one of them, or each layer's experts on
all.
"""

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


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How much of each memory experts may use.

    Attributes:
        gpu: cache size of each GPU.
        host: host memory in front of the SSD; None if it holds every expert.
        staging: staging slots beside each GPU cache (and beside host memory when that
            is limited).
        prefetch_budget_bytes: most bytes prefetched per layer step; None for no limit.
        gpu_split: with several GPUs, ``layers`` or ``experts``.
        unified: GPU and CPU compute from one memory, which holds every expert from the
            start.
    """

    gpu: CacheSize
    host: CacheSize | None = None
    staging: int = 2
    prefetch_budget_bytes: int | None = None
    gpu_split: str = LAYERS
    unified: bool = False


def fitting(
    rank: np.ndarray,
    capacity_slots: np.ndarray,
    scope: str,
    served: np.ndarray | None = None,
    *,
    pool_bytes: np.ndarray | None = None,
    shape: ModelShape | None = None,
) -> np.ndarray:
    """Flat keys, int64 ascending, of the most wanted experts that fit.

    Args:
        rank: float64 [L, E], lowest for the most wanted; ties go to the lower key.
        capacity_slots: slots of each layer, or one entry for the global scope, which
            ranks the whole model at once.
        scope: ``layer`` or ``global``.
        served: bool [L], layers that may be there; None for all.
        pool_bytes: bytes of each pool, with which a pool of unequal experts is filled
            to less than one expert; None counts slots.
        shape: the model, whose experts have sizes, if `pool_bytes` are given.
    """
    layers, experts = rank.shape
    here = np.ones(layers, np.bool_) if served is None else served
    if scope == GLOBAL:
        order = np.argsort(rank, axis=None, kind="stable")
        order = order[here[order // experts]]
        if pool_bytes is None or shape is None:
            return np.sort(order[: int(capacity_slots[0])])
        sizes = np.array(shape.sizes_by_expert(), np.int64).reshape(-1)[order]
        return np.sort(order[first_fit(sizes, int(pool_bytes[0]))])
    by_layer = np.argsort(rank, axis=1, kind="stable")
    if shape is not None and shape.bytes_by_expert and pool_bytes is not None:
        taken = np.zeros(rank.shape, np.bool_)
        for layer in np.flatnonzero(here).tolist():
            order = by_layer[layer]
            sizes = np.array(shape.bytes_by_expert[layer], np.int64)[order]
            taken[layer, order] = first_fit(sizes, int(pool_bytes[layer]))
        return np.flatnonzero(taken)
    slots = np.where(here, capacity_slots, 0).tolist()
    filled = [
        layer * experts + by_layer[layer, : slots[layer]] for layer in range(layers)
    ]
    return np.sort(np.concatenate(filled)).astype(np.int64)


def first_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Bool [N]: which of `sizes`, int64 [N], are taken if each that still fits is."""
    taken = np.zeros(len(sizes), np.bool_)
    start = 0
    # One round per size that does not fit: all of it is skipped, so rounds are few.
    while start < len(sizes):
        filled = np.cumsum(sizes[start:])
        count = int(np.searchsorted(filled, room, side="right"))
        taken[start : start + count] = True
        if count:
            room -= int(filled[count - 1])
        start += count
        smaller = np.flatnonzero(sizes[start:] <= room)
        if not len(smaller):
            break
        start += int(smaller[0])
    return taken
