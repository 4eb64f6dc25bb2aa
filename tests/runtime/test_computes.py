"""What real lanes compute beside the plain layer step: ahead of the gate (DAOP), for
the next layer step to join (KTransformers), after the GPU (Fiddler).
"""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from support.handmade import registered
from support.real_machine import (
    COLUMNS,
    LAUNCHED,
    ONE_WORKER,
    SHAPE,
    TWO_WORKERS,
    float_model,
    host_profile,
    real_run,
)
from support.small_trace import write_trace

from moesim.engine.planner import Planner
from moesim.hwprofiles.costs import Costs
from moesim.policies.base import AssignmentPolicy
from moesim.policies.names import CPU, DEFERRED, RESIDENT
from moesim.policies.sizes import CacheSize, MemoryPlan
from moesim.policies.systems import System
from moesim.runtime.executor.device import HostDevice
from moesim.runtime.executor.executor import Executor
from moesim.runtime.executor.lanes import Task
from moesim.runtime.executor.operations import Compute, Precompute
from moesim.runtime.executor.world import RealLayerStep
from moesim.runtime.models.expert_layout import expert_forward, group_tokens
from moesim.runtime.store.build import build_random_store
from moesim.runtime.store.memory import HostSlots
from moesim.traces.format.batch import RoutedLayer
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.spans import READ, Timeline

torch.set_num_threads(1)
WORKERS = {
    "one core": (ONE_WORKER, 1),
    "two cores": (TWO_WORKERS, 2),
    "a thread per lane": (LAUNCHED, 8),
}
SAID = np.array([[1], [2], [1]], np.uint16)
"""Layer 1's expert as predicted for each of three tokens."""


class Foretelling(AssignmentPolicy):
    """All on the CPU; starts expert 1 for tokens 0 and 2, and 2 for token 1; or expert
    1 for all three.
    """

    def __init__(self, *, tokens: str = "named"):
        self.named = tokens == "named"

    def assign(self, work, view, lanes, order):
        return 0

    def precompute(self, gate, view, routing, tokens):
        said = SAID if self.named else np.ones_like(SAID)
        for n, expert in enumerate(said.reshape(-1)):
            routing[n] = expert
            tokens[int(expert)] += 1
        return said.shape[1]


class Guessing(AssignmentPolicy):
    """All on the GPU; the CPU starts expert 1 of the next layer."""

    def assign(self, work, view, lanes, order):
        for i in range(work.active):
            lanes[i] = 1
        return 0

    def precompute(self, gate, view, routing, tokens):
        for token in range(gate.rows):
            routing[token] = 1
        tokens[1] = 1
        return 1


class Deferring(AssignmentPolicy):
    """All on the CPU; results of expert 5 join one layer later."""

    approximates = True
    defers = True

    def assign(self, work, view, lanes, order):
        for i in range(work.active):
            lanes[i] = DEFERRED if work.experts[i] == 5 else CPU
        return 0


@pytest.fixture(autouse=True, scope="module")
def policies_of_this_module():
    with registered(
        assignment_foretelling=Foretelling,
        assignment_guessing=Guessing,
        assignment_deferring=Deferring,
    ):
        yield


@contextmanager
def executor(store, policy, workers, *, slots=0, host=None, layers=2):
    """An executor, its planner and its timeline."""
    profile = host_profile(WORKERS[workers][0], cores=WORKERS[workers][1])
    model = float_model(layers)
    size = CacheSize.of(model.expert_bytes, model.experts, slots_per_layer=slots)
    limited = None
    if host is not None:
        limited = CacheSize.of(
            model.expert_bytes, model.experts, scope="global", total_bytes=host * 6144
        )
    policies = System(policy, "lru").build(gpus=1, host_cache="lru" if host else None)
    planner = Planner(model, Costs(profile, model), policies, MemoryPlan(size, limited))
    timeline = Timeline(profile.lanes)
    made = Executor(profile, planner, timeline, store, HostDevice())
    try:
        made.fill()
        yield made, planner, timeline
    finally:
        made.close()


