"""The field's scored and swapping caches: worked examples, and each literal reading against ours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cache_driver import LayerStep, View, atomic, context, drive, one_by_one, work
from handmade import HandCosts, plan_of, routed, run, shape, spans, steps

from policies.base import RESIDENT, PolicyError
from policies.cache.fifo import FIFO
from policies.cache.least_stale_interval import LeastStaleInterval
from policies.cache.least_stale_layer import LeastStaleLayer
from policies.cache.least_stale_pass import LeastStalePass
from policies.cache.lfru import LFRU
from policies.cache.lifo import LIFO
from policies.cache.moe_infinity import MoEInfinity
from policies.cache.mrs import MRS
from policies.cache.prefill_swap import PrefillSwap
from policies.cache.random import Random
from policies.cache.score_window import ScoreWindow
from policies.cache.workload_window import WorkloadWindow
from policies.systems import System
from traces.schema import Phase

# -- DALI's workload window ------------------------------------------------------------------------------

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


def swapped(policy, workloads, residents, *, phase=Phase.DECODE, tokens=1):
    """Feed one layer and carry out its swaps at once: (swaps by step, residents at the end, hits, active)."""
    policy.start(context([], len(residents), experts=len(workloads[0])))
    policy.admitted(np.array(residents))
    inside, log, hits, active = set(residents), {}, 0, 0
    for step, counts in enumerate(workloads):
        experts = np.flatnonzero(counts)
        state = [RESIDENT * (e in inside) for e in experts]
        routing = np.zeros((tokens, 1), int)
        now = replace(
            work(experts=experts, tokens=np.array(counts)[experts], step=step, state=state, routing=routing), phase=phase
        )
        hits, active = hits + sum(e in inside for e in experts), active + len(experts)
        policy.accessed(now)
        assert not policy.admits(now, experts).any()
        view = View(experts=len(counts), resident=[(0, 0, e) for e in inside])
        for out, into in policy.replacements(now, view):
            assert out.expert in inside
            assert into.expert not in inside
            inside = inside - {out.expert} | {into.expert}
            policy.evicted(np.array([out.expert]))
            policy.admitted(np.array([into.expert]))
            log.setdefault(step, []).append((into.expert, out.expert))
    return log, sorted(inside), hits, active


@pytest.mark.parametrize(
    ("trigger", "gain", "swaps", "final", "hits"),
    [
        ("aligned", "always", {3: [(4, 3), (5, 1)], 7: [(7, 2), (3, 0)]}, [3, 4, 5, 7], 14),
        ("aligned", "gain-only", {3: [(4, 3), (5, 1)], 7: [(7, 2)]}, [0, 4, 5, 7], 14),
        ("literal", "always", {0: [(4, 1), (5, 3)], 4: [(6, 0), (7, 2)]}, [4, 5, 6, 7], 21),
        ("literal", "gain-only", {0: [(4, 1)], 4: [(5, 3), (6, 0)]}, [2, 4, 5, 6], 14),
    ],
)
def test_section_1_7(trigger, gain, swaps, final, hits):
    """N = 8, four slots, w = 4, u = 2; hits of 28 active experts are looked up before the step's swaps."""
    policy = WorkloadWindow(window=4, swaps=2, trigger=trigger, gain=gain)
    assert swapped(policy, WORKLOADS, [0, 1, 2, 3]) == (swaps, final, hits, 28)


def test_section_1_7_u_beyond_what_there_is_is_cut():
    log, final, _, _ = swapped(WorkloadWindow(window=1, swaps=8), WORKLOADS[:1], [0, 1, 2, 3])
    assert len(log[0]) == 4
    assert final == [4, 5, 6, 7]


def test_section_1_7_prefill_counts_as_one_step_or_not_at_all():
    counted = swapped(WorkloadWindow(window=4, swaps=1), WORKLOADS[:4], [0, 1, 2, 3], phase=Phase.PREFILL)
    skipped = swapped(WorkloadWindow(window=4, swaps=1, prefill=False), WORKLOADS[:4], [0, 1, 2, 3], phase=Phase.PREFILL)
    assert counted[0] == {3: [(4, 3)]}
    assert skipped[0] == {}


