"""What the papers published, and how ours is held against it.

A record is data: setting, published value and place in ``data/published.yaml``; runs
and statistic that answer it in ``data/papers.yaml``, which this module reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from importlib import resources
from statistics import fmean
from typing import Any

import yaml

from moesim.evidence.reproduction.runs import Outcome, RunSpec
from moesim.evidence.reproduction.workloads import Workload
from moesim.traces.models import model_shape

SIMULATED = "simulated"
COMPUTED = "computed"
ANCHORED = "anchored"
INPUT = "input"
UNANSWERED = "unanswered"

_CHOICES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "least": min,
    "most": max,
}
COMPARISONS: dict[str, Callable[[float, float], float]] = {
    "ratio": lambda system, other: system / other,
    # Of times, so that more is better.
    "speedup": lambda system, other: other / system,
    "gain": lambda system, other: 100.0 * (system / other - 1.0),
    "reduction": lambda system, other: 100.0 * (1.0 - system / other),
    "difference": lambda system, other: system - other,
}
_NEUTRAL = {"ratio": 1.0, "speedup": 1.0}
"""How two sides are compared -> the figure of equal sides, if it is not 0."""
_SPEEDUP_OF: dict[str, Callable[[float], float]] = {
    "gain": lambda percent: 1.0 + percent / 100.0,
    "reduction": lambda percent: 1.0 / (1.0 - percent / 100.0),
}
"""How figures in % of two sides are compared -> the speedup that one states."""
MOST_MOVE = 1.5
"""A ratio that moves by a larger factor under an exchange is not decided."""


# -- records and questions -------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One published figure, as in ``data/published.yaml``. `value` is a number, or
    words such as ``4-5``.
    """

    source: str
    ref: str
    metric: str
    setting: dict[str, Any]
    value: Any
    unit: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Paper, place and metric: records that one experiment answers."""
        return self.source, self.ref, self.metric

    @property
    def label(self) -> str:
        """In words."""
        stated = f" ({', '.join(map(str, self.setting.values()))})"
        return " ".join(self.key) + stated * bool(self.setting)

    @property
    def number(self) -> float | None:
        """The value; None for words."""
        is_number = isinstance(self.value, int | float)
        return float(self.value) if is_number else None


@cache
def data(name: str) -> dict[str, Any]:
    """The content of a YAML file that ships with moesim."""
    text = (resources.files("moesim") / "data" / name).read_text(encoding="utf-8")
    # The parser in C is many times as fast, where PyYAML was built with it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content: dict[str, Any] = yaml.load(text, loader)  # noqa: S506 - both are safe
    return content


@cache
def records() -> tuple[Record, ...]:
    """All published figures, in the order of their sources."""
    return tuple(Record(**entry) for entry in data("published.yaml")["records"])


def papers() -> dict[str, Any]:
    """Source -> its cases, systems and figures, as in ``data/papers.yaml``."""
    described: dict[str, Any] = data("papers.yaml")["papers"]
    return described


@dataclass(frozen=True, slots=True)
class Case:
    """One run, those that it is compared with, and the quantity of each: an expression
    of metrics (`quantity_of`).
    """

    run: RunSpec
    others: tuple[RunSpec, ...] = ()
    quantity: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """How one published record is answered.

    Attributes:
        record: what was published.
        status: `SIMULATED`; `COMPUTED`, a size of a model; `ANCHORED`, if a machine or
            workload was made from it, so that it is never compared; `INPUT`, a setting
            of ours; `UNANSWERED`.
        cases: what must be run.
        compare: how the two sides become one figure; empty for one side.
        rival: which of several others stands for the other side.
        across: how the figures of several cases become one.
        scale: from the quantity's unit to the record's.
        value: of a model's size.
        note: where it departs from the paper, or why there is no answer.
        undecidable: what is not published and decides this figure.
        bound: ``upper`` or ``lower`` where the published figure is only such a bound.
    """

    record: Record
    status: str = SIMULATED
    cases: tuple[Case, ...] = ()
    compare: str = ""
    rival: str = "mean"
    across: str = "mean"
    scale: float = 1.0
    value: float | None = None
    note: str = ""
    undecidable: str = ""
    bound: str = ""

    @property
    def runs(self) -> tuple[RunSpec, ...]:
        """Runs whose outcomes are asked for: the system's, then those of the others."""
        system = [case.run for case in self.cases]
        return tuple(itertools.chain(system, *(case.others for case in self.cases)))

    def figure(self, outcomes: Mapping[RunSpec, Outcome]) -> float | None:
        """Ours, in the record's unit; None where a run is missing or nothing is to be
        computed.
        """
        if not self.cases or any(run not in outcomes for run in self.runs):
            return self.value
        figures = []
        for case in self.cases:
            system, *others = (
                quantity_of(case.quantity, outcomes[run])
                for run in (case.run, *case.others)
            )
            if others:
                other = _CHOICES[self.rival](others)
                system = COMPARISONS[self.compare](system, other)
            figures.append(system)
        return self.scale * _CHOICES[self.across](figures)


