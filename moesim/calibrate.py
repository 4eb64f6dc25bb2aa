"""Calibrate this machine: a designed set of short runs through the executor, then a fit.

Each lane alone, each pair, all together; two sizes of experts; one token and many; with and without the SSD; every
assignment policy's planning. Routing is drawn, so that no trace which a prediction is later compared with takes part;
this module and `hwprofiles/calibrate.py` know of no validation (`tests/test_separation.py` holds that).
"""

from __future__ import annotations

import datetime as dt
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hwprofiles.calibrate import DesignedRun, profile_entries
from hwprofiles.calibrate import calibrate as fit
from hwprofiles.fit import FitReport
from hwprofiles.profile import HardwareProfile, save_profile
from moesim.memory import MemoryOptions
from moesim.runs import machine_profile
from moesim.trials import Bench, Trial, figures, simulate, system_of
from traces.batch import RoutedLayer, RoutedStep
from traces.schema import ModelShape, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from traces.timeline import Timeline

SHAPES = ("olmoe-1b-7b/2", "olmoe-1b-7b/4")
"""Whose sizes the designed runs' experts have: two, since only different bytes separate overhead from bandwidth."""

LAYERS, EXPERTS, TOP_K = 6, 32, 4
"""Routing of the designed runs."""
_ROUTED = ModelShape("designed", LAYERS, EXPERTS, TOP_K, 64, 64, (1,) * LAYERS, 1)
_REUSE = 0.5
"""Chance that a token keeps an expert of the token before."""
_COMPETING = "greedy+lru"
_PASSES, _QUICK_PASSES = 5, 3
"""How often all designed runs are run."""
PLANNERS = ("static-threshold", "layer-wise", "fixed-mapping", "hybrimoe-schedule", "beam")
"""Assignment policies that are run once more, for what their planning takes."""


class Design(NamedTuple):
    """One designed run: what it is for, and the trial."""

    purpose: str
    trial: Trial


