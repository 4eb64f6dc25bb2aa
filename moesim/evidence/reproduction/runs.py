"""Runs behind the papers' experiments: each is described, done once, and shared by all
records that need it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.hwprofiles.dense_costs import DenseSizes
from moesim.hwprofiles.paths import link
from moesim.hwprofiles.profile import load_profile
from moesim.policies.assignment._optimum import modelled_s
from moesim.policies.systems import System
from moesim.questions.gap import MixReplays
from moesim.runs.config import RunConfig
from moesim.runs.memory import plan_memory
from moesim.runs.replay import replay
from moesim.runs.setup import Setup
from moesim.sim.replay import Replay
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moesim.engine.planner import Planner
    from moesim.evidence.reproduction.workloads import Workload
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runs.result import Run
    from moesim.sim.results import ReplayResult
    from moesim.traces.format.reader import Trace
    from moesim.traces.timeline.spans import Timeline

_opened = lru_cache(maxsize=4)(open_trace)
Outcome = dict[str, Any]
"""Metrics of a run, and under ``prefill`` and ``decode`` the parts of those steps
(`parts_of`).
"""

TRAINING_SEQUENCES = 256
"""Drawn texts that a cache network is trained on, half of FlashMoE's 512 (its text,
``train_samples``): all of them take 5 GB for Qwen3-30B-A3B and hardly another result
(docs/measurements/papers.md).
"""
EPOCHS = 8
"""Most epochs of that training, which stops early where it can; the paper has 200."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run, before it is done.

    Attributes:
        workload: what is replayed.
        policy: a system or an assignment policy.
        machine: hardware profile.
        options: further options of `moesim.replay` and `moesim.sweep`, sorted.
        warm: what the cache is filled from: ``all`` steps of other sequences of the
            workload, or their ``decode`` steps alone; empty for none.
        learned: whether a cache network is trained on those, for ``flashmoe``.
        modelled: sum the modelled makespans of all decode steps instead, with nothing
            resident (DALI, table 4).
        numbers: of the machine's profile, in place of its own: dotted path and value.
    """

    workload: Workload
    policy: str
    machine: str
    options: tuple[tuple[str, Any], ...] = ()
    warm: str = ""
    learned: bool = False
    modelled: bool = False
    numbers: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(
        cls,
        workload: Workload,
        policy: str,
        machine: str,
        *,
        warm: str = "",
        learned: bool = False,
        modelled: bool = False,
        numbers: Mapping[str, float] | None = None,
        **options: Any,
    ) -> RunSpec:
        """Describe a run; options that are None are left out."""
        given = {name: value for name, value in options.items() if value is not None}
        return cls(
            workload,
            policy,
            machine,
            options=tuple(sorted(given.items())),
            warm=warm,
            learned=learned,
            modelled=modelled,
            numbers=tuple((numbers or {}).items()),
        )

    @property
    def calibration(self) -> Workload:
        """What the cache is filled from, where it is."""
        drawn = self.workload.calibration()
        return replace(drawn, prompt=0) if self.warm == "decode" else drawn

    @property
    def profile(self) -> HardwareProfile:
        """The machine, with the numbers that take the place of its own."""
        profile = load_profile(self.machine)
        other = {
            path: replace(profile.numbers[path], value=value)
            for path, value in self.numbers
        }
        return replace(profile, numbers={**profile.numbers, **other})

    @property
    def words(self) -> str:
        """The run in the words of the command line."""
        given = [f"--{name.replace('_', '-')} {value}" for name, value in self.options]
        return " ".join([self.policy, *given, *["--warm"] * bool(self.warm)])

    def do(self, folder: Path) -> Outcome:
        """Do the run; its traces lie in `folder`, or are drawn into it.

        Raises:
            TraceError, ProfileError, PolicyError: a description that fits nothing.
        """
        # Runs of one trace read it once.
        trace = _opened(self.workload.draw(folder))
        if self.modelled:
            return _modelled(self, trace)
        options = dict(self.options)
        if self.warm:
            options["warm"] = _opened(self.calibration.draw(folder))
        if self.learned:
            options["artefacts"] = learned_cache(self.workload, folder)
        run = replay(trace, self.policy, hw=self.profile, **options)
        return run.metrics | parts_of(run)


def parts_of(run: Run) -> dict[str, dict[str, float]]:
    """Seconds of all steps by phase, and by what was busy; lanes overlap.

    Returns:
        By phase ``total``, the length of the steps, ``steps``, ``dense``, ``cpu`` and
        ``gpu`` (experts), ``link`` (copies to GPUs), ``ssd``, ``planning``.
    """
    steps = run.timeline.step_frame().set_index("step")
    spans = run.timeline.frame()
    seconds = spans["end_s"] - spans["start_s"]
    phase = spans["step"].map(steps["phase"].astype(str))
    computes = spans["kind"] == "compute"
    on_cpu = spans["lane"] == "cpu"
    on_link = [lane for lane in run.timeline.lanes if lane.startswith("h2d")]
    parts = {
        "dense": spans["kind"] == "dense",
        "cpu": computes & on_cpu,
        "gpu": computes & ~on_cpu,
        "link": spans["lane"].isin(on_link),
        "ssd": spans["lane"] == "ssd",
        "planning": spans["kind"] == "plan",
    }
    table = pd.DataFrame(
        {name: seconds[mask].groupby(phase[mask]).sum() for name, mask in parts.items()}
    )
    of_phase = (steps["end_s"] - steps["start_s"]).groupby(steps["phase"].astype(str))
    table = table.reindex([each.label for each in Phase]).assign(
        total=of_phase.sum(), steps=of_phase.size()
    )
    return {str(of): dict(parts) for of, parts in table.fillna(0.0).iterrows()}


def decode_replays(
    trace: Trace,
    profile: HardwareProfile,
    system: System,
    *,
    batch: int,
    steps: int,
    cache_ratio: float,
    most_steps: int | None = None,
    seed: int = 0,
) -> MixReplays:
    """Replays of the first decode steps of full batches, within `most_steps` forward
    passes; of policies that do not look ahead.
    """

    def walk(planner: Planner, timeline: Timeline) -> ReplayResult:
        full = (
            step
            for step in compose(trace, batch=batch, steps=most_steps)
            if step.phase == Phase.DECODE and step.sequences == batch
        )
        # Prefill steps are left out, so steps are numbered anew.
        passes = (
            replace(step, step=number)
            for number, step in zip(range(steps), full, strict=False)
        )
        return Replay(profile, planner, timeline).run(passes)

    config = RunConfig.of(None, cache_ratio=cache_ratio, seed=seed)
    setup = Setup(config, trace.shape, profile, system)
    return MixReplays(setup, walk, RecordedFuture(()))


def _modelled(spec: RunSpec, trace: Trace) -> Outcome:
    """The modelled makespan of decode steps in which nothing is resident."""
    total = _ModelledTime()
    replays = decode_replays(
        trace,
        spec.profile,
        System(assignment=spec.policy, cache="none"),
        batch=dict(spec.options)["batch"],
        # The first batch only: the others are more of the same.
        steps=spec.workload.generated,
        cache_ratio=0.0,
    )
    replays.replay_s({}, total)
    return {"modelled_s": total.seconds}


@dataclass(slots=True)
class _ModelledTime:
    """Sums the modelled makespans of assignments.

    An observer of `AssignmentPolicy.assign` (`moesim.engine.observers`).
    """

    seconds: float = 0.0

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Add one layer step."""
        del call, answer
        work, _view, lanes, _order = arguments
        self.seconds += modelled_s(work, np.asarray(lanes))


