"""A profile for runs on whatever machine the tests are on: two workers beside the SSD,
costs of round numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from support.learned_network import Artefacts
from transformers import AutoModelForCausalLM

from moesim.engine.observers import DecisionLog
from moesim.engine.planner import Planner
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import HardwareProfile
from moesim.hwprofiles.schema import Quantity
from moesim.policies.base import AssignmentPolicy, RoutingPolicy
from moesim.policies.registry import find, names
from moesim.policies.systems import System
from moesim.runs.config import MemoryOptions
from moesim.runs.machine import open_random_store
from moesim.runs.measured import run_trace
from moesim.runtime.executor.device import HostDevice
from moesim.runtime.executor.executor import Executor
from moesim.runtime.executor.live import LiveRun, live_shape
from moesim.runtime.executor.trace_driven import shape_for
from moesim.runtime.models.local_model import LocalModel
from moesim.runtime.models.offloaded import OffloadedModel
from moesim.runtime.store.build import build_store
from moesim.traces.format.schema import PREDICTION_COLUMNS, ModelShape
from moesim.traces.timeline.spans import Timeline

SHAPE = ModelShape(
    name="small", layers=3, experts=8, top_k=2, hidden=32, expert_intermediate=16,
    expert_bytes=(3 * 32 * 16 * 4,) * 3, other_bytes=1 << 12, dtype="f32", vocab=50,
)  # fmt: skip
"""A model small enough for many real runs."""


def float_model(layers=2, experts=6, **more):
    """A model with experts of 6 KiB in float32, two of them for each token."""
    sizes = (32, 16, (6144,) * layers, 1)
    return ModelShape("s", layers, experts, 2, *sizes, dtype="f32", **more)


COLUMNS = ("weights", "scores", *PREDICTION_COLUMNS)
"""Of a trace that serves every policy."""

TWO_WORKERS = {
    "cpu": ("control", "cpu"),
    "accelerator": ("gpu0", "h2d0", "d2h0"),
    "ssd": ("ssd",),
}
ONE_WORKER = {"cpu": ("control", "cpu", "gpu0", "h2d0", "d2h0"), "ssd": ("ssd",)}
LAUNCHED = {lane: (lane,) for lane in ("control", "cpu", "gpu0", "h2d0", "d2h0", "ssd")}
"""As beside CUDA: a worker for each lane."""
READS_TOO = {"cpu": ("control", "ssd", "cpu"), "accelerator": ("gpu0", "h2d0", "d2h0")}

_ROOFS = {"overhead_s": 1e-5, "bytes_per_s": 1e10, "flops_per_s": 1e11}
_NUMBERS = {
    "cores": 2,
    "memory.gpu_bytes": 1 << 30,
    "memory.host_bytes": 1 << 30,
    "memory.staging_experts": 2,
    **{
        f"costs.{lane}.{key}": value
        for lane in ("cpu", "gpu", "dense")
        for key, value in _ROOFS.items()
    },
    "costs.cpu.first_s": 1e-5,
    **{f"costs.{link}.latency_s": 1e-5 for link in ("h2d", "d2h", "ssd", "activation")},
    **{
        f"costs.{link}.bytes_per_s": 1e9 for link in ("h2d", "d2h", "ssd", "activation")
    },
    "costs.planning.default.base_s": 1e-5,
    "costs.planning.default.per_expert_s": 1e-6,
    "costs.dispatch.per_op_s": 1e-6,
    "costs.dispatch.first_op_s": 1e-5,
    "costs.dispatch.join_s": 1e-5,
}


def host_profile(workers=None, accelerator="host", **numbers):
    """A machine whose accelerator is a core; `workers` maps lanes to threads."""
    return HardwareProfile(
        name="test-host",
        kind="datasheet",
        description="made up for tests",
        date="2026-01-01",
        accelerator=accelerator,
        workers=workers or TWO_WORKERS,
        numbers={
            path: Quantity(value, "assumed", "a test")
            for path, value in (_NUMBERS | numbers).items()
        },
    )


def real_run(trace, policy, store, hw=None, *, memory=None, **options):
    """Run a trace for real, in float32; `memory` as `MemoryOptions` takes it."""
    sizes = memory.options() if isinstance(memory, MemoryOptions) else memory or {}
    settings = {"store": store, "dtype": "float32", **sizes, **options}
    return run_trace(trace, policy, hw=hw or host_profile(), **settings)


def random_store(trace, folder):
    """Open a store of random float32 weights of a trace's shape."""
    return open_random_store(shape_for(trace.shape, None), folder, "float32")