def ask(made, layer, routing, hidden):
    """One layer step with equal weights."""
    groups = group_tokens(routing)
    weights = torch.full(routing.shape, 0.5)
    routed = RoutedLayer(layer, groups.experts, groups.tokens, routing, None, None, {})
    return made.layer(routed, hidden, weights, groups)


def computed(timeline, lane="cpu"):
    """Computations of a lane, in the order in which they started."""
    spans = timeline.frame()
    return spans[(spans["kind"] == "compute") & (spans["lane"] == lane)].sort_values(
        "start_s"
    )


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("asked", [3, 2])
@pytest.mark.parametrize("tokens", ["named", "any"])
def test_a_token_is_served_ahead_only_where_that_was_predicted_for_it(
    tmp_path, workers, asked, tokens
):
    """Token 0: expert 2, said of token 1. Token 1: expert 1, not said. Token 2: expert
    1, said: on layer 0's input.

    Where the last two tokens alone are asked about (a ragged prefill), positions are
    counted from the end.
    """
    routing = np.array([[2, 0], [1, 3], [1, 0]], np.uint16)
    draw = torch.Generator().manual_seed(1)
    first = torch.randn(3, 32, generator=draw)
    second = torch.randn(3, 32, generator=draw)
    with (
        build_random_store(float_model(), tmp_path / "s", dtype="float32") as store,
        HostSlots(1, store.slot_bytes) as tier,
    ):

        def answer(expert, row):
            store.read_into(1, expert, tier.record(0))
            return expert_forward(
                store.layout(1).views(tier.record(0)), row[None], store.layout(1)
            )[0]

        expected = torch.stack(
            [
                (answer(2, second[0]) + answer(0, second[0])) / 2,
                (
                    answer(1, (second if tokens == "named" else first)[1])
                    + answer(3, second[1])
                )
                / 2,
                (answer(1, first[2]) + answer(0, second[2])) / 2,
            ]
        )
        with executor(store, f"foretelling:tokens={tokens}", workers) as (
            made,
            _,
            timeline,
        ):
            got = []

            def forward():
                made.begin_step(0, Phase.PREFILL, 0)
                ask(made, 0, np.array([[4, 5]] * 3, np.uint16), first)
                got.append(ask(made, 1, routing[-asked:], second[-asked:]))
                made.end_step(3, 1)

            made.run(forward)
    assert torch.allclose(got[0], expected[-asked:], atol=1e-6)
    spans = computed(timeline)
    products = [0, 1, 1, 2, 2, 3] if tokens == "named" else [0, 1, 2, 3]
    if asked == 2:
        products.remove(2)  # token 0's: its layer does not ask about it
    assert sorted(spans.loc[spans["layer"] == 1, "expert"]) == products
    assert spans["expert"].tolist()[:3] == [4, 5, 1], (
        "this layer's own experts come first"
    )


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("host", [None, 12])
def test_a_deferred_result_joins_the_next_layers(tmp_path, monkeypatch, workers, host):
    """Three layers of three tokens, whose experts are 5 and another. Where the CPU has a
    thread of its own, expert 5 of layer 0 begins when the layer step has ended.
    """
    routing = np.array([[5, 0], [1, 5], [2, 3]], np.uint16)
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(3, 32, generator=draw) for _ in range(3)]
    has_ended = threading.Event()
    if workers == "one core":
        has_ended.set()
    run = Compute.run

    def behind_its_layer_step(self):
        if (self.layer, self.expert) == (0, 5):
            assert has_ended.wait(10), "its layer step waits for it"
        return run(self)

    monkeypatch.setattr(Compute, "run", behind_its_layer_step)
    with (
        build_random_store(float_model(3), tmp_path / "s", dtype="float32") as store,
        HostSlots(1, store.slot_bytes) as tier,
        executor(store, "deferring", workers, host=host, layers=3) as (made, *_),
    ):

        def share(layer, expert):
            """Half of what an expert makes of its tokens, [3, H]."""
            store.read_into(layer, expert, tier.record(0))
            weights = store.layout(layer).views(tier.record(0))
            made_of = expert_forward(weights, inputs[layer], store.layout(layer)) / 2
            has = (routing == expert).any(axis=1)
            return made_of * torch.from_numpy(has)[:, None]

        at_once = [sum(share(n, expert) for expert in range(4)) for n in range(3)]
        late = [share(n, 5) for n in range(3)]
        got = []

        def forward():
            # The first pass finds experts in host memory only where it is unlimited.
            for step in range(2):
                made.begin_step(step, Phase.DECODE, 0)
                got.clear()
                for layer in range(3):
                    got.append(ask(made, layer, routing, inputs[layer]))
                    has_ended.set()
                made.end_step(3, 3)

        if host is not None:
            has_ended.set()
        made.run(forward)
    assert torch.allclose(got[0], at_once[0], atol=1e-6)
    assert torch.allclose(got[1], at_once[1] + late[0], atol=1e-6)
    assert torch.allclose(got[2], at_once[2] + late[2] + late[1], atol=1e-6)


