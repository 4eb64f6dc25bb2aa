"""Hit rates by policy and size, as HybriMoE published them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.registry import resolve
from moesim.reproduction.experiments.base import Excerpt, Experiment, percent
from moesim.reproduction.experiments.caches_alone import cache_counts, cache_size
from moesim.runs import replay as api
from moesim.runs.memory import MemoryOptions

if TYPE_CHECKING:
    from moesim.reproduction.experiments.base import Figures, Setting

MACHINE = "rtx3090-epyc7532"
RATIOS = (25, 50, 75)
"""Shares of the experts that are cached, in %."""
CACHES = {"LRU": "lru", "MRS": "mrs", "LFU": "lfu", "LFRU": "lfru", "Belady": "belady"}
"""Label -> policy. HybriMoE published LRU and MRS only."""
SYSTEM_ROW = "HybriMoE whole, 25 % cached"
SYSTEM_COLUMNS = ("scores", "pred1_raw", "pred2_raw", "pred3_raw")


def hybrimoe_hit_rate(excerpt: Excerpt) -> Figures:
    """LRU, MRS and, for orientation, LFU, LFRU and Belady at 25, 50 and 75 % of the
    experts.
    """
    figures: Figures = {}
    for ratio in RATIOS:
        for label, spec in CACHES.items():
            needs = resolve(spec, "cache").needs
            row = f"{label}, {ratio} % cached"
            # MRS ranks by gate scores, which few engines write.
            if not excerpt.has(*needs):
                figures[row] = excerpt.lacking(*needs)
                continue
            size = cache_size(excerpt, ratio=ratio / 100)
            counts = cache_counts(excerpt, spec, size)
            figures[row] = percent(counts.hits, counts.accesses)
    figures[SYSTEM_ROW] = _system_hit_rate(excerpt)
    return figures


def _system_hit_rate(excerpt: Excerpt) -> float | str:
    """HybriMoE as composed, on a machine, since prefetches need time to land."""
    if not excerpt.has(*SYSTEM_COLUMNS):
        return excerpt.lacking(*SYSTEM_COLUMNS)
    # The size is not published; a quarter is that of the other figures.
    run = api.replay(
        excerpt.trace,
        "hybrimoe",
        hw=MACHINE,
        memory=MemoryOptions(cache_ratio=0.25),
        steps=excerpt.most_steps,
        seed=excerpt.seed,
    )
    return 100.0 * (run.metrics["hit_rate_active"] or 0.0)


def _row(metric: str, setting: Setting) -> str:
    del metric
    # DALI measured HybriMoE as a whole, and names no policy.
    if "policy" not in setting:
        return SYSTEM_ROW
    return f"{setting['policy']}, {setting['cached_pct']} % cached"


EXPERIMENTS = (
    Experiment(
        name="hybrimoe-hit-rate",
        summary="cache hit rate by policy and size (HybriMoE, figure 9)",
        published=(
            ("HybriMoE", "Fig9 (text)", "cache_hit_rate"),
            ("DALI", "1", "cache_hit_rate"),
        ),
        unit="%",
        needs=(
            "routing; column scores for MRS, pred1_raw to pred3_raw too for the whole"
            " system"
        ),
        computes=(
            "Each cache alone, per layer, looked up before the step; hits over active"
            " experts. The whole system is replayed on a datasheet profile."
        ),
        caveats=(
            (
                "HybriMoE's code counts hits of GPU-assigned experts only; here every"
                " active expert is on the GPU"
            ),
            (
                "its prompts and lengths are not published; our runs are short and"
                " start empty, so first uses weigh much"
            ),
            (
                "DALI measured the whole system on Mixtral; the cache size is not"
                " stated with that figure"
            ),
            "LFU, LFRU and Belady stand there for orientation",
        ),
        row=_row,
        run=hybrimoe_hit_rate,
    ),
)
