"""`moesim replay`: one trace, one policy, one machine."""

import json
from dataclasses import dataclass
from pathlib import Path

from moesim.base.options import (
    PAGES,
    TIMELINES,
    Options,
    file_option,
    folder_option,
    json_option,
    option,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass
from moesim.runs.config import RunConfig
from moesim.runs.result import run_files


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(Options):
    """What `moesim replay` is asked beside the run itself."""

    cache_only: bool = option(
        False,
        "Count hits of the cache alone: every miss is fetched, no time.",
        excludes=(
            *("arrivals", "hw", "prefetch", "routing", "host_memory_bytes"),
            *("host_cache", "staging", "prefetch_budget_bytes", "gpu_split"),
            *("context_tokens", "micro_batch", "draft_tokens", "acceptance"),
            *("engine", "noise_seed", "out", "html", "perfetto"),
        ),
    )
    out: Path | None = folder_option("Write the run's tables and figures there.")
    html: Path | None = file_option(
        "Write a page: every lane at any moment, which expert was where.", *PAGES
    )
    perfetto: Path | None = file_option(
        "Write a timeline, with every run, for ui.perfetto.dev.", *TIMELINES
    )
    as_json: bool = json_option()

    def outputs(self) -> list[Path]:
        """Files that are written, those in the folder included."""
        return [*Options.outputs(self), *run_files(self.out)]


@from_dataclass()
def replay(config: RunConfig, options: ReplayOptions) -> None:
    """Replay a trace through a policy on a machine, and say what it was worth.

    \b
    Examples:
      moesim replay q.parquet --policy greedy
      moesim replay q.parquet --policy greedy --cache lfu:decay=0.9 --gpu-memory 8GiB
      moesim replay q.parquet --policy fiddler --hw hw.toml --html run.html --perfetto run.json.gz
      moesim replay q.parquet --cache belady --cache-ratio 0.5 --cache-only
      moesim replay --config run/run.json --batch 4
    """
    from moesim.cli.output import replaying
    from moesim.questions import replay as report
    from moesim.runs.replay import replay as replay_trace
    from moesim.runs.setup import opened

    if options.cache_only:
        _count_hits(config, as_json=options.as_json)
        return

    # Opened once, for the bar and for the replay.
    config, trace = opened(config)
    with replaying(config.policy, trace, config.steps) as progress:
        run = replay_trace(
            config,
            out=options.out,
            perfetto=options.perfetto,
            # A page is drawn from the timeline; figures alone need none in memory.
            keep=options.html is not None,
            bounded=True,
            progress=progress,
        )
    if options.html is not None:
        from moesim.questions.replay_page import write_run

        write_run(run, options.html, output.command_line())
    if options.as_json:
        bound = output.bound_json(run.bound, run.metrics["makespan_s"])
        print(json.dumps(run.to_json() | bound, indent=2))
        return
    print(report.run_text(run))
    output.print_bound(run.bound, run.metrics["makespan_s"])
    output.print_written(options.outputs())
    output.print_notes(run.warnings)


def _count_hits(config: RunConfig, *, as_json: bool) -> None:
    from moesim.questions import replay as report
    from moesim.runs.replay import replay_cache

    counts = replay_cache(config)
    print(json.dumps(counts, indent=2) if as_json else report.cache_text(counts))
    if not as_json:
        output.print_notes(counts["synthetic"])