def quantity_of(expression: str, outcome: Outcome) -> float:
    """Evaluate an expression of a run's metrics, such as ``busy_s.gpu0 + busy_s.h2d0``
    or ``decode.h2d0 / decode.total``: sums, and at most one quotient of sums.
    """

    def term(path: str) -> float:
        metric: Any = outcome
        for name in path.split("."):
            metric = metric[name]
        return float(metric)

    sums = [sum(map(term, part.split(" + "))) for part in expression.split(" / ")]
    return sums[0] / sums[1] if len(sums) > 1 else sums[0]


# -- ours beside the published figure --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """A record with what we have for it.

    Attributes:
        question: how it is answered.
        ours: in the record's unit; None where there is none.
        exchanged: ours again with another value of an input that nobody published, by
            the exchange's name.
    """

    question: Question
    ours: float | None
    exchanged: Mapping[str, float] = field(default_factory=dict)

    @property
    def record(self) -> Record:
        """What was published."""
        return self.question.record

    @property
    def published(self) -> float | None:
        """The published number; None for words."""
        return self.record.number

    @property
    def compared(self) -> bool:
        """Whether ours may be held against the published figure."""
        counts = self.question.status in {SIMULATED, COMPUTED}
        return counts and self.ours is not None and self.published is not None

    @property
    def ratio(self) -> float | None:
        """Ours over published, where both are numbers; of gains in % the speedups that
        they state, unless ours has the other sign.
        """
        return self._ratio_of(self.ours)

    def _ratio_of(self, ours: float | None) -> float | None:
        if ours is None or not self.published:
            return None
        speedup = _SPEEDUP_OF.get(self.question.compare)
        if speedup is None or ours * self.published < 0:
            return ours / self.published
        return speedup(ours) / speedup(self.published)

    @property
    def exchanged_ratios(self) -> dict[str, float]:
        """The ratio under each exchange that changes a run."""
        ratios = {name: self._ratio_of(ours) for name, ours in self.exchanged.items()}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}

    @property
    def moves(self) -> bool:
        """Whether inputs that nobody published decide the ratio: an exchange moves it
        by more than `MOST_MOVE`, and not all of them leave it as far off, to the same
        side.
        """
        ratios = self.exchanged_ratios.values()
        if self.ratio is None or not ratios:
            return False
        lowest = min(self.ratio, *ratios)
        highest = max(self.ratio, *ratios)
        is_off = lowest > MOST_MOVE or highest < 1 / MOST_MOVE
        return not is_off and highest > MOST_MOVE * lowest

    @property
    def tells(self) -> bool:
        """Whether the ratio is one of a simulated figure, which is no bound and
        no baseline beside itself.
        """
        question = self.question
        beside_itself = all(case.others == (case.run,) for case in question.cases)
        left_out = bool(question.bound) or beside_itself
        return self.compared and bool(question.runs) and not left_out

    @property
    def ratio_counts(self) -> bool:
        """Whether the ratio says how near we are: what is published decides it."""
        return self.tells and not self.question.undecidable and not self.moves

    @property
    def keeps_bound(self) -> bool | None:
        """Whether ours keeps a published bound; None where there is none, or none of
        ours.
        """
        if not self.question.bound or self.ours is None or self.published is None:
            return None
        if self.question.bound == "upper":
            return self.ours <= self.published
        return self.ours >= self.published


TIE = 0.02
"""Figures that differ by less, relatively, are equal: of 16 orders of one table, four
changed when twice as many steps were simulated.
"""
_SYSTEM_KEYS = ("method", "technique", "baseline", "plan")
"""Settings that name a system."""
_PARAMETER_KEYS = ("w_size", "u_size")
"""Settings of a system's parameters."""
_ORDERED = {
    "latency",
    "scheduling_overhead_share",
    "decode_speed",
    "speedup_avg",
    "speedup_vs_naive_cpu",
    "energy_efficiency",
}
"""Metrics whose figures of one setting may be ordered by system; HybriMoE's speedups
repeat its latencies.
"""


