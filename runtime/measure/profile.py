"""Measures this PC and writes its hardware profile.

Half a minute of real work: experts on the lanes that will compute them, copies between
the memories that will hold them, reads of the disk that stores them, hand-offs,
planning, and how much of that slows the rest. On a machine with CUDA the GPU and its
page-locked copies are timed by the device; on one without, the *host accelerator*
stands in: one core with memory of its own, which computes and does its own copies, so
that busy workers never exceed cores.

These are operations in isolation. A run is slower than their sum (see
`docs/reference/hardware.md`); calibration through the executor measures by how much.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import psutil
import torch

from moesim.base.host import (
    available_cores,
    load_average,
    processor,
    total_memory_bytes,
)
from moesim.hwprofiles.profile import HardwareProfile, save_profile
from moesim.hwprofiles.schema import Quantity
from moesim.runtime.accelerators import HOST, accelerator_here
from moesim.runtime.measure.control import measure_dispatch, measure_planning
from moesim.runtime.measure.copies import measure_copies, measure_disk
from moesim.runtime.measure.experts import (
    Size,
    choose_dtype,
    measure_dense,
    measure_experts,
    measure_first_expert,
)
from moesim.runtime.measure.neighbours import (
    lane_work,
    measure_contention,
    measure_probes,
    torch_threads,
)
from moesim.runtime.measure.sampling import Measurements
from moesim.runtime.models.expert_layout import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runtime.accelerators import Accelerator
    from moesim.traces.format.schema import ModelShape


def accelerator_name() -> str:
    """Name the GPU, or the host accelerator."""
    return (accelerator_here() or HOST).name


def versions() -> dict[str, str]:
    """Name what a profile depends on: a profile of another machine or library is a
    foreign one.
    """
    return {
        "cpu": processor(),
        "accelerator": accelerator_name(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


REFERENCE: Final = Size(2048, 768)
"""Expert measured when no model is named: Qwen3-30B-A3B's."""

DEVICE_DTYPE: Final = torch.bfloat16
"""Type of experts beside a card: that in which models are published, whatever the CPU
does well.
"""

_BUSY_READ: Final = 0.5
"""Share of a read above which the reading thread counts as a busy core."""


class _Extent(NamedTuple):
    """Extent of a measurement: how much, and for how long."""

    seconds: float
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    dense_tokens: tuple[int, ...]
    active: tuple[int, ...]
    file_bytes: int


_FULL: Final = _Extent(
    seconds=38.0,
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    widths=(256, 1024, 2048),
    dense_tokens=(1, 8, 64),
    active=(4, 8, 32, 128),
    file_bytes=512 << 20,
)
_QUICK: Final = _Extent(
    seconds=6.0,
    tokens=(1, 4, 16, 64),
    widths=(256, 1024),
    dense_tokens=(1, 16),
    active=(4, 32),
    file_bytes=64 << 20,
)


class _Session(NamedTuple):
    """One measurement of this machine.

    Attributes:
        measurements: receive the figures.
        extent: how much is measured.
        size: of the expert.
        dtype: of its weights.
        cores: that this process may use.
        accelerator: that there is, or the host.
    """

    measurements: Measurements
    extent: _Extent
    size: Size
    dtype: torch.dtype
    cores: int
    accelerator: Accelerator

    @property
    def cpu_threads(self) -> int:
        """One core stays free for the accelerator, as in a run."""
        return max(1, self.cores - 1)

    def seconds(self, share: float) -> float:
        """Part of the whole time."""
        return share * self.extent.seconds


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
    folder = Path(disk_dir) if disk_dir is not None else target.resolve().parent
    report = progress or (lambda _stage, _share: None)
    measurements = Measurements(date=dt.datetime.now(tz=dt.UTC).date().isoformat())
    # Before anything of ours runs: it says how busy others keep the machine.
    load = load_average()
    cores = available_cores()
    size = REFERENCE if shape is None else Size(shape.hidden, shape.expert_intermediate)
    accelerator = accelerator_here() or HOST

    # The shares of seconds below follow how much each figure decides, and add up to
    # about one.
    with torch_threads(max(1, cores - 1)):
        report("expert compute on the CPU", 0.0)
        # Both lanes compute from the same records: beside a card in its type.
        dtype = DEVICE_DTYPE
        if accelerator.kind == "host":
            dtype = choose_dtype(size, seconds=0.05 * extent.seconds)
        session = _Session(measurements, extent, size, dtype, cores, accelerator)
        _measure_cpu(session)

        report("the accelerator: experts, copies and the dense part", 0.35)
        _measure_accelerator(session)

        report("disk reads", 0.68)
        disk = measure_disk(
            measurements,
            folder,
            file_bytes=extent.file_bytes,
            seconds=session.seconds(0.1),
        )

        report("hand-offs and planning", 0.8)
        measure_dispatch(measurements, seconds=session.seconds(0.04))
        measure_planning(measurements, extent.active, seconds=session.seconds(0.12))

        report("what memories and links reach alone", 0.88)
        measure_probes(measurements, cores, accelerator, seconds=session.seconds(0.05))

        # On one core nothing works beside anything.
        if cores > 1:
            report("what lanes cost each other", 0.9)
            _measure_contention(session)

    _note_memory(measurements, cores, accelerator)
    # With more cores a read that keeps one busy has one of its own.
    reads_share = cores <= 2 and (disk.core_share or 0.0) > _BUSY_READ
    gpus = 0 if accelerator.kind == "host" else accelerator.count()
    profile = HardwareProfile(
        name=target.stem,
        kind="measured",
        description=(
            f"{processor()}, {cores} cores, {accelerator.name}; {dtype_name(dtype)}"
            f" experts on the CPU; {disk.summary}; load average {load:.1f} when it"
            " began"
        ),
        date=measurements.date,
        accelerator=accelerator.kind,
        workers=workers_of(cores, gpus, reads_share=reads_share),
        numbers=measurements.numbers,
        curves=measurements.curves,
        versions=versions(),
        fit=measurements.fit,
        where=target.name,
    )
    save_profile(profile, target)
    report("done", 1.0)
    return profile


