"""GPU compute and page-locked copies, timed by the device's own clock.

An event before and one after an operation on its stream; the time between them holds
what the lane would hold: the kernels and the gaps between their launches, without the
host's way there and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from moesim.hwprofiles.calibration.fit_curves import fit_line
from moesim.runtime.measure.experts import COPY_BYTES
from moesim.runtime.measure.timing import Findings, sample
from moesim.runtime.store.memory import DeviceSlots, HostTier

if TYPE_CHECKING:
    from collections.abc import Callable

_COPY_SLOTS = 8
_ACTIVATION_BYTES = (4 << 10, 64 << 10, 1 << 20)


def event_timer(device: str) -> Callable[[Callable[[int], object], int], float]:
    """Return a timer of one operation on the current stream of `device`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once(work: Callable[[int], object], index: int) -> float:
        with torch.cuda.device(device):
            begin.record()
            work(index)
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    return once


def measure_cuda_copies(findings: Findings, device: str, *, seconds: float) -> None:
    """Measure page-locked copies to and from a GPU by size, and hidden states there and
    back.

    Raises:
        RuntimeFault: memory cannot be page-locked, or the GPU has too little.
    """
    once = event_timer(device)
    share_s = seconds / (2 * len(COPY_BYTES) + len(_ACTIVATION_BYTES))
    with (
        HostTier(_COPY_SLOTS, COPY_BYTES[-1], page_lock=True) as host,
        DeviceSlots(_COPY_SLOTS, COPY_BYTES[-1], device) as there,
    ):
        host.memory.fill_(1)
        for link, source, target in (("h2d", host, there), ("d2h", there, host)):
            by_size = {
                size: sample(
                    _copies(source.memory, target.memory, size), share_s, once=once
                )
                for size in COPY_BYTES
            }
            findings.link(
                link,
                by_size,
                fit_line(by_size),
                f"page-locked copies on {device}, CUDA events",
            )

        def there_and_back(size: int) -> Callable[[int], None]:
            def work(_: int) -> None:
                host.memory[:size].copy_(there.memory[:size], non_blocking=True)
                there.memory[:size].copy_(host.memory[:size], non_blocking=True)
                torch.cuda.synchronize(device)

            return work

        moved = {
            2 * size: sample(there_and_back(size), share_s)
            for size in _ACTIVATION_BYTES
        }
    findings.line(
        "costs.activation",
        ("latency_s", "bytes_per_s"),
        fit_line(moved),
        f"line through page-locked copies of hidden states from and to {device},"
        " synchronised, by bytes",
    )


def _copies(
    source: torch.Tensor, target: torch.Tensor, size: int
) -> Callable[[int], None]:
    """Return operation number i: enqueue a copy of piece ``i`` of `size` bytes."""
    pieces = len(source) // size

    def work(index: int) -> None:
        at = index % pieces * size
        target[at : at + size].copy_(source[at : at + size], non_blocking=True)

    return work
