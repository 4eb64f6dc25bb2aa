"""`moesim gap`: where a policy loses its time."""

import json

from moesim.cli import output
from moesim.cli.options import AsJson
from moesim.cli.run_options import with_config
from moesim.runs.config import RunConfig


@with_config(without=["noise_seed", "engine"])
def gap(*, config: RunConfig, as_json: AsJson = False) -> None:
    """Say how much of a policy's time above the clairvoyant bound is due to which of
    its parts.

    Replays the trace with every mix of its own parts and parts that know the future, so
    --steps saves much.

    \b
    Examples:
      moesim gap q.parquet --policy greedy --steps 100
      moesim gap q.parquet --policy on-demand --cache lfu --prefetch next-gate --batch 8
    """
    from moesim.analysis.gap import gap as measure_gap
    from moesim.analysis.gap_text import gap_text
    from moesim.cli.progress import bar

    # How many mixes there are depends on which parts the policy has.
    with bar("replaying") as progress:
        measured = measure_gap(config, progress=progress)
    if as_json:
        print(json.dumps(measured.to_json(), indent=2))
        return
    print(gap_text(measured))
    output.print_bound(config, measured.policy_s, f"{config.policy} is ")
