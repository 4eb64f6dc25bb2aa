"""`moesim reproduce`: published figures beside ours."""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.checks import check_places
from moesim.cli.options import AsJson, Seed
from moesim.cli.output import print_written

if TYPE_CHECKING:
    from moesim.reproduction.published import Reproduction

WIDTH = 118


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="An experiment (see: --list).")
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the experiments and what each needs.")
    ] = False,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help=(
                "A trace; may be repeated. Default: the shipped one, and"
                " ../shared/traces of a checkout."
            ),
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Look at the first N forward passes; 0 for all. Default: 300.",
        ),
    ] = None,
    seed: Seed = 0,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help=(
                "All published records beside ours, speeds included, on drawn traces;"
                " with --out. About four minutes on two cores."
            ),
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --all: folder for the page."),
    ] = None,
    machines: Annotated[
        str,
        typer.Option(
            metavar="anchored|datasheet",
            help=(
                "With --all: machines anchored on published single operations, or"
                " datasheets alone."
            ),
        ),
    ] = "anchored",
    paper: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="With --all: only this paper; may be repeated."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --all: processes. Default: at most 2."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute published figures on our side, and print both side by side.

    They need not agree: other models, other prompts. The output names the model and
    trace of every column. With --all, one page holds everything.

    \b
    Examples:
      moesim reproduce --list
      moesim reproduce --all --out papers
      moesim reproduce hybrimoe-hit-rate
      moesim reproduce dali-prefetch-workload --trace q.parquet --steps 0
    """
    from moesim.cli.progress import messages
    from moesim.reproduction import published as library

    if everything or out is not None:
        _all_records(out, machines=machines, papers=paper, jobs=jobs, as_json=as_json)
        return
    # Without a name the user cannot know one yet.
    if name is None or list_all:
        print(json.dumps(_entries(), indent=2) if as_json else _list_text())
        return
    # On the command line 0 stands for all, which the library calls None.
    most_steps = library.DEFAULT_STEPS if steps is None else steps or None
    with messages(name) as progress:
        reproduction = library.reproduce(
            name,
            # Typer makes an empty list of an option that was not given.
            trace or None,
            steps=most_steps,
            seed=seed,
            progress=progress,
        )
    if as_json:
        print(json.dumps(reproduction.to_json(), indent=2))
        return
    print(reproduction_text(reproduction))


def _all_records(
    out: Path | None,
    *,
    machines: str,
    papers: list[str] | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    if out is None:
        raise typer.BadParameter(
            "expected --out DIR beside it: everything is one page", param_hint="--all"
        )
    if machines not in ("anchored", "datasheet"):
        raise typer.BadParameter(
            f"expected anchored or datasheet, got {machines!r}", param_hint="--machines"
        )
    check_places(folder=out)
    from moesim.cli.progress import bar
    from moesim.reproduction.everything import reproduce_everything
    from moesim.reproduction.papers.reproduce_all import PAPERS

    for paper in papers or ():
        if paper not in PAPERS:
            raise typer.BadParameter(
                f"expected one of {', '.join(PAPERS)}, got {paper!r}",
                param_hint="--paper",
            )
    out.mkdir(parents=True, exist_ok=True)
    with bar("reproducing", 1.0) as show:
        page = reproduce_everything(
            out, papers=papers or None, machines=machines, jobs=jobs, progress=show
        )
    if as_json:
        print(json.dumps(page.counts, indent=2))
        return
    print(_summary_text(page.counts))
    names = ("reproduction.html", "reproduction.md", "reproduction.json")
    print_written([out / name for name in names])


def _summary_text(counts: dict[str, dict[str, Any]]) -> str:
    from moesim.reporting.tables import aligned

    heads = [
        "paper",
        "records",
        "compared",
        "anchored",
        "directions",
        "orders",
        "ratio",
    ]
    rows = [heads]
    for paper, figures in counts.items():
        ratio = figures["median_ratio"]
        rows.append(
            [
                paper,
                str(figures["records"]),
                str(figures["simulated"] + figures["computed"]),
                str(figures["anchored"]),
                f"{figures['directions_held']} of {figures['directions']}",
                f"{figures['orders_held']} of {figures['orders']}",
                "-" if ratio is None else f"{ratio:.2f}",
            ]
        )
    legend = (
        "directions, orders: of those published, how many hold here; ratio: median of"
        " ours over published"
    )
    return "\n".join([*aligned(rows), "", legend])


def reproduction_text(reproduction: "Reproduction") -> str:
    """Lay out a reproduction for a terminal: a row per setting, published columns
    before measured ones, then notes.
    """
    from moesim.reporting.tables import aligned, screen

    experiment = reproduction.experiment
    models = reproduction.models
    sources = list(dict.fromkeys(source for source, _, _ in experiment.published))
    width = screen().width
    head = [
        _wrapped(f"{experiment.name}: {experiment.summary}", width),
        _wrapped(experiment.computes, width),
    ]

    # One source is named in every head; several name themselves in their columns.
    columns = [
        column if len(sources) > 1 else f"{sources[0]}: {column}"
        for column in reproduction.published
    ]
    heads = [f"ours: {models[trace]}" for trace in reproduction.measured]
    table = [[experiment.unit, *columns, *heads]]
    footnotes: dict[str, int] = {}
    for row in reproduction.rows:
        published = [
            _cell(column.get(row)) for column in reproduction.published.values()
        ]
        measured = [
            _measured_cell(figures.get(row), footnotes)
            for figures in reproduction.measured.values()
        ]
        table.append([row, *published, *measured])

    passes = "all forward passes"
    if reproduction.steps is not None:
        passes = f"at most {reproduction.steps} forward passes"
    origins = ", ".join(f"{model} from {trace}" for trace, model in models.items())
    notes = [
        f"ours: {origins}; {passes} of each",
        *(f"[{number}] {reason}" for reason, number in footnotes.items()),
        *(f"note: {caveat}" for caveat in experiment.caveats),
    ]
    blocks = [head, aligned(table), [_wrapped(note, width) for note in notes]]
    return "\n\n".join("\n".join(block) for block in blocks)


def _measured_cell(figure: float | str | None, footnotes: dict[str, int]) -> str:
    """A figure, or the number of the footnote that says what the trace lacks."""
    if isinstance(figure, str):
        return f"[{footnotes.setdefault(figure, len(footnotes) + 1)}]"
    return _cell(figure)


def _cell(figure: float | str | None) -> str:
    if figure is None:
        return "-"
    return figure if isinstance(figure, str) else f"{figure:.4g}"


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ")


def _entries() -> list[dict[str, str]]:
    from moesim.reproduction.experiments import EXPERIMENTS

    return [
        {"name": e.name, "summary": e.summary, "needs": e.needs, "unit": e.unit}
        for e in EXPERIMENTS.values()
    ]


def _list_text() -> str:
    from moesim.reporting.tables import facts_lines

    return "\n".join(
        facts_lines(
            (entry["name"], f"{entry['summary']}; needs {entry['needs']}")
            for entry in _entries()
        )
    )
