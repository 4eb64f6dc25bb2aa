"""`moesim replay` and `moesim compare`."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim import cli_options as options

if TYPE_CHECKING:
    import pandas as pd

    from moesim.api import MemoryOptions, Run
    from traces.reader import Trace


def replay(
    trace: options.TraceFile,
    policy: Annotated[str, typer.Option(help="A system or an assignment policy (see: list).")] = "greedy",
    cache: options.Cache = None,
    prefetch: options.Prefetch = None,
    routing: options.Routing = None,
    hw: options.Hardware = None,
    cache_ratio: options.CacheRatio = None,
    slots_per_layer: options.SlotsPerLayer = None,
    gpu_memory: options.GpuMemory = None,
    host_memory: options.HostMemory = None,
    host_cache: options.HostCache = "lru",
    cache_scope: options.CacheScope = None,
    staging: options.Staging = None,
    prefetch_budget: options.PrefetchBudget = None,
    gpu_split: options.GpuSplit = "layers",
    batch: options.Batch = 1,
    steps: options.Steps = None,
    seed: options.Seed = 0,
    noise_seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Draw operation times from a calibrated profile's distributions, with this seed."
        ),
    ] = None,
    warm: options.Warm = None,
    artefacts: options.Artefacts = None,
    cache_only: Annotated[
        bool, typer.Option("--cache-only", help="Count hits of the cache alone: every miss is fetched, no time.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the run's tables and figures there.")] = None,
    perfetto: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a timeline for ui.perfetto.dev.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Replay a trace through a policy on a machine, and say what it was worth.

    \b
    Examples:
      moesim replay q.parquet --policy greedy
      moesim replay q.parquet --policy greedy --cache lfu:decay=0.9 --gpu-memory 8GiB
      moesim replay q.parquet --policy fiddler --hw hw.toml --out run --perfetto run.json
      moesim replay q.parquet --cache belady --cache-ratio 0.5 --cache-only
    """
    from moesim import api, report
    from moesim.progress import replaying
    from traces.reader import open_trace

    options.check_places(folder=out, files=[perfetto])
    opened = open_trace(trace)
    memory = _memory(
        cache_ratio, slots_per_layer, gpu_memory, host_memory, cache_scope, staging, prefetch_budget, gpu_split
    )
    if cache_only:
        counts = api.replay_cache(
            opened, cache or api.cache_of(policy), memory=memory, hw=hw, batch=batch, steps=steps, seed=seed, warm=warm,
            artefacts=artefacts,
        )  # fmt: skip
        print(json.dumps(counts, indent=2) if as_json else report.cache_text(counts))
        return
    with replaying(policy, opened, steps) as progress:
        run = api.replay(
            opened, policy, cache=cache, prefetch=prefetch, routing=routing, host_cache=host_cache, hw=hw,
            memory=memory, batch=batch, steps=steps, seed=seed, noise_seed=noise_seed, warm=warm, artefacts=artefacts,
            out=out, perfetto=perfetto, progress=progress,
        )  # fmt: skip
    written = [*report.save_run(run, out), *([perfetto] if perfetto else [])]
    if as_json:
        print(json.dumps(run.to_json(), indent=2))
        return
    print(report.run_text(run))
    _say_written(written)
    _warn(run.warnings)


def compare(
    trace: options.TraceFile,
    policies: Annotated[
        str,
        typer.Option(
            metavar="A,B,C", help="Systems or assignment policies; greedy+lru+residual adds cache and prefetch."
        ),
    ] = "all-cpu,on-demand,static-threshold,greedy,beam",
    cache: options.Cache = None,
    prefetch: options.Prefetch = None,
    routing: options.Routing = None,
    hw: options.Hardware = None,
    cache_ratio: options.CacheRatio = None,
    slots_per_layer: options.SlotsPerLayer = None,
    gpu_memory: options.GpuMemory = None,
    host_memory: options.HostMemory = None,
    host_cache: options.HostCache = "lru",
    cache_scope: options.CacheScope = None,
    staging: options.Staging = None,
    prefetch_budget: options.PrefetchBudget = None,
    gpu_split: options.GpuSplit = "layers",
    batch: options.Batch = 1,
    steps: options.Steps = None,
    seed: options.Seed = 0,
    warm: options.Warm = None,
    artefacts: options.Artefacts = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write every run's tables and the PNG there.")] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the comparison. Default: OUT/compare.png.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table. Default: OUT/compare.csv.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Replay one trace under several policies: one table, one PNG.

    \b
    Examples:
      moesim compare q.parquet --policies all-cpu,on-demand,greedy
      moesim compare q.parquet --policies greedy+lru+none,greedy+lru+residual --out out/q
    """
    from moesim import report
    from traces.reader import open_trace

    png = png or (out / "compare.png" if out else Path("compare.png"))
    csv = csv or (out / "compare.csv" if out else None)
    options.check_places(folder=out, files=[png, csv])
    opened = open_trace(trace)
    memory = _memory(
        cache_ratio, slots_per_layer, gpu_memory, host_memory, cache_scope, staging, prefetch_budget, gpu_split
    )
    given = {
        "cache": cache, "prefetch": prefetch, "routing": routing, "host_cache": host_cache, "hw": hw,
        "memory": memory, "batch": batch, "steps": steps, "seed": seed, "warm": warm,
        "artefacts": artefacts,
    }  # fmt: skip
    table, runs = run_each(opened, split_policies(policies), out, **given)
    written = [report.comparison_figure(table, runs, png), *([report.save_table(table, csv)] if csv else [])]
    if as_json:
        print(json.dumps({name: run.to_json() for name, run in runs.items()}, indent=2))
        return
    print(report.comparison_text(table, runs))
    _say_written([*([out] if out else []), *written])
    _warn(list(dict.fromkeys(warning for run in runs.values() for warning in run.warnings)))


def run_each(
    trace: "Trace", policies: list[str], out: Path | None, **options: Any
) -> "tuple[pd.DataFrame, dict[str, Run]]":
    """Compare policies one after the other, each with a progress bar and a folder of its own below `out`."""
    from moesim import api, report
    from moesim.progress import replaying

    rows: list[pd.DataFrame] = []
    runs: dict[str, Run] = {}
    for name in dict.fromkeys(policies):
        with replaying(name, trace, options.get("steps")) as progress:
            row, one = api.compare(trace, [name], out=out, progress=progress, **options)
        report.save_run(one[name], None if out is None else out / api.folder_name(name))
        rows.append(row)
        runs |= one
    return report.stacked(rows), runs


def split_policies(text: str) -> list[str]:
    """Split ``greedy+lfu:decay=0.9,variant=perfect,all-cpu`` where a policy begins, not inside its parameters.

    Raises:
        PolicyError: no policy at all, or a parameter that belongs to none.
    """
    from policies.base import PolicyError

    found: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if found and re.match(r"[\w-]+=", piece):
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    if not found:
        raise PolicyError(f"--policies: expected names separated by commas, got {text!r}")
    return found


def _memory(
    cache_ratio: float | None,
    slots_per_layer: int | None,
    gpu_memory: int | None,
    host_memory: int | None,
    cache_scope: str | None,
    staging: int | None,
    prefetch_budget: int | None,
    gpu_split: str,
) -> "MemoryOptions":
    from moesim.api import MemoryOptions

    return MemoryOptions(
        cache_ratio, slots_per_layer, gpu_memory, host_memory, cache_scope, staging, prefetch_budget, gpu_split
    )


def _say_written(places: list[Path]) -> None:
    for place in places:
        print(f"wrote {place}")


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print(f"note: {warning}", file=sys.stderr)
