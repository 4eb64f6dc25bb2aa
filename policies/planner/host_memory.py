"""Host memory in front of the SSD: what must be read before it can be copied or used.

Every copy to a GPU passes through it and every CPU expert is computed from it. What the
host cache policy declines lies in staging until its last user is done.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from moesim.policies.names import ABSENT, CPU, RESIDENT
from moesim.policies.planner.lookups import look_up

if TYPE_CHECKING:
    from moesim.policies.planner.memory_level import MemoryLevel, Place
    from moesim.policies.planner.records import LayerWork


class HostMemory:
    """The books of limited host memory: who needs which expert, and reads expected.

    Attributes:
        level: the memory and its cache policy.
        memory: its books.

    Args:
        read_s: float64 [L, E], seconds to read each expert.
    """

    def __init__(self, level: MemoryLevel, read_s: np.ndarray) -> None:
        self.level = level
        self.memory = level.memory
        self._read_s = read_s
        self._read_of_s = cast("memoryview[float]", read_s.reshape(-1).data)
        self._busy_until_s = 0.0  # when the read under way is expected to end

    def read_s(self, layer: int, expert: int) -> float:
        """Seconds to read one expert."""
        return float(self._read_s[layer, expert])

    def wait_s(self, layer: int, experts: np.ndarray, now_s: float) -> np.ndarray:
        """Seconds until each expert is in host memory, float64 [A].

        What is absent could be read next, after the read under way.
        """
        memory = self.memory
        states = np.empty(len(experts), np.int8)
        wait_s = np.empty(len(experts))
        begins_s = max(0.0, self._busy_until_s - now_s)
        first = layer * memory.experts
        look_up(
            memory.state,
            memory.landing_s,
            layer,
            experts,
            now_s,
            begins_s + self._read_of_s[first],
            states,
            wait_s,
        )
        if not memory.equal_in_layers:
            absent = states == ABSENT
            wait_s[absent] = begins_s + self._read_s[layer, experts[absent]]
        return wait_s

    def accessed(self, work: LayerWork, lanes: np.ndarray) -> None:
        """Tell the host cache what the GPUs lack or the CPU computes.

        Only that is asked of it.
        """
        asked = (work.state == ABSENT) | (lanes == CPU)
        if not asked.any():
            return
        experts = work.experts[asked]
        part = replace(
            work,
            experts=experts,
            tokens=work.tokens[asked],
            state=self.memory.state[work.layer][experts],
            cpu_s=work.cpu_s[asked],
            host_s=work.host_s[asked],
            gpu_s=np.ascontiguousarray(work.gpu_s[:, asked]),
            arrive_s=np.ascontiguousarray(work.arrive_s[:, asked]),
        )
        self.level.accessed(part)

    def need(self, layer: int, keys: np.ndarray) -> list[bool]:
        """Hold experts of one layer for a queued copy each.

        Returns:
            For each key, whether it is neither there nor on its way: it must be read.
        """
        state_of = self.memory.state_of
        unread = [
            state_of[key] == ABSENT and not self.level.is_wished(key)
            for key in keys.tolist()
        ]
        self.memory.hold(layer, keys - layer * self.memory.experts)
        return unread

    def demand(self, work: LayerWork, layer: int, keys: np.ndarray) -> None:
        """Wish for reads that a layer step waits for."""
        if len(keys):
            self.level.demand(work, layer, keys)

    def promote(self, key: int) -> None:
        """Note that a layer step waits for an expert, whose read may be queued."""
        if self.level.is_wished(key):
            self.level.promote(key)

    def start_read(self, key: int, now_s: float) -> Place | None:
        """Take a place for a read that starts now; None if there is none."""
        landing_s = now_s + self._read_of_s[key]
        place = self.level.start(key, landing_s)
        if place is not None:
            self._busy_until_s = landing_s
        return place

    def land(self, layer: int, expert: int) -> bool:
        """Complete a read.

        Returns:
            Whether a staging slot is free again, as nobody needs the expert any more.
        """
        self.memory.land(layer, expert)
        return self._drop_if_unneeded(layer, expert)

    def unneed(self, layer: int, expert: int) -> bool:
        """End the need of one copy or product.

        Returns:
            Whether a staging slot is free again, or kept by copies that yield to a
            read that is awaited.
        """
        key = layer * self.memory.experts + expert
        was_staged = self.memory.is_staged[key]
        self.memory.holds_of[key] -= 1
        self._drop_if_unneeded(layer, expert)
        return was_staged

    def release(self, layer: int, experts: np.ndarray) -> None:
        """End the holds of a layer step, and forget what was staged for it alone."""
        memory = self.memory
        memory.release(layer, experts)
        if memory.staged_count[layer]:
            for expert in memory.staged_of(layer):
                self._drop_if_unneeded(layer, expert)

    def computed(self, layer: int, expert: int) -> bool:
        """Note that an active expert's product on the CPU has ended.

        Returns:
            Whether a staging slot is free again, or kept by copies that yield to a
            read that is awaited.
        """
        if not self.level.used[layer, expert]:
            return False
        self.level.used[layer, expert] = False
        return self.unneed(layer, expert)

    def complete(self, layer: int) -> None:
        """End the holds of a layer step that `computed` has not ended."""
        used = self.level.used[layer]
        self.release(layer, np.flatnonzero(used))
        used[:] = False

    def _drop_if_unneeded(self, layer: int, expert: int) -> bool:
        memory = self.memory
        key = layer * memory.experts + expert
        if not memory.is_staged[key]:
            return False
        # Staging itself is one hold.
        needed = memory.holds_of[key] > 1
        if needed or memory.state_of[key] != RESIDENT:
            return False
        memory.drop_staged(layer, expert)
        return True
