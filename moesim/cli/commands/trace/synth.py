"""`moesim trace synth`: synthetic traces."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.cli import output
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson, DrawSeed


def synth(
    target: Annotated[
        Path,
        typer.Argument(metavar="DST", help="The trace to write.", show_default=False),
    ],
    tokens: Annotated[
        float,
        typer.Option(
            metavar="N",
            min=1,
            max=1e12,
            help="Tokens in all, such as 1e6.",
            show_default=False,
        ),
    ],
    like: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE|FILE|NAME",
            help=(
                "A trace to resemble, saved statistics of one, or those that ship:"
                " deepseek-v2-lite, gpt-oss-20b, mixtral-8x7b, olmoe-1b-7b,"
                " qwen3-30b-a3b."
            ),
        ),
    ] = None,
    save_stats: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --like: save the statistics; --like takes them.",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME|WORDS", help="A model instead (see: list models)."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Weight format. Default: bf16, or with --like that of the trace.",
        ),
    ] = None,
    skew: Annotated[
        float | None,
        typer.Option(min=0, max=5, help="With --shape: Zipf exponent of popularity."),
    ] = None,
    topic: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="With --shape: share of popularity that is a sequence's own.",
        ),
    ] = None,
    reuse: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.99,
            help="With --shape: overlap of adjacent tokens.",
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=10,
            help="With --shape: exponent by which earlier use is forgotten.",
        ),
    ] = None,
    dependence: Annotated[
        float | None,
        typer.Option(
            min=0, max=5, help="With --shape: what ties layers, by kinds of tokens."
        ),
    ] = None,
    drift: Annotated[
        float | None,
        typer.Option(min=0, max=5, help="With --shape: wandering popularity."),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            min=0, help="Prompt tokens per sequence. Default: 0, or as in --like."
        ),
    ] = None,
    generated: Annotated[
        int | None,
        typer.Option(min=0, help="Generated tokens. Default: 512, or as in --like."),
    ] = None,
    seed: DrawSeed = 0,
    as_json: AsJson = False,
) -> None:
    """Draw a trace with the statistics of a real one (--like), or with stated ones
    (--shape), and compare its curves with those of real routing: drawn (real).

    \b
    Examples:
      moesim trace synth long.parquet --like real.parquet --tokens 1e6 --save-stats real.npz
      moesim trace synth mixtral.parquet --like mixtral-8x7b --weights q4_k_m --tokens 1e4
      moesim trace synth new.parquet --shape qwen3-235b-a22b --tokens 1e4 --skew 1 --reuse 0.4
    """
    possible = {
        "skew": skew,
        "topic": topic,
        "reuse": reuse,
        "memory": memory,
        "dependence": dependence,
        "drift": drift,
        "prompt": prompt,
        "generated": generated,
    }
    # Zero is a statement too, so only what was left out is dropped.
    stated: dict[str, Any] = {
        name: value for name, value in possible.items() if value is not None
    }
    check_places(files=[target, save_stats], inputs=[like])
    from moesim.cli.output import bar
    from moesim.traces.synthetic.synth import synth as draw

    compared: list[Any] = []
    with bar("drawing") as show:
        trace = draw(
            target,
            tokens=tokens,
            like=like,
            save_stats=save_stats,
            shape=shape,
            weights=weights,
            seed=seed,
            progress=show,
            comparison=compared.append,
            **stated,
        )
    likeness = compared[0]
    if as_json:
        facts = {
            "trace": str(target),
            "rows": trace.rows,
            "tokens": int(tokens),
            "model": trace.shape.name,
            "synthetic": True,
            "seed": seed,
            "likeness": None if likeness is None else asdict(likeness),
        }
        print(json.dumps(facts, indent=2))
        return
    if likeness is None:
        print(
            f"not compared: no real routing of {trace.shape.name} is known here; drawn"
            " are habits of other models"
        )
    else:
        print("\n".join(likeness.lines()))
    print(
        f"wrote {target}: {trace.rows:,} rows, {int(tokens):,} tokens; synthetic (marked"
        " in its header)"
    )
    if save_stats is not None:
        output.print_written([save_stats])
