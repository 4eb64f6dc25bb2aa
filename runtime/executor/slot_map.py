"""Which slot holds which expert: the planner's books, with addresses.

The planner says *that* an expert is resident (`policies/planner/residency.py`); here
stands *where*. Cached experts get their slot when their copy is queued, staged ones
when it starts, behind a gate that counts staging slots. Slots of experts that have left
are found by comparing with the planner's books, at moments when no decision is under
way.

All methods that change something are called with the lanes' lock held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.base import ABSENT, RESIDENT
from moesim.policies.planner.residency import GLOBAL
from moesim.runtime.store.memory import HostSlots

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from moesim.policies.planner.residency import CacheSize, Residency
    from moesim.runtime.executor.lanes import Operation
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
        staging: staging slots.

    Attributes:
        free_staging: how many staged experts may still be given a slot.
    """

    def __init__(
        self, slots: Slots, memory: Residency, store: ExpertStore, staging: int
    ) -> None:
        self.slots = slots
        self.free_staging = staging
        self._experts = memory.experts
        self._state = memory.state.reshape(-1)
        self._slot_of = np.full(len(self._state), -1, np.int32)
        self._staged: set[int] = set()
        self._layouts = [store.layout(layer) for layer in range(store.layers)]

    def record(self, key: int) -> torch.Tensor:
        """Return the bytes of an expert's slot."""
        return self.slots.record(int(self._slot_of[key]))

    def weights(self, key: int) -> ExpertWeights:
        """Look at an expert's slot as weights."""
        return self.slots.weights(
            int(self._slot_of[key]), self._layouts[key // self._experts]
        )

    def slot(self, key: int) -> int:
        """Return the slot of an expert that has one."""
        return int(self._slot_of[key])

    def residents(self) -> list[int]:
        """Keys that the planner holds resident: what fills the cache before the run."""
        return np.flatnonzero(self._state == RESIDENT).tolist()

    def assign(self, keys: list[int]) -> None:
        """Give newly placed experts slots, after those that have left gave theirs
        back.
        """
        for key in np.flatnonzero(
            (self._slot_of >= 0) & (self._state == ABSENT)
        ).tolist():
            if key not in self._staged:
                self.release(key)
        for key in keys:
            self._slot_of[key] = self.slots.take()

    def admit(self, operation: Operation) -> bool:
        """Give a staged expert a slot, if one of the staging slots is free (a lane's
        gate).
        """
        if self.free_staging < 1:
            return False
        key = operation.layer * self._experts + operation.expert
        self.free_staging -= 1
        self._staged.add(key)
        self._slot_of[key] = self.slots.take()
        return True

    def forget(self, key: int) -> None:
        """Take the slot back that an expert still has from an earlier stay: it had left
        and comes again.
        """
        if self._slot_of[key] >= 0:
            self.release(key)

    def release(self, key: int) -> None:
        """Take an expert's slot back."""
        self.slots.give_back(int(self._slot_of[key]))
        self._slot_of[key] = -1
        if key in self._staged:
            self._staged.remove(key)
            self.free_staging += 1


class HostSlotMap:
    """Host memory in front of the SSD: everything, or a limited part of it.

    With everything in host memory, experts that share a record of the store share its
    slot. With a limited part, what was staged is kept while anybody needs it: every
    copy from it and every product with it counts as a user. Between a look at what has
    landed and the end of the decisions that follow (`freeze`, `thaw`) nothing is given
    back, since the planner may just now count on it.

    Args:
        store: where experts come from.
        memory: the planner's books of host memory, None where everything is held.
        size: its size, None where everything is held.
        staging: staging slots beside it.
        expert_bytes: per layer.
        page_lock: keep pages in place, for CUDA copies.
    """

    def __init__(
        self,
        store: ExpertStore,
        memory: Residency | None,
        size: CacheSize | None,
        staging: int,
        expert_bytes: tuple[int, ...],
        *,
        page_lock: bool,
    ) -> None:
        self._store = store
        self._experts = store.experts(0)
        self.freed: Callable[[], None] = lambda: None
        self._slots: SlotMap | None = None
        if memory is None or size is None:
            self.tier = HostSlots(
                len(store.index.offsets), store.slot_bytes, page_lock=page_lock
            )
            self._record_of = [record for row in store.index.records for record in row]
            self._layouts = [store.layout(layer) for layer in range(store.layers)]
        else:
            self.tier = HostSlots(
                cache_slots(size, expert_bytes) + staging,
                store.slot_bytes,
                page_lock=page_lock,
            )
            self._slots = SlotMap(self.tier, memory, store, staging)
            self._users = [0] * memory.state.size
        self._frozen = False
        self._idle: set[int] = set()

    @property
    def gate(self) -> SlotMap | None:
        """What staged reads pass; None where nothing is ever read."""
        return self._slots

    def load(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Read what is resident from the start: everything, or what the host cache's
        policy chose.

        Returns:
            Bytes read.
        """
        read = 0
        if self._slots is None:
            todo = {
                record: divmod(key, self._experts)
                for key, record in enumerate(self._record_of)
            }
            for done, (record, (layer, expert)) in enumerate(todo.items()):
                read += self._store.read_into(layer, expert, self.tier.record(record))
                if progress is not None:
                    progress(done + 1, len(todo))
            return read
        keys = self._slots.residents()
        self._slots.assign(keys)
        for key in keys:
            read += self._store.read_into(
                *divmod(key, self._experts), self._slots.record(key)
            )
        return read

    def record(self, key: int) -> torch.Tensor:
        """Return the bytes of an expert in host memory."""
        if self._slots is None:
            return self.tier.record(self._record_of[key])
        return self._slots.record(key)

    def weights(self, key: int) -> ExpertWeights:
        """Look at an expert in host memory as weights."""
        if self._slots is None:
            return self.tier.weights(
                self._record_of[key], self._layouts[key // self._experts]
            )
        return self._slots.weights(key)

    def expect(self, key: int, *, staged: bool) -> None:
        """Prepare for a read: a slot for what enters the cache; what is staged gets one
        when its read starts.
        """
        assert self._slots is not None
        self.forget(key)
        if not staged:
            self._slots.assign([key])

    def forget(self, key: int) -> None:
        """Take back the slot of an expert that had left and is to be read again."""
        assert self._slots is not None
        if key in self._idle:
            self._idle.remove(key)
            self._release(key)
        self._slots.forget(key)

    def use(self, key: int) -> None:
        """Count one who will need an expert in host memory."""
        if self._slots is not None:
            self._users[key] += 1

    def unuse(self, key: int) -> None:
        """Count one less; what was staged and is needed by nobody gives its slot
        back.
        """
        if self._slots is None:
            return
        self._users[key] -= 1
        if not self._users[key] and key in self._slots._staged:  # noqa: SLF001 - two halves of one thing
            if self._frozen:
                self._idle.add(key)
            else:
                self._release(key)

    def freeze(self) -> None:
        """Keep everything where it is while the planner decides."""
        self._frozen = True

    def thaw(self) -> None:
        """Give back what nobody came to need meanwhile."""
        self._frozen = False
        while self._idle:
            key = self._idle.pop()
            if not self._users[key]:
                self._release(key)

    def _release(self, key: int) -> None:
        assert self._slots is not None
        self._slots.release(key)
        self.freed()

    def close(self) -> None:
        """Let go of the memory."""
        self.tier.close()