def test_workload_window_never_swaps_out_what_has_not_arrived():
    policy = WorkloadWindow(window=1, swaps=1)
    policy.start(context([], 2))
    policy.admitted(np.array([0, 1]))
    now = work(experts=[5], tokens=[3])
    policy.accessed(now)
    (swap,) = policy.replacements(now, View(resident=[(0, 0, 1)], in_flight=[(0, 0, 0)]))
    assert swap == ((0, 1), (0, 5))


def test_workload_window_fills_at_random_by_the_seed():
    filled = [drive(WorkloadWindow(), [], 4, seed=seed).resident for seed in (1, 1, 2)]
    assert filled[0] == filled[1] != filled[2]
    assert len(filled[0]) == 4


def test_workload_window_swaps_are_copied_after_the_layer_step():
    """Lowest ids inside (0, 1). Window of one step: 3 runs from staging, then replaces 0; the next step hits it."""
    system = System(assignment="on-demand", cache="workload-window:window=1,swaps=1,gain=gain-only,fill=lowest")
    planner = plan_of(shape(experts=4), system, HandCosts(), slots=2)
    _, timeline = run(planner, steps([routed(0, 3)], [routed(0, 3)]))
    (fetch,), (replace_,) = spans(timeline, "fetch"), spans(timeline, "replace")
    assert (fetch[1], replace_[1]) == (3, 3)
    assert replace_[2] >= fetch[3]
    assert planner.resident(0).tolist() == [False, True, False, True]


# -- DAOP's prefill swap ---------------------------------------------------------------------------------

COUNTS = [10, 3, 8, 1, 12, 9, 2, 0]


def prefilled(policy, counts=COUNTS, residents=(0, 1, 2, 3), tokens=22):
    log, final, _, _ = swapped(policy, [counts], list(residents), phase=Phase.PREFILL, tokens=tokens)
    return log.get(0, []), final


def test_section_2_2_paper():
    assert prefilled(PrefillSwap()) == ([(4, 3), (5, 1)], [0, 2, 4, 5])


def test_section_2_2_released():
    """Expert 7, absent and without tokens, passes for the coldest and shifts the pairs."""
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
    """Seven slots on three layers: two each, and one for the most frequent that is left, expert 2 of layer 1."""
    counts = np.array([[9, 8, 1, 0], [7, 6, 5, 0], [1, 0, 2, 0]], float)
    policy = PrefillSwap(fill="calibrated")
    policy.start(context([], 7, layers=3, experts=4, scope="global", calibration=counts))
    assert policy.initial(np.array([7])).tolist() == [0, 1, 4, 5, 6, 8, 10]
    policy.start(context([], 1, layers=3, experts=4, calibration=counts))
    assert policy.initial(np.array([1, 1, 1])).tolist() == [0, 4, 10]


def test_prefill_swap_says_what_it_misses():
    with pytest.raises(PolicyError, match="calibration trace; found none"):
        PrefillSwap(fill="calibrated").start(context([], 2))


# -- caches by score -------------------------------------------------------------------------------------


def scored(policy, *rows, experts=4, top_k=1):
    """Feed one layer's score rows, one step each ([T, E] for several tokens)."""
    base = context([], 2, experts=experts)
    policy.start(replace(base, shape=replace(base.shape, top_k=top_k)))
    for step, row in enumerate(rows):
        values = np.atleast_2d(np.array(row, np.float16))
        policy.accessed(replace(work(experts=[int(values[0].argmax())], step=step), scores=values))
    return policy


S1, S2, S3 = [0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.6, 0.1], [0.05, 0.45, 0.1, 0.4]


