"""Host memory in front of the SSD: what must be read before it can be copied or
computed.

A shelf between the warehouse (SSD) and the bench (GPU). Every copy to a GPU passes over
it, every CPU expert is worked on there. What the host cache policy declines lies in
staging until its last user is done.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.base import ABSENT, RESIDENT, LayerWork
from moesim.policies.planner.residency_kernels import look

if TYPE_CHECKING:
    from moesim.policies.planner.memory_level import Tier


class HostMemory:
    """The host tier's books: holds of copies in flight and the SSD's expected queue."""

    def __init__(self, tier: Tier, read_s: list[float]) -> None:
        self.tier = tier
        self.memory = tier.memory
        self._read_s = read_s
        self._ssd_free_s = 0.0

    def wait_s(self, layer: int, experts: np.ndarray, now_s: float) -> np.ndarray:
        """Seconds until each expert is in host memory, float64 [A]."""
        memory = self.memory
        found = np.empty(len(experts), np.int8)
        wait_s = np.empty(len(experts))
        look(
            memory.state,
            memory.landing_s,
            layer,
            experts,
            now_s,
            self._read_s[layer],
            found,
            wait_s,
        )
        return wait_s

    def accessed(self, work: LayerWork, lanes: np.ndarray) -> None:
        """Tell the host cache what the GPUs do not hold or the CPU computes: only that
        is asked of it.
        """
        asked = (work.state == ABSENT) | (lanes == 0)
        if not asked.any():
            return
        experts = work.experts[asked]
        self.tier.cache.accessed(
            replace(
                work,
                experts=experts,
                tokens=work.tokens[asked],
                state=self.memory.state[work.layer][experts],
                cpu_s=work.cpu_s[asked],
                host_s=work.host_s[asked],
                gpu_s=np.ascontiguousarray(work.gpu_s[:, asked]),
                arrive_s=np.ascontiguousarray(work.arrive_s[:, asked]),
            )
        )

    def bring(
        self, work: LayerWork | None, layer: int, keys: np.ndarray, now_s: float
    ) -> tuple[list[bool], list[bool]]:
        """Hold experts of one layer for a copy each.

        Returns:
            For each key, whether it must first be read from the SSD, and whether that
            read lands in staging.
        """
        memory = self.memory
        read = memory.state.reshape(-1)[keys] == ABSENT
        absent = keys[read]
        if len(absent):
            each_s = self._read_s[layer]
            start_s = max(now_s, self._ssd_free_s)
            self._ssd_free_s = start_s + len(absent) * each_s
            landings_s = start_s + each_s * np.arange(1, len(absent) + 1)
            if work is None:
                memory.stage(absent, landings_s)
            else:
                self.tier.admit(work, layer, absent, landings_s)
        memory.holds.reshape(-1)[keys] += 1
        return read.tolist(), (read & memory.staged.reshape(-1)[keys]).tolist()

    def unhold(self, layer: int, expert: int, *, cancelled: bool = False) -> None:
        """End the hold of one copy; a staged expert that nothing waits for is
        forgotten.
        """
        memory = self.memory
        memory.holds[layer, expert] -= 1
        key = layer * memory.experts + expert
        idle = memory.holds[layer, expert] == (1 if memory.staged[layer, expert] else 0)
        if idle and cancelled and memory.state[layer, expert] != RESIDENT:
            self.tier.cancel(key)
        elif idle and memory.staged[layer, expert]:
            memory.drop_staged(np.array([key]))

    def release(self, layer: int, experts: np.ndarray) -> None:
        """End the holds of a layer step, and forget what was staged for it alone."""
        memory = self.memory
        memory.release(layer, experts)
        if memory.staged_count[layer]:
            keys = memory.staged_of(layer)
            idle = (memory.state.reshape(-1)[keys] == RESIDENT) & (
                memory.holds.reshape(-1)[keys] == 1
            )
            memory.drop_staged(keys[idle])
