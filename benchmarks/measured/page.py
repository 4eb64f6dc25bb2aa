"""The judgement of `benchmarks.measured.judge` as text, Markdown, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter, defaultdict
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from benchmarks.measured.scores import BASELINES, OURS, compared, score
from moesim.advice.machine import UNKNOWN_GRAPHICS
from moesim.advice.times.latents import NINETY
from moesim.base.files import write_text
from moesim.reporting.figures import Axis, Figure
from moesim.reporting.tables import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.measured.judge import Case, Judgement
    from benchmarks.measured.scores import Prediction, Score
    from moesim.advice.machine import Machine

COLUMNS = ("median", "p90", "worst", "signed", "inside 90 %", "width", "interval score")
HEADS = ("left out", "predictor", "rows / platforms", *COLUMNS)
# Kinds of which fewer rows are known say nothing.
FEW_ROWS = 10
LISTED_MISSES = 8
MOST_POINTS = 400

METHOD = (
    "Every prediction is made without any row of its platform (one pair of card and"
    " processor, all its rows and sessions; nameless hosts with the same card are one),"
    " then without any row of its source (one repository or thread; sources that share"
    " a platform are left out together). The"
    " baselines are fitted to the same remaining rows. Where rows are given, they are"
    " rows of the predicted machine, never the predicted one. The intervals of every"
    " predictor, baselines included, are stretched by one factor and one addition that"
    " the other platforms show. Error: predicted over measured tokens/s, minus one."
    " Width: upper over lower end, minus one. The interval score (mean of width and"
    " what lies outside, in logarithms; Gneiting and Raftery 2007, equation 43) is the"
    " better the lower. A row that is predicted from several choices of given rows"
    " counts once."
)


def percent(share: float) -> str:
    """Write a share as ``4.2 %``; a tenth only where it can be told."""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def cells(result: Score) -> tuple[str, ...]:
    """Return a score's cells in the order of `COLUMNS`."""
    signed = "+" if result.signed >= 0 else ""
    return (
        percent(result.median),
        percent(result.p90),
        percent(result.worst),
        signed + percent(result.signed),
        percent(result.coverage),
        percent(result.width),
        f"{result.interval_score:.2f}",
    )


def table(case: Case) -> list[tuple[str, ...]]:
    """Return the rows of one case: every predictor, with platforms and sources out."""
    rows = []
    for left_out, predictions in case.predictions.items():
        for name in (OURS, *BASELINES):
            result = score(predictions, name)
            if result is not None:
                counts = f"{result.rows} / {result.platforms}"
                rows.append((left_out, name, counts, *cells(result)))
    return rows


def verdict(predictions: Sequence[Prediction]) -> str:
    """Say whether the best baseline differs by more than platforms do."""
    result = compared(predictions)
    if result is None:
        return "no baseline answers all rows"
    best, low, high = result
    if math.isnan(low):
        return "one platform, which says nothing of others"
    interval = f"{low:+.2f} to {high:+.2f}"
    if low > 0:
        return f"better than the best baseline ({best}; its score is {interval} higher)"
    if high < 0:
        return f"WORSE than the best baseline ({best}; its score is {interval} higher)"
    return f"not to be told from the best baseline ({best}; {interval})"


