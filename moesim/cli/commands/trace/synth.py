"""`moesim trace synth`: synthetic traces."""

from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.cli.checks import check_places
from moesim.cli.options import Seed


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
        Path | None, typer.Option(metavar="TRACE", help="A real trace to resemble.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME|WORDS", help="A model instead (see: list models)."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="With --shape: weight format. Default: bf16."
        ),
    ] = None,
    skew: Annotated[
        float | None,
        typer.Option(min=0, max=5, help="With --shape: Zipf exponent. Default: 0.8."),
    ] = None,
    reuse: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.99,
            help="With --shape: overlap of adjacent tokens. Default: 0.3.",
        ),
    ] = None,
    dependence: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="With --shape: of adjacent layers. Default: 0."
        ),
    ] = None,
    drift: Annotated[
        float | None,
        typer.Option(
            min=0, max=5, help="With --shape: wandering popularity. Default: 0."
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --shape: prompt tokens per sequence. Default: 0."
        ),
    ] = None,
    generated: Annotated[
        int | None,
        typer.Option(min=0, help="With --shape: generated tokens. Default: 512."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Draw a trace with the statistics of a real one (--like), or with stated ones
    (--shape).

    \b
    Examples:
      moesim trace synth long.parquet --like real.parquet --tokens 1e6
      moesim trace synth new.parquet --shape qwen3-235b-a22b --tokens 1e4 --skew 1 --reuse 0.4
    """
    possible = {
        "skew": skew,
        "reuse": reuse,
        "dependence": dependence,
        "drift": drift,
        "prompt": prompt,
        "generated": generated,
    }
    # Zero is a statement too, so only what was left out is dropped.
    stated: dict[str, Any] = {
        name: value for name, value in possible.items() if value is not None
    }
    # Statistics come from one source only.
    if (like is None) == (shape is None):
        raise typer.BadParameter("expected either --like TRACE or --shape MODEL")
    doubled = [*stated, *(["weights"] if weights else [])]
    if like is not None and doubled:
        raise typer.BadParameter(
            f"--{doubled[0]} states what --like measures; drop one of them"
        )
    check_places(files=[target], inputs=[like])
    from moesim.cli.progress import bar
    from moesim.traces.format.reader import open_trace
    from moesim.traces.models import model_shape
    from moesim.traces.synthetic import generate as synthetic

    if like is not None:
        # It reads the whole trace; stated statistics need none.
        from moesim.traces.synthetic.fit import fit

        model = fit(open_trace(like))
    else:
        described = model_shape(str(shape), weights or "bf16")
        model = synthetic.stated(described, seed=seed, **stated)
    # Traces may be larger than memory, so they are written while they are drawn.
    with bar("drawing") as show:
        rows = synthetic.synthesise(
            model, target, tokens=int(tokens), seed=seed, progress=show
        )
    print(
        f"wrote {target}: {rows:,} rows, {int(tokens):,} tokens; synthetic, and it"
        " says so"
    )
