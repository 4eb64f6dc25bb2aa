"""What FlashMoE's learned cache gains.

It is trained on the first part of a trace and judged on the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.analysis import learned_cache as learned
from moesim.analysis.trace_split import split
from moesim.reproduction.experiments.base import Excerpt, Experiment
from moesim.traces.errors import TraceError

if TYPE_CHECKING:
    from moesim.reproduction.experiments.base import Figures, Setting

RIVALS = {"lru": "LRU", "lfu": "LFU", "arc": "ARC", "lecar": "LeCaR"}
"""Policy -> label."""
COPY_RIVALS = ("lru", "lfu")
"""Copies saved are published against these only."""
RATIO = 0.25


def flashmoe_gain(excerpt: Excerpt) -> Figures:
    """Hit rate of the learned cache above its rivals', and copies below theirs, in % of
    the rival's.
    """
    rows = [_gain(label) for label in RIVALS.values()]
    rows += [_saved(RIVALS[rival]) for rival in COPY_RIVALS]
    try:
        from moesim.runtime.train.cache_network import train  # noqa: PLC0415 - needs torch, which may be missing
    except ImportError:
        return dict.fromkeys(
            rows,
            "lacks PyTorch, which trains the network: pip install 'moesim[runtime]'",
        )
    slots = round(RATIO * excerpt.shape.experts)
    # The experts of one token fill such a cache, so no policy has a choice.
    if slots <= excerpt.shape.top_k:
        return dict.fromkeys(
            rows,
            f"lacks experts: a quarter of {excerpt.shape.experts} leaves a cache"
            " nothing to choose",
        )
    try:
        # Judged on later forward passes only, which the network has not seen.
        training, held_out = split(excerpt.trace, steps=excerpt.most_steps)
        network = train(training, excerpt.shape, seed=excerpt.seed).network
    except TraceError as error:
        return dict.fromkeys(rows, f"lacks forward passes to train on: {error}")
    judged = learned.evaluate(
        (learned.LEARNED, *RIVALS),
        held_out,
        excerpt.shape,
        slots,
        {learned.LEARNED: network._asdict()},
    )
    # No accesses at all count as no hits, and give no gain below.
    rates = {row.policy: row.hit_rate or 0.0 for row in judged}
    return _figures(rates)


def _figures(rates: dict[str, float]) -> Figures:
    """Hit rates by policy, as gains of the learned one."""
    figures: Figures = {}
    learned_rate = rates[learned.LEARNED]
    for rival, label in RIVALS.items():
        gain: float | str = "lacks hits of the rival"
        if rates[rival]:
            gain = 100.0 * (learned_rate / rates[rival] - 1.0)
        figures[_gain(label)] = gain

    # Every miss is one copy.
    learned_misses = 1.0 - learned_rate
    for rival in COPY_RIVALS:
        misses = 1.0 - rates[rival]
        saved: float | str = "lacks misses of the rival"
        if misses:
            saved = 100.0 * (1.0 - learned_misses / misses)
        figures[_saved(RIVALS[rival])] = saved
    return figures


def _gain(rival: str) -> str:
    return f"hit rate over {rival}, relative %"


def _saved(rival: str) -> str:
    return f"copies saved against {rival}, %"


def _row(metric: str, setting: Setting) -> str:
    rival = str(setting["baseline"])
    return _saved(rival) if metric == "io_reduction_vs" else _gain(rival)


EXPERIMENTS = (
    Experiment(
        name="flashmoe-gain",
        summary="the learned cache against LRU, LFU, ARC and LeCaR (FlashMoE, text)",
        published=(
            ("FlashMoE", "text", "hit_rate_gain_over"),
            ("FlashMoE", "text", "io_reduction_vs"),
            ("FlashMoE", "text", "hit_rate_gain_over_max"),
        ),
        unit="%",
        needs="routing of some dozens of forward passes; PyTorch",
        computes=(
            "Trains the network on the first three quarters of the forward passes and"
            " lets all caches evict alone in the last quarter, from empty, with 25 % of"
            " the experts; every miss enters. Half a minute for each trace."
        ),
        caveats=(
            (
                "the cache size behind the published gains is not stated; those over"
                " ARC and LeCaR are the largest of some"
            ),
            (
                "the paper trains on 512 prompts, here on a few hundred tokens of the"
                " same text that is judged"
            ),
            (
                "labels and features are reconstructed, as the paper's formulas are"
                " lost (docs/how-to/learned-cache.md)"
            ),
        ),
        row=_row,
        run=flashmoe_gain,
    ),
)
