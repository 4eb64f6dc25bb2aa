"""`make bench`: every figure that the README and the issues quote."""

from __future__ import annotations

from benchmarks import cache_speed, memory_and_start, planning, replay_speed, runtime_overhead, trace_speed


def main() -> None:
    """Run all reports."""
    for report in (
        replay_speed.report,
        planning.report,
        cache_speed.report,
        memory_and_start.report,
        runtime_overhead.report,
        lambda: trace_speed.report(rows=1_000_000),
    ):
        report()
        print()


if __name__ == "__main__":
    main()
