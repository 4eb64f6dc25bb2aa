"""How often SMoE's experts are on the GPU when they are selected, part by part.

Its routing changes which experts are selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from moesim.reproduction.experiments.base import Excerpt, Experiment
from moesim.runs import replay as api
from moesim.runs.memory import MemoryOptions

if TYPE_CHECKING:
    from moesim.reproduction.experiments.base import Figures, Setting

MACHINE = "rtx3090-epyc7532"
COLUMNS = ("scores", "pred1_raw")
WHOLE = "SMoE whole"
BARE = "on demand with LRU"
GAIN = "whole over on demand, change"


@dataclass(frozen=True, slots=True)
class _Step:
    """One addition of the ablation: `label` as published, and the composition with
    it.
    """

    label: str
    assignment: str
    cache: str
    prefetch: str
    routing: str


_ROUTER = "expert-cache-router:alpha=0.3"
# Each step adds one part to the one before, in the order of the published ablation.
_STEPS = (
    _Step(BARE, "on-demand", "lru", "none", "as-recorded"),
    _Step("+CE", "on-demand", "score-window", "none", "as-recorded"),
    _Step("+ER", "on-demand", "score-window", "none", _ROUTER),
    _Step("+Pre", "on-demand", "score-window", "partial-hidden", _ROUTER),
    _Step("+BA", "smoe-balancer", "score-window", "partial-hidden", _ROUTER),
)


def smoe_hit_rate(excerpt: Excerpt) -> Figures:
    """Selected experts that are resident, for each step of the ablation and from step
    to step.
    """
    rows = [
        f"{WHOLE}, resident of selected",
        *(f"{step.label}, change" for step in _STEPS[1:]),
        GAIN,
    ]
    if not excerpt.has(*COLUMNS):
        return dict.fromkeys(rows, excerpt.lacking(*COLUMNS))
    # Prefetches and the balancer depend on time, so a machine takes part.
    rates = {step.label: _hit_rate(excerpt, step) for step in _STEPS}
    # The last step of the ablation is the whole system.
    whole_rate = rates[_STEPS[-1].label]
    figures: Figures = {
        rows[0]: whole_rate,
        f"{BARE}, resident of selected": rates[BARE],
    }
    for before, step in pairwise(_STEPS):
        change = _change(rates[before.label], rates[step.label])
        figures[f"{step.label}, change"] = change
    figures[GAIN] = _change(rates[BARE], whole_rate)
    return figures


def _hit_rate(excerpt: Excerpt, step: _Step) -> float:
    run = api.replay(
        excerpt.trace,
        step.assignment,
        cache=step.cache,
        prefetch=step.prefetch,
        routing=step.routing,
        hw=MACHINE,
        # As many staged experts as the composed system has.
        memory=MemoryOptions(cache_ratio=0.25, staging=4),
        steps=excerpt.most_steps,
        seed=excerpt.seed,
    )
    return 100.0 * (run.metrics["hit_rate_active"] or 0.0)


def _change(before: float, after: float) -> float | str:
    """Relative change in %; none can be told from no hits at all."""
    if not before:
        return "lacks hits to compare with"
    return 100.0 * (after / before - 1.0)


def _row(metric: str, setting: Setting) -> str:
    if metric == "ablation_cache_ratio_delta":
        return f"{setting['step']}, change"
    # The abstract states the rate itself, section 6 the improvement.
    if metric == "expert_cache_hit_rate_min":
        return f"{WHOLE}, resident of selected"
    return GAIN


EXPERIMENTS = (
    Experiment(
        name="smoe-hit-rate",
        summary=(
            "selected experts that are on the GPU, by part of the system (SMoE,"
            " abstract and section 6)"
        ),
        published=(
            ("SMoE", "abstract", "expert_cache_hit_rate_min"),
            ("SMoE", "6.2/6.3", "gpu_cache_ratio_improvement_min"),
            ("SMoE", "6.2/6.3", "ablation_cache_ratio_delta"),
        ),
        unit="%",
        needs="columns scores and pred1_raw",
        computes=(
            "Replays on-demand with LRU at 25 % of the experts, then adds SMoE's"
            " eviction (+CE), router (+ER), prefetch (+Pre) and balancer (+BA); hits"
            " over selected experts, changes relative to the step before."
        ),
        caveats=(
            (
                "published figures are the least of several settings, against baselines"
                " of SMoE's own"
            ),
            "no cache sizes are stated with them",
            (
                "which prefetches come in time, and what the balancer leaves to the"
                " CPU, follow from a datasheet profile"
            ),
            (
                "the router changes which experts are selected; later layers keep the"
                " recorded routing"
            ),
        ),
        row=_row,
        run=smoe_hit_rate,
    ),
)
