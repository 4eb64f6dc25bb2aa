"""A comparison as one HTML file: who is fastest, what every lane did, which expert was
where, and when.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from moesim.reporting import html as page
from moesim.reporting.figures import (
    comparison_figure,
    placement_figure,
    step_figure,
    svg,
)
from moesim.reporting.text import (
    busy_shares,
    comparison_rows,
    percent,
    shared_words,
    verdict_lines,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pandas as pd

    from moesim.runs.result import Run


def write_comparison(table: pd.DataFrame, runs: Mapping[str, Run], path: Path) -> Path:
    """Write the report.

    Args:
        table, runs: as `moesim.runs.sweep.compare` returns them.
        path: where it goes.

    Returns:
        Its place.
    """
    answer, *notes = verdict_lines(table, runs)
    real = table[~table["oracle"].astype(bool)]
    best = str((real if len(real) else table)["policy"].iloc[0])
    run = runs[best]
    parts = [page.paragraph(line) for line in shared_words(runs).split("\n")]
    parts += [page.paragraph(answer, "answer"), page.table(*comparison_rows(table))]
    parts += [page.paragraph(line, "note") for line in notes]
    parts.append(svg(comparison_figure(table, runs)))
    parts.append(
        page.section(
            "What did every lane do?",
            "Share of the run in which it worked.",
            _lanes(table, runs),
        )
    )
    if run.metrics["steps"]:
        where = (
            f"{best}: a cell per expert. Blue was computed on the GPU, red on the CPU;"
            " white was never asked for."
        )
        parts.append(
            page.section(
                "Which expert where, computed by whom?",
                where,
                svg(placement_figure(run)),
            )
        )
        when = (
            f"{best}: the first layers of one forward pass. Copies run beside the work"
            " they are for."
        )
        parts.append(page.section("When?", when, svg(step_figure(run))))
    return page.write_page(path, "Policies compared", [*parts, *closing_sections(runs)])


def closing_sections(runs: Mapping[str, Run]) -> list[str]:
    """What every comparison ends with: each warning once, if there is any, and the
    settings of all runs by name.
    """
    warnings = dict.fromkeys(
        warning for run in runs.values() for warning in run.warnings
    )
    settings = page.verbatim(
        json.dumps({name: run.config for name, run in runs.items()}, indent=1)
    )
    words = page.section(
        "What to know before believing it", "", "".join(map(page.paragraph, warnings))
    )
    return [
        *([words] if warnings else []),
        page.section("Settings", "", f"<details>{settings}</details>"),
    ]


def _lanes(table: pd.DataFrame, runs: Mapping[str, Run]) -> str:
    lanes = next(iter(runs.values())).timeline.lanes
    rows = [
        [name, *(percent(busy_shares(runs[name])[lane], 0) for lane in lanes)]
        for name in table["policy"]
    ]
    return page.table(["policy", *lanes], rows)
