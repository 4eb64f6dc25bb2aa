"""What a sweep keeps of a run's tables: where each expert was, and the times of each
batch.

Both are gathered while the run goes on, so a long run needs no more memory than a short
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.timeline.spans import HIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Chunk

NEVER_USED = 255
"""Stands for an expert that no token asked for."""

FULL_SHARE = 250
"""Stands for a share of 1; shares between are rounded."""


class RunObserver:
    """Takes chunks of a run's tables. L MoE layers, E experts.

    Attributes:
        uses: int64 [L * E], layer steps in which an expert was active.
        resident: int64 [L * E], those for which it was resident.
        on_gpu: int64 [L * E], those that a GPU computed.
        ttft_s: of each batch that has a prefill, and NaN of others.
        decode_s, decode_steps: seconds and number of each batch's decode steps.
        makespan_s: of each batch.
    """

    def __init__(self, shape: ModelShape, lanes: Sequence[str]) -> None:
        self._shape = shape
        self._is_gpu = np.array([lane.startswith("gpu") for lane in lanes])
        experts = shape.layers * shape.experts
        self.uses = np.zeros(experts, np.int64)
        self.resident = np.zeros(experts, np.int64)
        self.on_gpu = np.zeros(experts, np.int64)
        self.ttft_s: list[float] = []
        self.decode_s: list[float] = []
        self.decode_steps: list[int] = []
        self.makespan_s: list[float] = []
        self._batch = -1
        self._start_s = 0.0
        self._last_s = 0.0

    def add(self, table: str, chunk: Chunk) -> None:
        """Take a chunk of `timeline`, `accesses` or `steps`, each in order."""
        if table == "accesses":
            self._add_accesses(chunk)
        elif table == "steps":
            columns = ("batch", "phase", "start_s", "end_s")
            rows = zip(*(chunk[name].tolist() for name in columns), strict=True)
            for batch, phase, start_s, end_s in rows:
                self._add_step(batch, phase, start_s, end_s)

    def _add_accesses(self, chunk: Chunk) -> None:
        place = chunk["layer"].astype(np.int64) * self._shape.experts + chunk["expert"]
        is_resident = chunk["state"] == HIT
        is_on_gpu = self._is_gpu[chunk["lane"]]
        size = len(self.uses)

        self.uses += np.bincount(place, minlength=size)
        self.resident += np.bincount(place[is_resident], minlength=size)
        self.on_gpu += np.bincount(place[is_on_gpu], minlength=size)

    def _add_step(self, batch: int, phase: int, start_s: float, end_s: float) -> None:
        if batch != self._batch:
            self._batch = batch
            self._start_s = start_s
            self._last_s = start_s
            self.ttft_s.append(np.nan)
            self.decode_s.append(0.0)
            self.decode_steps.append(0)
            self.makespan_s.append(0.0)

        if phase == Phase.PREFILL:
            self.ttft_s[-1] = end_s - self._start_s
        else:
            # What lies between two steps belongs to the later one.
            self.decode_s[-1] += end_s - self._last_s
            self.decode_steps[-1] += 1
        self.makespan_s[-1] = end_s - self._start_s
        self._last_s = end_s

    def columns(self) -> dict[str, Any]:
        """Return what a row holds of it; `placement` is uint8 [2, L, E]: the share of
        uses that a GPU computed, and that found the expert resident.
        """
        shares = np.full((2, len(self.uses)), NEVER_USED, np.uint8)
        is_used = self.uses > 0
        for row, counts in enumerate((self.on_gpu, self.resident)):
            share = counts[is_used] / self.uses[is_used]
            shares[row, is_used] = np.rint(share * FULL_SHARE)
        return {
            "batch_ttft_s": self.ttft_s,
            "batch_decode_s": self.decode_s,
            "batch_decode_steps": self.decode_steps,
            "batch_makespan_s": self.makespan_s,
            "placement_experts": self._shape.experts,
            "placement": shares.tobytes(),
        }
