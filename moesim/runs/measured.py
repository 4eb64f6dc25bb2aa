"""Measured runs, set up as `moesim.runs.replay.replay` sets up simulated ones: same
options, same policies, same figures.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.hwprofiles.errors import ProfileError
from moesim.hwprofiles.profile import HardwareProfile, default_profile, load_profile
from moesim.policies.planner.at_once import carry_out
from moesim.policies.planner.decision_log import DecisionLog
from moesim.policies.planner.observers import observed
from moesim.runs import replay as api
from moesim.runs.parallel import cores
from moesim.runs.setup import Setup, figures_of, needed_columns, watts
from moesim.runtime.errors import RuntimeFault
from moesim.sim.replay import Replay
from moesim.traces.format.batch import compose as compose_steps
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.perfetto import write_perfetto
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.policies.planner.plan import Policies
    from moesim.policies.planner.planner import Planner
    from moesim.runtime.executor.executor import Executor, ExecutorResult, StepInfo
    from moesim.runtime.store.footprint import Footprint, Meter
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

REHEARSED_STEPS = 3


def this_machine() -> tuple[str, int]:
    """What a profile must fit: the kind of accelerator, and how many cores this process
    may use.
    """
    from moesim.runtime.executor.cuda_device import (  # noqa: PLC0415 - torch
        cuda_is_there,
    )

    return "cuda" if cuda_is_there() else "host", cores()


def machine_profile(hw: str | Path | HardwareProfile | None) -> HardwareProfile:
    """A profile of this machine: the one that is named, ``hw.toml``, or one measured
    now in some ten seconds.

    Raises:
        ProfileError: the profile describes another kind of machine, more cores than
            there are, or several GPUs.
    """
    if hw is None:
        profile = default_profile()
        if profile.kind != "measured":
            from moesim.runtime.measure.profile import measure  # noqa: PLC0415

            with tempfile.TemporaryDirectory() as folder:
                profile = measure(None, Path(folder) / "this-machine.toml", quick=True)
    else:
        profile = hw if isinstance(hw, HardwareProfile) else load_profile(hw)
    kind, count = this_machine()
    if profile.accelerator != kind or profile.cores > count or profile.gpus != 1:
        raise ProfileError(
            f"profile {profile.name}: expected this machine (accelerator {kind},"
            f" {count} cores, one GPU lane), found accelerator {profile.accelerator},"
            f" {profile.cores} cores, {profile.gpus} GPU lanes; measure it with `moesim"
            " profile --out hw.toml`"
        )
    return profile


@dataclass(slots=True)
class MeasuredRun(api.Run):
    """A finished run on this machine.

    Attributes:
        shape: the model, or the sizes that its experts were given.
        result: dispatch times of every layer step.
        decision_log: reports to the planner and its answers
            (`moesim.policies.planner.decision_log.repeat` checks them).
        startup: seconds and bytes until the first forward pass could begin.
            ``store_s``, opening the expert store (on a first run: building it), is in
            none of the others.
        footprint: host memory budgeted and taken; None for a live model, whose library
            takes what it likes.
    """

    shape: ModelShape
    result: ExecutorResult
    decision_log: DecisionLog
    startup: dict[str, Any]
    footprint: Footprint | None

    def to_json(self) -> dict[str, Any]:
        """One object with metrics, configuration, start-up, memory and warnings."""
        memory = None if self.footprint is None else self.footprint.to_json()
        more = {
            "startup": self.startup,
            "memory": memory,
            "config": self.config,
            "warnings": self.warnings,
        }
        return self.metrics | more


def rehearse(planner: Planner, steps: Sequence[RoutedStep]) -> None:
    """Plan some steps with a planner that is thrown away, so that what is compiled is
    compiled before the run.
    """
    for step in steps:
        for routed in step.layers:
            plan = planner.plan(routed, step.step, step.phase, 0.0, step.batch)
            carry_out(planner, plan, 0.0)


def run_trace(
    trace: str | Path | Trace,
    policy: str = "greedy",
    *,
    shape: str | None = None,
    store: str | Path | ExpertStore | None = None,
    distinct: int | None = None,
    dtype: str | None = None,
    cache: str | None = None,
    prefetch: str | None = None,
    routing: str | None = None,
    host_cache: str = "lru",
    hw: str | Path | HardwareProfile | None = None,
    memory: api.MemoryOptions | None = None,
    batch: int = 1,
    steps: int | None = None,
    seed: int = 0,
    warm: str | Path | Trace | None = None,
    artefacts: str | Path | None = None,
    out: str | Path | None = None,
    perfetto: str | Path | None = None,
    own_cores: bool = False,
    progress: Callable[[StepInfo], None] | None = None,
    building: Callable[[int, int], None] | None = None,
) -> MeasuredRun:
    """Run a trace through a policy on this machine: forced routing, real copies, real
    products.

    Args:
        trace: a moesim trace, by path or opened.
        policy: a system or an assignment policy; `cache`, `prefetch` and `routing`
            replace one part of it.
        shape: model whose sizes the experts have, e.g. ``qwen3-30b-a3b/4``; the trace's
            own when None.
        store: an open store, or the folder of one, built there if it is not; None takes
            `default_store`.
        distinct: different records in a store that is built; see
            `moesim.runtime.store.build.build_random_store`.
        dtype: of the weights; float32 on the host accelerator, bfloat16 on CUDA when
        None. host_cache, memory, batch, steps, seed, warm, artefacts, out, perfetto: as
        in `moesim.runs.replay.replay`.
        hw: profile of this machine; see `machine_profile`.
        own_cores: see `moesim.runtime.executor.executor.Executor`.
        progress: called after each forward pass.
        building: called with records done and records to do while a store is built or
            checked.

    Raises:
        TraceError, ProfileError, PolicyError, StoreError: bad input, in one line.
        RuntimeFault: the machine does not give what the run needs.
    """
    from moesim.runtime.executor.trace_driven import (  # noqa: PLC0415
        ForcedRouting,
        check_store,
        shape_for,
    )
    from moesim.runtime.models.dense import (  # noqa: PLC0415 - torch
        DenseSizes,
        DenseStack,
    )
    from moesim.runtime.store.footprint import Meter  # noqa: PLC0415

    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    profile = machine_profile(hw)
    chosen = dtype or ("bfloat16" if profile.accelerator == "cuda" else "float32")
    sizes = shape_for(opened.shape, shape, chosen)
    setup = Setup.of(
        opened,
        policy,
        profile,
        shape=sizes,
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
    walk = list(
        compose_steps(
            opened, batch=batch, steps=steps, columns=_columns(opened, setup.policies())
        )
    )
    rehearse(setup.planner(), walk[:REHEARSED_STEPS])
    begin_s = time.perf_counter()
    own = open_random_store(sizes, store, chosen, distinct, seed, building)
    try:
        check_store(own, sizes)
        opened_s = time.perf_counter()
        device = device_of(profile)
        meter = Meter()
        dense = DenseStack(
            DenseSizes.of(sizes), own.layout(0).torch_dtype, device.device, seed
        )
        dense_s = time.perf_counter() - opened_s
        run = execute(
            setup,
            own,
            device,
            lambda executor: ForcedRouting(executor, dense, walk),
            out=out,
            progress=progress,
            own_cores=own_cores,
            meter=meter,
        )
    finally:
        if own is not store:
            own.close()
    in_host = device.device.type == "cpu"
    run.footprint = meter.footprint(
        dense.bytes * in_host, dense.kv_cache_bytes * in_host
    )
    if run.footprint.peak > run.footprint.budget:
        run.warnings.append("memory: the run took more than its budget")
    run.startup |= {
        "store_s": opened_s - begin_s,
        "dense_s": dense_s,
        "dense_bytes": dense.bytes,
    }
    run.config |= setup.config(opened, batch=batch, steps=steps, warm=warm)
    run.config |= {
        "world": "measured",
        "mode": "trace",
        "shape": sizes.name,
        "dtype": chosen,
    }
    run.config |= {
        "store": str(own.directory),
        "distinct_experts": own.index.distinct,
        "host_cache": host_cache,
    }
    if own.index.distinct is not None:
        run.warnings.append(
            f"experts share {own.index.distinct} different records of the store"
        )
    finish(run, setup, walk, out, perfetto)
    return run


def open_random_store(
    shape: ModelShape,
    store: str | Path | ExpertStore | None,
    dtype: str,
    distinct: int | None = None,
    seed: int = 0,
    building: Callable[[int, int], None] | None = None,
) -> ExpertStore:
    """Open a store of random experts of a shape, or build it first."""
    from moesim.runtime.store.build import build_random_store  # noqa: PLC0415
    from moesim.runtime.store.store import ExpertStore  # noqa: PLC0415 - torch

    if isinstance(store, ExpertStore):
        return store
    sizes = f"{shape.layers}x{shape.experts}-{shape.hidden}x{shape.expert_intermediate}"
    folder = (
        default_store(f"{shape.name}-{sizes}-{dtype}-{distinct or 'all'}")
        if store is None
        else store
    )
    tell = (
        None
        if building is None
        else (lambda done: building(done.records, done.total_records))
    )
    if (Path(folder) / "store.json").is_file():
        return ExpertStore(folder).trusted(tell)
    return build_random_store(
        shape, folder, seed, dtype=dtype, distinct=distinct, progress=tell
    )


def default_store(name: str) -> Path:
    """Where stores live that nobody gave a place: the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "moesim" / "stores" / name.replace("/", "_")


