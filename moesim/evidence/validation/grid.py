"""Validates the simulator: the same grid really run and simulated, side by side in
time, and compared cell by cell.

Cells take turns in a drawn order, each run for real and simulated right after; when all
are done they are run again in reversed order, and so on: what drifts hits all cells
alike, and repetitions of one lie as far apart as the grid is long. Reference runs in
between tell how fast the machine is now, and so how much of an error is its drift since
it was calibrated. The profile is taken as it is: nothing here fits anything, and
calibration (`moesim/evidence/validation/calibrate.py`) does not know this module.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from contextlib import ExitStack
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from moesim.base.files import Every, Journal, ScratchFolder
from moesim.evidence.validation.paired_runs import (
    Trial,
    TrialRunner,
    simulate,
    step_lengths,
)
from moesim.evidence.validation.profile_checks import warnings_of
from moesim.evidence.validation.results import FIGURES, Cell, Coordinates, Validation
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.schema import ProfileError
from moesim.policies.systems import compose as compose_system
from moesim.runs.config import MemoryOptions
from moesim.runs.machine import experts_dtype, machine_profile
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.operations import lost_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.systems import Policies
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline

STEPS = 16
LEAST_REPETITIONS = 3
"""Repetitions below which a cell's interval says little; a time limit leaves out cells
before it goes below.
"""
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
    stores: Path | None = None,
    seed: int = 0,
    minutes: float | None = None,
    journal: Path | None = None,
    on_result: Callable[[Validation], object] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Validation:
    """Run a grid for real and simulated, and compare.

    Args:
        traces: routing.
        policies, cache_ratios, batches, host_ratios: axes of the grid: policies as
            ``assignment+cache+prefetch``, shares of experts in the GPU cache, sequences
            that run together, shares of experts in host memory.
        hw: the calibrated profile of this machine.
        shapes: whose sizes the experts have; None keeps the trace's.
        steps: forward passes of each run.
        repetitions: of each real run, every other one in reversed order.
        replications: simulations with drawn times; with 0 the means are the prediction.
        stores: folder for the experts' stores; a temporary one when None.
        seed: of policies that draw, and of drawn times.
        minutes: a limit; what does not fit is left out, and said.
        journal: file of finished runs; those that it holds already are not made again.
            It is removed when the grid is whole.
        on_result: called with what there is so far, every half minute and pass.
        progress: called with the cell that runs and the share that is done.

    Raises:
        TraceError, ProfileError, PolicyError, StoreError, RuntimeFault: in one line.
    """
    from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415 - torch

    profile = machine_profile(hw, measure_again=True)
    budget = _Budget(minutes, repetitions)
    dtype = experts_dtype(profile)
    opened = [
        trace if isinstance(trace, Trace) else open_trace(trace) for trace in traces
    ]
    made_with = {
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
        "dtype": dtype,
        "seed": seed,
    }
    kept = None
    if journal is not None:
        key = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode())
        kept = Journal(journal, key.hexdigest(), refuse=ProfileError)
    with ScratchFolder(stores) as folder, ExitStack() as runners:
        grid = _Grid(profile, made_with, folder, runners)
        for trace, spec in product(opened, shapes):
            shape = shape_for(trace.shape, spec, dtype)
            for axes in product(policies, cache_ratios, host_ratios, batches):
                grid.add(shape, trace, Coordinates(trace.path.name, shape.name, *axes))

        def report() -> None:
            if on_result is not None:
                on_result(grid.validation())

        grid.run(budget, kept, Every(report), progress or (lambda _cell, _share: None))
        validation = grid.validation()

    if kept is not None and not validation.config["left_out"]:
        kept.close()
    return validation


class _Budget:
    """How long a validation may take, and what still fits.

    Runs that are not repeated show little, so the first pass over the grid gets only
    its share of the time; cells that it does not reach are left out.

    Args:
        minutes: for everything; None for no limit.
        repetitions: that are wanted.
        clock_s: tells the time; injected by tests.
    """

    def __init__(
        self,
        minutes: float | None,
        repetitions: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock_s = clock_s
        self._begin_s = clock_s()
        self._limit_s = None if minutes is None else 60.0 * minutes
        self._first_share = 1.0 / max(1, min(repetitions, LEAST_REPETITIONS))
        self._longest_s = 0.0

    def allows(self, *, first_pass: bool, expected_s: float | None) -> bool:
        """Whether a run of so many seconds fits; the longest so far where unknown."""
        if self._limit_s is None:
            return True
        spent_s = self._clock_s() - self._begin_s
        needed_s = self._longest_s if expected_s is None else expected_s
        share = self._first_share if first_pass else 1.0
        # Something is always measured, however little time there is.
        return not self._longest_s or spent_s + needed_s <= share * self._limit_s

    def took(self, seconds: float) -> None:
        """Note what a run took, its simulations included."""
        self._longest_s = max(self._longest_s, seconds)


def _trial(
    trace: Trace,
    shape: ModelShape,
    coordinates: Coordinates,
    steps: int,
    policies: Policies,
) -> Trial:
    policy = coordinates.policy
    # In the order in which policies name them, each once.
    needed = tuple(
        dict.fromkeys(column for part in policies.all() for column in part.needs)
    )
    trace.require(needed, f"policy {policy!r}")

    # None is no limit, and no SSD; a limit that holds everything would still have one.
    host_bytes = None
    if coordinates.host_ratio < 1:
        host_bytes = int(coordinates.host_ratio * shape.routed_bytes)
    memory = MemoryOptions(
        cache_ratio=coordinates.cache_ratio, host_memory_bytes=host_bytes
    )
    passes = compose(trace, batch=coordinates.batch, steps=steps, columns=needed)
    return Trial(policy, memory, list(passes))


def timing_free(policies: Policies) -> bool:
    """Tell whether no decision can depend on when copies land: no prefetch, no cache
    that replaces experts by its own clock.
    """
    own_replacements = any(cache.replaces for cache in policies.caches)
    return policies.names.get("prefetch") == "none" and not own_replacements


def decisions(timeline: Timeline) -> tuple[list[list[Any]], list[list[Any]]]:
    """Who computed what from where, and the copies of experts that were awaited."""
    place = ["step", "layer", "expert"]
    spans = timeline.frame()
    accesses = timeline.access_frame().sort_values(place)
    copies = spans[spans["kind"] == "fetch"].sort_values(place)
    return (
        accesses[[*place, "lane", "state"]].to_numpy().tolist(),
        copies[place].to_numpy().tolist(),
    )


class _PlannedCell(NamedTuple):
    """A cell with what fills it."""

    cell: Cell
    shape: ModelShape
    trial: Trial


class _Grid:
    """All cells with their trials, and the runners that make them.

    Args:
        profile: of this machine.
        made_with: what the grid is made of.
        folder: of all stores.
        runners: closes what is opened here.

    Attributes:
        cells: in the order in which they were added.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        made_with: dict[str, Any],
        folder: Path,
        runners: ExitStack,
    ) -> None:
        self._profile = profile
        self._made_with = made_with
        self._seed: int = made_with["seed"]
        self._folder = folder
        self._open_runners = runners
        self._began_s = time.time()
        self._load = os.getloadavg()[0]
        self._runners: dict[ModelShape, TrialRunner] = {}
        self._warm: set[ModelShape] = set()
        self.cells: list[_PlannedCell] = []

    def add(self, shape: ModelShape, trace: Trace, coordinates: Coordinates) -> None:
        """Put in one cell; stores of the same shape hold the same random weights."""
        if shape not in self._runners:
            store = self._folder / str(len(self._runners))
            runner = TrialRunner(
                shape, self._profile, dtype=self._made_with["dtype"], store=store
            )
            self._runners[shape] = self._open_runners.enter_context(runner)
        system = compose_system(coordinates.policy)
        policies = system.build(gpus=1, host_cache=None)
        steps = self._made_with["steps"]
        trial = _trial(trace, shape, coordinates, steps, policies)
        cell = Cell(
            coordinates,
            timing_free=timing_free(policies),
            extrapolated=bool(Costs(self._profile, shape).extrapolated),
        )
        self.cells.append(_PlannedCell(cell, shape, trial))

    def validation(self) -> Validation:
        """The report of what there is so far."""
        left_out = self.left_out()
        config = self._made_with | {
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self._began_s)),
            "seconds": round(time.time() - self._began_s),
            "load_before": round(self._load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "system": platform.platform(),
            "left_out": left_out,
        }
        cells = [planned.cell for planned in self.cells if planned.cell.is_known]
        notes = [f"left out: {left_out}"] if left_out else []
        notes += warnings_of(self._profile, self._load)
        return Validation(cells, config, notes)

    def run(
        self,
        budget: _Budget,
        journal: Journal | None,
        report: Every,
        report_progress: Callable[[str, float], None],
    ) -> None:
        """Run all in a drawn order with simulations in between, then back, and so on,
        as far as the time allows.
        """
        count = len(self.cells)
        repetitions = self._made_with["repetitions"]
        rng = np.random.default_rng(self._seed)
        # Drawn, so that neighbours in the grid are not neighbours in time; every policy
        # once before any comes again, so that a limit leaves out none of them.
        drawn = [self.cells[number] for number in rng.permutation(count)]
        policies = pd.Series([cell.coordinates.policy for cell, _, _ in drawn])
        turns = policies.groupby(policies).cumcount().argsort(kind="stable")
        drawn = [drawn[number] for number in turns]
        by_place = {planned.cell.coordinates: planned.cell for planned in self.cells}
        for line in journal.lines if journal is not None else ():
            by_place[Coordinates(*line["coordinates"])].restore(line)
        seconds: dict[Coordinates, float] = {}
        for repetition in range(repetitions):
            order = drawn[::-1] if repetition % 2 else drawn
            for number, planned in enumerate(order):
                cell = planned.cell
                done = repetition * count + number
                report_progress(str(cell.coordinates), done / (count * repetitions))
                expected_s = seconds.get(cell.coordinates)
                # More were restored from the journal, or an earlier one left out.
                if len(cell.measured) != repetition or not budget.allows(
                    first_pass=repetition == 0, expected_s=expected_s
                ):
                    continue
                self._warm_up(planned)
                begin_s = time.monotonic()
                seconds[cell.coordinates] = self._run_cell(planned)
                budget.took(time.monotonic() - begin_s)
                if journal is not None:
                    journal.add(cell.last_run())
                report.if_due()
            if any(planned.cell.is_known for planned in self.cells):
                report.now()

    def _warm_up(self, planned: _PlannedCell) -> None:
        """Run a shape once: the first run meets memory that was never written. It does
        not count, nor tell how long others take.
        """
        _, shape, trial = planned
        if shape not in self._warm:
            self._runners[shape].run(trial, self._profile, seed=self._seed)
            self._warm.add(shape)

    def _run_cell(self, planned: _PlannedCell) -> float:
        """Measure a cell once more, and predict it at the first time; return the
        seconds of the run.
        """
        cell, shape, trial = planned
        runner = self._runners[shape]
        begin_s = time.monotonic()
        timeline = runner.run(trial, self._profile, seed=self._seed)
        lost = lost_shares(timeline.operations, step_lengths(timeline))
        figures = {
            "lost": float(np.median(lost)),
            # The gaps of which TPOT is the mean.
            "steps_s": np.diff(timeline.step_frame()["end_s"]).tolist(),
        }
        cell.measured.append(_figures(timeline) | figures)
        run_s = time.monotonic() - begin_s
        # The same simulation answers for all repetitions.
        if not cell.predicted:
            self._predict(cell, shape, trial, timeline)
        return run_s

    def left_out(self) -> str:
        """Say what of the grid was not run; empty where nothing is missing."""
        repetitions = self._made_with["repetitions"]
        counts = [len(planned.cell.measured) for planned in self.cells]
        parts = []
        if missing := counts.count(0):
            parts.append(f"{missing} of {len(counts)} cells")
        fewest = min((count for count in counts if count), default=0)
        if fewest < repetitions:
            parts.append(f"{repetitions - fewest} of {repetitions} repetitions")
        return " and ".join(parts)

    def _predict(
        self, cell: Cell, shape: ModelShape, trial: Trial, measured: Timeline
    ) -> None:
        # With means, every maximum over lanes comes out too early, so the mean over
        # draws is the prediction.
        means = simulate(trial, shape, self._profile, seed=self._seed)
        last_seed = self._seed + self._made_with["replications"]
        drawn = [
            simulate(trial, shape, self._profile, noise_seed=drawn, seed=self._seed)
            for drawn in range(self._seed, last_seed)
        ]
        replications = pd.DataFrame([_figures(each) for each in drawn or [means]])
        # A run of one step has no TPOT.
        mean = replications.astype(float).mean().replace(np.nan, None)
        cell.predicted = {str(key): value for key, value in mean.items()}
        cell.decisions_equal = decisions(measured) == decisions(means)


def _figures(timeline: Timeline) -> dict[str, Any]:
    metrics = summarise(timeline)
    return {key: metrics[key] for key in FIGURES}
