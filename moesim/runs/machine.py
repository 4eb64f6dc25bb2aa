"""The machine that real runs happen on: its profile, and the device of its GPU lane."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from moesim.hwprofiles.errors import ProfileError
from moesim.hwprofiles.profile import HardwareProfile, default_profile, load_profile
from moesim.runtime.errors import RuntimeFault
from moesim.traces.files import ScratchFolder

if TYPE_CHECKING:
    from pathlib import Path


def cores() -> int:
    """Cores that this process may use."""
    # macOS and Windows have no affinity masks.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def this_machine() -> tuple[str, int]:
    """The kind of accelerator that is here, and how many cores this process may use."""
    from moesim.runtime.accelerators.here import (  # noqa: PLC0415 - torch
        accelerator_here,
    )

    accelerator = accelerator_here()
    return "host" if accelerator is None else accelerator.kind, cores()


def machine_profile(hw: str | Path | HardwareProfile | None) -> HardwareProfile:
    """A profile of this machine: the one that is named, ``hw.toml``, or one measured
    now in some ten seconds.

    Raises:
        ProfileError: the profile describes another kind of machine, more cores than
            there are, or several GPUs.
    """
    if hw is None:
        profile = default_profile()
        # A profile that ships describes another machine.
        if profile.kind != "measured":
            profile = _measured_now()
    else:
        profile = hw if isinstance(hw, HardwareProfile) else load_profile(hw)

    # Lanes become threads here; more of them than cores would measure waiting.
    kind, count = this_machine()
    if profile.accelerator != kind or profile.cores > count or profile.gpus != 1:
        raise ProfileError(
            f"profile {profile.name}: expected this machine (accelerator {kind},"
            f" {count} cores, one GPU lane), found accelerator {profile.accelerator},"
            f" {profile.cores} cores, {profile.gpus} GPU lanes; measure it with `moesim"
            " profile --out hw.toml`"
        )
    return profile


def _measured_now() -> HardwareProfile:
    from moesim.runtime.measure.profile import measure  # noqa: PLC0415 - torch

    with ScratchFolder() as folder:
        return measure(None, folder / "this-machine.toml", quick=True)


def device_of(profile: HardwareProfile) -> Any:
    """The device that the GPU lane runs on.

    Raises:
        RuntimeFault: torch finds no accelerator any more.
    """
    from moesim.runtime.accelerators.here import (  # noqa: PLC0415 - torch
        accelerator_here,
    )
    from moesim.runtime.executor.host_device import HostDevice  # noqa: PLC0415 - torch
    from moesim.runtime.executor.stream_device import (  # noqa: PLC0415 - torch
        StreamDevice,
    )

    if profile.accelerator == "host":
        return HostDevice()
    accelerator = accelerator_here()
    if accelerator is None:
        raise RuntimeFault(
            f"profile {profile.name}: expected an accelerator ({profile.accelerator}),"
            " torch finds none; use a profile of this machine"
        )
    return StreamDevice(accelerator)
