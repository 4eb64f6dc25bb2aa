"""`make bench`: every figure that the README and the issues quote."""

from __future__ import annotations

from benchmarks import (
    cache_speed,
    import_speed,
    memory_and_start,
    planning,
    replay_speed,
    runtime_overhead,
    trace_speed,
)


def main() -> None:
    """Run all reports."""
    for report in (
        replay_speed.report,
        planning.report,
        cache_speed.report,
        memory_and_start.report,
        runtime_overhead.report,
        trace_speed.report,
        import_speed.report,
    ):
        report()
        print()


if __name__ == "__main__":
    main()
