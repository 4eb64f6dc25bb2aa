"""Why ours disagrees: what each side's time consists of, and where the side that the
paper finds better loses its time (`moesim.analysis.gap`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.analysis.gap import gap
from moesim.policies.base import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from moesim.analysis.gap import Gap
    from moesim.reproduction.papers.orders import Statement
    from moesim.reproduction.papers.reproduce_all import Answered
    from moesim.reproduction.papers.runs import Outcome, RunSpec

GAP_STEPS = 4
"""Forward passes of a gap: a prefill and three decode steps. It replays 32 mixes."""
PARTS = ("cpu", "gpu", "link", "ssd", "dense", "planning")
_WORDS = {
    "cpu": "the CPU's experts",
    "gpu": "the GPU's experts",
    "link": "copies to the GPU",
    "ssd": "reads from the SSD",
    "dense": "dense parts",
    "planning": "planning",
}
_BEST_METRICS = ("tpot_reduction_vs_best_baseline", "ttft_reduction_vs_best_baseline")
"""Metrics whose other side is the fastest of several systems."""
_PREFILL_METRICS = ("ttft_reduction_vs_best_baseline", "load_plus_prefill_speedup")


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a statement.

    Attributes:
        words: its run, or the first of several.
        step_s: length of a step, mean over its runs.
        busy_s: part -> seconds busy in a step; parts overlap.
    """

    words: str
    step_s: float
    busy_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of both sides, and one sentence.

    Attributes:
        statement: that does not hold.
        sides: the one that the paper finds better first.
        sentence: why.
    """

    statement: Statement
    sides: tuple[Side, ...]
    sentence: str


GapTask = tuple["RunSpec", "Path"]


def gap_of(spec: RunSpec, folder: Path) -> dict[str, float] | None:
    """Shares of a run's gap to the clairvoyant bound, by part; None where a gap is not
    defined.

    Routing is left as recorded, as the bound must do the same work.
    """
    if spec.modelled or spec.learned:
        return None
    options = dict(spec.options) | {"routing": "as-recorded", "steps": GAP_STEPS}
    if spec.warm:
        options["warm"] = spec.workload.calibration().draw(folder)
    try:
        measured: Gap = gap(
            spec.workload.draw(folder),
            spec.policy,
            hw=spec.machine,
            causal=(),
            **options,
        )
    except PolicyError:
        return None
    if not measured.gap_s:
        return {}
    return {part.name: part.share_s / measured.gap_s for part in measured.parts}


def better_run(statement: Statement) -> RunSpec | None:
    """The first run of the side that the paper finds better."""
    sides = _sides(statement)
    return sides[0][0] if sides and sides[0] else None


def explain(
    statement: Statement,
    outcomes: Mapping[RunSpec, Outcome],
    gaps: Mapping[RunSpec, dict[str, float] | None],
) -> Explanation:
    """Say why a statement does not hold."""
    phase = _phase(statement)
    runs_of_sides = _sides(statement)
    if statement.records[0].record.metric in _BEST_METRICS:
        system, others = runs_of_sides
        runs_of_sides = (system, _fastest(others, outcomes, phase))
    sides = tuple(
        side
        for runs in runs_of_sides
        if (side := _side(runs, outcomes, phase)) is not None
    )
    better = better_run(statement)
    shares = gaps.get(better) if better is not None else None
    return Explanation(statement, sides, _sentence(sides, shares))


def _sides(statement: Statement) -> tuple[tuple[RunSpec, ...], ...]:
    if len(statement.records) == 1:
        return statement.records[0].question.sides
    larger, smaller = statement.records
    if _of_baselines(larger, smaller):
        # A system's larger speedup is over the slower baseline.
        return smaller.question.sides[1:2] + larger.question.sides[1:2]
    better, other = larger.question.sides[:1], smaller.question.sides[:1]
    # Of times the smaller is better.
    if larger.record.metric in {"latency", "moe_time", "scheduling_overhead_share"}:
        return other + better
    return better + other


def _of_baselines(larger: Answered, smaller: Answered) -> bool:
    """Whether both are speedups of one system, over different baselines."""
    baselines = [entry.record.setting.get("baseline") for entry in (larger, smaller)]
    return baselines[0] != baselines[1] and len(larger.question.sides) > 1


def _phase(statement: Statement) -> str:
    record = statement.records[0].record
    if record.metric in _PREFILL_METRICS:
        return "prefill"
    return str(record.setting.get("phase", "decode"))


def _fastest(
    runs: Sequence[RunSpec], outcomes: Mapping[RunSpec, Outcome], phase: str
) -> tuple[RunSpec, ...]:
    """The fastest of the runs on each machine and workload."""
    fastest: dict[object, RunSpec] = {}
    for run in runs:
        place = (run.machine, run.workload)
        best = fastest.get(place)
        total_s = outcomes[run][phase]["total"]
        if best is None or total_s < outcomes[best][phase]["total"]:
            fastest[place] = run
    return tuple(fastest.values())


def _side(
    runs: Sequence[RunSpec], outcomes: Mapping[RunSpec, Outcome], phase: str
) -> Side | None:
    measured = [outcomes[run][phase] for run in runs if phase in outcomes.get(run, {})]
    measured = [parts for parts in measured if parts["steps"]]
    if not measured:
        return None

    def mean(name: str) -> float:
        return sum(parts[name] / parts["steps"] for parts in measured) / len(measured)

    more = f" (and {len(runs) - 1} more)" if len(runs) > 1 else ""
    return Side(
        words=runs[0].words + more,
        step_s=mean("total"),
        busy_s={name: mean(name) for name in PARTS},
    )


def _sentence(sides: Sequence[Side], shares: Mapping[str, float] | None) -> str:
    if len(sides) < 2:
        return "Both figures follow from sizes, not from runs."
    better, other = sides[:2]
    part = max(PARTS, key=lambda name: better.busy_s[name] - other.busy_s[name])
    text = (
        f"The expected side needs {_ms(better.step_s)} a step, the other"
        f" {_ms(other.step_s)}"
    )
    if better.busy_s[part] > other.busy_s[part]:
        text += (
            f"; it is most behind in {_WORDS[part]}: {_ms(better.busy_s[part])}"
            f" against {_ms(other.busy_s[part])}"
        )
    else:
        text += "; no part of it is busier than the other's, so lanes wait more"
    if shares:
        largest = max(shares, key=lambda name: shares[name])
        text += (
            f"; of its gap to a clairvoyant run, {100 * shares[largest]:.0f} % lie in"
            f" {largest}"
        )
    return text + "."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def distinct(specs: Iterable[RunSpec | None]) -> list[RunSpec]:
    """Runs without repetition, in the order of first appearance."""
    return list(dict.fromkeys(spec for spec in specs if spec is not None))
