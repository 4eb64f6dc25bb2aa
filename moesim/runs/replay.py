"""Simulated runs: open a trace, replay it on the model of a machine.

Nothing here prints. `replay` sets up one run, walks the trace, and returns a `Run`
whose metrics, timeline and effective configuration say everything about it.
`replay_cache` counts the hits of its cache alone, without machine and time.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.units import format_bytes
from moesim.policies import cache_replay
from moesim.policies.base import PolicyError
from moesim.policies.faults import policy_faults
from moesim.policies.systems import compose
from moesim.runs.bound import replay_bound
from moesim.runs.clairvoyant import is_searched, searched
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.result import Run, save_run
from moesim.runs.setup import (
    Setup,
    begins,
    figures_of,
    load_artefacts,
    needed_columns,
    profile_of,
    refuse_arrivals,
    refuse_drafts,
    trace_of,
    warm_counts,
    watts,
)
from moesim.sim.replay import Replay
from moesim.traces.format.arrivals import (
    RequestSteps,
    arrival_times,
    parse_slo,
    request_figures,
)
from moesim.traces.format.batch import ends_in_prompt
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import layer_steps
from moesim.traces.synthetic.marks import synthetic_caveats
from moesim.traces.timeline.metrics import Summary, summarise
from moesim.traces.timeline.perfetto import write_perfetto
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moesim.engine.planner import Planner
    from moesim.sim.results import ReplayResult
    from moesim.traces.format.batch import LayerSteps, RoutedStep
    from moesim.traces.format.reader import Trace
    from moesim.traces.timeline.spans import Chunk

_SIZES_OF_EXPERTS = ("hidden", "expert_intermediate")


@takes_options(RunConfig)
def replay(
    trace: RunConfig | str | Path | Trace,
    policy: str | None = None,
    *,
    out: str | Path | None = None,
    perfetto: str | Path | None = None,
    keep: bool = True,
    bounded: bool = False,
    watch: Callable[[str, Chunk], None] | None = None,
    progress: Callable[[RoutedStep], None] | None = None,
    **options: Any,
) -> Run:
    """Replay a trace through a policy on a machine.

    Args:
        trace: a moesim trace, by path or opened; or a configuration, whose options
            those given here replace.
        policy: a system or an assignment policy, ``greedy`` if None; `cache`,
            `prefetch` and `routing` replace one part of it.
        out: folder for ``timeline.parquet``, ``accesses.parquet``, ``steps.parquet``
            and ``run.json``.
        perfetto: file for the Chrome-trace timeline.
        keep: keep the timeline in memory where it is not written to `out`; else it is
            empty, and memory does not grow with the length of the trace (unless
            `perfetto` needs it).
        bounded: also bound what any schedule could reach.
        watch: called with the name and each chunk of the three tables as they come,
            where the timeline is not kept.
        progress: called after each forward pass.
        options: fields of `moesim.runs.config.RunConfig`.

    Raises:
        TypeError: an unknown option.
        ConfigError: a value that does not fit its option.
        TraceError, ProfileError, PolicyError: bad input, in one line; nothing
            half-written stays behind.
        PolicyFault: a policy that is none of ours failed.
    """
    # Opening and setting up count: a user waits for them too.
    begin_s = time.perf_counter()
    config = RunConfig.of(trace, policy, **options)
    opened = trace_of(config)
    if is_searched(config):
        config = clairvoyant_rules(config.replaced(trace=opened))
    parse_slo(config.slo)
    setup = Setup.of(config, opened)
    profile = setup.profile
    with policy_faults():
        planner = setup.planner()
    bound = replay_bound(setup, opened, planner) if bounded else None
    started = begins(planner, setup.calibration)
    begun_bytes = _held_bytes(planner)

    # Figures that are summed up on the way need no timeline in memory.
    summary = None
    if not keep and out is None and perfetto is None:
        summary = Summary(profile.lanes)
    timeline = Timeline(profile.lanes, out, sink=_sink(summary, watch))
    try:
        with policy_faults():
            result, requests = simulated(setup, opened, planner, timeline, progress)
        timeline.close()
    except BaseException:
        # An interrupt too must not leave half-written tables behind.
        timeline.discard()
        raise

    metrics = _metrics(setup, opened, summary or timeline, requests)
    metrics |= figures_of(planner)
    metrics |= {
        "steps": result.steps,
        "layer_steps": result.layer_steps,
        "events": result.events,
        "wall_s": time.perf_counter() - begin_s,
    }
    copied_bytes = sum(n for lane, n in metrics["bytes"].items() if "h2d" in lane)
    filled_bytes = _held_bytes(planner) - begun_bytes
    metrics["filling_share"] = filled_bytes / copied_bytes if copied_bytes else None

    # It needs the spans, so it comes before they are dropped.
    if perfetto is not None:
        write_perfetto(perfetto, {"simulated": timeline})
    if not keep and out is None:
        timeline = Timeline(profile.lanes)

    warnings = synthetic_caveats(opened.header)
    warnings += _warnings(setup, planner, metrics)
    warnings += planner.policies.remarks()
    effective = setup.effective_config(opened) | {"begins": started}
    effective["engine"] = "simpy" if config.engine == "simpy" else "fast"
    run = Run(metrics, timeline, effective, warnings, bound=bound)
    if out is not None:
        save_run(run, Path(out))
    return run


def _held_bytes(planner: Planner) -> int:
    """Most bytes of experts that the caches of the GPUs have held so far."""
    return sum(memory.used_high_bytes for memory in planner.gpu)


def simulated(
    setup: Setup,
    trace: Trace,
    planner: Planner,
    timeline: Timeline,
    progress: Callable[[RoutedStep], None] | None = None,
) -> tuple[ReplayResult, RequestSteps | None]:
    """Simulate every forward pass; the requests too, where they arrive one by one."""
    config = setup.config
    clock: dict[str, Any] = {}
    if config.engine == "simpy":
        # Imported where it runs; both clocks give the same results to the last bit.
        from moesim.sim.simpy_clock import SimpyClock  # noqa: PLC0415 - see above

        clock = {"clock": SimpyClock}
    simulation = Replay(setup.profile, planner, timeline, **clock)
    if config.arrivals is None:
        return simulation.run(_blocks(trace, planner, config), progress), None
    requests = _requests(setup, trace, planner, simulation)
    return simulation.run(requests.steps(config.steps), progress), requests


MOST_KEPT_ROWS = 1 << 16
"""Rows of a trace whose blocks are kept for the next run: about ten megabytes."""


def _blocks(trace: Trace, planner: Planner, config: RunConfig) -> Iterable[LayerSteps]:
    """What a run reads of a trace."""
    reads = planner.reads
    blocks = layer_steps(trace, batch=config.batch, steps=config.steps, **reads)
    if reads["columns"] or reads["routing"] or trace.rows > MOST_KEPT_ROWS:
        return blocks
    # Runs of a sweep differ in policies and machines far more often than in this.
    cut = (trace.passes, config.batch, config.steps)
    if cut not in trace.last_cut:
        kept = list(blocks)
        trace.last_cut.clear()
        trace.last_cut[cut] = kept
    return trace.last_cut[cut]


def _metrics(
    setup: Setup,
    trace: Trace,
    recorded: Summary | Timeline,
    requests: RequestSteps | None,
) -> dict[str, Any]:
    """Figures of a timeline, or of what was summed up on the way; of requests, too,
    where they arrived one by one.
    """
    config = setup.config
    power = watts(setup.profile)
    is_cut = requests is None and ends_in_prompt(
        trace, batch=config.batch, steps=config.steps
    )
    if isinstance(recorded, Summary):
        metrics = recorded.figures(power, ends_in_prompt=is_cut)
    else:
        metrics = summarise(recorded, power=power, ends_in_prompt=is_cut)
    metrics["requests"] = None
    if requests is not None:
        limits = parse_slo(config.slo)
        served = request_figures(requests.requests, limits, metrics["makespan_s"])
        # What a user waits for begins when the request arrives.
        metrics |= {name: served[name] for name in metrics.keys() & served.keys()}
        metrics["requests"] = served
    return metrics


def clairvoyant_rules(config: RunConfig) -> RunConfig:
    """The run with the rules of the clairvoyant system that make it shortest."""
    trace = trace_of(config)
    # Most rules are oracles, and making what they foresee reads the trace.
    future = RecordedFuture.of(trace, batch=config.batch, steps=config.steps)

    def makespan_s(trial: RunConfig) -> float:
        same_passes = trial.passes == config.passes
        walked = trace if same_passes else trace_of(trial)
        setup = Setup.of(trial, walked, future=future if same_passes else None)
        timeline = Timeline(setup.profile.lanes, sink=lambda _table, _chunk: None)
        result, _ = simulated(setup, walked, setup.planner(), timeline)
        timeline.close()
        return result.makespan_s

    return searched(config, makespan_s)


def _requests(
    setup: Setup, trace: Trace, planner: Planner, simulation: Replay
) -> RequestSteps:
    """Steps of a batch that is formed as requests come.

    Raises:
        PolicyError: a policy that sees the future, which depends on who comes when.
        TraceError: no such arrivals.
        ConfigError: drafts.
    """
    config = setup.config
    if setup.future is not None:
        raise PolicyError(
            "arrivals: expected policies that see the past only, since steps depend on"
            f" who comes when; {config.policy} sees the future"
        )
    refuse_drafts(config, "a batch that is formed as requests come")
    return RequestSteps(
        trace,
        arrival_times(str(config.arrivals), config.seed),
        batch=config.batch,
        columns=needed_columns(planner.policies),
        clock=lambda: simulation.clock.now_s,
    )


def share_of(
    config: RunConfig, progress: Callable[[float], None]
) -> Callable[[RoutedStep], None]:
    """Return what a replay calls after each step to report the share of it that is
    done.
    """
    trace = trace_of(config)
    layers = trace.shape.layers
    total = config.steps or max(1, trace.rows)
    done = 0

    def after(step: RoutedStep) -> None:
        nonlocal done
        # How many steps a trace has is known only after composing it.
        done += 1 if config.steps else step.tokens * layers
        progress(min(1.0, done / total))

    return after


def _sink(
    summary: Summary | None, watch: Callable[[str, Chunk], None] | None
) -> Callable[[str, Chunk], None] | None:
    """Return what takes a timeline's chunks in place of memory; None keeps them."""
    if summary is None or watch is None:
        return None if summary is None else summary.add

    def both(table: str, chunk: Chunk) -> None:
        summary.add(table, chunk)
        watch(table, chunk)

    return both