def by(
    predictions: Sequence[Prediction], key: Callable[[Prediction], str]
) -> list[tuple[str, ...]]:
    """Return one row per kind of platform, model or engine."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for each in predictions:
        groups[key(each)].append(each)
    rows = []
    for name, group in sorted(groups.items()):
        result = score(group)
        if result is None or result.rows < FEW_ROWS:
            continue
        simple = {each: score(group, each) for each in BASELINES}
        known = {
            each: single.median for each, single in simple.items() if single is not None
        }
        best = min(known, key=lambda each: known[each], default="")
        words = f"{percent(known[best])} ({best})" if best else "-"
        counts = f"{result.rows} / {result.platforms}"
        rows.append((name, counts, *cells(result), words))
    return rows


def kind_of_platform(machine: Machine) -> str:
    """Return the kind of platform, as results are listed."""
    card = machine.graphics[0] if machine.graphics else UNKNOWN_GRAPHICS
    mobile = machine.processor.kind == "laptop" or card.card_class == "mobile"
    kinds = (
        (machine.unified, "unified memory"),
        (machine.processor.sockets > 1, "dual socket"),
        (not machine.graphics, "processor alone"),
        (machine.gpu_count > 1, "several cards"),
        (card.card_class == "old", "old card"),
        (mobile, "laptop"),
        (card.backend != "cuda", "other than CUDA"),
        (machine.processor.kind in {"server", "workstation"}, "server"),
    )
    return next((kind for holds, kind in kinds if holds), "desktop")


KINDS: dict[str, Callable[[Prediction], str]] = {
    "platform": lambda each: kind_of_platform(each.run.machine),
    "model": lambda each: each.run.model.name.split()[0],
    "engine": lambda each: getattr(each.run, "fork", "") or "llama.cpp",
}


def summary(judgement: Judgement) -> list[tuple[str, ...]]:
    """Return one row per case, as the terminal shows it."""
    rows: list[tuple[str, ...]] = []
    for case in judgement.cases:
        for left_out, predictions in case.predictions.items():
            result = score(predictions)
            if result is None:
                rows.append((case.name, left_out, "no rows", "", "", "", case.goal))
                continue
            rows.append(
                (
                    case.name,
                    left_out,
                    f"{result.rows} / {result.platforms}",
                    percent(result.median),
                    percent(result.p90),
                    percent(result.coverage),
                    case.goal,
                )
            )
    return rows


def terminal_text(judgement: Judgement) -> str:
    """Return the table for a terminal."""
    heads = ("case", "left out", "rows / platforms", "median", "p90", "inside 90 %")
    lines = [*aligned([(*heads, "to reach"), *summary(judgement)], lead=2), ""]
    lines.append(_counts(judgement))
    return "\n".join(lines)


def _counts(judgement: Judgement) -> str:
    regrets = judgement.regrets
    regret = "nothing"
    if regrets:
        worst = percent(max(regrets))
        regret = f"{percent(median(regrets))} in the median, {worst} at worst,"
    return (
        f"{len(judgement.runs)} rows of llama.cpp and forks in {judgement.folders};"
        f" {len(judgement.skipped)} skipped.\nThe number of CPU layers that predictions"
        f" prefer misses {regret} of the best measured speed"
        f" ({len(regrets)} sweeps).\n{len(judgement.beaten_bounds)} rows are faster"
        " than bytes over bandwidth as stated allow."
    )


def markdown(judgement: Judgement, command: str) -> str:
    """Return the page with all tables, failures included."""
    lines = ["# Other people's machines, predicted", "", METHOD, ""]
    lines += [_counts(judgement), "", f"Written by `{command}`.", ""]
    for case in judgement.cases:
        lines += [f"## {case.name[0].upper()}{case.name[1:]}", ""]
        lines += [f"To reach: {case.goal}.", "", *_grid(HEADS, table(case)), ""]
        for left_out, predictions in case.predictions.items():
            lines.append(f"- {left_out} left out: {verdict(predictions)}")
        lines.append("")
        platforms = case.predictions["platforms"]
        for kind, key in KINDS.items():
            rows = by(platforms, key)
            if len(rows) > 1:
                heads = (kind, "rows / platforms", *COLUMNS, "best baseline")
                lines += [*_grid(heads, rows), ""]
        lines += _misses(platforms)
    lines += ["## Skipped rows", ""]
    reasons = Counter(each.reason for each in judgement.skipped)
    lines += [f"- {count} x {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def _misses(predictions: Sequence[Prediction]) -> list[str]:
    """Name the rows outside their intervals that lie farthest away, one per sweep."""
    outside = [each for each in predictions if abs(each.distance(OURS)) > 1.645]
    outside.sort(key=lambda each: -abs(each.distance(OURS)))
    seen: set[tuple[str, str]] = set()
    lines: list[str] = []
    for each in outside:
        key = (each.run.machine_name, each.run.model.name)
        if key in seen or len(lines) == LISTED_MISSES:
            continue
        seen.add(key)
        run = each.run
        predicted = run.tokens_per_s * (1 + each.error(OURS))
        lines.append(
            f"- {run.row.place}: {run.machine_name[:60]}, {run.model.name},"
            f" {run.words}: measured {run.tokens_per_s:.4g}, predicted {predicted:.4g}"
        )
    return ["Farthest outside their intervals:", "", *lines, ""] if lines else []


def to_json(judgement: Judgement) -> dict[str, Any]:
    """Return every score as JSON."""
    return {
        "folders": judgement.folders,
        "rows": len(judgement.runs),
        "skipped": [asdict(each) for each in judgement.skipped],
        "regrets": judgement.regrets,
        "bounds_beaten": [run.row.place for run in judgement.beaten_bounds],
        "cases": [
            {
                "name": case.name,
                "goal": case.goal,
                "left_out": left_out,
                "scores": {
                    name: asdict(result)
                    for name in (OURS, *BASELINES)
                    if (result := score(predictions, name)) is not None
                },
                "verdict": verdict(predictions) if predictions else "no rows",
            }
            for case in judgement.cases
            for left_out, predictions in case.predictions.items()
        ],
    }


def save(judgement: Judgement, folder: Path, command: str) -> list[Path]:
    """Write page, scores, every prediction, and the population for `advice/data`."""
    names = ("machines.md", "machines.json", "predictions.csv", "population.yaml")
    places = [folder / name for name in names]
    write_text(places[0], markdown(judgement, command))
    write_text(places[1], json.dumps(to_json(judgement), indent=2) + "\n")
    write_text(places[2], _all_predictions(judgement))
    write_text(places[3], population_text(judgement))
    predictions = judgement.cases[0].predictions["platforms"]
    if predictions:
        places.append(folder / "specification.svg")
        scatter(predictions).save(places[-1])
    return places


def _all_predictions(judgement: Judgement) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = ("case", "left_out", "place", "machine", "kind", "model", "flags", "given")
    writer.writerow((*heads, "measured", "predicted", "low", "high"))
    for case in judgement.cases:
        for left_out, predictions in case.predictions.items():
            for each in predictions:
                run = each.run
                speed = run.tokens_per_s * (1 + each.error(OURS))
                factor = 2.718281828 ** (1.6449 * each.guesses[OURS].spread)
                where = (run.row.place, run.machine_name, kind_of_platform(run.machine))
                shape = (run.model.name, run.words, each.given)
                numbers = (run.tokens_per_s, speed, speed / factor, speed * factor)
                rounded = [f"{number:.5g}" for number in numbers]
                writer.writerow((case.name, left_out, *where, *shape, *rounded))
    return text.getvalue()


def population_text(judgement: Judgement) -> str:
    """Return what `moesim.advice.times.priors.shipped_population` reads."""
    population = judgement.population
    rounded = {
        "source": f"python -m benchmarks.measured, {len(judgement.runs)} rows of"
        f" {len({run.group for run in judgement.runs})} platforms",
        "effects": {
            name: [round(mean, 3), round(spread, 3)]
            for name, (mean, spread) in sorted(population.effects.items())
        },
        "scales": {
            name: round(scale, 3) for name, scale in sorted(population.scales.items())
        },
        "widths": {
            name: [round(value, 3) for value in pair]
            for name, pair in sorted(population.widths.items())
        },
    }
    head = (
        "# What machines have in common; written by `python -m benchmarks.measured`.\n"
    )
    return head + yaml.safe_dump(rounded, sort_keys=False, default_flow_style=None)


def scatter(predictions: Sequence[Prediction]) -> Figure:
    """Draw predicted over measured tokens/s, intervals as vertical bars."""
    # Thousands of pairs hide each other; every n-th shows the same picture.
    stride = max(1, len(predictions) // MOST_POINTS)
    rows = []
    for each in predictions[::stride]:
        measured = each.run.tokens_per_s
        predicted = measured * (1 + each.error("moesim"))
        end = math.exp(NINETY * each.guesses["moesim"].spread)
        row = {"measured": measured, "predicted": predicted}
        rows.append(row | {"low": predicted / end, "high": predicted * end})
    ends = [value for row in rows for value in (row["measured"], row["predicted"])]
    line = (min(ends), max(ends))
    return Figure(
        pd.DataFrame(rows),
        Axis("measured", "measured tokens/s", log=True),
        Axis("predicted", "predicted tokens/s", log=True),
        "Predicted over measured tokens/s",
        mark="point",
        low="low",
        high="high",
        lines=[(line, line, "equal")],
    )
