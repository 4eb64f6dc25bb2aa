"""What caches do with routing: hit rates, evictions, the learned cache, SMoE's parts.

A function returns row -> figure, or what the trace lacks in one line that begins with
"lacks"; ``data/papers.yaml`` says which published records it stands beside.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moesim.base.errors import TraceError
from moesim.evidence.reproduction.workloads import Excerpt, percent
from moesim.policies import cache_replay
from moesim.policies.planner.observers import observed_policy
from moesim.policies.planner.residency import CacheSize
from moesim.policies.registry import resolve
from moesim.questions import learned_cache as learned
from moesim.questions.learned_cache import StayRecorder, split
from moesim.runs.config import MemoryOptions
from moesim.runs.replay import replay as run_replay
from moesim.traces.format.layer_steps import layer_steps

if TYPE_CHECKING:
    from moesim.policies.base import CachePolicy
    from moesim.policies.cache_replay import CacheCounts
    from moesim.runs.result import Run
    from moesim.traces.format.future import RecordedFuture

Figures = dict[str, float | str]

MACHINE = "rtx3090-epyc7532"
"""Datasheet profile of the experiments that need one: DALI's machine."""

# -- caches driven alone: every miss is fetched and offered, and no time passes --------


def cache_size(
    excerpt: Excerpt, *, ratio: float | None = None, slots: int | None = None
) -> CacheSize:
    """A cache per layer: a share of its experts, or so many slots."""
    shape = excerpt.shape
    return CacheSize.for_model(shape, ratio=ratio, slots_per_layer=slots)


def cache_counts(
    excerpt: Excerpt, spec: str, size: CacheSize, policy: CachePolicy | None = None
) -> CacheCounts:
    """Hits and misses of a cache policy.

    Args:
        excerpt: the forward passes.
        spec: the policy as users name it.
        size: of the cache.
        policy: drive this object instead, which stands for `spec`.
    """
    named = cast("CachePolicy", resolve(spec, "cache"))
    # A policy that is handed in may watch oracles, so it gets the future too.
    sees_future = named.oracle or policy is not None
    future = excerpt.future() if sees_future else None

    blocks = layer_steps(
        excerpt.trace,
        steps=excerpt.most_steps,
        columns=named.needs,
        tokens=named.reads_tokens,
    )
    return cache_replay.replay(
        policy or named,
        spec,
        excerpt.shape,
        size,
        blocks,
        future=future,
        seed=excerpt.seed,
    )


CACHED_PCT = (25, 50, 75)
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
    for ratio in CACHED_PCT:
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
    run = run_replay(
        excerpt.trace,
        "hybrimoe",
        hw=MACHINE,
        memory=MemoryOptions(cache_ratio=0.25),
        steps=excerpt.most_steps,
        seed=excerpt.seed,
    )
    return 100.0 * (run.metrics["hit_rate_active"] or 0.0)


# -- what LRU evicts, against Belady and LFU (FlashMoE) --------------------------------


LRU_HIT_RATE = 73.0
"""FlashMoE's LRU hit rate in %; the cache size behind it is not stated. Source:
published.yaml, FlashMoE text.
"""
BELADY = "belady:must_admit=true"
"""The textbook's Belady, which takes in every miss, as LRU does."""
CALLS = ("start", *learned.CALLS)
"""What a history must be told of."""
NO_EVICTIONS = "lacks evictions"


class EvictionHistory(StayRecorder):
    """Writes down what enters and leaves a cache.

    An observer (`moesim.policies.planner.observers`) of `CALLS`.

    Args:
        rival: another cache policy, which is told the same and names its victims in
            this cache; or None.

    Attributes:
        rivals: (step, victim, rival's victim) where they differ.
    """

    def __init__(self, rival: CachePolicy | None = None) -> None:
        super().__init__()
        self.rival = rival
        self.rivals: list[tuple[int, int, int]] = []

    @property
    def evictions(self) -> list[tuple[int, int]]:
        """(step, key of the victim) of each."""
        return [(left, key) for key, of in self.stays.items() for _, left in of]

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Note one call, and put it to the rival."""
        super().reported(call, arguments, answer)
        if self.rival is None:
            return
        if call == "victims":
            self._compare(*map(np.array, arguments), rival=self.rival)
            return
        if call == "start":
            # Rivals are causal: the future is for the policy, if it is an oracle.
            arguments = (replace(arguments[0], future=None),)
        getattr(self.rival, call)(*arguments)

    def _compare(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
        victims: np.ndarray,
        *,
        rival: CachePolicy,
    ) -> None:
        """Ask the rival for the first victim only: later ones depend on the first."""
        chosen = np.full(1, -1)
        rival.victims(incoming[:1], candidates, chosen)
        rival_victim = int(chosen[0])
        # -1 stands for an expert that is not let in.
        if rival_victim != int(victims[0]) and victims[0] >= 0:
            self.rivals.append((self.step, int(victims[0]), rival_victim))


def _slots_for(excerpt: Excerpt, hit_rate: float) -> int:
    """Slots per layer at which LRU's hit rate in % comes nearest to `hit_rate`."""
    rates: dict[int, float] = {}

    def rate(slots: int) -> float:
        if slots not in rates:
            counts = cache_counts(excerpt, "lru", cache_size(excerpt, slots=slots))
            rates[slots] = percent(counts.hits, counts.accesses)
        return rates[slots]

    # LRU's hit rate never falls as slots grow, so it can be searched by halves.
    low = 1
    high = excerpt.shape.experts
    while low < high:
        middle = (low + high) // 2
        if rate(middle) >= hit_rate:
            high = middle
        else:
            low = middle + 1

    # `low` is the first size at or above the rate; the one before may be nearer.
    before = max(1, low - 1)
    return min((before, low), key=lambda slots: abs(rate(slots) - hit_rate))


