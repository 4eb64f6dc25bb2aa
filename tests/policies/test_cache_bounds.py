"""The bounds against exhaustive search, and the oracles that follow their plans."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import ListFuture, atomic, context, drive, one_by_one, uses_of
from support.handmade import HandCosts, plan_of, routed, shape, steps

from moesim.policies.base import PolicyError
from moesim.policies.cache import _offline_bounds as planned
from moesim.policies.cache._offline_bounds import best_stays, miss_costs, plan_cost
from moesim.policies.cache.belady import Belady
from moesim.policies.cache.belady_cost import BeladyCost
from moesim.policies.cache.belady_size import BeladySize
from moesim.policies.cache.lru import LRU
from moesim.policies.registry import resolve
from moesim.policies.systems import System
from moesim.traces.format.future import RecordedFuture


def exhaustive_cost(layer_steps, capacity, size, cost, entry):
    """Least cost over every content that may survive every step; `cost` and `entry` are
    tables by expert, or ask for the step as well.

    What is in use stays until the step is over, beside all that enters.
    """
    states = {frozenset(): 0.0}
    for layer_step in layer_steps:
        active = frozenset(layer_step.experts)
        cost_now, entry_now = (
            table(layer_step) if callable(table) else table for table in (cost, entry)
        )
        reached = {}
        for inside, paid in states.items():
            misses = active - inside
            paid_now = paid + sum(cost_now[e] for e in misses)
            for kept in subsets(inside | active):
                if sum(size[e] for e in kept | (inside & active)) > capacity:
                    continue
                total = paid_now + sum(entry_now[e] for e in misses & kept)
                reached[kept] = min(total, reached.get(kept, np.inf))
        states = reached
    return min(states.values())


def subsets(pool):
    """All contents that are part of `pool`."""
    return [
        frozenset(kept)
        for count in range(len(pool) + 1)
        for kept in itertools.combinations(sorted(pool), count)
    ]


STEPS = st.lists(
    st.sets(st.integers(0, 4), min_size=1, max_size=2), min_size=1, max_size=8
).map(lambda lists: atomic(*(sorted(step) for step in lists)))
TABLE = st.lists(st.integers(1, 4), min_size=5, max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    STEPS, st.integers(0, 3), TABLE, st.lists(st.integers(0, 3), min_size=5, max_size=5)
)
def test_with_equal_sizes_the_bound_is_reached(layer_steps, capacity, cost, entry):
    solved = best_stays(uses_of(layer_steps, cost=cost, entry=entry), capacity)
    expected = exhaustive_cost(layer_steps, capacity, [1] * 5, cost, entry)
    assert solved.least_cost == pytest.approx(expected)
    assert solved.plan_cost == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.integers(0, 6), TABLE, TABLE)
def test_with_unequal_sizes_the_optimum_lies_between_bound_and_plan(
    layer_steps, capacity, size, cost
):
    uses = uses_of(layer_steps, size=size, cost=cost)
    solved = best_stays(uses, capacity)
    optimum = exhaustive_cost(layer_steps, capacity, size, cost, [0] * 5)
    assert solved.least_cost <= optimum + 1e-6
    assert optimum <= solved.plan_cost + 1e-6


def test_half_a_stay_can_be_granted_when_sizes_differ():
    """Room for 2: expert 0 needs 2, expert 1 needs 1, their stays cross. The relaxation
    keeps 1 and half of 0.
    """
    uses = uses_of(one_by_one([0, 1, 0, 1]), size=[2, 1])
    solved = best_stays(uses, 2)
    assert solved.granted.tolist() == pytest.approx([0.5, 1, 0, 0])
    assert (solved.least_cost, solved.plan_cost) == pytest.approx((2.5, 3))


def test_a_miss_costs_the_shorter_way_and_a_stay_the_fetch():
    """Fetch 3, CPU 1: keeping one expert for its next use alone costs 2 to save 1; for
    three more uses it pays.
    """
    cost, entry = miss_costs(np.array([3.0, 1.0]), np.array([1.0, 2.0]))
    assert (cost.tolist(), entry.tolist()) == ([1, 1], [2, 0])
    twice, often = (
        best_stays(uses_of(one_by_one([0] * n), cost=[1], entry=[2]), 1) for n in (2, 4)
    )
    assert (twice.least_cost, twice.kept.any()) == (2, False)
    assert (often.least_cost, often.kept.tolist()) == (3, [True] * 3 + [False])
    assert (
        plan_cost(
            uses_of(one_by_one([0, 0]), cost=[1], entry=[2]), np.array([True, False])
        )
        == 3
    )


# -- the oracles that follow a plan ----------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=20), st.integers(0, 4))
def test_planned_oracles_equal_belady_where_costs_and_sizes_are_equal(
    accesses, capacity
):
    layer_steps = one_by_one(accesses)
    expected = drive(Belady(), layer_steps, capacity).hits
    for policy in (
        BeladyCost(),
        BeladyCost(cpu=4.0),
        BeladySize(),
        BeladySize(value="bytes"),
    ):
        assert drive(policy, layer_steps, capacity).hits == expected
    assert (
        drive(policy := BeladySize(), layer_steps, capacity).hits
        == len(accesses) - policy.stays[0].least_cost
    )


def test_belady_cost_leaves_to_the_cpu_what_is_not_worth_a_fetch():
    """CPU at a third of a fetch: 0 comes four times and pays for its fetch, 1 comes
    twice and does not.
    """
    accesses = one_by_one([0, 1, 0, 1, 0, 0])
    assert drive(BeladyCost(), accesses, 2).hits == 4
    frugal = BeladyCost(cpu=1 / 3)
    assert drive(frugal, accesses, 2).hits == 3
    assert frugal.stays[0].least_cost == pytest.approx(1 + 2 / 3)


def test_belady_cost_prices_the_tokens_of_every_use():
    """CPU at a third of a fetch for one token. 1 comes twice, the second time with 9
    tokens: now its fetch pays.
    """
    layer_steps = one_by_one([0, 1, 0, 1, 0, 0])
    plain = context(layer_steps, 2)
    busy = replace(plain, future=ListFuture(layer_steps, {(3, 0): [9]}))
    for ctx, growth, kept, least in (
        (plain, 1.0, [True, False, True, False, True, False], 1 + 2 / 3),
        (busy, 1.0, [True, True, True, False, True, False], 2.0),
        (busy, 0.0, [True, False, True, False, True, False], 1 + 2 / 3),
    ):
        policy = BeladyCost(cpu=1 / 3, growth=growth)
        policy.start(ctx)
        assert policy.stays[0].kept.tolist() == kept
        assert policy.stays[0].least_cost == pytest.approx(least)


def test_belady_cost_takes_the_seconds_of_the_machine_it_runs_on():
    """A copy takes 4 s, an expert 3 s plus 3 for each further token on the CPU and 1
    and 1 on the GPU.

    Beyond a hit that is 4 fetched, 2 for one token and 6 for three on the CPU. 0 comes
    with one token each time: 2 + 2 on the CPU, as much as fetching it once; 1 comes
    with three tokens: 4 once, then a hit.
    """
    passes = steps(*[[routed(0, e, tokens=[1 + 2 * e])] for e in (0, 1, 0, 1)])
    costs = HandCosts(cpu=3.0, gpu=1.0, copy=4.0, per_token=1.0)
    system = System(assignment="on-demand", cache="belady-cost")
    planner = plan_of(shape(), system, costs, slots=2, future=RecordedFuture(passes))
    assert planner.policies.caches[0].stays[0].least_cost == 2 + 4 + 2
    ones = steps(*[[routed(0, e)] for e in (0, 1, 0, 1)])
    planner = plan_of(shape(), system, costs, slots=2, future=RecordedFuture(ones))
    assert planner.policies.caches[0].stays[0].least_cost == 2 * 4


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 8), st.integers(1, 7), st.randoms())
def test_no_cache_beats_belady_size_and_numbers_of_experts_mean_nothing(
    data, experts, capacity, random
):
    """Its plan took the places of experts in use, so what came of it was chance."""
    ids = st.sets(st.integers(0, experts - 1), min_size=1)
    accesses = data.draw(st.lists(ids, min_size=1, max_size=20))
    other = random.sample(range(experts), experts)
    renumbered = [{other[e] for e in step} for step in accesses]

    policy = BeladySize()
    hits = drive(policy, atomic(*accesses), capacity, experts=experts).hits
    assert hits == sum(map(len, accesses)) - round(policy.stays[0].least_cost)
    again = drive(BeladySize(), atomic(*renumbered), capacity, experts=experts)
    assert again.hits == hits
    for rival in (Belady(), Belady(must_admit=True), LRU()):
        assert drive(rival, atomic(*accesses), capacity, experts=experts).hits <= hits


def test_belady_size_keeps_two_small_ones_instead_of_a_large_one():
    """Layer 0 has experts of 200 bytes, layer 1 of 100; room for 200. All come twice,
    crossing: two hits beat one.
    """
    model = shape(layers=2, expert_bytes=[200, 100])
    passes = steps(*[[routed(0, expert), routed(1, expert)] for expert in (0, 1, 0, 1)])
    policy = BeladySize()
    base = context([], 1, layers=2, experts=4, scope="global")
    policy.start(replace(base, shape=model, future=RecordedFuture(passes)))
    assert policy.stays[0].kept.reshape(4, 2).tolist() == [
        [False, True],
        [False, True],
        [False, False],
        [False, False],
    ]
    assert policy.stays[0].least_cost == policy.stays[0].plan_cost == 6


def test_planned_oracles_need_the_future_and_a_sequence_of_bearable_length(monkeypatch):
    with pytest.raises(PolicyError, match="'belady-cost' must see the future"):
        resolve("belady-cost", "cache").start(replace(context([], 2), future=None))
    monkeypatch.setattr(planned, "MOST_USES", 3)
    with pytest.raises(PolicyError, match=r"4 uses in one pool, at most 3 .* --steps"):
        drive(BeladySize(), one_by_one([0, 1, 2, 0]), 2)
