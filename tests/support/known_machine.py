"""Measurements drawn from a machine whose constants are known: what a calibration
states of it can be held against the truth, term by term.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.special import ndtri
from support.calibrating import sized

from moesim.evidence.validation.paired_runs import designs, simulate
from moesim.hwprofiles.calibration.estimates import (
    Units,
    fit_slowdowns,
    interval_of,
    measured,
)
from moesim.hwprofiles.calibration.fit_curves import Entries, Points, fit_roofline
from moesim.hwprofiles.calibration.fit_operations import SPAN_KINDS, OperationFit
from moesim.hwprofiles.calibration.fit_runs import fit_control_plane
from moesim.hwprofiles.calibration.observations import DesignedRun, Spans
from moesim.hwprofiles.lanes import COMPUTE_KINDS, lane_names
from moesim.hwprofiles.paths import JOIN
from moesim.hwprofiles.profile import load_profile
from moesim.hwprofiles.schema import Quantity

RUNS = 12
STEPS = 12
CONTENTION = {
    "contention.cpu.gpu": 1.4,
    "contention.cpu.h2d": 1.5,
    "contention.h2d.cpu": 1.8,
    "contention.gpu.cpu": 1.2,
    "contention.cpu.ssd": 1.1,
    "contention.ssd.cpu": 1.3,
    "contention.h2d.ssd": 1.2,
}
"""CPU beside GPU and copies at once: 2.1 times, as the simulator multiplies."""
_LINE = (20e-6, 1 / 12e9)
_ROOF = (30e-6, 20e9, 100e9)
_PLANE = (200e-6, 9e-6, 15e-6, 0.0)


class Noise:
    """How measurements differ from the truth.

    Args:
        scatter: standard deviation of single operations, relative.
        drift: of whole runs.
        outliers: share of operations that take six times as long.
    """

    def __init__(self, scatter: float, drift: float, outliers: float) -> None:
        self.scatter = scatter
        self.drift = drift
        self.outliers = outliers

    def factors(self, runs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Of operations of some runs, float64 [N], mean 1 without outliers."""
        own = np.maximum(1.0 + self.scatter * rng.standard_normal(len(runs)), 0.1)
        common = 1.0 + self.drift * rng.standard_normal(int(runs.max()) + 1)
        late = np.where(rng.random(len(runs)) < self.outliers, 6.0, 1.0)
        return own * common[runs] * late


def runs_and_steps(each: int) -> tuple[np.ndarray, np.ndarray]:
    """Of so many samples in every step of every run."""
    runs = np.repeat(np.arange(RUNS), STEPS * each)
    steps = np.tile(np.repeat(np.arange(STEPS), each), RUNS)
    return runs, steps


def inside(interval: tuple[float, float], truth: float) -> bool:
    return interval[0] <= truth <= interval[1]


def mean_covers(noise: Noise, seed: int) -> dict[str, bool]:
    """The mean of one operation over runs."""
    rng = np.random.default_rng(seed)
    runs, steps = runs_and_steps(4)
    entries = Entries("2026-01-01", seed)
    seconds = 1e-3 * noise.factors(runs, rng)
    entries.put_mean("costs.dispatch.per_op_s", seconds, Units(runs, steps), "a test")
    interval = entries.numbers["costs.dispatch.per_op_s"].interval
    return {"mean": inside(interval, 1e-3)}


def line_covers(noise: Noise, seed: int) -> dict[str, bool]:
    """Latency and seconds per byte of a link, five sizes in every run."""
    rng = np.random.default_rng(seed)
    runs, steps = runs_and_steps(5)
    sizes = 4 ** np.arange(8, 13)
    number = np.tile(np.arange(5), RUNS * STEPS)
    seconds = (_LINE[0] + sizes[number] * _LINE[1]) * noise.factors(runs, rng)
    points = Points(seconds, number, Units(runs, steps))
    line = fit_roofline(sizes, np.zeros(5), points)
    return {
        "latency": inside(line.overhead_s.interval, _LINE[0]),
        "slope": inside(line.per_byte_s.interval, _LINE[1]),
    }


def roofline_covers(noise: Noise, seed: int) -> dict[str, bool]:
    """Overhead, bandwidth and peak of a lane: two sizes, five numbers of tokens."""
    rng = np.random.default_rng(seed)
    runs, steps = runs_and_steps(10)
    number = np.tile(np.arange(10), RUNS * STEPS)
    moved = np.repeat([8e6, 2e6], 5)
    flops = moved * np.tile([1, 4, 16, 32, 64], 2) / 2
    exact = _ROOF[0] + np.maximum(moved / _ROOF[1], flops / _ROOF[2])
    seconds = exact[number] * noise.factors(runs, rng)
    fit = fit_roofline(moved, flops, Points(seconds, number, Units(runs, steps)))
    truths = (_ROOF[0], 1 / _ROOF[1], 1 / _ROOF[2])
    names = ("overhead", "bandwidth", "peak")
    return {
        name: inside(estimate.interval, truth)
        for name, estimate, truth in zip(names, fit[:3], truths, strict=True)
    }