UNDECIDED = "not decided by what is published"
TIED = "tie"


@dataclass(frozen=True, slots=True)
class Statement:
    """Which of two sides a paper finds larger, and whether we find the same.

    Attributes:
        words: the statement.
        records: one for a *direction*, a record that compares by itself, such as a
            speedup above 1; two for an *order*, a pair of absolute figures of the same
            table and setting, the larger first.
        published, ours: which side is larger, 1 or -1; 0 for a tie, where two figures
            differ too little to be told apart.
    """

    words: str
    records: tuple[Answered, ...]
    published: int
    ours: int

    @property
    def holds(self) -> bool:
        """Whether ours agree; a tie does not."""
        return self.ours == self.published != 0

    @property
    def verdict(self) -> str:
        """In one word or two."""
        if self.records[0].question.undecidable:
            return UNDECIDED
        if 0 in (self.published, self.ours):
            return TIED
        return "holds" if self.holds else "DIFFERS"

    @property
    def counts(self) -> bool:
        """Whether it is one of those that are counted."""
        return self.verdict not in {UNDECIDED, TIED}


def larger(first: float, second: float, scale: float | None = None) -> int:
    """1 if the first is larger, -1 if the second is, 0 where nothing can be told."""
    gap = first - second
    if scale is None:
        scale = max(abs(first), abs(second))
    if abs(gap) <= TIE * scale:
        return 0
    return 1 if gap > 0 else -1


def directions(answered: Iterable[Answered]) -> list[Statement]:
    """Records that compare by themselves."""
    statements = []
    for entry in answered:
        compare = entry.question.compare
        neutral = _NEUTRAL.get(compare, 0.0)
        # A baseline beside itself compares nothing.
        if not compare or not entry.compared or entry.published == neutral:
            continue
        assert entry.published is not None
        assert entry.ours is not None
        # Seconds have no scale of their own: they are held against the published ones.
        scale = abs(entry.published) if compare == "difference" else neutral or 100.0
        published, ours = (
            larger(value, neutral, scale) for value in (entry.published, entry.ours)
        )
        statements.append(Statement(entry.record.label, (entry,), published, ours))
    return statements


def orders(answered: Iterable[Answered]) -> list[Statement]:
    """Pairs of figures of one table and setting that differ in the system."""
    groups: dict[str, list[Answered]] = {}
    for entry in answered:
        if entry.compared and entry.record.metric in _ORDERED:
            setting = entry.record.setting
            shared = sorted(setting.keys() - {*_SYSTEM_KEYS, *_PARAMETER_KEYS})
            stated = [(name, setting[name]) for name in shared]
            groups.setdefault(f"{entry.record.key} {stated}", []).append(entry)
    statements = []
    for group in groups.values():
        for pair in itertools.combinations(group, 2):
            upper, lower = sorted(pair, key=lambda entry: -(entry.published or 0.0))
            if upper.published == lower.published or _system(upper) == _system(lower):
                continue
            statements.append(
                Statement(
                    f"{upper.record.label} above {_system(lower)}",
                    (upper, lower),
                    larger(upper.published or 0.0, lower.published or 0.0),
                    larger(upper.ours or 0.0, lower.ours or 0.0),
                )
            )
    return statements


def _system(entry: Answered) -> str:
    setting = entry.record.setting
    return " ".join(str(setting[key]) for key in _SYSTEM_KEYS if key in setting)


# -- questions as the file describes them ----------------------------------------------


def questions(
    sources: Iterable[str] | None = None, changes: Mapping[str, Any] | None = None
) -> list[Question]:
    """Every record that ``data/papers.yaml`` knows, as a question.

    Args:
        sources: names of papers; None takes all.
        changes: of what the file says of these papers.
    """
    known = papers()
    described = {
        name: _merged(known[name], changes or {})
        for name in (known if sources is None else sources)
    }
    asked = (
        _question(record, described[record.source])
        for record in records()
        if record.source in described
    )
    return [question for question in asked if question is not None]


def exchanges() -> dict[str, Any]:
    """Name -> another value of an input that nobody published, and why it is as
    plausible, as in ``data/papers.yaml``.
    """
    described: dict[str, Any] = data("papers.yaml")["exchanges"]
    return described


