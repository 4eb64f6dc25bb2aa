"""The host accelerator: a core with slots of its own, standing in for a GPU where there
is none.

Copies into its slots are copies, products from them are products; only the device is a
thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from moesim.runtime.executor.device import weighted_sum
from moesim.runtime.store.memory import DeviceSlots, HostSlots
from moesim.runtime.store.streaming import streamed

if TYPE_CHECKING:
    from moesim.runtime.accelerators.accelerator import Accelerator
    from moesim.runtime.executor.lanes import Operation
    from moesim.runtime.executor.layer_job import LayerJob
    from moesim.runtime.store.memory import Slots
    from moesim.traces.timeline.spans import Timeline


class HostDevice:
    """What the `gpu0`, `h2d0` and `d2h0` lanes do on a machine without a GPU.

    Attributes:
        device: where hidden states live.
        with_control: lane classes that the control thread serves itself.
        page_lock: for whom host memory must keep its pages: nobody.
    """

    device = torch.device("cpu")
    with_control: ClassVar[tuple[str, ...]] = ()
    page_lock: Accelerator | None = None

    def __init__(self) -> None:
        self._slots: Slots = DeviceSlots(0, 1)

    def allocate(self, slots: int, slot_bytes: int) -> Slots:
        """Take the accelerator's memory.

        Raises:
            RuntimeFault: there is not that much.
        """
        self._slots = DeviceSlots(slots, slot_bytes)
        return self._slots

    def copy(self, slot: int, record: torch.Tensor, nbytes: int) -> None:
        """Copy a record into a slot, past the caches."""
        streamed(self._slots.record(slot), record, nbytes)

    def begin_compute(self, operation: Operation, slot: int) -> None:
        """Note that an expert in this slot is about to compute."""

    def end_compute(self, operation: Operation) -> tuple[float, float] | None:
        """Note that it has; return its times where only the device knows them
        (negative: it tells them later).
        """

    def settle(self) -> None:
        """Wait until the last product has really been computed; here it has."""

    def to_host(self, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Bring hidden states to where the CPU reads; return them and the bytes moved:
        memory is shared, so none.
        """
        return hidden, 0

    def join(self, job: LayerJob) -> torch.Tensor:
        """Add weighted results by ascending expert id, whoever computed them."""
        if not job.results:
            return torch.zeros_like(job.hidden)
        return weighted_sum(
            job, torch.cat(job.results), torch.from_numpy(job.groups.pairs)
        )

    def begin(self, began_s: float) -> None:
        """Note when the run began."""

    def mark(self) -> None:
        """Note the start of dense work."""

    def marked(self, operation: Operation) -> None:
        """Note the end of dense work."""

    def step_done(self, timeline: Timeline) -> None:
        """Wait for the device at the end of a forward pass, and write down what it has
        timed itself.
        """


def spare_record(nbytes: int) -> HostSlots:
    """One aligned record in host memory, to read into."""
    return HostSlots(1, nbytes)