def flashmoe_hit_rate(excerpt: Excerpt) -> Figures:
    """LRU, Belady and the ratio of their misses, at the size where LRU comes nearest to
    the published rate.
    """
    slots = _slots_for(excerpt, LRU_HIT_RATE)
    # Both at one size: the published rate of Belady belongs to that of LRU.
    size = cache_size(excerpt, slots=slots)
    lru = cache_counts(excerpt, "lru", size)
    belady = cache_counts(excerpt, BELADY, size)
    lru_misses = lru.accesses - lru.hits
    belady_misses = belady.accesses - belady.hits
    ratio = lru_misses / belady_misses if belady_misses else "lacks misses"
    return {
        "LRU hit rate, %": percent(lru.hits, lru.accesses),
        "Belady hit rate, %": percent(belady.hits, belady.accesses),
        "misses of LRU / Belady": ratio,
        "share of experts cached, %": percent(slots, excerpt.shape.experts),
    }


def flashmoe_refetch(excerpt: Excerpt) -> Figures:
    """Share of evictions regretted within five steps, LRU against LFU, and how late LRU
    lets go.
    """
    size = cache_size(excerpt, slots=_slots_for(excerpt, LRU_HIT_RATE))
    # LFU names its victims in LRU's cache, so that both choose among the same experts.
    lru = EvictionHistory(cast("CachePolicy", resolve("lfu", "cache")))
    belady = EvictionHistory()
    for spec, history in (("lru", lru), (BELADY, belady)):
        policy = cast("CachePolicy", resolve(spec, "cache"))
        cache_counts(excerpt, spec, size, observed_policy(policy, history, CALLS))

    future = excerpt.future()
    experts = excerpt.shape.experts
    delay = learned.mean_delay(lru.stays, belady.stays)
    return {
        "refetched within 5 steps, LRU, %": _refetched(lru, future, experts),
        "refetched within 5 steps, Belady, %": _refetched(belady, future, experts),
        "LRU's victim better than LFU's, %": _better_victims(lru, future, experts),
        "LRU evicts later than Belady, steps": NO_EVICTIONS if delay is None else delay,
    }


def _next_use(future: RecordedFuture, step: int, key: int, experts: int) -> int:
    """Step of the next use; `key` is layer * experts + expert."""
    return future.next_use(step, *divmod(key, experts))


def _refetched(
    history: EvictionHistory, future: RecordedFuture, experts: int
) -> float | str:
    """Share in % of evictions whose victim is used again within `SOON_STEPS`."""
    evictions = history.evictions
    if not evictions:
        return NO_EVICTIONS
    regretted = 0
    for step, key in evictions:
        use = _next_use(future, step, key, experts)
        # A victim that is never used again was a good choice.
        if use < future.never and use - step <= learned.SOON_STEPS:
            regretted += 1
    return percent(regretted, len(evictions))


def _better_victims(
    history: EvictionHistory, future: RecordedFuture, experts: int
) -> float | str:
    """Share in % of victims that are used later than the rival's."""
    better = 0
    decided = 0
    for step, victim, rival_victim in history.rivals:
        use = _next_use(future, step, victim, experts)
        rival_use = _next_use(future, step, rival_victim, experts)
        # Two victims that are both never used again are equally good.
        if use != rival_use:
            decided += 1
            better += use > rival_use
    return percent(better, decided) if decided else NO_EVICTIONS


# -- FlashMoE's learned cache, trained on the first part of a trace --------------------


RIVALS = {"lru": "LRU", "lfu": "LFU", "arc": "ARC", "lecar": "LeCaR"}
"""Policy -> label."""
COPY_RIVALS = ("lru", "lfu")
"""Copies saved are published against these only."""
LEARNED_RATIO = 0.25


def flashmoe_gain(excerpt: Excerpt) -> Figures:
    """Hit rate of the learned cache above its rivals', and copies below theirs, in % of
    the rival's.
    """
    rows = [_gain(label) for label in RIVALS.values()]
    rows += [_saved(RIVALS[rival]) for rival in COPY_RIVALS]
    try:
        from moesim.runtime.train.cache import train  # noqa: PLC0415 - needs torch, which may be missing
    except ImportError:
        return dict.fromkeys(
            rows,
            "lacks PyTorch, which trains the network: pip install 'moesim[runtime]'",
        )
    slots = round(LEARNED_RATIO * excerpt.shape.experts)
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


