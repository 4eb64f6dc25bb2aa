"""Drives a cache policy through layer steps, and holds what every policy test needs:
views, works, a future.

The driver is the step-atomic definition written down once: look at all active experts
of a layer step, tell the policy, then let the misses in, with nothing that is active
among the candidates. One expert per step makes it sequential.
"""

# ruff: noqa: D101 - the protocols in policies/base.py document these names

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.learned_network import Artefacts

from moesim.policies.base import ABSENT, RESIDENT, CachePolicy, LayerWork, RunContext
from moesim.policies.cache._learned_network import sizes
from moesim.policies.cache._offline_bounds import Uses
from moesim.traces.format.schema import ModelShape, Phase

SHARED_TRACES = Path(__file__).parents[3] / "shared" / "traces"


class LayerStep(NamedTuple):
    step: int
    layer: int
    experts: list[int]


def shape(layers: int = 1, experts: int = 8, top_k: int = 1) -> ModelShape:
    return ModelShape("test", layers, experts, top_k, 4, 4, (100,) * layers, 1)


def work(
    *,
    cpu_s=(),
    gpu_s=(),
    arrive_s=None,
    host_s=None,
    tokens=None,
    experts=None,
    step=0,
    layer=0,
    routing=None,
    predicted=None,
    state=None,
) -> LayerWork:
    """A `LayerWork` with read-only arrays; flat `gpu_s` and `arrive_s` are one
    GPU's.
    """
    experts = np.arange(len(cpu_s)) if experts is None else experts
    active = len(experts)
    zeros = np.zeros(active)
    gpu_s = np.array(np.atleast_2d(gpu_s if len(gpu_s) else zeros), np.float64)
    made = LayerWork(
        step=step,
        layer=layer,
        phase=Phase.DECODE,
        experts=np.array(experts, np.int32),
        tokens=np.array(np.ones(active) if tokens is None else tokens, np.int32),
        state=np.array(np.full(active, ABSENT) if state is None else state, np.int8),
        cpu_s=np.array(cpu_s if len(cpu_s) else zeros, np.float64),
        host_s=np.array(zeros if host_s is None else host_s, np.float64),
        gpu_s=gpu_s,
        arrive_s=np.array(
            np.broadcast_to(0.0 if arrive_s is None else arrive_s, gpu_s.shape),
            np.float64,
            order="C",
        ),
        routing=np.array([[0]] if routing is None else routing, np.uint16),
        predicted={
            name: np.array(values, np.float16)
            for name, values in (predicted or {}).items()
        },
    )
    for name in (
        "experts",
        "tokens",
        "state",
        "cpu_s",
        "host_s",
        "gpu_s",
        "arrive_s",
        "routing",
    ):
        getattr(made, name).flags.writeable = False
    return made


class View:
    """A machine whose memories are lists of keys."""

    gap_s = 0.0

    def __init__(self, layers=1, experts=8, gpus=1, resident=(), in_flight=(), top_k=1):
        self.shape = shape(layers, experts, top_k)
        self.layers = layers
        self.experts = experts
        self.gpus = gpus
        self._resident = set(resident)
        self._in_flight = set(in_flight)

    def _mask(self, keys, layer, gpu):
        return np.array(
            [(gpu, layer, expert) in keys for expert in range(self.experts)]
        )

    def resident(self, layer, gpu=0):
        return self._mask(self._resident, layer, gpu)

    def in_flight(self, layer, gpu=0):
        return self._mask(self._in_flight, layer, gpu)

    def capacity(self, layer, gpu=0):
        return sum(key[:2] == (gpu, layer) for key in self._resident)

    def copy_s(self, layer):
        return 1.0

    def link_wait_s(self, gpu=0):
        return 0.0

    def cpu_s(self, layer, tokens):
        return np.asarray(tokens, np.float64)

    def gpu_s(self, layer, tokens):
        return np.ones(np.shape(tokens))


