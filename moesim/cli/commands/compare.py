"""`moesim compare`: several policies, machines and memories on one trace."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.options import (
    PAGES,
    PICTURES,
    TABLES,
    TIMELINES,
    Options,
    TableOptions,
    file_option,
    folder_option,
    jobs_option,
    option,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass
from moesim.runs.config import CACHE_SIZES, RunConfig, of_run

if TYPE_CHECKING:
    from moesim.traces.format.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(TableOptions):
    """Which policies are compared, and what is written of it."""

    # From computing everything on the CPU to fetching everything, and one that weighs
    # both for every expert.
    policy: tuple[str, ...] = option(
        ("all-cpu", "llama.cpp", "ktransformers", "fiddler", "on-demand", "greedy"),
        "Systems or assignment policies; greedy+lru+residual adds cache and prefetch."
        " The word systems stands for every published system that the trace can serve.",
        metavar="A",
        policy_kind="assignment",
    )
    hw: tuple[str, ...] = of_run("hw", ())
    cache_ratio: tuple[float, ...] = of_run("cache_ratio", ())
    slots_per_layer: tuple[int, ...] = of_run("slots_per_layer", ())
    gpu_memory_bytes: tuple[int, ...] = of_run("gpu_memory_bytes", ())
    jobs: int | None = jobs_option()
    out: Path | None = folder_option("Write tables, report and PNG there.")
    png: Path | None = file_option("Draw it. Default: OUT/compare.png.", *PICTURES)
    html: Path | None = file_option(
        "Write a page, with which expert was where. Default: OUT/compare.html.", *PAGES
    )
    table: Path | None = file_option(
        "Write the table. Default: OUT/compare.csv.", *TABLES
    )
    perfetto: Path | None = file_option(
        "Write a timeline, with every run, for ui.perfetto.dev.", *TIMELINES
    )

    def completed(self) -> "CompareOptions":
        """With everything that a folder gets; single results can still go elsewhere."""
        if self.out is None:
            return self
        return replace(
            self,
            png=self.png or self.out / "compare.png",
            html=self.html or self.out / "compare.html",
            table=self.table or self.out / "compare.csv",
        )

    def outputs(self) -> list[Path]:
        """Files that are written, those in the folder included."""
        return Options.outputs(self.completed())

    def configs(self, config: RunConfig) -> list[RunConfig]:
        """A configuration for each machine and each size of the GPU cache."""
        sizes = [(name, size) for name in CACHE_SIZES for size in getattr(self, name)]
        memories = [replace(config.memory, **{name: size}) for name, size in sizes]
        return [
            RunConfig.of(config, hw=hw, memory=memory)
            for hw in self.hw or (None,)
            for memory in memories or [config.memory]
        ]


@from_dataclass(without=["noise_seed", "arrivals", "slo"])
def compare(config: RunConfig, options: CompareOptions) -> None:
    """Replay one trace under several policies, and rank them: speed, hits, bytes,
    memory, the lane that holds each up.

    With several machines or sizes of memory, separated by commas, say who is fastest on
    each.

    \b
    Examples:
      moesim compare q.parquet --gpu-memory 8GiB
      moesim compare q.parquet --gpu-memory 4GiB,8GiB,16GiB --hw rtx4060ti,hw.toml --png memory.png
      moesim compare q.parquet --policy systems --hw rtx4060ti --out out/systems
      moesim compare q.parquet --policy greedy+lru+none,greedy+lru+residual --html q.html
    """
    from moesim.cli.output import bar
    from moesim.questions.compare import compare as compare_runs
    from moesim.runs.setup import opened
    from moesim.traces.timeline.perfetto import write_perfetto

    options = options.completed()
    config, trace = opened(config)
    configs = options.configs(config)
    names, left_out = _expand(trace, options.policy, configs)
    is_single = len(configs) == 1
    several: dict[str, Any] = {}
    if is_single:
        (config,) = configs
    else:
        several["hw"] = list(dict.fromkeys(each.hw for each in configs))
        several["memory"] = list(dict.fromkeys(each.memory for each in configs))
    with bar("replaying", 1.0) as show:
        compared = compare_runs(
            config,
            names,
            out=options.out,
            jobs=options.jobs,
            # Pages of one setting draw timelines; those of many would fill memory.
            keep=is_single or options.perfetto is not None,
            progress=show,
            **several,
        )
    if options.perfetto is not None:
        timelines = {
            name if isinstance(name, str) else " | ".join(name): run.timeline
            for name, run in compared.runs.items()
        }
        write_perfetto(options.perfetto, timelines)
    written = [options.out, options.perfetto]
    output.present(compared.answer(), options, more=written, notes=left_out)


def _expand(
    trace: "Trace", names: tuple[str, ...], configs: list[RunConfig]
) -> tuple[list[str], list[str]]:
    """Leave out policies that read columns which the trace lacks; put, for the word
    ``systems``, those that it can serve.

    Returns:
        Policies, and notes about what was left out.

    Raises:
        MissingColumnError: no policy is left.
    """
    from moesim.base.errors import MissingColumnError
    from moesim.policies.systems import SYSTEMS
    from moesim.questions.compare import check

    policies: list[str] = []
    left_out: list[str] = []
    unserved: dict[str, MissingColumnError] = {}
    for name in names:
        for policy in SYSTEMS if name == "systems" else [name]:
            try:
                for config in configs:
                    check(config.replaced(policy=policy))
            except MissingColumnError as error:
                unserved[policy] = error
            except ValueError as error:
                # Who asks for all systems wants those that run; whoever names one is
                # told what is wrong with it, before anything runs.
                if name != "systems":
                    policies.append(policy)
                    continue
                left_out.append(f"left out {policy}: {error}")
            else:
                policies.append(policy)

    if unserved and not policies:
        raise next(iter(unserved.values()))
    if unserved:
        columns = dict.fromkeys(error.column for error in unserved.values())
        left_out.append(
            f"left out {', '.join(unserved)}: {trace.path} lacks {', '.join(columns)};"
            " `moesim trace predict` adds synthetic ones"
        )
    return policies, left_out