def exchanged(asked: Iterable[Question]) -> dict[str, dict[Record, Question]]:
    """Simulated questions again with another value of one input that nobody published,
    by the exchange's name and record; those that it changes.
    """
    simulated = {each.record: each for each in asked if each.status == SIMULATED}
    return {
        name: {
            other.record: other
            for other in questions([exchange["paper"]], exchange["paper_has"])
            if other.record in simulated
            and other.cases != simulated[other.record].cases
        }
        for name, exchange in exchanges().items()
    }


def _merged(described: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A description with changes; what is named in both is merged where it nests."""
    merged = dict(described)
    for name, value in changes.items():
        nests = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if nests else value
    return merged


def selected(described: Mapping[str, Any], record: Record) -> bool:
    """Whether a record is the one, or one of those, that a description means: of the
    key ``of``, and with the setting ``where``.
    """
    return described.get("of", list(record.key)) == list(record.key) and all(
        # True asks for any value.
        key in record.setting and (value is True or value == record.setting[key])
        for key, value in described.get("where", {}).items()
    )


def _question(record: Record, paper: Any) -> Question | None:
    sizes = paper.get("sizes", {}).get(record.ref, {})
    size = sizes.get(record.metric.removeprefix("model_config."))
    if size is not None:
        case = _case_named(str(record.setting["model"]), paper)
        model = paper["cases"][case]["workload"]["model"]
        return Question(
            record,
            COMPUTED,
            value=float(getattr(model_shape(model), size)),
            note=f"{model} in moesim's table of models",
        )
    for figure in paper["figures"]:
        if [record.ref, record.metric] in figure["records"] and selected(
            figure, record
        ):
            cases = tuple(_cases(record, paper, figure)) if "run" in figure else ()
            stated = {
                each: figure[each] for each in Question.__slots__ if each in figure
            }
            return Question(record, cases=cases, **stated)
    return None


def _case_named(name: str, paper: Any) -> str | None:
    return next((case for case in paper["cases"] if name.startswith(case)), None)


def _cases(record: Record, paper: Any, figure: Any) -> Iterator[Case]:
    key = paper["key"]
    setting = dict(record.setting)
    if "batch_size" in setting:
        setting["batch"] = setting["batch_size"]
    stated = _case_named(str(setting.pop(key, "")), paper)
    if stated is not None:
        setting[key] = stated

    each = paper.get("each", {}) | figure.get("each", {})
    axes = {
        name: [setting[name]] if name in setting else choices
        for name, choices in each.items()
    }
    axes.setdefault(key, [stated])
    for chosen in itertools.product(*axes.values()):
        choice = dict(zip(axes, chosen, strict=True))
        case = paper["cases"][choice[key]]
        values: dict[str, Any] = {}
        for layer in (paper, case, figure):
            values |= layer.get("values", {})
        values |= setting | choice
        for name, meanings in figure.get("given", {}).items():
            values |= meanings[values[name]]
        others = filled(figure.get("against", []), values)
        run, *rest = (
            _run(described, paper, case, figure, values)
            for described in (
                figure["run"],
                *(others if isinstance(others, list) else [others]),
            )
        )
        yield Case(run, tuple(rest), filled(figure["quantity"], values))


def _run(
    described: Any, paper: Any, case: Any, figure: Any, values: Mapping[str, Any]
) -> RunSpec:
    """A run from a system's name, or from options that may name a system; those of the
    figure go before its system's, these before the case's and the paper's.
    """
    stated = filled(described, values)
    stated = {"system": stated} if isinstance(stated, str) else dict(stated)
    system = paper["systems"][stated.pop("system")] if "system" in stated else {}
    layers = [_options(paper), _options(case), system, _options(figure), stated]
    options = filled(reduce(_merged, layers), values)
    options.pop("source", None)
    workload = options.pop("workload")
    inputs = tuple(map(tuple, workload.pop("inputs", ())))
    return RunSpec.of(Workload(**workload, inputs=inputs), **options)


def _options(described: Mapping[str, Any]) -> dict[str, Any]:
    """Options of runs that a paper, a case or a figure states, the workload's too."""
    workload = described.get("workload", {})
    return described.get("options", {}) | {"workload": workload}


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """A description with its {names} replaced; one that is a name alone keeps the type
    of what it stands for.
    """
    if isinstance(value, Mapping):
        return {name: filled(entry, values) for name, entry in value.items()}
    if isinstance(value, list):
        return [filled(entry, values) for entry in value]
    if not isinstance(value, str) or "{" not in value:
        return value
    if value.count("{") == 1 and value[0] == "{" and value[-1] == "}":
        return values[value[1:-1]]
    return value.format_map(values)
