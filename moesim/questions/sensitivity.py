"""Sensitivity of a comparison to the constants of a profile: winners that change, from
how many tokens on fetching an expert pays, and the cache size below which LRU hits
nothing.

A measured constant is known to an interval. If no constant, moved to either end of its
own, changes which policy wins, then the order does not depend on what calibration could
not know.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from moesim.base.units import percent
from moesim.hwprofiles import paths
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.schema import lower_bound
from moesim.reporting.answers import Answer, Column, Listing
from moesim.runs.config import MemoryOptions, RunConfig, takes_options
from moesim.runs.replay import replay, replay_cache
from moesim.runs.setup import opened, profile_of
from moesim.traces.format.batch import compose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.hwprofiles.schema import Curve, Quantity
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

ASSUMED_SHARE = 0.2
"""Constants without an interval are moved by this much either way."""
_TOKENS = tuple(2**power for power in range(11))
_WORKING_SET_SHARES = (0.5, 0.9, 1.0, 1.1, 1.5, 2.0)
_TINY_EFFECT = 1e-9
MOST_CONSTANTS = 12
"""Constants that an answer shows, those with the largest effect."""
_LEAST = 1e-12
"""Stands in for zero, which no rate may be."""


@dataclass(slots=True)
class Sensitivity:
    """Winners under moved constants, where fetching pays, and the size below which a
    cache hits nothing.

    Attributes:
        winner: policy that is fastest as the profile is.
        baseline_s: by policy, seconds that are compared.
        constants: those that matter: ``path``, ``interval``, ``effect`` (largest
            change of a time, as a share), ``winners`` at both ends, ``changes_winner``.
        break_even: see `break_even`.
        cliff: see `capacity_cliff`.
        config: what was asked.
    """

    winner: str
    baseline_s: dict[str, float]
    constants: list[dict[str, Any]]
    break_even: list[dict[str, Any]]
    cliff: dict[str, Any]
    config: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return one object."""
        changes = [each["path"] for each in self.constants if each["changes_winner"]]
        return asdict(self) | {"winner_changes": changes}

    def answer(self) -> Answer:
        """Say whether what calibration could not know decides who is fastest."""
        config = self.config
        changes = [each["path"] for each in self.constants if each["changes_winner"]]
        sentence = f"{self.winner} stays the fastest wherever a constant lies"
        if changes:
            sentence = (
                f"{self.winner} is the fastest, unless {', '.join(changes)} differ"
            )
        # Rows are sorted by tokens: the first one is where fetching begins to pay.
        fetched = [row["tokens"] for row in self.break_even if row["fetch"]]
        since = f"never, up to {_TOKENS[-1]} tokens"
        if fetched:
            since = f"from {fetched[0]} tokens of an expert on"
        rates = ", ".join(
            f"{share} times that: {percent(rate or 0.0)}"
            for share, rate in self.cliff["hit_rate"].items()
        )
        first = sorted(self.baseline_s.items(), key=lambda item: item[1])
        constants = Listing(
            pd.DataFrame(self.constants[:MOST_CONSTANTS]),
            [
                Column("path", "constant"),
                Column("effect", "changes times by", "share"),
                Column("interval", "its interval is"),
                Column("changes_winner", "changes the winner"),
            ],
            title="Constants, the most important first",
        )
        return Answer(
            question="does it depend on what is not known of the machine?",
            subject=config["hw"],
            setting=[
                ("trace", config["trace"]),
                ("machine", config["hw"]),
                ("memory", config["memory"]),
                ("batch", str(config["batch"])),
                ("steps", f"the first {config['steps']} forward passes"),
            ],
            tables=[
                Listing(
                    pd.DataFrame(first, columns=["policy", "seconds"]),
                    [Column("policy", "policy"), Column("seconds", "per token", "s")],
                ),
                *([constants] if self.constants else []),
            ],
            sentences=[sentence],
            notes=[
                (
                    "to fetch an absent expert is faster than to compute it on the CPU"
                    f" {since}"
                ),
                (
                    f"a forward pass touches {self.cliff['working_set']} experts,"
                    f" {percent(self.cliff['ratio'])} of all; hit rate of one LRU for"
                    f" all layers by its size: {rates}"
                ),
            ],
            data=self.to_json(),
        )


class _Move(NamedTuple):
    """One constant, and the profile with it at both ends of its range."""

    path: str
    assumed: bool
    ends: list[HardwareProfile]


