"""One page of all published records beside ours, as Markdown and as HTML."""

from __future__ import annotations

import json
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Any

import pandas as pd

from moesim.base.files import write_text
from moesim.evidence.reproduction.questions import (
    ANCHORED,
    INPUT,
    MOST_MOVE,
    UNANSWERED,
    Answered,
    directions,
    exchanges,
    orders,
)
from moesim.reporting.answers import Answer
from moesim.reporting.figures import Axis, Figure, names
from moesim.reporting.parts import Listing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from moesim.evidence.reproduction.questions import Statement
    from moesim.evidence.reproduction.reproduce_all import Reproduced


def summary(answered: Sequence[Answered]) -> dict[str, Any]:
    """Counts of records and statements, and the median ratio."""
    compared = [entry for entry in answered if entry.compared]
    telling = [entry for entry in compared if entry.tells]
    every = [entry.ratio or 0.0 for entry in telling]
    decided = [entry.ratio for entry in telling if entry.ratio_counts and entry.ratio]
    statuses = Counter(entry.question.status for entry in answered)
    simulated = sum(bool(entry.question.runs) for entry in compared)
    return {
        "records": len(answered),
        "simulated": simulated,
        "computed": len(compared) - simulated,
        "anchored": statuses[ANCHORED],
        "inputs": statuses[INPUT],
        "unanswered": statuses[UNANSWERED],
        "directions": _counts(directions(answered)),
        "orders": _counts(orders(answered)),
        "median_ratio": median(decided) if decided else None,
        "ratios": len(decided),
        "ratios_near": _near(decided),
        "all_ratios": len(every),
        "all_ratios_near": _near(every),
    }


def _near(ratios: Iterable[float]) -> int:
    """How many lie within a factor of `MOST_MOVE`."""
    return sum(1 / MOST_MOVE <= ratio <= MOST_MOVE for ratio in ratios)


def _counts(statements: Iterable[Statement]) -> dict[str, int]:
    """How many there are and hold, of all and of those that can be told."""
    every = list(statements)
    decided = [each for each in every if each.counts]
    return {
        "count": len(every),
        "held": sum(each.holds for each in every),
        "decided": len(decided),
        "decided_held": sum(each.holds for each in decided),
    }


# -- the page --------------------------------------------------------------------------


def reproduced_answer(reproduced: Reproduced) -> Answer:
    """Say how many of the papers' statements hold; the summary is the first table."""
    answered = reproduced.answered
    by_source: dict[str, list[Answered]] = {}
    for entry in answered:
        by_source.setdefault(entry.record.source, []).append(entry)
    counts = {source: summary(entries) for source, entries in by_source.items()}
    counts["all"] = summary(answered)
    legend: dict[tuple[str, str], str] = {}
    tables = [
        _summary_table(counts),
        *(_paper(source, entries, legend) for source, entries in by_source.items()),
        _legend_table(legend),
        _disagreements((*directions(answered), *orders(answered))),
        _exchanges(answered),
        _left_out(answered),
    ]
    failures = [
        f"{spec.words} on {spec.workload.name}: {reason}"
        for spec, reason in reproduced.failures.items()
    ]
    figure = ratios(answered)
    stated = {"directions": "directions", "orders": "orders of systems"}
    held = [
        f"{_held(counts['all'][name])} {words}"
        for name, words in stated.items()
        if counts["all"][name]["count"]
    ]
    return Answer(
        question="the papers' tables beside ours",
        subject="",
        setting=[("records", str(len(answered)))],
        tables=[table for table in tables if len(table.rows)],
        sentences=[f"{' and '.join(held) or 'no statements'} hold"],
        notes=reproduced.facts + failures,
        figures={} if figure is None else {"ratios": lambda: figure},
        data=_data(reproduced, counts),
    )


def _summary_table(counts: dict[str, dict[str, Any]]) -> Listing:
    rows = []
    for source, of in counts.items():
        ratio = of["median_ratio"]
        rows.append(
            (
                source,
                *(of[name] for name in ("records", "simulated", "computed")),
                of["anchored"],
                f"{of['inputs']} / {of['unanswered']}",
                *map(_held, (of["directions"], of["orders"])),
                "-" if ratio is None else f"{ratio:.2f}",
                f"{of['ratios_near']} of {of['ratios']}",
                f"{of['all_ratios_near']} of {of['all_ratios']}",
            )
        )
    near = f"within a factor of {MOST_MOVE:g}"
    return Listing.of(
        (
            *("paper", "records", "simulated", "computed", "anchored"),
            *("inputs / without answer", "directions that hold"),
            *("orders of systems that hold", "median ratio", near),
            "undecided included",
        ),
        rows,
        title="Summary",
        note="Compared are simulated records, and those computed from a model's sizes."
        " Anchored ones made a machine or a workload, so they never count. A direction"
        " is a record that compares by itself, such as a speedup above 1; an order is a"
        " pair of systems in one table and setting. In parentheses: of those that are"
        " neither ties (less than 2 % apart, ours or published) nor left open by what"
        " is published. Ratios are ours over published, of gains in % the speedups that"
        " they state; of simulated records, not of bounds, nor of a baseline"
        " beside itself. Decided are those that no exchange of an unpublished input"
        f" (below) moves by more than a factor of {MOST_MOVE:g}, and those that are as"
        " far off to one side under every exchange.",
    )


