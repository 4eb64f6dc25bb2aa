"""`moesim quality`: what policies that change routing do to a model's answers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import output, parsers
from moesim.cli.checks import check_device, check_places
from moesim.cli.options import AsJson, Device, from_dataclass
from moesim.runs.config import RunConfig


# A model that reads text has no trace, its lengths are those of the text, and only one
# GPU takes part.
@from_dataclass(
    without=[
        "trace",
        "policy",
        "gpu_memory_bytes",
        "gpu_split",
        "steps",
        "noise_seed",
        "engine",
        "arrivals",
        "slo",
    ],
    from_file=False,
)
def quality(
    model: Annotated[
        str,
        typer.Option(
            metavar="tiny|DIR",
            help="The shipped model or a Hugging Face folder, read from memory.",
        ),
    ] = "tiny",
    policy: Annotated[
        str,
        typer.Option(
            help=(
                "A system, or assignment+cache+prefetch, such as on-demand+lru (see:"
                " list)."
            )
        ),
    ] = "smoe",
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "UTF-8 text. Default for tiny: passages of the corpus's evaluation"
                " part."
            ),
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=V,V,…",
            help="A parameter of the routing policy and its values: alpha=0,0.1,0.3.",
        ),
    ] = None,
    cache_ratios: Annotated[
        str | None,
        typer.Option(
            metavar="R,R,…",
            help="Shares of all experts in the GPU cache, one setting each.",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Tokens to score, in whole passages."),
    ] = 1024,
    prompt_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a passage read before.")
    ] = 64,
    scored_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a passage scored.")
    ] = 64,
    own_input: Annotated[
        bool,
        typer.Option(
            "--own-input",
            help=(
                "Experts started one layer ahead get their own layer's input after all."
            ),
        ),
    ] = False,
    residual: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            # A wrong name should not cost a minute of loading.
            exists=True,
            help="Residual vectors for --prefetch residual (see: record).",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            parser=parsers.one_of("auto", "float32", "bfloat16", "float16"),
            help="float32, bfloat16, float16, or auto.",
        ),
    ] = "auto",
    device: Device = "cpu",
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="M",
            min=0.0,
            help="A limit on reading: passages that do not fit are left out.",
        ),
    ] = None,
    *,
    config: RunConfig,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write figures and a picture there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let a model read held-out text as it is and under a policy, and compare what both
    expect next.

    \b
    Examples:
      moesim quality --policy on-demand+lru --routing expert-cache-router --sweep alpha=0,0.1,0.3
      moesim quality --model ~/models/olmoe --text book.txt --policy daop --cache-ratios 0.125,0.25,0.5 --out daop
    """
    check_places(folder=out)
    from moesim.cli import output as progress
    from moesim.questions import quality as library
    from moesim.questions.quality import quality_text, save_quality

    # Loading a model takes minutes, so all checks come before it.
    check_device(device)
    progress.quiet_libraries()
    # Without ratios there is one setting, of the size that the options state.
    ratios: tuple[float, ...] = ()
    if cache_ratios is not None:
        ratios = parsers.shares(cache_ratios, "--cache-ratios")
    with progress.bar("reading", 1.0) as show:
        result = library.quality(
            model,
            policy,
            config=config,
            text=text,
            sweep=sweep,
            cache_ratios=ratios,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            scored_tokens=scored_tokens,
            own_input=own_input,
            residual=residual,
            dtype=dtype,
            device=device,
            minutes=minutes,
            progress=show,
        )
    written = [] if out is None else save_quality(result, out)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    print(quality_text(result))
    output.print_written(written)
