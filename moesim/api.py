"""The functions that the command line and notebooks share: open, replay, compare.

Nothing here prints. `replay` sets up one run (profile, costs, policies, memory), walks the trace, and
returns a `Run` whose metrics, timeline and effective configuration say everything about it.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwprofiles.costs import Costs
from hwprofiles.profile import HardwareProfile, default_profile, load_profile
from moesim.artefacts import load_artefacts
from moesim.memory import MemoryOptions
from policies import cache_only
from policies.base import PolicyError
from policies.plan import LAYERS
from policies.planner import Planner
from policies.systems import System, compose
from sim.replay import Replay, ReplayResult
from traces.batch import compose as compose_steps
from traces.future import RecordedFuture
from traces.metrics import summarise
from traces.perfetto import write_perfetto
from traces.reader import Trace, open_trace
from traces.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

    from policies.plan import MemoryPlan, Policies
    from traces.batch import RoutedStep

__all__ = [
    "MemoryOptions",
    "Run",
    "activation_counts",
    "cache_of",
    "check_needs",
    "compare",
    "config_of",
    "folder_name",
    "needed_columns",
    "profile_of",
    "replay",
    "replay_cache",
    "warm_counts",
    "watts",
]


@dataclass(slots=True)
class Run:
    """One finished replay.

    Attributes:
        metrics: every figure, as `moesim replay --json` prints it; keys are explained in `traces.metrics`.
        timeline: spans, accesses and steps.
        config: the effective configuration, digests included.
        warnings: what a reader of the figures should know.
    """

    metrics: dict[str, Any]
    timeline: Timeline
    config: dict[str, Any]
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """One object with metrics, configuration and warnings."""
        return {**self.metrics, "config": self.config, "warnings": self.warnings}


def profile_of(hw: str | Path | HardwareProfile | None) -> HardwareProfile:
    """A profile by name, path or itself; None takes the default (see `hwprofiles.profile.default_profile`)."""
    if hw is None:
        return default_profile()
    return hw if isinstance(hw, HardwareProfile) else load_profile(hw)


def needed_columns(policies: Policies) -> tuple[str, ...]:
    """Optional trace columns that some policy of a run reads."""
    return tuple(dict.fromkeys(column for policy in policies.all() for column in policy.needs))


def check_needs(trace: Trace, policies: Policies) -> None:
    """Refuse, before anything runs, a policy whose column the trace lacks.

    Raises:
        TraceError: naming policy and column.
    """
    for kind, policy in (
        ("assignment", policies.assignment),
        ("prefetch", policies.prefetch),
        ("cache", policies.caches[0]),
        ("routing", policies.routing),
    ):
        trace.require(policy.needs, f"{kind} policy {policies.names.get(kind)!r}")


def activation_counts(trace: Trace, *, phase: int | None = None) -> np.ndarray:
    """How often each expert was chosen, float64 [L, E]: what ``--warm`` fills caches from."""
    shape = trace.shape
    counts = np.zeros(shape.layers * shape.experts)
    for rows in trace.sequences():
        chosen = rows.experts.astype(np.int64) + rows.layer.astype(np.int64)[:, None] * shape.experts
        if phase is not None:
            chosen = chosen[rows.phase == phase]
        counts += np.bincount(chosen.ravel(), minlength=len(counts))
    return counts.reshape(shape.layers, shape.experts)


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
    progress: Callable[[RoutedStep], None] | None = None,
) -> Run:
    """Replay a trace through a policy on a machine.

    Args:
        trace: a moesim trace, by path or opened.
        policy: a system or an assignment policy; `cache`, `prefetch` and `routing` replace one part of it.
        host_cache: cache policy of host memory, used only where that is limited.
        hw: hardware profile by name, path or itself.
        memory: sizes of caches and staging.
        batch: sequences that run together.
        steps: keep the first so many forward passes.
        seed: for policies that draw.
        noise_seed: draw operation times from the profile's measured distributions; None takes the means.
        warm: calibration trace from which policies may fill the cache before the run.
        artefacts: folder of calibration artefacts, such as the network that ``moesim train-cache`` writes.
        out: folder for ``timeline.parquet``, ``accesses.parquet`` and ``steps.parquet``.
        perfetto: file for the Chrome-trace timeline.
        progress: called after each forward pass.

    Raises:
        TraceError, ProfileError, PolicyError: bad input, in one line; nothing half-written stays behind.
    """
    begin_s = time.perf_counter()
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    profile = profile_of(hw)
    system = compose(policy, cache=cache, prefetch=prefetch, routing=routing)
    options = memory or MemoryOptions()
    plan = options.plan(opened.shape, profile, system)
    policies = system.build(gpus=profile.gpus, host_cache=host_cache if plan.host is not None else None)
    check_needs(opened, policies)
    calibration = None if warm is None else warm_counts(warm, opened)
    oracle = any(p.oracle for p in policies.all())
    future = RecordedFuture.of(opened, batch=batch, steps=steps) if oracle else None
    costs = Costs(profile, opened.shape)
    extras = load_artefacts(artefacts)
    planner = Planner(
        opened.shape, costs, policies, plan, seed=seed, future=future, calibration=calibration, extras=extras
    )
    timeline = Timeline(profile.lanes, None if out is None else Path(out))
    try:
        result = Replay(profile, costs, planner, timeline, noise_seed=noise_seed).run(
            compose_steps(opened, batch=batch, steps=steps, columns=needed_columns(policies)), progress
        )
        timeline.close()
    except BaseException:
        timeline.discard()
        raise
    metrics = summarise(timeline, power=watts(profile))
    metrics["routing"] = "altered" if policies.routing.alters else "recorded"
    metrics["approximate"] = policies.assignment.approximates
    metrics["gate_mass_kept"] = float(np.mean(planner.gate_mass)) if planner.gate_mass else None
    metrics["memory_high_bytes"] = {
        **{f"gpu{g}": tier.memory.used_high_bytes for g, tier in enumerate(planner.gpu)},
        **({"host": planner.host.memory.used_high_bytes} if planner.host else {}),
    }
    metrics |= {"steps": result.steps, "layer_steps": result.layer_steps, "events": result.events}
    metrics["wall_s"] = time.perf_counter() - begin_s
    if perfetto is not None:
        write_perfetto(perfetto, {"simulated": timeline})
    config = config_of(opened, profile, system, options, plan, batch=batch, steps=steps, seed=seed, warm=warm)
    config["artefacts"] = None if artefacts is None else str(artefacts)
    warnings = _warnings(opened, profile, costs, plan, result)
    if metrics["misses"] and not any(tier.memory.used_high_bytes for tier in planner.gpu) and plan.gpu.total_bytes:
        warnings.append(
            f"the GPU cache stayed empty: it starts so, and {system.assignment} with {system.cache} never found a copy"
            " worth its time; fill it with --warm TRACE, or let a prefetch or another cache policy do so"
        )
    return Run(metrics, timeline, config, warnings)


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
    """Hits of a cache alone: every miss is fetched and offered to it; no machine, no time.

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
    future = RecordedFuture.of(opened, batch=batch, steps=steps) if policy.oracle else None
    calibration = None if warm is None else warm_counts(warm, opened)
    passes = compose_steps(opened, batch=batch, steps=steps, columns=policy.needs)
    if calibration is None and cache_only.has_compiled_loop(cache, shape, size):
        counts = cache_only.replay_compiled(cache, shape, size, passes, future=future)
    else:
        extras = load_artefacts(artefacts)
        counts = cache_only.drive(
            policy, cache, shape, size, passes, future=future, seed=seed, calibration=calibration, extras=extras
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


def compare(
    trace: str | Path | Trace, policies: Sequence[str], *, out: str | Path | None = None, **options: Any
) -> tuple[pd.DataFrame, dict[str, Run]]:
    """Replay one trace under several policies; see `replay` for the options.

    A policy may be written ``greedy+lru+residual``: assignment or system, then cache, then prefetch. With `out`, each
    run has a folder of its own below it, named after its policy.

    Returns:
        A table with one row per policy (fastest decode first, then prefill), and the runs by policy.
    """
    import pandas as pd  # noqa: PLC0415 - half a second that a plain replay need not pay

    runs: dict[str, Run] = {}
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    for name in dict.fromkeys(policies):
        policy, *parts = name.split("+")
        given = dict(zip(("cache", "prefetch"), parts, strict=False))
        if len(parts) > 2:
            raise PolicyError(f"policy {name!r}: expected at most assignment+cache+prefetch")
        folder = None if out is None else Path(out) / folder_name(name)
        runs[name] = replay(opened, policy, out=folder, **{**options, **given})
    columns = ("tpot_s", "decode_tokens_per_s", "ttft_s", "prefill_tokens_per_s", "hit_rate_active", "makespan_s")
    table = pd.DataFrame({name: {c: run.metrics[c] for c in columns} for name, run in runs.items()}).T
    table.insert(0, "policy", table.index)
    for link in ("h2d", "ssd"):
        table[f"{link}_bytes"] = [
            sum(count for lane, count in run.metrics["bytes"].items() if lane.startswith(link)) for run in runs.values()
        ]
    return table.sort_values("makespan_s").reset_index(drop=True), runs


def folder_name(policy: str) -> str:
    """A name for the folder of a policy's run: ``greedy+lfu:decay=0.9`` -> ``greedy+lfu_decay=0.9``."""
    return re.sub(r"[^\w.+=,-]+", "_", policy).strip("._") or "run"


def warm_counts(warm: str | Path | Trace, trace: Trace) -> np.ndarray:
    """`activation_counts` of a calibration trace, float64 [L, E].

    Raises:
        TraceError: no such trace.
        PolicyError: it has other layers or experts than `trace`.
    """
    calibration = warm if isinstance(warm, Trace) else open_trace(warm)
    if (calibration.shape.layers, calibration.shape.experts) != (trace.shape.layers, trace.shape.experts):
        raise PolicyError(
            f"--warm {calibration.path}: expected {trace.shape.layers} layers x {trace.shape.experts} experts as in"
            f" {trace.path}, found {calibration.shape.layers} x {calibration.shape.experts}; record it from that model"
        )
    return activation_counts(calibration)


def config_of(
    trace: Trace,
    profile: HardwareProfile,
    system: System,
    options: MemoryOptions,
    plan: MemoryPlan,
    *,
    batch: int,
    steps: int | None,
    seed: int,
    warm: str | Path | Trace | None,
) -> dict[str, Any]:
    """The effective configuration of a run of `trace`, as results store it; arguments as those of `replay`."""
    shape = trace.shape
    return {
        "trace": str(trace.path),
        "trace_digest": trace.digest(),
        "model": shape.name,
        "hw": profile.name,
        "hw_kind": profile.kind,
        "hw_digest": profile.digest,
        "assignment": system.assignment,
        "cache": system.cache,
        "prefetch": system.prefetch,
        "routing": system.routing,
        "cache_scope": plan.gpu.scope,
        "cache_slots": plan.gpu.slots.tolist(),
        "cache_bytes": plan.gpu.total_bytes,
        "cache_ratio": plan.gpu.total_bytes / (sum(shape.expert_bytes) * shape.experts),
        "gpus": profile.gpus,
        "host_bytes": None if plan.host is None else plan.host.total_bytes,
        "staging": plan.staging,
        "prefetch_budget_bytes": options.prefetch_budget_bytes,
        "gpu_split": plan.gpu_split,
        "batch": batch,
        "steps": steps,
        "seed": seed,
        "filled_by": "calibration" if warm is not None else "its policy, or empty",
        "warm": None if warm is None else str(warm.path if isinstance(warm, Trace) else warm),
        "git_commit": _git_commit(),
    }


def _warnings(
    trace: Trace, profile: HardwareProfile, costs: Costs, plan: MemoryPlan, result: ReplayResult
) -> list[str]:
    shape = trace.shape
    found = []
    needed = plan.gpu.total_bytes // (profile.gpus if plan.gpu_split == LAYERS else 1)
    needed += plan.staging * shape.max_expert_bytes + shape.other_bytes
    if needed > profile.memory.gpu_bytes:
        found.append(
            f"this cache needs {needed / 2**30:.1f} GiB of GPU memory with the rest of the model;"
            f" {profile.name} has {profile.memory.gpu_bytes / 2**30:.1f} GiB: --gpu-memory sizes it to the machine"
        )
    if plan.host is None and sum(shape.expert_bytes) * shape.experts > profile.memory.host_bytes:
        found.append("the experts exceed this machine's host memory: use --host-memory to read from its SSD")
    if shape.assumed:
        found.append(f"model shape {shape.name}: stated defaults for {', '.join(shape.assumed)}")
    if costs.extrapolated:
        found.append(f"profile {profile.name}: extrapolated by bytes and FLOPs: {', '.join(costs.extrapolated)}")
    if result.steps == 0:
        found.append("nothing was replayed")
    return found


def watts(profile: HardwareProfile) -> dict[str, tuple[float, float]] | None:
    """Idle and busy watts by lane, as the metrics take them."""
    power = profile.power
    if power is None:
        return None
    lanes = {lane: (power.idle_w[lane], power.busy_w[lane]) for lane in profile.lanes}
    return {**lanes, "platform": (power.platform_idle_w, 0.0)}


def _git_commit() -> str | None:
    """Commit of the checkout this runs in, or None outside one."""
    root = Path(__file__).resolve().parents[1]
    head = root / ".git" / "HEAD"
    if not head.is_file() or shutil.which("git") is None:
        return None
    text = head.read_text().strip()
    if not text.startswith("ref: "):
        return text
    ref = root / ".git" / text[5:]
    return ref.read_text().strip() if ref.is_file() else None
