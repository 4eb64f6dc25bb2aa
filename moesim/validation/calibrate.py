"""Calibrate this machine: a designed set of short runs through the executor, then a
fit.

Each lane alone, each pair, all together; two sizes of experts; one token and many; with
and without the SSD; every assignment policy's planning. Routing is drawn, so that no
trace which a prediction is later compared with takes part; this module and
`hwprofiles/calibration/fit_runs.py` know of no validation (`tests/test_separation.py`
holds that).
"""

from __future__ import annotations

import datetime as dt
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles.calibration.estimates import FitReport
from moesim.hwprofiles.calibration.fit_runs import DesignedRun
from moesim.hwprofiles.calibration.fit_runs import calibrate as fit
from moesim.hwprofiles.calibration.unobserved import profile_entries
from moesim.hwprofiles.profile import HardwareProfile, save_profile
from moesim.runs.measured import machine_profile
from moesim.validation.calibration_runs import ROUTED, Design, designs
from moesim.validation.drift import Reference, with_reference
from moesim.validation.paired_runs import (
    Bench,
    Trial,
    figures,
    simulate,
    step_lengths,
    system_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline

SHAPES = ("olmoe-1b-7b/2", "olmoe-1b-7b/4")
"""Whose sizes the designed runs' experts have: two, since only different bytes separate
overhead from bandwidth.
"""

_PASSES = 5
_QUICK_PASSES = 3
"""How often all designed runs are run."""


def learn(
    runs: Sequence[tuple[ModelShape, Trial, Timeline]],
    base: HardwareProfile,
    *,
    date: str,
    name: str,
    seed: int = 0,
) -> HardwareProfile:
    """Put what finished runs say into a profile of the machine they ran on."""
    designed = [
        DesignedRun(
            timeline,
            shape,
            system_of(trial.policy).assignment,
            _contexts(trial.steps),
            base.workers,
            kept,
        )
        for (shape, trial, timeline), kept in zip(runs, _undisturbed(runs), strict=True)
    ]
    found = fit(designed, date=date, seed=seed)
    # distributions of operations in isolation are not those of runs, and their farthest
    # outliers would be drawn
    kept = {path: replace(curve, quantiles=()) for path, curve in base.curves.items()}
    return replace(
        base,
        name=name,
        kind="measured",
        date=date,
        numbers=profile_entries(found.numbers, base.numbers),
        curves={**kept, **found.curves},
        fit={**base.fit, **found.fit},
    )


def _undisturbed(
    runs: Sequence[tuple[ModelShape, Trial, Timeline]],
) -> list[np.ndarray]:
    """Choose, for every step of a trial, the run whose step took the median of its
    repetitions: bool [steps] by run.

    Other tenants of a machine come in bursts of half a second in which everything takes
    up to 1.6 times as long; they are no property of it. Of two repetitions the shorter
    counts.
    """
    repeated: dict[tuple[str, int], list[int]] = {}
    for number, (shape, trial, _) in enumerate(runs):
        repeated.setdefault((shape.name, id(trial)), []).append(number)
    chosen: list[np.ndarray] = [np.empty(0)] * len(runs)
    for numbers in repeated.values():
        seconds = np.array([step_lengths(runs[number][2]) for number in numbers])
        median = np.argsort(seconds, axis=0)[(len(numbers) - 1) // 2]
        for place, number in enumerate(numbers):
            chosen[number] = median == place
    return chosen


def _contexts(steps: Sequence[RoutedStep]) -> list[int]:
    return [step.context_tokens for step in steps]


def calibrate(
    out: str | Path,
    *,
    shapes: Sequence[str] = SHAPES,
    quick: bool = False,
    hw: str | Path | HardwareProfile | None = None,
    dtype: str | None = None,
    stores: Path | None = None,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> HardwareProfile:
    """Calibrate this machine and write its profile.

    Args:
        out: the TOML file to write.
        shapes: whose sizes the experts have, largest first; see
            `moesim.traces.models.model_shape`.
        quick: shorter runs.
        hw: profile of this machine to start from; measured now, in some ten seconds,
            when None.
        dtype: of the weights; float32 on the host accelerator, bfloat16 on CUDA when
            None.
        stores: folder for the experts' stores; a temporary one when None.
        seed: of the drawn routing.
        progress: called with what is done next and the share that is done.

    Raises:
        ProfileError, TraceError, StoreError, RuntimeFault: in one line.
    """
    from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415
    from moesim.runtime.measure.profile import measure  # noqa: PLC0415 - torch

    tell = progress or (lambda _what, _done: None)
    target = Path(out)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=stores) as folder, ExitStack() as benches:
        tell("the machine's lanes", 0.0)
        base = machine_profile(
            hw
            if hw is not None
            else measure(None, Path(folder) / "base.toml", quick=True)
        )
        chosen = dtype or ("bfloat16" if base.accelerator == "cuda" else "float32")
        todo: list[tuple[Bench, Design]] = []
        for number, spec in enumerate(shapes):
            shape = shape_for(ROUTED, spec, chosen)
            bench = benches.enter_context(
                Bench(shape, base, dtype=chosen, store=Path(folder) / str(number))
            )
            found = designs(shape, quick=quick, seed=seed)
            # Nothing in memory is new any more.
            bench.run(found[-1].trial, base, seed=seed)
            todo += [(bench, design) for design in found]
        reference = Reference(base, chosen, Path(folder), benches)
        runs: list[tuple[ModelShape, Trial, Timeline]] = []
        passes = _QUICK_PASSES if quick else _PASSES
        # Forth and back: what drifts meanwhile hits all alike.
        for number in range(passes):
            for bench, design in todo[::-1] if number % 2 else todo:
                tell(
                    f"{bench.shape.name}: {design.purpose}",
                    len(runs) / (passes * len(todo)),
                )
                reference.in_turn()
                runs.append(
                    (
                        bench.shape,
                        design.trial,
                        bench.run(design.trial, base, seed=seed),
                    )
                )
    tpot_s = np.array([figures(timeline)["tpot_s"] for _, _, timeline in runs]).reshape(
        passes, -1
    )
    tpot_s[1::2] = tpot_s[1::2, ::-1]
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    profile = learn(runs, base, date=date, name=target.stem, seed=seed)
    profile = with_reference(profile, reference.found(date))
    profile = replace(
        profile,
        description=(
            f"{base.description.partition(';')[0]}; calibrated by {len(todo)} designed"
            f" runs, {passes} times each, with {', '.join(shapes)} ({chosen}); load"
            f" average {load:.1f} when it began"
        ),
        fit={**profile.fit, **_stability(tpot_s)},
        where=target.name,
    )
    save_profile(profile, target)
    tell("done", 1.0)
    return profile


def differences(
    one: HardwareProfile,
    other: HardwareProfile,
    shapes: Sequence[str] = SHAPES,
    dtype: str = "float32",
) -> list[float]:
    """Say by how much predictions of the designed runs by one profile differ from those
    by another.

    Args:
        one, other: profiles with the same lanes, such as two calibrations of one
            machine.
        shapes: as in `calibrate`.
        dtype: of the weights.

    Returns:
        Seconds per output token by `other` over that by `one`, minus one, for each
        design.
    """
    from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415 - torch

    found = []
    for spec in shapes:
        shape = shape_for(ROUTED, spec, dtype)
        for design in designs(shape, quick=True, seed=1):
            first_s, second_s = (
                figures(simulate(design.trial, shape, hw))["tpot_s"]
                for hw in (one, other)
            )
            found.append(float(second_s / first_s - 1.0))
    return found


def _stability(tpot_s: np.ndarray) -> dict[str, dict[str, float]]:
    """Noise floor and drift of identical runs: by how much any two differ, and all last
    ones from all first ones.

    Args:
        tpot_s: seconds per output token, float64 [repetitions, runs].
    """
    count = len(tpot_s)
    missed = np.abs(
        np.concatenate(
            [
                tpot_s[i] / tpot_s[j] - 1.0
                for i in range(count)
                for j in range(i + 1, count)
            ]
        )
    )
    together = abs(float(np.median(tpot_s[-1] / tpot_s[0])) - 1.0)
    reports = {
        "noise_floor": FitReport(
            tpot_s.size, len(missed), float(np.median(missed)), float(np.max(missed))
        ),
        "drift": FitReport(tpot_s.size, tpot_s.shape[1], together, together),
    }
    return {
        name: {key: float(value) for key, value in report._asdict().items()}
        for name, report in reports.items()
    }
