"""`moesim replay`: one trace, one policy, one machine."""

from dataclasses import dataclass
from pathlib import Path

from moesim.base.options import (
    PAGES,
    PICTURES,
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
            *("engine", "noise_seed", "out", "html", "png", "perfetto"),
        ),
    )
    out: Path | None = folder_option("Write the run's tables and figures there.")
    png: Path | None = file_option(
        "Draw what every lane did in a step in the middle.", *PICTURES
    )
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
    from moesim.questions.replay import cache_answer, run_answer
    from moesim.runs.replay import replay as replay_trace
    from moesim.runs.replay import replay_cache
    from moesim.runs.setup import opened

    if options.cache_only:
        counts = cache_answer(replay_cache(config))
        output.present(counts, as_json=options.as_json)
        return

    # Opened once, for the bar and for the replay.
    config, trace = opened(config)
    with replaying(config.policy, trace, config.steps) as progress:
        run = replay_trace(
            config,
            out=options.out,
            perfetto=options.perfetto,
            # A page is drawn from the timeline; figures alone need none in memory.
            keep=options.html is not None or options.png is not None,
            bounded=True,
            progress=progress,
        )
    output.present(
        run_answer(run),
        as_json=options.as_json,
        html=options.html,
        picture=options.png,
        more=[*run_files(options.out), options.perfetto],
    )
