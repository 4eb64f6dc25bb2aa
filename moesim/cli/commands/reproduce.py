"""`moesim reproduce`: published figures beside ours."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moesim.base.options import (
    Options,
    folder_option,
    input_option,
    json_option,
    option,
    seed_option,
)
from moesim.cli.options import from_dataclass
from moesim.cli.output import command_line, present

if TYPE_CHECKING:
    from moesim.evidence.reproduction.routing import Reproduction
    from moesim.reporting.answers import Answer

PAGES = ("reproduction.html", "reproduction.md", "reproduction.json")
MAP = "map"
MAP_PAGES = ("map.html", "map.md", "map.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceOptions(Options):
    """What `moesim reproduce` is asked."""

    name: str | None = option(
        None,
        "An experiment (see: --list), or map: which policy is fastest where.",
        metavar="NAME",
        argument=True,
    )
    list_all: bool = option(
        False,
        "List the experiments and what each needs.",
        flag="--list",
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
        " four minutes on two quiet cores; what was interrupted goes on where it"
        " stopped.",
        flag="--all",
        needs=("out",),
        excludes=("name", "traces", "steps"),
    )
    out: Path | None = folder_option("With --all, or map: folder for the page.")
    machines: str = option(
        "anchored",
        "With --all: machines anchored on published single operations, or datasheets"
        " alone.",
        choices=("anchored", "datasheet"),
        needs=("everything",),
    )
    paper: tuple[str, ...] | None = option(
        None,
        "With --all: only these papers.",
        metavar="NAME",
        needs=("everything",),
    )
    minutes: float | None = option(
        None,
        "With --all: a limit; what does not fit is left out, and the next call goes on.",
        metavar="M",
        minimum=0.0,
        needs=("everything",),
    )
    jobs: int | None = option(
        None,
        "With --all, or map: processes. Default: at most 2.",
        minimum=1,
    )
    as_json: bool = json_option()

    def outputs(self) -> list[Path]:
        """Files that are written into the folder."""
        pages = MAP_PAGES if self.name == MAP else PAGES
        return [self.out / page for page in pages] if self.out else []


@from_dataclass(from_file=False)
def reproduce(options: ReproduceOptions) -> None:
    """Compute published figures on our side, and print both side by side.

    They need not agree: other models, other prompts. The output names the model and
    trace of every column. With --all, one page holds everything.

    \b
    Examples:
      moesim reproduce --list
      moesim reproduce --all --out papers
      moesim reproduce map --out map
      moesim reproduce --all --out papers --minutes 2
      moesim reproduce hybrimoe-hit-rate
      moesim reproduce dali-prefetch-workload --trace q.parquet --steps 0
    """
    from moesim.cli.output import messages
    from moesim.evidence.reproduction import routing as library

    if options.everything:
        _all_records(options)
        return
    if options.name == MAP:
        _map(options)
        return
    # Without a name the user cannot know one yet.
    if options.name is None or options.list_all:
        print(json.dumps(_entries(), indent=2) if options.as_json else _list_text())
        return
    # On the command line 0 stands for all, which the library calls None.
    stated = options.steps
    most_steps = library.DEFAULT_STEPS if stated is None else stated or None
    with messages(options.name) as progress:
        reproduction = library.reproduce(
            options.name,
            options.traces,
            steps=most_steps,
            seed=options.seed,
            progress=progress,
        )
    present(reproduction_answer(reproduction), options)


def _all_records(options: ReproduceOptions) -> None:
    from moesim.cli.output import bar
    from moesim.evidence.reproduction import questions
    from moesim.evidence.reproduction.report import report, reproduced_answer, write
    from moesim.evidence.reproduction.reproduce_all import reproduce_all

    known = questions.papers()
    for paper in options.paper or ():
        if paper not in known:
            raise typer.BadParameter(
                f"expected one of {', '.join(known)}, got {paper!r}",
                param_hint="--paper",
            )
    out = options.out
    assert out is not None
    out.mkdir(parents=True, exist_ok=True)
    line = command_line()
    with bar("reproducing", 1.0) as show:
        reproduced = reproduce_all(
            out,
            papers=options.paper,
            machines=options.machines,
            jobs=options.jobs,
            minutes=options.minutes,
            save=lambda so_far: write(out, so_far, report(so_far), line),
            progress=show,
        )
    page = report(reproduced)
    paths = write(out, reproduced, page, line)
    # A terminal shows the summary; the page has all records.
    answer = reproduced_answer(reproduced, page)
    answer.tables = answer.tables[:1]
    answer.notes = reproduced.facts[-1:] if reproduced.left_out else []
    answer.data = page.counts
    present(answer, options, more=paths)


def _map(options: ReproduceOptions) -> None:
    from moesim.cli.output import bar
    from moesim.evidence.reproduction.field_map import field_map, map_answer, write_map

    if options.out is None:
        raise typer.BadParameter("expected a folder for the map", param_hint="--out")
    options.out.mkdir(parents=True, exist_ok=True)
    with bar("mapping", 1.0) as show:
        field = field_map(options.out, jobs=options.jobs, progress=show)
    paths = write_map(options.out, field, command_line())
    answer = map_answer(field)
    answer.tables = answer.tables[:1]
    present(answer, options, more=paths)


def reproduction_answer(reproduction: "Reproduction") -> "Answer":
    """Published figures beside ours: a row per setting, published columns first."""
    from moesim.reporting.answers import Answer, Listing

    experiment = reproduction.experiment
    models = reproduction.models
    sources = list(dict.fromkeys(source for source, _, _ in experiment.published))
    # One source is named in every head; several name themselves in their columns.
    columns = [
        column if len(sources) > 1 else f"{sources[0]}: {column}"
        for column in reproduction.published
    ]
    heads = [f"ours: {models[trace]}" for trace in reproduction.measured]
    rows = []
    footnotes: dict[str, int] = {}
    for row in reproduction.rows:
        published = [
            _cell(column.get(row)) for column in reproduction.published.values()
        ]
        measured = [
            _measured_cell(figures.get(row), footnotes)
            for figures in reproduction.measured.values()
        ]
        rows.append([row, *published, *measured])

    passes = "all forward passes"
    if reproduction.steps is not None:
        passes = f"at most {reproduction.steps} forward passes"
    origins = ", ".join(f"{model} from {trace}" for trace, model in models.items())
    return Answer(
        question=experiment.summary,
        subject=experiment.name,
        setting=[
            (experiment.name, experiment.summary),
            ("computes", experiment.computes),
            ("ours", f"{origins}; {passes} of each"),
        ],
        tables=[Listing.of([experiment.unit, *columns, *heads], rows)],
        notes=[
            *(f"[{number}] {reason}" for reason, number in footnotes.items()),
            *(f"note: {caveat}" for caveat in experiment.caveats),
        ],
        data=reproduction.to_json(),
    )


def _measured_cell(figure: float | str | None, footnotes: dict[str, int]) -> str:
    """A figure, or the number of the footnote that says what the trace lacks."""
    if isinstance(figure, str):
        return f"[{footnotes.setdefault(figure, len(footnotes) + 1)}]"
    return _cell(figure)


def _cell(figure: float | str | None) -> str:
    if figure is None:
        return "-"
    return figure if isinstance(figure, str) else f"{figure:.4g}"


def _entries() -> list[dict[str, str]]:
    from moesim.evidence.reproduction.routing import EXPERIMENTS

    return [
        {"name": e.name, "summary": e.summary, "needs": e.needs, "unit": e.unit}
        for e in EXPERIMENTS.values()
    ]


def _list_text() -> str:
    from moesim.reporting.tables import facts_lines

    facts = [(e["name"], f"{e['summary']}; needs {e['needs']}") for e in _entries()]
    return "\n".join(facts_lines(facts))
