"""`moesim gap`: where a policy loses its time."""

from dataclasses import dataclass
from pathlib import Path

from moesim.base.options import PAGES, PICTURES, Options, file_option, json_option
from moesim.cli import output
from moesim.cli.options import from_dataclass
from moesim.runs.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GapOptions(Options):
    """What `moesim gap` is asked beside the run itself."""

    png: Path | None = file_option("Draw it.", *PICTURES)
    html: Path | None = file_option("Write a page with every combination.", *PAGES)
    as_json: bool = json_option()


@from_dataclass(without=["noise_seed", "engine", "arrivals", "slo"])
def gap(config: RunConfig, options: GapOptions) -> None:
    """Say how much of a policy's time above a clairvoyant schedule's is due to which
    of its parts.

    Replays the trace with every combination of its own parts and parts that know the
    future, so --steps saves much.

    \b
    Examples:
      moesim gap q.parquet --policy greedy --steps 100
      moesim gap q.parquet --policy on-demand --cache lfu --prefetch next-gate --batch 8
    """
    from moesim.cli.output import bar
    from moesim.questions.gap import gap as measure_gap
    from moesim.questions.gap import gap_answer

    with bar("replaying", 1.0) as progress:
        measured = measure_gap(config, progress=progress)
    output.present(
        gap_answer(measured),
        as_json=options.as_json,
        html=options.html,
        picture=options.png,
    )
