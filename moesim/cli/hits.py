"""`moesim hits`: hit rates of caches at several sizes."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import options


def add_commands(app: typer.Typer) -> None:
    """Add `hits`."""
    app.command("hits", short_help="Hit rates of caches at several sizes.")(hits)


def hits(
    trace: options.TraceFile,
    caches: Annotated[
        str, typer.Option(metavar="C,C,…", help="Cache policies (see: list cache).")
    ] = "lru,lfu,arc,belady",
    cache_ratios: Annotated[
        str, typer.Option(metavar="R,R,…", help="Sizes, as shares of all experts.")
    ] = "0.05,0.1,0.2,0.3,0.5,0.75",
    cache_scope: options.CacheScope = None,
    batch: options.Batch = 1,
    steps: options.Steps = None,
    seed: options.Seed = 0,
    warm: options.Warm = None,
    artefacts: options.Artefacts = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw them, as .png, .svg or .pdf."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write them, as .csv or .parquet."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Say how often each cache would hit, at each size, if every miss were fetched. No
    machine takes part.

    \b
    Examples:
      moesim hits q.parquet
      moesim hits q.parquet --caches lru,lfu:decay=0.9,sieve,belady --cache-ratios 0.1,0.25,0.5 --png hits.png
    """
    options.check_places(files=[png, table], inputs=[trace, warm])
    from moesim.analysis.hit_rates import hit_rates, hits_figure, hits_text
    from moesim.cli.progress import bar
    from moesim.reporting.figures import save
    from moesim.reporting.text import save_table

    names = options.split_names(caches, "--caches")
    ratios = options.shares(cache_ratios)
    with bar("counting", len(names) * len(ratios)) as show:
        rates = hit_rates(
            trace,
            names,
            ratios,
            scope=cache_scope,
            batch=batch,
            steps=steps,
            seed=seed,
            warm=warm,
            artefacts=artefacts,
            progress=show,
        )
    written = [
        *([save(hits_figure(rates), png)] if png else []),
        *([save_table(rates.reset_index(), table)] if table else []),
    ]
    if as_json:
        print(
            json.dumps(
                {
                    str(name): dict(zip(map(str, ratios), rates[name], strict=True))
                    for name in rates
                },
                indent=2,
            )
        )
        return
    print(hits_text(rates))
    for place in written:
        print(f"wrote {place}")
