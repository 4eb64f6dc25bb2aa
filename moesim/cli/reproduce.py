"""`moesim reproduce`: published figures beside ours."""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli import options

if TYPE_CHECKING:
    from moesim.reproduction.published import Reproduction


def add_commands(app: typer.Typer) -> None:
    """Add `reproduce`."""
    app.command("reproduce", short_help="Published figures beside ours.")(reproduce)


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
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Compute published figures that need only routing on real traces, and print both
    side by side.

    They need not agree: other models, other prompts. The output names the model and
    trace of every column.

    \b
    Examples:
      moesim reproduce --list
      moesim reproduce hybrimoe-hit-rate
      moesim reproduce dali-prefetch-workload --trace q.parquet --steps 0
    """
    from moesim.cli.progress import messages
    from moesim.reproduction import published as library

    if name is None or list_all:
        print(json.dumps(_entries(), indent=2) if as_json else _list_text())
        return
    with messages(name) as progress:
        found = library.reproduce(
            name,
            trace or None,
            steps=library.DEFAULT_STEPS if steps is None else steps or None,
            seed=seed,
            progress=progress,
        )
    print(
        json.dumps(found.to_json(), indent=2) if as_json else reproduction_text(found)
    )


def reproduction_text(found: "Reproduction") -> str:
    """Lay out a reproduction for a terminal: a row per setting, published columns
    before ours, then notes.
    """
    from moesim.reporting.tables import aligned, screen

    experiment = found.experiment
    sources = list(dict.fromkeys(source for source, _, _ in experiment.published))
    width = screen().width
    head = [
        _wrapped(f"{experiment.name}: {experiment.summary}", width),
        _wrapped(experiment.computes, width),
    ]
    columns = [
        column if len(sources) > 1 else f"{sources[0]}: {column}"
        for column in found.published
    ]
    notes: dict[str, int] = {}
    rows = [
        [
            experiment.unit,
            *columns,
            *(f"ours: {found.models[t]}" for t in found.measured),
        ]
    ]
    for row in found.rows:
        theirs = [_cell(column.get(row)) for column in found.published.values()]
        ours = [_ours(figures.get(row), notes) for figures in found.measured.values()]
        rows.append([row, *theirs, *ours])
    passes = (
        "all forward passes"
        if found.steps is None
        else f"at most {found.steps} forward passes"
    )
    small = [
        (
            "ours:"
            f" {', '.join(f'{model} from {trace}' for trace, model in found.models.items())};"
            f" {passes} of each"
        )
    ]
    small += [f"[{number}] {reason}" for reason, number in notes.items()]
    small += [f"note: {caveat}" for caveat in experiment.caveats]
    return "\n\n".join(
        [
            "\n".join(head),
            "\n".join(aligned(rows)),
            "\n".join(_wrapped(line, width) for line in small),
        ]
    )


def _ours(figure: float | str | None, notes: dict[str, int]) -> str:
    """A figure, or the number of the note that says what the trace lacks."""
    if isinstance(figure, str):
        return f"[{notes.setdefault(figure, len(notes) + 1)}]"
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
