"""Limited host memory in front of an SSD: what must be read before it can be copied to
a GPU or computed on the CPU.

Every queued copy holds its expert in host memory until it has landed, and every product
on the CPU until it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.base import Work
from moesim.policies.names import ABSENT, RESIDENT

if TYPE_CHECKING:
    from moesim.engine.memory import Memory
    from moesim.policies.arrays import Ints


class Host:
    """Books of host memory.

    Attributes:
        memory: places, holds and the host cache.
        cpu_reads: uint8 by flat key, the layer step under way reads it for the CPU.
        reads: int64, flat keys that `need` has wished to read; `unread`: how many.
    """

    def __init__(self, memory: Memory, rows: int) -> None:
        keys = len(memory.state)
        experts = memory.experts
        self.memory = memory
        self.cpu_reads: Ints = zeros(keys, np.uint8)
        self.held_ahead: Ints = zeros(keys, np.uint8)
        self.reads: Ints = zeros(keys, np.int64)
        self.unread = 0
        # Its cache is told of some active experts only.
        self._part = Work(rows, experts)
        self._experts = np.zeros(experts, np.int32)
        self._tokens = np.zeros(experts, np.int32)
        self.experts_told: Ints = self._experts.data
        self.tokens_told: Ints = self._tokens.data
        arrays = self._part.show_new(rows, experts)
        self._state = arrays["state"].data
        self._cpu_s = arrays["cpu_s"].data
        self._host_s = arrays["host_s"].data
        self._gpu_s = arrays["gpu_s"].data
        self._arrive_s = arrays["arrive_s"].data
        self._link_s = arrays["link_s"].data
        self._gpu_state = arrays["gpu_state"].data

    def holds_expert(self, key: int) -> bool:
        """Whether an expert can be copied to a GPU without a read."""
        return self.memory.state[key] == RESIDENT

    def wait_s(self, key: int, now_s: float) -> float:
        """Seconds until an expert is in host memory.

        What is absent could be read next, after the read under way.
        """
        memory = self.memory
        if memory.state[key] == RESIDENT:
            return 0.0
        if memory.state[key] == ABSENT:
            link = memory.link
            return link.left_s(now_s) + link.copy_s[key]
        return max(0.0, memory.landing_s[key] - now_s)

    def note_accesses(self, work: Work, lanes: Ints) -> None:
        """Hold every active expert, and tell the host cache what the GPUs lack or the
        CPU computes: only that is asked of it.
        """
        memory = self.memory
        part = self._part
        asked = 0
        for i in range(work.active):
            key = work.first + work.experts[i]
            memory.holds[key] += 1
            if lanes[i] == 0:
                memory.used[key] = 1
            elif work.state[i] != ABSENT:
                continue
            self.experts_told[asked] = work.experts[i]
            self.tokens_told[asked] = work.tokens[i]
            self._state[asked] = memory.state[key]
            self._cpu_s[asked] = work.cpu_s[i]
            self._host_s[asked] = work.host_s[i]
            for row in range(work.gpus):
                self._gpu_s[row, asked] = work.gpu_s[row, i]
                self._arrive_s[row, asked] = work.arrive_s[row, i]
                self._gpu_state[row, asked] = memory.state[key]
            asked += 1
        if not asked:
            return
        for row in range(work.gpus):
            self._link_s[row] = work.link_s[row]
        part.step = work.step
        part.layer = work.layer
        part.phase = work.phase
        part.batch = work.batch
        part.rows = work.rows
        part.first = work.first
        part.active = asked
        part.scores = work.scores
        part.first_scores = work.first_scores
        part.experts = self.experts_told[:asked]
        part.tokens = self.tokens_told[:asked]
        memory.cache.accessed(part)

    # -- wishes -----------------------------------------------------------------------

    def promote(self, key: int) -> None:
        """Note that a layer step waits for an expert, whose read may be queued."""
        if self.memory.wished[key]:
            self.memory.demanded[key] = 1

    def need(self, work: Work, keys: Ints, demanded: bool) -> None:
        """Hold experts of one layer for a queued copy each, and wish for missing reads:
        `reads`, so many as `unread` says.
        """
        memory = self.memory
        count = 0
        for n in range(len(keys)):
            key = keys[n]
            # A read that is queued already serves this copy, too.
            if memory.state[key] == ABSENT and not memory.wished[key]:
                self.reads[count] = key
                count += 1
            memory.holds[key] += 1
        self.unread = count
        if demanded:
            for n in range(len(keys)):
                self.promote(keys[n])
            if count:
                memory.demand(work, self.reads[:count])
        else:
            for n in range(count):
                memory.prefetch(work, self.reads[n])

    def release_gpu_experts(self, work: Work, lanes: Ints) -> None:
        """End the layer step's holds of what GPUs compute.

        Until a copy has landed it holds its expert itself.
        """
        for i in range(work.active):
            if lanes[i] != 0:
                self.memory.holds[work.first + work.experts[i]] -= 1

    # -- ends -------------------------------------------------------------------------

    def _drop_if_unneeded(self, key: int) -> bool:
        memory = self.memory
        # Staging itself is one hold.
        if not memory.staged[key] or memory.holds[key] > 1:
            return False
        if memory.state[key] != RESIDENT:
            return False
        memory.drop_staged(key)
        return True

    def land(self, key: int) -> bool:
        """Complete a read; whether a staging slot is free again."""
        self.memory.state[key] = RESIDENT
        return self._drop_if_unneeded(key)

    def unneed(self, key: int) -> bool:
        """End the need of one copy or product.

        Returns:
            Whether a staging slot is free again, or kept by copies that yield to a read
            that is awaited.
        """
        was_staged = self.memory.staged[key] != 0
        self.memory.holds[key] -= 1
        self._drop_if_unneeded(key)
        return was_staged

    def computed(self, key: int) -> bool:
        """Note that a product on the CPU has ended; the result is `unneed`'s."""
        if not self.memory.used[key]:
            return False
        self.memory.used[key] = 0
        return self.unneed(key)

    def complete(self, first: int) -> None:
        """End the holds of a layer step that `computed` has not ended."""
        memory = self.memory
        for key in range(first, first + memory.experts):
            self.cpu_reads[key] = 0
            if self.held_ahead[key]:
                self.held_ahead[key] = 0
                memory.holds[key] -= 1
            if memory.used[key]:
                memory.used[key] = 0
                memory.holds[key] -= 1
        if memory.staged_of[first // memory.experts]:
            for key in range(first, first + memory.experts):
                self._drop_if_unneeded(key)