def plane_covers(noise: Noise, seed: int) -> dict[str, bool]:
    """Base, seconds per active expert and per copy of the join."""
    rng = np.random.default_rng(seed)
    runs, steps = runs_and_steps(6)
    active = rng.integers(2, 17, len(runs)).astype(float)
    copies = rng.binomial(active.astype(int), 0.4).astype(float)
    exact = _PLANE[0] + _PLANE[1] * active + _PLANE[2] * copies
    table = pd.DataFrame({
        "seconds": exact * noise.factors(runs, rng),
        "active": active,
        "copies": copies,
        "shared": 0.0,
        "tiered": 0.0,
        "lane_kind": 0,
        "run": runs,
        "step": steps,
    })  # fmt: skip
    entries = Entries("2026-01-01", seed)
    fit_control_plane(JOIN, [table], "a test", entries)
    return {
        path.rpartition(".")[2]: inside(entries.numbers[path].interval, truth)
        for path, truth in zip(JOIN, _PLANE, strict=True)
        if path in entries.numbers
    }


def few_samples_cover(noise: Noise, seed: int) -> dict[str, bool]:
    """Three or ten independent measurements of one number."""
    rng = np.random.default_rng(seed)
    covers = {}
    for count in (3, 10):
        values = noise.factors(np.arange(count), rng)
        quantity = measured(values, source="a test", date="2026-01-01")
        covers[f"of {count}"] = inside(quantity.interval, 1.0)
    return covers


def slowdowns_cover(noise: Noise, seed: int) -> dict[str, bool]:
    """Two that slow others 1.3 and 1.1 times, the second in three runs of twelve."""
    rng = np.random.default_rng(seed)
    runs, steps = runs_and_steps(5)
    busy = np.array([[0, 0], [1, 0], [0, 1]], float)
    factors = np.array([1.3, 1.1])
    shares = rng.dirichlet(np.ones(3), len(runs))
    shares[runs > 2, 0] += shares[runs > 2, 2]
    shares[runs > 2, 2] = 0.0
    seconds = noise.factors(runs, rng) / (shares @ (factors**-busy).prod(axis=1))
    groups = np.zeros(len(runs), np.int64)
    found = fit_slowdowns(np.log(seconds), shares, shares, busy, groups)
    units = Units(runs, steps, 4)
    covers = {}
    draws = found.redrawn(units, runs, rng)
    for name, value, drawn, truth in zip(
        ("in all runs", "in three runs"), found.factors, draws.T, factors, strict=True
    ):
        covers[name] = inside(interval_of(value, drawn, units.count), truth)
    return covers


def machine_with_contention(scatter: float):
    """Every lane with a worker of its own, `CONTENTION` between them, and operations
    that scatter normally; the first of a layer step wait, longer beside more copies.
    """
    shipped = load_profile("two-core-host")
    probabilities = np.clip(np.linspace(0, 1, 21), 0.02, 0.98)
    quantiles = tuple(1.0 + scatter * ndtri(probabilities))
    numbers = shipped.numbers | {
        path: Quantity(value, "assumed", "a test")
        for path, value in (CONTENTION | {"cores": 8}).items()
    }
    curves = {
        path: replace(curve, quantiles=quantiles if curve.quantiles else ())
        for path, curve in shipped.curves.items()
    }
    return replace(
        shipped,
        numbers=numbers,
        curves=curves,
        workers={lane: (lane,) for lane in lane_names(1)},
    )


class Slower:
    """A timeline whose spans took longer by a factor."""

    def __init__(self, timeline, factor: float) -> None:
        self._timeline = timeline
        self._factor = factor

    def __getattr__(self, name):
        """Everything else is the timeline's."""
        return getattr(self._timeline, name)

    def chunks(self):
        """Its spans."""
        for chunk in self._timeline.chunks():
            times = {name: self._factor * chunk[name] for name in ("start_s", "end_s")}
            yield {**chunk, **times}


def learned_contention(noise: Noise, seed: int, specs=("olmoe-1b-7b/4",)):
    """Contention that the fit of operations finds in simulated runs of such a machine,
    by path.
    """
    rng = np.random.default_rng(seed)
    machine = machine_with_contention(noise.scatter)
    shapes = [sized(spec) for spec in specs]
    runs = [
        (shape, design.trial)
        for shape in shapes
        for design in designs(shape, quick=True, seed=seed)
    ]
    # The machine was slower by this; nobody knows, so it is not divided out.
    drift = 1.0 + noise.drift * rng.standard_normal(len(runs))
    designed = [
        DesignedRun(
            Slower(
                simulate(trial, shape, machine, noise_seed=1000 * seed + number),
                drift[number],
            ),
            shape,
            assignment="",
            context_tokens=(),
            workers=machine.workers,
        )
        for number, (shape, trial) in enumerate(runs)
    ]
    entries = Entries("2026-01-01", seed)
    operations = OperationFit(Spans(designed), entries)
    for lane_kind in (*COMPUTE_KINDS, *SPAN_KINDS):
        operations.alone(lane_kind)
    return {path: entries.numbers[path] for path in CONTENTION}


def contention_covers(noise: Noise, seed: int) -> dict[str, bool]:
    """Every factor of a machine whose lanes slow each other at once."""
    learned = learned_contention(noise, seed)
    return {
        path: inside(number.interval, CONTENTION[path])
        for path, number in learned.items()
    }


def coverage(covers, noise: Noise, draws: int) -> dict[str, float]:
    """Share of draws whose 95 % interval holds the truth, by term."""
    held = defaultdict(list)
    for seed in range(draws):
        for term, holds in covers(noise, seed).items():
            held[term].append(holds)
    return {term: float(np.mean(values)) for term, values in held.items()}
