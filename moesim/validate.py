"""Validate the simulator: the same grid really run and simulated, side by side in time, and compared cell by cell.

Each cell is run for real, simulated right after, and when all cells of the grid are done run again in reversed order,
and so on: what drifts hits all cells alike, and repetitions of one lie as far apart as the grid is long. The profile is
taken as it is: nothing here fits anything, and calibration (`moesim/calibrate.py`) does not know this module.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from hwprofiles.costs import Costs
from hwprofiles.errors import ProfileError
from moesim import agreement
from moesim.memory import MemoryOptions
from moesim.runs import machine_profile
from moesim.terms import TERMS, step_seconds, terms
from moesim.trials import Bench, Trial, figures, foreign, simulate, system_of, unsteady
from policies.base import CachePolicy
from traces.batch import compose
from traces.reader import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hwprofiles.profile import HardwareProfile
    from policies.plan import Policies
    from traces.schema import ModelShape
    from traces.timeline import Timeline

STEPS = 16
REPLICATIONS = 10
"""Simulations with drawn operation times, whose mean is the prediction."""
MARGIN = 0.05
"""Of the equivalence test."""
_OF_STEPS: Final[Mapping[str, Callable[[np.ndarray], Any]]] = {
    "tpot_s": np.mean, "tpot_p50_s": np.median, "tpot_p95_s": lambda steps_s: np.quantile(steps_s, 0.95)
}  # fmt: skip
_FIGURES = (
    "tpot_s",
    "tpot_p50_s",
    "tpot_p95_s",
    "ttft_s",
    "hits",
    "delayed_hits",
    "misses",
    "planning_s",
    "makespan_s",
)


class Place(NamedTuple):
    """A cell's coordinates. `host_ratio` is the share of experts that host memory holds; 1 needs no SSD."""

    trace: str
    shape: str
    policy: str
    cache_ratio: float
    host_ratio: float
    batch: int


