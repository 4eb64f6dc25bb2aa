"""A known routing, written as each engine would: equal, refused, or a failure."""

import tempfile
from pathlib import Path

from support.drawn_imports import ENGINES, outcome

from .report import Report, last_lines


def run_suite(count, seed=0, only=None):
    """Draw `count` imports, all importers in turn."""
    report = Report("imports")
    names = [name for name in ENGINES if only is None or only in name]
    for number in range(count):
        if report.is_over:
            break
        name = names[number % len(names)]
        drawn = seed + number // len(names)
        try:
            with tempfile.TemporaryDirectory() as folder:
                refusal = outcome(name, drawn, Path(folder))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure
            report.count(name, "different")
            report.fail(f"{name} --seed {drawn}: {last_lines(error)}")
        else:
            report.count(name, "refused" if refusal else "equal")
    return report