def _columns(trace: Trace, policies: Policies) -> tuple[str, ...]:
    """What policies read, and the combine weights where the trace has them."""
    weights = ("weights",) if "weights" in trace.columns else ()
    return tuple(dict.fromkeys((*weights, *needed_columns(policies))))


def device_of(profile: HardwareProfile) -> Any:
    """What the GPU lane runs on."""
    if profile.accelerator == "cuda":
        from moesim.runtime.executor.cuda_device import (  # noqa: PLC0415 - torch
            CudaDevice,
        )

        return CudaDevice()
    from moesim.runtime.executor.host_device import HostDevice  # noqa: PLC0415

    return HostDevice()


def execute(
    setup: Setup,
    store: ExpertStore,
    device: Any,
    forward: Callable[[Executor], Callable[[], None]],
    *,
    gatings: Sequence[Any] | None = None,
    out: str | Path | None = None,
    progress: Callable[[StepInfo], None] | None = None,
    own_cores: bool = False,
    meter: Meter | None = None,
) -> MeasuredRun:
    """Fill memories, run, and compute the figures."""
    from moesim.runtime.executor.executor import Executor  # noqa: PLC0415 - torch

    planner = setup.planner()
    decision_log = DecisionLog()
    timeline = Timeline(setup.profile.lanes, None if out is None else Path(out))
    executor = None
    begin_s = time.perf_counter()
    try:
        executor = Executor(
            setup.profile,
            observed(planner, decision_log),
            timeline,
            store,
            device,
            gatings,
            own_cores=own_cores,
        )
        fill_bytes = executor.fill()
        fill_s = time.perf_counter() - begin_s
        result = executor.run(forward(executor), progress)
        if meter is not None:
            meter.read(executor)
        timeline.close()
    except BaseException:
        timeline.discard()
        raise
    finally:
        if executor is not None:
            executor.close()
    metrics = summarise(timeline, power=watts(setup.profile)) | figures_of(planner)
    metrics |= {
        "steps": result.steps,
        "layer_steps": result.layer_steps,
        "wall_s": time.perf_counter() - begin_s,
    }
    startup = {"experts_s": fill_s, "experts_bytes": fill_bytes}
    reason = [] if store.direct else [f"store: {store.reason}"]
    return MeasuredRun(
        metrics,
        timeline,
        {"direct_reads": store.direct},
        reason,
        planner.shape,
        result,
        decision_log,
        startup,
        None,
    )