def usable(kind, *, oracles, approximate=False):
    """Registered names of a kind that keep routing; oracles and approximations if
    wanted.
    """
    found = []
    for name in names(kind):
        cls = find(name, kind)
        if cls.oracle and not oracles:
            continue
        if issubclass(cls, RoutingPolicy) and cls.alters:
            continue
        if issubclass(cls, AssignmentPolicy) and cls.approximates and not approximate:
            continue
        found.append(name)
    return found


def combinations(*, oracles, approximate=False):
    """Every assignment, cache and prefetch policy at least once, and no two of a kind
    always together.
    """
    kinds = [
        usable(kind, oracles=oracles, approximate=approximate)
        for kind in ("assignment", "cache", "prefetch")
    ]
    longest = max(map(len, kinds))
    return [
        "+".join(
            kind[(i * (k + 1)) % len(kind)] if k else kind[i % len(kind)]
            for k, kind in enumerate(kinds)
        )
        for i in range(longest * 2)
    ]


def system_of(combination, routing="as-recorded"):
    return System(*combination.split("+"), routing)


@dataclass
class Case:
    """One architecture: the library's model, its store, and the model whose experts are
    ours.
    """

    plain: object
    store: object
    offloaded: OffloadedModel
    shape: object
    local: LocalModel

    @classmethod
    def make(cls, model_dir, store_dir, dtype="float32", name="m", device="cpu"):
        import torch

        plain = (
            AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
            .eval()
            .to(device)
        )
        store = build_store(model_dir, store_dir, dtype=dtype)
        offloaded = OffloadedModel.load(
            model_dir, dtype=getattr(torch, dtype), device=device
        )
        return cls(
            plain,
            store,
            offloaded,
            live_shape(offloaded, model_dir, store),
            LocalModel(name, offloaded.model),
        )

    def run(
        self,
        system,
        memory,
        *,
        batch=1,
        columns=(),
        residual=None,
        new=3,
        seed=0,
        profile=None,
        prompts=None,
        keep=True,
        device=None,
        own_cores=False,
    ):
        """Generate; return the `LiveRun`, its decision log, its timeline, a planner like the
        one used, and the result.
        """
        profile = profile or host_profile()
        costs = Costs(profile, self.shape)

        def planner():
            policies = system.build(
                gpus=1, host_cache="lru" if memory.host is not None else None
            )
            extras = Artefacts(self.shape.layers, self.shape.experts)
            return Planner(
                self.shape, costs, policies, memory, seed=seed, extras=extras
            )

        log = DecisionLog()
        deciding = planner()
        deciding.observers.append(log)
        timeline = Timeline(profile.lanes)
        executor = Executor(
            profile,
            deciding,
            timeline,
            self.store,
            device or HostDevice(),
            self.offloaded.gatings,
            own_cores=own_cores,
        )
        try:
            executor.fill()
            needed = tuple(
                dict.fromkeys(c for p in planner().policies.all() for c in p.needs)
            )
            vocabulary = self.shape.vocab
            draws = np.random.default_rng(batch)
            ids = prompts or [
                draws.integers(1, vocabulary, 4 + 3 * one).tolist()
                for one in range(batch)
            ]
            live = LiveRun(
                self.offloaded,
                self.local,
                executor,
                ids,
                new_tokens=new,
                batch=batch,
                columns=tuple(columns) or needed,
                residual=residual,
                keep_passes=keep,
            )
            result = executor.run(live)
        finally:
            executor.close()
        return live, log, timeline, planner(), result


def mapping(address: int) -> dict[str, list[str]]:
    """What the kernel says of the mapping that holds an address of this process, by
    name.
    """
    facts: dict[str, list[str]] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds, *rest = line.split()
        if rest and "-" in bounds and not bounds.endswith(":"):
            low, high = (int(bound, 16) for bound in bounds.split("-"))
            inside = low <= address < high
        elif inside:
            facts[bounds.removesuffix(":")] = rest
    assert facts, f"no mapping holds {address:x}"
    return facts
