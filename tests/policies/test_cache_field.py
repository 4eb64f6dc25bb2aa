"""The field's score-based caches: worked examples, and each literal reading against ours."""

from dataclasses import replace

import numpy as np
import pytest
from support.cache_driver import (
    LayerStep,
    admit,
    context,
    drive,
    evict,
    one_by_one,
    victims,
    work,
)

from moesim.policies.cache.fifo import FIFO
from moesim.policies.cache.least_stale_interval import LeastStaleInterval
from moesim.policies.cache.least_stale_layer import LeastStaleLayer
from moesim.policies.cache.least_stale_pass import LeastStalePass
from moesim.policies.cache.lfru import LFRU
from moesim.policies.cache.lifo import LIFO
from moesim.policies.cache.moe_infinity import MoEInfinity
from moesim.policies.cache.mrs import MRS
from moesim.policies.cache.random import Random
from moesim.policies.cache.score_window import ScoreWindow
from moesim.policies.names import PREFILL

# -- caches by score -------------------------------------------------------------------


def scored(policy, *rows, experts=4, top_k=1):
    """Feed one layer's score rows, one step each ([T, E] for several tokens)."""
    base = context([], 2, experts=experts)
    policy.start(replace(base, shape=replace(base.shape, top_k=top_k)))
    for step, row in enumerate(rows):
        values = np.atleast_2d(row)
        chosen = [int(values[0].argmax())]
        policy.accessed(work(experts=chosen, step=step, scores=values, width=experts))
    return policy


S1 = [0.5, 0.3, 0.15, 0.05]
S2 = [0.1, 0.2, 0.6, 0.1]
S3 = [0.05, 0.45, 0.1, 0.4]


def test_section_4_5():
    """k = 1, so p = 2; α = .5. Residents 0 and 2: 0 has the lower S."""
    for rows, expected in [
        ([S1], [0.25, 0.15, 0, 0]),
        ([S1, S2], [0.125, 0.175, 0.3, 0]),
        ([S1, S2, S3], [0.0625, 0.3125, 0.15, 0.2]),
    ]:
        policy = scored(MRS(), *rows)
        assert list(policy.score) == pytest.approx(expected)
    assert victims(policy, [1], [0, 2]) == [0]


def test_section_4_5_batch_by_mean_or_by_first_row():
    rows = [[0.9, 0.1, 0, 0], [0, 0.1, 0.9, 0]]
    for parameters, expected in (
        # .45 and .45: the lower id.
        ({"p": 1}, [0.45, 0, 0, 0]),
        ({"p": 4}, [0.45, 0.1, 0.45, 0]),
        ({"p": 4, "first_row": True}, [0.9, 0.1, 0, 0]),
    ):
        policy = scored(MRS(alpha=1.0, **parameters), rows)
        assert list(policy.score) == pytest.approx(expected)


def test_section_4_5_ties_go_to_the_lower_id_or_to_the_least_recently_touched():
    """No expert has a score; 1 was touched last."""
    for tie, victim in (("id", 0), ("touched", 2)):
        policy = MRS(tie=tie)
        policy.start(context([], 2, experts=4))
        for step, expert in enumerate([2, 0, 1]):
            policy.accessed(work(experts=[expert], step=step, width=4))
        assert victims(policy, [3], [0, 1, 2]) == [victim], tie


def test_section_4_5_starts_empty_or_with_the_lowest_ids():
    assert drive(MRS(), [], 2).resident == []
    assert drive(MRS(fill="lowest"), [], 2, layers=2, experts=4).resident == [
        0,
        1,
        4,
        5,
    ]


def test_section_3_3_the_window_forgets_what_is_older():
    """Expert 0 leads over both steps, expert 2 over the last one alone."""
    rows = [[0.9, 0, 0.1, 0], [0.3, 0, 0.6, 0]]
    policy = scored(ScoreWindow(window=2), *rows)
    assert list(policy.score) == pytest.approx([0.6, 0, 0.35, 0])
    for window, victim in ((1, 0), (8, 2)):
        policy = scored(ScoreWindow(window=window), *rows)
        assert victims(policy, [1], [0, 2]) == [victim]


