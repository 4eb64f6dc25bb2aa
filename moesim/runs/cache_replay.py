"""Hits of a cache alone: every access of a trace, no machine and no time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from moesim.policies import cache_replay
from moesim.policies.systems import compose
from moesim.runs.artefacts import load_artefacts
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.setup import profile_of, refuse_arrivals, trace_of, warm_counts
from moesim.traces.format.batch import compose as compose_steps
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import layer_steps
from moesim.traces.synthetic.marks import synthetic_caveats

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.runs.memory import MemorySize
    from moesim.traces.format.reader import Trace


@takes_options(RunConfig)
def replay_cache(
    trace: RunConfig | str | Path | Trace,
    cache: str | None = None,
    *,
    memory: MemorySize | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Count the hits of a cache if every miss is fetched and offered to it.

    LRU and Belady run in a compiled loop; every other policy is asked step by step.

    Args:
        trace: a moesim trace, by path or opened; or a configuration, whose options
            those given here replace.
        cache: cache policy; None takes that of the configuration's policy, which is
            ``lru`` unless another one is named.
        memory: sizes in one object, instead of single options.
        options: fields of `moesim.runs.config.RunConfig`; those about time say nothing
            here.

    Raises:
        TypeError, ConfigError, TraceError, ProfileError, PolicyError: as
            `moesim.runs.replay.replay`.
    """
    begin_s = time.perf_counter()
    config = RunConfig.of(trace, memory=memory, **options)
    refuse_arrivals(config, "a cache alone")
    # A system names its cache; an assignment policy has that of every system, LRU.
    cache = cache or config.system.cache
    opened = trace_of(config)
    shape = opened.shape

    # On demand: every miss is fetched, so nothing but the cache decides.
    system = compose("on-demand", cache=cache)
    size = config.memory.plan(shape, profile_of(config.hw), system).gpu
    policy = system.build(gpus=1, host_cache=None).caches[0]
    opened.require(policy.needs, f"cache policy {cache!r}")

    walk: dict[str, Any] = {"batch": config.batch, "steps": config.steps}
    future = RecordedFuture.of(opened, **walk) if policy.oracle else None
    calibration = None if config.warm is None else warm_counts(config.warm, opened)
    # The compiled loops start empty and know no calibration.
    if calibration is None and cache_replay.has_compiled_loop(cache, shape, size):
        blocks = layer_steps(opened, **walk)
        counts = cache_replay.replay_compiled(cache, shape, size, blocks, future=future)
    else:
        counts = cache_replay.replay(
            policy,
            cache,
            shape,
            size,
            compose_steps(opened, **walk, columns=policy.needs),
            future=future,
            seed=config.seed,
            calibration=calibration,
            extras=load_artefacts(config.artefacts),
        )
    return {
        "cache": cache,
        "scope": size.scope,
        "cache_slots": size.slots.tolist(),
        "accesses": counts.accesses,
        "hits": counts.hits,
        "misses": counts.accesses - counts.hits,
        "hit_rate_active": counts.hit_rate,
        "hits_by_layer": counts.hits_by_layer.tolist(),
        "synthetic": synthetic_caveats(opened.header),
        "wall_s": time.perf_counter() - begin_s,
    }