def learned_cache(workload: Workload, folder: Path) -> Path:
    """Train FlashMoE's cache network on other sequences of the workload, unless it is
    there already, and return its folder.

    Raises:
        ImportError: PyTorch is not installed.
    """
    from moesim.runtime.train_cache import train  # noqa: PLC0415 - needs torch

    training = workload.calibration(TRAINING_SEQUENCES)
    artefacts = folder / f"{training.name}-learned"
    network = artefacts / "flashmoe.safetensors"
    if not network.exists():
        trace = open_trace(training.draw(folder))
        trained = train(list(compose(trace)), trace.shape, epochs=EPOCHS)
        artefacts.mkdir(exist_ok=True)
        trained.save(network)
    return artefacts


# -- what follows from a run's description alone ---------------------------------------


def _gpu_gb(run: RunSpec, values: Mapping[str, Any]) -> float:
    """GB of the expert cache, the staging slots, the dense weights, and the keys and
    values of all sequences at the end of a context of ``seq_len`` tokens.
    """
    options = dict(run.options)
    batch = options.pop("batch", 1)
    config = RunConfig.of(None, run.policy, **options)
    shape = run.workload.shape
    plan = plan_memory(config.memory, shape, load_profile(run.machine), config.system)
    of_layer = DenseSizes.of(shape).kept.bytes(values["seq_len"])
    keys_and_values = shape.all_layers * batch * of_layer
    staging_bytes = plan.staging * shape.max_expert_bytes
    used = plan.gpu.total_bytes + staging_bytes + shape.other_bytes + keys_and_values
    return used / 1e9


def _load_s(run: RunSpec, _values: Mapping[str, Any]) -> float:
    """Seconds to read from the SSD what must be in memory before the first token: all
    weights, or those outside experts where these stay on the SSD.

    Experts are read one by one, as a run reads them.
    """
    shape = run.workload.shape
    ssd = link("ssd")
    number = load_profile(run.machine).number
    load_s = shape.other_bytes / number(ssd.bytes_per_s)
    if "host_memory_bytes" not in dict(run.options):
        experts = shape.layers * shape.experts
        load_s += shape.routed_bytes / number(ssd.bytes_per_s)
        load_s += experts * number(ssd.latency_s)
    return load_s


SPEC_QUANTITIES = {"gpu_gb": _gpu_gb, "load_s": _load_s}
"""Name -> quantity of a run that need not be done, with the values of the names in its
description.
"""
