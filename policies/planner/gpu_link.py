"""What the planner expects of one link to a GPU: who is on it, and what is queued."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import numpy as np


class GpuLink:
    """Expected seconds of one host-to-GPU link, by the profile's estimate.

    Attributes:
        copy_s: float64 [L, E], seconds to copy each expert.
        copy_of_s: the same by flat key.
        first_copy_s: of the first expert of each layer, which stands for all where they
            are alike.
        alike: whether they are, in every layer.
    """

    def __init__(self, copy_s: np.ndarray) -> None:
        self.copy_s = copy_s
        self.copy_of_s = cast("memoryview[float]", copy_s.reshape(-1).data)
        self.first_copy_s: list[float] = copy_s[:, 0].tolist()
        self.alike = bool((copy_s == copy_s[:, :1]).all())
        self._busy_until_s = 0.0
        self._queued_s = 0.0
        self._queued = 0

    def enqueue(self, layer: int, keys: list[int]) -> None:
        """Note queued copies of one layer, by flat key."""
        self._queued += len(keys)
        queued_s = self._queued_s
        # One by one, as they will be withdrawn: else roundings would differ.
        if self.alike:
            each_s = self.first_copy_s[layer]
            for _ in keys:
                queued_s += each_s
        else:
            copy_of_s = self.copy_of_s
            for key in keys:
                queued_s += copy_of_s[key]
        self._queued_s = queued_s

    def withdraw(self, key: int) -> None:
        """Note that a queued copy has left the queue, started or not."""
        self._queued -= 1
        # An empty queue is empty, whatever sums of floating-point numbers say.
        left_s = self._queued_s - self.copy_of_s[key]
        self._queued_s = left_s if self._queued else 0.0

    def start(self, key: int, landing_s: float) -> None:
        """Note that a queued copy starts, and when it is expected to land."""
        self.withdraw(key)
        self._busy_until_s = landing_s

    def left_s(self, now_s: float) -> float:
        """Seconds until the copy under way has landed; 0 if there is none."""
        return max(0.0, self._busy_until_s - now_s)

    def wait_s(self, now_s: float) -> float:
        """Seconds until everything that is queued has been served."""
        return self.left_s(now_s) + self._queued_s
