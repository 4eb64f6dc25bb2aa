"""How many drawn configurations both engines answer alike, to the last bit.

``python -m benchmarks.engine_equality --draws 2000``. Machines, models, traces and
policies are drawn as `tests/support/engine_draws.py` draws them; systems that were not
drawn follow.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from moesim.policies.systems import SYSTEMS

ROOT = Path(__file__).resolve().parents[1]
# Where pytest finds it, too.
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.engine_draws import (  # noqa: E402 - its place is known only now
    compare_engines,
    configurations,
    memories,
)

MORE = 5
"""Draws of each system that the others had left out."""


def main() -> None:
    """Draw, compare and print; exit with 1 if any two runs differed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_equality",
        description="Compare both engines on drawn configurations.",
    )
    parser.add_argument("--draws", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    policies: Counter[str] = Counter()
    counts = equality(arguments.draws, arguments.seed, policies, configurations)
    for name in sorted(SYSTEMS.keys() - policies.keys()):
        counts += equality(MORE, arguments.seed, policies, _of_system(name))
    total = counts["equal"] + counts["different"]
    print(
        f"{counts['equal']} of {total} drawn configurations equal; {len(policies)}"
        f" assignments and systems, of {len(SYSTEMS)} systems"
        f" {len(SYSTEMS.keys() & policies)}; {counts['altered']} named a routing that"
        f" alters, {counts['drafted']} drafted"
    )
    raise SystemExit(bool(counts["different"]))


def _of_system(name: str) -> Any:
    """Configurations as drawn, but of one system."""

    def named(drawn: Any) -> Any:
        trace, machine, options, *host = drawn
        options = {key: options[key] for key in memories} | {"policy": name}
        return trace, machine, options, *host

    return configurations.map(named)


def equality(
    draws: int, number: int, policies: Counter[str], drawn: Any
) -> Counter[str]:
    """Compare so many of `drawn`, from seed `number`: how many were equal,
    how many different, and what else they had; differences are printed. Names of what
    ran are counted in `policies`.
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
    @given(drawn)
    def compare(configuration: Any) -> None:
        try:
            compare_engines(*configuration)
        except AssertionError as error:
            counts["different"] += 1
            print(f"{configuration[2:]}: {error}")
        else:
            counts["equal"] += 1
        options = configuration[2]
        policies[options["policy"].partition(":")[0]] += 1
        counts["altered"] += options.get("routing", "as-recorded") != "as-recorded"
        counts["drafted"] += options["draft_tokens"] > 0 and options["batch"] == 1
        done = counts["equal"] + counts["different"]
        if done % 100 == 0:
            took_s = time.monotonic() - begin_s
            print(f"  {done}: {counts['equal']} equal, {took_s:.0f} s", flush=True)

    compare()
    return counts


if __name__ == "__main__":
    main()
