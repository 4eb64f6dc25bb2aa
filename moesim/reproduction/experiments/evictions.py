"""What LRU evicts, against Belady and LFU, as FlashMoE published it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moesim.policies.planner.observers import observed_policy
from moesim.policies.registry import resolve
from moesim.reproduction.experiments.base import Excerpt, Experiment, percent
from moesim.reproduction.experiments.caches_alone import cache_counts, cache_size

if TYPE_CHECKING:
    from moesim.policies.base import CachePolicy
    from moesim.reproduction.experiments.base import Figures, Setting
    from moesim.traces.format.future import RecordedFuture

LRU_HIT_RATE = 73.0
"""FlashMoE's LRU hit rate in %; the cache size behind it is not stated. Source:
published.yaml, FlashMoE text.
"""
BELADY = "belady:must_admit=true"
"""The textbook's Belady, which takes in every miss, as LRU does."""
CALLS = ("start", "accessed", "victims", "admitted", "evicted")
"""What a history must be told of."""
SOON = 5
"""Steps within which a re-fetch counts. Source: FlashMoE, text."""
NO_EVICTIONS = "lacks evictions"


class EvictionHistory:
    """Writes down what enters and leaves a cache.

    An observer (`moesim.policies.planner.observers`) of `CALLS`.

    Args:
        rival: another cache policy, which is told the same and names its victims in
            this cache; or None.

    Attributes:
        evictions: (step, key of the victim) in order.
        stays: key -> (entered, left) steps of finished stays.
        rivals: (step, victim, rival's victim) where they differ.
    """

    def __init__(self, rival: CachePolicy | None = None) -> None:
        self.rival = rival
        self.step = -1
        self.evictions: list[tuple[int, int]] = []
        self.stays: dict[int, list[tuple[int, int]]] = {}
        self.rivals: list[tuple[int, int, int]] = []
        self._entered: dict[int, int] = {}

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Note one call, and put it to the rival."""
        match call:
            case "start":
                # Rivals are causal: the future is for the policy, if it is an oracle.
                arguments = (replace(arguments[0], future=None),)
            case "accessed":
                self.step = arguments[0].step
            case "admitted":
                self._entered |= dict.fromkeys(arguments[0].tolist(), self.step)
            case "evicted":
                self._note_evicted(arguments[0].tolist())
            case "victims":
                self._compare(*arguments, victims=answer)
                return
        if self.rival is not None:
            getattr(self.rival, call)(*arguments)

    def _note_evicted(self, keys: list[int]) -> None:
        for key in keys:
            self.evictions.append((self.step, key))
            # What filled the cache at the start never entered.
            stay = (self._entered.pop(key, -1), self.step)
            self.stays.setdefault(key, []).append(stay)

    def _compare(
        self, incoming: np.ndarray, candidates: np.ndarray, *, victims: np.ndarray
    ) -> None:
        """Ask the rival for the first victim only: later ones depend on the first."""
        if self.rival is None:
            return
        rival_victim = int(self.rival.victims(incoming[:1], candidates)[0])
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
    return min((max(1, low - 1), low), key=lambda slots: abs(rate(slots) - hit_rate))


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
    delays = _eviction_delays(lru, belady)
    return {
        "refetched within 5 steps, LRU, %": _refetched(lru, future, experts),
        "refetched within 5 steps, Belady, %": _refetched(belady, future, experts),
        "LRU's victim better than LFU's, %": _better_victims(lru, future, experts),
        "LRU evicts later than Belady, steps": (
            float(np.mean(delays)) if delays else NO_EVICTIONS
        ),
    }


def _next_use(future: RecordedFuture, step: int, key: int, experts: int) -> int:
    """Step of the next use; `key` is layer * experts + expert."""
    return future.next_use(step, *divmod(key, experts))


def _refetched(
    history: EvictionHistory, future: RecordedFuture, experts: int
) -> float | str:
    """Share in % of evictions whose victim is used again within `SOON` steps."""
    if not history.evictions:
        return NO_EVICTIONS
    regretted = 0
    for step, key in history.evictions:
        use = _next_use(future, step, key, experts)
        # A victim that is never used again was a good choice.
        if use < future.never and use - step <= SOON:
            regretted += 1
    return percent(regretted, len(history.evictions))


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


def _eviction_delays(history: EvictionHistory, belady: EvictionHistory) -> list[int]:
    """By how many steps stays outlive Belady's first eviction of the same expert."""
    delays = []
    # Only stays that Belady would have ended earlier: the others are no delay.
    for key, stays in history.stays.items():
        belady_leaves = [left for _, left in belady.stays.get(key, ())]
        for entered, left in stays:
            earlier = [step for step in belady_leaves if entered <= step < left]
            if earlier:
                delays.append(left - min(earlier))
    return delays


_ROWS = {
    ("hit_rate", "LRU"): "LRU hit rate, %",
    ("hit_rate", "Belady"): "Belady hit rate, %",
    ("io_ratio_LRU_over_Belady", None): "misses of LRU / Belady",
    ("refetch_rate_within_5_steps", "LRU"): "refetched within 5 steps, LRU, %",
    ("refetch_rate_within_5_steps", "Belady"): "refetched within 5 steps, Belady, %",
    ("lru_better_than_lfu_share", None): "LRU's victim better than LFU's, %",
    ("lru_eviction_delay_steps", None): "LRU evicts later than Belady, steps",
}


def _row(metric: str, setting: Setting) -> str | None:
    return _ROWS.get((metric, setting.get("policy")))


EXPERIMENTS = (
    Experiment(
        name="flashmoe-hit-rate",
        summary="LRU against Belady: hit rates and copies (FlashMoE, text)",
        published=(
            ("FlashMoE", "text", "hit_rate"),
            ("FlashMoE", "text", "io_ratio_LRU_over_Belady"),
        ),
        unit="as in the row",
        needs="routing",
        computes=(
            "Both caches alone at the number of slots where LRU's hit rate comes"
            " nearest to the published 73 %."
        ),
        caveats=(
            (
                "the cache size is not published: LRU's row is chosen, not found;"
                " Belady's and the ratio count"
            ),
            (
                "Belady must admit every miss, as the textbook's does; an expert in use"
                " is never evicted (step-atomic)"
            ),
        ),
        row=_row,
        run=flashmoe_hit_rate,
    ),
    Experiment(
        name="flashmoe-refetch",
        summary="evictions regretted, LRU against LFU and Belady (FlashMoE, text)",
        published=(
            ("FlashMoE", "text", "refetch_rate_within_5_steps"),
            ("FlashMoE", "text", "lru_better_than_lfu_share"),
            ("FlashMoE", "text", "lru_eviction_delay_steps"),
        ),
        unit="as in the row",
        needs="routing",
        computes=(
            "Every eviction at the size of flashmoe-hit-rate, held against the victim's"
            " next use; LFU names its victim in LRU's cache; delays are those of stays"
            " that Belady ends earlier."
        ),
        caveats=(
            (
                "definitions are our reading of the text (reference algorithms, section"
                " 5.6)"
            ),
            (
                "victims with the same next use are left out of the comparison of LRU"
                " and LFU"
            ),
        ),
        row=_row,
        run=flashmoe_refetch,
    ),
)
