"""One page of all published records beside ours, as Markdown and as HTML."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import pandas as pd
from scipy import stats

from moesim.base.files import written_beside
from moesim.evidence.reproduction.orders import (
    directions,
    label,
    orders,
    sides,
)
from moesim.evidence.reproduction.questions import (
    ANCHORED,
    INPUT,
    MOST_MOVE,
    UNANSWERED,
    anchors,
    exchanges,
)
from moesim.reporting.answers import Answer, Listing
from moesim.reporting.figures import Axis, Figure, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from moesim.evidence.reproduction.orders import Side, Statement
    from moesim.evidence.reproduction.questions import Answered
    from moesim.evidence.reproduction.reproduce_all import Reproduced
    from moesim.evidence.reproduction.routing import Experiment, Reproduction

FACTORS = (1.5, 2.0)
"""Figures within these factors of each other are counted."""


@dataclass(frozen=True, slots=True)
class Report:
    """The page.

    Attributes:
        facts: what the figures were made with, a line each.
        tables: summary first.
        counts: the summary as numbers.
    """

    facts: list[str]
    tables: list[Listing]
    counts: dict[str, dict[str, Any]]


def report(reproduced: Reproduced) -> Report:
    """Lay out everything that was computed."""
    answered = reproduced.answered
    sources = list(dict.fromkeys(entry.record.source for entry in answered))
    counts = {
        source: summary([entry for entry in answered if entry.record.source == source])
        for source in sources
    }
    counts["all"] = summary(answered)
    legend = _Legend()
    paper_tables = [_paper(source, answered, legend) for source in sources]
    tables = [
        _summary_table(counts),
        legend.table(),
        *paper_tables,
        _on_recorded(reproduced),
        _disagreements(reproduced),
        _exchanges(answered),
        _left_out(answered),
        *map(_experiment, reproduced.experiments),
    ]
    facts = reproduced.facts + [
        f"{spec.words} on {spec.workload.name}: {reason}"
        for spec, reason in reproduced.failures.items()
    ]
    return Report(facts, tables, counts)


def words_table(
    title: str, note: str, heads: Sequence[str], rows: Iterable[Sequence[str]]
) -> Listing:
    """A table of words."""
    return Listing.of(heads, rows, title=title, note=note)


def summary(answered: Sequence[Answered]) -> dict[str, Any]:
    """Counts of records and statements, and the median ratio."""
    compared = [entry for entry in answered if entry.compared]
    simulated = [entry for entry in compared if entry.question.runs]
    ratios = [
        entry.ratio
        for entry in simulated
        if entry.ratio is not None and entry.ratio_counts
    ]
    telling = [entry for entry in simulated if entry.tells]
    printed = [entry.printed_ratio or 0.0 for entry in telling]
    stated = orders(answered)
    of_systems = [each for each in stated if each.of_systems]
    of_parameters = [each for each in stated if not each.of_systems]
    statuses = Counter(entry.question.status for entry in answered)
    return {
        "records": len(answered),
        "simulated": len(simulated),
        "computed": len(compared) - len(simulated),
        "anchored": statuses[ANCHORED],
        "inputs": statuses[INPUT],
        "unanswered": statuses[UNANSWERED],
        **_counts("directions", directions(answered)),
        **_counts("orders", of_systems),
        **_counts("parameter_orders", of_parameters),
        "median_ratio": median(ratios) if ratios else None,
        **{f"within_{factor:g}": _within(factor, ratios) for factor in FACTORS},
        "ratios": len(ratios),
        "all_within_1.5": _within(1.5, [entry.ratio or 0.0 for entry in telling]),
        "printed_within_1.5": _within(1.5, printed),
        "all_ratios": len(telling),
    }


def _within(factor: float, ratios: Sequence[float]) -> int:
    return sum(1 / factor <= ratio <= factor for ratio in ratios)


def _counts(name: str, statements: Sequence[Statement]) -> dict[str, int]:
    """How many there are, hold, are ties, and cannot be decided; and of the rest."""
    decided = [each for each in statements if each.counts]
    return {
        name: len(statements),
        f"{name}_held": sum(each.holds for each in statements),
        f"{name}_tied": sum(each.tie for each in statements),
        f"{name}_undecidable": sum(bool(each.undecidable) for each in statements),
        f"{name}_decided": len(decided),
        f"{name}_decided_held": sum(each.holds for each in decided),
    }


def _summary_table(counts: dict[str, dict[str, Any]]) -> Listing:
    rows = []
    for source, figures in counts.items():
        ratio = figures["median_ratio"]
        rows.append(
            (
                source,
                str(figures["records"]),
                str(figures["simulated"]),
                str(figures["computed"]),
                str(figures["anchored"]),
                f"{figures['inputs']} / {figures['unanswered']}",
                *(
                    _held(figures, name)
                    for name in ("directions", "orders", "parameter_orders")
                ),
                "-" if ratio is None else f"{ratio:.2f}",
                *(
                    f"{figures[f'within_{factor:g}']} of {figures['ratios']}"
                    for factor in FACTORS
                ),
                f"{figures['all_within_1.5']} of {figures['all_ratios']}",
                f"{figures['printed_within_1.5']} of {figures['all_ratios']}",
            )
        )
    return words_table(
        "Summary",
        "Compared are simulated records, and those computed from a model's sizes."
        " Anchored ones made a machine or a workload, so they never count. A direction"
        " is a record that compares by itself, such as a speedup above 1; an order is a"
        " pair of systems in one table and setting. In parentheses: of those that are"
        " neither ties (less than 2 % apart, ours or published) nor left open by what"
        " is published. Ratios are ours over published, of gains in % the speedups that"
        " they state; of simulated records, not of bounds, nor of a baseline"
        " beside itself. Decided are those that no exchange of an unpublished input"
        f" (below) moves by more than a factor of {MOST_MOVE:g}, and those that are as"
        " far off to one side under every exchange.",
        (
            "paper",
            "records",
            "simulated",
            "computed",
            "anchored",
            "inputs / without answer",
            "directions that hold",
            "orders of systems that hold",
            "orders of parameters that hold",
            "median ratio",
            *(f"within a factor of {factor:g}" for factor in FACTORS),
            "undecided included, within 1.5",
            "gains as printed, within 1.5",
        ),
        rows,
    )


def _held(figures: dict[str, Any], name: str) -> str:
    text = f"{figures[f'{name}_held']} of {figures[name]}"
    # Where none is decided there is nothing to say in parentheses.
    if figures[f"{name}_decided"] in {0, figures[name]}:
        return text
    return f"{text} ({figures[f'{name}_decided_held']} of {figures[f'{name}_decided']})"


class _Legend:
    """Short names of workloads and machines, in the order in which tables use them."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}

    def of(self, entry: Answered) -> str:
        """The names of what an answer was run on."""
        used = {(run.workload.words, run.machine): None for run in entry.question.runs}
        for pair in used:
            self._names.setdefault(pair, f"T{len(self._names) + 1}")
        names = [self._names[pair] for pair in used]
        if len(names) > 3:
            return f"{names[0]} to {names[-1]}"
        return ", ".join(names)

    def table(self) -> Listing:
        """What the names stand for; complete when all tables are made."""
        rows = [
            (name, machine, words) for (words, machine), name in self._names.items()
        ]
        return words_table(
            "Traces and machines",
            "All routing, scores and predictions are synthetic. Predictions have the"
            " accuracies that DALI (table 5), DAOP (section III) and SMoE (section 6)"
            " published, where they did; statistics are those that ship.",
            ("name", "machine", "trace"),
            rows,
        )


