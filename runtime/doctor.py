"""Checks of this machine by torch and by its disk, and what its lanes reach alone and
beside each other.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from moesim.base.errors import RuntimeFault
from moesim.base.host_checks import LEAST_FREE_BYTES, Finding, fails, holds, limited
from moesim.base.host_limits import available_cores, processor
from moesim.base.units import percent
from moesim.runtime.accelerators import HOST, accelerator_here
from moesim.runtime.measure.copies import noise_file
from moesim.runtime.measure.experts import ExpertPool, Size
from moesim.runtime.measure.neighbours import device_copy, lane_work, slowdown
from moesim.runtime.measure.sampling import many_s, once_s, sample
from moesim.runtime.models.expert_layout import swiglu_layout
from moesim.runtime.store.memory import HostSlots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.runtime.accelerators import Accelerator
    from moesim.runtime.measure.neighbours import LaneWork

_MIB: Final = 1 << 20
READ_BYTES: Final = 4 * _MIB
_NOISE_BYTES: Final = 16 * READ_BYTES

CARDS: Final[Mapping[str, str]] = {
    "/dev/nvidia0": "NVIDIA",
    "/dev/kfd": "AMD",
    "/dev/dri/renderD128": "other",
}
"""Files of the kernel -> whose graphics they stand for."""


def check_torch(cards: Sequence[str] | None = None) -> Finding:
    """Name torch, and the accelerator that it finds.

    Args:
        cards: makers of graphics that the system shows; looked for when None.
    """
    version = f"torch {torch.__version__}"
    accelerator = accelerator_here()
    if accelerator is not None:
        memory = accelerator.total_bytes / 2**30
        return holds(
            f"{version}, {accelerator.driver}: {accelerator.name}, {memory:.1f} GiB",
            kind=accelerator.kind,
            unified=accelerator.unified,
        )
    if cards is None:
        cards = [maker for path, maker in CARDS.items() if Path(path).exists()]
    known = [maker for maker in cards if maker != "other"]
    if known:
        return fails(
            f"{version} finds no accelerator, but the system has {known[0]} graphics",
            "install the torch build for it (pytorch.org, 'Get started'), and its"
            " driver",
        )
    return holds(
        f"{version}, no graphics: a core of {processor()} stands in", kind="host"
    )


def check_page_lock() -> Finding:
    """Page-lock some memory for the accelerator, where there is one."""
    accelerator = accelerator_here()
    if accelerator is None or not accelerator.page_locks:
        return holds("not needed: no copies to a device's own memory")
    try:
        with HostSlots(64, _MIB, page_lock=accelerator):
            return holds("64 MiB page-locked")
    except RuntimeFault as error:
        return fails(
            str(error), "raise the limit: `ulimit -l unlimited`, or --ulimit memlock=-1"
        )


def check_disk(folder: Path) -> list[tuple[str, Finding]]:
    """Read a file of noise around the page cache, in pieces of an expert's size.

    Raises:
        RuntimeFault: it cannot be written.
    """
    usage = shutil.disk_usage(folder)
    with HostSlots(1, READ_BYTES) as slots, noise_file(folder, _NOISE_BYTES) as file:
        view = memoryview(slots.record(0).numpy())
        offsets = range(0, _NOISE_BYTES, READ_BYTES)
        times_s = [once_s(lambda at: file.read_into(at, view), at) for at in offsets]
    around = holds(f"reads in {folder} go around the page cache")
    if not file.direct:
        around = limited(
            f"{folder}: {file.reason}, so they may come from memory",
            "put experts on a disk with ext4 or xfs: --store DIR",
            reason=file.reason,
        )
    rate = READ_BYTES / float(np.median(times_s))
    words = f"{rate / 1e9:.2f} GB/s in pieces of 4 MiB"
    figures: dict[str, Any] = {"bytes_per_s": rate}
    # Some file systems in memory count nothing.
    if usage.total:
        words += f", {usage.free / 2**30:.0f} GiB free"
        figures["free_bytes"] = usage.free
    speed = holds(words, **figures)
    if usage.total and usage.free < LEAST_FREE_BYTES:
        way_out = "make room, or name another disk: --disk DIR"
        speed = limited(words, way_out, **figures)
    return [("direct I/O", around), ("disk", speed)]


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
    dtype = torch.float32 if accelerator is None else torch.bfloat16
    nbytes = swiglu_layout(_SIZE.hidden, _SIZE.intermediate, dtype).expert_bytes
    with lane_work(
        _SIZE, dtype, accelerator or HOST, max(1, cores - 1), total_bytes=_POOL_BYTES
    ) as work:
        findings = [_alone(lane, job, nbytes) for lane, job in work.items()]
        if cores < 2:
            findings.append(("lanes in pairs", ONE_CORE))
        else:
            findings += [_pair("cpu", other, work) for other in work if other != "cpu"]
    if accelerator is not None:
        findings.append(("copies beside compute", _device_overlap(accelerator, nbytes)))
    return findings


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
    works = (work[victim], work[other])
    slower = [slowdown(*works, 0.3) for _ in range(3)]
    factor = float(np.median(slower))
    return name, pair_finding(max(1.0, factor))


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
    """Compute how much of the shorter one is hidden behind the longer one, 0 to 1."""
    hidden_s = first_s + second_s - both_s
    return min(1.0, max(0.0, hidden_s / min(first_s, second_s)))


def _device_overlap(accelerator: Accelerator, nbytes: int) -> Finding:
    """Launch copies and products on two streams, and see how much is hidden."""
    experts = ExpertPool(
        _SIZE, torch.bfloat16, accelerator=accelerator, total_bytes=_POOL_BYTES
    )
    product = experts.work(1)
    copy = device_copy(accelerator, nbytes)

    def both(index: int) -> None:
        copy(index)
        product(index)

    alone_s, product_s, both_s = (
        many_s(accelerator, work, _SHARE_S) for work in (copy, product, both)
    )
    share = overlap_share(alone_s, product_s, both_s)
    words = f"{percent(share, 0)} of the shorter one is hidden"
    if share >= 0.5:
        return holds(words, share=share)
    return limited(
        f"{words}: copies hardly overlap",
        "page-lock host memory; on some cards display and copies share an engine",
        share=share,
    )
