"""S3-FIFO: a small probation queue, a main queue, and a ghost list."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.machine_code.functions import compiled
from moesim.policies.cache import _request_lists as lists
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import RunContext
    from moesim.policies.kernels import CacheKernels, State

Variant = Literal["paper", "libcachesim"]

# A 2-bit counter.
_MOST_USES = 3

# Lists of a pool, oldest first.
_PROBATION = 0
_MAIN = 1
_GHOSTS = 2

# Rows of the marks: by key, then by pool.
_USES = lists.ROWS
_SMALL = lists.ROWS + 1
_MOST_GHOSTS = lists.ROWS + 2
_EVICTED_BEFORE = lists.ROWS + 3

# Places in the integers.
_QUALIFYING_USES = lists.INTEGERS
_AS_PUBLISHED = lists.INTEGERS + 1


@compiled
def _size(state: State, pool: int, number: int) -> int:
    return lists.size_of(state, lists.head_of(state, pool, number))


@compiled
def _enter(state: State, pool: int, number: int, key: int) -> None:
    lists.append(state, lists.head_of(state, pool, number), key)
    state.marks[_USES, key] = 0


@compiled
def _take_ghost(state: State, pool: int, key: int) -> bool:
    """Remove `key` from the ghosts; whether it was one."""
    if lists.list_of(state, pool, key) != _GHOSTS:
        return False
    lists.remove(state, key)
    return True


@compiled
def _hit(state: State, pool: int, key: int) -> None:
    uses = state.marks[_USES]
    uses[key] = min(uses[key] + 1, _MOST_USES)


@compiled
def _miss(state: State, pool: int, key: int) -> int:
    state.marks[_EVICTED_BEFORE, pool] = 1
    # Before a victim is chosen: its ghost may push this one out of the list.
    returning = _take_ghost(state, pool, key)

    from_probation = _probation_first(state, pool)
    victim = -1
    # Again and again, as promotions out of one queue may fill the other.
    while victim < 0:
        if from_probation:
            victim = _from_probation(state, pool)
        else:
            victim = _from_main(state, pool)
        from_probation = not from_probation
    _enter(state, pool, _MAIN if returning else _PROBATION, key)
    return victim


@compiled
def _fill(state: State, pool: int, key: int) -> None:
    returning = _take_ghost(state, pool, key)
    marks = state.marks
    overflows = (
        not state.integers[_AS_PUBLISHED]
        and not marks[_EVICTED_BEFORE, pool]
        and _size(state, pool, _PROBATION) >= marks[_SMALL, pool]
    )
    _enter(state, pool, _MAIN if returning or overflows else _PROBATION, key)


@compiled
def _probation_first(state: State, pool: int) -> bool:
    """Whether the small queue is to give the victim."""
    small = state.marks[_SMALL, pool]
    waiting = _size(state, pool, _PROBATION)
    if state.integers[_AS_PUBLISHED]:
        return waiting >= small
    large = state.marks[lists.CAPACITY, pool] - small
    return _size(state, pool, _MAIN) <= large and waiting > 0


@compiled
def _from_probation(state: State, pool: int) -> int:
    """Promote used keys until one has too few uses: the victim. -1 if all were promoted
    or held.
    """
    probation = lists.head_of(state, pool, _PROBATION)
    ghosts = lists.head_of(state, pool, _GHOSTS)
    key = lists.first_free(state, probation)
    while key >= 0:
        lists.remove(state, key)
        if state.marks[_USES, key] < state.integers[_QUALIFYING_USES]:
            lists.append(state, ghosts, key)
            if lists.size_of(state, ghosts) > state.marks[_MOST_GHOSTS, pool]:
                lists.remove(state, lists.following(state, ghosts))
            break
        _enter(state, pool, _MAIN, key)
        key = lists.first_free(state, probation)
    return key


@compiled
def _from_main(state: State, pool: int) -> int:
    """Put used keys behind all others, one use fewer, until one has none: the victim.
    -1 if all are held.
    """
    main = lists.head_of(state, pool, _MAIN)
    key = lists.first_free(state, main)
    while key >= 0:
        lists.remove(state, key)
        if not state.marks[_USES, key]:
            break
        lists.append(state, main, key)
        state.marks[_USES, key] -= 1
        key = lists.first_free(state, main)
    return key


class S3FIFO(AdmittingCompiledCache):
    """Evict new experts early from a small queue, unless they were used there: then
    they move to the main queue.

    What leaves the small queue becomes a ghost; a ghost that returns enters the main
    queue. The main queue gives a used expert another round for each use, at most 3.
    Held experts stay where they are. Requests are made from layer steps as
    `moesim.policies.cache._request_lists` defines.

    Args:
        small: share of the slots for the small queue, at least one slot.
        ghosts: remembered evictions of the small queue, as a share of the slots.
        uses: uses in the small queue that qualify for the main one.
        variant: ``paper`` evicts from the small queue whenever it is full, else from
            the main one, and fills the small queue first; ``libcachesim`` evicts from
            the main queue only when that is over its size, and lets newcomers fill the
            main queue until the first eviction. That form equals libCacheSim's S3FIFO.

    Source: Yang et al., SOSP 2023, algorithm 1; libCacheSim ``S3FIFO.c`` for the second
    variant.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(
        self,
        *,
        small: float = 0.1,
        ghosts: float = 0.9,
        uses: int = 2,
        variant: Variant = "paper",
    ) -> None:
        expect(0.0 < small < 1.0, "small", "0 < small < 1", small)
        expect(ghosts >= 0.0, "ghosts", ">= 0", ghosts)
        expect(uses >= 1, "uses", ">= 1", uses)
        expect_choice("variant", variant, Variant)
        self.small = small
        self.ghosts = ghosts
        self.uses = uses
        self.variant = variant

    def bring(self, context: RunContext) -> CacheKernels:
        """Make the three queues for each pool."""
        rules = (self.uses, int(self.variant == "paper"))
        known = lists.request_state(context, lists=3, ghosts=1, rows=4, integers=rules)
        for pool, slots in enumerate(context.capacity_slots.tolist()):
            known.marks[_SMALL, pool] = max(1, int(slots * self.small))
            known.marks[_MOST_GHOSTS, pool] = int(slots * self.ghosts)
        return lists.kernels_of(known, _hit, _miss, _fill)
