"""What holds of every copy's life, in both worlds, whatever the policies do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.handmade import (
    HandCosts,
    plan_of,
    registered,
    routed,
    run,
    shape,
    states_of,
    steps,
)
from support.real_machine import LAUNCHED, TWO_WORKERS, float_model, host_profile
from support.strategies import worker_tables
from support.wild_policies import WildAssignment, WildCache, WildPrefetch

from moesim.engine.observers import observed
from moesim.engine.planner import Planner
from moesim.hwprofiles.costs import Costs
from moesim.policies.names import ABSENT, IN_FLIGHT, RESIDENT
from moesim.policies.sizes import CacheSize, MemoryPlan
from moesim.policies.systems import System
from moesim.runtime.executor.device import HostDevice
from moesim.runtime.executor.executor import Executor
from moesim.runtime.models.expert_layout import group_tokens
from moesim.runtime.store.build import build_random_store
from moesim.traces.format.batch import RoutedLayer
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.spans import Timeline

LAYERS = 3
EXPERTS = 6


class Knobs(WildPrefetch):
    """As `WildPrefetch`, with every reading of `late`."""

    def start(self, context):
        super().start(context)
        self.late = self.draw.choice(["keep", "drop", "wait"])


class Swaps(WildCache):
    """As `WildCache`, but it neither declines nor refuses, so that it stays full."""

    def admits(self, work, key):
        return True

    def victims(self, incoming, candidates, chosen):
        for n, key in enumerate(self.draw.sample(list(candidates), len(incoming))):
            chosen[n] = key


@pytest.fixture(autouse=True, scope="module")
def policies_of_this_module():
    with registered(
        assignment_wild=WildAssignment, prefetch_knobs=Knobs, cache_swaps=Swaps
    ):
        yield


class Auditor:
    """Checks the books after every report to the planner.

    Attributes:
        reports: how many there were.
    """

    def __init__(self, planner):
        self.reports = 0
        self._planner = planner
        self._full = [self._empty(memory) == 0 for memory in self._memories()]

    def _memories(self):
        host = self._planner.host
        return [*self._planner.gpu, *([] if host is None else [host.memory])]

    @staticmethod
    def _empty(memory):
        """Places of the cache that hold nothing that has landed."""
        there = np.asarray(memory.state) == RESIDENT
        cached = there & (np.asarray(memory.staged) == 0)
        return int(memory.size.slots.sum()) - int(cached.sum())

    def reported(self, call, arguments, answer):
        self.reports += 1
        for at, memory in enumerate(self._memories()):
            state = np.asarray(memory.state)
            staged = np.asarray(memory.staged)
            cached = (staged == 0) & (state != ABSENT)
            # Every byte is free or some expert's, and no expert is there twice.
            used = int(np.asarray(memory.bytes_of)[cached].sum())
            assert used + sum(memory.free_bytes) == memory.size.total_bytes
            assert min(memory.holds) >= 0
            assert int(staged.sum()) == memory.staged_total <= memory.staging
            # A full memory has an empty place only while a copy into it is running.
            running = int((cached & (state == IN_FLIGHT)).sum())
            empty = self._empty(memory)
            self._full[at] |= empty == 0
            assert not self._full[at] or empty == running, (call, arguments)


def wild(prefetch="knobs", cache="swaps"):
    return System("wild", cache=cache, prefetch=prefetch)


layer_steps = st.lists(
    st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS),
    min_size=LAYERS,
    max_size=LAYERS,
)
traces = st.lists(layer_steps, min_size=1, max_size=6)
seeds = st.integers(0, 10_000)


@settings(max_examples=150, deadline=None)
@given(
    traces,
    seeds,
    st.integers(0, EXPERTS),
    st.sampled_from(["layer", "global"]),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, LAYERS * EXPERTS)),
    st.sampled_from(["swaps", "lru", "none"]),
)
def test_a_full_memory_has_an_empty_place_only_while_a_copy_into_it_runs(
    trace, seed, slots, scope, staging, host_slots, cache
):
    """In the simulator: and every replay ends, every expert computed once."""
    planner = plan_of(
        shape(LAYERS, EXPERTS),
        wild(cache=cache),
        HandCosts(cpu=3.1, gpu=0.9, copy=2.3, read=3.7, dense=1.7, plan=0.1),
        slots=slots,
        scope=scope,
        staging=staging,
        host_slots=host_slots,
        seed=seed,
    )
    auditor = Auditor(planner)
    passes = steps(
        *[
            [routed(layer, *sorted(chosen)) for layer, chosen in enumerate(layers)]
            for layers in trace
        ]
    )
    _, timeline = run(observed(planner, auditor), passes)
    computed = timeline.frame().query("kind == 'compute'")
    assert len(computed) == sum(len(chosen) for layers in trace for chosen in layers)
    assert auditor.reports > 0


# -- real workers, real copies ----------------------------------------------------------

MODEL = float_model(LAYERS, EXPERTS)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    place = tmp_path_factory.mktemp("life") / "s"
    with build_random_store(MODEL, place, dtype="float32") as built:
        yield built


@settings(max_examples=25, deadline=None)
@given(
    traces,
    seeds,
    st.integers(0, EXPERTS),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, LAYERS * EXPERTS)),
    st.one_of(st.sampled_from([TWO_WORKERS, LAUNCHED]), worker_tables()),
)
def test_the_same_holds_with_real_copies(
    store, trace, seed, slots, staging, host_slots, workers
):
    profile = host_profile(workers, cores=8)
    size = CacheSize.of(MODEL.expert_bytes, EXPERTS, slots_per_layer=slots)
    host = None
    if host_slots is not None:
        host = CacheSize.of(
            MODEL.expert_bytes, EXPERTS, scope="global", total_bytes=host_slots * 6144
        )
    policies = wild().build(gpus=1, host_cache=None if host is None else "lru")
    planner = Planner(
        MODEL,
        Costs(profile, MODEL),
        policies,
        MemoryPlan(size, host, staging),
        seed=seed,
    )
    auditor = Auditor(planner)
    timeline = Timeline(profile.lanes)
    executor = Executor(
        profile, observed(planner, auditor), timeline, store, HostDevice()
    )
    hidden = torch.zeros(1, 32)

    def forward():
        for step, layers in enumerate(trace):
            executor.begin_step(step, Phase.DECODE, 0)
            for layer, chosen in enumerate(layers):
                routing = np.array([sorted(chosen)], np.uint16)
                groups = group_tokens(routing)
                asked = RoutedLayer(
                    layer, groups.experts, groups.tokens, routing, None, None, {}
                )
                weights = torch.full(routing.shape, 0.5)
                executor.layer(asked, hidden, weights, groups)
            executor.end_step(1, 1)

    try:
        executor.fill()
        executor.run(forward)
        slots_taken = sum(slot >= 0 for slot in executor.memories.slots._slot_of)
    finally:
        executor.close()
    computed = timeline.frame().query("kind == 'compute'")
    assert len(computed) == sum(len(chosen) for layers in trace for chosen in layers)
    # Nothing is lost or there twice: who has a slot is who the books say is there.
    assert slots_taken == int((states_of(planner) != ABSENT).sum())
