"""The comparison with measured machines as text, Markdown, JSON, CSV and HTML."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from moesim.reporting.pages import PageTable, page_figure, page_origin, write_page
from moesim.traces.files import written_beside

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moesim.advice.measured.scores import Prediction, Score
    from moesim.advice.measured.table import Case, Comparison

COLUMNS = (
    "case, on rows that no fit has seen",
    "to reach",
    "best known elsewhere",
    "median",
    "p90",
    "worst",
    "in interval",
    "rows",
    "reached",
)
REGRET_GOAL = 0.03
COVERAGE_GOAL = (0.85, 0.95)
LISTED_MISSES = 12

METHOD = (
    "Every prediction is made without the row that it is held against. Where a machine"
    " was known while moesim's priors were written, its predictions use priors that"
    " were learned anew from textbook values and the other machines' rows (or, where"
    " the line says so, from the other models' rows). Rows of a pair are of the same"
    " session; all pairs are used, so one row is predicted many times. The error is"
    " predicted over measured tokens/s, minus one."
)


def percent(share: float | None) -> str:
    """Write a share as ``4.2 %``; a dash for nothing."""
    return "-" if share is None else f"{100 * share:.1f} %"


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the table's rows as cells of text."""
    rows = [_case_row(case) for case in comparison.cases]

    for grade in comparison.regrets:
        value = comparison.median_regret(grade)
        sweeps = comparison.regrets[grade]
        # The median is often zero; the tail is what a user would feel.
        worst = max((regret.share for regret in sweeps), default=None)
        reached = None if value is None else value <= REGRET_GOAL
        rows.append(
            (
                f"regret of the advised n-cpu-moe, from {grade}",
                "<= 3 % median",
                "no tool gives speed",
                percent(value),
                "-",
                percent(worst),
                "-",
                f"{len(sweeps)} sweeps",
                _yes(reached),
            )
        )
    rows.append(_coverage_row(comparison))
    return rows


def _case_row(case: Case) -> tuple[str, ...]:
    score = case.score
    # A folder without such rows still gets its line in the table.
    if score is None:
        return (case.name, case.goal, case.best, "-", "-", "-", "-", "0", "no rows")
    return (
        case.name,
        case.goal,
        case.best,
        percent(score.median),
        percent(score.p90),
        percent(score.worst),
        percent(score.coverage),
        _count(score),
        _yes(case.reached),
    )


def _coverage_row(comparison: Comparison) -> tuple[str, ...]:
    coverage = comparison.coverage
    low, high = COVERAGE_GOAL
    reached = None if coverage is None else low <= coverage <= high
    return (
        "coverage of 90 % intervals, mean of the cases",
        "85-95 %",
        "nobody reports it",
        "-",
        "-",
        "-",
        percent(coverage),
        "-",
        _yes(reached),
    )


def _count(score: Score) -> str:
    # With pairs given, one row is predicted many times.
    if score.count == score.rows:
        return str(score.rows)
    return f"{score.rows}, {score.count} times"


def _yes(reached: bool | None) -> str:
    return "" if reached is None else ("yes" if reached else "no")


