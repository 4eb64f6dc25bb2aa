"""Asks policies about the planner's records: shows a layer step as their contract
(`moesim.policies.base`) has it, and takes answers out of the arrays they filled in.

A `machine` is a `MachineState`, which stands above this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.arrays import read_only, view_of, zeros
from moesim.policies.base import Gate, Work
from moesim.policies.names import (
    CPU,
    IN_FLIGHT,
    NONE,
    RESIDENT,
    SERIAL,
    UNUSED,
    WAITS,
)
from moesim.policies.planner.records import (
    Assignment,
    ExpertKey,
    GateOutputs,
    LayerWork,
    Precompute,
    Routing,
    Swap,
)

if TYPE_CHECKING:
    from moesim.policies.base import CachePolicy

_NO_ROUTING = np.empty((0, 0), np.uint16)
_NO_TABLE = np.empty((0, 0))


def shown(work: LayerWork, experts: int) -> Work:
    """A layer step as policies see it, made once; `experts` of a layer."""
    made: Work | None = work.shown
    if made is not None:
        return made
    rows = len(work.arrive_s)
    made = work.shown = Work(rows, 0)
    made.step = work.step
    made.layer = work.layer
    made.phase = int(work.phase)
    made.batch = work.batch
    made.rows = len(work.routing)
    made.active = len(work.experts)
    made.first = work.layer * experts
    made.experts = read_only(work.experts)
    made.tokens = read_only(work.tokens)
    if work.scores is not None:
        made.scores = work.scores.mean(axis=0, dtype=np.float64).data
        made.first_scores = work.scores[:1].astype(np.float64).reshape(-1).data
    made.show(
        state=work.state,
        cpu_s=work.cpu_s,
        host_s=work.host_s,
        gpu_s=work.gpu_s,
        arrive_s=work.arrive_s,
        link_s=np.zeros(rows) if work.link_s is None else work.link_s,
        gpu_state=np.repeat(work.state[None], rows, axis=0),
        ranks=np.zeros(0, np.int32),
    )
    return made


def assign(machine: Any, work: LayerWork) -> Assignment:
    """Ask for lanes and launch order."""
    asked = shown(work, machine.experts)
    asked.first_cpu_s = machine.cpu_first_s
    # A cache may have replaced something since it was shown first.
    asked.gpu_state = read_only(_states_by_gpu(machine, work))
    policy = machine.policies.assignment
    if policy.defers:
        asked.ranks = read_only(_ranks_of(work))
    active = len(work.experts)
    lanes = np.full(active, CPU, np.int8)
    order = np.arange(active)
    flags = policy.assign(asked, machine.view, lanes.data, order.data)
    return Assignment(
        lanes, order, serial=bool(flags & SERIAL), waits=bool(flags & WAITS)
    )


def _states_by_gpu(machine: Any, work: LayerWork) -> np.ndarray:
    """State of every active expert on each GPU: int8 [G, A]."""
    if len(work.arrive_s) == 1:
        return work.state[None]
    states = machine.states.reshape(-1, machine.layers, machine.experts)
    flying = states[: machine.gpus, work.layer, work.experts] == IN_FLIGHT
    resident = work.arrive_s == 0.0
    return np.where(resident, RESIDENT, flying * IN_FLIGHT).astype(np.int8)


def _ranks_of(work: LayerWork) -> np.ndarray:
    """Best place of each active expert among the experts of any token: int32 [A]."""
    best = np.zeros(1 + int(work.experts.max(initial=0)), np.int32)
    # Better places overwrite worse ones.
    for place in reversed(range(work.routing.shape[1])):
        column = work.routing[:, place]
        best[column[column != UNUSED]] = place
    return best[work.experts]


def _numbers(values: np.ndarray | None) -> memoryview:
    return view_of(_NO_TABLE if values is None else values, np.float64)


def _gate(outputs: GateOutputs) -> Gate:
    gate = Gate()
    gate.step = outputs.step
    gate.layer = outputs.layer
    gate.phase = int(outputs.phase)
    gate.rows = len(outputs.experts)
    gate.experts = view_of(outputs.experts, np.uint16)
    gate.weights = _numbers(outputs.weights)
    gate.scores = _numbers(outputs.scores)
    gate.predicted = _numbers(outputs.predicted)
    return gate


def precompute(machine: Any, work: LayerWork) -> Precompute | None:
    """Ask for work ahead of the next layer's gate, by what that gate says of this
    layer's input.
    """
    gate = _gate(
        GateOutputs(
            step=work.step,
            layer=work.layer + 1,
            phase=work.phase,
            experts=work.routing,
            weights=None,
            scores=None,
            predicted=work.predicted.get("pred1_raw"),
        )
    )
    rows = len(work.routing)
    routing = np.full(rows * machine.experts, UNUSED, np.uint16)
    tokens = np.zeros(machine.experts, np.int32)
    columns = machine.policies.assignment.precompute(
        gate, machine.view, routing.data, tokens.data
    )
    if not columns:
        return None
    experts = np.flatnonzero(tokens).astype(np.int32)
    predicted = routing[: rows * columns].reshape(rows, columns)
    return Precompute(experts, tokens[experts], predicted)


def route(machine: Any, outputs: GateOutputs) -> tuple[Gate, Routing]:
    """Ask for the experts of every token, and weigh those that were altered."""
    gate = _gate(outputs)
    policy = machine.policies.routing
    routing = np.empty(gate.rows * machine.experts, np.uint16)
    columns = policy.route(gate, machine.view, routing.data)
    if not columns:
        return gate, Routing(outputs.experts, outputs.weights)
    experts = routing[: gate.rows * columns].reshape(gate.rows, columns)
    return gate, Routing(experts, policy.weigh(gate, experts))


def prefetch(machine: Any, work: LayerWork) -> list[ExpertKey]:
    """Ask for experts of coming layers, most wanted first."""
    # Few policies predict.
    from moesim.traces.predictions import tallies  # noqa: PLC0415 - see above

    policy = machine.policies.prefetch
    view = machine.view
    view.gap_s = machine.gap_s
    view.link_wait_s = machine.link_wait_s()
    workload, sums = tallies(
        work.predicted, policy.needs, machine.shape.top_k, machine.experts
    )
    view.workload = view_of(workload, np.int32)
    view.score_sums = view_of(sums, np.float32)
    view.predicted = _numbers(work.predicted.get("pred1_raw"))
    _show_costs(machine, max(len(work.routing), int(workload.max(initial=0))))
    if policy.reads_routing:
        routing, before, before_that = machine.remember_routing(work)
        view.routing = view_of(routing, np.uint16)
        view.before = view_of(before, np.uint16)
        view.before_that = view_of(before_that, np.uint16)
    if policy.oracle:
        _show_future(machine, work)
    named = zeros(machine.layers * machine.experts, np.int64)
    count = policy.prefetch(shown(work, machine.experts), view, named)
    return _keys(named, count, machine.experts)


def _show_costs(machine: Any, most: int) -> None:
    """Show seconds of experts for up to so many tokens."""
    view = machine.view
    if most < machine.tokens_shown:
        return
    machine.tokens_shown = most + 1
    tokens = np.arange(most + 1)
    layers = range(machine.layers)
    view.cpu_s = np.array([machine.cpu_s(layer, tokens) for layer in layers]).data
    view.gpu_s = np.array([machine.gpu_s(layer, tokens) for layer in layers]).data


def _show_future(machine: Any, work: LayerWork) -> None:
    """Show the active experts of the coming layers of this pass."""
    following = machine.layers - 1 - work.layer
    edges = np.zeros(following + 1, np.int64)
    active: list[Any] = [np.empty(0, np.int32)]
    if machine.future is not None:
        active += [
            machine.future.active(work.step, work.layer + 1 + n)
            for n in range(following)
        ]
        edges[1:] = np.cumsum([len(experts) for experts in active[1:]])
    machine.view.coming = view_of(np.concatenate(active), np.int32)
    machine.view.coming_edges = edges.data


def foretold(machine: Any, experts: np.ndarray, draft_s: float) -> list[ExpertKey]:
    """Ask what a drafted token foretells, by the experts that it really uses."""
    policy = machine.policies.prefetch
    if not policy.foretells:
        return []
    view = machine.view
    view.forget()
    view.gap_s = machine.gap_s
    view.link_wait_s = machine.link_wait_s()
    (predicted,) = policy.drafted(experts[None])
    named = zeros(machine.layers * machine.experts, np.int64)
    count = policy.foretold(view_of(predicted, np.int32), draft_s, view, named)
    return _keys(named, count, machine.experts)


def replacements(
    cache: CachePolicy, work: LayerWork, states: np.ndarray, experts: int
) -> list[Swap]:
    """Ask a cache for copies of its own; `states` int8 [L * E] of its memory."""
    outgoing = zeros(len(states), np.int64)
    incoming = zeros(len(states), np.int64)
    count = cache.replacements(
        shown(work, experts), read_only(states), outgoing, incoming
    )
    going = _keys(outgoing, count, experts)
    return [
        Swap(*pair) for pair in zip(going, _keys(incoming, count, experts), strict=True)
    ]


def victims(
    cache: CachePolicy, incoming: np.ndarray, candidates: np.ndarray
) -> np.ndarray:
    """Ask a cache who leaves, int64 [M]."""
    chosen = np.full(len(incoming), NONE)
    cache.victims(read_only(incoming), read_only(candidates), chosen.data)
    return chosen


def precedence(cache: CachePolicy, incoming: np.ndarray) -> np.ndarray:
    """Ask a cache in which order experts should enter, int64 [M]."""
    ordered = incoming.copy()
    cache.precedence(ordered.data)
    return ordered


def admits(
    cache: CachePolicy, work: LayerWork, incoming: np.ndarray, experts: int
) -> np.ndarray:
    """Ask a cache which experts may enter, bool [M]."""
    asked = shown(work, experts)
    return np.array([cache.admits(asked, key) for key in incoming.tolist()], np.bool_)


def _keys(named: memoryview, count: int, experts: int) -> list[ExpertKey]:
    return [ExpertKey(*divmod(key, experts)) for key in named[:count]]
