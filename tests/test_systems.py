"""The named systems: each resolves, says where it departs from its source, and carries out a whole run."""

from __future__ import annotations

import numpy as np
import pytest
from cache_driver import LayerStep, ListFuture
from handmade import HandCosts, plan_of, run, spans
from handmade import shape as hand_shape

from policies.base import PolicyError
from policies.registry import names, resolve
from policies.systems import SYSTEMS, System, compose
from traces.batch import RoutedLayer, RoutedStep
from traces.schema import PREDICTION_COLUMNS, Phase

OF_THE_ISSUE = {
    *("dali", "hybrimoe", "daop", "smoe", "flashmoe"),
    *("fiddler", "mixtral-offloading", "moe-on-demand", "pre-gated", "moe-infinity", "adapmoe", "edgemoe"),
    *("moe-lightning", "llama.cpp", "ktransformers", "deepspeed"),
}
KINDS = ("assignment", "cache", "prefetch", "routing")
LAYERS, EXPERTS, TOP_K = 7, 6, 2


def routed_layer(rng, layer, tokens):
    """A layer step with every optional column a policy may need."""
    scores = rng.dirichlet(np.ones(EXPERTS), tokens).astype(np.float16)
    routing = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K].astype(np.uint16)
    weights = np.take_along_axis(scores, routing.astype(int), axis=1)
    experts, counts = np.unique(routing, return_counts=True)
    ahead = {name: rng.dirichlet(np.ones(EXPERTS), tokens).astype(np.float16) for name in PREDICTION_COLUMNS}
    predicted = {name: rows for name, rows in ahead.items() if layer + int(name[4]) < LAYERS}
    return RoutedLayer(layer, experts.astype(np.int32), counts.astype(np.int32), routing, weights, scores, predicted)


def forward_passes(seed=0):
    """A prompt of 5 tokens and 4 decode steps, twice."""
    rng = np.random.default_rng(seed)
    sizes = [5, 1, 1, 1, 1] * 2
    return [
        RoutedStep(
            step, Phase.PREFILL if tokens > 1 else Phase.DECODE, step // 5, tokens, 9, 1,
            [routed_layer(rng, layer, tokens) for layer in range(LAYERS)],
        )
        for step, tokens in enumerate(sizes)
    ]  # fmt: skip


def carried_out(system, slots=2):
    """Replay the forward passes on a machine of round numbers."""
    model = hand_shape(LAYERS, EXPERTS, TOP_K)
    passes = forward_passes()
    future = ListFuture([LayerStep(p.step, n.layer, n.experts.tolist()) for p in passes for n in p.layers])
    planner = plan_of(
        model,
        system,
        HandCosts(cpu=3.0, gpu=1.0, copy=2.0),
        slots=slots,
        scope=system.scope or "layer",
        staging=system.staging_slots(model) or 2,
        future=future,
    )
    result, timeline = run(planner, passes)
    return planner, result, timeline


def test_all_systems_of_the_field_are_there():
    assert set(SYSTEMS) >= OF_THE_ISSUE


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_part_of_a_system_resolves(name):
    """Names and parameters are known, and the note says where the system departs from its source."""
    system = SYSTEMS[name]
    for kind in KINDS:
        resolve(getattr(system, kind), kind)
    assert len(system.note) > 20
    assert system.scope in {None, "layer", "global"}
    built = system.build(gpus=2, host_cache="lru")
    assert len(built.caches) == 2
    assert built.caches[0] is not built.caches[1]
    assert built.names["assignment"] == system.assignment


@pytest.mark.parametrize("slots", [0, 2, EXPERTS])
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_carries_out_a_run(name, slots):
    """No cache, a small and a full one: every layer step joins, and every active expert is computed."""
    system = SYSTEMS[name]
    planner, result, timeline = carried_out(system, slots)
    assert result.layer_steps == 10 * LAYERS
    altered = planner.policies.routing.alters
    if not altered:
        computed = len(spans(timeline, "compute"))
        assert computed == sum(len(layer.experts) for step in forward_passes() for layer in step.layers)
    assert len(planner.gate_mass) == (10 * LAYERS if altered else 0)
    if altered and slots:
        assert 0.5 < np.mean(planner.gate_mass) <= 1.001


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_same_run_twice_is_the_same(name):
    first, second = (spans(carried_out(SYSTEMS[name])[2]) for _ in range(2))
    assert first == second


def test_only_pre_gated_sees_the_future():
    """The others may run on a live model."""
    oracles = {name for name, system in SYSTEMS.items() if any(resolve(getattr(system, k), k).oracle for k in KINDS)}
    assert oracles == {"pre-gated"}


def test_only_three_systems_alter_routing():
    altering = {name for name, system in SYSTEMS.items() if resolve(system.routing, "routing").alters}
    assert altering == {"daop", "smoe", "adapmoe"}


def test_systems_that_buffer_layers_stage_whole_layers():
    model = hand_shape(2, 64)
    assert SYSTEMS["pre-gated"].staging_slots(model) == 128
    assert SYSTEMS["deepspeed"].staging_slots(model) == 128
    assert SYSTEMS["dali"].staging_slots(model) == 8
    assert SYSTEMS["fiddler"].staging_slots(model) is None


def test_composing_replaces_only_what_is_named():
    dali = SYSTEMS["dali"]
    mixed = compose("dali", cache="lru", routing="cache-prior")
    assert (mixed.assignment, mixed.cache, mixed.prefetch, mixed.routing) == (
        dali.assignment, "lru", dali.prefetch, "cache-prior",
    )  # fmt: skip
    assert mixed.staging == dali.staging
    assert compose("greedy") == System(assignment="greedy")
    assert compose("pre-gated").staging_layers == 2
    with pytest.raises(PolicyError, match=r"unknown policy 'dalli'.*did you mean 'dali'"):
        compose("dalli")


def test_a_system_name_never_hides_an_assignment_policy_by_accident():
    """A shared name means the system, whose assignment is then that policy."""
    for name in set(SYSTEMS) & set(names("assignment")):
        assert SYSTEMS[name].assignment == name
