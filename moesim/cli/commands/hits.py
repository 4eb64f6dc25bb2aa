"""`moesim hits`: hit rates of caches at several sizes."""

from dataclasses import dataclass

from moesim.base.options import TableOptions
from moesim.cli import output
from moesim.cli.options import from_dataclass
from moesim.runs.config import RunConfig, of_run

# A cache alone has no policies beside it, no machine and no time.
NEEDS_MACHINE = (
    *("policy", "prefetch", "routing", "hw", "slots_per_layer", "gpu_memory_bytes"),
    *("host_memory_bytes", "host_cache", "staging", "prefetch_budget_bytes"),
    *("gpu_split", "context_tokens", "noise_seed", "engine", "arrivals", "slo"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitsOptions(TableOptions):
    """Which caches are counted, at which sizes."""

    cache: tuple[str, ...] = of_run("cache", ("lru", "lfu", "arc", "belady"))
    cache_ratio: tuple[float, ...] = of_run(
        "cache_ratio", (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
    )


@from_dataclass(without=NEEDS_MACHINE, from_file=False)
def hits(config: RunConfig, options: HitsOptions) -> None:
    """Say how often each cache would hit, at each size, if every miss were fetched. No
    machine takes part.

    \b
    Examples:
      moesim hits q.parquet
      moesim hits q.parquet --cache lru,lfu:decay=0.9,sieve,belady --cache-ratio 0.1,0.25,0.5 --html hits.html
    """
    from moesim.cli.output import bar
    from moesim.questions.hit_rates import hit_rates, hits_answer

    count = len(options.cache) * len(options.cache_ratio)
    with bar("counting", count) as show:
        rates = hit_rates(config, options.cache, options.cache_ratio, progress=show)
    output.present(hits_answer(rates), options)