def test_weights_keep_their_place_while_a_wrong_guess_computes(tmp_path, monkeypatch):
    """Host memory of three: (0, 0), (1, 1) and (1, 2) when (0, 3) must be read.

    Least recently used is (1, 1), but a product on it, started in vain a step ago, is
    still inside: it stays, and (0, 0) leaves instead.
    """
    run = Precompute.run
    ended = Task.ended
    go = threading.Event()
    unchanged = []

    def slow(self):
        record = self._memories.host.record(self.key)
        before = record.clone()
        assert go.wait(120), "nothing was read meanwhile"
        run(self)
        unchanged.append(torch.equal(before, record))

    def noting(self):
        """When the read's end is written down: the product ends later, whatever core
        does what when.
        """
        ended(self)
        if (self.kind, self.layer, self.expert) == (READ, 0, 3):
            go.set()

    monkeypatch.setattr(Precompute, "run", slow)
    monkeypatch.setattr(Task, "ended", noting)
    hidden = torch.randn(1, 32)
    with (
        build_random_store(float_model(), tmp_path / "s", dtype="float32") as store,
        executor(store, "guessing", "a thread per lane", host=3) as (
            made,
            planner,
            timeline,
        ),
    ):

        def forward():
            for step, (first, second) in enumerate([(0, 1), (0, 2), (3, 2)]):
                made.begin_step(step, Phase.DECODE, 0)
                ask(made, 0, np.array([[first]], np.uint16), hidden)
                ask(made, 1, np.array([[second]], np.uint16), hidden)
                made.end_step(1, 1)

        made.run(forward)
        there = np.flatnonzero(np.array(planner.host.memory.state) == RESIDENT)
        resident = [list(divmod(key, 6)) for key in there.tolist()]
    assert resident == [[0, 3], [1, 1], [1, 2]]
    assert unchanged
    assert all(unchanged)
    early = computed(timeline).iloc[0]
    assert (early["step"], early["layer"], early["expert"]) == (1, 1, 1)
    reads = timeline.frame().query("kind == 'read' and step == 2")
    assert reads["end_s"].max() < early["end_s"], "it was read while the product ran"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    place = tmp_path_factory.mktemp("trace") / "t.parquet"
    return write_trace(place, SHAPE, ((5, 8), (3, 9)), columns=COLUMNS, ragged=True)


def wait_for_work_ahead(monkeypatch):
    """Let the model ask for experts only when a first product ahead of its gate has
    begun, if one was planned: a scheduler may else put its thread last for a whole run.
    """
    begun = threading.Event()
    run = Precompute.run
    layer = Executor.layer

    def noting(self):
        begun.set()
        run(self)

    def waiting(self, *arguments):
        if self.layer_step._coming:
            begun.wait(20)
        return layer(self, *arguments)

    monkeypatch.setattr(Precompute, "run", noting)
    monkeypatch.setattr(Executor, "layer", waiting)


