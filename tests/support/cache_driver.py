"""Drives a cache policy through layer steps, and holds what every policy test needs:
views, works, a future.

The driver is the step-atomic definition written down once: look at all active experts
of a layer step, tell the policy, then let the misses in, with nothing that is active
among the candidates. One expert per step makes it sequential.
"""

# ruff: noqa: D101 - the protocols in policies/base.py document these names

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from support.learned_network import Artefacts

from moesim.policies.arrays import read_only, view_of
from moesim.policies.base import CachePolicy, MachineView, Work
from moesim.policies.cache._learned_network import sizes
from moesim.policies.cache._offline_bounds import Uses
from moesim.policies.names import ABSENT, CPU, DECODE, IN_FLIGHT, RESIDENT
from moesim.policies.run_context import RunContext
from moesim.traces.format.arrays import predicted_workload
from moesim.traces.format.schema import ModelShape


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
    link_s=None,
    tokens=None,
    experts=None,
    step=0,
    layer=0,
    phase=DECODE,
    batch=0,
    rows=1,
    scores=None,
    state=None,
    gpu_state=None,
    ranks=None,
    first_cpu_s=0.0,
    width=8,
) -> Work:
    """A layer step of a model with `width` experts per layer. Flat `gpu_s` and
    `arrive_s` are one GPU's; `scores` are [T, E].
    """
    experts = np.arange(len(cpu_s)) if experts is None else np.asarray(experts)
    active = len(experts)
    none = np.zeros(active)
    gpu_s = np.atleast_2d(gpu_s if len(gpu_s) else none)
    gpus = len(gpu_s)
    arrive_s = np.broadcast_to(0.0 if arrive_s is None else arrive_s, gpu_s.shape)
    state = np.full(active, ABSENT) if state is None else np.array(state)
    if gpu_state is None:
        gpu_state = state if gpus == 1 else np.where(arrive_s == 0.0, RESIDENT, ABSENT)

    def wide(values, dtype=np.float64):
        """Rows of E places, of which the active experts' are filled in."""
        given = np.asarray(values)
        filled = np.zeros((*given.shape[:-1], max(width, active)), dtype)
        filled[..., :active] = given
        return filled

    made = Work(gpus, max(width, active))
    made.step, made.layer, made.phase, made.batch = step, layer, int(phase), batch
    made.rows, made.active, made.first = rows, active, layer * width
    made.first_cpu_s = first_cpu_s
    made.experts = read_only(experts.astype(np.int32))
    made.tokens = read_only(
        np.array(np.ones(active) if tokens is None else tokens, np.int32)
    )
    if scores is not None:
        scores = np.atleast_2d(np.asarray(scores, np.float64))
        made.rows = len(scores)
        made.scores = read_only(scores.mean(axis=0))
        made.first_scores = read_only(scores[0].copy())
    made.show(
        state=wide(state, np.int8),
        cpu_s=wide(cpu_s if len(cpu_s) else none),
        host_s=wide(none if host_s is None else host_s),
        gpu_s=wide(gpu_s),
        arrive_s=wide(arrive_s),
        link_s=np.zeros(gpus) if link_s is None else np.array(link_s, np.float64),
        gpu_state=wide(np.broadcast_to(gpu_state, gpu_s.shape), np.int8),
        ranks=wide(np.zeros(active) if ranks is None else ranks, np.int32),
    )
    return made


class View(MachineView):
    """A machine whose memories are lists of keys (gpu, layer, expert).

    A copy takes `copy_s`, a token `cpu_token_s` on the CPU, an expert `gpu_base_s` and
    a token more of it `gpu_token_s` on a GPU.
    """

    def __init__(
        self,
        layers=1,
        experts=8,
        gpus=1,
        resident=(),
        in_flight=(),
        top_k=1,
        *,
        copy_s=1.0,
        cpu_token_s=1.0,
        gpu_base_s=1.0,
        gpu_token_s=0.0,
        gap_s=0.0,
        link_wait_s=0.0,
        future=None,
    ):
        super().__init__(gpus, layers, experts)
        self.top_k = top_k
        self.future = future
        states = np.zeros((gpus, layers, experts), np.int8)
        for keys, state in ((in_flight, IN_FLIGHT), (resident, RESIDENT)):
            for key in keys:
                states[key] = state
        self.states = states.reshape(gpus, -1).data
        tokens = np.arange(1000.0)
        self.copy_s = np.full(layers, copy_s, np.float64).data
        self.cpu_s = np.tile(cpu_token_s * tokens, (layers, 1)).data
        self.gpu_s = np.tile(gpu_base_s + gpu_token_s * tokens, (layers, 1)).data
        self.gap_s = gap_s
        self.link_wait_s = link_wait_s
        self._passed = []

    def see(self, policy, now, routing=None, predicted=None):
        """Show what a prefetcher reads of a layer step: experts of every token, and
        predictions by name.
        """
        self.forget()
        if policy.reads_routing:
            self._see_routing(now, np.array(routing, np.uint16))
        self._see_predictions(policy, predicted or {})
        if policy.oracle and self.future is not None:
            following = range(now.layer + 1, self.layers)
            coming = [self.future.active(now.step, layer) for layer in following]
            edges = np.cumsum([0, *map(len, coming)])
            self.coming = view_of(np.concatenate([[], *coming]), np.int32)
            self.coming_edges = view_of(edges, np.int64)

    def _see_routing(self, now, routing):
        known = [routing]
        for behind, (step, layer, earlier) in enumerate(reversed(self._passed), 1):
            if (step, layer) != (now.step, now.layer - behind):
                break
            known.append(earlier)
        self._passed = [*self._passed[-1:], (now.step, now.layer, routing)]
        self.routing = known[0].data
        if len(known) > 1:
            self.before = known[1].data
        if len(known) > 2:
            self.before_that = known[2].data

    def _see_predictions(self, policy, predicted):
        columns = {
            name: np.array(rows, np.float16).astype(np.float32)
            for name, rows in predicted.items()
        }
        no_scores = np.zeros((0, self.experts), np.float32)
        scores = [columns.get(name, no_scores) for name in policy.needs]
        shape = len(scores), self.experts
        workload = [predicted_workload(each, self.top_k) for each in scores]
        self.workload = np.array(workload, np.int32).reshape(shape).data
        sums = [each.sum(axis=0) for each in scores]
        self.score_sums = np.array(sums, np.float32).reshape(shape).data
        if policy.reads_tokens and "pred1_raw" in columns:
            self.predicted = columns["pred1_raw"].astype(np.float64).data


