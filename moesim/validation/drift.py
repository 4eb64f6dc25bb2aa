"""How fast is this machine right now? Four short designed runs, made during a
calibration and whenever asked again.

A profile is true of the machine as it was when it was calibrated. Other tenants, heat
and clocks change its speed by several percent within minutes, and no model can know
that. The same runs, then and now, tell how much of an error is the machine's and how
much the model's. There are two sizes of experts, since a machine whose memory has
become slow takes longer for what no cache holds only; each with and without the SSD;
and the seconds are told apart by term, since what slows the dense part down may leave
the lanes alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from moesim.analysis.time_breakdown import TERMS, terms_by_step
from moesim.hwprofiles.schema import Quantity
from moesim.runs.memory import MemoryOptions
from moesim.validation.calibration_runs import ROUTED, drawn_steps
from moesim.validation.paired_runs import Bench, Trial

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack
    from pathlib import Path

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.schema import ModelShape

SHAPES: Final = {"": "olmoe-1b-7b/2", "_small": "olmoe-1b-7b/4"}
"""Whose sizes the experts of reference runs have."""
_POLICY: Final = "static-threshold:tokens=2+lru"
"""Uses all lanes, and decides by counting tokens: what it does is the same whatever the
profile says.
"""
_EVERY = 12
"""Other runs after which the reference runs are made once more."""
_DRAWS = 200
"""Resamplings of runs, for the interval."""


class _Run(NamedTuple):
    """One of the reference runs, and what its repetitions took, by term float64
    [steps].
    """

    bench: Bench
    trial: Trial
    seconds: list[dict[str, np.ndarray]]


class Reference:
    """The reference runs on this machine, made again and again while something else is
    measured.

    Args:
        profile: lanes and workers of this machine, and the costs that policies are
            told.
        dtype: of the weights.
        stores: folder for the experts.
        benches: closes what is opened here.
        shapes: whose sizes the experts have, by what a profile calls them.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        dtype: str,
        stores: Path,
        benches: ExitStack,
        shapes: Mapping[str, str] = SHAPES,
    ) -> None:
        from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415 - torch

        self._profile = profile
        self._asked = 0
        self.runs: dict[str, _Run] = {}
        steps = drawn_steps(batch=(4, 1), prompt=0, decode=8, seed=7)
        for size, spec in shapes.items():
            shape = shape_for(ROUTED, spec, dtype)
            bench = benches.enter_context(
                Bench(shape, profile, dtype=dtype, store=stores / f"reference{size}")
            )
            for tier, host_bytes in (
                ("memory", None),
                ("ssd", sum(shape.expert_bytes) * shape.experts // 2),
            ):
                trial = Trial(
                    _POLICY,
                    MemoryOptions(cache_ratio=0.3, host_memory_bytes=host_bytes),
                    steps,
                )
                # Afterwards nothing in memory is new any more.
                bench.run(trial, profile)
                self.runs[tier + size] = _Run(bench, trial, [])

    def in_turn(self) -> None:
        """Called between other runs: make the reference runs before the first of them,
        and before every twelfth.
        """
        if self._asked % _EVERY == 0:
            for bench, trial, seconds in self.runs.values():
                seconds.append(terms_by_step(bench.run(trial, self._profile)))
        self._asked += 1

    def found(self, date: str) -> dict[str, Quantity]:
        """Seconds per step of each term of each run so far, by path in a profile."""
        return {
            _path(name, term): _quantity(
                np.array([one[term] for one in run.seconds]), date
            )
            for name, run in self.runs.items()
            for term in TERMS
        }


def drift(
    then: HardwareProfile, now: Mapping[str, Quantity], run: str
) -> dict[str, float] | None:
    """By how much longer a reference run takes now than when a profile was calibrated.

    Args:
        then: the profile.
        now: as `Reference.found` has it.
        run: which, as `nearest` names it.

    Returns:
        By term (`moesim.analysis.time_breakdown.TERMS`): seconds now over seconds then,
            minus one. None where one of both is unknown.
    """
    pairs = {
        term: (now.get(_path(run, term)), then.numbers.get(_path(run, term)))
        for term in TERMS
    }
    if any(
        one is None or not known or not known.value for one, known in pairs.values()
    ):
        return None
    return {
        term: one.value / known.value - 1.0
        for term, (one, known) in pairs.items()
        if one and known
    }


def _path(run: str, term: str) -> str:
    return f"reference.{run}.{term}_s"


def nearest(shape: ModelShape, dtype: str, *, ssd: bool) -> str:
    """Name the reference run that is most like runs of a shape: with or without SSD,
    the nearest size of experts.
    """
    from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415 - torch

    def apart(size: str) -> float:
        known = shape_for(ROUTED, SHAPES[size], dtype).max_expert_bytes
        return abs(float(np.log(shape.max_expert_bytes / known)))

    return f"{'ssd' if ssd else 'memory'}{min(SHAPES, key=apart)}"


def with_reference(
    profile: HardwareProfile, found: Mapping[str, Quantity]
) -> HardwareProfile:
    """Keep reference runs in the profile that was calibrated beside them."""
    return replace(profile, numbers={**profile.numbers, **found})


def _quantity(steps_s: np.ndarray, date: str) -> Quantity:
    """Mean over steps of the median over runs, of seconds float64 [runs, steps]."""
    rng = np.random.default_rng(0)
    drawn = [
        _seconds(steps_s[rng.integers(0, len(steps_s), len(steps_s))])
        for _ in range(_DRAWS)
    ]
    value, (low, high) = _seconds(steps_s), np.quantile(drawn, (0.025, 0.975))
    return Quantity(
        value,
        "measured",
        f"{_POLICY}, batches of four and one; of each step the median of all runs",
        samples=len(steps_s),
        spread=float(np.subtract(*np.quantile(steps_s.mean(axis=1), (0.75, 0.25)))),
        date=date,
        interval=(min(value, float(low)), max(value, float(high))),
    )


def _seconds(steps_s: np.ndarray) -> float:
    return float(np.median(steps_s, axis=0).mean())
