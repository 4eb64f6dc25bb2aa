"""What a published figure says about which of two systems is better, and whether ours
say the same.

Two kinds of statements are read off the records. A *direction* is a record that
compares by itself: a speedup above 1, a gain above 0 %. An *order* is a pair of
absolute figures of the same table and setting, of two systems.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moesim.reproduction.papers.reproduce_all import Answered

TIE = 0.005
"""Figures that differ by less, relatively, are equal."""

NEUTRAL = {
    "speedup_avg": 1.0,
    "speedup": 1.0,
    "speedup_vs_naive_cpu": 1.0,
    "greedy_over_hybrimoe_assignment": 0.0,
    "greedy_over_optplan_end_to_end": 1.0,
    "cache_policy_speedup_vs_HybriMoE": 1.0,
    "breakdown_greedy_over_naive": 1.0,
    "breakdown_prefetch_gain": 0.0,
    "breakdown_cache_gain": 0.0,
    "cpu_time_increase_with_greedy": 0.0,
    "gpu_time_reduction_with_greedy": 0.0,
    "speedup_vs_kTransformers_avg": 1.0,
    "speedup_vs_Fiddler": 0.0,
    "speedup_vs_Fiddler_avg": 0.0,
    "speedup_max_vs_caching_prefetching": 1.0,
    "speedup_vs_offloading": 1.0,
    "energy_gain_vs_Fiddler_avg": 1.0,
    "tpot_reduction_vs_best_baseline": 0.0,
    "ttft_reduction_vs_best_baseline": 0.0,
    "ablation_tpot_delta": 0.0,
    "token_throughput_gain_over_LRU": 0.0,
    "speedup_vs_existing_max": 1.0,
    "initial_load_speedup": 1.0,
    "load_plus_prefill_speedup": 1.0,
}
"""Metric that compares by itself -> its value where both sides are equal."""

_SYSTEM_KEYS = ("method", "technique", "baseline", "plan")
"""Settings that name a system."""
_PARAMETER_KEYS = ("w_size", "u_size")
_ORDERED = {
    "moe_time",
    "scheduling_overhead_share",
    "gpu_memory",
    "decode_speed",
    "speedup_avg",
    "speedup_vs_naive_cpu",
    "latency",
    "energy_efficiency",
}
"""Metrics whose figures of one setting may be ordered by system; HybriMoE's speedups
repeat its latencies.
"""


@dataclass(frozen=True, slots=True)
class Statement:
    """Which of two sides a paper finds larger, and whether we find the same.

    Attributes:
        words: the statement.
        records: one for a direction, two for an order, the larger first.
        holds: whether ours agree; a tie does not.
        of_systems: False for two settings of one system's parameters.
    """

    words: str
    records: tuple[Answered, ...]
    holds: bool
    of_systems: bool = True


def directions(answered: Iterable[Answered]) -> list[Statement]:
    """Records that compare by themselves."""
    statements = []
    for entry in answered:
        neutral = NEUTRAL.get(entry.record.metric)
        if neutral is None or not entry.compared:
            continue
        assert entry.published is not None
        assert entry.ours is not None
        # A baseline beside itself compares nothing.
        if entry.published == neutral:
            continue
        side = _side(entry.published, neutral)
        statements.append(
            Statement(
                words=label(entry),
                records=(entry,),
                holds=_side(entry.ours, neutral) == side,
            )
        )
    return statements


def _side(value: float, neutral: float) -> int:
    """1 above, -1 below, 0 where nothing can be told."""
    scale = neutral or 100.0
    difference = (value - neutral) / scale
    if abs(difference) < TIE:
        return 0
    return 1 if difference > 0 else -1


def orders(answered: Sequence[Answered]) -> list[Statement]:
    """Pairs of figures of one table and setting that differ in the system."""
    groups: dict[tuple[object, ...], list[Answered]] = {}
    for entry in answered:
        if entry.compared and entry.record.metric in _ORDERED:
            groups.setdefault(_group(entry), []).append(entry)
    statements = []
    for group in groups.values():
        for first, second in combinations(group, 2):
            statement = _order(first, second)
            if statement is not None:
                statements.append(statement)
    return statements


def _group(entry: Answered) -> tuple[object, ...]:
    setting = entry.record.setting
    shared = {
        key: value
        for key, value in setting.items()
        if key not in (*_SYSTEM_KEYS, *_PARAMETER_KEYS)
    }
    return *entry.record.key, str(sorted(shared.items()))


def _order(first: Answered, second: Answered) -> Statement | None:
    system = _system(first)
    other = _system(second)
    parameters = _parameters(first) != _parameters(second)
    if system == other and not parameters:
        return None
    assert first.published is not None
    assert second.published is not None
    if first.published == second.published:
        return None
    larger, smaller = (first, second)
    if first.published < second.published:
        larger, smaller = second, first
    assert larger.ours is not None
    assert smaller.ours is not None
    gap = larger.ours - smaller.ours
    holds = gap > TIE * max(abs(larger.ours), abs(smaller.ours))
    words = f"{label(larger)} above {_name(smaller)}"
    return Statement(words, (larger, smaller), holds, of_systems=system != other)


def _system(entry: Answered) -> str:
    setting = entry.record.setting
    return " ".join(str(setting[key]) for key in _SYSTEM_KEYS if key in setting)


def _parameters(entry: Answered) -> str:
    setting = entry.record.setting
    stated = [str(setting[key]) for key in _PARAMETER_KEYS if key in setting]
    return f"({', '.join(stated)})" if stated else ""


def _name(entry: Answered) -> str:
    return f"{_system(entry)} {_parameters(entry)}".strip()


def label(entry: Answered) -> str:
    """A record in words."""
    record = entry.record
    setting = ", ".join(str(value) for value in record.setting.values())
    return f"{record.source} {record.ref} {record.metric} ({setting})"
