"""Caches driven alone, as several experiments need them: every miss is fetched and
offered to the cache, and no time passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from moesim.policies import cache_replay
from moesim.policies.planner.residency import CacheSize
from moesim.policies.registry import resolve
from moesim.traces.format.layer_steps import layer_steps

if TYPE_CHECKING:
    from moesim.policies.base import CachePolicy
    from moesim.policies.cache_replay import CacheCounts
    from moesim.reproduction.experiments.base import Excerpt


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

    # The compiled loops know policies by name and cannot call an object.
    if policy is None and cache_replay.has_compiled_loop(spec, excerpt.shape, size):
        blocks = layer_steps(excerpt.trace, steps=excerpt.most_steps)
        return cache_replay.replay_compiled(
            spec, excerpt.shape, size, blocks, future=future
        )
    return cache_replay.replay(
        policy or named,
        spec,
        excerpt.shape,
        size,
        excerpt.passes(*named.needs),
        future=future,
        seed=excerpt.seed,
    )