@takes_options(RunConfig, without=["policy", "hw"])
def sensitivity(
    trace: RunConfig | str | Path | Trace,
    policies: Sequence[str] = ("greedy+lru", "on-demand+lru", "all-cpu+none"),
    *,
    hw: str | Path | HardwareProfile | None = None,
    steps: int | None = 64,
    progress: Callable[[str, float], None] | None = None,
    **options: Any,
) -> Sensitivity:
    """Move every constant to the ends of its interval, one at a time, and compare
    policies again by what `compare` compares.

    Args:
        trace: routing; or a configuration.
        policies: what is compared, each as ``assignment+cache+prefetch``.
        hw: the profile.
        steps: forward passes replayed; every constant takes two comparisons.
        progress: called with what is moved and the share that is done.
        options: fields of `moesim.runs.config.RunConfig`.

    Raises:
        TraceError, ProfileError, PolicyError: in one line.
    """
    config, opened_trace = opened(RunConfig.of(trace, steps=steps, **options))
    profile = profile_of(config.hw if hw is None else hw)
    report_progress = progress or (lambda _path, _share: None)

    def times_s(machine: HardwareProfile) -> dict[str, float]:
        runs = {
            name: replay(config.replaced(policy=name, hw=machine), keep=False)
            for name in policies
        }
        measures = ("tpot_s", "makespan_s")
        figures = [[run.metrics[each] for run in runs.values()] for each in measures]
        seconds = figures[0] if all(figures[0]) else figures[1]
        return dict(zip(runs, seconds, strict=True))

    baseline_s = times_s(profile)
    winner = _fastest(baseline_s)
    moves = list(_moves(profile))
    constants: list[dict[str, Any]] = []
    for number, move in enumerate(moves):
        report_progress(move.path, number / len(moves))
        # One constant at a time: what two of them do together stays unseen.
        moved = [times_s(machine) for machine in move.ends]
        effect = max(
            abs(seconds[name] / baseline_s[name] - 1.0)
            for seconds in moved
            for name in baseline_s
        )
        # Most constants are of operations that these policies never do.
        if effect < _TINY_EFFECT:
            continue
        winners = [_fastest(seconds) for seconds in moved]
        constants.append(
            {
                "path": move.path,
                "interval": "assumed" if move.assumed else "measured",
                "effect": effect,
                "winners": winners,
                "changes_winner": any(name != winner for name in winners),
            }
        )
    constants.sort(key=lambda constant: -constant["effect"])

    report_progress("where fetching pays", 1.0)
    return Sensitivity(
        winner,
        baseline_s,
        constants,
        break_even=break_even(profile, opened_trace.shape),
        cliff=capacity_cliff(opened_trace, batch=config.batch, steps=config.steps),
        config={
            "trace": str(opened_trace.path),
            "hw": profile.name,
            "hw_digest": profile.digest,
            "policies": list(policies),
            "memory": config.memory.size_words,
            "batch": config.batch,
            "steps": config.steps,
        },
    )


def _fastest(makespans_s: dict[str, float]) -> str:
    return min(makespans_s, key=lambda name: makespans_s[name])


def _moves(profile: HardwareProfile) -> Iterator[_Move]:
    """Move each constant that costs time."""
    for path, quantity in profile.numbers.items():
        costs_time = paths.below(path, paths.COSTS)
        slows = paths.below(path, paths.CONTENTION)
        # A zero has no size to be moved by.
        if not (costs_time or slows) or not quantity.value:
            continue
        ends = [
            replace(profile, numbers={**profile.numbers, path: end})
            for end in _ends_of_number(path, quantity)
        ]
        yield _Move(path, quantity.interval is None, ends)

    for path, curve in profile.curves.items():
        ends = [
            replace(profile, curves={**profile.curves, path: end})
            for end in _ends_of_curve(curve)
        ]
        yield _Move(path, curve.samples is None, ends)


def _ends_of_number(path: str, quantity: Quantity) -> list[Quantity]:
    """Both ends of a number's interval, or of the assumed one."""
    ends = quantity.interval
    if ends is None:
        ends = (
            quantity.value * (1 - ASSUMED_SHARE),
            quantity.value * (1 + ASSUMED_SHARE),
        )
    # An interval may reach below what the number can be.
    least = max(_LEAST, lower_bound(path).value)
    return [replace(quantity, value=max(value, least), interval=None) for value in ends]


def _ends_of_curve(curve: Curve) -> list[Curve]:
    """A curve moved as a whole: by the error of a mean of its samples, or by the
    assumed share.
    """
    seconds = np.array(curve.seconds)
    if curve.samples and curve.spread:
        # A mean of n samples is known to 1.96 IQR / (1.35 sqrt(n)).
        errors_s = 1.96 / 1.35 * np.array(curve.spread) / np.sqrt(curve.samples)
    else:
        errors_s = ASSUMED_SHARE * seconds

    # As a whole: errors of one machine's curve hardly cancel.
    ends = []
    for sign in (-1.0, 1.0):
        moved_s = np.maximum(seconds + sign * errors_s, _LEAST)
        ends.append(replace(curve, seconds=tuple(moved_s.tolist())))
    return ends


def break_even(profile: HardwareProfile, shape: ModelShape) -> list[dict[str, Any]]:
    """Compare, by tokens, computing an absent expert on the CPU with fetching it and
    computing it on the GPU.

    Returns:
        One row per number of tokens: seconds of both ways and ``fetch`` where fetching
        is cheaper; a fetched expert also serves later, which this line does not count.
    """
    # The first layer stands for all: experts of a model mostly have one size.
    costs = Costs(profile, shape)
    tokens = np.array(_TOKENS)
    cpu_s = costs.cpu_s(0, tokens)
    gpu_s = costs.gpu_s(0, tokens)
    copy_s = costs.copy_s(0)
    rows = []
    for row, count in enumerate(_TOKENS):
        fetched_s = copy_s + gpu_s[row]
        rows.append(
            {
                "tokens": count,
                "cpu_s": float(cpu_s[row]),
                "copy_s": copy_s,
                "gpu_s": float(gpu_s[row]),
                "fetch": bool(fetched_s < cpu_s[row]),
            }
        )
    return rows


def capacity_cliff(
    trace: Trace, *, batch: int = 1, steps: int | None = None
) -> dict[str, Any]:
    """Find where a global LRU stops to hit anything: below the experts that one step
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
    # The median: a prefill touches many more experts than all other steps.
    working_set = int(np.median(sizes))
    all_experts = shape.layers * shape.experts
    hit_rates = {}
    for share in _WORKING_SET_SHARES:
        # Twice the working set may be more than there is.
        ratio = min(1.0, share * working_set / all_experts)
        memory = MemoryOptions(cache_ratio=ratio, cache_scope="global")
        counts = replay_cache(trace, "lru", memory=memory, batch=batch, steps=steps)
        hit_rates[f"{share:g}"] = counts["hit_rate_active"]
    return {
        "working_set": working_set,
        "ratio": working_set / all_experts,
        "hit_rate": hit_rates,
    }
