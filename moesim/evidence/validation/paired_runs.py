"""Trials: the same forward passes through the same policies, really done or simulated.

A `TrialRunner` keeps what trials of one model shape share (the store of experts, the
dense part with its key/value cache), so that a grid of short runs spends its time
running. `simulate` does the same trial in virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from moesim.hwprofiles.costs import Costs
from moesim.policies.base import PolicyError
from moesim.policies.systems import compose
from moesim.runs.config import RunConfig
from moesim.runs.machine import device_of, open_random_store
from moesim.runs.measured import REHEARSED_STEPS, execute, rehearse
from moesim.runs.setup import Setup
from moesim.sim.replay import Replay
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runs.config import MemoryOptions
    from moesim.runtime.executor.executor import Executor
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

HOST_CACHE = "lru"
_DISTINCT = 64
"""Different records in a runner's store: it is built in seconds; in memory every expert
has its own.
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run: a policy, the sizes of memories, and the forward passes.

    Attributes:
        policy: as ``assignment+cache+prefetch``, parts left out from the right.
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

    Args:
        trial: what is run.
        shape: the model.
        profile: the machine.
        noise_seed: of operation times drawn from the profile's distributions; the means
            when None.
        seed: of policies that draw.

    Raises:
        PolicyError: a policy that needs the future or an artefact, or an impossible
            memory.
    """
    costs = Costs(profile, shape)
    planner = _setup(trial, shape, profile, seed).planner()
    timeline = Timeline(profile.lanes)
    replay = Replay(profile, costs, planner, timeline, noise_seed=noise_seed)
    replay.run(trial.steps)
    timeline.close()
    return timeline


class TrialRunner:
    """A model shape made ready to run for real, many times.

    Args:
        shape: sizes and numbers of experts; weights are random.
        profile: lanes and workers of this machine, and the costs that policies see.
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
        # Dense parts compute in the type of the experts, as a checkpoint's would.
        torch_dtype = self._store.layout(0).torch_dtype
        self._dense = DenseStack(DenseSizes.of(shape), torch_dtype, self._device.device)

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

        Args:
            trial: what is run.
            profile: lanes, workers and costs; those of the runner's own machine.
            seed: of policies that draw.

        Raises:
            PolicyError, StoreError, RuntimeFault: as `moesim.runs.measured.run_trace`.
        """
        from moesim.runtime.executor.trace_driven import (  # noqa: PLC0415 - torch
            ForcedRouting,
        )

        setup = _setup(trial, self.shape, profile, seed)
        # Another planner plans the first steps beforehand: compiled kernels are warm
        # then, and this run's decisions are not touched.
        rehearse(setup.planner(), trial.steps[:REHEARSED_STEPS])

        def forward(executor: Executor) -> Callable[[], None]:
            return ForcedRouting(executor, self._dense, trial.steps)

        run = execute(setup, self._store, self._device, forward, own_cores=True)
        return run.timeline


def _setup(
    trial: Trial, shape: ModelShape, profile: HardwareProfile, seed: int
) -> Setup:
    config = RunConfig.of(
        policy=trial.policy, memory=trial.memory, host_cache=HOST_CACHE, seed=seed
    )
    setup = Setup(config, shape, profile, compose(trial.policy))
    for policy in setup.policies().all():
        if policy.oracle:
            raise PolicyError(
                f"policy {trial.policy!r}: an oracle cannot be validated; choose one"
                " that sees the past"
            )
    return setup


def step_lengths(timeline: Timeline) -> np.ndarray:
    """Seconds of each forward pass, float64 [steps]."""
    lengths = [chunk["end_s"] - chunk["start_s"] for chunk in timeline.step_chunks()]
    return np.concatenate(lengths)
