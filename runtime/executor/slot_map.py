"""Which slot holds which expert: the planner's books, with addresses.

The planner says *that* an expert is in a memory (`moesim.policies.planner.residency`);
here stands *where*. A slot is taken when a copy or a read starts, and given back the
moment the planner lets the expert go. All changes are made with the lanes' lock held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import RESIDENT
from moesim.policies.planner.residency import GLOBAL
from moesim.runtime.store.memory import HostSlots

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from moesim.policies.planner.residency import CacheSize, Residency
    from moesim.runtime.accelerators.accelerator import Accelerator
    from moesim.runtime.models.expert_layout import ExpertWeights
    from moesim.runtime.store.memory import Slots
    from moesim.runtime.store.store import ExpertStore


def cache_slots(size: CacheSize, expert_bytes: tuple[int, ...]) -> int:
    """Most experts that a memory of this size may hold at once, staging not counted."""
    if size.scope == GLOBAL:
        return int(size.pool_bytes[0]) // min(expert_bytes)
    return int(size.slots.sum())


class SlotMap:
    """Slots of one memory, by expert key ``layer * E + expert``.

    Args:
        slots: the memory; cache and staging together.
        memory: the planner's books of it.
        store: knows the experts' layouts.
    """

    def __init__(self, slots: Slots, memory: Residency, store: ExpertStore) -> None:
        self.slots = slots
        self._experts = memory.experts
        self._state = memory.state.reshape(-1)
        self._slot_of = np.full(len(self._state), -1, np.int32)
        self._layouts = [store.layout(layer) for layer in range(store.layers)]
        memory.on_leave = self.release

    def record(self, key: int) -> torch.Tensor:
        """Return the bytes of an expert's slot."""
        return self.slots.record(int(self._slot_of[key]))

    def weights(self, key: int) -> ExpertWeights:
        """Look at an expert's slot as weights."""
        layout = self._layouts[key // self._experts]
        return self.slots.weights(int(self._slot_of[key]), layout)

    def slot(self, key: int) -> int:
        """Return the slot of an expert that has one."""
        return int(self._slot_of[key])

    def residents(self) -> list[int]:
        """Keys that the planner holds resident: what fills the cache before the run."""
        return np.flatnonzero(self._state == RESIDENT).tolist()

    def take(self, key: int) -> None:
        """Give an expert a slot: its copy starts."""
        assert self._slot_of[key] < 0, "an expert has two slots"
        self._slot_of[key] = self.slots.take()

    def release(self, key: int) -> None:
        """Take an expert's slot back: the planner has let it go."""
        self.slots.give_back(int(self._slot_of[key]))
        self._slot_of[key] = -1


class HostSlotMap:
    """Host memory in front of the SSD: everything, or a limited part of it.

    With everything in host memory, experts that share a record of the store share its
    slot.

    Args:
        store: where experts come from.
        memory: the planner's books of host memory, None where everything is held.
        size: its size, None where everything is held.
        staging: staging slots beside it.
        expert_bytes: per layer.
        page_lock: for whom pages are kept in place, None for nobody.

    Attributes:
        tier: the memory itself.
        limited: slots by expert, None where everything is held.
    """

    def __init__(
        self,
        store: ExpertStore,
        memory: Residency | None,
        size: CacheSize | None,
        staging: int,
        expert_bytes: tuple[int, ...],
        *,
        page_lock: Accelerator | None,
    ) -> None:
        self._store = store
        self._experts = store.experts(0)
        self.limited: SlotMap | None = None
        if memory is None or size is None:
            count = len(store.index.offsets)
            self.tier = HostSlots(count, store.slot_bytes, page_lock=page_lock)
            self._record_of = [record for row in store.index.records for record in row]
            self._layouts = [store.layout(layer) for layer in range(store.layers)]
        else:
            count = cache_slots(size, expert_bytes) + staging
            self.tier = HostSlots(count, store.slot_bytes, page_lock=page_lock)
            self.limited = SlotMap(self.tier, memory, store)

    def load(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Read what is resident from the start: everything, or what the host cache's
        policy chose.

        Returns:
            Bytes read.
        """
        read = 0
        if self.limited is None:
            wanted = {
                record: divmod(key, self._experts)
                for key, record in enumerate(self._record_of)
            }
            for done, (record, (layer, expert)) in enumerate(wanted.items()):
                read += self._store.read_into(layer, expert, self.tier.record(record))
                if progress is not None:
                    progress(done + 1, len(wanted))
            return read
        for key in self.limited.residents():
            self.limited.take(key)
            layer, expert = divmod(key, self._experts)
            read += self._store.read_into(layer, expert, self.limited.record(key))
        return read

    def record(self, key: int) -> torch.Tensor:
        """Return the bytes of an expert in host memory."""
        if self.limited is None:
            return self.tier.record(self._record_of[key])
        return self.limited.record(key)

    def weights(self, key: int) -> ExpertWeights:
        """Look at an expert in host memory as weights."""
        if self.limited is None:
            layout = self._layouts[key // self._experts]
            return self.tier.weights(self._record_of[key], layout)
        return self.limited.weights(key)

    def take(self, key: int) -> None:
        """Give an expert a slot: its read starts."""
        assert self.limited is not None, "nothing is read where everything is held"
        self.limited.take(key)

    def close(self) -> None:
        """Let go of the memory."""
        self.tier.close()