def test_section_4_5():
    """k = 1, so p = 2; α = .5. Residents 0 and 2: 0 has the lower S."""
    for rows, expected in [
        ([S1], [0.25, 0.15, 0, 0]),
        ([S1, S2], [0.125, 0.175, 0.3, 0]),
        ([S1, S2, S3], [0.0625, 0.3125, 0.15, 0.2]),
    ]:
        policy = scored(MRS(), *rows)
        assert policy.score.tolist() == pytest.approx(expected, abs=1e-3)  # scores are float16
    assert policy.victims(np.array([1]), np.array([0, 2])).tolist() == [0]


def test_section_4_5_batch_by_mean_or_by_first_row():
    rows = [[0.9, 0.1, 0, 0], [0, 0.1, 0.9, 0]]
    assert scored(MRS(alpha=1.0, p=1), rows).score.argmax() == 0  # .45 and .45: the lower id
    assert scored(MRS(alpha=1.0, p=4), rows).score.tolist() == pytest.approx([0.45, 0.1, 0.45, 0], abs=1e-3)
    assert scored(MRS(alpha=1.0, p=4, first_row=True), rows).score.tolist() == pytest.approx([0.9, 0.1, 0, 0], abs=1e-3)


def test_mrs_ties_go_to_the_lower_id_or_to_the_least_recently_touched():
    """Nobody has a score; 1 was touched last."""
    for tie, victim in (("id", 0), ("touched", 2)):
        policy = MRS(tie=tie)
        policy.start(context([], 2, experts=4))
        for step, expert in enumerate([2, 0, 1]):
            policy.accessed(work(experts=[expert], step=step))
        assert policy.victims(np.array([3]), np.array([0, 1, 2])).tolist() == [victim], tie


def test_mrs_starts_empty_or_with_the_lowest_ids():
    assert drive(MRS(), [], 2).resident == []
    assert drive(MRS(fill="lowest"), [], 2, layers=2, experts=4).resident == [0, 1, 4, 5]


def test_score_window_forgets_what_is_older():
    """Expert 0 leads over both steps, expert 2 over the last one alone."""
    rows = [[0.9, 0, 0.1, 0], [0.3, 0, 0.6, 0]]
    assert scored(ScoreWindow(window=2), *rows).score.tolist() == pytest.approx([0.6, 0, 0.35, 0], abs=1e-3)
    policy = scored(ScoreWindow(window=1), *rows)
    assert policy.victims(np.array([1]), np.array([0, 2])).tolist() == [0]
    assert scored(ScoreWindow(window=8), *rows).victims(np.array([1]), np.array([0, 2])).tolist() == [2]


def test_score_window_breaks_ties_by_last_use_then_id():
    policy = scored(ScoreWindow(), [0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25])
    policy.accessed(work(experts=[0], step=2))
    assert policy.victims(np.array([3, 3]), np.array([0, 1, 2])).tolist() == [1, 2]


def test_caches_by_score_say_what_they_read():
    assert MRS().needs == ScoreWindow().needs == ("scores",)


# -- frequency and age -----------------------------------------------------------------------------------


def test_lfru_discounts_frequency_by_age():
    """At step 5: 0 has 3 uses, aged 3 + 1 → .75; 1 has one, aged 2 + 1 → .33; 2 has one, aged 1 + 1 → .5."""
    assert drive(LFRU(), one_by_one([0, 0, 0, 1, 2, 3]), 3).evicted == [1]
    assert drive(LFRU(), one_by_one([0, 0, 1, 1, 2, 2, 2, 3]), 3).evicted == [0]


def test_lfru_remembers_evicted_experts_or_not():
    """0 was used four times before it left; back again, it has five uses or one."""
    accesses = one_by_one([0, 0, 0, 0, *[1] * 9, *[2] * 9, 0, 3])
    assert drive(LFRU(variant="perfect"), accesses, 2).evicted == [0, 1, 2]
    assert drive(LFRU(variant="in-cache"), accesses, 2).evicted == [0, 1, 0]


