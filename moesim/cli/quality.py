"""`moesim quality`: what policies that change routing do to a model's answers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import options


def add_commands(app: typer.Typer) -> None:
    """Add `quality`."""
    app.command(
        "quality", short_help="Measure what a policy does to a model's answers."
    )(quality)


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
    cache: options.Cache = None,
    prefetch: options.Prefetch = None,
    routing: options.Routing = None,
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
            exists=True,
            help="Residual vectors for --prefetch residual (see: record).",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            parser=options.one_of("auto", "float32", "bfloat16", "float16"),
            help="float32, bfloat16, float16, or auto.",
        ),
    ] = "auto",
    device: options.Device = "cpu",
    hw: options.Hardware = None,
    cache_ratio: options.CacheRatio = None,
    slots_per_layer: options.SlotsPerLayer = None,
    host_memory: options.HostMemory = None,
    host_cache: options.HostCache = "lru",
    cache_scope: options.CacheScope = None,
    staging: options.Staging = None,
    prefetch_budget: options.PrefetchBudget = None,
    batch: options.Batch = 1,
    seed: options.Seed = 0,
    warm: options.Warm = None,
    artefacts: options.Artefacts = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write figures and a picture there."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Let a model read held-out text as it is and under a policy, and compare what both
    expect next.

    \b
    Examples:
      moesim quality --policy on-demand+lru --routing expert-cache-router --sweep alpha=0,0.1,0.3
      moesim quality --model ~/models/olmoe --text book.txt --policy daop --cache-ratios 0.125,0.25,0.5 --out daop
    """
    options.check_places(folder=out)
    from moesim.analysis import quality as library
    from moesim.analysis.quality_report import quality_text, save_quality
    from moesim.cli import progress
    from moesim.runs.memory import MemoryOptions

    options.check_device(device)
    progress.only_ours()
    memory = MemoryOptions(
        cache_ratio,
        slots_per_layer,
        host_memory_bytes=host_memory,
        scope=cache_scope,
        staging=staging,
        prefetch_budget_bytes=prefetch_budget,
    )
    ratios = () if cache_ratios is None else options.shares(cache_ratios)
    with progress.bar("reading", 1.0) as show:
        found = library.quality(
            model,
            policy,
            cache=cache,
            prefetch=prefetch,
            routing=routing,
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
            hw=hw,
            memory=memory,
            host_cache=host_cache,
            batch=batch,
            seed=seed,
            warm=warm,
            artefacts=artefacts,
            progress=show,
        )
    written = [] if out is None else save_quality(found, out)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    print(quality_text(found))
    for place in written:
        print(f"wrote {place}")