def _paper(source: str, answered: Sequence[Answered], legend: _Legend) -> Listing:
    rows = [
        _row(entry, legend)
        # What was simulated comes before what a model's sizes alone give.
        for entry in sorted(answered, key=lambda entry: not entry.question.runs)
        if entry.record.source == source and entry.ours is not None
    ]
    return words_table(
        source,
        "",
        ("where", "figure", "published", "ours", "ratio", "status", "on", "note"),
        # The legend is filled while rows are made.
        rows,
    )


def _row(entry: Answered, legend: _Legend) -> tuple[str, ...]:
    record = entry.record
    setting = ", ".join(f"{key} {value}" for key, value in record.setting.items())
    stated = directions([entry])
    status = entry.question.status
    if stated:
        status += f", direction: {stated[0].verdict}"
    ratio = entry.ratio
    if entry.moves:
        status += ", ratio not decided"
    if entry.keeps_bound is not None:
        kept = "holds" if entry.keeps_bound else "BROKEN"
        status += f", {entry.question.bound} bound: {kept}"
    return (
        record.ref,
        f"{record.metric}: {setting}" if setting else record.metric,
        f"{record.value} {record.unit or ''}".strip(),
        _number(entry.ours),
        "-" if ratio is None else f"{ratio:.2f}",
        status,
        legend.of(entry),
        entry.question.note,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _on_recorded(reproduced: Reproduced) -> Listing:
    names = list(dict.fromkeys(n for _, of in reproduced.recorded for n in of))
    rows = [
        (
            label(entry),
            _number(entry.published),
            _number(entry.ours),
            *(mean_with_interval(of[name]) for name in names),
        )
        for entry, of in reproduced.recorded
        if of
    ]
    return words_table(
        "On recorded routing",
        "Headline ratios on other people's recordings of other models, one sequence at"
        " a time unless the head says otherwise; in brackets 95 % of the mean over"
        " sequences, or batches of them, where there are several.",
        ("figure", "published", "drawn", *names),
        rows,
    )


def mean_with_interval(figures: Sequence[float]) -> str:
    """The mean, with its 95 % interval in brackets where there are three or more."""
    if not figures:
        return "-"
    text = _number(fmean(figures))
    if len(figures) < 3:
        return text
    low, high = stats.t.interval(
        0.95, len(figures) - 1, fmean(figures), stats.sem(figures)
    )
    return f"{text} [{_number(low)}, {_number(high)}]"


def _disagreements(reproduced: Reproduced) -> Listing:
    rows = []
    stated = [*directions(reproduced.answered), *orders(reproduced.answered)]
    for each in stated:
        if each.holds or not each.of_systems:
            continue
        figures = "; ".join(
            f"{_number(entry.published)} → {_number(entry.ours)}"
            for entry in each.records
        )
        parts = sides(each, reproduced.outcomes)[:2]
        text = " | ".join(_side_text(side) for side in parts)
        rows.append((each.words, each.verdict, figures, text))
    return words_table(
        "Where ours disagrees",
        "Directions and orders of systems that do not hold. Busy milliseconds of a step"
        " by part, which overlap; the side that the paper finds better comes first.",
        ("statement", "verdict", "published → ours", "parts of a step"),
        rows,
    )


def _exchanges(answered: Sequence[Answered]) -> Listing:
    rows = [
        (
            label(entry),
            "-" if entry.ratio is None else f"{entry.ratio:.2f}",
            "; ".join(
                f"{name}: {ratio:.2f}" for name, ratio in entry.exchanged_ratios.items()
            ),
            "no" if entry.moves else "yes",
        )
        for entry in answered
        if entry.exchanged
    ]
    reasons = " ".join(
        f"{name[0].upper()}{name[1:]}: {exchange['why']}."
        for name, exchange in exchanges().items()
    )
    return words_table(
        "What unpublished inputs decide",
        "Ratios again with another value of one input that nobody published, all else"
        f" equal. {reasons}",
        ("figure", "ratio", "with the exchange", "decided"),
        rows,
    )


def _side_text(side: Side) -> str:
    parts = ", ".join(
        f"{name} {1e3 * busy:.3g}" for name, busy in side.busy_s.items() if busy > 0
    )
    return f"{side.words}: {1e3 * side.step_s:.3g} ms ({parts})"


def _left_out(answered: Iterable[Answered]) -> Listing:
    groups: dict[tuple[str, ...], int] = {}
    for entry in answered:
        if entry.ours is None:
            record = entry.record
            key = (
                f"{record.source} {record.ref}",
                record.metric,
                entry.question.status,
                entry.question.note,
            )
            groups[key] = groups.get(key, 0) + 1
    return words_table(
        "Records without a figure of ours",
        "",
        ("where", "figure", "status", "why", "records"),
        [(*key, str(count)) for key, count in groups.items()],
    )


def _experiment(reproduction: Reproduction) -> Listing:
    experiment = reproduction.experiment
    columns = list(reproduction.published.items())
    traces = list(reproduction.measured.items())
    heads = (
        experiment.unit,
        *(f"published: {name}" for name, _ in columns),
        *(f"ours: {reproduction.models[trace]}" for trace, _ in traces),
    )
    rows = [
        (
            row,
            *(_cell(figures.get(row)) for _, figures in columns),
            *(_cell(figures.get(row)) for _, figures in traces),
        )
        for row in reproduction.rows
    ]
    return words_table(
        f"Routing alone: {experiment.name}",
        f"{experiment.summary[0].upper()}{experiment.summary[1:]}."
        f" {experiment.computes}{anchor_note(experiment)}",
        heads,
        rows,
    )


def anchor_note(experiment: Experiment) -> str:
    """Words for an experiment whose records made the drawn predictions."""
    if set(experiment.published) & anchors():
        return (
            " Its records made the predictions of the drawn traces above, so they are"
            " not counted; the figures here are of other traces."
        )
    return ""


def _cell(figure: float | str | None) -> str:
    if figure is None:
        return "-"
    return figure if isinstance(figure, str) else f"{figure:.4g}"


# -- files -----------------------------------------------------------------------------


def summary_json(reproduced: Reproduced, page: Report) -> dict[str, Any]:
    """Counts and every record, for programs."""
    return {
        "facts": page.facts,
        "summary": page.counts,
        "recorded": {label(entry): of for entry, of in reproduced.recorded},
        "records": [
            {
                "source": entry.record.source,
                "ref": entry.record.ref,
                "metric": entry.record.metric,
                "setting": entry.record.setting,
                "unit": entry.record.unit,
                "published": entry.record.value,
                "ours": entry.ours,
                "ratio": entry.ratio,
                "status": entry.question.status,
                "runs": [
                    f"{run.machine}: {run.words} on {run.workload.name}"
                    for run in entry.question.runs
                ],
                "note": entry.question.note,
            }
            for entry in reproduced.answered
        ],
        "orders": [
            _statement(each)
            for each in (*directions(reproduced.answered), *orders(reproduced.answered))
        ],
    }


def _statement(each: Statement) -> dict[str, Any]:
    return {
        "statement": each.words,
        "records": [label(entry) for entry in each.records],
        "published": [entry.published for entry in each.records],
        "ours": [entry.ours for entry in each.records],
        "holds": each.holds,
        "verdict": each.verdict,
        "of_systems": each.of_systems,
    }


def ratios(answered: Sequence[Answered]) -> Figure | None:
    """Ours over published of every simulated record, by paper; None where there is
    none.
    """
    rows = [
        (entry.record.source, entry.record.ref, entry.record.metric, entry.ratio)
        for entry in answered
        if entry.compared and entry.question.runs and (entry.ratio or 0) > 0
    ]
    if not rows:
        return None
    frame = pd.DataFrame(rows, columns=["paper", "where", "figure", "ratio"])
    return Figure(
        frame,
        Axis("ratio", "ours over published", log=True),
        names("paper", "", frame["paper"]),
        "A mark for each figure; dashed: equal",
        mark="point",
        hover=[("where", "where", ""), ("figure", "figure", "")],
        rules=[("x", 1.0, "equal")],
    )


def reproduced_answer(reproduced: Reproduced, page: Report) -> Answer:
    """Say how many of the papers' statements hold."""
    figures = page.counts["all"]
    figure = ratios(reproduced.answered)
    return Answer(
        question="the papers' tables beside ours",
        subject=f"{reproduced.machines} machines",
        setting=[("machines", reproduced.machines)],
        tables=[table for table in page.tables if len(table.rows)],
        sentences=[
            (
                f"{_held(figures, 'directions')} directions and"
                f" {_held(figures, 'orders')} orders of systems hold"
            )
        ],
        notes=page.facts,
        figures={} if figure is None else {"ratios": lambda: figure},
        data=summary_json(reproduced, page),
    )


def write(
    folder: Path, reproduced: Reproduced, page: Report, command: str | None = None
) -> list[Path]:
    """Write ``reproduction.html``, ``.md`` and ``.json``; each appears when it is
    complete.
    """
    answer = reproduced_answer(reproduced, page)
    answer.command = command
    paths = [answer.write(folder / "reproduction.html")]
    texts = {
        "reproduction.md": answer.markdown(),
        "reproduction.json": json.dumps(answer.data, indent=1) + "\n",
    }
    for name, text in texts.items():
        with written_beside(folder / name) as part:
            part.write_text(text, encoding="utf-8")
        paths.append(folder / name)
    return paths
