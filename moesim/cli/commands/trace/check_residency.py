"""`moesim trace check-residency`: a replay against an engine's own residency."""

import json
from typing import Annotated

import typer

from moesim.cli import output, parsers
from moesim.cli.options import AsJson, TraceFile


def check_residency(
    trace: TraceFile,
    cache_bytes: Annotated[
        int,
        typer.Option(
            "--cache",
            metavar="SIZE",
            parser=parsers.size_bytes,
            help="The engine's expert cache.",
            show_default=False,
        ),
    ],
    policy: Annotated[
        str, typer.Option(help="Cache policy to compare with (see: list cache).")
    ] = "lru",
    as_json: AsJson = False,
) -> None:
    """Replay a trace imported from route_trace v1 and compare every access with the
    residency its engine recorded.

    \b
    Example:
      moesim trace check-residency trace.parquet --cache 3000MiB
    """
    from moesim.analysis.residency import check_residency as compare

    comparison = compare(trace, cache_bytes=cache_bytes, cache=policy)
    if as_json:
        print(json.dumps(comparison.to_json(), indent=2))
        return
    for name, counts in comparison.phases.items():
        # A trace without prefill has nothing to say of it.
        if not counts.accesses:
            continue
        print(
            f"{name}: {counts.accesses:,} accesses, {counts.share:.2%} agree;"
            f" hits {counts.engine_hits / counts.accesses:.1%} in the engine,"
            f" {counts.replay_hits / counts.accesses:.1%} in the replay"
        )
        if counts.only_engine or counts.only_replay:
            print(
                f"  resident in the engine only: {counts.only_engine:,}, of which"
                f" {counts.prefetched:,} prefetched; in the replay only:"
                f" {counts.only_replay:,}"
            )
        # They are in neither figure, so a reader must know of them.
        if counts.dropped:
            output.print_notes(
                [f"{counts.dropped:,} accesses that the engine dropped are left out"]
            )
    first = comparison.first
    print(f"first difference: {first}" if first else "no difference")
