"""The fast engine answers what SimPy answers, to the last bit."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from support.engine_draws import SELDOM, compare_engines, compare_seldom, configurations
from support.engine_pairs import assert_equal, both, machine
from support.handmade import hand_trace, registered, shape
from support.strategies import DrawnTrace

import moesim
from moesim.hwprofiles.schema import Quantity
from moesim.policies.cache.lru import LRU
from moesim.traces.format.reader import Trace, open_trace


@settings(max_examples=160, deadline=None)
@given(configurations)
def test_both_engines_give_the_same_run(configuration):
    compare_engines(*configuration)


@pytest.mark.parametrize(("shared", "rate_changes"), [((), 4), (("control", "cpu"), 3)])
def test_by_hand_who_plans_computes_when_copies_and_reads_have_begun(
    tmp_path, shared, rate_changes
):
    """Reads slow the CPU. Step 1 reads 0, then 1 while the CPU computes 0; step 2 reads
    2 beside 0. Each read ends before the product beside it does.

    A CPU thread of its own begins at once, so each read changes its rate twice: when it
    starts and when it ends. The thread that has planned serves the CPU's lane last:
    the second step's read is under way already, and changes the rate once.
    """
    trace = hand_trace(
        tmp_path / "t.parquet", [[[0, 1]], [[0, 2]]], experts=4, prompt=0
    )
    # So that a first product takes longer than the read beside it.
    numbers = {"costs.cpu.first_s": 5e-5, "costs.dispatch.per_op_s": 5.2e-6}
    hw = machine(shared=shared, slowdown={("cpu", "ssd"): 1.1}, numbers=numbers)
    runs = both(
        trace,
        "all-cpu",
        hw=hw,
        staging=1,
        cache="lru",
        host_memory_bytes=300,
        host_cache="lru",
    )
    assert_equal(*runs)
    spans = 2 * len(("dense", "plan", "activation", "join", "head")) + 3 + 4
    turns = 2 * len(("dense", "plan", "products", "activation", "join", "head"))
    assert runs[1].result.events == spans + turns + rate_changes


@pytest.mark.parametrize(
    ("pool_bytes", "states"), [(200, [0, 0, 0, 0, 0, 0]), (400, [0, 0, 0, 2, 2, 2])]
)
def test_by_hand_two_small_experts_leave_for_a_large_one(tmp_path, pool_bytes, states):
    """Layers weigh 100, 100 and 200 bytes an expert, in one pool. In 200 bytes the last
    one takes both places of the others, and loses them to the first in the next pass,
    which leaves 100 bytes for the second. Had it been staged, the next pass would begin
    with two hits. In 400 bytes nobody leaves.
    """
    trace = hand_trace(
        tmp_path / "t.parquet",
        [[[0], [0], [0]]] * 2,
        experts=4,
        expert_bytes=[100, 100, 200],
    )
    runs = both(
        trace,
        "on-demand",
        cache="lru",
        cache_scope="global",
        staging=1,
        # Beside the pool: one staged expert, and one byte of dense weights.
        gpu_memory_bytes=pool_bytes + 200 + 1,
    )
    assert_equal(*runs)
    (accesses,) = runs[1].timeline.access_chunks()
    assert accesses["state"].tolist() == states


def test_by_hand_who_leaves_is_copied_back_when_the_copy_in_its_place_begins(tmp_path):
    """One slot: 0 comes, then 1 takes its place, and 0 goes back on a link of its own.
    Nobody waits for it.
    """
    trace = hand_trace(tmp_path / "t.parquet", [[[0]], [[1]]], experts=4)
    runs = both(trace, "mixtral-offloading", slots_per_layer=1)
    assert_equal(*runs)
    spans = runs[1].timeline.frame()
    copies = spans[spans["bytes"] > 0]
    rows = list(zip(copies["lane"], copies["kind"], copies["expert"], strict=True))
    assert rows == [("h2d0", "fetch", 0), ("h2d0", "fetch", 1), ("d2h0", "replace", 0)]
    assert copies["start_s"].iloc[1] == copies["start_s"].iloc[2]


def test_copies_back_may_queue_for_longer_than_the_run(make_trace):
    """The way back is slow: hundreds wait, more than the loop first has room for."""
    profile = machine()
    slow = Quantity(1e9, "assumed", "slower than everything else")
    numbers = {**profile.numbers, "costs.d2h.bytes_per_s": slow}
    curves = {k: v for k, v in profile.curves.items() if "d2h" not in k}
    trace = open_trace(make_trace(sequences=((4, 60), (2, 50))))
    runs = both(
        trace,
        "mixtral-offloading",
        slots_per_layer=1,
        hw=replace(profile, numbers=numbers, curves=curves),
    )
    assert_equal(*runs)
    kinds = runs[1].timeline.frame()["kind"].value_counts()
    waiting = kinds["fetch"] - kinds["replace"]
    shape = trace.shape
    assert waiting > 4 * shape.layers * shape.experts + 2 * shape.experts + 64


@pytest.mark.parametrize("policy", ["greedy", "on-demand", "all-cpu"])
def test_one_memory_for_cpu_and_gpu(make_trace, policy):
    profile = machine()
    one = {"memory.unified": Quantity(1, "assumed", "one memory")}
    hw = replace(profile, numbers={**profile.numbers, **one})
    runs = both(open_trace(make_trace()), policy, hw=hw)
    assert_equal(*runs)
    assert set(runs[1].metrics["bytes"].values()) == {0}


@pytest.mark.parametrize("configuration", SELDOM)
def test_what_draws_seldom_reach(make_trace, configuration):
    columns = ("scores", "weights", "pred1_raw", "pred2_raw", "pred3_raw")
    sequences = ((4, 12), (2, 9), (0, 8))
    trace = open_trace(make_trace(sequences=sequences, columns=columns))
    compare_seldom(trace, *configuration)


def test_by_hand_products_wait_for_no_replacement_that_waits_for_them(tmp_path):
    """Two layer steps of two tokens are uploaded. The first wishes for a replacement of
    expert 0, whose copy finds the one worker busy; the second computes expert 0, and
    waits for all of its own copies, but not for one that needs the place of 0.
    """
    tokens = ([[[2, 4]], [[1, 0]]], [[[3, 2]], [[1, 0]]])
    drawn = DrawnTrace(shape(1, 5, 2), tuple((0, np.array(each)) for each in tokens))
    lanes = ("control", "cpu", "gpu", "h2d", "d2h")
    runs = both(
        open_trace(drawn.write(tmp_path / "t.parquet", ())),
        "layer-wise:upload_tokens=2",
        cache="workload-window:window=1,prefill=false,deadline=none,fill=lowest",
        prefetch="pre-gated",
        hw=machine(shared=lanes),
        slots_per_layer=1,
        staging=3,
        batch=2,
    )
    assert_equal(*runs)
    accesses = next(runs[0].timeline.access_chunks())
    assert accesses["expert"].tolist() == [2, 3, 4, 0, 1]


@pytest.mark.parametrize("rate", [2, 50, 2000])
def test_requests_that_arrive_over_time_are_served_alike(make_trace, rate):
    """Passes depend on the time, and between them nothing may be to do."""
    runs = [
        moesim.replay(
            make_trace(), "greedy", arrivals=f"poisson:{rate}", batch=3, engine=engine
        )
        for engine in ("simpy", "fast")
    ]
    first, second = (run.metrics | {"wall_s": 0} for run in runs)
    assert first == second
    assert first["requests"]


def test_an_answer_overridden_in_python_is_not_passed_over(make_trace):
    """A Python subclass of a compiled policy is asked, not its parent."""

    class Moody(LRU):
        def victims(self, incoming, candidates, chosen):
            for n in range(len(incoming)):
                chosen[n] = candidates[len(candidates) - len(incoming) + n]

    trace = open_trace(make_trace(sequences=((4, 6), (2, 5))))
    options = {"cache_ratio": 0.4}
    with registered(cache_moody=Moody):
        moody = both(trace, "on-demand", cache="moody", **options)
    assert_equal(*moody)
    _, parent = both(trace, "on-demand", cache="lru", **options)
    assert moody[1].metrics != parent.metrics


@pytest.mark.parametrize("policy", ["on-demand+lru", "sp-moe"])
def test_results_do_not_depend_on_where_chunks_end(make_trace, monkeypatch, policy):
    """Chunks are cut elsewhere, before a draft as well; rows stay the same."""
    from moesim.traces.timeline import spans

    trace = open_trace(make_trace(sequences=((4, 6), (2, 5))))
    whole, _ = both(trace, policy)
    monkeypatch.setattr(spans, "CHUNK_SPANS", 7)
    monkeypatch.setattr(spans, "CHUNK_ACCESSES", 3)
    first, second = both(trace, policy)
    assert_equal(first, second)
    rows = np.concatenate([c["end_s"] for c in second.timeline.chunks()])
    assert len(list(second.timeline.chunks())) > 1
    np.testing.assert_array_equal(rows, next(iter(whole.timeline.chunks()))["end_s"])


def test_a_trace_is_cut_once_for_equal_runs(make_trace, monkeypatch):
    """Runs of a sweep share it; another batch is another cut, and so are other
    passes.
    """
    trace = open_trace(make_trace(sequences=((4, 6), (2, 5))))
    reads = []
    sequences = Trace.sequences
    monkeypatch.setattr(
        Trace, "sequences", lambda *given: reads.append(1) or sequences(*given)
    )
    runs = [
        moesim.replay(trace, policy, batch=batch, engine="fast").metrics["accesses"]
        for batch in (1, 2)
        for policy in ("greedy", "all-cpu", "on-demand")
    ]
    assert len(reads) == 2
    assert runs[:3] == [runs[0]] * 3
    assert runs[3:] == [runs[3]] * 3
    assert pickle.loads(pickle.dumps(trace)).last_cut == {}
