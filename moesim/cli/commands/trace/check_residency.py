"""`moesim trace check-residency`: a replay against an engine's own residency."""

import json
from typing import Annotated

import typer

from moesim.cli import output, parsers
from moesim.cli.options import AsJson, TraceFile

AUTO = -1


def _size_or_auto(text: str) -> int:
    """Read a size; `AUTO` stands for the one that is to be found."""
    return AUTO if text == "auto" else parsers.size_bytes(text)


def check_residency(
    trace: TraceFile,
    cache_size: Annotated[
        int,
        typer.Option(
            "--cache",
            metavar="SIZE|auto",
            parser=_size_or_auto,
            help=(
                "The engine's expert cache; auto takes the size at which as many"
                " accesses hit as in the engine."
            ),
            show_default=False,
        ),
    ],
    policy: Annotated[
        str, typer.Option(help="Cache policy to compare with (see: list cache).")
    ] = "lru",
    engine_hits: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Hits by the engine's own counter, to compare."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace imported from route_trace v1 and compare every access with the
    residency its engine recorded.

    \b
    Example:
      moesim trace check-residency trace.parquet --cache 3000MiB
      moesim trace check-residency trace.parquet --cache auto --engine-hits 81234
    """
    from moesim.base.sizes import format_bytes
    from moesim.questions.residency import check_residency as compare

    cache_bytes = None if cache_size == AUTO else cache_size
    comparison = compare(trace, cache_bytes=cache_bytes, cache=policy)
    if as_json:
        counters = {} if engine_hits is None else {"counted_hits": engine_hits}
        print(json.dumps(comparison.to_json() | counters, indent=2))
        return
    if cache_size == AUTO:
        print(f"cache of {format_bytes(comparison.cache_bytes)}: hits as the engine")
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
    if engine_hits is not None:
        print(
            f"hits: {engine_hits:,} by the engine's counter, {comparison.engine_hits:,}"
            f" in its record, {comparison.replay_hits:,} in the replay"
        )
    first = comparison.first
    print(f"first difference: {first}" if first else "no difference")