def drawn_steps(*, batch: int | tuple[int, ...], prompt: int, decode: int, seed: int) -> list[RoutedStep]:
    """Draw forward passes: a prefill of `prompt` tokens per sequence (none if 0), then `decode` steps.

    Several batch sizes take turns, as if sequences came and went.
    """
    rng = np.random.default_rng(seed)
    sizes = (batch,) if isinstance(batch, int) else batch
    steps = []
    last = rng.random((max(sizes), LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
    for number in range(decode + (prompt > 0)):
        sequences = sizes[number % len(sizes)]
        prefill = prompt > 0 and number == 0
        tokens = prompt * sequences if prefill else sequences
        if prefill:
            chosen = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        else:
            last = _next(last, rng)
            chosen = last[:sequences]
        layers = [_layer(layer, chosen[:, layer]) for layer in range(LAYERS)]
        context = prompt + number + (prompt == 0)
        phase = Phase.PREFILL if prefill else Phase.DECODE
        steps.append(RoutedStep(number, phase, 0, tokens, context, sequences, layers))
    return steps


def _next(last: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Experts of the next token [B, L, K]: some of the last ones, the rest drawn."""
    liked = rng.random((*last.shape[:2], EXPERTS))
    kept = rng.random(last.shape) < _REUSE
    np.put_along_axis(liked, last, np.where(kept, 2.0, np.take_along_axis(liked, last, -1)), -1)
    return liked.argsort(-1)[..., ::-1][..., :TOP_K]


def _layer(layer: int, routing: np.ndarray) -> RoutedLayer:
    experts, tokens = np.unique(routing, return_counts=True)
    return RoutedLayer(
        layer,
        experts.astype(np.int32),
        tokens.astype(np.int32),
        np.ascontiguousarray(routing, np.uint16),
        None,
        None,
        {},
    )


def designs(shape: ModelShape, *, quick: bool = False, seed: int = 0) -> list[Design]:
    """The designed set for one shape: every cost and every overlap that a run of any policy can have."""
    length = 10 if quick else 24
    alone = drawn_steps(batch=1, prompt=96, decode=length, seed=seed)
    many = drawn_steps(batch=(2, 8, 4, 3), prompt=0, decode=max(12, length), seed=seed + 1)
    prompt = drawn_steps(batch=4, prompt=96, decode=max(4, length // 3), seed=seed + 2)
    short = drawn_steps(batch=(1, 4), prompt=24, decode=max(6, length // 2), seed=seed + 3)
    everything = sum(shape.expert_bytes) * shape.experts
    ratio = MemoryOptions
    found = [
        Design("CPU alone", Trial("all-cpu+none", ratio(cache_ratio=0.0), alone)),
        Design("CPU alone, many tokens", Trial("all-cpu+none", ratio(cache_ratio=0.0), prompt)),
        Design("copies and GPU in turn", Trial("on-demand+lru", ratio(cache_ratio=0.0), alone)),
        Design("GPU alone", Trial("on-demand+lru", ratio(cache_ratio=1.0), many)),
        Design("GPU, many tokens", Trial("on-demand+lru", ratio(cache_ratio=0.3), prompt)),
        Design("CPU beside GPU and copies", Trial(_COMPETING, ratio(cache_ratio=0.3), alone)),
        Design("CPU beside GPU and copies, batch", Trial(_COMPETING, ratio(cache_ratio=0.6), many)),
        Design("CPU beside copies", Trial(_COMPETING, ratio(cache_ratio=0.0), many)),
        Design("SSD and CPU", Trial("all-cpu+none", ratio(cache_ratio=0.0, host_memory_bytes=everything // 2), many)),
        Design("all lanes", Trial(_COMPETING, ratio(cache_ratio=0.3, host_memory_bytes=everything // 2), alone)),
    ]
    return found + [
        Design(f"planning of {name}", Trial(f"{name}+lru", ratio(cache_ratio=0.3), short)) for name in PLANNERS
    ]


def learn(
    runs: Sequence[tuple[ModelShape, Trial, Timeline]], base: HardwareProfile, *, date: str, name: str, seed: int = 0
) -> HardwareProfile:
    """Put what finished runs say into a profile of the machine they ran on."""
    designed = [
        DesignedRun(
            timeline, shape, system_of(trial.policy).assignment, _contexts(trial.steps), base.workers, kept
        )
        for (shape, trial, timeline), kept in zip(runs, _undisturbed(runs), strict=True)
    ]  # fmt: skip
    found = fit(designed, date=date, seed=seed)
    # distributions of operations in isolation are not those of runs, and their farthest outliers would be drawn
    kept = {path: replace(curve, quantiles=()) for path, curve in base.curves.items()}
    return replace(
        base,
        name=name,
        kind="measured",
        date=date,
        numbers=profile_entries(found, base.numbers),
        curves={**kept, **found.curves},
        fit={**base.fit, **found.fit},
    )


def _undisturbed(runs: Sequence[tuple[ModelShape, Trial, Timeline]]) -> list[np.ndarray]:
    """Choose, for every step of a trial, the run whose step took the median of its repetitions: bool [steps] by run.

    Other tenants of a machine come in bursts of half a second in which everything takes up to 1.6 times as long; they
    are no property of it. Of two repetitions the shorter counts.
    """
    repeated: dict[tuple[str, int], list[int]] = {}
    for number, (shape, trial, _) in enumerate(runs):
        repeated.setdefault((shape.name, id(trial)), []).append(number)
    chosen: list[np.ndarray] = [np.empty(0)] * len(runs)
    for numbers in repeated.values():
        seconds = np.array([_lengths(runs[number][2]) for number in numbers])
        median = np.argsort(seconds, axis=0)[(len(numbers) - 1) // 2]
        for place, number in enumerate(numbers):
            chosen[number] = median == place
    return chosen


def _lengths(timeline: Timeline) -> np.ndarray:
    """Seconds of each forward pass, float64 [steps]."""
    return np.concatenate([chunk["end_s"] - chunk["start_s"] for chunk in timeline.step_chunks()])


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
        shapes: whose sizes the experts have, largest first; see `traces.models.model_shape`.
        quick: shorter runs.
        hw: profile of this machine to start from; measured now, in some ten seconds, when None.
        dtype: of the weights; float32 on the host accelerator, bfloat16 on CUDA when None.
        stores: folder for the experts' stores; a temporary one when None.
        seed: of the drawn routing.
        progress: called with what is done next and the share that is done.

    Raises:
        ProfileError, TraceError, StoreError, RuntimeFault: in one line.
    """
    from runtime.measure import measure  # noqa: PLC0415 - torch
    from runtime.tracedriven import shape_for  # noqa: PLC0415

    tell = progress or (lambda _what, _done: None)
    target, load = Path(out), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=stores) as folder, ExitStack() as benches:
        tell("the machine's lanes", 0.0)
        base = machine_profile(hw if hw is not None else measure(None, Path(folder) / "base.toml", quick=True))
        chosen = dtype or ("bfloat16" if base.accelerator == "cuda" else "float32")
        todo: list[tuple[Bench, Design]] = []
        for number, spec in enumerate(shapes):
            shape = shape_for(_ROUTED, spec, chosen)
            bench = benches.enter_context(Bench(shape, base, dtype=chosen, store=Path(folder) / str(number)))
            found = designs(shape, quick=quick, seed=seed)
            bench.run(found[-1].trial, base, seed=seed)  # nothing in memory is new any more
            todo += [(bench, design) for design in found]
        runs: list[tuple[ModelShape, Trial, Timeline]] = []
        passes = _QUICK_PASSES if quick else _PASSES
        for number in range(passes):  # forth and back: what drifts meanwhile hits all alike
            for bench, design in todo[::-1] if number % 2 else todo:
                tell(f"{bench.shape.name}: {design.purpose}", len(runs) / (passes * len(todo)))
                runs.append((bench.shape, design.trial, bench.run(design.trial, base, seed=seed)))
    tpot_s = np.array([figures(timeline)["tpot_s"] for _, _, timeline in runs]).reshape(passes, -1)
    tpot_s[1::2] = tpot_s[1::2, ::-1]
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    profile = learn(runs, base, date=date, name=target.stem, seed=seed)
    profile = replace(
        profile,
        description=(
            f"{base.description.partition(';')[0]}; calibrated by {len(todo)} designed runs, {passes} times each,"
            f" with {', '.join(shapes)} ({chosen}); load average {load:.1f} when it began"
        ),
        fit={**profile.fit, **_stability(tpot_s)},
        where=target.name,
    )
    save_profile(profile, target)
    tell("done", 1.0)
    return profile


def differences(
    one: HardwareProfile, other: HardwareProfile, shapes: Sequence[str] = SHAPES, dtype: str = "float32"
) -> list[float]:
    """Say by how much predictions of the designed runs by one profile differ from those by another.

    Args:
        one, other: profiles with the same lanes, such as two calibrations of one machine.
        shapes: as in `calibrate`.
        dtype: of the weights.

    Returns:
        Seconds per output token by `other` over that by `one`, minus one, for each design.
    """
    from runtime.tracedriven import shape_for  # noqa: PLC0415 - torch

    found = []
    for spec in shapes:
        shape = shape_for(_ROUTED, spec, dtype)
        for design in designs(shape, quick=True, seed=1):
            first_s, second_s = (figures(simulate(design.trial, shape, hw))["tpot_s"] for hw in (one, other))
            found.append(float(second_s / first_s - 1.0))
    return found


def _stability(tpot_s: np.ndarray) -> dict[str, dict[str, float]]:
    """Noise floor and drift of identical runs: by how much any two differ, and all last ones from all first ones.

    Args:
        tpot_s: seconds per output token, float64 [repetitions, runs].
    """
    count = len(tpot_s)
    missed = np.abs(np.concatenate([tpot_s[i] / tpot_s[j] - 1.0 for i in range(count) for j in range(i + 1, count)]))
    together = abs(float(np.median(tpot_s[-1] / tpot_s[0])) - 1.0)
    reports = {
        "noise_floor": FitReport(tpot_s.size, len(missed), float(np.median(missed)), float(np.max(missed))),
        "drift": FitReport(tpot_s.size, tpot_s.shape[1], together, together),
    }
    return {name: {key: float(value) for key, value in report._asdict().items()} for name, report in reports.items()}
