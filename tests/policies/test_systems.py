"""The named systems: each resolves, says where it departs from its source, and carries
out a whole run.
"""

import numpy as np
import pytest
from support.cache_driver import LayerStep, ListFuture
from support.handmade import HandCosts, plan_of, run, spans
from support.handmade import shape as hand_shape
from support.learned_network import Artefacts, write

from moesim.policies.base import PolicyError
from moesim.policies.registry import names, resolve
from moesim.policies.systems import SYSTEMS, System, compose
from moesim.questions.compare import compare
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase

KINDS = ("assignment", "cache", "prefetch", "routing")
LAYERS = 7
EXPERTS = 6
TOP_K = 2


def routed_layer(rng, layer, tokens):
    """A layer step with every optional column a policy may need."""
    scores = rng.dirichlet(np.ones(EXPERTS), tokens).astype(np.float16)
    routing = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K].astype(np.uint16)
    weights = np.take_along_axis(scores, routing.astype(int), axis=1)
    experts, counts = np.unique(routing, return_counts=True)
    ahead = {
        name: rng.dirichlet(np.ones(EXPERTS), tokens).astype(np.float16)
        for name in PREDICTION_COLUMNS
    }
    predicted = {
        name: rows for name, rows in ahead.items() if layer + int(name[4]) < LAYERS
    }
    return RoutedLayer(
        layer,
        experts.astype(np.int32),
        counts.astype(np.int32),
        routing,
        weights,
        scores,
        predicted,
    )


def forward_passes(seed=0):
    """A prompt of 5 tokens and 4 decode steps, twice."""
    rng = np.random.default_rng(seed)
    sizes = [5, 1, 1, 1, 1] * 2
    return [
        RoutedStep(
            step,
            Phase.PREFILL if tokens > 1 else Phase.DECODE,
            step // 5,
            tokens,
            9,
            1,
            [routed_layer(rng, layer, tokens) for layer in range(LAYERS)],
        )
        for step, tokens in enumerate(sizes)
    ]


def carried_out(system, slots=2, **machine):
    """Replay the forward passes on a machine of round numbers; `machine` may say
    ``gpus`` and ``split``.
    """
    model = hand_shape(LAYERS, EXPERTS, TOP_K)
    passes = forward_passes()
    future = ListFuture(
        [
            LayerStep(p.step, n.layer, n.experts.tolist())
            for p in passes
            for n in p.layers
        ]
    )
    planner = plan_of(
        model,
        system,
        HandCosts(cpu=3.0, gpu=1.0, copy=2.0),
        slots=slots,
        scope=system.scope or "layer",
        staging=system.staging_slots(model) or 2,
        future=future,
        extras=Artefacts(LAYERS, EXPERTS),
        **machine,
    )
    result, timeline = run(planner, passes)
    return planner, result, timeline


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_part_of_a_system_resolves(name):
    """Names and parameters are known, and the note says where the system departs from
    its source.
    """
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
    """No cache, a small and a full one: every layer step joins, and every active expert
    is computed.
    """
    system = SYSTEMS[name]
    planner, result, timeline = carried_out(system, slots)
    assert result.layer_steps == 10 * LAYERS
    altered = planner.policies.routing.alters
    if not altered:
        computed = len(spans(timeline, "compute"))
        assert computed == sum(
            len(layer.experts) for step in forward_passes() for layer in step.layers
        )
    assert len(planner.gate_mass) == (10 * LAYERS if altered else 0)
    if altered and slots:
        assert 0.5 < np.mean(planner.gate_mass) <= 1.001