def test_section_3_3_ties_go_to_the_last_use_then_id():
    policy = scored(ScoreWindow(), [0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25])
    policy.accessed(work(experts=[0], step=2, width=4))
    assert victims(policy, [3, 3], [0, 1, 2]) == [1, 2]


# -- frequency and age -----------------------------------------------------------------


def test_lfru_discounts_frequency_by_age():
    """At step 5: 0 has 3 uses, aged 3 + 1 → .75; 1 has one, aged 2 + 1 → .33; 2 has
    one, aged 1 + 1 → .5.
    """
    assert drive(LFRU(), one_by_one([0, 0, 0, 1, 2, 3]), 3).evicted == [1]
    assert drive(LFRU(), one_by_one([0, 0, 1, 1, 2, 2, 2, 3]), 3).evicted == [0]


def test_lfru_remembers_evicted_experts_or_not():
    """0 left after four uses. Back again, it has 5 / 2 against 5 / 3 of expert 2, or
    only 1 / 2.
    """
    accesses = one_by_one([0, 0, 0, 0, *[1] * 9, *[2] * 5, 0, 3])
    assert drive(LFRU(variant="perfect"), accesses, 2).evicted == [0, 1, 2]
    assert drive(LFRU(variant="in-cache"), accesses, 2).evicted == [0, 1, 0]


def test_lifo_and_fifo_number_a_step_in_launch_order():
    for policy, leaving in ((FIFO(), [5, 4]), (LIFO(), [1, 4])):
        policy.start(context([], 3))
        admit(policy, 5, 4, 1)
        assert victims(policy, [0, 2], [1, 4, 5]) == leaving