@pytest.mark.parametrize("workers", ["one core", "two cores"])
@pytest.mark.parametrize("host_experts", [None, 12])
def test_daop_computes_each_foreseen_expert_once_and_begins_before_its_gate(
    trace, tmp_path, monkeypatch, workers, host_experts
):
    """One sequence: no expert is computed twice in its layer, and products begun early
    are those the plan named.
    """
    lanes, cores = WORKERS[workers]
    if workers != "one core":
        wait_for_work_ahead(monkeypatch)
    hw = host_profile(lanes, cores=cores)
    host_bytes = host_experts and host_experts * 8192
    sizes = {"slots_per_layer": 2, "host_memory_bytes": host_bytes}
    run = real_run(trace, "daop:first_layer=1", tmp_path / "s", hw, memory=sizes)
    assert run.metrics["approximate"] is True
    plans = [entry.answer for entry in run.decision_log.entries if entry.call == "plan"]
    named = {
        (plan.step, plan.layer + 1, expert)
        for plan in plans
        for expert, tokens in enumerate(plan.ahead_tokens)
        if tokens
    }
    spans = run.timeline.frame()
    accesses = run.timeline.access_frame()
    key = ["step", "layer", "expert"]
    products = list(map(tuple, spans.loc[spans["kind"] == "compute", key].to_numpy()))
    assert len(set(products)) == len(products)
    wanted = set(map(tuple, accesses[key].to_numpy()))
    assert wanted <= set(products)
    assert set(products) - wanted <= named
    planned_s = spans[spans["kind"] == "plan"].set_index(["step", "layer"])["start_s"]
    early = {
        tuple(row[key])
        for _, row in computed(run.timeline).iterrows()
        if row.start_s < planned_s[row.step, row.layer]
    }
    assert early <= named
    # Which has something else to do, unless it waits for the SSD.
    assert early or workers == "one core"
    assert wanted & named, "some were foreseen rightly"


def hold_products_for_the_cpu(monkeypatch):
    """Let products of the device wait until one of the CPU has begun, in layer steps
    that have both: a scheduler may else run one after the other all the time.
    """
    begun = threading.Event()
    ready = RealLayerStep._make_ready
    run = Compute.run

    def noting(self, work, plan):
        ready(self, work, plan)
        begun.clear()
        if len({lane == CPU for lane in plan.lanes[: work.active]}) < 2:
            begun.set()

    def meeting(self):
        if self._on_cpu:
            begun.set()
        else:
            assert begun.wait(120)
        return run(self)

    monkeypatch.setattr(RealLayerStep, "_make_ready", noting)
    monkeypatch.setattr(Compute, "run", meeting)


def test_fiddlers_cpu_begins_after_the_last_fetched_expert(
    trace, tmp_path, monkeypatch
):
    """Loading takes 18 us, the CPU 10 us and 3 us per token: from three tokens on,
    experts are fetched.
    """
    profile = host_profile(**{"costs.cpu.flops_per_s": 1e9})
    overlapping = {}
    for issue in ("serial", "parallel"):
        if issue == "parallel":
            hold_products_for_the_cpu(monkeypatch)
        policy = f"fiddler:issue={issue}"
        options = {"batch": 2, "memory": {"slots_per_layer": 2}}
        run = real_run(trace, policy, tmp_path / "s", profile, **options)
        accesses = run.timeline.access_frame()
        fetched = accesses[(accesses["lane"] == "gpu0") & (accesses["state"] != "hit")]
        on_gpu = computed(run.timeline, "gpu0").merge(
            fetched[["step", "layer", "expert"]]
        )
        ended_s = on_gpu.groupby(["step", "layer"])["end_s"].max()
        started_s = computed(run.timeline).groupby(["step", "layer"])["start_s"].min()
        both = ended_s.index.intersection(started_s.index)
        assert len(both), "layer steps with both"
        overlapping[issue] = int((started_s[both] < ended_s[both]).sum())
    assert overlapping["serial"] == 0
    assert overlapping["parallel"] > 0
