"""What the planner expects of one link to a GPU: who is on it, and what is queued."""

from __future__ import annotations


class GpuLink:
    """Expected seconds of one host-to-GPU link, by the profile's estimate.

    Attributes:
        copy_s: seconds to copy one expert, by layer.
    """

    def __init__(self, copy_s: list[float]) -> None:
        self.copy_s = copy_s
        self._busy_until_s = 0.0
        self._queued_s = 0.0
        self._queued = 0

    def enqueue(self, layer: int, copies: int) -> None:
        """Note queued copies of one layer."""
        self._queued += copies
        copy_s = self.copy_s[layer]
        queued_s = self._queued_s
        # One by one, as they will be withdrawn: else roundings would differ.
        for _ in range(copies):
            queued_s += copy_s
        self._queued_s = queued_s

    def withdraw(self, layer: int) -> None:
        """Note that a queued copy has left the queue, started or not."""
        self._queued -= 1
        # An empty queue is empty, whatever sums of floating-point numbers say.
        self._queued_s = self._queued_s - self.copy_s[layer] if self._queued else 0.0

    def start(self, layer: int, now_s: float) -> float:
        """Note that a queued copy starts; return when it is expected to land."""
        self.withdraw(layer)
        landing_s = now_s + self.copy_s[layer]
        self._busy_until_s = landing_s
        return landing_s

    def left_s(self, now_s: float) -> float:
        """Seconds until the copy under way has landed; 0 if there is none."""
        return max(0.0, self._busy_until_s - now_s)

    def wait_s(self, now_s: float) -> float:
        """Seconds until everything that is queued has been served."""
        return self.left_s(now_s) + self._queued_s
