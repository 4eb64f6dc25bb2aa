"""Splits the misses of a cache beyond Belady's by which knowledge of the future is
missing.

Three caches of one size read the same accesses: the policy, a Belady that must admit
every fetched expert as the policy does, and a Belady that may decline. From the first
to the second only the choice of *victims* improves; from the second to the third only
the choice of *what to admit*. Neither choice can be made so without the future. What a
causal policy could win of it is not computable; what those at hand do win on this very
trace is, and is printed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from moesim.policies import cache_replay
from moesim.policies.delegating import DelegatingCache, context_for
from moesim.policies.registry import references, resolve
from moesim.traces.format.layer_steps import of_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from moesim.policies.base import CachePolicy
    from moesim.policies.run_context import Future, RunContext
    from moesim.policies.sizes import CacheSize
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

BELADY = "belady"
FORCED = "belady:must_admit=true"


class SameStart(DelegatingCache):
    """One policy's rules from another one's initial content."""

    def __init__(self, rule: CachePolicy, start_of: CachePolicy) -> None:
        super().__init__(rule)
        # Whatever the rules are, they must be given the future to hand it on.
        self.oracle = True  # type: ignore[misc] # for this pair of rules
        self.start_of = start_of
        self.needs = (*rule.needs, *start_of.needs)

    def start(self, context: RunContext) -> None:
        """Start both."""
        # Its random draws and calibration may decide what it begins with.
        self.start_of.start(context_for(self.start_of, context))
        super().start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Return what the other one would begin with."""
        return self.start_of.initial(capacity_slots)


@dataclass(frozen=True, slots=True)
class EvictionSplit:
    """Misses of a cache alone, every miss fetched and offered to it.

    Attributes:
        accesses: distinct active experts, summed over layer steps.
        misses: of the policy.
        forced: of Belady when every miss must enter.
        belady: of Belady when it may decline.
        causal: policy -> misses, for policies that see the past only.
    """

    accesses: int
    misses: int
    forced: int
    belady: int
    causal: dict[str, int]

    @property
    def gap(self) -> int:
        """Misses above Belady."""
        return self.misses - self.belady

    @property
    def victims(self) -> int:
        """Misses for want of knowing what to evict; negative if the policy itself
        declines admissions well.
        """
        return self.misses - self.forced

    @property
    def admissions(self) -> int:
        """Misses for want of knowing what not to admit."""
        return self.forced - self.belady

    @property
    def best_causal(self) -> str | None:
        """The causal policy with the fewest misses, chosen in hindsight."""

        def misses_then_name(name: str) -> tuple[int, str]:
            return self.causal[name], name

        return min(self.causal, key=misses_then_name, default=None)

    @property
    def won(self) -> int:
        """Misses that the best causal policy at hand would save; 0 if the policy under
        study is the best.
        """
        # In hindsight, which flatters the causal ones: none knows which will be best.
        fewest = min(self.causal.values(), default=self.misses)
        return max(0, self.misses - fewest)

    def to_json(self) -> dict[str, Any]:
        """Return counts, and shares of the gap; null where there is none."""
        counts = {
            "victims": self.victims,
            "admissions": self.admissions,
            "won_by_causal": self.won,
        }
        # A policy may match Belady; shares of nothing are not zero.
        shares = {
            f"{name}_share": count / self.gap if self.gap else None
            for name, count in counts.items()
        }
        return {
            "accesses": self.accesses,
            "misses": self.misses,
            "misses_forced": self.forced,
            "misses_belady": self.belady,
            "gap": self.gap,
            **shares,
            "best_causal": self.best_causal,
            "causal": self.causal,
        }


def split_eviction(
    cache: str,
    shape: ModelShape,
    size: CacheSize,
    passes: Callable[[], Iterable[RoutedStep]],
    future: Future,
    *,
    causal: Sequence[str] | None = None,
    seed: int = 0,
    calibration: np.ndarray | None = None,
    extras: Mapping[str, Any] | None = None,
) -> EvictionSplit | None:
    """Count the misses of a cache, and of both Beladys and causal policies from the
    same start.

    Args:
        cache: specification of the policy under study.
        shape: the model.
        size: of the cache.
        passes: gives the forward passes anew.
        future: of the same passes.
        causal: specifications to compare with; None for the registry's references.
        seed: for policies that draw.
        calibration: activation counts float64 [L, E] that may fill caches.
        extras: calibration artefacts by name.

    Returns:
        None where misses alone do not fill the cache: the policy replaces experts by
            its own clock.

    Raises:
        PolicyError: a policy answered something illegal.
    """
    # Copies that a cache asks for by its own clock are no misses; how many land in time
    # only a machine can tell.
    under_study = _resolved(cache)
    if under_study.replaces:
        return None
    if causal is None:
        causal = references("cache")

    def count(policy: CachePolicy, name: str) -> cache_replay.CacheCounts:
        return cache_replay.replay(
            policy,
            name,
            shape,
            size,
            of_steps(passes(), scores=True),
            future=future,
            seed=seed,
            calibration=calibration,
            extras=extras,
        )

    def misses_from_same_start(spec: str) -> int:
        # Fresh instances: a policy keeps its state from one run to the next.
        policy = SameStart(_resolved(spec), _resolved(cache))
        counts = count(policy, spec)
        return counts.accesses - counts.hits

    counts = count(under_study, cache)
    return EvictionSplit(
        accesses=counts.accesses,
        misses=counts.accesses - counts.hits,
        forced=misses_from_same_start(FORCED),
        belady=misses_from_same_start(BELADY),
        causal={name: misses_from_same_start(name) for name in causal},
    )


def _resolved(spec: str) -> CachePolicy:
    return cast("CachePolicy", resolve(spec, "cache"))
