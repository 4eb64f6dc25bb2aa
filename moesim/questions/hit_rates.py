"""Hit rates of cache policies at several sizes: the question of a cache simulator,
asked before any machine is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.units import percent
from moesim.policies.planner.residency import CacheSize
from moesim.reporting.charts import (
    Chart,
    Styles,
    channel,
    columns_of,
    layer,
    shown,
)
from moesim.reporting.pages import Page, PageTable, page_origin, trace_words
from moesim.reporting.tables import aligned
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


def hits_text(rates: pd.DataFrame) -> str:
    """Lay out a row per cache, a column per size."""
    heads, *rows = _rows(rates)
    return "\n".join([*aligned([heads, *rows]), "", *_legend(rates)])


def _rows(rates: pd.DataFrame) -> list[list[str]]:
    head = ["cache", *(f"{ratio:.4g}" for ratio in rates.index)]
    rows = [
        [str(name), *(percent(rate) for rate in rates[name])] for name in rates.columns
    ]
    return [head, *rows]


def _legend(rates: pd.DataFrame) -> list[str]:
    lines = ["hit rate of active experts, by the share of all experts that fits"]
    if oracles := _oracles(rates):
        lines.append(
            f"{', '.join(oracles)}: sees the future; no bound for batches, nor for"
            " caches that start filled or copy what nobody missed"
        )
    return lines


def _oracles(rates: pd.DataFrame) -> list[str]:
    # Here, since the registry scans all policies, which counting does not need.
    from moesim.policies.registry import resolve  # noqa: PLC0415

    return [str(name) for name in rates.columns if resolve(str(name), "cache").oracle]


def hits_figure(rates: pd.DataFrame) -> Chart:
    """Draw a line per cache; those that see the future are dashed."""
    rows = rates.melt(ignore_index=False, var_name="policy", value_name="rate")
    styles = Styles(list(map(str, rates.columns)), frozenset(_oracles(rates)))
    # The whole range, so that figures of two traces can lie side by side.
    x = channel("cache_ratio", "cache, share of all experts", axis={"format": "%"})
    y = channel("rate", "hit rate of active experts", scale={"domain": [0, 1]})
    y["axis"] = {"format": "%"}
    hover = shown(
        ("policy", "cache"),
        ("cache_ratio", "size", ".3~%"),
        ("rate", "hit rate", ".2%"),
    )
    # A slider reads all curves at one size: the nearest that was counted.
    sizes = list(rates.index)
    slider = {"input": "range", "min": min(sizes), "max": max(sizes), "step": 0.01}
    size = {"name": "size", "value": sizes[len(sizes) // 2]}
    size["bind"] = slider | {"name": "cache, share of all experts "}
    nearest = [
        {"calculate": "abs(datum.cache_ratio - size)", "as": "distance"},
        {
            "window": [{"op": "row_number", "as": "place"}],
            "sort": [{"field": "distance"}],
            "groupby": ["policy"],
        },
        {"filter": "datum.place == 1"},
    ]
    list_them = [
        {"calculate": "format(datum.rate, '.1%') + ' ' + datum.policy", "as": "words"},
        {"aggregate": [{"op": "values", "as": "rows"}]},
        {"calculate": "join(pluck(datum.rows, 'words'), '\\n')", "as": "words"},
    ]
    text = {"type": "text", "align": "left", "lineBreak": "\n", "fontSize": 12}
    read = layer(
        text,
        x={"value": 12},
        y={"value": 14},
        text={"field": "words"},
        transform=[*nearest, *list_them],
    )
    mark = {"type": "rule", "strokeDash": [3, 3]}
    at = layer(mark, x=x, transform=nearest)
    spec = {
        "data": {"name": "rates"},
        "params": [size],
        "width": 620,
        "height": 330,
        "layer": [*styles.lines(x, y, hover), at, read],
    }
    label = "Hit rate of every cache over its size"
    return Chart(spec, {"rates": columns_of(rows.reset_index())}, label)


def write_hits(
    rates: pd.DataFrame, trace: Trace, path: Path, command: str | None = None
) -> Path:
    """Write the page of hit rates.

    Args:
        rates: of `hit_rates`.
        trace: on which they were counted.
        path: of the page.
        command: the command line that made it; None for a call from Python.

    Returns:
        The same path.
    """
    shape = trace.shape
    origin = page_origin(command, trace=trace_words(trace.path.name, trace.digest()))
    largest = rates.index.max()
    causal = rates.drop(columns=_oracles(rates)).loc[largest]
    answer = "every cache sees the future, so none wins"
    if len(causal):
        best = causal.idxmax()
        rate = percent(causal.max())
        answer = f"most hits with {percent(largest, 0)} of all experts: {best}, {rate}"
    page = Page(
        f"{shape.name}, no machine: how often would each cache hit?",
        origin,
        setting=[
            f"{shape.layers} layers of {shape.experts} experts, {shape.top_k} each"
        ],
        answer=answer,
        notes=_legend(rates),
    )
    heads, *rows = _rows(rates)
    page.add("", hits_figure(rates), PageTable(heads, rows, "Hit rates"))
    return page.write(path)
