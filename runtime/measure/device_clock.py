"""Measures an accelerator's compute and page-locked copies by its own clock.

An event before and one after an operation on its stream; the time between them holds
what the lane would hold: the kernels and the gaps between their launches, without the
host's way there and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moesim.hwprofiles.calibration.fit_curves import fit_line
from moesim.runtime.measure.copies import ACTIVATION_BYTES, COPY_BYTES
from moesim.runtime.measure.timing import Operation, Timer, sample
from moesim.runtime.store.memory import DeviceSlots, HostSlots

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from moesim.runtime.accelerators.accelerator import Accelerator
    from moesim.runtime.measure.measurements import Measurements

# Pieces are used in turn, so that no copy finds its bytes in a cache.
_COPY_SLOTS: Final = 8


def event_timer(accelerator: Accelerator) -> Timer:
    """Return a timer of one operation on the accelerator's current stream."""
    begin = accelerator.event(asleep=False)
    end = accelerator.event(asleep=False)

    def once(work: Operation, index: int) -> float:
        stream = accelerator.current_stream()
        begin.record(stream)
        work(index)
        end.record(stream)
        end.synchronize()
        # Events report milliseconds.
        return float(begin.elapsed_time(end)) * 1e-3

    return once


def measure_device_copies(
    measurements: Measurements, accelerator: Accelerator, *, seconds: float
) -> None:
    """Measure page-locked copies to and from a device by size, and hidden states there
    and back.

    Raises:
        RuntimeFault: memory cannot be page-locked, or the device has too little.
    """
    device = accelerator.device
    once = event_timer(accelerator)
    share_s = seconds / (2 * len(COPY_BYTES) + len(ACTIVATION_BYTES))
    locked_for = accelerator if accelerator.page_locks else None
    with (
        HostSlots(_COPY_SLOTS, COPY_BYTES[-1], page_lock=locked_for) as host,
        DeviceSlots(_COPY_SLOTS, COPY_BYTES[-1], device) as gpu,
    ):
        host.memory.fill_(1)
        for link, source, target in (("h2d", host, gpu), ("d2h", gpu, host)):
            by_size = {
                size: sample(
                    _copies(source.memory, target.memory, size), share_s, once=once
                )
                for size in COPY_BYTES
            }
            measurements.link(
                link,
                by_size,
                fit_line(by_size),
                f"page-locked copies on {device}, its events",
            )

        # By the host's clock, since the CPU lane waits for its hidden states there.
        round_trips = {
            2 * size: sample(
                _round_trip(accelerator, host.memory, gpu.memory, size), share_s
            )
            for size in ACTIVATION_BYTES
        }
    measurements.line(
        "costs.activation",
        ("latency_s", "bytes_per_s"),
        fit_line(round_trips),
        f"line through page-locked copies of hidden states from and to {device},"
        " synchronised, by bytes",
    )


def _copies(
    source: torch.Tensor, target: torch.Tensor, size: int
) -> Callable[[int], None]:
    """Return operation number i: enqueue a copy of piece ``i`` of `size` bytes."""
    pieces = len(source) // size

    def work(index: int) -> None:
        offset = index % pieces * size
        piece = slice(offset, offset + size)
        target[piece].copy_(source[piece], non_blocking=True)

    return work


def _round_trip(
    accelerator: Accelerator, host: torch.Tensor, gpu: torch.Tensor, size: int
) -> Callable[[int], None]:
    """Return an operation: copy `size` bytes to the host and back, and wait."""

    def work(_: int) -> None:
        host[:size].copy_(gpu[:size], non_blocking=True)
        gpu[:size].copy_(host[:size], non_blocking=True)
        accelerator.synchronize()

    return work