def _measure_cpu(session: _Session) -> None:
    """Measure experts on the CPU lane."""
    threads = session.cpu_threads
    source = f"{threads} thread{'s' * (threads > 1)}, weights read from memory"
    # Most of the time goes here: the CPU's curve decides every assignment.
    measure_experts(
        session.measurements,
        "cpu",
        session.size,
        session.dtype,
        tokens=session.extent.tokens,
        seconds=session.seconds(0.22),
        source=source,
    )
    measure_first_expert(
        session.measurements,
        session.size,
        session.dtype,
        seconds=session.seconds(0.04),
        source=source,
    )


def _measure_accelerator(session: _Session) -> None:
    """Measure experts, the dense part and copies on the first GPU, or on the core that
    stands in for one.
    """
    measurements = session.measurements
    accelerator = session.accelerator
    if accelerator.kind == "host":
        source = "host accelerator, 1 thread, weights read from memory"
    else:
        source = f"{accelerator.name}, its events"
    with torch_threads(1):
        if accelerator.kind == "host" and session.cores <= 2:
            _copy_cpu_costs(measurements)
        else:
            measure_experts(
                measurements,
                "gpu",
                session.size,
                session.dtype,
                tokens=session.extent.tokens,
                seconds=session.seconds(0.15),
                accelerator=accelerator,
                source=source,
            )
        measure_dense(
            measurements,
            session.dtype,
            widths=session.extent.widths,
            tokens=session.extent.dense_tokens,
            seconds=session.seconds(0.12),
            accelerator=accelerator,
            source=source,
        )
        measure_copies(measurements, accelerator, seconds=session.seconds(0.12))


def _copy_cpu_costs(measurements: Measurements) -> None:
    """Give the accelerator the CPU's costs: with two cores each has one, so experts are
    not measured again.
    """
    for key in ("overhead_s", "bytes_per_s", "flops_per_s"):
        quantity = measurements.numbers[f"costs.cpu.{key}"]
        measurements.numbers[f"costs.gpu.{key}"] = quantity
    measurements.curves["costs.gpu.points"] = measurements.curves["costs.cpu.points"]


def _measure_contention(session: _Session) -> None:
    """Measure the CPU lane beside the accelerator's compute and copies, and both of
    those beside it: they read one host memory.
    """
    pairs = [("cpu", "gpu"), ("gpu", "cpu"), ("cpu", "h2d"), ("h2d", "cpu")]
    with lane_work(
        session.size, session.dtype, session.accelerator, session.cpu_threads
    ) as work:
        measure_contention(
            session.measurements, work, pairs, seconds=session.seconds(0.12)
        )

    # Both directions move the same bytes through host memory.
    numbers = session.measurements.numbers
    numbers["contention.cpu.d2h"] = numbers["contention.cpu.h2d"]
    numbers["contention.d2h.cpu"] = numbers["contention.h2d.cpu"]


