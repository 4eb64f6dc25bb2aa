"""Trials: the same forward passes through the same policies, really done or simulated.

A `TrialRunner` keeps what trials of one model shape share (the store of experts, the
dense part with its key/value cache), so that a grid of short runs spends its time
running. `simulate` does the same trial in virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from moesim.hwprofiles.costs import Costs
from moesim.policies.base import PolicyError
from moesim.policies.registry import names_with
from moesim.policies.systems import compose
from moesim.runs.config import MemoryOptions, RunConfig
from moesim.runs.machine import device_of, open_random_store
from moesim.runs.measured import REHEARSED_STEPS, execute, rehearse
from moesim.runs.setup import Setup
from moesim.sim.replay import Replay
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.schema import ModelShape, Phase
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runtime.executor.executor import Executor

HOST_CACHE = "lru"
_DISTINCT = 64
"""Most different records in a runner's store: it is built in seconds; in memory every
expert has its own.
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
    setup = _setup(trial, shape, profile, seed)
    return replayed(setup, trial.steps, profile, noise_seed=noise_seed)


def replayed(
    setup: Setup,
    steps: Sequence[RoutedStep],
    profile: HardwareProfile,
    *,
    noise_seed: int | None = None,
) -> Timeline:
    """Replay forward passes as a profile predicts them; decisions are made with the
    costs that the run's own policies see.
    """
    costs = Costs(profile, setup.shape, pageable=setup.system.pageable)
    timeline = Timeline(profile.lanes)
    planner = setup.planner()
    replay = Replay(profile, planner, timeline, noise_seed=noise_seed, costs=costs)
    replay.run(steps)
    timeline.close()
    return timeline


class TrialRunner:
    """A model shape made ready to run for real, many times.

    Args:
        shape: sizes and numbers of experts; weights are random.
        profile: lanes and workers of this machine, and the costs that policies see.
        dtype: of the weights.
        store: folder of the store; None takes the user's cache folder.

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
    ) -> None:
        from moesim.runtime.models.dense import DenseStack  # noqa: PLC0415 - torch

        self.shape = shape
        self._device = device_of(profile)
        distinct = min(_DISTINCT, shape.layers * shape.experts)
        self._store = open_random_store(shape, store, dtype, distinct)
        # Dense parts compute in the type of the experts, as a checkpoint's would.
        torch_dtype = self._store.layout(0).torch_dtype
        self._dense = DenseStack(shape, torch_dtype, self._device.device)

    def __enter__(self) -> Self:
        """Use it in a block."""
        return self

    def __exit__(self, *_: object) -> None:
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
        policy=trial.policy,
        host_cache=HOST_CACHE,
        seed=seed,
        **trial.memory.options(),
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
    steps = timeline.step_frame()
    return (steps["end_s"] - steps["start_s"]).to_numpy()


# -- calibration runs ------------------------------------------------------------------
# Designed runs: drawn routing, and trials that exercise every cost and every overlap
# a run can have.
#
# Calibration learns from these runs, and drift is measured with some of them. Nothing
# here knows of a fit or of a comparison.

LAYERS = 6
EXPERTS = 32
TOP_K = 4
"""Routing of the designed runs."""
ROUTED = ModelShape(
    name="designed",
    layers=LAYERS,
    experts=EXPERTS,
    top_k=TOP_K,
    # Sizes are replaced by those of a real model before anything runs.
    hidden=64,
    expert_intermediate=64,
    expert_bytes=(1,) * LAYERS,
    other_bytes=1,
)
_REUSE = 0.5
"""Chance that a token keeps an expert of the token before."""
# Policies that keep the CPU busy, the GPU, or both.
_BOTH_LANES = "greedy+lru"
_CPU_ONLY = "all-cpu+none"
_GPU_ONLY = "on-demand+lru"


class Design(NamedTuple):
    """One designed run: what it is for, and the trial."""

    purpose: str
    trial: Trial


def drawn_steps(
    *, batch: int | tuple[int, ...], prompt: int, decode: int, seed: int
) -> list[RoutedStep]:
    """Draw forward passes: a prefill of `prompt` tokens per sequence (none if 0), then
    `decode` steps.

    Args:
        batch: sequences; several sizes take turns, as if sequences came and went.
        prompt: tokens of each sequence's prompt.
        decode: steps after it.
        seed: of the drawn routing.
    """
    rng = np.random.default_rng(seed)
    sizes = (batch,) if isinstance(batch, int) else batch
    steps = []
    # Every sequence has a last token, also those that pause in smaller batches.
    last = _uniform(max(sizes), rng)
    for number in range(decode + (prompt > 0)):
        sequences = sizes[number % len(sizes)]
        prefill = prompt > 0 and number == 0
        # A decode step has one token of each sequence.
        tokens = prompt * sequences if prefill else sequences
        if prefill:
            chosen = _uniform(tokens, rng)
        else:
            last = _next(last, rng)
            chosen = last[:sequences]

        # Without a prompt the first decode step is the first token.
        context = prompt + number + (prompt == 0)
        phase = Phase.PREFILL if prefill else Phase.DECODE
        layers = [_layer(layer, chosen[:, layer]) for layer in range(LAYERS)]
        steps.append(
            RoutedStep(
                step=number,
                phase=phase,
                batch=0,
                tokens=tokens,
                context_tokens=context,
                sequences=sequences,
                layers=layers,
            )
        )
    return steps


def _uniform(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct experts of tokens without history, int64 [T, L, K]."""
    # The order of random numbers is a random permutation.
    order = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)
    return np.asarray(order[..., :TOP_K])


