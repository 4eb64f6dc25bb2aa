"""Checks of the lanes: each alone, and in pairs.

Pairs that get as much done together as one after the other do not overlap: two lanes
that share a core, or one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from moesim.runtime.accelerators.here import accelerator_here
from moesim.runtime.doctor.finding import Finding, holds, limited
from moesim.runtime.measure.contention import LaneWork, slowdown
from moesim.runtime.measure.copies import CopyPool
from moesim.runtime.measure.experts import ExpertPool, Size
from moesim.runtime.measure.machine import available_cores
from moesim.runtime.measure.timing import sample
from moesim.runtime.store.memory import DeviceSlots, HostSlots

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runtime.accelerators.accelerator import Accelerator

_SIZE: Final = Size(2048, 768)
"""Experts of Qwen3-30B-A3B."""
_POOL_BYTES: Final = 192 << 20
_SHARE_S: Final = 0.6
_NO_OVERLAP: Final = 1.8
"""A pair that takes so much longer than alone does little at the same time."""


ONE_CORE: Final = limited(
    "not measured: on one core they take turns", "give the process two cores or more"
)


def check_lanes() -> list[tuple[str, Finding]]:
    """Time an expert on every lane alone, then lanes beside each other."""
    cores = available_cores()
    accelerator = accelerator_here()
    threads = max(1, cores - 1)
    cpu = ExpertPool(_SIZE, torch.float32, total_bytes=_POOL_BYTES)
    nbytes = cpu.layout.expert_bytes
    try:
        work = {"cpu": LaneWork(threads, cpu.work(1))}
        if accelerator is None:
            work |= _host_work(nbytes)
        else:
            work |= _device_work(accelerator, nbytes)
        findings = [_alone(lane, job, nbytes) for lane, job in work.items()]
        if cores < 2:
            findings.append(("lanes in pairs", ONE_CORE))
        else:
            others = [lane for lane in work if lane != "cpu"]
            findings += [_pair("cpu", other, work) for other in others]
    finally:
        cpu.close()
    if accelerator is not None:
        findings.append(("copies beside compute", _device_overlap(accelerator, nbytes)))
    return findings


def _host_work(nbytes: int) -> dict[str, LaneWork]:
    """What the host accelerator does: one thread computes, or copies."""
    experts = ExpertPool(_SIZE, torch.float32, total_bytes=_POOL_BYTES)
    copies = CopyPool(max(_POOL_BYTES, 2 * nbytes))
    return {
        "gpu0": LaneWork(1, experts.work(1)),
        "h2d0": LaneWork(1, copies.streaming(nbytes)),
    }


def _device_work(accelerator: Accelerator, nbytes: int) -> dict[str, LaneWork]:
    """What a device does, waited for by the host."""
    experts = ExpertPool(
        _SIZE, torch.bfloat16, device=str(accelerator.device), total_bytes=_POOL_BYTES
    )
    product = experts.work(1)

    def compute(index: int) -> None:
        product(index)
        accelerator.synchronize()

    copy = _device_copy(accelerator, nbytes)

    def copied(index: int) -> None:
        copy(index)
        accelerator.synchronize()

    return {"gpu0": LaneWork(1, compute), "h2d0": LaneWork(1, copied)}


def _device_copy(accelerator: Accelerator, nbytes: int) -> Callable[[int], None]:
    locked_for = accelerator if accelerator.page_locks else None
    host = HostSlots(4, nbytes, page_lock=locked_for)
    device = DeviceSlots(4, nbytes, accelerator.device)
    stream = accelerator.new_stream()

    def copy(index: int) -> None:
        with accelerator.on(stream):
            device.record(index % 4).copy_(host.record(index % 4), non_blocking=True)

    return copy


def _alone(lane: str, work: LaneWork, nbytes: int) -> tuple[str, Finding]:
    torch.set_num_threads(work.threads)
    median_s = float(np.median(sample(work.run, _SHARE_S)))
    rate = nbytes / median_s
    return f"{lane} alone", holds(
        f"{1e3 * median_s:.2f} ms for an expert of {nbytes / 2**20:.0f} MiB,"
        f" {rate / 1e9:.1f} GB/s",
        seconds=median_s,
        bytes_per_s=rate,
    )


def _pair(victim: str, other: str, work: dict[str, LaneWork]) -> tuple[str, Finding]:
    name = f"{victim} beside {other}"
    factor = max(
        1.0,
        float(np.median([slowdown(work[victim], work[other], 0.3) for _ in range(3)])),
    )
    return name, pair_finding(factor)


def pair_finding(factor: float) -> Finding:
    """Say what a slowdown means."""
    words = f"takes {factor:.2f} times as long as alone"
    if factor < _NO_OVERLAP:
        return holds(words, factor=factor)
    return limited(
        f"{words}: hardly any overlap",
        "the lanes share a core or the memory; close other programs, and see `moesim"
        " calibrate`, which measures by how much",
        factor=factor,
    )


def overlap_share(first_s: float, second_s: float, both_s: float) -> float:
    """How much of the shorter one is hidden behind the longer one, 0 to 1."""
    hidden_s = first_s + second_s - both_s
    return min(1.0, max(0.0, hidden_s / min(first_s, second_s)))


def _device_overlap(accelerator: Accelerator, nbytes: int) -> Finding:
    """Launch copies and products on two streams, and see how much is hidden."""
    experts = ExpertPool(
        _SIZE, torch.bfloat16, device=str(accelerator.device), total_bytes=_POOL_BYTES
    )
    product = experts.work(1)
    copy = _device_copy(accelerator, nbytes)

    def both(index: int) -> None:
        copy(index)
        product(index)

    def median_s(work: Callable[[int], Any]) -> float:
        def many(index: int) -> None:
            for launch in range(16):
                work(16 * index + launch)
            accelerator.synchronize()

        return float(np.median(sample(many, _SHARE_S)))

    share = overlap_share(median_s(copy), median_s(product), median_s(both))
    words = f"{share:.0%} of the shorter one is hidden"
    if share >= 0.5:
        return holds(words, share=share)
    return limited(
        f"{words}: copies hardly overlap",
        "page-lock host memory; on some cards display and copies share an engine",
        share=share,
    )
