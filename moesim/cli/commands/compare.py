"""`moesim compare`: several policies, machines and memories on one trace."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli import output
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson, Perfetto, complete_policies
from moesim.cli.parsers import split_policies
from moesim.cli.run_options import with_config
from moesim.runs.config import RunConfig

if TYPE_CHECKING:
    from moesim.sweeps.comparison import Comparison
    from moesim.traces.format.reader import Trace


@with_config(without=["policy", "noise_seed"], before={"policies": ["trace"]})
def compare(
    policies: Annotated[
        str,
        typer.Option(
            metavar="A,B,C",
            help=(
                "Systems or assignment policies; greedy+lru+residual adds cache and"
                " prefetch. The word systems stands"
                " for every published system that the trace can serve."
            ),
            autocompletion=complete_policies,
        ),
        # From computing everything on the CPU to fetching everything, and one that weighs
        # both for every expert.
    ] = "all-cpu,llama.cpp,ktransformers,fiddler,on-demand,greedy",
    *,
    configs: list[RunConfig],
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
    perfetto: Perfetto = None,
    as_json: AsJson = False,
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
    from moesim.runs.setup import opened
    from moesim.sweeps.comparison import compare_cells

    # A folder gets everything; single results can still go elsewhere.
    if out is not None:
        png = png or out / "compare.png"
        html = html or out / "compare.html"
        table = table or out / "compare.csv"
    config = configs[0]
    check_places(
        folder=out,
        files=[png, html, table, perfetto],
        inputs=[config.trace, config.warm],
    )

    config, trace = opened(config)
    names, left_out = _expand(trace, split_policies(policies, "--policies"), configs)
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
            out=out,
            jobs=jobs,
            # Pages of one cell draw timelines; those of many cells would fill memory.
            keep=is_single or perfetto is not None,
            progress=show,
        )

    _write(compared, is_single=is_single, png=png, html=html, table=table)
    if perfetto is not None:
        _write_perfetto(compared, perfetto, is_single=is_single)
    # Of a ranking the bound says how far the fastest could still go.
    runs = compared.by_policy()
    best = min(runs, key=lambda name: runs[name].metrics["makespan_s"])
    seconds = runs[best].metrics["makespan_s"]
    if as_json:
        answer = compared.to_json()
        if is_single:
            answer |= output.bound_json(config.replaced(policy=best), seconds)
        print(json.dumps(answer, indent=2))
        return
    _print(compared, is_single=is_single)
    if is_single:
        output.print_bound(config.replaced(policy=best), seconds, f"{best} is ")
    output.print_written([out, png, html, table, perfetto])
    warnings = [warning for run in compared.runs.values() for warning in run.warnings]
    # Runs share most of their warnings; each is worth one line.
    output.print_notes([*left_out, *dict.fromkeys(warnings)])


def _expand(
    trace: "Trace", names: list[str], configs: list[RunConfig]
) -> tuple[list[str], list[str]]:
    """Leave out policies that read columns which the trace lacks; put, for the word
    ``systems``, those that it can serve.

    Returns:
        Policies, and notes about what was left out.

    Raises:
        MissingColumnError: no policy is left.
    """
    from moesim.policies.systems import SYSTEMS
    from moesim.sweeps.comparison import check_each
    from moesim.traces.errors import MissingColumnError

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


def _write(
    compared: "Comparison",
    *,
    is_single: bool,
    png: Path | None,
    html: Path | None,
    table: Path | None,
) -> None:
    from moesim.reporting import text as report
    from moesim.reporting.cells_figure import cells_figure
    from moesim.reporting.cells_page import write_cells
    from moesim.reporting.comparison_page import write_comparison
    from moesim.reporting.figures import comparison_figure, save

    comparison = (compared.table, compared.by_policy())
    if png is not None:
        figure = comparison_figure(*comparison) if is_single else cells_figure(compared)
        save(figure, png)
    if html is not None and is_single:
        write_comparison(*comparison, html, output.command_line())
    elif html is not None:
        write_cells(compared, html, output.command_line())
    if table is not None:
        report.save_table(compared.table, table)


def _write_perfetto(compared: "Comparison", place: Path, *, is_single: bool) -> None:
    from moesim.traces.timeline.perfetto import write_perfetto

    timelines = {
        policy if is_single else f"{machine} | {memory} | {policy}": run.timeline
        for (machine, memory, policy), run in compared.runs.items()
    }
    write_perfetto(place, timelines)


def _print(compared: "Comparison", *, is_single: bool) -> None:
    from moesim.reporting import text as report
    from moesim.reporting.cells_text import cells_text

    if is_single:
        print(report.comparison_text(compared.table, compared.by_policy()))
    else:
        print(cells_text(compared))
