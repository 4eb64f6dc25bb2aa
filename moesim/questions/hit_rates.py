"""Hit rates of cache policies at several sizes: the question of a cache simulator,
asked before any machine is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.units import percent
from moesim.reporting.answers import Answer
from moesim.reporting.figures import Axis, Figure
from moesim.reporting.parts import Column, Listing, column, trace_words
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.replay import replay_cache
from moesim.runs.setup import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        Share of accesses that hit: a row per size, a column per cache; in ``attrs`` the
        model and the trace.

    Raises:
        TraceError, PolicyError: as `moesim.runs.replay.replay_cache`.
    """
    import pandas as pd  # noqa: PLC0415 - half a second that a plain replay need not pay

    # Opened once, for all caches and sizes.
    config, opened_trace = opened(RunConfig.of(trace, **options))
    config = config.replaced(cache_scope=scope or config.cache_scope)
    rates: dict[str, list[float | None]] = {}
    # A cache that is named twice is one column.
    for name in dict.fromkeys(caches):
        rates[name] = []
        for ratio in ratios:
            counts = replay_cache(config, name, cache_ratio=ratio)
            rates[name].append(counts["hit_rate_active"])
            if progress is not None:
                progress(sum(map(len, rates.values())))
    frame = pd.DataFrame(rates, index=pd.Index(ratios, name="cache_ratio"))
    shape = opened_trace.shape
    frame.attrs = {
        "model": shape.name,
        "experts": f"{shape.layers} layers of {shape.experts} experts, {shape.top_k}"
        " each",
        "trace": trace_words(Path(opened_trace.name).name, opened_trace.digest()),
    }
    return frame


def hits_answer(rates: pd.DataFrame) -> Answer:
    """Say which cache hits most often, at each size.

    Args:
        rates: of `hit_rates`.
    """
    # Here, since the registry scans all policies, which counting does not need.
    from moesim.policies.registry import resolve  # noqa: PLC0415

    oracles = [str(name) for name in rates if resolve(str(name), "cache").oracle]
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
    by_size = rates.rename(index=str)
    sizes = [Column(str(r), f"{100 * r:.4g} %", "share") for r in rates.index]
    rows = rates.melt(ignore_index=False, var_name="cache", value_name="rate")
    # The whole range, so that figures of two traces can lie side by side.
    figure = Figure(
        rows.reset_index(),
        Axis("cache_ratio", "cache, share of all experts", ".0%"),
        Axis("rate", "hit rate of active experts", ".0%", limits=(0, 1)),
        "Hit rate of every cache over its size",
        series="cache",
        dashed=frozenset(oracles),
    )
    model = rates.attrs["model"]
    return Answer(
        question="how often would each cache hit?",
        subject=f"{model}, no machine",
        setting=[
            ("model", f"{model}, {rates.attrs['experts']}"),
            ("machine", "none takes part"),
        ],
        tables=[
            Listing(
                by_size.T.rename_axis("cache").reset_index(), [column("cache"), *sizes]
            )
        ],
        sentences=[sentence],
        notes=notes,
        figures={"hits": figure},
        data={"hit_rates": by_size.to_dict()},
        sources={"trace": rates.attrs["trace"]},
    )
