"""Measure this PC: what a hardware profile says about the machine it was written on.

Half a minute of real work: experts on the lanes that will compute them, copies between
the memories that will hold them, reads of the disk that stores them, hand-offs,
planning, and how much of that slows the rest. On a machine with CUDA the GPU and its
page-locked copies are timed by the device; on one without, the *host accelerator*
stands in: one core with memory of its own, which computes and does its own copies, so
that busy workers never exceed cores.

These are operations in isolation. A run is slower than their sum (see
`docs/reference/hardware.md`); calibration through the executor tells by how much.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import psutil
import torch
from moesim.hwprofiles.profile import HardwareProfile, save_profile
from moesim.hwprofiles.schema import Quantity
from moesim.runtime.measure.cuda import event_timer, measure_cuda_copies
from moesim.runtime.measure.dense import measure_dense
from moesim.runtime.measure.disk import measure_disk
from moesim.runtime.measure.experts import (
    CopyPool,
    ExpertPool,
    Size,
    choose_dtype,
    measure_experts,
    measure_first_expert,
    measure_host_copies,
    pool_bytes,
)
from moesim.runtime.measure.lanes import LaneWork, measure_contention, measure_dispatch
from moesim.runtime.measure.planning import measure_planning
from moesim.runtime.measure.timing import Findings
from moesim.runtime.models.expert_math import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moesim.traces.format.schema import ModelShape

REFERENCE: Final = Size(2048, 768)
"""Expert measured when no model is named: Qwen3-30B-A3B's."""

_BUSY_READ: Final = 0.5
"""Share of a read above which the reading thread counts as a busy core."""


class _Extent(NamedTuple):
    """How much is measured, and for how long."""

    seconds: float
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    dense_tokens: tuple[int, ...]
    active: tuple[int, ...]
    file_bytes: int


_FULL: Final = _Extent(
    38.0,
    (1, 2, 4, 8, 16, 32, 64, 128, 256),
    (256, 1024, 2048),
    (1, 8, 64),
    (4, 8, 32, 128),
    512 << 20,
)
_QUICK: Final = _Extent(6.0, (1, 4, 16, 64), (256, 1024), (1, 16), (4, 32), 64 << 20)


def measure(
    shape: ModelShape | None,
    out: str | os.PathLike[str],
    *,
    quick: bool = False,
    progress: Callable[[str, float], None] | None = None,
    disk_dir: str | os.PathLike[str] | None = None,
) -> HardwareProfile:
    """Measure this machine and write its profile.

    Args:
        shape: model whose experts are measured; Qwen3-30B-A3B's when None.
        out: the TOML file to write.
        quick: about 10 s instead of 40 s, with fewer sizes.
        progress: called with what is measured next and the share that is done.
        disk_dir: folder on the disk that will hold experts; the folder of `out` when
            None.

    Returns:
        The profile as written.

    Raises:
        RuntimeFault: the folder cannot be written or the disk is full; memory cannot be
            page-locked.
        ProfileError: `out` cannot be written.
    """
    extent = _QUICK if quick else _FULL
    target = Path(out)
    findings = Findings(date=dt.datetime.now(tz=dt.UTC).date().isoformat())
    tell = progress or (lambda _what, _done: None)
    load = os.getloadavg()[0]
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else psutil.cpu_count() or 1
    )
    size = REFERENCE if shape is None else Size(shape.hidden, shape.expert_intermediate)
    cuda = torch.cuda.is_available()
    with _torch_threads(max(1, cores - 1)):
        tell("expert compute on the CPU", 0.0)
        dtype = choose_dtype(size, seconds=0.05 * extent.seconds)
        _measure_cpu(findings, size, dtype, cores, extent)
        tell("the accelerator: experts, copies and the dense part", 0.35)
        if cuda:
            _measure_gpu(findings, size, extent)
        else:
            _measure_host_accelerator(findings, size, dtype, cores, extent)
        tell("disk reads", 0.68)
        folder = Path(disk_dir) if disk_dir is not None else target.resolve().parent
        disk = measure_disk(
            findings, folder, file_bytes=extent.file_bytes, seconds=0.1 * extent.seconds
        )
        tell("hand-offs and planning", 0.8)
        measure_dispatch(findings, seconds=0.04 * extent.seconds)
        measure_planning(findings, extent.active, seconds=0.12 * extent.seconds)
        if not cuda and cores > 1:
            tell("what lanes cost each other", 0.9)
            _measure_host_contention(findings, size, dtype, cores, extent)
    _state_memory(findings, cores)
    reads_share = cores <= 2 and (disk.core_share or 0.0) > _BUSY_READ
    profile = HardwareProfile(
        name=target.stem,
        kind="measured",
        description=(
            f"{_processor()}, {cores} cores, {_accelerator_name()}; {dtype_name(dtype)}"
            f" experts on the CPU; {disk.words}; load average {load:.1f} when it began"
        ),
        date=findings.date,
        accelerator="cuda" if cuda else "host",
        workers=_workers(
            cores, torch.cuda.device_count() if cuda else 0, reads_share=reads_share
        ),
        numbers=findings.numbers,
        curves=findings.curves,
        versions=_versions(),
        fit=findings.fit,
        where=target.name,
    )
    save_profile(profile, target)
    tell("done", 1.0)
    return profile


