"""`moesim reproduce`: published figures beside ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moesim.base.options import (
    JsonOptions,
    folder_option,
    input_option,
    option,
    seed_option,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass

if TYPE_CHECKING:
    from moesim.reporting.answers import Answer

PAGES = ("reproduction.html", "reproduction.md", "reproduction.json")
MAP = "map"
MAP_PAGES = ("map.html", "map.md", "map.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceOptions(JsonOptions):
    """What `moesim reproduce` is asked."""

    name: str | None = option(
        None,
        "An experiment, or map: which policy is fastest where. Default: all are listed,"
        " with what each needs.",
        metavar="NAME",
        argument=True,
    )
    traces: tuple[Path, ...] | None = input_option(
        "Traces, with commas. Default: the shipped one, and ../shared/traces of a"
        " checkout.",
        flag="--trace",
    )
    steps: int | None = option(
        None,
        "Look at the first N forward passes; 0 for all. Default: 300.",
        minimum=0,
    )
    seed: int = seed_option()
    everything: bool = option(
        False,
        "All published records beside ours, speeds included, on drawn traces. About"
        " three minutes on two quiet cores; what was interrupted goes on where it"
        " stopped.",
        flag="--all",
        needs=("out",),
        excludes=("name", "traces", "steps"),
    )
    out: Path | None = folder_option(
        "With --all, or map: folder for the page.", *PAGES, *MAP_PAGES
    )
    paper: tuple[str, ...] | None = option(
        None,
        "With --all: only these papers.",
        metavar="NAME",
        needs=("everything",),
    )
    jobs: int | None = option(
        None,
        "With --all, or map: processes. Default: at most 2.",
        minimum=1,
    )


@from_dataclass(from_file=False)
def reproduce(options: ReproduceOptions) -> None:
    """Compute published figures on our side, and print both side by side.

    They need not agree: other models, other prompts. The output names the model and
    trace of every column. With --all, one page holds everything.

    \b
    Examples:
      moesim reproduce
      moesim reproduce --all --out papers
      moesim reproduce map --out map
      moesim reproduce --all --out papers --paper DAOP
      moesim reproduce hybrimoe-hit-rate
      moesim reproduce dali-prefetch-workload --trace q.parquet --steps 0
    """
    from moesim.evidence.reproduction import routing as library
    from moesim.reporting.tables import facts_lines

    if options.everything or options.name == MAP:
        if options.out is None:
            raise typer.BadParameter(
                "expected a folder for the map", param_hint="--out"
            )
        answer, paths = (_map if options.name == MAP else _all)(options.out, options)
        # A terminal shows the first table; the page has all.
        answer.tables = answer.tables[:1]
        output.present(answer, options, more=paths)
        return
    # Without a name the user cannot know one yet.
    if options.name is None:
        entries = _entries()
        facts = [(e["name"], f"{e['summary']}; needs {e['needs']}") for e in entries]
        output.tell(options, entries, facts_lines(facts))
        return
    # On the command line 0 stands for all, which the library calls None.
    stated = options.steps
    with output.bar(options.name):
        reproduction = library.reproduce(
            options.name,
            options.traces,
            steps=library.DEFAULT_STEPS if stated is None else stated or None,
            seed=options.seed,
        )
    output.present(reproduction.answer(), options)


def _all(out: Path, options: ReproduceOptions) -> "tuple[Answer, list[Path]]":
    from moesim.evidence.reproduction.questions import papers
    from moesim.evidence.reproduction.report import reproduced_answer, write
    from moesim.evidence.reproduction.reproduce_all import reproduce_all

    for paper in options.paper or ():
        if paper not in papers():
            raise typer.BadParameter(
                f"expected one of {', '.join(papers())}, got {paper!r}",
                param_hint="--paper",
            )
    out.mkdir(parents=True, exist_ok=True)
    with output.bar("reproducing", 1.0) as show:
        reproduced = reproduce_all(
            out,
            papers=options.paper,
            jobs=options.jobs,
            progress=show,
        )
    answer = reproduced_answer(reproduced)
    answer.command = output.command_line()
    paths = write(out, answer)
    answer.notes = []
    answer.data = answer.data["summary"]
    return answer, paths


def _map(out: Path, options: ReproduceOptions) -> "tuple[Answer, list[Path]]":
    from moesim.evidence.reproduction.field_map import field_map, map_answer, write_map

    out.mkdir(parents=True, exist_ok=True)
    with output.bar("mapping", 1.0) as show:
        mapped = field_map(out, jobs=options.jobs, progress=show)
    answer = map_answer(mapped)
    answer.command = output.command_line()
    return answer, write_map(out, mapped, answer)


def _entries() -> list[dict[str, str]]:
    from moesim.evidence.reproduction.routing import EXPERIMENTS

    return [
        {"name": e.name, "summary": e.summary, "needs": e.needs, "unit": e.unit}
        for e in EXPERIMENTS.values()
    ]
