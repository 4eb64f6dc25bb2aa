"""Caches that swap on their own account: DALI's window and DAOP's prefill, by the
worked examples.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.cache_driver import View, admit, context, evict, swaps, work
from support.handmade import HandCosts, plan_of, routed, run, shape, spans, steps
from support.small_trace import write_small_trace

from moesim import replay as replay_trace
from moesim.policies.cache.decayed_frequency import DecayedFrequency
from moesim.policies.cache.prefill_swap import PrefillSwap
from moesim.policies.cache.workload_window import WorkloadWindow
from moesim.policies.names import DECODE, PREFILL, RESIDENT
from moesim.policies.systems import System

# -- DALI's workload window ------------------------------------------------------------

WORKLOADS = [
    [2, 0, 1, 0, 3, 0, 0, 0],
    [1, 0, 0, 0, 2, 3, 0, 0],
    [0, 1, 0, 0, 2, 2, 1, 0],
    [0, 0, 1, 0, 3, 1, 1, 0],
    [0, 0, 0, 0, 2, 2, 0, 2],
    [1, 0, 0, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 0, 2],
    [0, 0, 0, 0, 3, 1, 0, 2],
]


def swapped(policy, workloads, residents, *, phase=DECODE, tokens=1):
    """Feed one layer and carry out its swaps at once: (swaps by step, residents at the
    end, hits, active).
    """
    width = len(workloads[0])
    policy.start(context([], len(residents), experts=width))
    admit(policy, *residents)
    inside = set(residents)
    log = {}
    hits = 0
    active = 0
    for step, counts in enumerate(workloads):
        experts = np.flatnonzero(counts)
        now = work(
            experts=experts,
            tokens=np.array(counts)[experts],
            step=step,
            state=[RESIDENT * (e in inside) for e in experts],
            rows=tokens,
            phase=phase,
            width=width,
        )
        hits = hits + sum(e in inside for e in experts)
        active = active + len(experts)
        policy.accessed(now)
        assert not any(policy.admits(now, int(e)) for e in experts)
        view = View(experts=width, resident=[(0, 0, e) for e in inside])
        for (_, out), (_, into) in swaps(policy, now, view):
            assert out in inside
            assert into not in inside
            inside = inside - {out} | {into}
            evict(policy, out)
            admit(policy, into)
            log.setdefault(step, []).append((into, out))
    return log, sorted(inside), hits, active


@pytest.mark.parametrize(("trigger", "gain", "log", "final", "hits"), [
    ("aligned", "always", {3: [(4, 3), (5, 1)], 7: [(7, 2), (3, 0)]}, [3, 4, 5, 7], 14),
    ("aligned", "gain-only", {3: [(4, 3), (5, 1)], 7: [(7, 2)]}, [0, 4, 5, 7], 14),
    ("literal", "always", {0: [(4, 1), (5, 3)], 4: [(6, 0), (7, 2)]}, [4, 5, 6, 7], 21),
    ("literal", "gain-only", {0: [(4, 1)], 4: [(5, 3), (6, 0)]}, [2, 4, 5, 6], 14),
])  # fmt: skip
def test_section_1_7(trigger, gain, log, final, hits):
    """N = 8, four slots, w = 4, u = 2; hits of 28 active experts are looked up before
    the step's swaps.
    """
    policy = WorkloadWindow(window=4, swaps=2, trigger=trigger, gain=gain)
    assert swapped(policy, WORKLOADS, [0, 1, 2, 3]) == (log, final, hits, 28)


def test_section_1_7_h_u_beyond_what_there_is_is_cut():
    log, final, _, _ = swapped(
        WorkloadWindow(window=1, swaps=8), WORKLOADS[:1], [0, 1, 2, 3]
    )
    assert len(log[0]) == 4
    assert final == [4, 5, 6, 7]


def test_section_1_7_d_prefill_counts_as_one_step_or_not_at_all():
    counted = swapped(
        WorkloadWindow(window=4, swaps=1), WORKLOADS[:4], [0, 1, 2, 3], phase=PREFILL
    )
    skipped = swapped(
        WorkloadWindow(window=4, swaps=1, prefill=False),
        WORKLOADS[:4],
        [0, 1, 2, 3],
        phase=PREFILL,
    )
    assert counted[0] == {3: [(4, 3)]}
    assert skipped[0] == {}


def test_workload_window_never_swaps_out_what_has_not_arrived():
    policy = WorkloadWindow(window=1, swaps=1)
    policy.start(context([], 2))
    admit(policy, 0, 1)
    now = work(experts=[5], tokens=[3])
    policy.accessed(now)
    view = View(resident=[(0, 0, 1)], in_flight=[(0, 0, 0)])
    assert swaps(policy, now, view) == [((0, 1), (0, 5))]


@pytest.mark.parametrize("policy", [
    WorkloadWindow(window=1, swaps=1),
    PrefillSwap(),
    DecayedFrequency(half_life=2, margin=0),
])  # fmt: skip
@pytest.mark.parametrize("gpu", [0, 1])
def test_what_another_gpu_has_already_does_not_leave_this_one(policy, gpu):
    """Both GPUs copy expert 0; it has landed on GPU 1 only, whose cache may swap it."""
    policy.start(replace(context([], 1), gpus=2, gpu=gpu))
    admit(policy, 0)
    now = work(experts=[5], tokens=[3], phase=PREFILL)
    policy.accessed(now)
    view = View(gpus=2, resident=[(1, 0, 0)], in_flight=[(0, 0, 0)])
    assert swaps(policy, now, view, gpu) == [((0, 0), (0, 5))][:gpu]


def test_section_1_7_f_swaps_are_copied_after_the_layer_step():
    """Lowest ids inside (0, 1). Window of one step: 3 runs from staging, then replaces
    0; the next step hits it.
    """
    system = System(
        assignment="on-demand",
        cache="workload-window:window=1,swaps=1,gain=gain-only,fill=lowest",
    )
    planner = plan_of(shape(experts=4), system, HandCosts(), slots=2)
    _, timeline = run(planner, steps([routed(0, 3)], [routed(0, 3)]))
    (fetch,), (replace_,) = spans(timeline, "fetch"), spans(timeline, "replace")
    assert (fetch[1], replace_[1]) == (3, 3)
    assert replace_[2] >= fetch[3]
    assert planner.view.resident(0).tolist() == [False, True, False, True]


# -- DAOP's prefill swap ---------------------------------------------------------------

COUNTS = [10, 3, 8, 1, 12, 9, 2, 0]


def prefilled(policy, counts=COUNTS, residents=(0, 1, 2, 3), tokens=22):
    log, final, _, _ = swapped(
        policy, [counts], list(residents), phase=PREFILL, tokens=tokens
    )
    return log.get(0, []), final


def test_section_2_2_paper():
    assert prefilled(PrefillSwap()) == ([(4, 3), (5, 1)], [0, 2, 4, 5])


def test_section_2_2_released():
    """Expert 7, absent and without tokens, passes for the coldest and shifts the
    pairs.
    """
    assert prefilled(PrefillSwap(variant="released")) == ([(5, 3)], [0, 1, 2, 5])


@pytest.mark.parametrize(("variant", "final"), [("paper", [1]), ("released", [0])])
def test_section_2_2_boundary(variant, final):
    """21 tokens against 20: 21 ≥ 1.05 · 20 = 21.0 swaps, strictly more does not."""
    assert prefilled(PrefillSwap(variant=variant), [20, 21], (0,))[1] == final


def test_section_2_2_idle_experts_swap_only_if_asked():
    """0 ≥ 1.05 · 0 holds literally."""
    assert prefilled(PrefillSwap(), [0, 0], (0,))[0] == []
    assert prefilled(PrefillSwap(idle=True), [0, 0], (0,))[0] == [(1, 0)]


def test_prefill_swap_is_frozen_in_decode():
    assert swapped(PrefillSwap(), [COUNTS], [0, 1, 2, 3])[1] == [0, 1, 2, 3]


def test_section_2_1_every_layer_gets_its_share_and_the_best_of_all_the_rest():
    """Seven slots on three layers: two each, and one for the most frequent that is
    left, expert 2 of layer 1.
    """
    counts = np.array([[9, 8, 1, 0], [7, 6, 5, 0], [1, 0, 2, 0]], float)
    policy = PrefillSwap(fill="calibrated")
    policy.start(
        context([], 7, layers=3, experts=4, scope="global", calibration=counts)
    )
    assert policy.initial(np.array([7])).tolist() == [0, 1, 4, 5, 6, 8, 10]
    policy.start(context([], 1, layers=3, experts=4, calibration=counts))
    assert policy.initial(np.array([1, 1, 1])).tolist() == [0, 4, 10]


@pytest.mark.parametrize(
    ("gpus", "split"), [(1, "layers"), (2, "layers"), (2, "experts")]
)
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("cache", ["workload-window:window=1,swaps=2", "prefill-swap"])
def test_swaps_that_are_slower_than_the_steps_never_collide(cache, scope, gpus, split):
    """A copy takes 40 steps: the next windows close while swaps are still in flight."""
    rng = np.random.default_rng(0)
    model = shape(layers=2, experts=6, top_k=2)
    layers = [[routed(n, *rng.permutation(6)[:2]) for n in range(2)] for _ in range(30)]
    passes = steps(*layers, phase=PREFILL)
    planner = plan_of(
        model,
        System(assignment="all-cpu", cache=cache),
        HandCosts(copy=400.0),
        slots=2 if (gpus, split, scope) == (2, "layers", "global") else 3,
        scope=scope,
        gpus=gpus,
        split=split,
    )
    _, timeline = run(planner, passes)
    assert len(spans(timeline, "replace")) > 2
    for memory in planner.gpu:
        there = np.asarray(memory.state) > 0
        assert (np.ravel(memory.cache.inside) == there).all()


def test_an_expert_that_is_computed_before_it_leaves_is_a_hit(tmp_path):
    """`fetch-split` puts it on the GPU again, where it still is: it leaves after the
    layer step. Every other expert of a GPU was there or was copied.
    """
    path = tmp_path / "t.parquet"
    write_small_trace(path, sequences=4, seed=1)
    run = replay_trace(
        path,
        "fetch-split",
        cache="prefill-swap",
        hw="rtx3080ti",
        steps=1,
        batch=3,
        cache_ratio=0.5,
    )
    accesses = run.timeline.access_frame()
    on_gpu = accesses[accesses["lane"] == "gpu0"]
    spans = run.timeline.frame()
    copies = spans[spans["kind"].isin(["fetch", "prefetch"])]
    copied = set(zip(copies["layer"], copies["expert"], strict=True))
    for access in on_gpu[on_gpu["state"] != "hit"].itertuples():
        assert (access.layer, access.expert) in copied
    assert (on_gpu["state"] == "hit").any()


def test_prefill_swap_runs_on_more_gpus_than_layers(make_trace, tiny_shape):
    one_layer = replace(tiny_shape, layers=1, expert_bytes=tiny_shape.expert_bytes[:1])
    run = replay_trace(
        make_trace(shape=one_layer),
        "greedy",
        cache="prefill-swap",
        hw="dali-2x-rtx3090",
        gpu_split="layers",
        cache_scope="global",
        cache_ratio=0.5,
    )
    assert run.metrics["steps"]