def test_lifo_and_fifo_number_a_step_in_launch_order():
    for policy, victims in ((FIFO(), [5, 4]), (LIFO(), [1, 4])):
        policy.start(context([], 3))
        policy.admitted(np.array([5, 4]))
        policy.admitted(np.array([1]))
        assert policy.victims(np.array([0, 2]), np.array([1, 4, 5])).tolist() == victims


def test_random_follows_the_seed_and_spares_nobody():
    accesses = one_by_one(list(range(8)) * 8)
    runs = [drive(Random(), accesses, 4, seed=seed).evicted for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert set(runs[0]) == set(range(8))


# -- the three that are called Least-Stale ---------------------------------------------------------------


def places(*pairs):
    return [LayerStep(step, layer, [expert]) for step, layer, expert in pairs]


def test_least_stale_pass_spares_what_this_pass_touched():
    """(0, 0) and (1, 0) were used again in pass 1; (2, 0) was not yet, so it leaves although its layer is the highest."""
    accesses = places((0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 0), (1, 1, 0), (1, 1, 5))
    assert drive(LeastStalePass(), accesses, 3, layers=3, scope="global").evicted == [2 * 8]


def test_least_stale_layer_looks_at_nothing_else():
    accesses = places((0, 2, 0), (0, 1, 0), (0, 0, 0), (1, 0, 0), (1, 2, 3))
    assert drive(LeastStaleLayer(), accesses, 3, layers=3, scope="global").evicted == [0]


@pytest.mark.parametrize("cls", [LeastStalePass, LeastStaleLayer])
def test_lowest_and_cyclic_differ_at_the_start_of_a_pass(cls):
    """Layer 1 of 4 runs; 0, 2 and 3 are stale. Lowest: 0, 2, 3. Farthest turn first: 0, then 3, then 2."""
    for order, victims in (("lowest", [0, 2, 3]), ("cyclic", [0, 3, 2])):
        policy = cls(order=order)
        policy.start(context([], 4, layers=4, scope="global"))
        for layer in (0, 2, 3):
            policy.accessed(work(experts=[0], layer=layer))
            policy.admitted(np.array([8 * layer]))
        policy.accessed(work(experts=[1], layer=1, step=1))
        found = policy.victims(np.array([9, 10, 11]), np.array([0, 16, 24]))
        assert (found // 8).tolist() == victims, order


def test_least_stale_pass_does_not_evict_a_fresh_prefetch():
    policy = LeastStalePass()
    policy.start(context([], 2, layers=3, scope="global"))
    policy.admitted(np.array([16]))
    policy.accessed(work(experts=[0], layer=0, step=1))
    policy.admitted(np.array([8]))  # prefetched in pass 1, never used
    assert policy.victims(np.array([0]), np.array([8, 16])).tolist() == [16]


def test_least_stale_interval_equals_the_hand_traced_public_example():
    """Capacity 3; A B C return every 3: A leaves for D (7 + 3 is last), then D (tie with C, later use), then C."""
    a, b, c, d = range(4)
    run = drive(LeastStaleInterval(), one_by_one([a, b, c, a, b, c, a, d, a, b, c, d]), 3)
    assert np.cumsum(run.hit_log).tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 6]
    assert run.evicted == [a, d, c]


def test_least_stale_interval_averages_gaps():
    """Gaps 2 then 6: .75 · 2 + .25 · 6 = 3, so expert 0, last used at 9, is expected at 12."""
    policy = LeastStaleInterval()
    drive(policy, one_by_one([0, 1, 0, 1, 1, 1, 1, 1, 0]), 3)
    assert policy.score[0] == -12.0


def test_least_stale_interval_memory():
    """0 comes every 2, leaves, and returns: with a memory its interval is an average, without it is 0."""
    accesses = one_by_one([0, 1, 0, 2, 3, 1, 0])
    for memory, known in (("in-cache", False), ("perfect", True)):
        policy = LeastStaleInterval(memory=memory)
        run = drive(policy, accesses, 2)
        assert not run.hit_log[-1]
        assert (policy.score[0] < -8.0) == known, memory


# -- MoE-Infinity ----------------------------------------------------------------------------------------


def infinity(**parameters):
    """Three layers of four; layer 0 used expert 0 three times and 1 once, layer 1 expert 0, layer 2 nothing."""
    policy = MoEInfinity(**parameters)
    policy.start(context([], 6, layers=3, experts=4, scope="global"))
    policy.admitted(np.array([0, 1, 4, 5, 8]))
    for step in range(3):
        policy.accessed(work(experts=[0], step=step, layer=0))
        policy.accessed(work(experts=[0], step=step, layer=1))
    policy.accessed(work(experts=[1], step=3, layer=0))
    return policy


def test_moe_infinity_multiplies_place_ratio_and_visits():
    """Visits 4, 2, 4, 1, 1; ratios 3/4, 1/4, 1, 0, 1/4; decay 1, 1, 2/3, 2/3, 1/3, each as shares plus 1e-6."""
    policy = infinity()
    decay, ratio, visits = np.array([1, 1, 2 / 3, 2 / 3, 1 / 3]), np.array([3 / 4, 1 / 4, 1, 0, 1 / 4]), [4, 2, 4, 1, 1]
    product = (decay / 8 + 1e-6) * (ratio / 3 + 1e-6) * (np.array(visits) / 12 + 1e-6)
    assert policy._priority()[[0, 1, 4, 5, 8]] == pytest.approx(product)


def test_moe_infinity_protects_the_current_layer_and_unused_prefetches():
    """Layer 0 runs. 5 and 8 were never used; 4 was, so it leaves first although its priority is the highest."""
    order = infinity().victims(np.arange(5), np.array([0, 1, 4, 5, 8])).tolist()
    assert order[0] == 4
    assert order[1:] == [5, 8, 1, 0]


def test_moe_infinity_released_topology_takes_half_the_layers_for_an_encoder():
    policy = MoEInfinity(topology="released")
    policy.start(context([], 6, layers=4, experts=4, scope="global"))
    assert policy._decay().tolist() == [1, 0.5, 0, 1 / 3]
    policy.accessed(work(experts=[0], layer=2))
    assert policy._decay().tolist() == [1, 0.5, 1, 1 / 3]
    policy = MoEInfinity()
    policy.start(context([], 6, layers=4, experts=4, scope="global"))
    assert policy._decay().tolist() == [1, 0.75, 0.5, 0.25]


def test_moe_infinity_forgets_the_sequence_at_the_next_prompt():
    for reset, left in ((True, 0.0), (False, 3.0)):
        policy = infinity(reset=reset)
        policy.accessed(replace(work(experts=[3], layer=0, step=4), phase=Phase.PREFILL))
        assert policy._tokens[0, 0] == left


def test_moe_infinity_counts_visits_in_the_cache_or_for_ever():
    for visits, count in (("in-cache", 0.0), ("perfect", 3.0)):
        policy = infinity(visits=visits)
        policy.evicted(np.array([0]))
        assert policy._visits[0] == count


def test_parameters_out_of_range_are_refused():
    for make, message in (
        (lambda: MRS(alpha=0.0), "alpha"),
        (lambda: ScoreWindow(window=0), "window"),
        (lambda: WorkloadWindow(trigger="never"), "trigger"),
        (lambda: PrefillSwap(share=0.0), "share"),
        (lambda: LeastStaleInterval(weight=0.0), "weight"),
        (lambda: LFRU(variant="old"), "variant"),
    ):
        with pytest.raises(PolicyError, match=message):
            make()


def test_held_experts_never_leave():
    """One slot, two experts a step: whoever is active stays."""
    for policy in (FIFO(), LIFO(), Random(), LFRU(), LeastStaleInterval(), LeastStalePass(), MoEInfinity()):
        assert drive(policy, atomic([0, 1], [0, 2], [0]), 1).hit_log == [False, False, True, False, True]
