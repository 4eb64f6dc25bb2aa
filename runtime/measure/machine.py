"""Describes this machine: cores, processor, accelerator, libraries, load."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import torch

from moesim.runtime.accelerators.here import accelerator_here

_CPU_INFO: Final = Path("/proc/cpuinfo")


def available_cores() -> int:
    """Count the cores that this process may run on."""
    # A container often may use fewer than there are.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1


def load_average() -> float:
    """Return the load of the last minute, 0 where the system does not count it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def processor() -> str:
    """Name the CPU as the kernel does."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    # Not every architecture's kernel writes a model name.
    return platform.processor() or platform.machine()


def accelerator_name() -> str:
    """Name the GPU, or the host accelerator."""
    accelerator = accelerator_here()
    return "host accelerator" if accelerator is None else accelerator.name


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