@dataclass(slots=True)
class Cell:
    """One cell: what was measured, in every repetition, and what was predicted.

    Attributes:
        place: coordinates.
        timing_free: no decision depends on when copies land, so hits must be equal.
        extrapolated: the experts' size was not calibrated.
        measured: figures of each repetition; see `_FIGURES`, with ``busy_s`` and ``bytes`` by lane and ``terms``.
        predicted: figures of the simulation, mean over replications.
        replications_s: TPOT of each replication.
        means_tpot_s: TPOT of the simulation with mean operation times.
        steps_s: measured seconds of each step after the first, by repetition.
        predicted_steps_s: the same, predicted, mean over replications.
    """

    place: Place
    timing_free: bool
    extrapolated: bool
    measured: list[dict[str, Any]] = field(default_factory=list)
    predicted: dict[str, Any] = field(default_factory=dict)
    replications_s: list[float] = field(default_factory=list)
    means_tpot_s: float | None = None
    steps_s: list[list[float]] = field(default_factory=list)
    predicted_steps_s: list[float] = field(default_factory=list)

    def steps_measured_s(self) -> np.ndarray:
        """Seconds of each step after the first, median over repetitions, float64 [steps - 1].

        The same step does the same work in all of them, so what one has more than the others is not its own: other
        tenants of a machine come in bursts of half a second.
        """
        return np.asarray(np.median(self.steps_s, axis=0))

    def found(self, key: str) -> float | None:
        """A measured figure: median over repetitions; those of steps after the first, from `steps_measured_s`."""
        steps_s = self.steps_measured_s()
        if key in _OF_STEPS and len(steps_s):
            return float(_OF_STEPS[key](steps_s))
        values = [one[key] for one in self.measured]
        return None if None in values else float(np.median(values))

    def error(self, key: str) -> float | None:
        """Predicted over measured, minus one; None where there is no such figure."""
        measured = self.found(key)
        return None if not measured else float(self.predicted[key] / measured - 1.0)

    def floor(self) -> float:
        """By how much the measured TPOT would differ if all repetitions were made anew."""
        return agreement.estimate_noise(np.array(self.steps_s), lambda runs: float(np.median(runs, axis=0).mean()))

    def repetitions_differ(self) -> float:
        """By how much single repetitions of this cell differ."""
        return agreement.noise_floor([[one["tpot_s"] for one in self.measured if one["tpot_s"]]])

    def hits_equal(self) -> bool:
        """Whether every repetition counted the hits that were predicted."""
        keys = ("hits", "delayed_hits", "misses")
        return all(one[key] == self.predicted[key] for one in self.measured for key in keys)

    def to_json(self) -> dict[str, Any]:
        """Everything, with the comparisons."""
        steps_s = self.steps_measured_s()
        some = len(steps_s) > 1
        test = agreement.equivalent(self.predicted_steps_s, steps_s, margin=MARGIN) if some else None
        distance = agreement.kolmogorov_smirnov(self.predicted_steps_s, np.concatenate(self.steps_s)) if some else None
        return {
            **self.place._asdict(),
            "timing_free": self.timing_free,
            "extrapolated": self.extrapolated,
            "measured": self.measured,
            "tpot_measured_s": self.found("tpot_s"),
            "predicted": self.predicted,
            "predicted_tpot_interval_s": [min(self.replications_s), max(self.replications_s)]
            if self.replications_s
            else None,
            "means_tpot_s": self.means_tpot_s,
            "tpot_error": self.error("tpot_s"),
            "tpot_p50_error": self.error("tpot_p50_s"),
            "tpot_p95_error": self.error("tpot_p95_s"),
            "ttft_error": self.error("ttft_s"),
            "step_errors": (np.asarray(self.predicted_steps_s) / steps_s - 1.0).round(4).tolist(),
            "noise_floor": self.floor(),
            "repetitions_differ": self.repetitions_differ(),
            "hits_equal": self.hits_equal(),
            "tost": None if test is None else test._asdict(),
            "ks": None if distance is None else distance._asdict(),
            "terms": self.term_errors(),
        }

    def term_errors(self) -> dict[str, float]:
        """Predicted minus measured seconds of each term, as a share of the measured makespan."""
        makespan_s = self.found("makespan_s") or 1.0
        return {
            name: float(self.predicted["terms"][name] - np.median([one["terms"][name] for one in self.measured]))
            / makespan_s
            for name in TERMS
        }