def _measure_cpu(
    findings: Findings, size: Size, dtype: torch.dtype, cores: int, extent: _Extent
) -> None:
    threads = max(1, cores - 1)
    source = f"{threads} thread{'s' * (threads > 1)}, weights read from memory"
    measure_experts(
        findings,
        "cpu",
        size,
        dtype,
        tokens=extent.tokens,
        seconds=0.22 * extent.seconds,
        source=source,
    )
    measure_first_expert(
        findings, size, dtype, seconds=0.04 * extent.seconds, source=source
    )


def _measure_host_accelerator(
    findings: Findings, size: Size, dtype: torch.dtype, cores: int, extent: _Extent
) -> None:
    """Measure one core: with two cores it is what the CPU lane has too, so its experts
    are not measured again.
    """
    source = "host accelerator, 1 thread, weights read from memory"
    with _torch_threads(1):
        if cores > 2:
            measure_experts(
                findings,
                "gpu",
                size,
                dtype,
                tokens=extent.tokens,
                seconds=0.15 * extent.seconds,
                source=source,
            )
        else:
            for key in ("overhead_s", "bytes_per_s", "flops_per_s"):
                findings.numbers[f"costs.gpu.{key}"] = findings.numbers[
                    f"costs.cpu.{key}"
                ]
            findings.curves["costs.gpu.points"] = findings.curves["costs.cpu.points"]
        measure_dense(
            findings,
            dtype,
            widths=extent.widths,
            tokens=extent.dense_tokens,
            seconds=0.12 * extent.seconds,
            source=source,
        )
        measure_host_copies(findings, seconds=0.12 * extent.seconds)


def _measure_gpu(findings: Findings, size: Size, extent: _Extent) -> None:
    device = "cuda:0"
    dtype = torch.bfloat16
    source = f"{torch.cuda.get_device_name(0)}, CUDA events"
    once = event_timer(device)
    measure_experts(
        findings,
        "gpu",
        size,
        dtype,
        tokens=extent.tokens,
        seconds=0.12 * extent.seconds,
        device=device,
        once=once,
        source=source,
    )
    measure_dense(
        findings,
        dtype,
        widths=extent.widths,
        tokens=extent.dense_tokens,
        seconds=0.1 * extent.seconds,
        device=device,
        once=once,
        source=source,
    )
    measure_cuda_copies(findings, device, seconds=0.12 * extent.seconds)


