"""Cache policies against the worked examples of the reference, linear scans and
libCacheSim.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import (
    LayerStep,
    admit,
    atomic,
    context,
    drive,
    one_by_one,
    shape,
    victims,
    work,
)
from support.handmade import memory_of

from moesim.engine.names import NO_PLACE
from moesim.policies.base import PolicyError, Work
from moesim.policies.cache.belady import Belady
from moesim.policies.cache.lfu import LFU
from moesim.policies.cache.lru import LRU
from moesim.policies.cache.none import NoCache
from moesim.policies.cache.static import Static
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize

UNIT_STRING = [5, 2, 4, 2, 1, 3, 1, 5, 3, 5, 1, 3, 1, 4, 3, 5, 1, 4]
STEPS = atomic([0, 1], [2, 3], [0, 2], [1, 4], [0, 2], [3, 4])


@pytest.mark.parametrize(("policy", "hits", "evicted"), [
    (LRU(), 8, [5, 4, 2, 5, 1, 4, 3]),
    (LFU(tie="lru"), 5, [5, 4, 3, 5, 3, 5, 3, 4, 3, 5]),
    (Belady(must_admit=True), 11, [2, 4, 1, 3]),
], ids=["lru", "lfu", "belady"])  # fmt: skip
def test_section_5_5_unit_string(policy, hits, evicted):
    run = drive(policy, one_by_one(UNIT_STRING), 3)
    assert (run.hits, run.evicted) == (hits, evicted)


@pytest.mark.parametrize(
    ("policy", "hits", "evicted"),
    [(LRU(), 3, [0, 1, 3, 0, 1, 0]), (Belady(must_admit=True), 4, [1, 3, 0, 1, 0])],
    ids=["lru", "belady"],
)
def test_section_5_5_step_atomic(policy, hits, evicted):
    run = drive(policy, STEPS, 3)
    assert (run.hits, run.accesses, run.evicted) == (hits, 12, evicted)


def exhaustive_hits(accesses, capacity, *, must_admit):
    """Most hits that any sequence of decisions can reach, one access at a time."""
    states = {frozenset(): 0}
    for expert in accesses:
        reached = {}
        for cache, hits in states.items():
            if expert in cache:
                options = [(cache, hits + 1)]
            elif len(cache) < capacity:
                options = [(cache | {expert}, hits)]
            else:
                options = [(cache - {victim} | {expert}, hits) for victim in cache]
                options += [] if must_admit else [(cache, hits)]
            for option, score in options:
                reached[option] = max(score, reached.get(option, 0))
        states = reached
    return max(states.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=14), st.integers(1, 3), st.booleans())
def test_belady_equals_exhaustive_search(accesses, capacity, must_admit):
    run = drive(Belady(must_admit=must_admit), one_by_one(accesses), capacity)
    assert run.hits == exhaustive_hits(accesses, capacity, must_admit=must_admit)


@pytest.mark.parametrize("must_admit", [False, True])
def test_belady_chooses_whom_to_let_in_where_not_all_can_enter(must_admit):
    """Two places, three newcomers of which 1 and 2 return at once: launch order would
    have let 0 in.

    Then 3, 4 and 5 come while 1 is held: the one other place goes to 5, the only one
    that returns, not to 3.
    """
    run = drive(
        Belady(must_admit=must_admit),
        atomic([0, 1, 2], [1, 2], [1, 3, 4, 5], [1, 5]),
        2,
    )
    assert run.hits == 2 + 1 + 2
    assert run.evicted == [2]
    # Others keep launch order.
    assert drive(LRU(), atomic([0, 1, 2]), 2).resident == [0, 1]


def nobody():
    """The work of no layer step: something is wished for between two."""
    made = Work(1, 4)
    made.layer = 0
    return made


def test_an_order_that_loses_an_expert_is_the_policys_error():
    class Forgetful(LRU):
        def precedence(self, incoming):
            incoming[0] = incoming[1]

    model = replace(shape(1, 4), expert_bytes=(100,))
    size = CacheSize.of((100,), 4, slots_per_layer=1)
    memory = memory_of(model, size, Forgetful(), "forgetful", staging=2)
    message = r"'forgetful': precedence: expected the keys \[0, 1\] .* got \[1, 1\]"
    with pytest.raises(PolicyError, match=message):
        memory.demand(nobody(), np.array([0, 1]))


@pytest.mark.parametrize("cache", ["arc", "clock"])
def test_nobody_is_named_for_an_expert_that_cannot_fit(cache):
    """A pool of 200 bytes holds two experts of 100, one of them in use. One of 200 finds
    no place, and the other stays on the policy's lists: it leaves for the next.
    """
    model = replace(shape(2, 2), expert_bytes=(100, 200))
    size = CacheSize.of((100, 200), 2, scope="global", total_bytes=200)
    memory = memory_of(model, size, resolve(cache, "cache"), cache, staging=1)
    memory.fill(np.array([0, 1]))
    memory.holds[0] += 1
    memory.prefetch(nobody(), 2)
    assert memory.start(2, 0.0) == NO_PLACE
    assert victims(memory.cache, [2], [1]) == [1]


def test_belady_admits_on_a_tie():
    """Neither 0 nor 1 returns: the newcomer enters."""
    assert drive(Belady(), one_by_one([0, 1]), 1).evicted == [0]


def test_belady_compares_layers_by_their_place_in_global_scope():
    """Room for two. When (step 0, layer 2) misses, layer 1 returns in step 1 and layer
    0 not before step 2.
    """
    places = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 0)]
    steps = [LayerStep(step, layer, [7]) for step, layer in places]
    run = drive(Belady(must_admit=True), steps, 2, layers=3, scope="global")
    assert run.evicted[0] == 0 * 8 + 7
    assert run.hits == 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 7), max_size=40),
    st.integers(1, 5),
    st.sampled_from(["in-cache", "perfect"]),
    st.sampled_from(["id", "fifo", "lru"]),
)
def test_lfu_equals_a_linear_search(accesses, capacity, variant, tie):
    """Counts live with the entry, or for ever."""
    cache = {}
    forever = dict.fromkeys(range(8), 0)
    hits = []
    for now, key in enumerate(accesses):
        forever[key] += 1
        hits.append(key in cache)
        if key not in cache and len(cache) == capacity:
            counts = (
                forever
                if variant == "perfect"
                else {k: cache[k]["count"] for k in cache}
            )
            del cache[min(cache, key=lambda k: (counts[k], cache[k].get(tie, k), k))]
        entry = cache.setdefault(key, {"count": 0, "fifo": now})
        entry |= {"count": entry["count"] + 1, "lru": now}
    run = drive(LFU(variant=variant, tie=tie), one_by_one(accesses), capacity)
    assert run.hit_log == hits


def test_lfu_decay_forgets_an_old_favourite():
    """Three uses, then two rests: 1.75 / 4 = 0.4375 is below the newcomer's 0.5;
    without decay 3 stays above 1.
    """
    accesses = one_by_one([0, 0, 0, 1, 2])
    assert drive(LFU(), accesses, 2).evicted == [1]
    assert drive(LFU(decay=0.5), accesses, 2).evicted == [0]


def test_lfu_variants_differ_on_a_returning_favourite():
    """0 leaves with four uses and returns for two: six in all beat 1's five, two since
    its return do not.
    """
    accesses = one_by_one([0] * 4 + [1] * 5 + [2, 0, 0, 3])
    assert drive(LFU(variant="in-cache"), accesses, 2).evicted == [0, 2, 0]
    assert drive(LFU(variant="perfect"), accesses, 2).evicted == [0, 2, 1]


def test_a_prefetched_expert_that_is_never_used_leaves_in_its_turn():
    """Entering is a use: 3 came in while 0 was used, so it goes before 1 and 2, which
    were used later.
    """
    policy = LRU()
    policy.start(context(atomic([0]), 3))
    policy.accessed(work(experts=[0]))
    policy.admitted(3)
    policy.accessed(work(experts=[1, 2], step=1))
    admit(policy, 1, 2)
    assert victims(policy, [4, 5], [1, 2, 3]) == [3, 1]


def test_section_5_2_slots_per_layer_from_bytes():
    """16 GB less 2.4 of other weights and 1.0 in reserve; 57 GB of experts, 128 a
    layer: floor(28.3) of each.
    """
    layers = 48
    experts = 128
    size = CacheSize.of(
        (57_000_000_000 // (layers * experts),) * layers,
        experts,
        total_bytes=12_600_000_000,
    )
    assert size.slots.tolist() == [28] * layers


def test_no_cache_never_keeps_anything():
    run = drive(NoCache(), STEPS, 3)
    assert (run.hits, run.resident) == (0, [])


def test_static_fills_by_calibration_by_layer_or_over_the_whole_model():
    counts = np.array([[5, 1, 5, 0], [9, 8, 7, 0]], float)
    per_layer = Static()
    per_layer.start(context([], 2, layers=2, experts=4, calibration=counts))
    assert per_layer.initial(np.array([2, 1])).tolist() == [0, 2, 4]
    static = Static(fill="calibrated")
    static.start(
        context([], 3, layers=2, experts=4, scope="global", calibration=counts)
    )
    # 5 ties with 5: the lower id.
    assert static.initial(np.array([4])).tolist() == [0, 4, 5, 6]


def test_static_without_calibration_takes_the_lowest_ids_of_every_layer():
    policy = Static()
    policy.start(context([], 3, layers=2, experts=4, scope="global"))
    assert policy.initial(np.array([3])).tolist() == [0, 1, 4]
    steps = atomic([0], [5], [0, 5])
    assert drive(Static(), steps, 2).resident == [0, 1]


def test_section_6_1_and_6_2_static_fills_the_first_layers_or_the_last_ones():
    """Three layers of four, six slots: one layer whole and half the next; slots per
    layer cannot do that.
    """
    for fill, filled in (("front", [0, 1, 2, 3, 4, 5]), ("last", [4, 5, 8, 9, 10, 11])):
        policy = Static(fill=fill)
        policy.start(context([], 6, layers=3, experts=4, scope="global"))
        assert policy.initial(np.array([6])).tolist() == filled
        with pytest.raises(
            PolicyError, match=f"fill={fill} fills whole layers.*--cache-scope global"
        ):
            Static(fill=fill).start(context([], 2, layers=3, experts=4))


def test_static_fills_what_its_gpu_serves():
    """Layers 0 and 1 live on another GPU: six slots hold layer 3 and half of layer 2,
    popular experts likewise.
    """
    base = context(
        [], 6, layers=4, experts=4, scope="global", calibration=np.ones((4, 4))
    )
    served = np.array([False, False, True, True])
    for fill, filled in (
        ("last", [8, 9, 12, 13, 14, 15]),
        ("calibrated", [8, 9, 10, 11, 12, 13]),
    ):
        policy = Static(fill=fill)
        policy.start(replace(base, served=served))
        assert policy.initial(np.array([6])).tolist() == filled


def test_static_random_follows_the_seed():
    filled = [
        drive(Static(fill="random"), [], 4, seed=seed).resident for seed in (1, 1, 2)
    ]
    assert filled[0] == filled[1] != filled[2]


def test_static_says_what_it_misses():
    with pytest.raises(PolicyError, match="calibration trace; found none"):
        drive(Static(fill="calibrated"), [], 2)


def test_belady_without_a_future_is_refused():
    blind = context([], 2)
    object.__setattr__(blind, "future", None)
    with pytest.raises(PolicyError, match="must see the future"):
        Belady().start(blind)