class TimedView(View):
    """A machine whose link takes 3 s for an expert and whose GPU takes 1 s a token."""

    gap_s = 1.0
    cpu_first_s = 0.0
    cpu_token_s = 4.0

    def copy_s(self, layer, expert=None):
        return 3.0

    def cpu_s(self, layer, tokens, experts=None):
        return self.cpu_token_s * tokens

    def gpu_s(self, layer, tokens, experts=None):
        return 1.0 * tokens


class ListFuture:
    """The future as lists of uses, searched one by one: slow and obvious."""

    def __init__(self, steps, tokens=None):
        """`tokens` maps (step, layer) to those of each expert, ascending; one each
        where it has nothing.
        """
        self.never = 1 + max((s.step for s in steps), default=0)
        self._layers = 1 + max((s.layer for s in steps), default=0)
        self._active = {(s.step, s.layer): sorted(s.experts) for s in steps}
        self._tokens = tokens or {}
        self._uses = {}
        for s in steps:
            for expert in s.experts:
                self._uses.setdefault((s.layer, expert), []).append(s.step)

    def next_use(self, step, layer, expert):
        return next(
            (use for use in self._uses.get((layer, expert), []) if use > step),
            self.never,
        )

    def _layer_steps(self):
        """Step, layer and active experts of every layer step, in replay order."""
        for step in range(self.never):
            for layer in range(self._layers):
                yield step, layer, self.active(step, layer)

    @property
    def experts(self):
        return np.concatenate([active for _, _, active in self._layer_steps()])

    @property
    def edges(self):
        return np.cumsum([0, *(len(active) for _, _, active in self._layer_steps())])

    @property
    def following(self):
        return np.concatenate(
            [self.next_uses(*layer_step) for layer_step in self._layer_steps()]
        )

    def next_uses(self, step, layer, experts):
        return np.array([self.next_use(step, layer, int(e)) for e in experts], np.int64)

    def active(self, step, layer):
        return np.array(self._active.get((step, layer), []), np.int32)

    def tokens(self, step, layer):
        return np.array(
            self._tokens.get((step, layer), [1] * len(self.active(step, layer))),
            np.int32,
        )


@dataclass
class Run:
    """What happened; `evicted` in order, as expert ids (single layer) or flat keys."""

    hits: int = 0
    accesses: int = 0
    evicted: list[int] = field(default_factory=list)
    declined: list[int] = field(default_factory=list)
    hit_log: list[bool] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)


def context(
    steps, capacity, *, layers=1, experts=8, scope="layer", seed=0, calibration=None
) -> RunContext:
    slots = np.full(layers if scope == "layer" else 1, capacity)
    return RunContext(
        shape(layers, experts),
        1,
        slots,
        scope,
        seed=seed,
        calibration=calibration,
        future=ListFuture(steps),
        extras=Artefacts(layers, experts),
    )