def _measure_host_contention(
    findings: Findings, size: Size, dtype: torch.dtype, cores: int, extent: _Extent
) -> None:
    """Measure the CPU lane beside the host accelerator's compute and copies, and both
    of those beside it.
    """
    experts = ExpertPool(size, dtype)
    others = ExpertPool(size, dtype)
    copies = CopyPool(pool_bytes(2 * experts.layout.expert_bytes))
    work = {
        "cpu": LaneWork(max(1, cores - 1), experts.work(1)),
        "gpu": LaneWork(1, others.work(1)),
        "h2d": LaneWork(1, copies.work(experts.layout.expert_bytes)),
    }
    pairs = [("cpu", "gpu"), ("gpu", "cpu"), ("cpu", "h2d"), ("h2d", "cpu")]
    measure_contention(findings, work, pairs, seconds=0.12 * extent.seconds)
    for here, there in (("cpu", "h2d"), ("h2d", "cpu")):
        mirrored = (name.replace("h2d", "d2h") for name in (here, there))
        findings.numbers[f"contention.{'.'.join(mirrored)}"] = findings.numbers[
            f"contention.{here}.{there}"
        ]
    experts.close()
    others.close()


def _state_memory(findings: Findings, cores: int) -> None:
    """Note what was counted, and the shares of memory that experts may take."""
    findings.numbers["cores"] = Quantity(
        cores,
        "measured",
        "cores this process may run on",
        samples=1,
        spread=0.0,
        date=findings.date,
    )
    total = psutil.virtual_memory().total
    numbers = {
        "host_bytes": (total // 2, f"half of {total / 2**30:.1f} GiB host memory")
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0).total_memory
        words = (
            f"three quarters of {device / 2**30:.1f} GiB; the rest holds dense weights,"
            " KV cache and workspace"
        )
        numbers["gpu_bytes"] = (device * 3 // 4, words)
    else:
        words = (
            f"a quarter of {total / 2**30:.1f} GiB host memory, the host"
            " accelerator's own"
        )
        numbers["gpu_bytes"] = (total // 4, words)
    numbers["staging_experts"] = (2, "one expert computing while the next arrives")
    for key, (value, source) in numbers.items():
        findings.numbers[f"memory.{key}"] = Quantity(value, "assumed", source)


def _workers(cores: int, gpus: int, *, reads_share: bool) -> dict[str, tuple[str, ...]]:
    """Map lanes to workers so that busy ones never exceed cores.

    Control plans while the lanes wait and waits while they work. Beside CUDA it still
    has a core of its own, since it launches kernels meanwhile; beside the host
    accelerator it takes turns with the CPU lane, before it. A direct read sleeps until
    the disk is done, so the SSD has a worker of its own, unless reads keep a core busy
    that is not there.
    """
    cpu = ("ssd", "cpu") if reads_share else ("cpu",)
    own_ssd = {} if reads_share else {"ssd": ("ssd",)}
    if gpus:
        devices = {
            f"{kind}{index}": (f"{kind}{index}",)
            for kind in ("gpu", "h2d", "d2h")
            for index in range(gpus)
        }
        host = (
            {"control": ("control",), "cpu": cpu}
            if cores > 1
            else {"cpu": ("control", *cpu)}
        )
        return {**host, **devices, **own_ssd}
    accelerator = ("gpu0", "h2d0", "d2h0")
    if cores == 1:
        return {"cpu": ("control", *cpu, *accelerator), **own_ssd}
    return {"cpu": ("control", *cpu), "accelerator": accelerator, **own_ssd}


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _processor() -> str:
    """Name the CPU as the kernel does."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerator_name() -> str:
    return (
        torch.cuda.get_device_name(0)
        if torch.cuda.is_available()
        else "host accelerator"
    )


def _versions() -> dict[str, str]:
    """Name what a profile depends on: a profile of another machine or library is a
    foreign one.
    """
    return {
        "cpu": _processor(),
        "accelerator": _accelerator_name(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