@dataclass(slots=True)
class Validation:
    """A finished grid."""

    cells: list[Cell]
    config: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Cells and the summary over them."""
        cells = [cell.to_json() for cell in self.cells]
        return {**summary(cells), "cells": cells, "config": self.config, "warnings": self.warnings}


def joined(result: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Sum up a validation together with an earlier one by the same profile.

    Args:
        result, earlier: as `Validation.to_json` made them.

    Raises:
        ProfileError: they were predicted by different profiles.
    """
    one, other = (part["config"]["hw_digest"] for part in (earlier, result))
    if one != other:
        raise ProfileError(f"the earlier validation is by another profile: expected digest {other}, found {one}")
    cells = earlier["cells"] + result["cells"]
    config = {**result["config"], "seconds": earlier["config"]["seconds"] + result["config"]["seconds"]}
    return {
        **summary(cells), "cells": cells, "config": config | {"earlier": earlier["config"]},
        "warnings": [*dict.fromkeys(earlier["warnings"] + result["warnings"])],
    }  # fmt: skip


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures over all cells; `held_out` and `calibrated` are those of sizes that calibration had not, and had."""
    free = [cell["hits_equal"] for cell in cells if cell["timing_free"]]
    passed = [cell["tost"]["equivalent"] for cell in cells if cell["tost"] is not None]
    drawn: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        drawn.setdefault(tuple(cell[key] for key in Place._fields if key != "policy"), []).append(cell)
    floor = _median([cell["noise_floor"] for cell in cells if len(cell["measured"]) > 1]) or 0.0
    taus = [
        tau for group in drawn.values()
        if (tau := agreement.kendall_tau(
            [cell["predicted"]["tpot_s"] for cell in group],
            [cell["tpot_measured_s"] for cell in group],
            floor=max(floor, *(cell["noise_floor"] for cell in group)))) is not None
    ]  # fmt: skip
    below = [
        abs(cell["tpot_error"]) < cell["noise_floor"]
        for cell in cells if cell["tpot_error"] is not None and len(cell["measured"]) > 1
    ]  # fmt: skip
    blamed = {name: _median([abs(cell["terms"][name]) for cell in cells]) for name in TERMS}
    return {
        **_errors(cells),
        "hits_equal": all(free) if free else None,
        "hits_compared": len(free),
        "kendall_tau": float(np.mean(taus)) if taus else None,
        "kendall_tau_min": min(taus, default=None),
        "noise_floor": floor,
        "noise_floor_max": max((cell["noise_floor"] for cell in cells), default=None),
        "repetitions_differ": _median([cell["repetitions_differ"] for cell in cells]),
        "below_noise_share": float(np.mean(below)) if below else None,
        "error_over_noise": None if not floor else (_errors(cells)["tpot_error_median"] or 0.0) / floor,
        "tost_pass_share": float(np.mean(passed)) if passed else None,
        "terms": blamed,
        "largest_term": max(blamed, key=lambda name: blamed[name] or 0.0) if cells else None,
        "held_out": _errors([cell for cell in cells if cell["extrapolated"]]),
        "calibrated": _errors([cell for cell in cells if not cell["extrapolated"]]),
        "ssd": _errors([cell for cell in cells if cell["host_ratio"] < 1]),
        "by": {key: _by(cells, key) for key in Place._fields},
    }


def _by(cells: Sequence[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    """Errors of the cells that share a coordinate, by its value."""
    values = dict.fromkeys(cell[key] for cell in cells)
    return {f"{value}": _errors([cell for cell in cells if cell[key] == value]) for value in values}


def _errors(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"count": len(cells)}
    for key in ("tpot", "ttft", "tpot_p95"):
        values = [abs(cell[f"{key}_error"]) for cell in cells if cell[f"{key}_error"] is not None]
        found[f"{key}_error_median"], found[f"{key}_error_max"] = _median(values), max(values, default=None)
    signed = [cell["tpot_error"] for cell in cells if cell["tpot_error"] is not None]
    found["tpot_error_signed_median"] = _median(signed)
    return found


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


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
        dtype, stores: as in `moesim.calibrate.calibrate`.
        seed: of policies that draw, and of drawn times.
        progress: called with the cell that runs and the share that is done.

    Raises:
        TraceError, ProfileError, PolicyError, StoreError, RuntimeFault: in one line.
    """
    from runtime.tracedriven import shape_for  # noqa: PLC0415 - torch

    profile = machine_profile(hw)
    begin, load = time.time(), os.getloadavg()[0]
    chosen = dtype or ("bfloat16" if profile.accelerator == "cuda" else "float32")
    opened = [one if isinstance(one, Trace) else open_trace(one) for one in traces]
    with tempfile.TemporaryDirectory(dir=stores) as folder, ExitStack() as benches:
        grid = _Grid(profile, seed, replications)
        for trace, spec in product(opened, shapes):
            shape = shape_for(trace.shape, spec, chosen)
            if shape not in grid.benches:
                bench = Bench(shape, profile, dtype=chosen, store=Path(folder) / str(len(grid.benches)))
                grid.benches[shape] = benches.enter_context(bench)
            for rest in product(policies, cache_ratios, host_ratios, batches):
                grid.add(shape, Place(trace.path.name, shape.name, *rest), _trial(trace, shape, *rest, steps=steps))
        cells = grid.walk(repetitions, progress or (lambda _what, _done: None))
    config = {
        "hw": profile.name, "hw_digest": profile.digest, "hw_date": profile.date,
        "machine": profile.versions.get("cpu"),
        "traces": {trace.path.name: trace.digest() for trace in opened}, "shapes": [spec or "own" for spec in shapes],
        "policies": list(policies), "cache_ratios": list(cache_ratios), "host_ratios": list(host_ratios),
        "batches": list(batches), "steps": steps, "repetitions": repetitions, "replications": replications,
        "dtype": chosen, "seed": seed, "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begin)),
        "seconds": round(time.time() - begin),
        "load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "profile_noise_floor": profile.fit.get("noise_floor", {}).get("residual_median"),
    }  # fmt: skip
    return Validation(cells, config, warnings_of(profile, load))


