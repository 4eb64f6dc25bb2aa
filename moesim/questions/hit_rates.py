"""Hit rates of cache policies at several sizes: the question of a cache simulator,
asked before any machine is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.units import percent
from moesim.policies.sizes import CacheSize
from moesim.reporting.answers import Answer, Column, Listing
from moesim.reporting.figures import Axis, Figure
from moesim.reporting.pages import trace_words
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.replay import replay_cache
from moesim.runs.setup import opened
from moesim.traces.format.layer_steps import layer_steps
from moesim.traces.stats.hit_rate_curves import BLOCK_ACCESSES, CurveAggregator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pandas as pd

    from moesim.traces.format.reader import Trace

CACHES = ("lru", "lfu", "arc", "belady")
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)


@takes_options(RunConfig, without=["policy", "cache", "cache_ratio", "cache_scope"])
def hit_rates(
    trace: RunConfig | str | Path | Trace,
    caches: Sequence[str] = CACHES,
    ratios: Sequence[float] = RATIOS,
    *,
    scope: str | None = None,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Drive every cache at every size with every access of a trace; each miss is
    fetched and offered to the cache.

    Args:
        trace: a moesim trace, by path or opened; or a configuration.
        caches: cache policies, such as ``lfu:decay=0.9``.
        ratios: sizes, as shares of all experts.
        scope: ``layer`` or ``global``; None takes ``layer``.
        progress: called with the number of caches done.
        options: as in `moesim.runs.replay.replay_cache`.

    Returns:
        Share of accesses that hit: a row per size, a column per cache.

    Raises:
        TraceError, PolicyError: as `moesim.runs.replay.replay_cache`.
    """
    import pandas as pd  # noqa: PLC0415 - half a second that a plain replay need not pay

    # Opened once, for all caches and sizes.
    config, opened_trace = opened(RunConfig.of(trace, **options))
    config = config.replaced(cache_scope=scope or config.cache_scope)
    rates: dict[str, list[float]] = {}
    done = 0
    # A cache that is named twice is one column.
    for cache in dict.fromkeys(caches):
        curve = _curve(config, opened_trace, cache)
        rates[cache] = []
        for ratio in ratios:
            if curve is None:
                counts = replay_cache(config, cache, cache_ratio=ratio)
                rate = counts["hit_rate_active"]
            else:
                rate = curve(ratio)
            rates[cache].append(rate)
            done += 1
            if progress is not None:
                progress(done)
    return pd.DataFrame(rates, index=pd.Index(ratios, name="cache_ratio"))


def _curve(
    config: RunConfig, trace: Trace, cache: str
) -> Callable[[float], float | None] | None:
    """Hit rate by size from one pass over the trace; None where one pass does not tell
    all sizes, or not exactly.
    """
    accesses = trace.rows * trace.shape.top_k
    if (
        cache not in ("lru", "belady")
        or config.cache_scope == "global"
        or config.warm is not None
        or trace.shape.bytes_by_expert
        or accesses > BLOCK_ACCESSES
    ):
        return None

    counted = CurveAggregator(trace.shape, names=[cache])
    for block in layer_steps(trace, batch=config.batch, steps=config.steps):
        counted.add(block)
    curves = counted.end()
    hits = curves.hits(cache)
    total = int(curves.accesses(cache).sum())

    def rate(ratio: float) -> float | None:
        slots = CacheSize.for_model(trace.shape, ratio=ratio).slots
        by_layer = hits[np.arange(trace.shape.layers), slots]
        return int(by_layer.sum()) / total if total else None

    return rate


def hits_answer(rates: pd.DataFrame, trace: Trace | None = None) -> Answer:
    """Say which cache hits most often, at each size.

    Args:
        rates: of `hit_rates`.
        trace: on which they were counted.
    """
    oracles = _oracles(rates)
    largest = rates.index.max()
    causal = rates.drop(columns=oracles).loc[largest]
    sentence = "every cache sees the future, so none is a rival"
    if len(causal):
        sentence = (
            f"most hits with {percent(largest, 0)} of all experts cached:"
            f" {causal.idxmax()}, {percent(causal.max())}"
        )
    notes = ["hit rate: of active experts in all forward passes, prompts included"]
    if oracles:
        notes.append(
            f"{', '.join(oracles)}: sees the future; no bound for batches, nor for"
            " caches that start filled or copy what nobody missed"
        )
    table = rates.T.rename_axis("cache").reset_index()
    table.columns = table.columns.map(str)
    sizes = [Column(str(r), f"{100 * r:.4g} %", "share", "larger") for r in rates.index]
    setting = []
    sources = {}
    if trace is not None:
        shape = trace.shape
        model = f"{shape.layers} layers of {shape.experts} experts, {shape.top_k} each"
        setting = [("model", f"{shape.name}, {model}"), ("machine", "none takes part")]
        sources = {"trace": trace_words(trace.path.name, trace.digest())}
    by_cache = {
        str(name): {str(ratio): rate for ratio, rate in rates[name].items()}
        for name in rates
    }
    return Answer(
        question="how often would each cache hit?",
        subject=f"{trace.shape.name}, no machine" if trace else "no machine",
        setting=setting,
        tables=[Listing(table, [Column("cache", "cache"), *sizes])],
        sentences=[sentence],
        notes=notes,
        figures={"hits": lambda: _figure(rates)},
        data={"hit_rates": by_cache},
        sources=sources,
    )


def _oracles(rates: pd.DataFrame) -> list[str]:
    # Here, since the registry scans all policies, which counting does not need.
    from moesim.policies.registry import resolve  # noqa: PLC0415

    return [str(name) for name in rates.columns if resolve(str(name), "cache").oracle]


def _figure(rates: pd.DataFrame) -> Figure:
    rows = rates.melt(ignore_index=False, var_name="cache", value_name="rate")
    # The whole range, so that figures of two traces can lie side by side.
    return Figure(
        rows.reset_index(),
        Axis("cache_ratio", "cache, share of all experts", ".0%"),
        Axis("rate", "hit rate of active experts", ".0%", limits=(0, 1)),
        "Hit rate of every cache over its size; dashed: sees the future",
        series="cache",
        dashed=frozenset(_oracles(rates)),
    )
