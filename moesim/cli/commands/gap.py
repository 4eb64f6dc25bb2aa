"""`moesim gap`: where a policy loses its time."""

import json
from dataclasses import dataclass
from pathlib import Path

from moesim.base.options import PAGES, Options, file_option, json_option
from moesim.cli import output
from moesim.cli.options import from_dataclass
from moesim.runs.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GapOptions(Options):
    """What `moesim gap` is asked beside the run itself."""

    html: Path | None = file_option("Write a page with every mix.", *PAGES)
    as_json: bool = json_option()


@from_dataclass(without=["noise_seed", "engine", "arrivals", "slo"])
def gap(config: RunConfig, options: GapOptions) -> None:
    """Say how much of a policy's time above a clairvoyant schedule's is due to which
    of its parts.

    Replays the trace with every mix of its own parts and parts that know the future, so
    --steps saves much.

    \b
    Examples:
      moesim gap q.parquet --policy greedy --steps 100
      moesim gap q.parquet --policy on-demand --cache lfu --prefetch next-gate --batch 8
    """
    from moesim.cli.output import bar
    from moesim.questions.gap import gap as measure_gap
    from moesim.questions.gap import gap_text
    from moesim.runs.bound import bound_of

    with bar("replaying", 1.0) as progress:
        measured = measure_gap(config, progress=progress)
    if options.html is not None:
        from moesim.questions.gap_page import write_gap

        write_gap(measured, options.html, output.command_line())
    if options.as_json:
        print(json.dumps(measured.to_json(), indent=2))
        return
    print(gap_text(measured))
    output.print_bound(bound_of(config), measured.policy_s, f"{config.policy} is ")
    output.print_written([options.html])
