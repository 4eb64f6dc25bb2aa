"""How many misses of a cache are due to not knowing the future, and which knowledge is
missing?

Three caches of one size read the same accesses: the policy, a Belady that must admit
every fetched expert as the policy does, and a Belady that may decline. From the first
to the second only the choice of *victims* improves; from the second to the third only
the choice of *whom to admit*. Neither choice can be made so without the future. What a
causal policy could win of it is not computable; what those at hand do win on this very
trace is, and is printed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from moesim.policies import cache_replay
from moesim.policies.base import CachePolicy
from moesim.policies.registry import references, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from moesim.policies.base import Future, LayerWork, MachineView, RunContext, Swap
    from moesim.policies.planner.residency import CacheSize
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

BELADY = "belady"
FORCED = "belady:must_admit=true"


class Wrapped(CachePolicy):
    """A cache policy that passes every question on to `rule`; subclasses change one of
    them.
    """

    oracle: ClassVar[bool] = True

    def __init__(self, rule: CachePolicy) -> None:
        self.rule = rule
        self.needs = rule.needs

    def start(self, context: RunContext) -> None:
        """Start the rule; only an oracle gets the future."""
        self.rule.start(context if self.rule.oracle else replace(context, future=None))

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """As the rule says."""
        return self.rule.initial(capacity_slots)

    def accessed(self, work: LayerWork) -> None:
        """As the rule says."""
        self.rule.accessed(work)

    def admits(self, work: LayerWork, incoming: np.ndarray) -> np.ndarray:
        """As the rule says."""
        return self.rule.admits(work, incoming)

    def precedence(self, incoming: np.ndarray) -> np.ndarray:
        """As the rule says."""
        return self.rule.precedence(incoming)

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """As the rule says."""
        return self.rule.victims(incoming, candidates)

    def admitted(self, keys: np.ndarray) -> None:
        """As the rule says."""
        self.rule.admitted(keys)

    def evicted(self, keys: np.ndarray) -> None:
        """As the rule says."""
        self.rule.evicted(keys)

    def exposed_s(self, load_s: float) -> float:
        """As the rule says."""
        return self.rule.exposed_s(load_s)

    def replacements(self, work: LayerWork, view: MachineView) -> Sequence[Swap]:
        """As the rule says."""
        return self.rule.replacements(work, view)


class SameStart(Wrapped):
    """One policy's rules from another one's initial content."""

    def __init__(self, rule: CachePolicy, start_of: CachePolicy) -> None:
        super().__init__(rule)
        self.start_of = start_of
        self.needs = (*rule.needs, *start_of.needs)

    def start(self, context: RunContext) -> None:
        """Start both."""
        self.start_of.start(
            context if self.start_of.oracle else replace(context, future=None)
        )
        super().start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """What the other one would begin with."""
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
        """Misses for want of knowing whom to evict; negative if the policy itself
        declines admissions well.
        """
        return self.misses - self.forced

    @property
    def admissions(self) -> int:
        """Misses for want of knowing whom not to admit."""
        return self.forced - self.belady

    @property
    def best_causal(self) -> str | None:
        """The causal policy with the fewest misses, chosen in hindsight."""
        return min(
            self.causal, key=lambda name: (self.causal[name], name), default=None
        )

    @property
    def won(self) -> int:
        """Misses that the best causal policy at hand would save; 0 if the policy under
        study is the best.
        """
        return max(0, self.misses - min(self.causal.values(), default=self.misses))

    def to_json(self) -> dict[str, Any]:
        """Counts, and shares of the gap; null where there is none."""
        shares = {
            "victims": self.victims,
            "admissions": self.admissions,
            "won_by_causal": self.won,
        }
        return {
            "accesses": self.accesses,
            "misses": self.misses,
            "misses_forced": self.forced,
            "misses_belady": self.belady,
            "gap": self.gap,
            **{
                f"{name}_share": count / self.gap if self.gap else None
                for name, count in shares.items()
            },
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
        None where a cache alone says nothing: the policy swaps by its own clock instead
            of admitting misses.

    Raises:
        PolicyError: a policy answered something illegal.
    """
    own = cast("CachePolicy", resolve(cache, "cache"))
    if own.replaces:
        return None
    if causal is None:
        causal = references("cache")

    def counted(policy: CachePolicy, name: str) -> cache_replay.CacheCounts:
        return cache_replay.replay(
            policy,
            name,
            shape,
            size,
            passes(),
            future=future,
            seed=seed,
            calibration=calibration,
            extras=extras,
        )

    def misses(policy: CachePolicy, name: str) -> int:
        found = counted(policy, name)
        return found.accesses - found.hits

    def like(spec: str) -> CachePolicy:
        return SameStart(
            cast("CachePolicy", resolve(spec, "cache")),
            cast("CachePolicy", resolve(cache, "cache")),
        )

    found = counted(own, cache)
    return EvictionSplit(
        accesses=found.accesses,
        misses=found.accesses - found.hits,
        forced=misses(like(FORCED), FORCED),
        belady=misses(like(BELADY), BELADY),
        causal={name: misses(like(name), name) for name in causal},
    )