# -- DALI's window cache, SMoE's ablation ----------------------------------------------


WINDOWS = ((2, 8), (2, 16), (4, 8), (8, 8))
"""(window in steps, swaps per window) of DALI's appendix A.6."""
LAST_QUARTER = 0.75
FINAL_ROW = "best late step (w, u) = (8, 1), batch 4, %"


def dali_window(excerpt: Excerpt) -> Figures:
    """DALI's greedy assignment over its window cache at 50 %; hits of GPU-assigned
    experts, by window and swaps.
    """
    figures: Figures = {}
    batch = excerpt.batch_near(8)
    rates: dict[tuple[int, int], float] = {}
    for window, swaps in WINDOWS:
        run = _window_run(excerpt, window, swaps, batch)
        rate = run.metrics["hit_rate_gpu"]
        # The rate is one of GPU-assigned experts, of which there may be none.
        if rate is None:
            return {
                "hit rate": (
                    "lacks experts on the GPU: this machine computes all of them on"
                    " its CPU"
                )
            }
        rates[window, swaps] = 100.0 * rate
        figures[f"hit rate (w, u) = ({window}, {swaps}), %"] = rates[window, swaps]
    figures[FINAL_ROW] = _best_late_step(excerpt)
    figures["gain (2, 16) over (2, 8), points"] = rates[2, 16] - rates[2, 8]
    figures["gain (4, 8) over (8, 8), points"] = rates[4, 8] - rates[8, 8]
    figures["batch"] = float(batch)
    return figures


def _window_run(excerpt: Excerpt, window: int, swaps: int, batch: int) -> Run:
    return run_replay(
        excerpt.trace,
        "greedy",
        cache=f"workload-window:window={window},swaps={swaps}",
        hw=MACHINE,
        memory=MemoryOptions(cache_ratio=0.5),
        batch=batch,
        steps=excerpt.most_steps,
        seed=excerpt.seed,
    )


def _best_late_step(excerpt: Excerpt) -> float | str:
    """Highest hit rate over GPU-assigned experts of one step in the last quarter.

    DALI's figure 18d ends with it.
    """
    # Figure 18d has batch 4; another batch would not be the same experiment.
    batches, lacks = excerpt.batches([4])
    if not batches:
        return lacks[4]
    run = _window_run(excerpt, window=8, swaps=1, batch=batches[0])
    accesses = run.timeline.access_frame()
    is_late = accesses["step"] >= LAST_QUARTER * run.metrics["steps"]
    # The paper counts hits of experts that the GPU computes.
    on_gpu = accesses[is_late & (accesses["lane"] != "cpu")]
    rates = (on_gpu["state"] == "hit").groupby(on_gpu["step"]).mean()
    if rates.empty:
        return "lacks experts on the GPU in the last quarter of the steps"
    return 100.0 * float(rates.max())


COLUMNS = ("scores", "pred1_raw")
WHOLE = "SMoE whole"
BARE = "on demand with LRU"
GAIN = "whole over on demand, change"
_ABLATION = {
    BARE: {"cache": "lru"},
    "+CE": {"cache": "score-window"},
    "+ER": {"routing": "expert-cache-router:alpha=0.3"},
    "+Pre": {"prefetch": "partial-hidden"},
    "+BA": {"policy": "smoe-balancer"},
}
"""Step of the published ablation, in its order -> what it adds to the one before."""


def smoe_hit_rate(excerpt: Excerpt) -> Figures:
    """Selected experts that are resident, for each step of the ablation and from step
    to step.
    """
    changes = {step: f"{step}, change" for step in _ABLATION if step != BARE}
    of_selected = f"{WHOLE}, resident of selected"
    if not excerpt.has(*COLUMNS):
        rows = [of_selected, *changes.values(), GAIN]
        return dict.fromkeys(rows, excerpt.lacking(*COLUMNS))
    # Prefetches and the balancer depend on time, so a machine takes part.
    options: dict[str, Any] = {"policy": "on-demand", "prefetch": "none"}
    rates = {}
    for step, added in _ABLATION.items():
        options |= added
        run = run_replay(
            excerpt.trace,
            **options,
            hw=MACHINE,
            # As many staged experts as the composed system has.
            memory=MemoryOptions(cache_ratio=0.25, staging=4),
            steps=excerpt.most_steps,
            seed=excerpt.seed,
        )
        rates[step] = 100.0 * (run.metrics["hit_rate_active"] or 0.0)
    # The last step of the ablation is the whole system.
    last = list(rates.values())[-1]
    figures: Figures = {of_selected: last, f"{BARE}, resident of selected": rates[BARE]}
    for before, step in pairwise(rates):
        figures[changes[step]] = _change(rates[before], rates[step])
    figures[GAIN] = _change(rates[BARE], last)
    return figures


def _change(before: float, after: float) -> float | str:
    """Relative change in %; none can be told from no hits at all."""
    if not before:
        return "lacks hits to compare with"
    return 100.0 * (after / before - 1.0)
