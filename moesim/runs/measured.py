"""Measured runs of a trace: forced routing, real copies and products on this machine.

They are set up as `moesim.runs.replay.replay` sets up simulated ones: same options,
same policies, same figures.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.engine.at_once import carry_out
from moesim.engine.observers import DecisionLog
from moesim.hwprofiles.profile import save_profile
from moesim.policies.faults import policy_faults
from moesim.runs.bound import MemoryBound, highest_read_rate, memory_bound
from moesim.runs.config import MeasuredConfig, takes_options
from moesim.runs.machine import (
    device_of,
    experts_dtype,
    machine_profile,
    measurement_notes,
    open_random_store,
)
from moesim.runs.memory import sharing_cards
from moesim.runs.result import Run, save_run
from moesim.runs.setup import (
    Setup,
    begins,
    figures_of,
    needed_columns,
    refuse_arrivals,
    refuse_drafts,
    trace_of,
    watts,
)
from moesim.runtime.executor.live_routing import FILE_NAME, save_routing
from moesim.sim.replay import Replay
from moesim.traces.format.batch import compose as compose_steps
from moesim.traces.format.schema import Phase
from moesim.traces.synthetic.marks import synthetic_caveats
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.operations import OperationTable
from moesim.traces.timeline.perfetto import write_perfetto
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from moesim.engine.planner import Planner
    from moesim.policies.systems import Policies
    from moesim.runs.config import RunConfig
    from moesim.runtime.executor.executor import Executor, ExecutorResult, StepInfo
    from moesim.runtime.executor.live import Verdict
    from moesim.runtime.store.store import BuildProgress, ExpertStore
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Chunk

PROFILE_FILE = "hw.toml"
"""The profile of a run's machine, in the folder of the run."""
REHEARSED_STEPS = 3
"""Forward passes that are planned beforehand: a prefill and decode steps among them."""