@pytest.mark.parametrize("split", ["layers", "experts"])
@pytest.mark.parametrize(
    "name", [*SYSTEMS, *(name for name in names("assignment") if name not in SYSTEMS)]
)
def test_section_1_8_every_system_and_assignment_runs_on_two_gpus(name, split):
    """Layers split between them, or the experts of every layer: all join, and GPU 1 has
    its share of what GPUs do.
    """
    system = compose(name)
    planner, result, timeline = carried_out(system, gpus=2, split=split)
    assert result.layer_steps == 10 * LAYERS
    compute = spans(timeline, "compute")
    if not planner.policies.routing.alters:
        assert len(compute) == sum(
            len(layer.experts) for step in forward_passes() for layer in step.layers
        )
    lanes = {lane for lane, *_ in compute}
    assert ("gpu1" in lanes) == ("gpu0" in lanes)
    if split == "layers":
        homes = (
            timeline.frame()
            .query("lane in ('gpu0', 'gpu1') and kind == 'compute'")
            .groupby("lane", observed=True)
        )
        for lane, rows in homes:
            assert {planner.home(layer) for layer in rows["layer"]} == {int(lane[-1])}


def test_few_systems_see_the_future():
    """The others may run on a live model, where nothing tells what drafts would know."""
    oracles = {
        name
        for name, system in SYSTEMS.items()
        if any(resolve(getattr(system, k), k).oracle for k in KINDS)
    }
    assert oracles == {"clairvoyant", "pre-gated", "sp-moe", "moe-speq"}


def test_what_a_trace_cannot_support_is_refused_by_name_before_anything_runs(
    make_trace, tmp_path
):
    """Bare routing: of five systems three lack a column or a network; the first one has
    not left a file.
    """
    trace = open_trace(make_trace())
    options = {"hw": "rtx3090-epyc7532", "out": tmp_path / "out"}
    with pytest.raises(PolicyError) as refused:
        compare(trace, ["fiddler", "dali", "flashmoe", "smoe", "deepspeed"], **options)
    message = str(refused.value)
    assert "3 of 5 cannot run" in message
    for name, reason in {
        "dali": "prefetch policy 'residual:size=4' needs column 'pred1_res'",
        "flashmoe": "expected a trained network 'flashmoe', found none",
        "smoe": "prefetch policy 'partial-hidden' needs column 'pred1_raw'",
    }.items():
        assert f"{name}: " in message
        assert reason in message
    assert "\n" not in message
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        PolicyError, match=r"train-cache TRACE --out DIR.*--artefacts DIR"
    ):
        compare(trace, ["fiddler", "flashmoe"], **options)
    artefacts = write(tmp_path / "learned", 3, 8)
    table, _ = compare(trace, ["fiddler", "flashmoe"], artefacts=artefacts, **options)
    assert set(table["policy"]) == {"fiddler", "flashmoe"}


def test_systems_that_buffer_layers_stage_whole_layers():
    model = hand_shape(2, 64)
    assert SYSTEMS["pre-gated"].staging_slots(model) == 128
    assert SYSTEMS["deepspeed"].staging_slots(model) == 128
    assert SYSTEMS["smoe"].staging_slots(model) == 64
    assert SYSTEMS["dali"].staging_slots(model) == 4
    assert SYSTEMS["dali"].buffer_slots() == 4
    assert SYSTEMS["fiddler"].staging_slots(model) is None


def test_composing_replaces_only_what_is_named():
    dali = SYSTEMS["dali"]
    mixed = compose("dali", cache="lru", routing="cache-prior")
    assert (mixed.assignment, mixed.cache, mixed.prefetch, mixed.routing) == (
        dali.assignment,
        "lru",
        dali.prefetch,
        "cache-prior",
    )
    assert mixed.staging == dali.staging
    assert compose("greedy") == System(assignment="greedy")
    assert compose("pre-gated").staging_layers == 2
    with pytest.raises(
        PolicyError, match=r"unknown policy 'dalli'.*did you mean 'dali'"
    ):
        compose("dalli")


def test_a_system_name_never_hides_an_assignment_policy_by_accident():
    """A shared name means the system, whose assignment is then that policy."""
    for name in set(SYSTEMS) & set(names("assignment")):
        assert SYSTEMS[name].assignment == name