def untrained(
    layers: int, experts: int, hidden: int = 4, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random weights where a learned policy expects trained ones: enough for what does
    not depend on them.
    """
    draw = np.random.default_rng(seed).normal
    return {
        name: draw(size=size).astype(np.float32)
        for name, size in sizes(layers, experts, hidden).items()
    }


def drive(
    policy: CachePolicy, steps, capacity, *, layers=1, experts=8, scope="layer", seed=0
) -> Run:
    """Run `steps` through a cache of `capacity` slots per layer, or in all with the
    global scope.

    Checks on the way that victims are distinct candidates, one answer for each incoming
    expert.
    """
    ctx = context(
        steps, capacity, layers=layers, experts=experts, scope=scope, seed=seed
    )
    policy.start(ctx)
    resident = np.zeros(layers * experts, bool)
    filling = policy.initial(ctx.capacity_slots)
    if filling is not None:
        assert len(set(filling.tolist())) == len(filling)
        resident[filling] = True
        policy.admitted(filling)
    run = Run()
    for step, layer, active in steps:
        keys = np.array(sorted(active), np.int64) + layer * experts
        scoped = (
            slice(layer * experts, (layer + 1) * experts)
            if scope == "layer"
            else slice(None)
        )
        assert resident[scoped].sum() <= capacity
        hit = resident[keys]
        now = work(
            experts=sorted(active),
            step=step,
            layer=layer,
            state=np.where(hit, RESIDENT, ABSENT),
            routing=[active],
        )
        policy.accessed(now)
        run.hits += int(hit.sum())
        run.accesses += len(keys)
        run.hit_log += hit.tolist()
        incoming = keys[~hit]
        incoming = incoming[policy.admits(now, incoming)]
        free = capacity - int(resident[scoped].sum())
        if len(incoming) > free:
            incoming = policy.precedence(incoming)
        entering = incoming[:free]
        incoming = incoming[free:]
        candidates = np.flatnonzero(resident[scoped]) + (scoped.start or 0)
        candidates = candidates[~np.isin(candidates, keys)]
        incoming = incoming[: len(candidates)]
        if len(incoming):
            victims = policy.victims(incoming, candidates)
            assert len(victims) == len(incoming)
            declined = victims < 0
            run.declined += incoming[declined].tolist()
            victims = victims[~declined]
            incoming = incoming[~declined]
            assert len(set(victims.tolist())) == len(victims)
            assert set(victims.tolist()) <= set(candidates.tolist())
            if len(victims):
                resident[victims] = False
                policy.evicted(victims)
                run.evicted += victims.tolist()
            entering = np.concatenate([entering, incoming])
        if len(entering):
            resident[entering] = True
            policy.admitted(entering)
    run.resident = np.flatnonzero(resident).tolist()
    return run


def one_by_one(accesses, layer=0):
    """Each access is a step of its own."""
    return [LayerStep(step, layer, [expert]) for step, expert in enumerate(accesses)]


def atomic(*steps):
    """One layer, one list of experts per step."""
    return [LayerStep(step, 0, list(experts)) for step, experts in enumerate(steps)]


def real_trace(name: str, tokens: int) -> list[LayerStep]:
    """The first `tokens` decode tokens of a shared trace, as layer steps in replay
    order.
    """
    path = SHARED_TRACES / f"{name}.parquet"
    if not path.exists():
        pytest.skip(
            "other people's trace, no part of the project:"
            f" ../shared/traces/{name}.parquet is not here"
        )
    columns = ["seq_id", "step", "phase", "layer", "expert_ids"]
    batch = next(pq.ParquetFile(path).iter_batches(batch_size=1 << 15, columns=columns))
    rows = [row for row in batch.to_pylist() if row["phase"] == "decode"]
    steps = []
    seen = {}
    for row in rows:
        step = seen.setdefault((row["seq_id"], row["step"]), len(seen))
        if step >= tokens:
            break
        steps.append(LayerStep(step, row["layer"], sorted(row["expert_ids"])))
    return steps


def flattened(steps, experts):
    """Layer steps as single accesses in ascending id, flat keys on one layer:
    sequential semantics.
    """
    return one_by_one(
        [layer * experts + expert for _, layer, active in steps for expert in active]
    )


def uses_of(layer_steps, experts=8, *, size=None, cost=None, entry=None):
    """Uses of layer steps; `size`, `cost` and `entry` are looked up by expert, 1, 1 and
    0 if not given.
    """
    place = np.repeat(
        np.arange(len(layer_steps)), [len(s.experts) for s in layer_steps]
    )
    ids = np.array([e for s in layer_steps for e in sorted(s.experts)], np.int64)
    layer = np.array([s.layer for s in layer_steps for _ in s.experts], np.int64)

    def look(table, other):
        return (
            np.full(len(ids), other) if table is None else np.array(table, float)[ids]
        )

    return Uses(
        place, layer * experts + ids, look(size, 1.0), look(cost, 1.0), look(entry, 0.0)
    )