def warnings_of(profile: HardwareProfile, load: float) -> list[str]:
    """What a reader of the errors should know about profile and machine."""
    said = [f"profile {profile.name} is another machine's: {words}" for words in foreign(profile)]
    if "noise_floor" not in profile.fit:
        said.append(f"profile {profile.name} was not calibrated through the executor; `moesim calibrate --out hw.toml`")
    if (words := unsteady(profile)) is not None:
        said.append(words)
    if load > 0.5:
        said.append(f"the machine was not quiet: load average {load:.1f} when it began; times scatter by that")
    return said


def _trial(
    trace: Trace, shape: ModelShape, policy: str, cache_ratio: float, host_ratio: float, batch: int, *, steps: int
) -> Trial:
    needed = tuple(
        dict.fromkeys(column for one in system_of(policy).build(gpus=1, host_cache=None).all() for column in one.needs)
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
    """Tell whether no decision can depend on when copies land: no prefetch, no cache that swaps by its own clock."""
    swaps = any(type(cache).replacements is not CachePolicy.replacements for cache in policies.caches)
    return policies.names.get("prefetch") == "none" and not swaps


class _Grid:
    """All cells with their trials, and the benches they run on."""

    def __init__(self, profile: HardwareProfile, seed: int, replications: int) -> None:
        self._profile, self._seed, self._replications = profile, seed, replications
        self.benches: dict[ModelShape, Bench] = {}
        self._todo: list[tuple[Cell, ModelShape, Trial]] = []

    def add(self, shape: ModelShape, place: Place, trial: Trial) -> None:
        """Put in one cell."""
        built = system_of(trial.policy).build(gpus=1, host_cache=None)
        cell = Cell(place, timing_free(built), bool(Costs(self._profile, shape).extrapolated))
        self._todo.append((cell, shape, trial))

    def walk(self, repetitions: int, tell: Callable[[str, float], None]) -> list[Cell]:
        """Run all forth with simulations in between, then back, and so on."""
        total = len(self._todo) * repetitions
        new = set(self.benches)
        for repetition in range(repetitions):
            order = self._todo[::-1] if repetition % 2 else self._todo
            for done, (cell, shape, trial) in enumerate(order):
                tell(_words(cell.place), (repetition * len(self._todo) + done) / total)
                bench = self.benches[shape]
                if shape in new:  # afterwards nothing in memory is new any more
                    bench.run(trial, self._profile, seed=self._seed)
                    new.discard(shape)
                self._measure(cell, bench, trial)
                if not repetition:
                    self._predict(cell, shape, trial)
        return [cell for cell, _, _ in self._todo]

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
        cell.predicted_steps_s = np.mean([step_seconds(timeline) for timeline in drawn], axis=0).tolist()


def _chosen(timeline: Timeline) -> dict[str, Any]:
    found = figures(timeline)
    return {
        **{key: found[key] for key in _FIGURES},
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
    return f"{place.trace}, {place.shape}, {place.policy}, cache {place.cache_ratio:g}, batch {place.batch}"


__all__ = ["Cell", "Place", "Validation", "joined", "summary", "timing_free", "validate", "warnings_of"]
