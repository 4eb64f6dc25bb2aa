"""How each published record is answered: `data/papers.yaml` says which runs are needed
and what figure follows from them; this module reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from statistics import fmean
from typing import TYPE_CHECKING, Any

import yaml

from moesim.evidence.reproduction.runs import Outcome, RunSpec, spec_quantities
from moesim.evidence.reproduction.workloads import Workload
from moesim.traces.models import model_shape

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

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
_COMPARISONS: dict[str, Callable[[float, float], float]] = {
    "ratio": lambda system, other: system / other,
    # Of times, so that more is better.
    "speedup": lambda system, other: other / system,
    "gain": lambda system, other: 100.0 * (system / other - 1.0),
    "reduction": lambda system, other: 100.0 * (1.0 - system / other),
    "difference": lambda system, other: system - other,
}
_SPEEDUP_OF: dict[str, Callable[[float], float]] = {
    "gain": lambda percent: 1.0 + percent / 100.0,
    "reduction": lambda percent: 1.0 / (1.0 - percent / 100.0),
}
"""How figures in % of two sides are compared -> the speedup that one states."""
MOST_MOVE = 1.5
"""A ratio that moves by a larger factor under an exchange is not decided."""


# -- published records -----------------------------------------------------------------


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


@cache
def _experiments() -> dict[str, Any]:
    return data("papers.yaml")


def papers() -> dict[str, Any]:
    """Source -> its cases, systems and figures, as in ``data/papers.yaml``."""
    described: dict[str, Any] = _experiments()["papers"]
    return described


def unanchored(run: RunSpec) -> RunSpec:
    """The same run on a machine from datasheets alone."""
    machines: dict[str, str] = _experiments()["unanchored"]
    return run.on(machines.get(run.machine, run.machine))


# -- questions -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One run, and those that it is compared with; `values` are those of the names in
    its description.
    """

    run: RunSpec
    others: tuple[RunSpec, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """How one published record is answered.

    Attributes:
        record: what was published.
        status: `SIMULATED`; `COMPUTED` from sizes alone; `ANCHORED`, if a machine or
            workload was made from it, so that it is never compared; `INPUT`, a setting
            of ours; `UNANSWERED`.
        cases: what must be run; none for a figure of a model's shape.
        quantity: of each run, an expression of metrics (`quantity_of`).
        compare: how the two sides become one figure; empty for one side.
        rival: which of several others stands for the other side.
        across: how the figures of several cases become one.
        scale: from the quantity's unit to the record's.
        value: computed already.
        note: where it departs from the paper, or why there is no answer.
        undecidable: what is not published and decides this figure.
        bound: ``upper`` or ``lower`` where the published figure is only such a bound.
    """

    record: Record
    status: str = SIMULATED
    cases: tuple[Case, ...] = ()
    quantity: str = ""
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
        """Runs whose outcomes are asked for."""
        if self.status == COMPUTED:
            return ()
        return tuple(run for side in self.sides for run in side)

    @property
    def sides(self) -> tuple[tuple[RunSpec, ...], ...]:
        """Runs of the system that the paper finds better, and those of the other; of an
        absolute figure the system's alone.
        """
        system = tuple(case.run for case in self.cases)
        others = tuple(other for case in self.cases for other in case.others)
        return tuple(side for side in (system, others) if side)

    def figure(self, outcomes: Mapping[RunSpec, Outcome]) -> float | None:
        """Ours, in the record's unit; None where a run is missing or nothing is to be
        computed.
        """
        missing = any(run not in outcomes for run in self.runs)
        if missing or not self.cases:
            return self.value
        figures = [self._of_case(case, outcomes) for case in self.cases]
        return self.scale * _CHOICES[self.across](figures)

    def _of_case(self, case: Case, outcomes: Mapping[RunSpec, Outcome]) -> float:
        def quantity(run: RunSpec) -> float:
            return quantity_of(self.quantity, run, outcomes.get(run, {}), case.values)

        system = quantity(case.run)
        if not case.others:
            return system
        other = _CHOICES[self.rival]([quantity(run) for run in case.others])
        return _COMPARISONS[self.compare](system, other)


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
    def compared(self) -> bool:
        """Whether ours may be held against the published figure."""
        counts = self.question.status in {SIMULATED, COMPUTED}
        return counts and self.ours is not None and self.published is not None

    @property
    def published(self) -> float | None:
        """The published number; None for words."""
        value = self.record.value
        return float(value) if isinstance(value, int | float) else None

    @property
    def ratio(self) -> float | None:
        """Ours over published, where both are numbers; of gains in % the speedups that
        they state, unless ours has the other sign.
        """
        return self._ratio_of(self.ours)

    @property
    def printed_ratio(self) -> float | None:
        """Ours over published as they are printed, also of gains in %."""
        if self.ours is None or not self.published:
            return None
        return self.ours / self.published

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
        if lowest > MOST_MOVE or highest < 1 / MOST_MOVE:
            return False
        return highest > MOST_MOVE * lowest

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
    def keeps_bound(self) -> bool | None:
        """Whether ours keeps a published bound; None where there is none, or none of
        ours.
        """
        if not self.question.bound or self.ours is None or self.published is None:
            return None
        if self.question.bound == "upper":
            return self.ours <= self.published
        return self.ours >= self.published

    @property
    def ratio_counts(self) -> bool:
        """Whether the ratio says how near we are: what is published decides it."""
        return self.tells and not self.question.undecidable and not self.moves

    def _ratio_of(self, ours: float | None) -> float | None:
        published = self.published
        if ours is None or not published:
            return None
        speedup = _SPEEDUP_OF.get(self.question.compare)
        if speedup is None or ours * published < 0:
            return ours / published
        return speedup(ours) / speedup(published)


def quantity_of(
    expression: str, run: RunSpec, outcome: Outcome, values: Mapping[str, Any]
) -> float:
    """Evaluate an expression such as ``busy_s.gpu0 + busy_s.h2d0`` or ``decode.link /
    decode.total``: sums of metrics, and at most one quotient of sums.

    Args:
        expression: of metrics of a run, or of what follows from its description alone
            (`moesim.evidence.reproduction.runs.spec_quantities`).
        run: what was run.
        outcome: its metrics.
        values: of the names in the run's description.
    """
    sums = []
    for part in expression.split(" / "):
        total = 0.0
        for path in part.split(" + "):
            known = spec_quantities().get(path)
            total += known(run, values) if known else _at(path, outcome)
        sums.append(total)
    return sums[0] / sums[1] if len(sums) > 1 else sums[0]


def _at(path: str, outcome: Outcome) -> float:
    metric: Any = outcome
    for name in path.split("."):
        metric = metric[name]
    return float(metric)


def questions(sources: Iterable[str] | None = None) -> list[Question]:
    """Every record that ``data/papers.yaml`` knows, as a question.

    Args:
        sources: names of papers; None takes all.
    """
    wanted = set(papers() if sources is None else sources)
    asked = (
        _question(each, papers()[each.source])
        for each in records()
        if each.source in wanted
    )
    return [question for question in asked if question is not None]


def exchanges() -> dict[str, Any]:
    """Name -> another value of an input that nobody published, and why it is as
    plausible, as in ``data/papers.yaml``.
    """
    described: dict[str, Any] = _experiments()["exchanges"]
    return described


def exchanged(asked: Sequence[Question]) -> dict[str, dict[Record, Question]]:
    """Simulated questions again with another value of one input that nobody published,
    by the exchange's name and by record; those that it changes.
    """
    again: dict[str, dict[Record, Question]] = {}
    for name, exchange in exchanges().items():
        again[name] = {}
        for question in asked:
            record = question.record
            if question.status != SIMULATED or record.source != exchange["paper"]:
                continue
            paper = _merged(papers()[record.source], exchange.get("paper_has", {}))
            other = _question(record, paper)
            assert other is not None
            numbers = exchange.get("machines", {})
            other = replace(
                other, cases=tuple(_on(case, numbers) for case in other.cases)
            )
            if other.cases != question.cases:
                again[name][record] = other
    return again


def _merged(described: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A description with changes; what is named in both is merged where it nests."""
    merged = dict(described)
    for name, value in changes.items():
        nests = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if nests else value
    return merged


def _on(case: Case, numbers: Mapping[str, Mapping[str, float]]) -> Case:
    """A case on machines with other numbers."""

    def moved(run: RunSpec) -> RunSpec:
        others = dict(run.numbers) | dict(numbers.get(run.machine, {}))
        return replace(run, numbers=tuple(others.items()))

    return Case(moved(case.run), tuple(map(moved, case.others)), case.values)


def recorded(folder: Path) -> list[tuple[Question, dict[str, list[Question]]]]:
    """Headline questions, and the same asked of each group of sequences of the
    recordings that `folder` has, by recording.
    """
    described = _experiments()["recorded"]
    asked = []
    for headline in described["headlines"]:
        question = next(
            each
            for each in questions([headline["of"][0]])
            if list(each.record.key) == headline["of"]
            and selected(headline, each.record)
        )
        key = papers()[question.record.source]["key"]
        case = next(c for c in question.cases if c.values[key] == headline["case"])
        asked.append(
            (
                question,
                {
                    name: [
                        replace(question, cases=(_of_group(case, path, group, trace),))
                        for group in range(trace["groups"])
                    ]
                    for name, trace in described["traces"].items()
                    if (path := folder / f"{trace.get('file', name)}.parquet").is_file()
                },
            )
        )
    return asked


def _of_group(case: Case, path: Path, group: int, trace: Mapping[str, Any]) -> Case:
    def moved(run: RunSpec) -> RunSpec:
        return run.of_recording(
            trace.get("sequences", 1),
            recorded=path,
            group=group,
            generated=_experiments()["recorded"]["generated"],
            model=trace["model"],
            weights=trace["weights"],
            like=None,
        )

    return Case(moved(case.run), tuple(map(moved, case.others)), case.values)


def anchors() -> set[tuple[str, str, str]]:
    """Keys of records that questions name as anchors, with the workloads' inputs."""
    keys = set()
    for question in questions():
        if question.status == ANCHORED:
            keys.add(question.record.key)
        for run in question.runs:
            keys.update(run.workload.inputs)
    return keys


def _question(record: Record, paper: Any) -> Question | None:
    size = (
        paper.get("sizes", {})
        .get(record.ref, {})
        .get(record.metric.removeprefix("model_config."))
    )
    if size is not None:
        named = str(record.setting["model"])
        name = next(name for name in paper["cases"] if named.startswith(name))
        model = paper["cases"][name]["workload"]["model"]
        return Question(
            record,
            COMPUTED,
            value=float(_SIZES[size](model_shape(model))),
            note=f"{model} in moesim's table of models",
        )
    for figure in paper["figures"]:
        if [record.ref, record.metric] in figure["records"] and selected(
            figure, record
        ):
            return _of_figure(record, paper, figure)
    return None


def selected(described: Mapping[str, Any], record: Record) -> bool:
    """Whether a record has the setting that a description asks for with ``where``."""
    return all(
        # True asks for any value.
        key in record.setting and (value is True or value == record.setting[key])
        for key, value in described.get("where", {}).items()
    )


def _of_figure(record: Record, paper: Any, figure: Any) -> Question:
    cases = tuple(_cases(record, paper, figure)) if "run" in figure else ()
    notes = [figure.get("note", "")]
    notes += _system_notes(cases, paper)
    return Question(
        record,
        figure.get("status", SIMULATED),
        cases,
        _filled(figure.get("quantity", ""), cases[0].values) if cases else "",
        **{
            key: figure[key]
            for key in ("compare", "rival", "across", "scale", "undecidable", "bound")
            if key in figure
        },
        note="; ".join(filter(None, notes)),
    )


def _system_notes(cases: Iterable[Case], paper: Any) -> list[str]:
    policies = {run.policy for case in cases for run in (case.run, *case.others)}
    return [
        system["note"]
        for system in paper.get("systems", {}).values()
        if "note" in system and system["policy"] in policies
    ]


def _cases(record: Record, paper: Any, figure: Any) -> Iterator[Case]:
    key = paper["key"]
    setting = dict(record.setting)
    if "batch_size" in setting:
        setting["batch"] = setting["batch_size"]
    named = str(setting.pop(key, ""))
    stated = next((name for name in paper["cases"] if named.startswith(name)), None)
    if stated is not None:
        setting[key] = stated

    each = paper.get("each", {}) | figure.get("each", {})
    axes = {
        name: [setting[name]] if name in setting else choices
        for name, choices in each.items()
    }
    axes.setdefault(key, [stated])
    for chosen in itertools.product(*axes.values()):
        values = dict(paper.get("values", {}))
        choice = dict(zip(axes, chosen, strict=True))
        case = paper["cases"][choice[key]]
        values |= case.get("values", {}) | figure.get("values", {})
        values |= setting | choice
        for name, meanings in figure.get("given", {}).items():
            values |= meanings[values[name]]

        def built(described: Any, case: Any = case, values: Any = values) -> RunSpec:
            return _run(described, paper, case, figure, values)

        others = _filled(figure.get("against", []), values)
        if not isinstance(others, list):
            others = [others]
        yield Case(built(figure["run"]), tuple(map(built, others)), values)


def _run(
    described: Any, paper: Any, case: Any, figure: Any, values: Mapping[str, Any]
) -> RunSpec:
    """A run from a system's name, or from options that may name a system."""
    stated = _filled(described, values)
    stated = {"system": stated} if isinstance(stated, str) else dict(stated)
    system = paper["systems"][stated.pop("system")] if "system" in stated else {}
    layers = [paper, case, figure, {"workload": system.get("workload", {})}]
    workload: dict[str, Any] = {}
    for layer in layers:
        workload |= layer.get("workload", {})
    options = paper.get("run", {}) | case.get("run", {}) | system
    options |= figure.get("options", {}) | stated
    options = {
        name: _filled(value, values)
        for name, value in options.items()
        if name not in ("workload", "note", "source")
    }
    described_load = {name: _filled(value, values) for name, value in workload.items()}
    described_load["inputs"] = tuple(map(tuple, workload.get("inputs", ())))
    return RunSpec.of(Workload(**described_load), **options)


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """A description with its {names} replaced; one that is a name alone keeps the type
    of what it stands for.
    """
    if isinstance(value, Mapping):
        return {name: _filled(entry, values) for name, entry in value.items()}
    if isinstance(value, list):
        return [_filled(entry, values) for entry in value]
    if not isinstance(value, str) or "{" not in value:
        return value
    if value.count("{") == 1 and value[0] == "{" and value[-1] == "}":
        return values[value[1:-1]]
    return value.format_map(values)


# -- sizes of the papers' models, as our table of models has them ----------------------


def _expert_params(shape: ModelShape) -> float:
    return shape.layers * shape.experts * 3.0 * shape.hidden * shape.expert_intermediate


def _all_params(shape: ModelShape) -> float:
    # Bytes in bf16 are two for every parameter.
    return _expert_params(shape) + shape.other_bytes / 2


def _active_share(shape: ModelShape) -> float:
    """Parameters that one token uses, % of all."""
    idle = _expert_params(shape) * (1 - shape.top_k / shape.experts)
    return 100.0 * (1 - idle / _all_params(shape))


_HIDDEN = 128
"""Hidden units of FlashMoE's network, in its table 1."""


def _network_kib(shape: ModelShape) -> float:
    """FlashMoE's network of 4-byte weights: two inputs for each expert, two hidden
    layers, biases.
    """
    weights = 2 * shape.experts * _HIDDEN + _HIDDEN * _HIDDEN + _HIDDEN * shape.experts
    return 4.0 * (weights + 2 * _HIDDEN + shape.experts) / 1024


_SIZES: dict[str, Callable[[ModelShape], float]] = {
    "layers": lambda shape: shape.layers + len(shape.dense_layers),
    "moe_layers": lambda shape: shape.layers,
    "hidden": lambda shape: shape.hidden,
    "shared": lambda shape: shape.shared_experts,
    "experts": lambda shape: shape.experts,
    "top_k": lambda shape: shape.top_k,
    "expert_params_B": lambda shape: _expert_params(shape) / 1e9,
    "params_B": lambda shape: _all_params(shape) / 1e9,
    "active_share": _active_share,
    "network_kib": _network_kib,
}
