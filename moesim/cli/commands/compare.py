"""`moesim compare`: several policies, machines and memories on one trace."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.base.options import (
    PAGES,
    PICTURES,
    TABLES,
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

if TYPE_CHECKING:
    from moesim.questions.compare import Comparison
    from moesim.traces.format.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(Options):
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
    jobs: int | None = option(
        None,
        "Replays at the same time. Default: as many as pay, one per core at most.",
        minimum=1,
    )
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
    as_json: bool = json_option()

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


@from_dataclass(without=["noise_seed", "arrivals", "slo"])
def compare(configs: list[RunConfig], options: CompareOptions) -> None:
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
    from moesim.questions.compare import compare_cells
    from moesim.runs.bound import bound_of
    from moesim.runs.setup import opened

    options = options.completed()
    config = configs[0]
    config, trace = opened(config)
    names, left_out = _expand(trace, options.policy, configs)
    # Options of one name were multiplied out; the comparison wants its two axes.
    machines = list(dict.fromkeys(each.hw for each in configs))
    memories = list(dict.fromkeys(each.memory for each in configs))
    is_single = len(configs) == 1
    with bar("replaying", 1.0) as show:
        compared = compare_cells(
            config,
            names,
            # A single one is in the configuration, perhaps with its digest.
            hw=machines if len(machines) > 1 else None,
            memory=memories,
            out=options.out,
            jobs=options.jobs,
            # Pages of one cell draw timelines; those of many cells would fill memory.
            keep=is_single or options.perfetto is not None,
            progress=show,
        )

    _write(compared, options, is_single=is_single)
    # Of a ranking the bound says how far the fastest could still go; one that sees the
    # future is a bound itself.
    best = compared.fastest().to_dict("records") if is_single else []
    if options.as_json:
        answer = compared.to_json()
        for row in best:
            fastest = config.replaced(policy=row["policy"])
            answer |= output.bound_json(bound_of(fastest), row["makespan_s"])
        print(json.dumps(answer, indent=2))
        return
    _print(compared, is_single=is_single)
    for row in best:
        fastest = config.replaced(policy=row["policy"])
        bound = bound_of(fastest)
        output.print_bound(bound, row["makespan_s"], f"{row['policy']} is ")
    written = (options.png, options.html, options.table, options.perfetto)
    output.print_written([options.out, *written])
    warnings = [warning for run in compared.runs.values() for warning in run.warnings]
    # Runs share most of their warnings; each is worth one line.
    output.print_notes([*left_out, *dict.fromkeys(warnings)])


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
    from moesim.questions.compare import check_each

    policies: list[str] = []
    left_out: list[str] = []
    unserved: dict[str, MissingColumnError] = {}
    for name in names:
        for policy in SYSTEMS if name == "systems" else [name]:
            try:
                for config in configs:
                    check_each(config, trace, [policy])
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


def _write(compared: "Comparison", options: CompareOptions, *, is_single: bool) -> None:
    from moesim.questions.compare_page import (
        cells_figure,
        comparison_figure,
        write_cells,
        write_comparison,
    )
    from moesim.reporting.tables import save_table
    from moesim.traces.timeline.perfetto import write_perfetto

    comparison = (compared.table, compared.by_policy())
    if options.png is not None:
        figure = comparison_figure(*comparison) if is_single else cells_figure(compared)
        figure.save(options.png)
    if options.html is not None and is_single:
        write_comparison(*comparison, options.html, output.command_line())
    elif options.html is not None:
        write_cells(compared, options.html, output.command_line())
    if options.table is not None:
        save_table(compared.table, options.table)
    if options.perfetto is not None:
        timelines = {
            policy if is_single else f"{machine} | {memory} | {policy}": run.timeline
            for (machine, memory, policy), run in compared.runs.items()
        }
        write_perfetto(options.perfetto, timelines)


def _print(compared: "Comparison", *, is_single: bool) -> None:
    from moesim.questions.compare_text import cells_text, comparison_text

    if is_single:
        print(comparison_text(compared.table, compared.by_policy()))
    else:
        print(cells_text(compared))