def _held(of: Mapping[str, int]) -> str:
    if not of["count"]:
        return "-"
    text = f"{of['held']} of {of['count']}"
    # Where none is decided there is nothing to say in parentheses.
    if of["decided"] in {0, of["count"]}:
        return text
    return f"{text} ({of['decided_held']} of {of['decided']})"


def _paper(
    source: str, answered: Sequence[Answered], legend: dict[tuple[str, str], str]
) -> Listing:
    rows = [
        _row(entry, legend)
        # What was simulated comes before what a model's sizes alone give.
        for entry in sorted(answered, key=lambda entry: not entry.question.runs)
        if entry.ours is not None
    ]
    heads = ("where", "figure", "published", "ours", "ratio", "status", "on", "note")
    return Listing.of(heads, rows, title=source)


def _row(entry: Answered, legend: dict[tuple[str, str], str]) -> tuple[str, ...]:
    record = entry.record
    question = entry.question
    setting = ", ".join(f"{key} {value}" for key, value in record.setting.items())
    status = [question.status]
    status += [f"direction: {each.verdict}" for each in directions([entry])]
    if entry.moves:
        status.append("ratio not decided")
    if entry.keeps_bound is not None:
        kept = "holds" if entry.keeps_bound else "BROKEN"
        status.append(f"{question.bound} bound: {kept}")
    # Short names of workloads and machines, in the order in which tables use them.
    used = {(run.workload.words, run.machine): None for run in question.runs}
    on = [legend.setdefault(pair, f"T{len(legend) + 1}") for pair in used]
    return (
        record.ref,
        f"{record.metric}: {setting}" if setting else record.metric,
        f"{record.value} {record.unit or ''}".strip(),
        _number(entry.ours),
        "-" if entry.ratio is None else f"{entry.ratio:.2f}",
        ", ".join(status),
        f"{on[0]} to {on[-1]}" if len(on) > 3 else ", ".join(on),
        question.note,
    )


def _legend_table(legend: Mapping[tuple[str, str], str]) -> Listing:
    rows = [(name, machine, words) for (words, machine), name in legend.items()]
    return Listing.of(
        ("name", "machine", "trace"),
        rows,
        title="Traces and machines",
        note="All routing, scores and predictions are synthetic. Predictions have the"
        " accuracies that DALI (table 5), DAOP (section III) and SMoE (section 6)"
        " published, where they did; statistics are those that ship.",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _disagreements(statements: Iterable[Statement]) -> Listing:
    rows = [
        (
            each.words,
            each.verdict,
            "; ".join(
                f"{_number(entry.published)} → {_number(entry.ours)}"
                for entry in each.records
            ),
        )
        for each in statements
        if not each.holds
    ]
    return Listing.of(
        ("statement", "verdict", "published → ours"),
        rows,
        title="Where ours disagrees",
        note="Directions and orders of systems that do not hold.",
    )


def _exchanges(answered: Sequence[Answered]) -> Listing:
    rows = [
        (
            entry.record.label,
            "-" if entry.ratio is None else f"{entry.ratio:.2f}",
            "; ".join(
                f"{name}: {ratio:.2f}" for name, ratio in entry.exchanged_ratios.items()
            ),
            "no" if entry.moves else "yes",
        )
        for entry in answered
        if entry.exchanged
    ]
    names = dict.fromkeys(name for entry in answered for name in entry.exchanged)
    reasons = " ".join(
        f"{name[0].upper()}{name[1:]}: {exchanges()[name]['why']}." for name in names
    )
    return Listing.of(
        ("figure", "ratio", "with the exchange", "decided"),
        rows,
        title="What unpublished inputs decide",
        note="Ratios again with another value of one input that nobody published, all"
        f" else equal. {reasons}",
    )


def _left_out(answered: Iterable[Answered]) -> Listing:
    groups = Counter(
        (
            f"{entry.record.source} {entry.record.ref}",
            entry.record.metric,
            entry.question.status,
            entry.question.note,
        )
        for entry in answered
        if entry.ours is None
    )
    return Listing.of(
        ("where", "figure", "status", "why", "records"),
        [(*key, str(count)) for key, count in groups.items()],
        title="Records without a figure of ours",
    )


def ratios(answered: Iterable[Answered]) -> Figure | None:
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


def _data(reproduced: Reproduced, counts: dict[str, Any]) -> dict[str, Any]:
    """Counts and every record, for programs."""
    answered = reproduced.answered
    return {
        "facts": reproduced.facts,
        "summary": counts,
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
            for entry in answered
        ],
        "orders": [
            {
                "statement": each.words,
                "records": [entry.record.label for entry in each.records],
                "published": [entry.published for entry in each.records],
                "ours": [entry.ours for entry in each.records],
                "holds": each.holds,
                "verdict": each.verdict,
            }
            for each in (*directions(answered), *orders(answered))
        ],
    }


def write_pages(folder: Path, name: str, answer: Answer) -> list[Path]:
    """Write an answer's page as ``NAME.html`` and ``.md``."""
    page = answer.write(folder / f"{name}.html")
    write_text(folder / f"{name}.md", answer.markdown())
    return [page, folder / f"{name}.md"]


def write(folder: Path, answer: Answer) -> list[Path]:
    """Write ``reproduction.html``, ``.md`` and ``.json``; each appears when it is
    complete.
    """
    data = folder / "reproduction.json"
    pages = write_pages(folder, "reproduction", answer)
    write_text(data, json.dumps(answer.data, indent=1) + "\n")
    return [*pages, data]
