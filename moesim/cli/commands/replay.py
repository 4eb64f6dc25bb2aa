"""`moesim replay`: one trace, one policy, one machine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import output
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson, Perfetto, RunFolder
from moesim.cli.run_options import with_config
from moesim.runs.config import RunConfig


@with_config()
def replay(
    *,
    config: RunConfig,
    arrivals: Annotated[
        str | None,
        typer.Option(
            metavar="poisson:RATE|FILE",
            help="When requests arrive, per second or as a file of seconds; --batch is"
            " the most that run together.",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="LIMITS",
            help="Limits in seconds that requests should meet: ttft=0.5,tpot=0.1.",
        ),
    ] = None,
    cache_only: Annotated[
        bool,
        typer.Option(
            "--cache-only",
            help="Count hits of the cache alone: every miss is fetched, no time.",
        ),
    ] = False,
    out: RunFolder = None,
    perfetto: Perfetto = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace through a policy on a machine, and say what it was worth.

    \b
    Examples:
      moesim replay q.parquet --policy greedy
      moesim replay q.parquet --policy greedy --cache lfu:decay=0.9 --gpu-memory 8GiB
      moesim replay q.parquet --policy fiddler --hw hw.toml --out run --perfetto run.json
      moesim replay q.parquet --cache belady --cache-ratio 0.5 --cache-only
      moesim replay --config run/run.json --batch 4
    """
    from moesim.cli.progress import replaying
    from moesim.reporting import text as report
    from moesim.runs.replay import replay as replay_trace
    from moesim.runs.result import run_files
    from moesim.runs.setup import opened

    # A file may state them as well.
    if arrivals is not None:
        config = config.replaced(arrivals=arrivals)
    if slo is not None:
        config = config.replaced(slo=slo)
    check_places(
        folder=out,
        files=[*run_files(out), perfetto],
        inputs=[config.trace, config.warm],
    )
    if cache_only:
        _cache_only(config, out=out, perfetto=perfetto, as_json=as_json)
        return

    # Opened once, for the bar and for the replay.
    config, trace = opened(config)
    with replaying(config.policy, trace, config.steps) as progress:
        run = replay_trace(
            # Figures are all that is printed, so the timeline need not stay in memory.
            config,
            out=out,
            perfetto=perfetto,
            keep=False,
            progress=progress,
        )
    if as_json:
        bound = output.bound_json(config, run.metrics["makespan_s"])
        print(json.dumps(run.to_json() | bound, indent=2))
        return
    print(report.run_text(run))
    output.print_bound(config, run.metrics["makespan_s"])
    output.print_written([*run_files(out), perfetto])
    output.print_notes(run.warnings)


def _cache_only(
    config: RunConfig, *, out: Path | None, perfetto: Path | None, as_json: bool
) -> None:
    """Count hits; refuse options that ask for time.

    Raises:
        typer.BadParameter: one of them was given.
    """
    from moesim.reporting import text as report
    from moesim.runs.cache_replay import replay_cache

    # Saying nothing would let a user believe that they were heeded.
    needs_time = {
        "--prefetch": config.prefetch,
        "--routing": config.routing,
        "--host-memory": config.host_memory_bytes,
        "--noise-seed": config.noise_seed,
        "--out": out,
        "--perfetto": perfetto,
    }
    for name, value in needs_time.items():
        if value is not None:
            raise typer.BadParameter(
                "expected none beside --cache-only, which knows a cache and no time",
                param_hint=name,
            )
    counts = replay_cache(config)
    print(json.dumps(counts, indent=2) if as_json else report.cache_text(counts))
    if not as_json:
        output.print_notes(counts["synthetic"])
