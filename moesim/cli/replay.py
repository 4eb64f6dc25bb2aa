"""`moesim replay` and `moesim compare`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli import options

if TYPE_CHECKING:
    from moesim.traces.format.reader import Trace


@options.with_setting
def replay(
    trace: options.TraceFile,
    policy: options.Policy = "greedy",
    *,
    setting: options.Setting,
    noise_seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help=(
                "Draw operation times from a calibrated profile's distributions, with"
                " this seed."
            ),
        ),
    ] = None,
    cache_only: Annotated[
        bool,
        typer.Option(
            "--cache-only",
            help="Count hits of the cache alone: every miss is fetched, no time.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the run's tables and figures there."),
    ] = None,
    perfetto: options.Perfetto = None,
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
    from moesim.cli.progress import replaying
    from moesim.reporting import text as report
    from moesim.runs import replay as api
    from moesim.runs.result import run_files
    from moesim.traces.format.reader import open_trace

    options.check_places(
        folder=out, files=[*run_files(out), perfetto], inputs=[trace, setting.warm]
    )
    if cache_only:
        needs_time = {
            "--prefetch": setting.prefetch,
            "--routing": setting.routing,
            "--host-memory": setting.host_memory,
            "--noise-seed": noise_seed,
            "--out": out,
            "--perfetto": perfetto,
        }
        for name, value in needs_time.items():
            if value is not None:
                raise typer.BadParameter(
                    "expected none beside --cache-only, which knows a cache and no"
                    " time",
                    param_hint=name,
                )
        words = setting.keywords(
            "memory", "hw", "batch", "steps", "seed", "warm", "artefacts"
        )
        counts = api.replay_cache(trace, setting.cache or api.cache_of(policy), **words)
        print(json.dumps(counts, indent=2) if as_json else report.cache_text(counts))
        return
    opened = open_trace(trace)
    with replaying(policy, opened, setting.steps) as progress:
        run = api.replay(
            opened,
            policy,
            **setting.keywords(),
            noise_seed=noise_seed,
            out=out,
            perfetto=perfetto,
            keep=False,
            progress=progress,
        )
    if as_json:
        print(json.dumps(run.to_json(), indent=2))
        return
    print(report.run_text(run))
    _say_written([*run_files(out), *([perfetto] if perfetto else [])])
    _warn(run.warnings)


@options.with_setting
def compare(
    trace: options.TraceFile,
    policies: Annotated[
        str,
        typer.Option(
            metavar="A,B,C",
            help=(
                "Systems or assignment policies; greedy+lru+residual adds cache and"
                " prefetch. The word systems stands"
                " for every published system that the trace can serve."
            ),
        ),
    ] = "all-cpu,llama.cpp,ktransformers,fiddler,on-demand,greedy",
    *,
    settings: list[options.Setting],
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=(
                "Replays at the same time. Default: as many as pay, one per core at"
                " most."
            ),
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write tables, report and PNG there."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw it, as .png, .svg or .pdf. Default: OUT/compare.png.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Write a page, with which expert was where. Default: OUT/compare.html."
            ),
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the table, .csv or .parquet. Default: OUT/compare.csv.",
        ),
    ] = None,
    perfetto: options.Perfetto = None,
    as_json: options.AsJson = False,
) -> None:
    """Replay one trace under several policies, and rank them: speed, hits, bytes,
    memory, the lane that holds each up.

    With several machines or sizes of memory, separated by commas, say who is fastest on
    each.

    \b
    Examples:
      moesim compare q.parquet --gpu-memory 8GiB
      moesim compare q.parquet --gpu-memory 4GiB,8GiB,16GiB --hw rtx4060ti,hw.toml --png memory.png
      moesim compare q.parquet --policies systems --hw rtx4060ti --out out/systems
      moesim compare q.parquet --policies greedy+lru+none,greedy+lru+residual --html q.html
    """
    from moesim.cli.progress import bar
    from moesim.reporting import text as report
    from moesim.reporting.comparison_page import write_comparison
    from moesim.reporting.figures import comparison_figure, save
    from moesim.reporting.sweep_figure import sweep_figure
    from moesim.reporting.sweep_page import write_sweep
    from moesim.reporting.sweep_text import sweep_text
    from moesim.runs import sweep as comparison
    from moesim.traces.format.reader import open_trace
    from moesim.traces.timeline.perfetto import write_perfetto

    if out is not None:
        png = png or out / "compare.png"
        html = html or out / "compare.html"
        table = table or out / "compare.csv"
    options.check_places(
        folder=out, files=[png, html, table, perfetto], inputs=[trace, settings[0].warm]
    )
    opened = open_trace(trace)
    names, left_out = _expand(
        opened, options.split_names(policies, "--policies"), settings
    )
    machines = list(dict.fromkeys(one.hw for one in settings))
    memories = list(dict.fromkeys(one.memory for one in settings))
    alone = len(settings) == 1
    with bar("replaying", 1.0) as show:
        found = comparison.sweep(
            opened,
            names,
            **settings[0].keywords() | {"hw": machines, "memory": memories},
            out=out,
            jobs=jobs,
            keep=alone or perfetto is not None,
            progress=show,
        )
    one = (found.table, found.by_policy())
    written = [
        *([out] if out else []),
        *(
            [save(comparison_figure(*one) if alone else sweep_figure(found), png)]
            if png
            else []
        ),
        *(
            [write_comparison(*one, html) if alone else write_sweep(found, html)]
            if html
            else []
        ),
        *([report.save_table(found.table, table)] if table else []),
        *([perfetto] if perfetto else []),
    ]
    if perfetto is not None:
        lines = {
            key[2] if alone else " | ".join(key): run.timeline
            for key, run in found.runs.items()
        }
        write_perfetto(perfetto, lines)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    print(report.comparison_text(*one) if alone else sweep_text(found))
    _say_written(written)
    _warn(
        [
            *left_out,
            *dict.fromkeys(
                warning for run in found.runs.values() for warning in run.warnings
            ),
        ]
    )


def _expand(
    trace: "Trace", names: list[str], settings: list[options.Setting]
) -> tuple[list[str], list[str]]:
    """Put, for the word ``systems``, those that the trace can serve; and say which it
    cannot, and why.
    """
    from moesim.policies.systems import SYSTEMS
    from moesim.runs.sweep import check_each

    found: list[str] = []
    left_out: list[str] = []
    for name in names:
        if name != "systems":
            found.append(name)
            continue
        for system in SYSTEMS:
            try:
                for setting in settings:
                    check_each(trace, [system], **setting.keywords())
            except ValueError as error:
                left_out.append(f"left out {system}: {error}")
            else:
                found.append(system)
    return found, left_out


def _say_written(places: list[Path]) -> None:
    for place in places:
        print(f"wrote {place}")


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print(f"note: {warning}", file=sys.stderr)
