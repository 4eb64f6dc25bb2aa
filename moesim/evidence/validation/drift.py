"""Measures by how much a machine changed its speed: four short reference runs, made
during a calibration and again during a validation.

A profile is true of the machine as it was when it was calibrated. Other tenants, heat
and clocks change its speed by several percent within minutes, and no model can know
that. The same runs, then and now, tell how much of an error is the machine's and how
much the model's. There are two sizes of experts, since a machine whose memory has
become slow takes longer for what no cache holds only; each with and without the SSD;
and the seconds are split by term, since what slows the dense part down may leave the
lanes as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pandas as pd

from moesim.evidence.validation.paired_runs import (
    ROUTED,
    Trial,
    TrialRunner,
    drawn_steps,
)
from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    Resampled,
    Singles,
    interquartile_range,
    pace_at_times,
    pace_of_runs,
)
from moesim.hwprofiles.schema import REFERENCE_TERMS, Quantity
from moesim.runs.config import MemoryOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack
    from pathlib import Path

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline

TERMS = REFERENCE_TERMS
"""Parts of a run's time; profiles keep those of reference runs under the same names."""
SHAPES: Final = {"": "olmoe-1b-7b/2", "_small": "olmoe-1b-7b/4"}
"""Ending of a reference run's name -> whose sizes its experts have; see
`moesim.hwprofiles.schema.REFERENCE_RUNS`.
"""
_POLICY: Final = "static-threshold:tokens=2+lru"
"""Uses all lanes, and decides by counting tokens: what it does is the same whatever the
profile states.
"""
_EVERY = 12
"""Other runs after which the reference runs are made once more."""


class ReferenceRun(NamedTuple):
    """One of the reference runs, and what its repetitions took.

    Attributes:
        runner: makes it.
        trial: what is run.
        seconds: by repetition and term, float64 [steps].
    """

    runner: TrialRunner
    trial: Trial
    seconds: list[dict[str, np.ndarray]]