def _memory_warnings(setup: Setup) -> list[str]:
    """List what is odd about the sizes of memories."""
    shape = setup.shape
    profile = setup.profile
    warnings = []
    # A quarter was nobody's wish, and nobody would offload such a model.
    if setup.fits_card():
        warnings.append(
            "the card would hold all experts, and caches a quarter of them: state"
            " --gpu-memory or --cache-ratio"
        )
    gpu_bytes = setup.gpu_bytes()
    if gpu_bytes > profile.memory.gpu_bytes:
        warnings.append(
            f"more than the card has: cache and the rest of the model take"
            f" {format_bytes(gpu_bytes)} of GPU memory, {profile.name} has"
            f" {format_bytes(profile.memory.gpu_bytes)}"
        )
    host_bytes = shape.routed_bytes
    # Nobody asks host memory for what never leaves a GPU.
    if setup.system.keeps_residents:
        host_bytes -= setup.cache.total_bytes
    if setup.memory.host is None and host_bytes > profile.memory.host_bytes:
        warnings.append(
            "the experts exceed this machine's host memory: use --host-memory to read"
            " from its SSD"
        )
    return warnings


def _warnings(setup: Setup, planner: Planner, metrics: dict[str, Any]) -> list[str]:
    """List what a reader of the figures should know."""
    shape = setup.shape
    profile = setup.profile
    plan = setup.memory
    warnings = []

    config = setup.config
    if config.draft_tokens is None and config.batch > 1 and setup.system.draft_tokens:
        warnings.append(
            f"{config.policy} drafts tokens for one sequence at a time: this batch of"
            f" {config.batch} is decoded without drafts"
        )

    warnings += _memory_warnings(setup)
    # Bytes beside the experts rest on a rule in almost every shape; run.json says so.
    if guessed := [name for name in shape.assumed if name in _SIZES_OF_EXPERTS]:
        warnings.append(
            f"model shape {shape.name}: stated defaults for {', '.join(guessed)}"
        )
    extrapolated = planner.costs.extrapolated
    if extrapolated:
        warnings.append(
            f"profile {profile.name}: extrapolated by bytes and FLOPs:"
            f" {', '.join(extrapolated)}"
        )
    if metrics["steps"] == 0:
        warnings.append("nothing was replayed")

    ever_filled = any(
        high_bytes
        for memory, high_bytes in metrics["memory_high_bytes"].items()
        if memory.startswith("gpu")
    )
    # An empty cache is no surprise where nothing could have filled or used it.
    could_fill = plan.gpu.total_bytes and planner.policies.assignment.places_on_gpu
    if could_fill and metrics["misses"] and not ever_filled:
        warnings.append(
            f"the GPU cache stayed empty: it starts so, and {setup.system.assignment}"
            f" with {setup.system.cache} never found a copy worth its time; fill it"
            " with --warm TRACE, or let a prefetch or another cache policy do so"
        )
    return warnings