@dataclass(slots=True)
class MeasuredRun(Run):
    """A finished run on this machine.

    Attributes:
        shape: the model, or the sizes that its experts were given.
        result: passes, layer steps and seconds.
        decision_log: reports to the planner and its answers
            (`moesim.engine.observers.repeat` checks them).
        startup: seconds and bytes until the first forward pass could begin.
            ``store_s``, opening the expert store (on a first run: building it), is in
            none of the others.
        peak_bytes: most host memory that the process held meanwhile; None for a live
            model.
        bound: what reading host memory allows at best; None where no probe says how
            fast that is, or where it does not bind.
        texts, tokens: what a live model generated, per prompt; None for a trace.
        steps: what its gates decided.
        verification: how far its logits are from the plain model's; None if they were
            not compared.
    """

    shape: ModelShape
    result: ExecutorResult
    decision_log: DecisionLog
    startup: dict[str, Any]
    peak_bytes: int | None = field(default=None, kw_only=True)
    texts: list[str] | None = field(default=None, kw_only=True)
    tokens: list[list[int]] | None = field(default=None, kw_only=True)
    steps: list[RoutedStep] | None = field(default=None, kw_only=True)
    verification: Verdict | None = field(default=None, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """One object with metrics, configuration, start-up, memory and warnings; of a
        live model, with texts and the verification too.
        """
        more: dict[str, Any] = {}
        if self.bound is not None:
            more["bound"] = self.bound.to_json(self.metrics["makespan_s"])
        if self.texts is not None:
            more |= {"texts": self.texts, "verify": None}
        if self.verification is not None:
            passed = {"passed": self.verification.passed}
            more["verify"] = self.verification._asdict() | passed
        return {
            **self.metrics,
            **more,
            "startup": self.startup,
            "memory": {"peak_bytes": self.peak_bytes},
            "config": self.config,
            "warnings": self.warnings,
        }


@takes_options(MeasuredConfig)
def run_trace(
    trace: RunConfig | str | Path | Trace,
    policy: str | None = None,
    *,
    out: str | Path | None = None,
    perfetto: str | Path | None = None,
    progress: Callable[[StepInfo], None] | None = None,
    building: Callable[[BuildProgress], None] | None = None,
    **options: Any,
) -> MeasuredRun:
    """Run a trace on this machine: forced routing, real copies, real products.

    Args:
        trace: a moesim trace, by path or opened; or a configuration, whose options
            those given here replace.
        policy: a system or an assignment policy, ``greedy`` if None.
        out: folder for the tables, the decisions and ``run.json``.
        perfetto: file for the timeline, with that of the same run simulated below it.
        progress: called after each forward pass.
        building: called for every expert while a store is built or checked.
        options: fields of `moesim.runs.config.MeasuredConfig`.

    Raises:
        TypeError, ConfigError: an unknown option; a value that does not fit.
        TraceError, ProfileError, PolicyError, StoreError: bad input, in one line.
        RuntimeFault: the machine does not give what the run needs.
    """
    from moesim.runtime.executor.trace_driven import (  # noqa: PLC0415 - torch
        ForcedRouting,
        check_store,
        forget_peak,
        peak_bytes,
        shape_for,
    )
    from moesim.runtime.models import dense as dense_parts  # noqa: PLC0415 - torch

    config = MeasuredConfig.of(trace, policy, **options)
    refuse_arrivals(config, "a measured run")
    refuse_drafts(config, "a measured run")
    opened = trace_of(config)
    profile = machine_profile(config.hw, store=config.store_folder)
    dtype = config.dtype or experts_dtype(profile)
    shape = shape_for(opened.shape, config.shape, dtype)
    setup = Setup.of(config, opened, profile=profile, shape=shape)

    # All of it beforehand: reading the trace must not cost the run time.
    columns = columns_of(opened, setup.policies())
    walk = list(
        compose_steps(opened, batch=config.batch, steps=config.steps, columns=columns)
    )
    rehearse(setup.planner(), walk[:REHEARSED_STEPS])

    begin_s = time.perf_counter()
    store = open_random_store(shape, config.store, dtype, config.distinct, building)
    with closed_after(store, config):
        check_store(store, shape, config.distinct)
        opened_s = time.perf_counter()
        device = device_of(profile)
        forget_peak()
        weights_dtype = store.layout(0).torch_dtype
        dense = dense_parts.DenseStack(shape, weights_dtype, device.device, config.seed)
        dense_s = time.perf_counter() - opened_s
        run = execute(
            setup,
            store,
            device,
            lambda executor: ForcedRouting(executor, dense, walk),
            out=out,
            progress=progress,
        )

    run.peak_bytes = peak_bytes()
    # Memory of a GPU is no host memory.
    in_host = device.device.type == "cpu"
    shared_records = store.index.distinct
    # Experts that share records or come from an SSD need not cross the memory's wires.
    if shared_records is None and setup.memory.host is None:
        run.bound = run_bound(setup, walk, dense.bytes * in_host)
    run.warnings += synthetic_caveats(opened.header)
    # A reader should know that fewer bytes lie on the disk than the model has.
    if shared_records is not None:
        run.warnings.append(f"experts share {shared_records} records of the store")
    run.startup |= {
        "store_s": opened_s - begin_s,
        "dense_s": dense_s,
        "dense_bytes": dense.bytes,
    }
    facts = {
        "mode": "trace",
        "shape": shape.name,
        "dtype": dtype,
        "distinct_experts": shared_records,
    }
    finish(
        run, setup, config, store, walk, facts, trace=opened, out=out, perfetto=perfetto
    )
    return run


@contextmanager
def closed_after(store: ExpertStore, config: MeasuredConfig) -> Iterator[None]:
    """Close a store after the block, unless it was handed over open and is still in
    use.
    """
    try:
        yield
    finally:
        if store is not config.store:
            store.close()


def run_bound(
    setup: Setup, walk: Sequence[RoutedStep], dense_bytes: int
) -> MemoryBound | None:
    """Bound a run by what the profile's probes say of host memory.

    Args:
        setup: of the run.
        walk: its forward passes.
        dense_bytes: of all weights but experts that lie in host memory.

    Returns:
        The bound; None without probes, where the processor does not tell its caches, or
        where routing is altered.
    """
    from moesim.runtime.accelerators import all_caches_bytes  # noqa: PLC0415 - torch

    rate = highest_read_rate(setup.profile.numbers)
    caches = all_caches_bytes()
    if rate is None or caches is None or setup.policies().routing.alters:
        return None
    # A card's slots keep experts out of host memory; the host accelerator's lie in it.
    gpus = setup.profile.gpus
    if setup.profile.accelerator != "host":
        parts = gpus // sharing_cards(setup.memory.gpu_split, gpus)
        caches += parts * setup.cache.total_bytes
    return memory_bound(
        walk,
        setup.shape.expert_bytes,
        rate,
        cache_bytes=caches,
        dense_bytes=dense_bytes,
    )


def rehearse(planner: Planner, steps: Sequence[RoutedStep]) -> None:
    """Plan some steps with a planner that is thrown away.

    What initialises itself at its first call does so here, not in the run.
    """
    for step in steps:
        planner.put(planner.block_of(step))
        for place in range(len(step.layers)):
            planner.plan(place, 0.0)
            carry_out(planner, 0.0)


def columns_of(trace: Trace, policies: Policies) -> tuple[str, ...]:
    """Name the columns that policies read, and the combine weights where the trace has
    them.
    """
    # Outputs are combined with them; a trace without takes equal ones.
    weights = ("weights",) if "weights" in trace.columns else ()
    return tuple(dict.fromkeys((*weights, *needed_columns(policies))))


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
) -> MeasuredRun:
    """Fill memories, run, and compute the figures.

    Args:
        setup: policies, memories and profile.
        store: the experts.
        device: what the GPU lane runs on.
        forward: makes the function that runs the model, given the executor.
        gatings: gating function of each layer, see the executor; None takes its own.
        out: folder for the tables.
        progress: called after each forward pass.
        own_cores: see `moesim.runtime.executor.executor.Executor`.
    """
    from moesim.runtime.executor.executor import Executor  # noqa: PLC0415 - torch

    planner = setup.planner()
    decision_log = DecisionLog()
    planner.observers.append(decision_log)
    timeline = Timeline(setup.profile.lanes, None if out is None else Path(out))
    timeline.operations = OperationTable()
    executor = None
    begin_s = time.perf_counter()
    try:
        executor = Executor(
            setup.profile,
            planner,
            timeline,
            store,
            device,
            gatings,
            own_cores=own_cores,
        )
        fill_bytes = executor.fill()
        fill_s = time.perf_counter() - begin_s
        with policy_faults():
            result = executor.run(forward(executor), progress)
        timeline.close()
        if timeline.out_dir is not None:
            # So that the folder tells all of its run, the machine included.
            timeline.operations.save(timeline.out_dir)
            save_profile(setup.profile, timeline.out_dir / PROFILE_FILE)
    except BaseException:
        # An interrupt too must not leave half-written tables behind.
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
    return MeasuredRun(
        metrics=metrics,
        timeline=timeline,
        config={"direct_reads": store.direct, "model_shape": planner.shape.fields()},
        warnings=[
            *measurement_notes(setup.profile),
            *([] if store.direct else [f"store: {store.reason}"]),
            *planner.policies.remarks(),
        ],
        shape=planner.shape,
        result=result,
        decision_log=decision_log,
        startup={"experts_s": fill_s, "experts_bytes": fill_bytes},
    )


