"""Caches defined one request at a time: worked examples, libCacheSim, plain-list models,
and what layer steps add.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import admit, context, drive, evict, one_by_one, victims, work

from moesim.policies.cache.arc import ARC
from moesim.policies.cache.clock import Clock
from moesim.policies.cache.fifo import FIFO
from moesim.policies.cache.lecar import LeCaR
from moesim.policies.cache.lfu import LFU
from moesim.policies.cache.lifo import LIFO
from moesim.policies.cache.lru import LRU
from moesim.policies.cache.s3_fifo import S3FIFO
from moesim.policies.cache.sieve import SIEVE
from moesim.policies.cache.slru import SLRU

UNIT_STRING = [5, 2, 4, 2, 1, 3, 1, 5, 3, 5, 1, 3, 1, 4, 3, 5, 1, 4]
REQUEST_CACHES = [ARC, Clock, LeCaR, SIEVE, S3FIFO, SLRU]


def inside(policy, keys=range(8)):
    """Which keys a cache of one pool knows to be in it."""
    return [key for key in keys if 0 <= policy.list_of(0, key) < policy.cached_lists]


def in_list(policy, number):
    """The keys of a list of the first pool, oldest first."""
    head = policy.head(0, number)
    keys = [policy.following[head]]
    while keys[-1] != head:
        keys.append(policy.following[keys[-1]])
    return keys[:-1]


@pytest.mark.parametrize("policy", REQUEST_CACHES)
def test_a_victim_that_stays_after_all_can_be_chosen_again(policy):
    """Of two residents one is chosen, but its copy is not made; then the other is held,
    so that nobody else may leave.
    """
    cache = policy()
    cache.start(context([], 2))
    admit(cache, 0, 1)
    (stays,) = victims(cache, [2], [0, 1])
    assert victims(cache, [3], [stays]) == [stays]
    assert inside(cache) == [1 - stays, 3]


class AlternatingLeCaR(LeCaR):
    """The draws of the worked example: .25, .75, .25, ..."""

    def start(self, context):
        LeCaR.start(self, context)
        self.draw = itertools.cycle((0.25, 0.75)).__next__


@pytest.mark.parametrize(("policy", "hits", "evicted"), [
    (FIFO(), 10, [5, 2, 4, 1, 3]),
    (LIFO(), 4, [4, 1, 3, 1, 3, 1, 3, 1, 4, 3, 1]),
    (ARC(), 7, [5, 4, 3, 2, 5, 1, 4, 3]),
    (AlternatingLeCaR(), 6, [5, 1, 4, 3, 2, 5, 1, 4, 3]),
], ids=["fifo", "lifo", "arc", "lecar"])  # fmt: skip
def test_section_5_5_unit_string(policy, hits, evicted):
    run = drive(policy, one_by_one(UNIT_STRING), 3)
    assert (run.hits, run.evicted) == (hits, evicted)


def test_section_5_5_final_state_of_arc_and_lecar():
    arc = ARC()
    lecar = AlternatingLeCaR()
    drive(arc, one_by_one(UNIT_STRING), 3)
    drive(lecar, one_by_one(UNIT_STRING), 3)
    assert arc.target[0] == 0
    assert lecar.weight[0] == pytest.approx(0.5192, abs=5e-5)
    assert lecar.most_ghosts[0] == 1


def scan_arc(accesses, capacity):
    """Megiddo and Modha's figure 4 on plain lists, cases I to IV."""
    t1 = []
    t2 = []
    b1 = []
    b2 = []
    p = 0
    hits = []

    def replace(in_b2):
        if t1 and (len(t1) > p or (in_b2 and len(t1) == p)):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in accesses:
        hits.append(x in t1 or x in t2)
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1 or x in b2:
            back = x in b2
            shift = max(1, len(b1) // len(b2)) if back else max(1, len(b2) // len(b1))
            p = max(p - shift, 0) if back else min(p + shift, capacity)
            (b2 if back else b1).remove(x)
            replace(back)
            t2.append(x)
        else:
            full = len(t1) + len(t2) == capacity
            if len(t1) + len(b1) == capacity:
                (b1 if len(t1) < capacity else t1).pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                b2.pop(0)
            if full and len(t1) + len(t2) == capacity:
                replace(False)
            t1.append(x)
    return hits


def scan_s3fifo(accesses, capacity):
    """The paper's algorithm 1: while full, the small queue pays if it holds its tenth,
    else the main one.
    """
    small = []
    main = []
    ghost = []
    uses = {}
    hits = []
    for x in accesses:
        hits.append(x in small or x in main)
        if hits[-1]:
            uses[x] = min(uses[x] + 1, 3)
            continue
        known = x in ghost
        if known:
            ghost.remove(x)
        while len(small) + len(main) == capacity:
            if len(small) >= max(1, capacity // 10):
                while small:
                    y = small.pop(0)
                    if uses[y] <= 1:
                        ghost = (
                            [*ghost, y][-(capacity * 9 // 10) :] if capacity > 1 else []
                        )
                        break
                    main.append(y)
                    uses[y] = 0
            else:
                y = main.pop(0)
                if uses[y]:
                    uses[y] -= 1
                    main.append(y)
        (main if known else small).append(x)
        uses[x] = 0
    return hits


@st.composite
def streams(draw, slots):
    """Requests for 64 experts, of which few are frequent, and a number of slots: small
    enough that every queue and ghost list fills and overflows.
    """
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    accesses = (64 * rng.random(400) ** 3).astype(int).tolist()
    return accesses, draw(slots)


def hits_of(policy, accesses, capacity, seed=0):
    """Which requests hit, one expert a step."""
    steps = one_by_one(accesses)
    return drive(policy, steps, capacity, experts=64, seed=seed).hit_log


def judged(counterpart, accesses, capacity):
    """The same of a libCacheSim cache."""
    libcachesim = pytest.importorskip("libcachesim", reason="for Linux only")
    judge = getattr(libcachesim, counterpart)(cache_size=capacity)
    hits = []
    for key in accesses:
        request = libcachesim.Request()
        request.obj_id = key
        request.obj_size = 1
        hits.append(bool(judge.get(request)))
    return hits


@pytest.mark.parametrize(("cache", "counterpart"), [
    (LRU(), "LRU"),
    # The other variants of LFU are other algorithms.
    (LFU(tie="lru"), "LFU"),
    (FIFO(), "FIFO"),
    (SIEVE(), "Sieve"),
    (Clock(), "Clock"),
    (ARC(ratio="real"), "ARC"),
    (S3FIFO(variant="libcachesim"), "S3FIFO"),
    (SLRU(segments=4, entry="free"), "SLRU"),
])  # fmt: skip
@settings(max_examples=6, deadline=None)
# Sizes that its segments and small queues divide.
@given(stream=streams(st.sampled_from([20, 40])))
def test_libcachesim_hits_the_same(cache, counterpart, stream):
    assert hits_of(cache, *stream) == judged(counterpart, *stream)


@pytest.mark.parametrize(
    ("cache", "model"), [(ARC(), scan_arc), (S3FIFO(), scan_s3fifo)]
)
@settings(max_examples=15, deadline=None)
@given(stream=streams(st.integers(1, 40)))
def test_as_published_a_cache_equals_a_model_of_plain_lists(cache, model, stream):
    """Whole shifts in ARC, the paper's rules in S3-FIFO: not what libCacheSim does."""
    assert hits_of(cache, *stream) == model(*stream)


def test_lecar_is_close_to_libcachesims_though_draws_ghosts_and_ties_differ():
    accesses = (64 * np.random.default_rng(0).random(4000) ** 3).astype(int).tolist()
    rates = [np.mean(hits_of(LeCaR(), accesses, 16, seed)) for seed in range(3)]
    assert np.mean(rates) == pytest.approx(
        np.mean(judged("LeCaR", accesses, 16)), abs=0.03
    )


def test_slru_spares_what_was_hit_once():
    """0 was used twice and is protected; a scan of newcomers passes through
    probation.
    """
    run = drive(SLRU(), one_by_one([0, 0, 1, 2, 3, 4, 0]), 2)
    assert run.evicted == [1, 2, 3]
    assert run.hit_log[-1]


def test_a_layer_step_is_its_hits_in_ascending_id_then_its_misses_in_launch_order():
    """Hits 1 then 0 are noted as 0, 1, so 0 is the older of T2; 5 is launched before 4,
    so 5 leaves T1 first.
    """
    policy = ARC()
    policy.start(context([], 4))
    policy.accessed(work(experts=[0, 1]))
    admit(policy, 0, 1)
    policy.accessed(work(experts=[0, 1, 4, 5]))
    admit(policy, 5, 4)
    once, often = in_list(policy, 0), in_list(policy, 1)
    assert (often, once) == ([0, 1], [5, 4])
    assert victims(policy, [7, 6], [0, 1, 4, 5]) == [5, 4]


@pytest.mark.parametrize("cls", REQUEST_CACHES)
def test_every_layer_has_queues_of_its_own_or_one_is_shared(cls):
    """Two layers of the same requests: each alone as if the other did not exist."""
    alone = drive(cls(), one_by_one([0, 1, 2, 0, 3, 0, 1] * 3), 2)
    both = [
        step
        for s in one_by_one([0, 1, 2, 0, 3, 0, 1] * 3)
        for step in (s, s._replace(layer=1))
    ]
    if cls is not LeCaR:  # pools share one generator: the draws interleave
        assert drive(cls(), both, 2, layers=2).hits == 2 * alone.hits
    assert len(drive(cls(), both, 3, layers=2, scope="global").resident) == 3


@pytest.mark.parametrize("cls", REQUEST_CACHES)
def test_what_is_placed_but_never_enters_is_forgotten(cls):
    """A staged expert: `victims` was asked, but nothing entered."""
    policy = cls()
    policy.start(context([], 2))
    admit(policy, 0, 1)
    evict(policy, *victims(policy, [2], [0, 1]))
    policy.accessed(work(experts=[5], step=1))
    assert 2 not in inside(policy)
    assert len(inside(policy)) == 1


@pytest.mark.parametrize("cls", REQUEST_CACHES)
def test_a_cancelled_copy_leaves_no_trace(cls):
    policy = cls()
    policy.start(context([], 3))
    admit(policy, 0, 1, 2)
    policy.evicted(1)
    policy.admitted(3)
    left = set()
    for incoming in (4, 5):
        (victim,) = victims(policy, [incoming], inside(policy))
        policy.evicted(victim)
        policy.admitted(incoming)
        left.add(victim)
    assert 1 not in left
    assert len(left) == 2
