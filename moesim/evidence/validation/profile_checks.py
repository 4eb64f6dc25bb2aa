"""Checks a profile before its predictions are compared: another machine, one that
changed its speed, no calibration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from moesim.base.host_limits import available_cores
from moesim.evidence.validation.paired_runs import designs, simulate
from moesim.hwprofiles import paths
from moesim.hwprofiles.profile import PREDICTIONS, save_profile
from moesim.hwprofiles.schema import ProfileError
from moesim.traces.timeline.metrics import summarise

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from moesim.evidence.validation.paired_runs import Trial
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.schema import ModelShape

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
PRESSURE = "pressure"
PACE = "pace"
"""Names of the reports of what steps lost, of what a hypervisor gave to others, of time
in which some thread of the system waited for a core, and of the factor over time that
was divided out.
"""
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


# -- constants that are still wide -----------------------------------------------------
# Which constants of a calibration are still wide, and what that does to predictions.
#
# Each constant whose interval is wide is moved to both of its ends, and a few
# designed runs are predicted again.


WIDE: Final = 0.1
"""Half of an interval over its value, above which a constant is wide."""
_FELT: Final = 0.01
"""Change of a prediction above which a wide constant is worth a word."""
_PURPOSES: Final = (
    "CPU alone",
    "copies and GPU in turn",
    "CPU beside GPU and copies, batch",
    "all lanes",
)
_STEPS: Final = 4


class WideConstant(NamedTuple):
    """A constant that was not measured well enough.

    Attributes:
        path: its name.
        half_width: half of its interval, relative.
        effect: largest relative change of a prediction within the interval.
    """

    path: str
    half_width: float
    effect: float

    def words(self) -> str:
        """In a line."""
        known = f"known to ±{100 * self.half_width:.0f} %"
        if self.half_width > 1.0:
            known = "hardly known"
        return (
            f"{self.path} is {known}: predictions move by up to"
            f" {100 * self.effect:.1f} %"
        )


def wide_constants(profile: HardwareProfile, shape: ModelShape) -> list[WideConstant]:
    """Find constants whose intervals are wide and felt, the most felt one first.

    Args:
        profile: calibrated.
        shape: whose designed runs are predicted.
    """
    trials = [
        replace(design.trial, steps=design.trial.steps[:_STEPS])
        for design in designs(shape, quick=True)
        if design.purpose in _PURPOSES
    ]
    usual = [_seconds(trial, shape, profile) for trial in trials]
    constants = []
    policies = {trial.policy.partition("+")[0] for trial in trials}
    for path, half_width in _candidates(profile, policies):
        number = profile.numbers[path]
        assert number.interval is not None
        effect = 0.0
        for end in number.interval:
            # A rate of zero would make every operation last forever.
            value = max(end, 1e-3 * number.value)
            numbers = {**profile.numbers, path: replace(number, value=value)}
            moved = replace(profile, numbers=numbers)
            for trial, seconds in zip(trials, usual, strict=True):
                change = _seconds(trial, shape, moved) / seconds - 1.0
                effect = max(effect, abs(change))
        if effect > _FELT:
            constants.append(WideConstant(path, half_width, effect))
    return sorted(constants, key=lambda wide: -wide.effect)


def _candidates(
    profile: HardwareProfile, policies: Collection[str]
) -> list[tuple[str, float]]:
    """Paths of wide constants that runs of some policies have, with half of their
    intervals.
    """
    unused = {
        path
        for path in profile.numbers
        if path.startswith(f"{paths.COSTS}.planning.")
        and path.split(".")[2] not in policies
    }
    wide = []
    for path, number in profile.numbers.items():
        used = paths.below(path, paths.COSTS) or paths.below(path, paths.CONTENTION)
        if not used or path in unused or number.interval is None or not number.value:
            continue
        low, high = number.interval
        half_width = 0.5 * (high - low) / number.value
        if half_width > WIDE:
            wide.append((path, half_width))
    return wide


def _seconds(trial: Trial, shape: ModelShape, profile: HardwareProfile) -> float:
    return float(summarise(simulate(trial, shape, profile))["makespan_s"])