@takes_options(RunConfig)
def replay_cache(
    trace: RunConfig | str | Path | Trace,
    cache: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Count the hits of a cache if every miss is fetched and offered to it.

    Args:
        trace: a moesim trace, by path or opened; or a configuration, whose options
            those given here replace.
        cache: cache policy; None takes that of the configuration's policy, which is
            ``lru`` unless another one is named.
        options: fields of `moesim.runs.config.RunConfig`; those about time say nothing
            here.

    Raises:
        TypeError, ConfigError, TraceError, ProfileError, PolicyError: as
            `moesim.runs.replay.replay`.
    """
    begin_s = time.perf_counter()
    config = RunConfig.of(trace, **options)
    refuse_arrivals(config, "a cache alone")
    # A system names its cache; an assignment policy has that of every system, LRU.
    cache = cache or config.system.cache
    opened = trace_of(config)
    shape = opened.shape

    # On demand: every miss is fetched, so nothing but the cache decides.
    system = compose("on-demand", cache=cache)
    setup = Setup(config, shape, profile_of(config.hw), system)
    size = setup.memory.gpu
    policy = system.build(gpus=1, host_cache=None).caches[0]
    opened.require(policy.needs, f"cache policy {cache!r}")

    walk: dict[str, Any] = {"batch": config.batch, "steps": config.steps}
    future = RecordedFuture.of(opened, **walk) if policy.oracle else None
    calibration = None
    if config.warm is not None:
        calibration = warm_counts(config.warm, opened.shape, f"in {opened.path}")
    counts = cache_replay.replay(
        policy,
        cache,
        shape,
        size,
        layer_steps(opened, **walk, columns=policy.needs, tokens=policy.reads_tokens),
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
