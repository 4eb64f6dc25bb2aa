"""What hangs on which constant: winners that change, lines where two ways cost the
same, and the capacity cliff.

A measured constant is known to an interval. If no constant, moved to either end of its
own, changes which policy wins, then the order does not depend on what calibration could
not know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.hwprofiles.costs import Costs
from moesim.runs.cache_replay import replay_cache
from moesim.runs.memory import MemoryOptions
from moesim.runs.setup import profile_of
from moesim.runs.sweep import compare
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.hwprofiles.schema import Curve, Quantity
    from moesim.traces.format.schema import ModelShape

ASSUMED_SHARE = 0.2
"""Constants without an interval are moved by this much either way."""
_TOKENS = tuple(2**power for power in range(11))
_TINY_EFFECT = 1e-9


@dataclass(slots=True)
class Sensitivity:
    """Winners under moved constants, break-even lines, and the cliff."""

    winner: str
    baseline_s: dict[str, float]
    constants: list[dict[str, Any]]
    break_even: list[dict[str, Any]]
    cliff: dict[str, Any]
    config: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return {
            "winner": self.winner,
            "baseline_s": self.baseline_s,
            "constants": self.constants,
            "winner_changes": [
                one["path"] for one in self.constants if one["changes_winner"]
            ],
            "break_even": self.break_even,
            "cliff": self.cliff,
            "config": self.config,
        }


def sensitivity(
    trace: str | Path | Trace,
    *,
    policies: Sequence[str] = ("greedy+lru", "on-demand+lru", "all-cpu+none"),
    hw: str | Path | HardwareProfile | None = None,
    cache_ratio: float = 0.25,
    batch: int = 1,
    steps: int | None = 64,
    progress: Callable[[str, float], None] | None = None,
) -> Sensitivity:
    """Move every constant to the ends of its interval, one at a time, and see who wins.

    Args:
        trace: routing.
        policies: who competes, each as ``assignment+cache+prefetch``.
        hw: the profile.
        cache_ratio: share of experts in the GPU cache.
        batch: sequences that run together.
        steps: forward passes replayed.
        progress: called with what is moved and the share that is done.

    Raises:
        TraceError, ProfileError, PolicyError: in one line.
    """
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    profile = profile_of(hw)
    tell = progress or (lambda _what, _done: None)
    memory = MemoryOptions(cache_ratio=cache_ratio)

    def seconds(machine: HardwareProfile) -> dict[str, float]:
        _, runs = compare(
            opened, policies, hw=machine, memory=memory, batch=batch, steps=steps
        )
        return {name: float(run.metrics["makespan_s"]) for name, run in runs.items()}

    baseline = seconds(profile)
    winner = min(baseline, key=lambda name: baseline[name])
    moves = list(_moves(profile))
    constants: list[dict[str, Any]] = []
    for number, (path, assumed, ends) in enumerate(moves):
        tell(path, number / len(moves))
        found = [seconds(machine) for machine in ends]
        effect = max(
            abs(one[name] / baseline[name] - 1.0) for one in found for name in baseline
        )
        if effect < _TINY_EFFECT:
            continue
        winners = [min(one, key=lambda name: one[name]) for one in found]
        constants.append(
            {
                "path": path,
                "interval": "assumed" if assumed else "measured",
                "effect": effect,
                "winners": winners,
                "changes_winner": any(one != winner for one in winners),
            }
        )
    constants.sort(key=lambda one: -one["effect"])
    tell("break-even lines and capacity cliff", 1.0)
    config = {
        "trace": str(opened.path),
        "hw": profile.name,
        "hw_digest": profile.digest,
        "policies": list(policies),
        "cache_ratio": cache_ratio,
        "batch": batch,
        "steps": steps,
    }
    return Sensitivity(
        winner,
        baseline,
        constants,
        break_even(profile, opened.shape),
        capacity_cliff(opened, batch=batch, steps=steps),
        config,
    )


def _moves(
    profile: HardwareProfile,
) -> Iterator[tuple[str, bool, list[HardwareProfile]]]:
    """Each constant that costs time, whether its range is assumed, and the profile with
    it at both ends.
    """
    for path, quantity in profile.numbers.items():
        if not path.startswith(("costs.", "contention.")) or not quantity.value:
            continue
        low, high = quantity.interval or _assumed(quantity)
        ends = [
            replace(quantity, value=max(value, _least(path)), interval=None)
            for value in (low, high)
        ]
        yield (
            path,
            quantity.interval is None,
            [replace(profile, numbers={**profile.numbers, path: one}) for one in ends],
        )
    for path, curve in profile.curves.items():
        ends_of = [
            replace(profile, curves={**profile.curves, path: one})
            for one in _ends_of(curve)
        ]
        yield path, curve.samples is None, ends_of


def _assumed(quantity: Quantity) -> tuple[float, float]:
    return quantity.value * (1 - ASSUMED_SHARE), quantity.value * (1 + ASSUMED_SHARE)


def _least(path: str) -> float:
    return 1.0 if path.startswith("contention.") else 1e-12


def _ends_of(curve: Curve) -> list[Curve]:
    """A curve moved as a whole: by the error of a mean of its samples, or by the
    assumed share.
    """
    moved = []
    for sign in (-1.0, 1.0):
        if curve.samples and curve.spread:
            # a mean of n samples is known to 1.96 IQR / (1.35 sqrt(n))
            errors = 1.96 / 1.35 * np.array(curve.spread) / np.sqrt(curve.samples)
        else:
            errors = ASSUMED_SHARE * np.array(curve.seconds)
        seconds = np.maximum(np.array(curve.seconds) + sign * errors, 1e-12)
        moved.append(replace(curve, seconds=tuple(seconds.tolist())))
    return moved


def break_even(profile: HardwareProfile, shape: ModelShape) -> list[dict[str, Any]]:
    """By tokens: computing an absent expert on the CPU against fetching it and
    computing it on the GPU.

    Returns:
        One row per number of tokens: seconds of both ways and ``fetch`` where fetching
        is cheaper; a fetched expert also serves later, which this line does not count.
    """
    costs = Costs(profile, shape)
    tokens = np.array(_TOKENS)
    cpu_s = costs.cpu_s(0, tokens)
    gpu_s = costs.gpu_s(0, tokens)
    copy_s = costs.copy_s(0)
    return [
        {
            "tokens": int(count),
            "cpu_s": float(cpu),
            "copy_s": copy_s,
            "gpu_s": float(gpu),
            "fetch": bool(copy_s + gpu < cpu),
        }
        for count, cpu, gpu in zip(tokens, cpu_s, gpu_s, strict=True)
    ]


def capacity_cliff(
    trace: Trace, *, batch: int = 1, steps: int | None = None
) -> dict[str, Any]:
    """Where a global LRU stops to hit anything: below the experts that one step
    touches, it evicts each before its use.

    Returns:
        ``working_set``: experts of the median decode step; ``ratio``: its share of all
        experts; ``hit_rate``: of a global LRU at shares of that working set.
    """
    shape = trace.shape
    sizes = [
        sum(len(layer.experts) for layer in step.layers)
        for step in compose(trace, batch=batch, steps=steps)
    ]
    working_set = int(np.median(sizes))
    everything = shape.layers * shape.experts
    found = {}
    for share in (0.5, 0.9, 1.0, 1.1, 1.5, 2.0):
        ratio = min(1.0, share * working_set / everything)
        memory = MemoryOptions(cache_ratio=ratio, scope="global")
        found[f"{share:g}"] = replay_cache(
            trace, "lru", memory=memory, batch=batch, steps=steps
        )["hit_rate_active"]
    return {
        "working_set": working_set,
        "ratio": working_set / everything,
        "hit_rate": found,
    }
