"""`moesim train-cache` and `moesim train-tiny`: networks that policies and tests use."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import output, parsers
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson, Batch, Seed, Steps, TraceFile


def train_cache(
    trace: TraceFile,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder for network and report.", show_default=False
        ),
    ],
    held_out: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help=(
                "Judge on this trace. Default: the last quarter of TRACE, never learned"
                " from."
            ),
        ),
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            metavar="distance|masked",
            parser=parsers.one_of("distance", "masked"),
            help="Learn the distance to the next use, or whom Belady evicts.",
        ),
    ] = "distance",
    hidden: Annotated[
        int,
        typer.Option(
            metavar="H", min=1, help="Hidden units: 128 (the paper's table) or 64."
        ),
    ] = 128,
    cache_ratio: Annotated[
        float,
        typer.Option(
            metavar="R",
            min=0,
            max=1,
            help="Cache size for masked labels, and one of the report's.",
        ),
    ] = 0.25,
    epochs: Annotated[
        int, typer.Option(metavar="N", min=1, help="At most so many.")
    ] = 200,
    batch: Batch = 1,
    steps: Steps = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Of the first weights and the order of samples."
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Train FlashMoE's cache policy on one part of a trace and judge it on another.

    The network goes to DIR/flashmoe.safetensors; use it with --cache flashmoe
    --artefacts DIR. The report compares it with LRU, LFU, LFRU, ARC, LeCaR and Belady
    at several cache sizes: DIR/report.md and DIR/report.json.

    \b
    Examples:
      moesim train-cache q.parquet --out learned
      moesim train-cache calibration.parquet --held-out evaluation.parquet --out learned --hidden 64
      moesim replay q.parquet --policy on-demand --cache flashmoe --artefacts learned
    """
    check_places(folder=out)
    from moesim.analysis import learned_cache as learned
    from moesim.analysis.learned_cache_report import report_text
    from moesim.analysis.trace_split import all_passes, split
    from moesim.cli.progress import bar, messages
    from moesim.policies.base import PolicyError
    from moesim.runtime.train.cache_network import train
    from moesim.runtime.train.cache_recipe import Recipe
    from moesim.traces.files import write_text
    from moesim.traces.format.reader import open_trace

    opened = open_trace(trace)
    shape = opened.shape
    judged_on = opened if held_out is None else open_trace(held_out)
    other = judged_on.shape
    if (other.layers, other.experts) != (shape.layers, shape.experts):
        raise PolicyError(
            f"--held-out {held_out}: expected {shape.layers} layers x {shape.experts}"
            f" experts as in {trace}, found {other.layers} x {other.experts}; record it"
            " from the same model"
        )
    # Judging on what was learned from would flatter the network.
    if held_out is None:
        training, judging = split(opened, batch=batch, steps=steps)
    else:
        training = all_passes(opened, batch=batch, steps=steps)
        judging = all_passes(judged_on, batch=batch, steps=steps)

    recipe = Recipe(
        labels="masked" if labels == "masked" else "distance",
        hidden=hidden,
        epochs=epochs,
    )
    # Whom Belady evicts depends on how many experts fit.
    slots = round(cache_ratio * shape.experts)
    with bar("training", epochs) as show:
        trained = train(training, shape, recipe, slots=slots, seed=seed, progress=show)
    facts = trained.facts | {
        # A network says what it was trained on, wherever it is copied to.
        "trace": opened.path.name,
        "trace_digest": opened.digest(),
        "batch": batch,
    }
    with messages("judging on the held-out part"):
        report = learned.report(
            judging, trained.network, facts, learned.cache_sizes(shape, cache_ratio)
        )

    text = report_text(report)
    # The network comes first: a report without its network would promise too much.
    trained.save(out / f"{learned.LEARNED}.safetensors")
    for name, content in (
        ("report.json", json.dumps(report, indent=2) + "\n"),
        ("report.md", text),
    ):
        write_text(out / name, content)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(text)
    output.print_written([out])


def train_tiny(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder for the checkpoint.", show_default=False
        ),
    ],
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time.")] = 12.0,
    seed: Seed = 0,
) -> None:
    """Train the tiny model that ships with the project, from scratch, on the standard
    library's sources.

    \b
    Example:
      moesim train-tiny --out my-tiny --minutes 12
    """
    check_places(folder=out)
    from moesim.cli.progress import bar, quiet_libraries

    quiet_libraries()
    from moesim.runtime.train import tiny

    with bar("training", 60 * minutes) as show:
        facts = tiny.train_tiny(out, minutes, seed, lambda point: show(point.seconds_s))
    print(f"{facts['steps']:,} steps in {facts['seconds_s'] / 60:.1f} minutes")
    print(f"held-out loss: {facts['held_out']['nats_per_byte']:.3f} nats per byte")
    output.print_written([out])