def _note_memory(
    measurements: Measurements, cores: int, accelerator: Accelerator
) -> None:
    """Note what was counted, and the shares of memory that experts may take."""
    measurements.numbers["cores"] = Quantity(
        cores,
        "measured",
        "cores this process may run on",
        samples=1,
        spread=0.0,
        date=measurements.date,
    )

    # The rest of the memory is for the system, other programs and our own records.
    host = total_memory_bytes()
    if accelerator.kind != "host":
        gpu_bytes = accelerator.total_bytes
        gpu_source = f"all {gpu_bytes / 2**30:.1f} GiB of the card"
    else:
        gpu_bytes = host // 4
        gpu_source = (
            f"a quarter of {host / 2**30:.1f} GiB host memory, the host"
            " accelerator's own"
        )
    shares = {
        "host_bytes": (host // 2, f"half of {host / 2**30:.1f} GiB host memory"),
        "gpu_bytes": (gpu_bytes, gpu_source),
        "staging_experts": (2, "one expert computing while the next arrives"),
    }
    for key, (value, source) in shares.items():
        measurements.numbers[f"memory.{key}"] = Quantity(value, "assumed", source)


def workers_of(
    cores: int, gpus: int, *, reads_share: bool
) -> dict[str, tuple[str, ...]]:
    """Map lanes to workers so that busy ones never exceed cores.

    Control plans while the lanes wait and waits while they work. Beside CUDA it still
    has a core of its own, since it launches kernels meanwhile; beside the host
    accelerator it takes turns with the CPU lane, before it. A direct read sleeps until
    the disk is done, so the SSD has a worker of its own, unless reads keep a core busy
    that is not there.
    """
    cpu = ("ssd", "cpu") if reads_share else ("cpu",)
    ssd_worker = {} if reads_share else {"ssd": ("ssd",)}
    if gpus:
        devices = {
            f"{lane}{index}": (f"{lane}{index}",)
            for lane in ("gpu", "h2d", "d2h")
            for index in range(gpus)
        }
        host = (
            {"control": ("control",), "cpu": cpu}
            if cores > 1
            else {"cpu": ("control", *cpu)}
        )
        return {**host, **devices, **ssd_worker}

    # In a worker's order of turns: planning before computing, computing before copies.
    accelerator = ("gpu0", "h2d0", "d2h0")
    if cores == 1:
        return {"cpu": ("control", *cpu, *accelerator), **ssd_worker}
    return {"cpu": ("control", *cpu), "accelerator": accelerator, **ssd_worker}


# -- evidence --------------------------------------------------------------------------
# What the system counts while a run is measured: time that others took from its
# threads, and what the machine was busy with.
#
# Threads of a run see what other threads of this system take from them
# (`moesim.runtime.measure.profile`). What a hypervisor gives to other guests they do
# not: the kernel counts that as *stolen*. *Pressure* is time in which some thread of
# the system waited for a core. Where a system does not count, nothing is known.

try:
    import resource
except ImportError:  # Windows does not have it
    resource = None  # type: ignore[assignment]

_SCHEDSTAT: Final = "/proc/thread-self/schedstat"
_UNKNOWN_S: Final = float("nan")


class Counters(NamedTuple):
    """Counters of one thread; differences of two readings tell what lies between.

    Attributes:
        cpu_s: seconds on a core.
        waited_s: seconds in which it could have run and others did; NaN if not counted.
        switches: how often it was made to stop; -1 if not counted.
    """

    cpu_s: float
    waited_s: float
    switches: int

    def since(self, earlier: Counters) -> Counters:
        """Return what was counted after an earlier reading."""
        switches = self.switches - earlier.switches if self.switches >= 0 else -1
        return Counters(
            self.cpu_s - earlier.cpu_s, self.waited_s - earlier.waited_s, switches
        )


class ThreadEvidence:
    """Reads the calling thread's counters; make it on the thread that reads.

    A reading takes about 3 µs.
    """

    def __init__(self) -> None:
        try:
            self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY)
        except OSError:
            self._schedstat = -1
        self._of_thread = getattr(resource, "RUSAGE_THREAD", None)

    def read(self) -> Counters:
        """Read all counters now."""
        waited_s = _UNKNOWN_S
        if self._schedstat >= 0:
            # Nanoseconds on a core, nanoseconds waiting, times it ran.
            fields = os.pread(self._schedstat, 64, 0).split()
            waited_s = int(fields[1]) * 1e-9
        switches = -1
        if self._of_thread is not None:
            switches = resource.getrusage(self._of_thread).ru_nivcsw
        return Counters(time.thread_time(), waited_s, switches)

    def close(self) -> None:
        """Close the file."""
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1


class StolenTime:
    """What a hypervisor gave to others of the cores' time."""

    def __init__(self) -> None:
        self._before = self._read()

    def share(self) -> float:
        """Share of all cores' time since the reading before; NaN where it is not
        counted.
        """
        before = self._before
        now = self._before = self._read()
        spent_s, stolen_s = now[0] - before[0], now[1] - before[1]
        return stolen_s / spent_s if spent_s > 0 else float("nan")

    def _read(self) -> tuple[float, float]:
        """Seconds of all cores, and the stolen ones among them."""
        times = psutil.cpu_times()._asdict()
        # Guests' time is counted among users' as well.
        spent_s = sum(s for name, s in times.items() if not name.startswith("guest"))
        return spent_s, times.get("steal", float("nan"))
