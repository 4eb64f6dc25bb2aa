"""The GPU behind the same lanes: streams for compute and copies, events for their times.

The control thread launches the dense part and the products on the compute stream, which costs it
microseconds each; the link has a thread of its own that launches one copy at a time on the copy stream and sleeps in an
event until it has landed, so that demand goes before prefetches and what has not started can still be withdrawn.

Slots are reused without waiting on the host: a copy into a slot first waits, on its stream, for the last product that
read it; a product waits for nothing, because it is launched only when its copy has landed. Times come from the
device's own clock, mapped to the host's at the beginning of the run, and are written down after a forward pass.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from runtime.errors import RuntimeFault
from runtime.host_lanes import weighted_sum
from runtime.memory import DeviceSlots

if TYPE_CHECKING:
    from runtime.jobs import Compute, Job
    from runtime.lanes import Operation
    from traces.timeline import Timeline


def cuda_is_there() -> bool:
    """Tell whether this machine has a GPU that torch can use."""
    return bool(torch.cuda.is_available())


class CudaDevice:
    """What the `gpu0`, `h2d0` and `d2h0` lanes do on a machine with CUDA. Attributes as in `HostDevice`.

    Args:
        device: which GPU.

    Raises:
        RuntimeFault: there is no such GPU.
    """

    with_control: ClassVar[tuple[str, ...]] = ("gpu", "d2h")
    page_lock = True

    def __init__(self, device: str = "cuda:0") -> None:
        if not cuda_is_there():
            raise RuntimeFault(f"{device}: expected a CUDA device, found none; use a profile of this machine")
        self.device = torch.device(device)
        self._slots = DeviceSlots(0, 1)
        self._copies: Any = torch.cuda.Stream(self.device)
        self._last_use: dict[int, Any] = {}
        self._zero: Any = None
        self._zero_s = 0.0
        self._dense_start: Any = None
        self._open: dict[int, Any] = {}
        self._untold: list[tuple[Operation, Any, Any]] = []

    def allocate(self, slots: int, slot_bytes: int) -> DeviceSlots:
        """Take GPU memory.

        Raises:
            RuntimeFault: there is not that much.
        """
        self._slots = DeviceSlots(slots, slot_bytes, self.device)
        return self._slots

    def begin(self, began_s: float) -> None:
        """Map the device's clock to the host's: both are read while the device has nothing to do."""
        torch.cuda.synchronize(self.device)
        self._zero = self._event()
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = time.perf_counter() - began_s

    def copy(self, slot: int, record: torch.Tensor, nbytes: int) -> tuple[float, float] | None:
        """Copy a record into a slot; return when it has landed, with the device's times."""
        start, end = self._event(), self._event()
        with torch.cuda.stream(self._copies):
            last = self._last_use.get(slot)
            if last is not None:
                self._copies.wait_event(last)
            start.record()
            self._slots.record(slot)[:nbytes].copy_(record[:nbytes], non_blocking=True)
            end.record()
        end.synchronize()
        if self._zero is None:  # before the run: the initial content
            return None
        return self._at_s(start), self._at_s(end)

    def begin_compute(self, operation: Compute, slot: int) -> None:
        """Note on the compute stream that a product from this slot begins."""
        start = self._event()
        start.record()
        self._open[id(operation)] = (start, slot)

    def end_compute(self, operation: Compute) -> tuple[float, float]:
        """Note that it ends; its slot may be overwritten from then on. The device tells its times later."""
        start, slot = self._open.pop(id(operation))
        end = self._event()
        end.record()
        self._last_use[slot] = end
        self._untold.append((operation, start, end))
        return -1.0, -1.0

    def settle(self) -> None:
        """Wait until the last product has really been computed, asleep."""
        self._untold[-1][2].synchronize()

    def to_host(self, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Bring hidden states to host memory, and wait for them."""
        return hidden.cpu(), hidden.numel() * hidden.itemsize

    def join(self, job: Job) -> torch.Tensor:
        """Add weighted results by ascending expert id, those of the CPU brought here first."""
        if not job.results:
            return torch.zeros_like(job.hidden)
        stacked = torch.cat([result.to(self.device, non_blocking=True) for result in job.results])
        return weighted_sum(job, stacked, torch.from_numpy(job.groups.pairs).to(self.device))

    def mark(self) -> None:
        """Note the start of dense work on the compute stream."""
        self._dense_start = self._event()
        self._dense_start.record()

    def marked(self, operation: Operation) -> None:
        """Note its end; the device tells its times later."""
        end = self._event()
        end.record()
        self._untold.append((operation, self._dense_start, end))
        operation.end_s = -1.0

    def step_done(self, timeline: Timeline) -> None:
        """Wait for the device, and write down what it has timed."""
        torch.cuda.synchronize(self.device)
        for op, start, end in self._untold:
            timeline.span(op.lane, op.kind, op.step, op.layer, op.expert, self._at_s(start), self._at_s(end), op.nbytes)
        self._untold.clear()

    def _event(self) -> Any:
        """An event that can be timed, and waited for asleep."""
        return torch.cuda.Event(enable_timing=True, blocking=True)

    def _at_s(self, event: Any) -> float:
        """When an event happened, in seconds since the run began."""
        return self._zero_s + self._zero.elapsed_time(event) * 1e-3
