"""`make bench`: every figure that README and issues quote; ``python -m benchmarks
planning`` prints one report.
"""

from __future__ import annotations

import argparse

from benchmarks import (
    cache_speed,
    first_minute,
    import_speed,
    memory_and_start,
    planning,
    python_policies,
    replay_speed,
    runtime_overhead,
    sweep_speed,
    trace_speed,
)

REPORTS = {
    module.__name__.rpartition(".")[2]: module.report
    for module in (
        replay_speed,
        python_policies,
        sweep_speed,
        first_minute,
        planning,
        cache_speed,
        memory_and_start,
        runtime_overhead,
        trace_speed,
        import_speed,
    )
}


def main() -> None:
    """Run the reports that are named, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Print speed and memory as ratios."
    )
    parser.add_argument(
        "reports",
        nargs="*",
        metavar="REPORT",
        help=f"of {', '.join(REPORTS)}; all when none is named",
    )
    names = parser.parse_args().reports
    if unknown := [name for name in names if name not in REPORTS]:
        parser.error(f"no report {unknown[0]!r}; expected one of {', '.join(REPORTS)}")
    for name in names or REPORTS:
        REPORTS[name]()
        print()


if __name__ == "__main__":
    main()
