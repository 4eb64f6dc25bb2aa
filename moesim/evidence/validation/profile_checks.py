"""Checks a profile before its predictions are compared: another machine, one that
changed its speed, no calibration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.base.host import available_cores
from moesim.hwprofiles.profile import PREDICTIONS, save_profile
from moesim.hwprofiles.schema import ProfileError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moesim.hwprofiles.profile import HardwareProfile

MOST_SPEED_CHANGE = 0.05
"""By how much the last of the identical runs of a calibration may differ from the
first.
"""
MOST_LOST = 0.03
"""Share of a step's time that other programs may take of it."""
MOST_NOISE = 0.15
"""By how much two identical runs of a calibration may differ in the median."""
DISTURBED = "disturbed"
STOLEN = "stolen"
"""Names of the reports of what steps lost, and of what a hypervisor gave to others."""
_QUIET_LOAD = 0.5
"""Load average up to which other programs do not disturb a measurement."""
_COMPARED_VERSIONS = ("cpu", "accelerator", "torch")


def is_calibrated(profile: HardwareProfile) -> bool:
    """Tell whether a profile was learned from runs through the executor."""
    # Only these repeat runs or are held against some.
    return "noise_floor" in profile.fit or PREDICTIONS in profile.fit


def speed_change(profile: HardwareProfile) -> str | None:
    """Describe how the machine changed its speed while a profile was calibrated; None
    up to `MOST_SPEED_CHANGE`.
    """
    drift = profile.fit.get("drift", {}).get("residual_median", 0.0)
    if drift <= MOST_SPEED_CHANGE:
        return None
    return (
        f"the machine changed its speed by {100 * drift:.0f} % while profile"
        f" {profile.name} was calibrated, so every time may be off by as much;"
        " calibrate again"
    )


def doubts_of(profile: HardwareProfile) -> list[str]:
    """Say why predictions made with a calibration cannot be trusted; empty if they can.

    Each reason is evidence from the calibration itself, with its limit.
    """
    limits = (
        (
            DISTURBED,
            MOST_LOST,
            "other programs took {} of half of the steps even where they took least",
        ),
        (STOLEN, MOST_LOST, "the hypervisor gave {} of the cores' time to others"),
        ("noise_floor", MOST_NOISE, "identical runs differ by {}"),
        ("drift", MOST_NOISE, "the machine changed its speed by {} meanwhile"),
    )
    doubts = []
    for name, most, words in limits:
        missed = profile.fit.get(name, {}).get("residual_median", 0.0)
        if missed > most:
            percent = f"{100 * missed:.0f} %"
            doubts.append(f"{words.format(percent)} (at most {100 * most:.0f} %)")
    return doubts


def save_trusted(
    profile: HardwareProfile,
    target: Path,
    doubts: Sequence[str],
    way_out: str,
    *,
    force: bool,
) -> None:
    """Write a profile unless there are doubts; with `force` all the same.

    Raises:
        ProfileError: there are some; it begins its way out with `way_out`.
    """
    if doubts and not force:
        raise ProfileError(
            f"{target}: not written, as its predictions cannot be trusted:"
            f" {'; '.join(doubts)}; {way_out} while nothing else runs, or write it all"
            " the same with --force"
        )
    save_profile(profile, target)


def machine_differences(profile: HardwareProfile) -> list[str]:
    """Describe in what a profile's machine differs from this one: processor,
    accelerator, cores; empty where it does not.

    Versions of libraries are named, too, since they change how fast products are.
    """
    # The very procedure that wrote the profile's versions.
    from moesim.runtime.measure.profile import versions  # noqa: PLC0415 - torch

    local_versions = versions()
    differences = [
        f"{key}: the profile's is {profile.versions.get(key, 'unknown')}, this"
        f" machine's is {local_versions[key]}"
        for key in _COMPARED_VERSIONS
        if profile.versions.get(key) != local_versions[key]
    ]
    cores = available_cores()
    if profile.cores != cores:
        differences.append(
            f"cores: the profile's are {profile.cores}, this machine's are {cores}"
        )
    return differences


def warnings_of(profile: HardwareProfile, load: float) -> list[str]:
    """Return what a reader of a validation should know about profile and machine.

    Args:
        profile: that predicted.
        load: the machine's load average before the first run.
    """
    warnings = [
        f"profile {profile.name} is another machine's: {difference}"
        for difference in machine_differences(profile)
    ]
    if not is_calibrated(profile):
        warnings.append(
            f"profile {profile.name} was not calibrated through the executor, as"
            " `moesim calibrate hw.toml` does"
        )
    change = speed_change(profile)
    if change is not None:
        warnings.append(change)
    if load > _QUIET_LOAD:
        warnings.append(
            f"the machine was not quiet: load average {load:.1f} when it began; times"
            " scatter by that"
        )
    return warnings
