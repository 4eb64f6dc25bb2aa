"""What a published figure says about which of two systems is better, whether ours say
the same, and what the time of both sides consists of.

Two kinds of statements are read off the records. A *direction* is a record that
compares by itself: a speedup above 1, a gain above 0 %. An *order* is a pair of
absolute figures of the same table and setting, of two systems.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.evidence.reproduction.questions import Answered
    from moesim.evidence.reproduction.runs import Outcome, RunSpec

TIE = 0.02
"""Figures that differ by less, relatively, are equal: of 16 orders of one table, four
changed when twice as many steps were simulated.
"""

_NEUTRAL = {"ratio": 1.0, "speedup": 1.0}
"""How two sides are compared -> the figure of equal sides, if it is not 0."""
_SYSTEM_KEYS = ("method", "technique", "baseline", "plan")
"""Settings that name a system."""
_PARAMETER_KEYS = ("w_size", "u_size")
_LESS_IS_BETTER = {"latency", "moe_time", "scheduling_overhead_share"}
_ORDERED = {
    *_LESS_IS_BETTER,
    "gpu_memory",
    "decode_speed",
    "speedup_avg",
    "speedup_vs_naive_cpu",
    "energy_efficiency",
}
"""Metrics whose figures of one setting may be ordered by system; HybriMoE's speedups
repeat its latencies.
"""


@dataclass(frozen=True, slots=True)
class Statement:
    """Which of two sides a paper finds larger, and whether we find the same.

    Attributes:
        words: the statement.
        records: one for a direction, two for an order, the larger first.
        holds: whether ours agree; a tie does not.
        tie: whether one of the two sides' figures, published or ours, differ too little
            to be told apart.
        undecidable: what would have to be published to decide it; empty where inputs
            suffice.
        of_systems: False for two settings of one system's parameters.
    """

    words: str
    records: tuple[Answered, ...]
    holds: bool
    tie: bool = False
    undecidable: str = ""
    of_systems: bool = True

    @property
    def counts(self) -> bool:
        """Whether it is one of those that are counted."""
        return not self.tie and not self.undecidable

    @property
    def verdict(self) -> str:
        """In one word or two."""
        if self.undecidable:
            return "not decided by what is published"
        if self.tie:
            return "tie"
        return "holds" if self.holds else "DIFFERS"


def directions(answered: Iterable[Answered]) -> list[Statement]:
    """Records that compare by themselves."""
    statements = []
    for entry in answered:
        compare = entry.question.compare
        if not compare or not entry.compared:
            continue
        assert entry.published is not None
        assert entry.ours is not None
        neutral = _NEUTRAL.get(compare, 0.0)
        # A baseline beside itself compares nothing.
        if entry.published == neutral:
            continue
        # Seconds have no scale of their own: they are held against the published ones.
        scale = abs(entry.published) if compare == "difference" else neutral or 100.0
        sides = [
            _side(value, neutral, scale) for value in (entry.published, entry.ours)
        ]
        statements.append(
            Statement(
                label(entry),
                (entry,),
                holds=sides[0] == sides[1] != 0,
                tie=0 in sides,
                undecidable=entry.question.undecidable,
            )
        )
    return statements


def _side(value: float, neutral: float, scale: float) -> int:
    """1 above, -1 below, 0 where nothing can be told."""
    difference = (value - neutral) / scale
    if abs(difference) < TIE:
        return 0
    return 1 if difference > 0 else -1


def orders(answered: Sequence[Answered]) -> list[Statement]:
    """Pairs of figures of one table and setting that differ in the system."""
    groups: dict[tuple[object, ...], list[Answered]] = {}
    for entry in answered:
        if entry.compared and entry.record.metric in _ORDERED:
            groups.setdefault(_group(entry), []).append(entry)
    statements = []
    for group in groups.values():
        for first, second in combinations(group, 2):
            statement = _order(first, second)
            if statement is not None:
                statements.append(statement)
    return statements


def _group(entry: Answered) -> tuple[object, ...]:
    shared = {
        key: value
        for key, value in entry.record.setting.items()
        if key not in (*_SYSTEM_KEYS, *_PARAMETER_KEYS)
    }
    return *entry.record.key, str(sorted(shared.items()))


def _order(first: Answered, second: Answered) -> Statement | None:
    system = _system(first)
    other = _system(second)
    parameters = _parameters(first) != _parameters(second)
    if system == other and not parameters:
        return None
    assert first.published is not None
    assert second.published is not None
    if first.published == second.published:
        return None
    larger = first
    smaller = second
    if first.published < second.published:
        larger = second
        smaller = first
    assert larger.ours is not None
    assert smaller.ours is not None
    name = f"{_system(smaller)} {_parameters(smaller)}".strip()
    ours = _larger(larger.ours, smaller.ours)
    assert larger.published is not None
    assert smaller.published is not None
    return Statement(
        f"{label(larger)} above {name}",
        (larger, smaller),
        holds=ours > 0,
        tie=ours == 0 or _larger(larger.published, smaller.published) == 0,
        undecidable=larger.question.undecidable,
        of_systems=system != other,
    )


def _larger(first: float, second: float) -> int:
    """1 if the first is larger, -1 if the second is, 0 where nothing can be told."""
    gap = first - second
    if abs(gap) <= TIE * max(abs(first), abs(second)):
        return 0
    return 1 if gap > 0 else -1


def _system(entry: Answered) -> str:
    setting = entry.record.setting
    return " ".join(str(setting[key]) for key in _SYSTEM_KEYS if key in setting)


def _parameters(entry: Answered) -> str:
    setting = entry.record.setting
    stated = [str(setting[key]) for key in _PARAMETER_KEYS if key in setting]
    return f"({', '.join(stated)})" if stated else ""


def label(entry: Answered) -> str:
    """A record in words."""
    record = entry.record
    setting = ", ".join(str(value) for value in record.setting.values())
    return f"{record.source} {record.ref} {record.metric} ({setting})"


# -- the parts of both sides' time -----------------------------------------------------

PARTS = ("cpu", "gpu", "link", "ssd", "dense", "planning")


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


def sides(
    statement: Statement, outcomes: Mapping[RunSpec, Outcome]
) -> tuple[Side, ...]:
    """What a step of both sides consists of, the one that the paper finds better
    first; empty for figures that follow from sizes.
    """
    phase = _phase(statement)
    runs_of_sides = _runs(statement)
    rival = statement.records[0].question.rival
    if len(statement.records) == 1 and rival != "mean":
        # The other side is one of several systems.
        system, others = runs_of_sides
        runs_of_sides = (system, _rivals(others, outcomes, phase, rival))
    measured = (_side_of(runs, outcomes, phase) for runs in runs_of_sides)
    return tuple(side for side in measured if side is not None)


def _runs(statement: Statement) -> tuple[tuple[RunSpec, ...], ...]:
    if len(statement.records) == 1:
        return statement.records[0].question.sides
    larger, smaller = statement.records
    baselines = [entry.record.setting.get("baseline") for entry in (larger, smaller)]
    if baselines[0] != baselines[1] and len(larger.question.sides) > 1:
        # A system's larger speedup is over the slower baseline.
        return smaller.question.sides[1:2] + larger.question.sides[1:2]
    better = larger.question.sides[:1]
    other = smaller.question.sides[:1]
    if larger.record.metric in _LESS_IS_BETTER:
        return other + better
    return better + other


def _phase(statement: Statement) -> str:
    entry = statement.records[0]
    if "ttft_s" in entry.question.quantity:
        return "prefill"
    return str(entry.record.setting.get("phase", "decode"))


def _rivals(
    runs: Sequence[RunSpec],
    outcomes: Mapping[RunSpec, Outcome],
    phase: str,
    rival: str,
) -> tuple[RunSpec, ...]:
    """The run that stands for the others, on each machine and workload."""
    places: dict[object, list[RunSpec]] = {}
    for run in runs:
        places.setdefault((run.machine, run.workload.model), []).append(run)
    choose = min if rival == "least" else max
    return tuple(
        choose(group, key=lambda run: outcomes[run][phase]["total"])
        for group in places.values()
    )


def _side_of(
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