def _next(last: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Experts of the next token [B, L, K]: some of the last ones, the rest drawn."""
    sequences = len(last)
    preference = rng.random((sequences, LAYERS, EXPERTS))
    kept = rng.random(last.shape) < _REUSE
    # Above 1, a kept expert is preferred to all that are drawn.
    drawn = np.take_along_axis(preference, last, -1)
    raised = np.where(kept, 2.0, drawn)
    np.put_along_axis(preference, last, raised, -1)
    best_first = preference.argsort(-1)[..., ::-1]
    return np.asarray(best_first[..., :TOP_K])


def _layer(layer: int, routing: np.ndarray) -> RoutedLayer:
    # Ascending ids, as a trace's reader gives them.
    experts, tokens = np.unique(routing, return_counts=True)
    return RoutedLayer(
        layer,
        experts=experts.astype(np.int32),
        tokens=tokens.astype(np.int32),
        routing=np.ascontiguousarray(routing, np.uint16),
        weights=None,
        scores=None,
        predicted={},
    )


def designs(shape: ModelShape, *, quick: bool = False, seed: int = 0) -> list[Design]:
    """List the designed set for one shape: every cost and every overlap that a run of
    any policy can have.

    Args:
        shape: sizes of the experts.
        quick: shorter runs.
        seed: of the drawn routing.
    """
    length = 10 if quick else 24
    alone = drawn_steps(batch=1, prompt=96, decode=length, seed=seed)
    # Several batch sizes in one run: curves over tokens need several points.
    batched = drawn_steps(
        batch=(2, 8, 4, 3),
        prompt=0,
        decode=max(12, length),
        seed=seed + 1,
    )
    prompt = drawn_steps(
        batch=4,
        prompt=96,
        decode=max(4, length // 3),
        seed=seed + 2,
    )
    short = drawn_steps(
        batch=(1, 4),
        prompt=24,
        decode=max(6, length // 2),
        seed=seed + 3,
    )

    no_cache = MemoryOptions(cache_ratio=0.0)
    small_cache = MemoryOptions(cache_ratio=0.3)
    large_cache = MemoryOptions(cache_ratio=0.6)
    full_cache = MemoryOptions(cache_ratio=1.0)
    # Half of the experts: enough for reads in every layer step, and for hits.
    host_bytes = shape.routed_bytes // 2
    no_cache_ssd = MemoryOptions(cache_ratio=0.0, host_memory_bytes=host_bytes)
    small_cache_ssd = MemoryOptions(cache_ratio=0.3, host_memory_bytes=host_bytes)

    # Each lane alone, then pairs, then all: a slowdown is seen against the former.
    trials = {
        "CPU alone": Trial(_CPU_ONLY, no_cache, alone),
        "CPU alone, many tokens": Trial(_CPU_ONLY, no_cache, prompt),
        "copies and GPU in turn": Trial(_GPU_ONLY, no_cache, alone),
        "GPU alone": Trial(_GPU_ONLY, full_cache, batched),
        "GPU, many tokens": Trial(_GPU_ONLY, small_cache, prompt),
        "CPU beside GPU and copies": Trial(_BOTH_LANES, small_cache, alone),
        "CPU beside GPU and copies, batch": Trial(_BOTH_LANES, large_cache, batched),
        "CPU beside copies": Trial(_BOTH_LANES, no_cache, batched),
        "SSD and CPU": Trial(_CPU_ONLY, no_cache_ssd, batched),
        "SSD and copies": Trial(_GPU_ONLY, small_cache_ssd, short),
        "all lanes": Trial(_BOTH_LANES, small_cache_ssd, alone),
        **{
            f"planning of {name}": Trial(f"{name}+lru", small_cache, short)
            for name in names_with("assignment", "calibrates_planning")
        },
    }
    return [Design(purpose, trial) for purpose, trial in trials.items()]
