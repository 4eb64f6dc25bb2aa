"""What a device must do: hold slots, take copies in, compute from slots, join results.

`HostDevice` is a core of this machine with memory of its own, `StreamDevice` an
accelerator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

if TYPE_CHECKING:
    from moesim.runtime.accelerators.accelerator import Accelerator
    from moesim.runtime.executor.lanes import Operation
    from moesim.runtime.executor.layer_job import LayerJob
    from moesim.runtime.store.memory import Slots
    from moesim.traces.timeline.spans import Timeline


class Device(Protocol):
    """What the `gpu0`, `h2d0` and `d2h0` lanes do.

    Times that only the device's clock knows are returned where it can tell them at
    once; negative ones mean that `step_done` writes them down later.

    Attributes:
        device: where hidden states live.
        with_control: lane classes that the control thread serves itself.
        page_lock: for whom host memory must keep its pages, None for nobody.
    """

    device: torch.device
    with_control: ClassVar[tuple[str, ...]]
    page_lock: Accelerator | None

    def allocate(self, slots: int, slot_bytes: int) -> Slots:
        """Take the device's memory."""

    def copy(
        self, slot: int, record: torch.Tensor, nbytes: int
    ) -> tuple[float, float] | None:
        """Copy a record into a slot; return when it is there."""

    def begin_compute(self, operation: Operation, slot: int) -> None:
        """Note that an expert in this slot is about to compute."""

    def end_compute(self, operation: Operation) -> tuple[float, float] | None:
        """Note that it has."""

    def settle(self) -> None:
        """Wait until the last product has really been computed."""

    def to_host(self, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Bring hidden states to where the CPU reads; also the bytes moved."""

    def join(self, job: LayerJob) -> torch.Tensor:
        """Add weighted results by ascending expert id, whoever computed them."""

    def begin(self, began_s: float) -> None:
        """Note when the run began."""

    def mark(self) -> None:
        """Note the start of dense work."""

    def marked(self, operation: Operation) -> None:
        """Note the end of dense work."""

    def step_done(self, timeline: Timeline) -> None:
        """Wait for the device at the end of a forward pass; write its times down."""


def weighted_sum(
    job: LayerJob, stacked: torch.Tensor, pairs: torch.Tensor
) -> torch.Tensor:
    """Add every expert's weighted answers to their tokens, in the order of `pairs`.

    A GPU adds the answers to one token in any order, as it does in the library's own
    forward: there the last bits may differ from one run to the next.

    Args:
        job: the layer step, T tokens.
        stacked: [P, H] answers by ascending expert id, on the device.
        pairs: int64 [P], flat positions in the routing [T, K], on the device.

    Returns:
        [T, H] in the dtype of the hidden states.
    """
    hidden = job.hidden
    weighted = stacked * job.weights.reshape(-1)[pairs, None]
    if job.device_rows is None:
        return weighted.sum(0, keepdim=True).to(hidden.dtype)
    total = torch.zeros_like(hidden)
    return total.index_add_(0, job.device_rows, weighted.to(hidden.dtype))
