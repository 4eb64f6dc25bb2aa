"""`moesim train-cache`: train FlashMoE's cache on a trace, and say honestly what it is
worth.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.cli import options


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this file to the command line."""
    app.command("train-cache", short_help="Train a learned cache policy on a trace.")(
        train_cache
    )


def train_cache(
    trace: options.TraceFile,
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
            parser=options.one_of("distance", "masked"),
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
    batch: options.Batch = 1,
    steps: options.Steps = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Of the first weights and the order of samples."
        ),
    ] = 0,
    as_json: options.AsJson = False,
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
    options.check_places(folder=out)
    from moesim.analysis import learned_cache as learned
    from moesim.cli.progress import bar, messages
    from moesim.policies.base import PolicyError
    from moesim.runtime.train.cache_network import train
    from moesim.runtime.train.cache_recipe import Recipe
    from moesim.traces.files import written_beside
    from moesim.traces.format.reader import open_trace

    opened = open_trace(trace)
    shape = opened.shape
    judged_on = opened if held_out is None else open_trace(held_out)
    if (judged_on.shape.layers, judged_on.shape.experts) != (
        shape.layers,
        shape.experts,
    ):
        raise PolicyError(
            f"--held-out {held_out}: expected {shape.layers} layers x {shape.experts}"
            f" experts as in {trace}, found {judged_on.shape.layers} x"
            f" {judged_on.shape.experts}; record it from the same model"
        )
    if held_out is None:
        training, judging = learned.split(opened, batch=batch, steps=steps)
    else:
        training = learned.whole(opened, batch=batch, steps=steps)
        judging = learned.whole(judged_on, batch=batch, steps=steps)
    slots = round(cache_ratio * shape.experts)
    recipe = Recipe(
        labels="masked" if labels == "masked" else "distance",
        hidden=hidden,
        epochs=epochs,
    )
    with bar("training", epochs) as show:
        done = train(training, shape, recipe, slots=slots, seed=seed, progress=show)
    facts = done.facts | {
        "trace": opened.path.name,
        "trace_digest": opened.digest(),
        "batch": batch,
    }
    with messages("judging on the held-out part"):
        found = learned.report(
            judging, done.network, facts, learned.cache_sizes(shape, cache_ratio)
        )
    text = learned.report_text(found)
    done.save(out / f"{learned.LEARNED}.safetensors")
    for name, content in (
        ("report.json", json.dumps(found, indent=2) + "\n"),
        ("report.md", text),
    ):
        with written_beside(out / name) as part:
            part.write_text(content, encoding="utf-8")
    _print(found, text, out, as_json=as_json)


def _print(found: dict[str, Any], text: str, out: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(text)
    print(f"wrote {out}")