def test_random_follows_the_seed_and_spares_no_expert():
    accesses = one_by_one(list(range(8)) * 8)
    runs = [drive(Random(), accesses, 4, seed=seed).evicted for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert set(runs[0]) == set(range(8))


# -- the three that are called Least-Stale ---------------------------------------------


def places(*pairs):
    return [LayerStep(step, layer, [expert]) for step, layer, expert in pairs]


def test_least_stale_pass_spares_what_this_pass_touched():
    """(0, 0) and (1, 0) were used again in pass 1; (2, 0) was not yet, so it leaves,
    highest layer or not.
    """
    accesses = places((0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 0), (1, 1, 0), (1, 1, 5))
    assert drive(LeastStalePass(), accesses, 3, layers=3, scope="global").evicted == [
        2 * 8
    ]


def test_least_stale_layer_looks_at_nothing_else():
    accesses = places((0, 2, 0), (0, 1, 0), (0, 0, 0), (1, 0, 0), (1, 2, 3))
    assert drive(LeastStaleLayer(), accesses, 3, layers=3, scope="global").evicted == [
        0
    ]


@pytest.mark.parametrize("cls", [LeastStalePass, LeastStaleLayer])
def test_lowest_and_cyclic_differ_at_the_start_of_a_pass(cls):
    """Layer 1 of 4 runs; 0, 2 and 3 are stale. Lowest: 0, 2, 3. Farthest turn first: 0,
    then 3, then 2.
    """
    for order, layers in (("lowest", [0, 2, 3]), ("cyclic", [0, 3, 2])):
        policy = cls(order=order)
        policy.start(context([], 4, layers=4, scope="global"))
        for layer in (0, 2, 3):
            policy.accessed(work(experts=[0], layer=layer))
            admit(policy, 8 * layer)
        policy.accessed(work(experts=[1], layer=1, step=1))
        chosen = victims(policy, [9, 10, 11], [0, 16, 24])
        assert [key // 8 for key in chosen] == layers, order


def test_least_stale_pass_does_not_evict_a_fresh_prefetch():
    policy = LeastStalePass()
    policy.start(context([], 2, layers=3, scope="global"))
    admit(policy, 16)
    policy.accessed(work(experts=[0], layer=0, step=1))
    admit(policy, 8)  # prefetched in pass 1, never used
    assert victims(policy, [0], [8, 16]) == [16]


def test_least_stale_interval_equals_the_hand_traced_public_example():
    """Capacity 3; A B C return every 3: A leaves for D (7 + 3 is last), then D (tie
    with C, later use), then C.
    """
    a, b, c, d = range(4)
    run = drive(
        LeastStaleInterval(), one_by_one([a, b, c, a, b, c, a, d, a, b, c, d]), 3
    )
    assert np.cumsum(run.hit_log).tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 6]
    assert run.evicted == [a, d, c]


def test_least_stale_interval_averages_gaps():
    """Gaps 2 then 6: .75 · 2 + .25 · 6 = 3, so expert 0, last used at 9, is expected at
    12.
    """
    policy = LeastStaleInterval()
    drive(policy, one_by_one([0, 1, 0, 1, 1, 1, 1, 1, 0]), 3)
    assert policy.score[0] == -12.0


def test_least_stale_interval_memory():
    """0 comes every 2, leaves, and returns: with a memory its interval is an average,
    without it is 0.
    """
    accesses = one_by_one([0, 1, 0, 2, 3, 1, 0])
    for memory, known in (("in-cache", False), ("perfect", True)):
        policy = LeastStaleInterval(memory=memory)
        run = drive(policy, accesses, 2)
        assert not run.hit_log[-1]
        assert (policy.score[0] < -8.0) == known, memory


# -- MoE-Infinity ----------------------------------------------------------------------


def infinity(**parameters):
    """Three layers of four; layer 0 used expert 0 three times and 1 once, layer 1
    expert 0, layer 2 nothing.
    """
    policy = MoEInfinity(**parameters)
    policy.start(context([], 6, layers=3, experts=4, scope="global"))
    admit(policy, 0, 1, 4, 5, 8)
    for step in range(3):
        policy.accessed(work(experts=[0], step=step, layer=0, width=4))
        policy.accessed(work(experts=[0], step=step, layer=1, width=4))
    policy.accessed(work(experts=[1], step=3, layer=0, width=4))
    return policy


def test_section_6_9_the_priority_multiplies_place_ratio_and_visits():
    """Visits 4, 2, 4, 1, 1; ratios 3/4, 1/4, 1, 0, 1/4; decay 1, 1, 2/3, 2/3, 1/3, each
    as shares plus 1e-6.
    """
    policy = infinity()
    decay = np.array([1, 1, 2 / 3, 2 / 3, 1 / 3])
    ratio = np.array([3 / 4, 1 / 4, 1, 0, 1 / 4])
    visits = [4, 2, 4, 1, 1]
    product = (decay / 8 + 1e-6) * (ratio / 3 + 1e-6) * (np.array(visits) / 12 + 1e-6)
    keys = np.array([0, 1, 4, 5, 8])
    policy.rate(keys)
    assert np.array(policy.priority)[keys] == pytest.approx(product)


def test_section_6_9_the_current_layer_and_unused_prefetches_are_protected():
    """Layer 0 runs. 5 and 8 were never used; 4 was, so it leaves first although its
    priority is the highest.
    """
    order = victims(infinity(), np.arange(5), [0, 1, 4, 5, 8])
    assert order[0] == 4
    assert order[1:] == [5, 8, 1, 0]


def test_section_6_9_released_topology_takes_half_the_layers_for_an_encoder():
    def decays():
        return [policy.topology_decay(layer) for layer in range(4)]

    policy = MoEInfinity(topology="released")
    policy.start(context([], 6, layers=4, experts=4, scope="global"))
    assert decays() == [1, 0.5, 0, 1 / 3]
    policy.accessed(work(experts=[0], layer=2, width=4))
    assert decays() == [1, 0.5, 1, 1 / 3]
    policy = MoEInfinity()
    policy.start(context([], 6, layers=4, experts=4, scope="global"))
    assert decays() == [1, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    ("reset", "batch", "left"), [(True, 0, 3.0), (True, 1, 0.0), (False, 1, 3.0)]
)
def test_moe_infinity_forgets_the_sequence_at_the_next_batch_not_micro_batch(
    reset, batch, left
):
    """Another pass of the same prompt is the same sequence."""
    policy = infinity(reset=reset)
    now = work(experts=[3], step=4, phase=PREFILL, batch=batch, width=4)
    policy.accessed(now)
    assert policy.tokens[0] == left


def test_moe_infinity_counts_visits_in_the_cache_or_for_ever():
    for visits, count in (("in-cache", 0.0), ("perfect", 3.0)):
        policy = infinity(visits=visits)
        evict(policy, 0)
        assert policy.visits[0] == count
