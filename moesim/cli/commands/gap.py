"""`moesim gap`: where a policy loses its time."""

from moesim.base.options import PageOptions
from moesim.cli import output
from moesim.cli.options import from_dataclass
from moesim.runs.config import RunConfig


@from_dataclass(without=["noise_seed", "engine", "arrivals", "slo"])
def gap(config: RunConfig, options: PageOptions) -> None:
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
    output.present(gap_answer(measured), options)
