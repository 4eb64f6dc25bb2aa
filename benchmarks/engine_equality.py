"""How many drawn configurations both engines answer alike, to the last bit.

``python -m benchmarks.engine_equality --draws 2000``. Machines, models, traces and
policies are drawn as `tests/sim/test_compiled.py` draws them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

ROOT = Path(__file__).resolve().parents[1]
# Where pytest finds them, too.
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "sim")]

import test_compiled as drawn  # noqa: E402 - its place is known only now


def main() -> None:
    """Draw, compare and print; exit with 1 if any two runs differed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_equality",
        description="Compare both engines on drawn configurations.",
    )
    parser.add_argument("--draws", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    counts = equality(arguments.draws, arguments.seed)
    total = counts["equal"] + counts["different"]
    print(f"{counts['equal']} of {total} drawn configurations equal")
    raise SystemExit(bool(counts["different"]))


def equality(draws: int, number: int) -> Counter[str]:
    """Compare so many configurations, drawn from seed `number`: how many were equal and
    how many different; differences are printed.
    """
    counts: Counter[str] = Counter()
    begin_s = time.monotonic()

    @seed(number)
    @settings(
        max_examples=draws,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        drawn.traces(max_layers=4),
        drawn.st.sampled_from(drawn.ASSIGNMENTS),
        drawn.options,
        drawn.ahead,
        drawn.st.sampled_from(drawn.HOST_CACHES),
        drawn.st.sampled_from([None, *drawn.HOST_RATIOS]),
    )
    def compare(
        trace: Any,
        policy: str,
        options: dict[str, Any],
        ahead: dict[str, Any],
        host_cache: str,
        host_ratio: float | None,
    ) -> None:
        options |= ahead
        if host_ratio is not None:
            options |= {"host_cache": host_cache}
        try:
            drawn.check(trace, policy, options, drawn.PREDICTORS, host_ratio)
        except AssertionError as error:
            counts["different"] += 1
            print(f"{policy} {options} {host_ratio}: {error}")
        else:
            counts["equal"] += 1
        done = counts.total()
        if done % 100 == 0:
            took_s = time.monotonic() - begin_s
            print(f"  {done}: {counts['equal']} equal, {took_s:.0f} s", flush=True)

    compare()
    return counts


if __name__ == "__main__":
    main()
