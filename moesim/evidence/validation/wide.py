"""Which constants of a calibration are still wide, and what that does to predictions.

Each constant whose interval is wide is moved to both of its ends, and a few designed
runs are predicted again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from moesim.evidence.validation.paired_runs import designs, simulate
from moesim.hwprofiles import paths
from moesim.traces.timeline.metrics import summarise

if TYPE_CHECKING:
    from collections.abc import Collection

    from moesim.evidence.validation.paired_runs import Trial
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.schema import ModelShape

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
        return (
            f"{self.path} is known to ±{100 * self.half_width:.0f} %: predictions move"
            f" by up to {100 * self.effect:.1f} %"
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
