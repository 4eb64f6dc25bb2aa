"""`moesim sensitivity`: which constant of a profile decides who wins."""

import json
from typing import Annotated, Any

import typer

from moesim.cli import parsers
from moesim.cli.options import AsJson, Batch, Hardware, TraceFile

MOST_CONSTANTS = 12
"""Constants that are printed, those with the largest effect."""


def sensitivity(
    trace: TraceFile,
    policies: Annotated[
        str, typer.Option(metavar="P,…", help="Who competes.")
    ] = "greedy+lru,on-demand+lru,all-cpu+none",
    hw: Hardware = None,
    cache_ratio: Annotated[
        float, typer.Option(metavar="R", min=0, max=1, help="Share of experts cached.")
    ] = 0.25,
    batch: Batch = 1,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Forward passes replayed.")
    ] = 32,
    as_json: AsJson = False,
) -> None:
    """Move every constant of a profile within its interval and say whether another
    policy would win.

    \b
    Example:
      moesim sensitivity q.parquet --hw hw.toml --policies greedy+lru,on-demand+lfu
    """
    from moesim.analysis import sensitivity as library
    from moesim.cli.progress import steps_of

    names = parsers.split_policies(policies, "--policies")
    # Every constant takes two comparisons, so a few steps must do.
    with steps_of("moving constants") as progress:
        result = library.sensitivity(
            trace,
            policies=names,
            hw=hw,
            cache_ratio=cache_ratio,
            batch=batch,
            steps=steps,
            progress=progress,
        ).to_json()
    print(json.dumps(result, indent=2) if as_json else sensitivity_text(result))


def sensitivity_text(result: dict[str, Any]) -> str:
    """Lay out winners, constants, break-even and cliff for a terminal."""
    from moesim.reporting.tables import aligned

    fastest_first = sorted(result["baseline_s"].items(), key=lambda item: item[1])
    lines = [f"{name:<28} {seconds:10.4f} s" for name, seconds in fastest_first]

    changes = ", ".join(result["winner_changes"]) or "none"
    lines += [
        "",
        f"winner: {result['winner']}; constants that change it: {changes}",
        "",
    ]
    constants = [
        [each["path"], f"{100 * each['effect']:.2f} %", each["interval"]]
        for each in result["constants"][:MOST_CONSTANTS]
    ]
    lines += aligned([["constant", "moves a run by", "interval"], *constants])

    # Rows are sorted by tokens: the first one is where the lines cross.
    fetched = [row["tokens"] for row in result["break_even"] if row["fetch"]]
    since = "never, up to 1024 tokens"
    if fetched:
        since = f"from {fetched[0]} tokens of an expert on"
    cliff = result["cliff"]
    # A trace without decode steps has no hit rate to show.
    rates = ", ".join(
        f"{share} x: {100 * (rate or 0):.1f} %"
        for share, rate in cliff["hit_rate"].items()
    )
    lines += [
        "",
        f"fetching an absent expert is cheaper than computing it on the CPU {since}",
        (
            f"capacity cliff of a global LRU: {cliff['working_set']} experts"
            f" ({100 * cliff['ratio']:.1f} %); hits {rates}"
        ),
    ]
    return "\n".join(lines)