TimedView = partial(
    View, copy_s=3.0, cpu_token_s=4.0, gpu_base_s=0.0, gpu_token_s=1.0, gap_s=1.0
)
"""A machine whose link takes 3 s for an expert, whose CPU 4 s and whose GPU 1 s a token."""


def named(policy, now, view, *, routing=((0,),), predicted=None):
    """Experts that a prefetcher names: (layer, expert)."""
    view.see(policy, now, routing, predicted)
    keys = np.full(view.layers * view.experts, -1, np.int64)
    count = policy.prefetch(now, view, keys.data)
    return [divmod(key, view.experts) for key in keys[:count].tolist()]


class Placed(NamedTuple):
    """Answer of an assignment: its arrays, and its flags."""

    lanes: np.ndarray
    order: np.ndarray
    flags: int


def placed(policy, now, view=None):
    """Ask an assignment that has started."""
    lanes = np.full(now.active, CPU, np.int8)
    order = np.arange(now.active)
    view = view or View(experts=len(now.state), gpus=now.gpus)
    flags = policy.assign(now, view, lanes.data, order.data)
    return Placed(lanes, order, flags)


def assigned(policy, now, view=None):
    """Start an assignment, on a model that has no costs, and ask it."""
    sizes = shape(now.layer + 1, len(now.state))
    policy.start(RunContext(sizes, now.gpus, np.zeros(1, int), "global"))
    return placed(policy, now, view)


def admit(policy, *keys):
    """Let keys enter, one after the other."""
    for key in keys:
        policy.admitted(int(key))


def evict(policy, *keys):
    """Let keys leave."""
    for key in keys:
        policy.evicted(int(key))


def victims(policy, incoming, candidates):
    """Who leaves for each of `incoming`; -1 for a declined admission."""
    chosen = np.full(len(incoming), -1, np.int64)
    policy.victims(
        view_of(incoming, np.int64), view_of(candidates, np.int64), chosen.data
    )
    return chosen.tolist()


def swaps(policy, now, view, gpu=0):
    """Copies that a cache asks for: pairs (outgoing, incoming) of (layer, expert)."""
    keys = view.layers * view.experts
    outgoing, incoming = np.zeros(keys, np.int64), np.zeros(keys, np.int64)
    states = np.array(view.states)[gpu]
    count = policy.replacements(now, states.data, outgoing.data, incoming.data)
    pairs = zip(outgoing[:count].tolist(), incoming[:count].tolist(), strict=True)
    return [
        (divmod(leaving, view.experts), divmod(entering, view.experts))
        for leaving, entering in pairs
    ]


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
        admit(policy, *filling)
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
            width=experts,
        )
        policy.accessed(now)
        run.hits += int(hit.sum())
        run.accesses += len(keys)
        run.hit_log += hit.tolist()
        incoming = np.array(
            [key for key in keys[~hit].tolist() if policy.admits(now, key)], np.int64
        )
        free = capacity - int(resident[scoped].sum())
        if len(incoming) > free:
            policy.precedence(incoming.data)
        entering = incoming[:free]
        incoming = incoming[free:]
        candidates = np.flatnonzero(resident[scoped]) + (scoped.start or 0)
        candidates = candidates[~np.isin(candidates, keys)]
        incoming = incoming[: len(candidates)]
        if len(incoming):
            chosen = np.array(victims(policy, incoming, candidates), np.int64)
            declined = chosen < 0
            run.declined += incoming[declined].tolist()
            chosen = chosen[~declined].tolist()
            incoming = incoming[~declined]
            assert len(set(chosen)) == len(chosen)
            assert set(chosen) <= set(candidates.tolist())
            resident[chosen] = False
            evict(policy, *chosen)
            run.evicted += chosen
            entering = np.concatenate([entering, incoming])
        resident[entering] = True
        admit(policy, *entering)
    run.resident = np.flatnonzero(resident).tolist()
    return run


def one_by_one(accesses, layer=0):
    """Each access is a step of its own."""
    return [LayerStep(step, layer, [expert]) for step, expert in enumerate(accesses)]


def atomic(*steps):
    """One layer, one list of experts per step."""
    return [LayerStep(step, 0, list(experts)) for step, experts in enumerate(steps)]


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
