"""libCacheSim judges the caches that it has too: one expert at a time, on real
traces.
"""

import sys
from functools import cache

import numpy as np
import pytest
from support.cache_driver import context, flattened, real_trace, victims, work

from moesim.policies.cache.arc import ARC
from moesim.policies.cache.clock import Clock
from moesim.policies.cache.fifo import FIFO
from moesim.policies.cache.lecar import LeCaR
from moesim.policies.cache.s3_fifo import S3FIFO
from moesim.policies.cache.sieve import SIEVE
from moesim.policies.cache.slru import SLRU

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="libcachesim is published for Linux only"
)

TRACES = [
    ("qwen3_30b_a3b_top6", 48, 128, 36),
    ("olmoe_1b_7b_decode299", 16, 64, 80),
    ("gpt_oss_20b", 24, 32, 110),
]


@cache
def accesses(name, experts, tokens):
    """Flat keys of all layers, in replay order."""
    return [step.experts[0] for step in flattened(real_trace(name, tokens), experts)]


@cache
def requests(keys):
    return [work(experts=[key]) for key in range(keys)]


def judged(keys, judge):
    """Hits of a libCacheSim cache."""
    import libcachesim

    hits = []
    for key in keys:
        request = libcachesim.Request()
        request.obj_id = key
        request.obj_size = 1
        hits.append(bool(judge.get(request)))
    return hits


def played(policy, keys, capacity, experts, seed=0):
    """Hits of ours, as the driver finds them for one expert a step, without its
    checks.
    """
    policy.start(context([], capacity, experts=experts, seed=seed))
    inside = np.zeros(experts, bool)
    hits = []
    for key in keys:
        hits.append(bool(inside[key]))
        policy.accessed(requests(experts)[key])
        if inside[key]:
            continue
        if inside.sum() == capacity:
            (victim,) = victims(policy, [key], np.flatnonzero(inside))
            inside[victim] = False
            policy.evicted(victim)
        inside[key] = True
        policy.admitted(key)
    return hits


EQUAL = [
    (FIFO(), "FIFO"),
    (SIEVE(), "Sieve"),
    (Clock(), "Clock"),
    (ARC(ratio="real"), "ARC"),
    (S3FIFO(variant="libcachesim"), "S3FIFO"),
    (SLRU(segments=4, entry="free"), "SLRU"),
]


@pytest.mark.parametrize(("name", "layers", "experts", "tokens"), TRACES)
@pytest.mark.parametrize(
    ("cache", "counterpart"), EQUAL, ids=[pair[1] for pair in EQUAL]
)
def test_equal_hit_for_hit(name, layers, experts, tokens, cache, counterpart):
    """Keys of all layers in one cache of an eighth of the model."""
    import libcachesim

    keys = accesses(name, experts, tokens)
    capacity = layers * experts // 8
    assert len(keys) > 10_000
    hits = played(cache, keys, capacity, layers * experts)
    assert hits == judged(keys, getattr(libcachesim, counterpart)(cache_size=capacity))


@pytest.mark.parametrize(("name", "layers", "experts", "tokens"), TRACES)
@pytest.mark.parametrize(
    ("cache", "counterpart"),
    [(ARC(), "ARC"), (S3FIFO(), "S3FIFO")],
    ids=["arc", "s3-fifo"],
)
def test_other_by_default_but_close(name, layers, experts, tokens, cache, counterpart):
    """Whole shifts in ARC, the paper's rules in S3-FIFO: measured 0.1 to 1.1 points of
    hit rate.
    """
    import libcachesim

    keys = accesses(name, experts, tokens)
    capacity = layers * experts // 8
    hits = played(cache, keys, capacity, layers * experts)
    expected = judged(keys, getattr(libcachesim, counterpart)(cache_size=capacity))
    assert hits != expected
    assert abs(sum(hits) - sum(expected)) / len(keys) < 0.015


@pytest.mark.parametrize(("name", "layers", "experts", "tokens"), TRACES)
def test_lecar_is_close_though_draws_ghosts_and_ties_differ(
    name, layers, experts, tokens
):
    """Hit rates of ours by seed: .600-.606, .309-.343, .300-.377; of theirs by run:
    .594-.609, .309-.311, .305-.308.
    """
    import libcachesim

    keys = accesses(name, experts, tokens)
    capacity = layers * experts // 8
    hit_rate = np.mean(
        [
            played(LeCaR(), keys, capacity, layers * experts, seed=seed)
            for seed in range(3)
        ]
    )
    assert (
        abs(hit_rate - np.mean(judged(keys, libcachesim.LeCaR(cache_size=capacity))))
        < 0.03
    )
