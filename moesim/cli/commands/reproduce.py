"""`moesim reproduce`: published figures beside ours."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import typer

from moesim.base.options import (
    JsonOptions,
    folder_option,
    option,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass

PAGES = ("reproduction.html", "reproduction.md", "reproduction.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceOptions(JsonOptions):
    """What `moesim reproduce` is asked."""

    everything: bool = option(
        False,
        "All published records beside ours, on drawn traces. About three minutes on two"
        " quiet cores; what was interrupted goes on where it stopped.",
        flag="--all",
        needs=("out",),
    )
    out: Path | None = folder_option("With --all: folder for the page.", *PAGES)
    paper: tuple[str, ...] | None = option(
        None,
        "With --all: only these papers.",
        metavar="NAME",
        needs=("everything",),
    )
    jobs: int | None = option(
        None,
        "With --all: processes. Default: at most 2.",
        minimum=1,
        needs=("everything",),
    )


@from_dataclass(from_file=False)
def reproduce(options: ReproduceOptions) -> None:
    """Compute published figures on our side, and print both side by side.

    They need not agree: other prompts, drawn routing. The page names the model, trace
    and machine of every figure. Without options: how many records each paper has.

    \b
    Examples:
      moesim reproduce
      moesim reproduce --all --out papers
      moesim reproduce --all --out papers --paper DAOP
    """
    from moesim.evidence.reproduction.questions import papers, questions
    from moesim.evidence.reproduction.report import reproduced_answer, write
    from moesim.evidence.reproduction.reproduce_all import reproduce_all
    from moesim.reporting.tables import facts_lines

    if options.out is None:
        counts = Counter(question.record.source for question in questions())
        facts = [(paper, f"{count} records") for paper, count in counts.items()]
        output.tell(options, counts, facts_lines(facts))
        return
    for paper in options.paper or ():
        if paper not in papers():
            raise typer.BadParameter(
                f"expected one of {', '.join(papers())}, got {paper!r}",
                param_hint="--paper",
            )
    options.out.mkdir(parents=True, exist_ok=True)
    with output.bar("reproducing", 1.0) as show:
        reproduced = reproduce_all(
            options.out,
            papers=options.paper,
            jobs=options.jobs,
            progress=show,
        )
    answer = reproduced_answer(reproduced)
    answer.command = output.command_line()
    paths = write(options.out, answer)
    # A terminal shows the first table; the page has all.
    answer.tables = answer.tables[:1]
    answer.notes = []
    answer.data = answer.data["summary"]
    output.present(answer, options, more=paths)
