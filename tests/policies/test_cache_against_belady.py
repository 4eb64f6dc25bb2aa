"""No policy beats the bound: every registered cache policy on random and real streams."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import LayerStep, atomic, drive, uses_of

from moesim.policies.cache._offline_bounds import best_stays
from moesim.policies.cache.belady import Belady
from moesim.policies.registry import find, names, resolve

EXPERTS = 6


def policy_of(name, experts, seed=0):
    """A policy that is given random scores, so that those which rank by score have
    something to rank.
    """
    policy = resolve(name, "cache")
    rng = np.random.default_rng(seed)
    note = policy.accessed

    def accessed(now):
        now.scores = rng.random(experts).data
        note(now)

    policy.accessed = accessed
    return policy


def most_hits(layer_steps, capacities, experts, *, filled):
    """Hits that no demand-filled cache can exceed; `filled` lets any content be there
    at the start.
    """
    layers = (
        len(capacities)
        if len(capacities) > 1
        else 1 + max((s.layer for s in layer_steps), default=0)
    )
    first = (
        [LayerStep(-1, layer, range(experts)) for layer in range(layers)]
        if filled
        else []
    )
    total = 0
    for pool, slots in enumerate(capacities):
        members = [
            s for s in [*first, *layer_steps] if len(capacities) == 1 or s.layer == pool
        ]
        if members:
            uses = uses_of(members, experts)
            free = np.isin(uses.time, np.flatnonzero([s.step < 0 for s in members]))
            uses = replace(uses, cost=np.where(free, 0.0, 1.0))
            total += round(float(uses.cost.sum()) - best_stays(uses, slots).least_cost)
    return total


def starts_full(name):
    return resolve(name, "cache").__class__.initial is not find("lru", "cache").initial


@st.composite
def streams(draw):
    active = st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=3)
    count = draw(st.integers(0, 8))
    return [LayerStep(i // 2, i % 2, sorted(draw(active))) for i in range(2 * count)]


@pytest.mark.parametrize("name", names("cache"))
@settings(max_examples=10, deadline=None)
@given(layer_steps=streams(), capacity=st.integers(0, 5))
def test_no_policy_beats_the_step_atomic_bound(name, layer_steps, capacity):
    for scope, capacities in (("layer", [capacity] * 2), ("global", [capacity])):
        run = drive(
            policy_of(name, EXPERTS),
            layer_steps,
            capacity,
            layers=2,
            experts=EXPERTS,
            scope=scope,
        )
        assert run.hits <= most_hits(
            layer_steps, capacities, EXPERTS, filled=starts_full(name)
        )


def test_belady_is_no_bound_where_active_experts_hold_the_cache():
    """Two slots. 1, 2 and 3 are all needed at the third step; Belady has 2 and 3 there
    then, which are held, so 1 cannot enter for the fourth. LRU has 1 and 3.
    """
    steps = atomic([0, 1, 2], [3], [1, 2, 3], [0, 1])
    assert drive(Belady(), steps, 2, experts=4).hits == 2
    assert drive(resolve("lru", "cache"), steps, 2, experts=4).hits == 3
    # The bound of all demand-filled caches is above both.
    assert most_hits(steps, [2], 4, filled=False) >= 3