def terminal_text(comparison: Comparison) -> str:
    """Lay the table out for a terminal."""
    rows = [COLUMNS, *table_rows(comparison)]
    # Best known elsewhere stands on the page; terminals are narrow.
    shown = [(*row[:2], *row[3:]) for row in rows]
    widths = [max(len(row[at]) for row in shown) for at in range(len(shown[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in shown
    ]
    lines.append("")
    lines.append(
        f"{comparison.row_count} rows of {comparison.folder};"
        f" {len(comparison.skipped)} set aside"
    )
    lines.append(bound_words(comparison))
    return "\n".join(line.rstrip() for line in lines)


def bound_words(comparison: Comparison) -> str:
    """Say how near measured runs come to the physical bound, and that none beats it."""
    shares = sorted(bound.share for bound in comparison.bounds)
    if not shares:
        return "physical bound: no run to hold against it"
    beaten = sum(share > 1 for share in shares)
    return (
        f"physical bound: {beaten} of {len(shares)} measured runs beat it; the median"
        f" reaches {percent(median(shares))}, the nearest {percent(shares[-1])}"
    )


def markdown(comparison: Comparison) -> str:
    """Write the page: the table, then every case by machine and model, then misses."""
    lines = ["# Predicted against measured on other people's machines", "", METHOD, ""]
    lines += _markdown_table(COLUMNS, table_rows(comparison))
    # Cases without rows have their line above and nothing to list.
    for case in comparison.cases:
        if not case.predictions:
            continue
        lines += ["", f"## {case.name}", ""]
        lines += _markdown_table(GROUP_COLUMNS, group_rows(case.predictions))
        misses = worst_misses(case.predictions)
        lines += ["", "Largest misses:", ""]
        lines += _markdown_table(MISS_COLUMNS, misses)

    lines += ["", "## Regret of the advised `--n-cpu-moe`", ""]
    lines += _markdown_table(REGRET_COLUMNS, regret_rows(comparison))
    lines += ["", "## The physical bound", "", bound_words(comparison)]
    if comparison.skipped:
        lines += ["", "## Rows set aside", ""]
        lines += [f"- {skip.place}: {skip.reason}" for skip in comparison.skipped]
    return "\n".join(lines) + "\n"


GROUP_COLUMNS = ("machine", "model", "predictions", "median", "signed", "worst", "in")
MISS_COLUMNS = (
    "row",
    "machine",
    "model",
    "what",
    "measured",
    "predicted",
    "known of it",
)
REGRET_COLUMNS = ("from", "machine", "model", "measured", "advised", "best", "regret")


def group_rows(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """Summarise predictions by machine and model."""
    # By machine and model, because misses come in such groups.
    groups: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for each in predictions:
        groups[each.machine, each.model].append(each)

    rows: list[tuple[str, ...]] = []
    for (machine, model), group in groups.items():
        errors = [each.error for each in group]
        covered = sum(each.covered for each in group) / len(group)
        rows.append(
            (
                machine,
                model,
                str(len(group)),
                percent(median(abs(error) for error in errors)),
                f"{100 * median(errors):+.1f} %",
                percent(max(abs(error) for error in errors)),
                percent(covered),
            )
        )
    return rows


def worst_misses(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """Return the measured rows that were missed most, each once."""
    worst: dict[str, Prediction] = {}
    for each in predictions:
        # Pairs predict one row many times; only its worst is listed.
        known = worst.get(each.place)
        if known is None or abs(each.error) > abs(known.error):
            worst[each.place] = each

    ordered = sorted(worst.values(), key=lambda each: -abs(each.error))
    return [
        (
            each.place,
            each.machine,
            each.model,
            each.flags,
            f"{each.measured:.4g}",
            f"{each.predicted:.4g} [{each.low:.4g}, {each.high:.4g}]",
            each.cause[:100],
        )
        for each in ordered[:LISTED_MISSES]
    ]


def regret_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return one row per sweep and grade."""
    return [
        (
            grade,
            regret.machine,
            regret.model,
            " ".join(map(str, regret.settings)),
            str(regret.advised),
            str(regret.best),
            percent(regret.share),
        )
        for grade, sweeps in comparison.regrets.items()
        for regret in sweeps
    ]


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        # Flags of measured rows may hold the column sign.
        cells = [cell.replace("|", "/") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return everything but the single predictions."""
    return {
        "folder": comparison.folder,
        "rows": comparison.row_count,
        "coverage": comparison.coverage,
        "cases": [
            {
                "name": case.name,
                "goal": case.goal,
                "best": case.best,
                "reached": case.reached,
                "score": None if case.score is None else asdict(case.score),
            }
            for case in comparison.cases
        ],
        "regret": {
            grade: {
                "median": comparison.median_regret(grade),
                "sweeps": [asdict(regret) for regret in sweeps],
            }
            for grade, sweeps in comparison.regrets.items()
        },
        "bounds": [asdict(bound) for bound in comparison.bounds],
        "skipped": [asdict(skip) for skip in comparison.skipped],
    }


def predictions_csv(comparison: Comparison) -> str:
    """Write every prediction as one line."""
    columns = (
        "case",
        "machine",
        "model",
        "what",
        "given",
        "place",
        "measured",
        "predicted",
        "low",
        "high",
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for case in comparison.cases:
        for each in case.predictions:
            # Six digits: more than any measurement has.
            numbers = (each.measured, each.predicted, each.low, each.high)
            words = (each.machine, each.model, each.flags, each.given, each.place)
            writer.writerow((case.name, *words, *(f"{value:.6g}" for value in numbers)))
    return text.getvalue()


def save(
    comparison: Comparison, folder: Path, command: str | None = None
) -> list[Path]:
    """Write ``machines.md``, ``.html``, ``.json`` and all predictions; return paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "machines.md": markdown(comparison),
        "machines.json": json.dumps(to_json(comparison), indent=2) + "\n",
        "predictions.csv": predictions_csv(comparison),
    }
    places = []
    for name, text in texts.items():
        place = folder / name
        with written_beside(place) as part:
            part.write_text(text, encoding="utf-8")
        places.append(place)
    places.append(write_html(comparison, folder / "machines.html", command))
    return places


def write_html(comparison: Comparison, path: Path, command: str | None = None) -> Path:
    """Write one page with the table and a figure per case."""
    # matplotlib takes a second to import, which only pages should.
    from moesim.advice.report.charts import scatter  # noqa: PLC0415 - as said above

    cases = [
        {
            "name": case.name,
            "figure": page_figure(
                scatter(case.predictions), f"Predicted over measured: {case.name}"
            ),
            "groups": PageTable(GROUP_COLUMNS, group_rows(case.predictions)),
            "misses": PageTable(MISS_COLUMNS, worst_misses(case.predictions)),
        }
        for case in comparison.cases
        if case.predictions
    ]
    return write_page(
        path,
        "machines.html",
        title="Predicted against measured on other machines",
        origin=page_origin(command, rows=comparison.folder),
        method=METHOD,
        summary=PageTable(COLUMNS, table_rows(comparison)),
        cases=cases,
        bound=bound_words(comparison),
        regret=PageTable(REGRET_COLUMNS, regret_rows(comparison)),
    )
