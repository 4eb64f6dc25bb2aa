"""One trial of a design: the same forward passes through the same policies, really done
or simulated.

A `Bench` keeps what trials of one model shape share (the store of experts, the dense
part with its key/value cache), so that a grid of short runs spends its time running.
`simulate` is its twin in virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from moesim.hwprofiles.costs import Costs
from moesim.policies.base import PolicyError
from moesim.policies.systems import compose
from moesim.runs.measured import (
    REHEARSED_STEPS,
    device_of,
    execute,
    open_random_store,
    rehearse,
)
from moesim.runs.parallel import cores
from moesim.runs.setup import Setup
from moesim.sim.replay import Replay
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.systems import System
    from moesim.runs.memory import MemoryOptions
    from moesim.runtime.executor.executor import Executor
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

HOST_CACHE = "lru"
STEADY = 0.05
"""By how much the last of the identical runs of a calibration may differ from the
first.
"""
_DISTINCT = 64
"""Different records in a bench's store: it is built in seconds; in memory every expert
has its own.
"""


def system_of(policy: str) -> System:
    """The system that ``assignment+cache+prefetch`` names; parts may be left out from
    the right.

    Raises:
        PolicyError: an unknown name, or too many parts.
    """
    return compose(policy)


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run: a policy, the sizes of memories, and the forward passes.

    Attributes:
        policy: as `system_of` takes it.
        memory: sizes.
        steps: forward passes; step numbers count from 0.
    """

    policy: str
    memory: MemoryOptions
    steps: Sequence[RoutedStep]


def simulate(
    trial: Trial,
    shape: ModelShape,
    profile: HardwareProfile,
    *,
    noise_seed: int | None = None,
    seed: int = 0,
) -> Timeline:
    """Run a trial in virtual time.

    Raises:
        PolicyError: a policy that needs the future or an artefact, or an impossible
            memory.
    """
    costs = Costs(profile, shape)
    planner = _setup(trial, shape, profile, seed).planner()
    timeline = Timeline(profile.lanes)
    Replay(profile, costs, planner, timeline, noise_seed=noise_seed).run(trial.steps)
    timeline.close()
    return timeline


class Bench:
    """A model shape made ready to run for real, many times.

    Args:
        shape: sizes and numbers of experts; weights are random.
        profile: lanes and workers of this machine, and the costs that policies are
            told.
        dtype: of the weights.
        store: folder of the store; None takes the user's cache folder.
        building: called with records done and records to do while the store is built.

    Raises:
        StoreError, RuntimeFault: the machine does not give what is needed.
    """

    def __init__(
        self,
        shape: ModelShape,
        profile: HardwareProfile,
        *,
        dtype: str = "float32",
        store: Path | None = None,
        building: Callable[[int, int], None] | None = None,
    ) -> None:
        from moesim.runtime.models.dense import (  # noqa: PLC0415 - torch
            DenseSizes,
            DenseStack,
        )

        self.shape = shape
        self._device = device_of(profile)
        self._store = open_random_store(
            shape, store, dtype, _DISTINCT, building=building
        )
        self._dense = DenseStack(
            DenseSizes.of(shape), self._store.layout(0).torch_dtype, self._device.device
        )

    def __enter__(self) -> Self:
        """Use it in a block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store."""
        self._store.close()

    def run(self, trial: Trial, profile: HardwareProfile, *, seed: int = 0) -> Timeline:
        """Run a trial for real.

        Raises:
            PolicyError, StoreError, RuntimeFault: as `moesim.runs.measured.run_trace`.
        """
        from moesim.runtime.executor.trace_driven import (  # noqa: PLC0415 - torch
            ForcedRouting,
        )

        setup = _setup(trial, self.shape, profile, seed)
        rehearse(setup.planner(), trial.steps[:REHEARSED_STEPS])

        def forward(executor: Executor) -> Callable[[], None]:
            return ForcedRouting(executor, self._dense, trial.steps)

        return execute(
            setup, self._store, self._device, forward, own_cores=True
        ).timeline


def _setup(
    trial: Trial, shape: ModelShape, profile: HardwareProfile, seed: int
) -> Setup:
    setup = Setup(
        shape, profile, system_of(trial.policy), trial.memory, HOST_CACHE, seed
    )
    for policy in setup.policies().all():
        if policy.oracle:
            raise PolicyError(
                f"policy {trial.policy!r}: an oracle cannot be validated; choose one"
                " that sees the past"
            )
    return setup


def figures(timeline: Timeline) -> dict[str, Any]:
    """Metrics of a run."""
    return summarise(timeline)


def step_lengths(timeline: Timeline) -> np.ndarray:
    """Seconds of each forward pass, float64 [steps]."""
    return np.concatenate(
        [chunk["end_s"] - chunk["start_s"] for chunk in timeline.step_chunks()]
    )


def unsteady(profile: HardwareProfile) -> str | None:
    """Say that the machine changed its speed while a profile was calibrated, if it did
    by more than `STEADY`.
    """
    drift = profile.fit.get("drift", {}).get("residual_median", 0.0)
    if drift <= STEADY:
        return None
    return (
        f"the machine changed its speed by {100 * drift:.0f} % while profile"
        f" {profile.name} was calibrated, so every time may be off by as much;"
        " calibrate again"
    )


def foreign(profile: HardwareProfile) -> list[str]:
    """In what a profile's machine differs from this one: processor, accelerator, cores;
    empty where it does not.

    Versions of libraries are named, too, since they change how fast products are.
    """
    from moesim.runtime.measure.machine import versions  # noqa: PLC0415 - torch

    here = versions()
    said = [
        f"{key}: the profile's is {profile.versions.get(key, 'unknown')}, this"
        f" machine's is {here[key]}"
        for key in ("cpu", "accelerator", "torch")
        if profile.versions.get(key) != here[key]
    ]
    if profile.cores != cores():
        said.append(
            f"cores: the profile's are {profile.cores}, this machine's are {cores()}"
        )
    return said