def finish(
    run: MeasuredRun,
    setup: Setup,
    steps: Sequence[RoutedStep],
    out: str | Path | None,
    perfetto: str | Path | None,
    *,
    decided: bool = False,
) -> None:
    """Say how long the first token took from nothing, and write what belongs beside the
    tables.

    Args:
        run: measured.
        setup: what it was run with.
        steps: its routing.
        out: folder of its tables.
        perfetto: file for its timeline, with that of the same run simulated below it.
        decided: `steps` are known from this run alone, so they are kept with its views.
    """
    from moesim.runtime.executor.decision_log_file import (  # noqa: PLC0415
        FILE_NAME,
        save_decision_log,
    )

    ready_s = run.startup["dense_s"] + run.startup["experts_s"]
    run.startup |= {"ready_s": ready_s}
    if run.metrics["ttft_s"] is not None:
        run.startup["first_token_s"] = ready_s + run.metrics["ttft_s"]
    if out is not None:
        save_decision_log(
            Path(out) / FILE_NAME, run.decision_log.entries, steps if decided else None
        )
    if perfetto is not None:
        planner = setup.planner()
        simulated = Timeline(setup.profile.lanes)
        Replay(setup.profile, planner.costs, planner, simulated).run(steps)
        write_perfetto(perfetto, {"measured": run.timeline, "simulated": simulated})


def compare_startups(
    first: MeasuredRun,
    memory: api.MemoryOptions | None,
    run: Callable[[api.MemoryOptions], MeasuredRun],
) -> dict[str, dict[str, float | None]]:
    """Start twice: experts on demand from the SSD (FlashMoE), and every expert in host
    memory before the first token.

    Args:
        first: a finished run; it is told in a warning if host memory cannot hold every
            expert.
        memory: its memories. Experts on demand have the host memory named there, else
            room for a quarter of them.
        run: one forward pass with the same options but these memories.

    Returns:
        By way of starting: seconds until ready, and until the first token (the whole
        first step where a trace has no prefill); None where that is impossible.
    """
    memory = memory or api.MemoryOptions()
    shape = first.shape
    fewest = (first.config["staging"] + 1) * shape.max_expert_bytes
    demand = memory.host_memory_bytes or max(
        sum(shape.expert_bytes) * shape.experts // 4, fewest
    )
    found = {
        "experts on demand": _started(run(replace(memory, host_memory_bytes=demand)))
    }
    try:
        found["all experts first"] = _started(
            run(replace(memory, host_memory_bytes=None))
        )
    except RuntimeFault as error:
        found["all experts first"] = {"ready_s": None, "first_token_s": None}
        first.warnings.append(f"starting with all experts: {error}")
    return found


def _started(run: MeasuredRun) -> dict[str, float | None]:
    """When a run was ready, and when it had its first token."""
    steps = run.timeline.step_frame()
    first_s = float(steps["end_s"].iloc[0] - steps["start_s"].iloc[0])
    return {
        "ready_s": run.startup["ready_s"],
        "first_token_s": run.startup["ready_s"] + first_s,
    }
