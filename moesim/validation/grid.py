"""Validate the simulator: the same grid really run and simulated, side by side in time,
and compared cell by cell.

Cells take turns in a drawn order, each run for real and simulated right after; when all
are done they are run again in reversed order, and so on: what drifts hits all cells
alike, and repetitions of one lie as far apart as the grid is long. Reference runs in
between tell how fast the machine is now, and so how much of an error is its drift since
it was calibrated. The profile is taken as it is: nothing here fits anything, and
calibration (`moesim/validation/calibrate.py`) does not know this module.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.analysis.time_breakdown import TERMS, step_seconds, terms, terms_by_step
from moesim.hwprofiles.costs import Costs
from moesim.runs.measured import machine_profile
from moesim.runs.memory import MemoryOptions
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import Trace, open_trace
from moesim.validation.drift import Reference, drift, nearest
from moesim.validation.paired_runs import (
    Bench,
    Trial,
    figures,
    foreign,
    simulate,
    system_of,
    unsteady,
)
from moesim.validation.results import FIGURES, Cell, Place, Validation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.planner.plan import Policies
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline

STEPS = 16
REPLICATIONS = 10
"""Simulations with drawn operation times, whose mean is the prediction."""


def validate(
    traces: Sequence[str | Path | Trace],
    *,
    policies: Sequence[str],
    cache_ratios: Sequence[float],
    batches: Sequence[int],
    hw: str | Path | HardwareProfile | None = None,
    shapes: Sequence[str | None] = (None,),
    host_ratios: Sequence[float] = (1.0,),
    steps: int = STEPS,
    repetitions: int = 5,
    replications: int = REPLICATIONS,
    dtype: str | None = None,
    stores: Path | None = None,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Validation:
    """Run a grid for real and simulated, and compare.

    Args:
        traces: routing.
        policies: each as ``assignment+cache+prefetch``, parts left out from the right.
        cache_ratios: share of experts in the GPU cache.
        batches: sequences that run together.
        hw: the calibrated profile of this machine.
        shapes: whose sizes the experts have; None keeps the trace's.
        host_ratios: share of experts in host memory; the rest is read from the SSD.
        steps: forward passes of each run.
        repetitions: of each real run, every other one in reversed order.
        replications: simulations with drawn times; with 0 the means are the prediction.
        dtype, stores: as in `moesim.validation.calibrate.calibrate`.
        seed: of policies that draw, and of drawn times.
        progress: called with the cell that runs and the share that is done.

    Raises:
        TraceError, ProfileError, PolicyError, StoreError, RuntimeFault: in one line.
    """
    from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415 - torch

    profile = machine_profile(hw)
    begin = time.time()
    load = os.getloadavg()[0]
    chosen = dtype or ("bfloat16" if profile.accelerator == "cuda" else "float32")
    opened = [one if isinstance(one, Trace) else open_trace(one) for one in traces]
    with tempfile.TemporaryDirectory(dir=stores) as folder, ExitStack() as benches:
        grid = _Grid(profile, seed, replications)
        for trace, spec in product(opened, shapes):
            shape = shape_for(trace.shape, spec, chosen)
            if shape not in grid.benches:
                bench = Bench(
                    shape,
                    profile,
                    dtype=chosen,
                    store=Path(folder) / str(len(grid.benches)),
                )
                grid.benches[shape] = benches.enter_context(bench)
            for rest in product(policies, cache_ratios, host_ratios, batches):
                grid.add(
                    shape,
                    Place(trace.path.name, shape.name, *rest),
                    _trial(trace, shape, *rest, steps=steps),
                )
        reference = None
        if any(path.startswith("reference.") for path in profile.numbers):
            reference = Reference(profile, chosen, Path(folder), benches)
        cells = grid.walk(
            repetitions, reference, progress or (lambda _what, _done: None)
        )
    now = (
        {}
        if reference is None
        else reference.found(time.strftime("%Y-%m-%d", time.gmtime(begin)))
    )
    for cell, shape in cells:
        cell.drift = drift(
            profile, now, nearest(shape, chosen, ssd=cell.place.host_ratio < 1)
        )
    config = {
        "hw": profile.name,
        "hw_digest": profile.digest,
        "hw_date": profile.date,
        "machine": profile.versions.get("cpu"),
        "traces": {trace.path.name: trace.digest() for trace in opened},
        "shapes": [spec or "own" for spec in shapes],
        "policies": list(policies),
        "cache_ratios": list(cache_ratios),
        "host_ratios": list(host_ratios),
        "batches": list(batches),
        "steps": steps,
        "repetitions": repetitions,
        "replications": replications,
        "dtype": chosen,
        "seed": seed,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begin)),
        "seconds": round(time.time() - begin),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "reference_s": {path: quantity.value for path, quantity in now.items()},
        "profile_noise_floor": (
            profile.fit.get("noise_floor", {}).get("residual_median")
        ),
    }
    return Validation([cell for cell, _ in cells], config, warnings_of(profile, load))


def warnings_of(profile: HardwareProfile, load: float) -> list[str]:
    """What a reader of the errors should know about profile and machine."""
    said = [
        f"profile {profile.name} is another machine's: {words}"
        for words in foreign(profile)
    ]
    if "noise_floor" not in profile.fit:
        said.append(
            f"profile {profile.name} was not calibrated through the executor; `moesim"
            " calibrate --out hw.toml`"
        )
    if (words := unsteady(profile)) is not None:
        said.append(words)
    if load > 0.5:
        said.append(
            f"the machine was not quiet: load average {load:.1f} when it began; times"
            " scatter by that"
        )
    return said


def _trial(
    trace: Trace,
    shape: ModelShape,
    policy: str,
    cache_ratio: float,
    host_ratio: float,
    batch: int,
    *,
    steps: int,
) -> Trial:
    needed = tuple(
        dict.fromkeys(
            column
            for one in system_of(policy).build(gpus=1, host_cache=None).all()
            for column in one.needs
        )
    )
    trace.require(needed, f"policy {policy!r}")
    everything = sum(shape.expert_bytes) * shape.experts
    host = None if host_ratio >= 1 else int(host_ratio * everything)
    return Trial(
        policy,
        MemoryOptions(cache_ratio=cache_ratio, host_memory_bytes=host),
        list(compose(trace, batch=batch, steps=steps, columns=needed)),
    )


def timing_free(policies: Policies) -> bool:
    """Tell whether no decision can depend on when copies land: no prefetch, no cache
    that swaps by its own clock.
    """
    replaces = any(cache.replaces for cache in policies.caches)
    return not policies.prefetch.prefetches and not replaces


class _Grid:
    """All cells with their trials, and the benches they run on."""

    def __init__(self, profile: HardwareProfile, seed: int, replications: int) -> None:
        self._profile = profile
        self._seed = seed
        self._replications = replications
        self.benches: dict[ModelShape, Bench] = {}
        self._todo: list[tuple[Cell, ModelShape, Trial]] = []

    def add(self, shape: ModelShape, place: Place, trial: Trial) -> None:
        """Put in one cell."""
        built = system_of(trial.policy).build(gpus=1, host_cache=None)
        cell = Cell(
            place, timing_free(built), bool(Costs(self._profile, shape).extrapolated)
        )
        self._todo.append((cell, shape, trial))

    def walk(
        self,
        repetitions: int,
        reference: Reference | None,
        tell: Callable[[str, float], None],
    ) -> list[tuple[Cell, ModelShape]]:
        """Run all in a drawn order with simulations and reference runs in between, then
        back, and so on.
        """
        total = len(self._todo) * repetitions
        new = set(self.benches)
        drawn = [
            self._todo[number]
            for number in np.random.default_rng(self._seed).permutation(len(self._todo))
        ]
        for repetition in range(repetitions):
            order = drawn[::-1] if repetition % 2 else drawn
            for done, (cell, shape, trial) in enumerate(order):
                tell(_words(cell.place), (repetition * len(self._todo) + done) / total)
                if reference is not None:
                    reference.in_turn()
                bench = self.benches[shape]
                if shape in new:  # afterwards nothing in memory is new any more
                    bench.run(trial, self._profile, seed=self._seed)
                    new.discard(shape)
                self._measure(cell, bench, trial)
                if not repetition:
                    self._predict(cell, shape, trial)
        return [(cell, shape) for cell, shape, _ in self._todo]

    def _measure(self, cell: Cell, bench: Bench, trial: Trial) -> None:
        timeline = bench.run(trial, self._profile, seed=self._seed)
        cell.measured.append(_chosen(timeline))
        cell.steps_s.append(step_seconds(timeline).tolist())

    def _predict(self, cell: Cell, shape: ModelShape, trial: Trial) -> None:
        means = simulate(trial, shape, self._profile, seed=self._seed)
        drawn = [
            simulate(trial, shape, self._profile, noise_seed=seed, seed=self._seed)
            for seed in range(self._seed, self._seed + self._replications)
        ] or [means]
        found = [_chosen(timeline) for timeline in drawn]
        cell.predicted = _averaged(found)
        cell.predicted["hits_by_means"] = _chosen(means)["hits"]
        cell.means_tpot_s = figures(means)["tpot_s"]
        cell.replications_s = [one["tpot_s"] for one in found if one["tpot_s"]]
        by_term = [terms_by_step(timeline) for timeline in drawn]
        cell.predicted_terms_s = {
            name: np.mean([one[name] for one in by_term], axis=0).tolist()
            for name in TERMS
        }
        cell.predicted_steps_s = np.mean(
            [step_seconds(timeline) for timeline in drawn], axis=0
        ).tolist()


def _chosen(timeline: Timeline) -> dict[str, Any]:
    found = figures(timeline)
    return {
        **{key: found[key] for key in FIGURES},
        "busy_s": found["busy_s"],
        "bytes": found["bytes"],
        "terms": terms(timeline),
    }


def _averaged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean of figures, also within tables; what is equal everywhere stays as it is."""
    first = found[0]
    mean: dict[str, Any] = {}
    for key, value in first.items():
        values = [one[key] for one in found]
        if isinstance(value, dict):
            mean[key] = _averaged(values)
        elif value is None or all(other == value for other in values):
            mean[key] = value
        else:
            mean[key] = float(np.mean(values))
    return mean


def _words(place: Place) -> str:
    return (
        f"{place.trace}, {place.shape}, {place.policy}, cache {place.cache_ratio:g},"
        f" batch {place.batch}"
    )


__all__ = ["timing_free", "validate", "warnings_of"]