def finish(
    run: MeasuredRun,
    setup: Setup,
    config: MeasuredConfig,
    store: ExpertStore,
    steps: Sequence[RoutedStep],
    facts: Mapping[str, Any],
    *,
    trace: Trace | None = None,
    out: str | Path | None,
    perfetto: str | Path | None,
) -> None:
    """Add what it was run with and the time to the first token, and write what belongs
    beside the tables.

    Args:
        run: measured.
        setup: what it was run with.
        config: that repeats it.
        store: the experts.
        steps: its routing.
        facts: further entries of its configuration.
        trace: that decided its routing; None where gates did, whose decisions are kept.
        out: folder of its tables.
        perfetto: file for its timeline, with that of the same run simulated below it.
    """
    # An open store is named by its folder.
    named = None if config.store is None else store.directory
    setup.config = config.replaced(store=named)
    run.config |= setup.effective_config(trace) | {
        "world": "measured",
        "host_cache": config.host_cache,
        "store": str(store.directory),
        "begins": begins(setup.planner(), setup.calibration),
        **facts,
    }
    ready_s = run.startup["dense_s"] + run.startup["experts_s"]
    run.startup["ready_s"] = ready_s
    if run.metrics["ttft_s"] is not None:
        run.startup["first_token_s"] = ready_s + run.metrics["ttft_s"]
    run.startup |= pace_of(run.timeline.step_chunks())

    if out is not None:
        if trace is None:
            save_routing(Path(out) / FILE_NAME, steps)
        save_run(run, Path(out))
    if perfetto is not None:
        # Nothing but the clock differs: same policies, same routing, same costs.
        planner = setup.planner()
        simulated = Timeline(setup.profile.lanes)
        Replay(setup.profile, planner, simulated).run(steps)
        write_perfetto(perfetto, {"measured": run.timeline, "simulated": simulated})


def pace_of(steps: Iterable[Chunk]) -> dict[str, float]:
    """Tell a run's settling from its steady state, by its decode steps.

    Args:
        steps: forward passes, as `Timeline.step_chunks` returns them.

    Returns:
        ``steady_token_s``, the median second of a decode step of the second half, when
        caches hold what they will; ``settling_s``, what the steps of the first half
        took beyond that, 0 where they took less. Empty with fewer than four.
    """
    taken_s = np.concatenate(
        [
            (chunk["end_s"] - chunk["start_s"])[chunk["phase"] == Phase.DECODE]
            for chunk in steps
        ]
    )
    half = len(taken_s) // 2
    if half < 2:
        return {}
    steady_s = float(np.median(taken_s[half:]))
    settling_s = max(0.0, float(taken_s[:half].sum()) - half * steady_s)
    return {"steady_token_s": steady_s, "settling_s": settling_s}
