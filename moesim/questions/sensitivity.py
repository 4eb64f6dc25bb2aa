"""Sensitivity of a comparison to the constants of a profile: winners that change.

A measured constant is known to an interval. If no constant, moved to either end of its
own, changes which policy wins, then the order does not depend on what calibration could
not know.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.options import ConfigError
from moesim.hwprofiles import paths
from moesim.hwprofiles.schema import lower_bound
from moesim.questions.replay import cache_words
from moesim.reporting.answers import Answer
from moesim.reporting.parts import HEADS, Column, Listing, column
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.replay import replay
from moesim.runs.setup import Setup, opened, profile_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.hwprofiles.schema import Curve, Quantity
    from moesim.traces.format.reader import Trace

ASSUMED_SHARE = 0.2
"""Constants without an interval are moved by this much either way."""
_TINY_EFFECT = 1e-9
MOST_CONSTANTS = 12
"""Constants that an answer shows, those with the largest effect."""
_LEAST = 1e-12
"""Stands in for zero, which no rate may be."""


@dataclass(slots=True)
class Sensitivity:
    """Winners under moved constants.

    Attributes:
        winner: policy that is fastest as the profile is.
        baseline_s: by policy, seconds that are compared.
        constants: those that matter: ``path``, ``interval``, ``effect`` (largest
            change of a time, as a share), ``winners`` at both ends, ``changes_winner``.
        config: what was asked.
    """

    winner: str
    baseline_s: dict[str, float]
    constants: list[dict[str, Any]]
    config: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return one object."""
        changes = [each["path"] for each in self.constants if each["changes_winner"]]
        return asdict(self) | {"winner_changes": changes}

    def answer(self) -> Answer:
        """Say whether what calibration could not know decides who is fastest."""
        figures = self.to_json()
        changes = ", ".join(figures["winner_changes"])
        sentence = f"{self.winner} stays the fastest wherever a constant lies"
        if changes:
            sentence = f"{self.winner} is the fastest, unless {changes} differ"
        times = sorted(self.baseline_s.items(), key=lambda item: item[1])
        constants = pd.DataFrame(self.constants[:MOST_CONSTANTS], columns=list(_MOVED))
        named = ("trace", "hw", "memory", "batch")
        return Answer(
            question="does it depend on what is not known of the machine?",
            subject=self.config["hw"],
            setting=[
                *((HEADS.get(name, name), str(self.config[name])) for name in named),
                ("steps", f"the first {self.config['steps']} forward passes"),
            ],
            tables=[
                Listing(times, [Column("policy", "policy"), column("tpot_s")]),
                Listing(
                    constants,
                    list(_MOVED.values()),
                    title="Constants, the most important first",
                ),
            ],
            sentences=[sentence],
            data=figures,
        )


_MOVED = {
    "path": Column("path", "constant"),
    "effect": Column("effect", "changes times by", "share"),
    "interval": Column("interval", "its interval is"),
    "changes_winner": Column("changes_winner", "changes the winner"),
}


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
        progress: called with what was moved and the share that is done.
        options: fields of `moesim.runs.config.RunConfig`.

    Raises:
        TraceError, ProfileError, PolicyError: in one line.
    """
    if not policies:
        raise ConfigError("sensitivity: expected at least one policy, got none")
    config, opened_trace = opened(RunConfig.of(trace, steps=steps, **options))
    profile = profile_of(config.hw if hw is None else hw)
    report_progress = progress or (lambda _path, _share: None)

    def times_s(machine: HardwareProfile) -> pd.Series[float]:
        metrics = pd.DataFrame(
            replay(config.replaced(policy=name, hw=machine), keep=False).metrics
            for name in policies
        ).set_axis(list(policies))
        measure = "tpot_s" if metrics["tpot_s"].notna().all() else "makespan_s"
        return metrics[measure].astype(float)

    baseline_s = times_s(profile)
    winner = str(baseline_s.idxmin())
    moves = list(_moves(profile))
    constants: list[dict[str, Any]] = []
    for number, (path, is_measured, ends) in enumerate(moves, start=1):
        # One constant at a time: what two of them do together stays unseen.
        moved_s = pd.DataFrame(map(times_s, ends))
        report_progress(path, number / len(moves))
        effect = float((moved_s / baseline_s - 1.0).abs().to_numpy().max())
        # Most constants are of operations that these policies never do.
        if effect < _TINY_EFFECT:
            continue
        winners: list[Any] = moved_s.idxmin(axis=1).tolist()
        constants.append(
            {
                "path": path,
                "interval": "measured" if is_measured else "assumed",
                "effect": effect,
                "winners": winners,
                "changes_winner": set(winners) != {winner},
            }
        )
    constants.sort(key=lambda constant: -constant["effect"])

    best = config.replaced(policy=winner, hw=profile)
    asked = Setup.of(best, opened_trace)
    return Sensitivity(
        winner,
        dict(zip(policies, baseline_s, strict=True)),
        constants,
        config={
            "trace": opened_trace.name,
            "hw": profile.name,
            "hw_digest": profile.digest,
            "policies": list(policies),
            "memory": cache_words(asked.effective_config(opened_trace)),
            "batch": config.batch,
            "steps": config.steps,
        },
    )


def _moves(
    profile: HardwareProfile,
) -> Iterator[tuple[str, bool, list[HardwareProfile]]]:
    """Each constant that costs time, whether its interval was measured, and the profile
    with it at both ends.
    """
    for kind, ends_of in (("numbers", _ends_of_number), ("curves", _ends_of_curve)):
        known: Any = getattr(profile, kind)
        for path, constant in known.items():
            is_measured, ends = ends_of(path, constant)
            moved: list[dict[str, Any]] = [{kind: {**known, path: e}} for e in ends]
            if moved:
                yield path, is_measured, [replace(profile, **each) for each in moved]


def _ends_of_number(path: str, quantity: Quantity) -> tuple[bool, list[Quantity]]:
    """Both ends of a number's interval, or of the assumed one; none where it costs no
    time.
    """
    costs_time = any(paths.below(path, of) for of in (paths.COSTS, paths.CONTENTION))
    # A zero has no size to be moved by.
    if not costs_time or not quantity.value:
        return False, []
    margin = ASSUMED_SHARE * quantity.value
    ends = quantity.interval or (quantity.value - margin, quantity.value + margin)
    # An interval may reach below what the number can be.
    least = max(_LEAST, lower_bound(path).value)
    moved = [replace(quantity, value=max(end, least), interval=None) for end in ends]
    return quantity.interval is not None, moved


def _ends_of_curve(_path: str, curve: Curve) -> tuple[bool, list[Curve]]:
    """A curve moved as a whole: by the error of a mean of its samples, or by the
    assumed share.
    """
    seconds = np.array(curve.seconds)
    errors_s = ASSUMED_SHARE * seconds
    if curve.samples and curve.spread:
        # A mean of n samples is known to 1.96 IQR / (1.35 sqrt(n)).
        errors_s = 1.96 / 1.35 * np.array(curve.spread) / np.sqrt(curve.samples)
    # As a whole: errors of one machine's curve hardly cancel.
    moved_s = [np.maximum(seconds + each, _LEAST) for each in (-errors_s, errors_s)]
    moved = [replace(curve, seconds=tuple(each.tolist())) for each in moved_s]
    return curve.samples is not None, moved
