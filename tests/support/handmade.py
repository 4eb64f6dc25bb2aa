"""A machine and a model small enough to compute by hand: every cost is a round
number.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from moesim.engine.memory import Link, Memory
from moesim.engine.planner import Planner
from moesim.hwprofiles.costs import Overlap
from moesim.policies import registry
from moesim.policies.registry import register
from moesim.policies.run_context import RunContext
from moesim.policies.sizes import CacheSize, MemoryPlan
from moesim.sim.clock import FastClock, VirtualClock
from moesim.sim.replay import Replay
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import ModelShape, Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter
from moesim.traces.timeline.spans import Timeline


def shape(
    layers: int = 1, experts: int = 4, top_k: int = 1, expert_bytes=100
) -> ModelShape:
    """A model whose experts have `expert_bytes` (one number, or one per layer)."""
    sizes = (
        tuple(expert_bytes)
        if isinstance(expert_bytes, (list, tuple))
        else (expert_bytes,) * layers
    )
    return ModelShape("hand", layers, experts, top_k, 4, 4, sizes, 1)


def hand_trace(
    path,
    routing,
    *,
    experts: int = 8,
    prompt: int = 0,
    expert_bytes: int = 100,
    **columns,
):
    """Write one sequence and open it: `routing` [T][L][K] says who was chosen, the
    first `prompt` tokens are prompt.

    `columns`: optional ones [T][L][...], by name.
    """
    chosen = np.array(routing)
    tokens, layers, top_k = chosen.shape
    header = TraceHeader(shape(layers, experts, top_k, expert_bytes), {"tool": "test"})
    pos = np.repeat(np.arange(tokens), layers)
    phase = np.where(pos < prompt, Phase.PREFILL, Phase.DECODE)
    rows = {
        name: np.array(values).reshape(tokens * layers, -1)
        for name, values in columns.items()
    }
    with TraceWriter(path, header, tuple(rows)) as writer:
        writer.write(
            0,
            pos,
            phase,
            np.tile(np.arange(layers), tokens),
            chosen.reshape(-1, top_k),
            **rows,
        )
    return open_trace(path)


ALONE = Overlap(link=1.0, cpu=1.0)


@dataclass
class HandCosts:
    """Constant seconds per operation; compute grows by `per_token` x (tokens - 1)."""

    cpu: float = 10.0
    gpu: float = 1.0
    copy: float = 4.0
    read: float = 8.0
    dense: float = 2.0
    gate: float = 0.0
    head: float = 0.0
    plan: float = 0.0
    dispatch_s: float = 0.0
    first_op: float = 0.0
    join: float = 0.0
    split: float = 0.0
    activation: float = 0.0
    cpu_first_s: float = 0.0
    gpu_first_s: float = 0.0
    ssd_first_s: float = 0.0
    per_token: float = 0.0
    factors_after_read: tuple[tuple[str, float], ...] = ()
    overlap: Overlap = ALONE

    def dense_of_passes(self, tokens, context_tokens, sequences):
        passes = list(zip(tokens, context_tokens, sequences, strict=True))
        dense_s = [self.dense_s(*each) for each in passes]
        return np.array(dense_s), np.array([self.head_s(t, s) for t, _, s in passes])

    def after_read(self, part):
        return dict(self.factors_after_read).get(part, 1.0)

    def _compute(self, base, tokens):
        return base * (1 + self.per_token * (np.asarray(tokens, np.float64) - 1))

    def cpu_s(self, layer, tokens, experts=None):
        return self._compute(self.cpu, tokens)

    def gpu_s(self, layer, tokens, gpu=0, experts=None):
        return self._compute(self.gpu, tokens)

    def copy_s(self, layer, gpu=0, expert=None):
        return self.copy

    def writeback_s(self, layer, gpu=0, expert=None):
        return self.copy

    def read_s(self, layer, expert=None):
        return self.read

    def dense_s(self, tokens, context_tokens, sequences):
        return self.dense

    def gate_s(self, tokens):
        return self.gate

    def head_s(self, tokens, logits=None):
        return self.head

    def planning_terms(self, policy, *, tiered=False, own_s=0.0):
        return self.plan + own_s, 0.0, 0.0, 0.0

    def least_planning_s(self, active):
        return np.full(len(active), self.plan)

    def first_op_terms(self, *, tiered=False):
        return self.first_op, 0.0, 0.0, 0.0

    @property
    def split_s(self):
        return self.split

    def join_terms(self, *, tiered=False):
        return self.join, 0.0, 0.0, 0.0

    def activation_s(self, tokens):
        return self.activation


@dataclass
class SizedCosts(HandCosts):
    """The same of 100 bytes; copies and reads grow with the bytes of an expert."""

    model: ModelShape = field(default_factory=shape)

    def _sized(self, seconds, layer, expert):
        return seconds * self.model.bytes_of(layer, expert) / 100

    def cpu_s(self, layer, tokens, experts=None):
        return super().cpu_s(layer, tokens)

    def gpu_s(self, layer, tokens, gpu=0, experts=None):
        return super().gpu_s(layer, tokens)

    def copy_s(self, layer, gpu=0, expert=None):
        return self._sized(self.copy, layer, expert)

    def writeback_s(self, layer, gpu=0, expert=None):
        return self._sized(self.copy, layer, expert)

    def read_s(self, layer, expert=None):
        return self._sized(self.read, layer, expert)


@dataclass
class HandProfile:
    """Lanes and workers like a real profile's; `slow` maps (victim class, other class)
    to a factor.
    """

    gpus: int = 1
    slow: dict = field(default_factory=dict)
    shared_worker: tuple[str, ...] = ()
    shares_memory: bool = False

    @property
    def lanes(self):
        devices = [
            f"{kind}{g}" for kind in ("gpu", "h2d", "d2h") for g in range(self.gpus)
        ]
        return ("control", "cpu", *devices, "ssd")

    @property
    def workers(self):
        alone = {lane: (lane,) for lane in self.lanes if lane not in self.shared_worker}
        return alone | ({"shared": self.shared_worker} if self.shared_worker else {})

    @property
    def contention(self):
        return SimpleNamespace(
            slowdown=lambda victim, other: self.slow.get((victim, other), 1.0)
        )


def routed(
    layer: int, *experts: int, tokens=None, top_k: int | None = None, **optional
) -> RoutedLayer:
    """One token that chose `experts` (or the given tokens per expert)."""
    chosen = np.array(sorted(experts), np.int32)
    counts = (
        np.ones(len(experts), np.int32)
        if tokens is None
        else np.array(tokens, np.int32)
    )
    return RoutedLayer(
        layer=layer,
        experts=chosen,
        tokens=counts,
        routing=np.array([experts], np.uint16),
        weights=optional.pop("weights", None),
        scores=optional.pop("scores", None),
        predicted=optional,
    )


def steps(
    *layer_lists: list[RoutedLayer], phase: Phase = Phase.DECODE
) -> list[RoutedStep]:
    """Forward passes of one sequence."""
    return [
        RoutedStep(i, phase, 0, 1, i + 1, 1, layers)
        for i, layers in enumerate(layer_lists)
    ]


def plan_of(
    model: ModelShape,
    system,
    costs: HandCosts | None = None,
    *,
    slots: int = 0,
    scope: str = "layer",
    host_slots: int | None = None,
    gpus: int = 1,
    staging: int = 2,
    future=None,
    **more,
) -> Planner:
    """A planner with `slots` per layer (global scope: their bytes together)."""
    ratio = more.pop("ratio", None)
    size = CacheSize.for_model(
        model,
        scope=scope,
        ratio=ratio,
        slots_per_layer=slots if ratio is None else None,
    )
    host = None
    if host_slots is not None:
        host = CacheSize.for_model(
            model, scope="global", total_bytes=host_slots * model.max_expert_bytes
        )
    policies = system.build(gpus=gpus, host_cache=None if host is None else "lru")
    memory = MemoryPlan(
        size, host, staging, more.pop("budget", None), more.pop("split", "layers")
    )
    return Planner(model, costs or HandCosts(), policies, memory, future=future, **more)


def run(
    planner: Planner,
    forward_passes: list[RoutedStep],
    profile: HandProfile | None = None,
    clock: type[VirtualClock] = FastClock,
):
    """Replay and return (result, spans as a frame)."""
    profile = profile or HandProfile(gpus=planner.gpus)
    timeline = Timeline(profile.lanes)
    result = Replay(profile, planner, timeline, clock=clock).run(forward_passes)
    timeline.close()
    return result, timeline


def plan_step(planner, *layers: RoutedLayer, place=0, now_s=0.0):
    """Plan one layer step of a decode pass."""
    planner.put(planner.block_of(steps(list(layers))[0]))
    return planner.plan(place, now_s)


def memory_of(model, size, cache, name, *, staging):
    """Books of one memory, whose policy has started; its link takes no time."""
    keys = model.layers * model.experts
    link = Link(np.zeros(keys))
    cache.start(RunContext(model, 1, size.slots, size.scope))
    empty = np.zeros(keys, np.int8)
    return Memory(
        model, size, empty, staging=staging, cache=cache, name=name, link=link
    )


def states_of(planner, gpu=0):
    """State of every expert on a GPU, int8 [L, E]."""
    return np.asarray(planner.view.states)[gpu].reshape(planner.layers, -1)


@contextmanager
def registered(**policies):
    """Register ``kind_name=Class`` policies while a test module runs, and no longer."""
    pairs = [(*key.split("_", 1), cls) for key, cls in policies.items()]
    for kind, name, cls in pairs:
        register(kind, name, cls)
    try:
        yield
    finally:
        for kind, name, _ in pairs:
            del registry._registered[kind, name]


def spans(timeline: Timeline, kind: str | None = None) -> list[tuple]:
    """(lane, expert, start_s, end_s) in order of recording."""
    frame = timeline.frame()
    if kind is not None:
        frame = frame[frame["kind"] == kind]
    return list(
        zip(
            frame["lane"],
            frame["expert"],
            frame["start_s"],
            frame["end_s"],
            strict=True,
        )
    )
