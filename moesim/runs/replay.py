"""The functions that the command line and notebooks share: open a trace, replay it.

Nothing here prints. `replay` sets up one run (profile, costs, policies, memory), walks
the trace, and returns a `Run` whose metrics, timeline and effective configuration say
everything about it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.policies import cache_replay
from moesim.policies.systems import compose
from moesim.runs.artefacts import load_artefacts
from moesim.runs.memory import MemoryOptions
from moesim.runs.result import Run, save_run
from moesim.runs.setup import (
    Setup,
    activation_counts,
    check_needs,
    figures_of,
    needed_columns,
    profile_of,
    warm_counts,
    watts,
)
from moesim.sim.replay import Replay
from moesim.traces.format.batch import compose as compose_steps
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import layer_steps
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.timeline.metrics import Summary, summarise
from moesim.traces.timeline.perfetto import write_perfetto
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.batch import RoutedStep

__all__ = [
    "MemoryOptions",
    "Run",
    "activation_counts",
    "cache_of",
    "check_needs",
    "needed_columns",
    "profile_of",
    "replay",
    "replay_cache",
    "warm_counts",
    "watts",
]


def replay(
    trace: str | Path | Trace,
    policy: str = "greedy",
    *,
    cache: str | None = None,
    prefetch: str | None = None,
    routing: str | None = None,
    host_cache: str = "lru",
    hw: str | Path | HardwareProfile | None = None,
    memory: MemoryOptions | None = None,
    batch: int = 1,
    steps: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    warm: str | Path | Trace | None = None,
    artefacts: str | Path | None = None,
    out: str | Path | None = None,
    perfetto: str | Path | None = None,
    keep: bool = True,
    progress: Callable[[RoutedStep], None] | None = None,
) -> Run:
    """Replay a trace through a policy on a machine.

    Args:
        trace: a moesim trace, by path or opened.
        policy: a system or an assignment policy; `cache`, `prefetch` and `routing`
            replace one part of it.
        host_cache: cache policy of host memory, used only where that is limited.
        hw: hardware profile by name, path or itself.
        memory: sizes of caches and staging.
        batch: sequences that run together.
        steps: keep the first so many forward passes.
        seed: for policies that draw.
        noise_seed: draw operation times from the profile's measured distributions; None
            takes the means.
        warm: calibration trace from which policies may fill the cache before the run.
        artefacts: folder of calibration artefacts, such as the network that ``moesim
            train-cache`` writes.
        out: folder for ``timeline.parquet``, ``accesses.parquet``, ``steps.parquet``
            and ``run.json``.
        perfetto: file for the Chrome-trace timeline.
        keep: keep the timeline in memory where it is not written to `out`; else it is
            empty, and memory does not grow with the length of the trace (unless
            `perfetto` needs it).
        progress: called after each forward pass.

    Raises:
        TraceError, ProfileError, PolicyError: bad input, in one line; nothing
            half-written stays behind.
    """
    begin_s = time.perf_counter()
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    profile = profile_of(hw)
    setup = Setup.of(
        opened,
        policy,
        profile,
        cache=cache,
        prefetch=prefetch,
        routing=routing,
        host_cache=host_cache,
        memory=memory,
        batch=batch,
        steps=steps,
        seed=seed,
        warm=warm,
        artefacts=artefacts,
    )
    planner = setup.planner()
    summary = (
        None
        if keep or out is not None or perfetto is not None
        else Summary(profile.lanes)
    )
    timeline = Timeline(
        profile.lanes, out, sink=None if summary is None else summary.add
    )
    try:
        result = Replay(
            profile, planner.costs, planner, timeline, noise_seed=noise_seed
        ).run(
            compose_steps(
                opened,
                batch=batch,
                steps=steps,
                columns=needed_columns(planner.policies),
            ),
            progress,
        )
        timeline.close()
    except BaseException:
        timeline.discard()
        raise
    figures = (
        summarise(timeline, power=watts(profile))
        if summary is None
        else summary.figures(watts(profile))
    )
    metrics = figures | figures_of(planner)
    metrics |= {
        "steps": result.steps,
        "layer_steps": result.layer_steps,
        "events": result.events,
    }
    metrics["wall_s"] = time.perf_counter() - begin_s
    if perfetto is not None:
        write_perfetto(perfetto, {"simulated": timeline})
    if not keep and out is None:
        timeline = Timeline(profile.lanes)
    config = setup.config(opened, batch=batch, steps=steps, warm=warm) | {
        "noise_seed": noise_seed
    }
    run = Run(
        metrics,
        timeline,
        config,
        _warnings(setup, planner.costs.extrapolated, metrics, noise_seed),
    )
    if out is not None:
        save_run(run, Path(out))
    return run


def replay_cache(
    trace: str | Path | Trace,
    cache: str = "lru",
    *,
    memory: MemoryOptions | None = None,
    hw: str | Path | HardwareProfile | None = None,
    batch: int = 1,
    steps: int | None = None,
    seed: int = 0,
    warm: str | Path | Trace | None = None,
    artefacts: str | Path | None = None,
) -> dict[str, Any]:
    """Hits of a cache alone: every miss is fetched and offered to it; no machine, no
    time.

    LRU and Belady run in a compiled loop; every other policy is asked step by step.

    Raises:
        TraceError, ProfileError, PolicyError: as `replay`.
    """
    begin_s = time.perf_counter()
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    shape = opened.shape
    system = compose("on-demand", cache=cache)
    size = (memory or MemoryOptions()).plan(shape, profile_of(hw), system).gpu
    policy = system.build(gpus=1, host_cache=None).caches[0]
    opened.require(policy.needs, f"cache policy {cache!r}")
    future = (
        RecordedFuture.of(opened, batch=batch, steps=steps) if policy.oracle else None
    )
    calibration = None if warm is None else warm_counts(warm, opened)
    if calibration is None and cache_replay.has_compiled_loop(cache, shape, size):
        blocks = layer_steps(opened, batch=batch, steps=steps)
        counts = cache_replay.replay_compiled(cache, shape, size, blocks, future=future)
    else:
        passes = compose_steps(opened, batch=batch, steps=steps, columns=policy.needs)
        extras = load_artefacts(artefacts)
        counts = cache_replay.replay(
            policy,
            cache,
            shape,
            size,
            passes,
            future=future,
            seed=seed,
            calibration=calibration,
            extras=extras,
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
        "wall_s": time.perf_counter() - begin_s,
    }


def cache_of(policy: str) -> str:
    """The cache policy of a system, or the default one of an assignment policy."""
    return compose(policy).cache


def _warnings(
    setup: Setup,
    extrapolated: Sequence[str],
    metrics: dict[str, Any],
    noise_seed: int | None,
) -> list[str]:
    """What a reader of the figures should know."""
    shape = setup.shape
    profile = setup.profile
    plan = setup.memory
    found = []
    scattered = any(
        [
            *(one.quantiles for one in profile.numbers.values()),
            *(one.quantiles for one in profile.curves.values()),
        ]
    )
    if noise_seed is not None and not scattered:
        found.append(
            f"--noise-seed: nothing was drawn, since profile {profile.name} knows no"
            " distributions; `moesim calibrate` measures those of this machine"
        )
    if setup.gpu_bytes() > profile.memory.gpu_bytes:
        found.append(
            f"this cache needs {setup.gpu_bytes() / 2**30:.1f} GiB of GPU memory with"
            f" the rest of the model; {profile.name} has"
            f" {profile.memory.gpu_bytes / 2**30:.1f} GiB: --gpu-memory sizes it to the"
            " machine"
        )
    if (
        plan.host is None
        and sum(shape.expert_bytes) * shape.experts > profile.memory.host_bytes
    ):
        found.append(
            "the experts exceed this machine's host memory: use --host-memory to read"
            " from its SSD"
        )
    if shape.assumed:
        found.append(
            f"model shape {shape.name}: stated defaults for {', '.join(shape.assumed)}"
        )
    if extrapolated:
        found.append(
            f"profile {profile.name}: extrapolated by bytes and FLOPs:"
            f" {', '.join(extrapolated)}"
        )
    if metrics["steps"] == 0:
        found.append("nothing was replayed")
    held = any(
        count
        for memory, count in metrics["memory_high_bytes"].items()
        if memory.startswith("gpu")
    )
    if metrics["misses"] and not held and plan.gpu.total_bytes:
        found.append(
            f"the GPU cache stayed empty: it starts so, and {setup.system.assignment}"
            f" with {setup.system.cache} never found a copy worth its time; fill it"
            " with --warm TRACE, or let a prefetch or another cache policy do so"
        )
    return found
