"""SLRU, segmented LRU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.machine_code.functions import compiled
from moesim.policies.cache import _request_lists as lists
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import RunContext
    from moesim.policies.kernels import CacheKernels, State

Entry = Literal["lowest", "free"]

# Places in the integers.
_SEGMENTS = lists.INTEGERS
_ENTERS_FREE = lists.INTEGERS + 1


@compiled
def _share(state: State, pool: int) -> int:
    """Slots of every segment above the lowest."""
    return state.marks[lists.CAPACITY, pool] // state.integers[_SEGMENTS]


@compiled
def _put(state: State, pool: int, key: int, level: int) -> None:
    """Make `key` the most recent of a segment, and hand down what no longer fits."""
    share = _share(state, pool)
    lists.append(state, lists.head_of(state, pool, level), key)
    # The lowest has no limit of its own: the capacity of the pool is one.
    while level > 0:
        segment = lists.head_of(state, pool, level)
        if lists.size_of(state, segment) <= share:
            return
        oldest = lists.following(state, segment)
        lists.remove(state, oldest)
        level -= 1
        lists.append(state, lists.head_of(state, pool, level), oldest)


@compiled
def _hit(state: State, pool: int, key: int) -> None:
    level = lists.list_of(state, pool, key)
    lists.remove(state, key)
    _put(state, pool, key, min(level + 1, state.integers[_SEGMENTS] - 1))


@compiled
def _miss(state: State, pool: int, key: int) -> int:
    victim = -1
    level = 0
    # A lowest segment with held experts alone leaves the choice to the next.
    while victim < 0:
        victim = lists.first_free(state, lists.head_of(state, pool, level))
        level += 1
    # Left before the newcomer enters, or a segment would seem to overflow.
    lists.remove(state, victim)
    _fill(state, pool, key)
    return victim


@compiled
def _fill(state: State, pool: int, key: int) -> None:
    if state.integers[_ENTERS_FREE]:
        share = _share(state, pool)
        for level in range(state.integers[_SEGMENTS]):
            if lists.size_of(state, lists.head_of(state, pool, level)) < share:
                _put(state, pool, key, level)
                return
    _put(state, pool, key, 0)


class SLRU(AdmittingCompiledCache):
    """Evict from the lowest of several LRU segments; every hit moves an expert one
    segment up.

    Every segment above the lowest has an equal share of the slots, rounded down; one
    that overflows hands its least recent expert down to the segment below. Requests are
    made from layer steps as `moesim.policies.cache._request_lists` defines.

    Args:
        segments: 2 are probation and protected, as published; 4 are S4LRU.
        entry: ``lowest`` lets newcomers enter the lowest segment; ``free`` the lowest
            segment that is not full, as libCacheSim does.

    ``segments=4,entry=free`` equals libCacheSim's SLRU wherever 4 divides the capacity.
    Where it does not, libCacheSim's lowest segment can exceed its share, and a hit that
    hands an expert down to it evicts although nothing enters.

    Source: Karedla et al., IEEE Computer 1994 (two segments); Huang et al., SOSP 2013
    (four).
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, *, segments: int = 2, entry: Entry = "lowest") -> None:
        expect(segments >= 1, "segments", ">= 1", segments)
        expect_choice("entry", entry, Entry)
        self.segments = segments
        self.entry = entry

    def bring(self, context: RunContext) -> CacheKernels:
        """Make empty segments for each pool."""
        rules = (self.segments, int(self.entry == "free"))
        return lists.kernels_of(
            lists.request_state(context, lists=self.segments, integers=rules),
            _hit,
            _miss,
            _fill,
        )
