"""`moesim hits`: hit rates of caches at several sizes."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import output, parsers
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson
from moesim.cli.run_options import with_config
from moesim.runs.config import RunConfig

# A cache alone has no policies beside it, no machine and no time.
NEEDS_MACHINE = (
    "policy",
    "cache",
    "prefetch",
    "routing",
    "hw",
    "cache_ratio",
    "slots_per_layer",
    "gpu_memory_bytes",
    "host_memory_bytes",
    "host_cache",
    "staging",
    "prefetch_budget_bytes",
    "gpu_split",
    "noise_seed",
    "engine",
)


@with_config(without=NEEDS_MACHINE, before={"caches": ["trace"]}, from_file=False)
def hits(
    caches: Annotated[
        str, typer.Option(metavar="C,C,…", help="Cache policies (see: list cache).")
    ] = "lru,lfu,arc,belady",
    cache_ratios: Annotated[
        str, typer.Option(metavar="R,R,…", help="Sizes, as shares of all experts.")
    ] = "0.05,0.1,0.2,0.3,0.5,0.75",
    *,
    config: RunConfig,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw them, as .png, .svg or .pdf."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write them, as .csv or .parquet."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how often each cache would hit, at each size, if every miss were fetched. No
    machine takes part.

    \b
    Examples:
      moesim hits q.parquet
      moesim hits q.parquet --caches lru,lfu:decay=0.9,sieve,belady --cache-ratios 0.1,0.25,0.5 --png hits.png
    """
    # Before the imports, which take longer than the check.
    check_places(files=[png, table], inputs=[config.trace, config.warm])
    from moesim.analysis.hit_rates import hit_rates, hits_figure, hits_text
    from moesim.cli.progress import bar
    from moesim.reporting.figures import save
    from moesim.reporting.text import save_table

    names = parsers.split_policies(caches, "--caches")
    ratios = parsers.shares(cache_ratios, "--cache-ratios")
    with bar("counting", len(names) * len(ratios)) as show:
        rates = hit_rates(config, names, ratios, progress=show)

    if png is not None:
        save(hits_figure(rates), png)
    if table is not None:
        save_table(rates.reset_index(), table)
    if as_json:
        # JSON has no keys that are numbers.
        by_cache = {
            str(name): dict(zip(map(str, ratios), rates[name], strict=True))
            for name in rates
        }
        print(json.dumps(by_cache, indent=2))
        return
    print(hits_text(rates))
    output.print_written([png, table])
