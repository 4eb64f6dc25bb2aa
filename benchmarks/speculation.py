"""What drafted tokens are worth with offloaded experts: time per token that is kept.

Traces are those that `benchmarks.prefetchers prepare` writes::

    python -m benchmarks.speculation INPUTS
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.departures import TRACES, replayed, rows

if TYPE_CHECKING:
    from moesim.runs.result import Run

RATIOS = (0.25, 0.5, 0.75)
DRAFTED = (1, 2, 4, 8)
ACCEPTANCES = (0.6, 0.8, 0.95)


def tpot_ms(run: Run) -> float:
    """Milliseconds per token that was kept."""
    return float(1e3 * run.metrics["tpot_s"])


def compared(inputs: Path, trace: str, system: str, **options: Any) -> float:
    """Milliseconds per token of one replay."""
    return tpot_ms(replayed(inputs, trace, system, steps=33, **options))


def main() -> None:
    """Print a table of systems, and one of drafts and acceptances."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", type=Path)
    inputs = parser.parse_args().inputs

    print("\nfour drafted tokens, acceptance 0.8; ms per token")
    rows("trace", "cache", "no draft", "draft, no prefetch", "sp-moe", "moe-speq")
    for trace in TRACES[:2]:
        for ratio in RATIOS:
            times = [
                compared(inputs, trace, "sp-moe", cache_ratio=ratio, **options)
                for options in (
                    {"draft_tokens": 0, "prefetch": "none"},
                    {"prefetch": "none"},
                    {},
                )
            ]
            times.append(compared(inputs, trace, "moe-speq", cache_ratio=ratio))
            rows(trace, ratio, *times)

    print("\nmoe-speq, half of the experts cached; ms per token")
    rows("trace", "drafted", *ACCEPTANCES)
    for trace in TRACES[:2]:
        for drafted in DRAFTED:
            times = [
                compared(
                    inputs,
                    trace,
                    "moe-speq",
                    cache_ratio=0.5,
                    draft_tokens=drafted,
                    acceptance=acceptance,
                )
                for acceptance in ACCEPTANCES
            ]
            rows(trace, drafted, *times)


if __name__ == "__main__":
    main()
