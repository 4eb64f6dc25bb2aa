"""`moesim replay`: one trace, one policy, one machine."""

from dataclasses import dataclass
from pathlib import Path

from moesim.base.options import (
    PAGES,
    PICTURES,
    TIMELINES,
    PageOptions,
    file_option,
    folder_option,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass
from moesim.runs.config import RunConfig
from moesim.runs.result import FILES


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(PageOptions):
    """What `moesim replay` is asked beside the run itself."""

    out: Path | None = folder_option(
        "Write the run's tables and figures there.", *FILES
    )
    png: Path | None = file_option(
        "Draw what every lane did in a step in the middle.", *PICTURES
    )
    html: Path | None = file_option(
        "Write a page: every lane at any moment, which expert was where.", *PAGES
    )
    perfetto: Path | None = file_option(
        "Write a timeline, with every run, for ui.perfetto.dev.", *TIMELINES
    )


@from_dataclass()
def replay(config: RunConfig, options: ReplayOptions) -> None:
    """Replay a trace through a policy on a machine, and say what it was worth.

    \b
    Examples:
      moesim replay q.parquet --policy greedy
      moesim replay q.parquet --policy greedy --cache lfu:decay=0.9 --gpu-memory 8GiB
      moesim replay q.parquet --policy fiddler --hw hw.toml --html run.html --perfetto run.json.gz
      moesim replay --config run/run.json --batch 4
    """
    from moesim.questions.replay import run_answer
    from moesim.runs.replay import replay as replay_trace
    from moesim.runs.replay import share_of
    from moesim.runs.setup import opened

    # Opened once, for the bar and for the replay.
    config, _ = opened(config)
    with output.bar(config.policy, 1.0) as show:
        run = replay_trace(
            config,
            out=options.out,
            perfetto=options.perfetto,
            # A page is drawn from the timeline; figures alone need none in memory.
            keep=options.html is not None or options.png is not None,
            bounded=True,
            progress=share_of(config, show),
        )
    written = [options.out, options.perfetto]
    output.present(run_answer(run), options, more=written)
