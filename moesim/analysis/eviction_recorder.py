"""Records what a cache policy evicts, and compares it with what Belady would evict."""

from __future__ import annotations

from bisect import bisect_left
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.base import CachePolicy, PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.traces.format.future import RecordedFuture

CALLS = ("accessed", "admitted", "evicted", "victims")
"""What a recorder must be told of."""

SOON_STEPS = 5
"""A victim that is used again within so many steps was evicted too early."""


class EvictionRecorder:
    """Records every eviction of a cache policy.

    An observer (`moesim.policies.planner.observers`) of `CALLS`.

    Args:
        policy: whose evictions are recorded.
        future: of the same forward passes.
        experts: of a layer.

    Attributes:
        stays: flat key -> (first step, last step) of each finished stay in the cache,
            in order.
        evictions: how many.
        optimal: those that were the best choice.
        soon: those of experts used again within `SOON_STEPS`.

    Raises:
        PolicyError: the policy may decline admissions.
    """

    def __init__(
        self, policy: CachePolicy, future: RecordedFuture, experts: int
    ) -> None:
        # With admissions declined, caches would differ in what they were offered.
        if type(policy).admits is not CachePolicy.admits:
            raise PolicyError(
                "a policy that declines admissions cannot be compared with those that"
                " admit every miss"
            )
        self._future = future
        self._experts = experts
        self._step = 0
        self._entered: dict[int, int] = {}
        self.stays: dict[int, list[tuple[int, int]]] = {}
        self.evictions = 0
        self.optimal = 0
        self.soon = 0

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Note one call."""
        match call:
            case "accessed":
                # Admissions and evictions carry no step; those of the accesses before
                # count.
                self._step = arguments[0].step
            case "admitted":
                entered = arguments[0].tolist()
                self._entered.update(dict.fromkeys(entered, self._step))
            case "evicted":
                for key in arguments[0].tolist():
                    stay = (self._entered.pop(key), self._step)
                    self.stays.setdefault(key, []).append(stay)
            case "victims":
                _, candidates = arguments
                self._judge(answer, candidates)

    def _judge(self, chosen: np.ndarray, candidates: np.ndarray) -> None:
        """Compare victims with those that hindsight would have named."""
        assert chosen.min() >= 0, "every policy of the comparison admits every miss"

        # Candidates are of one layer, and ascend.
        layer = int(candidates[0]) // self._experts
        experts = candidates - layer * self._experts
        next_uses = self._future.next_uses(self._step, layer, experts)
        of_victims = next_uses[np.searchsorted(candidates, chosen)]

        # Belady would take those that are used last; ties are as good.
        count = len(chosen)
        threshold = np.sort(next_uses)[-count]
        used_again = of_victims < self._future.never
        within_steps = of_victims - self._step <= SOON_STEPS
        self.evictions += count
        self.optimal += int((of_victims >= threshold).sum())
        self.soon += int((used_again & within_steps).sum())


def mean_delay(
    stays: Mapping[int, Sequence[tuple[int, int]]],
    belady: Mapping[int, Sequence[tuple[int, int]]],
) -> float | None:
    """Return how many steps, on average, experts overstay; None if none does.

    Args:
        stays: key -> (first, last step) of each finished stay.
        belady: the same under Belady.

    Source: see `moesim.analysis.learned_cache.CacheEvaluation.delay_steps`.
    """
    delays = []
    for key, of_expert in stays.items():
        belady_ends = [last for _, last in belady.get(key, ())]
        for first, last in of_expert:
            # Belady's first eviction of this expert since the stay began.
            row = bisect_left(belady_ends, first)
            if row < len(belady_ends) and belady_ends[row] < last:
                delays.append(last - belady_ends[row])
    return fmean(delays) if delays else None