class ReferenceRuns:
    """The reference runs on this machine, repeated while something else is measured.

    Args:
        profile: lanes and workers of this machine, and the costs that policies see.
        dtype: of the weights.
        stores: folder for the experts.
        open_runners: closes what is opened here.
        shapes: whose sizes the experts have, as `SHAPES`.

    Attributes:
        runs: by name.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        dtype: str,
        stores: Path,
        open_runners: ExitStack,
        shapes: Mapping[str, str] = SHAPES,
    ) -> None:
        from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415 - torch

        self._profile = profile
        self._other_runs = 0
        self.runs: dict[str, ReferenceRun] = {}
        # Fixed seed: the same routing in every calibration and validation.
        steps = drawn_steps(batch=(4, 1), prompt=0, decode=8, seed=7)
        for size, spec in shapes.items():
            shape = shape_for(ROUTED, spec, dtype)
            runner = open_runners.enter_context(
                TrialRunner(
                    shape,
                    profile,
                    dtype=dtype,
                    store=stores / f"reference{size}",
                )
            )
            half_bytes = shape.routed_bytes // 2
            for tier, host_bytes in (("memory", None), ("ssd", half_bytes)):
                memory = MemoryOptions(
                    cache_ratio=0.3,
                    host_memory_bytes=host_bytes,
                )
                trial = Trial(_POLICY, memory, steps)
                # The first run meets memory that was never written; it does not count.
                runner.run(trial, profile)
                self.runs[tier + size] = ReferenceRun(runner, trial, [])

    def run_if_due(self) -> None:
        """Make the reference runs before the first of other runs, and before every
        twelfth; called before each of these.
        """
        if self._other_runs % _EVERY == 0:
            for run in self.runs.values():
                timeline = run.runner.run(run.trial, self._profile)
                run.seconds.append(terms_by_step(timeline))
        self._other_runs += 1

    @property
    def is_made(self) -> bool:
        """Whether the reference runs were made at all."""
        return all(run.seconds for run in self.runs.values())

    def pace(self) -> np.ndarray:
        """Return by what factor the machine took longer than usual during each of the
        other runs so far: float64 [other runs].
        """
        # A step's terms add up to its length.
        seconds = [
            [sum(terms.values()) for terms in run.seconds] for run in self.runs.values()
        ]
        at_times = pace_at_times(np.array(seconds).swapaxes(0, 1))
        return pace_of_runs(at_times, _EVERY, self._other_runs)

    def quantities(self, date: str) -> dict[str, Quantity]:
        """Return seconds per step of each term of each run so far, by path in a
        profile.
        """
        quantities = {}
        for name, run in self.runs.items():
            for term in TERMS:
                repetitions = [seconds[term] for seconds in run.seconds]
                path = paths.reference(name, term)
                quantities[path] = _quantity(np.array(repetitions), date)
        return quantities


def has_reference_runs(profile: HardwareProfile) -> bool:
    """Tell whether a profile was calibrated beside reference runs."""
    return any(paths.below(path, paths.REFERENCE) for path in profile.numbers)


def drift(
    calibrated: HardwareProfile, now: Mapping[str, Quantity], run: str
) -> dict[str, float] | None:
    """Return by how much longer a reference run takes now than when a profile was
    calibrated.

    Args:
        calibrated: the profile.
        now: as `ReferenceRuns.quantities` has it.
        run: which, as `nearest_run` names it.

    Returns:
        By term (`TERMS`): seconds now over seconds
            then, minus one. None where one of both is unknown.
    """
    drift_of = {}
    for term in TERMS:
        path = paths.reference(run, term)
        current = now.get(path)
        earlier = calibrated.numbers.get(path)
        # Half a drift would be taken for a whole one, so it is all terms or none.
        if current is None or earlier is None or not earlier.value:
            return None
        drift_of[term] = current.value / earlier.value - 1.0
    return drift_of


def nearest_run(shape: ModelShape, dtype: str, *, ssd: bool) -> str:
    """Name the reference run that is most like runs of a shape: with or without SSD,
    the nearest size of experts.
    """
    from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415 - torch

    def distance(size: str) -> float:
        # By ratio: what caches hold of an expert decides how alike two sizes are.
        reference = shape_for(ROUTED, SHAPES[size], dtype)
        ratio = shape.max_expert_bytes / reference.max_expert_bytes
        return abs(float(np.log(ratio)))

    tier = "ssd" if ssd else "memory"
    return tier + min(SHAPES, key=distance)


def _quantity(steps_s: np.ndarray, date: str) -> Quantity:
    """Mean over steps of the median over runs, of seconds float64 [runs, steps]."""
    runs = np.arange(len(steps_s))
    (estimate,) = Resampled.of(
        lambda rows: _seconds(steps_s[rows]),
        Singles(np.zeros_like(runs)),
        # So that every term's interval comes from the same resampled runs.
        np.random.default_rng(0),
    ).estimates()
    return Quantity(
        estimate.value,
        "measured",
        f"{_POLICY}, batches of four and one; of each step the median of all runs",
        samples=len(runs),
        # Of whole runs, which a single disturbance moves.
        spread=interquartile_range(steps_s.mean(axis=1)),
        date=date,
        interval=estimate.interval,
    )


def _seconds(steps_s: np.ndarray) -> float:
    # Medians by step first: a burst of other tenants is shorter than a run.
    medians_s = np.median(steps_s, axis=0)
    return float(medians_s.mean())


# -- terms that add up to a run's makespan, step by step -----------------------------


def terms(timeline: Timeline) -> dict[str, float]:
    """Return seconds of each of `TERMS`; their sum is the makespan."""
    by_step = terms_by_step(timeline)
    return {name: float(seconds.sum()) for name, seconds in by_step.items()}


def terms_by_step(timeline: Timeline) -> dict[str, np.ndarray]:
    """Return seconds of each of `TERMS` in each forward pass, from the end of the one
    before to its own: float64 [steps].

    ``lanes`` is from the end of a layer step's planning to the end of its last
    operation; ``between`` is all the rest: the request for a plan, the join, and waking
    the device.
    """
    spans = timeline.frame()
    passes = timeline.step_frame().set_index("step")
    seconds = spans["end_s"] - spans["start_s"]
    kind = spans["kind"]
    # One after another on one lane, so their seconds simply add up.
    by_term = {
        name: seconds[kind == of].groupby(spans["step"]).sum()
        for name, of in (("dense", "dense"), ("planning", "plan"))
    }

    # Prefetches are not waited for, and the head's span belongs to no layer.
    work = kind.isin(("compute", "fetch", "read")) & (spans["layer"] >= 0)
    last_s, plan_end_s = (
        spans[chosen].groupby(["step", "layer"])["end_s"].max()
        for chosen in (work, kind == "plan")
    )
    worked_s = (last_s - plan_end_s).clip(lower=0.0)
    by_term["lanes"] = worked_s.groupby("step").sum()

    # Whatever is left of a step; so the terms add up by construction.
    table = pd.DataFrame(by_term, passes.index).fillna(0.0)
    first_s = passes["start_s"].iloc[0]
    steps_s = np.diff(passes["end_s"], prepend=first_s)
    table["between"] = steps_s - table.sum(axis=1)
    return {name: table[name].to_numpy() for name in TERMS}


def step_seconds(timeline: Timeline) -> np.ndarray:
    """Return seconds from each step's end to the next one's, float64 [steps - 1]: the
    gaps of which TPOT is the mean.
    """
    return np.diff(timeline.step_frame()["end_s"])
