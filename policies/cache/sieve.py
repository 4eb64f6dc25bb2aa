"""SIEVE, first in, first out with a moving hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.machine_code.functions import compiled
from moesim.policies.cache import _request_lists as lists
from moesim.policies.compiled import AdmittingCompiledCache

if TYPE_CHECKING:
    from moesim.policies.base import RunContext
    from moesim.policies.kernels import CacheKernels, State

# Rows of the marks.
_USED = lists.ROWS
"""By key: whether it was used since the hand last passed it."""

_HAND = lists.ROWS + 1
"""By pool: the key that the hand will look at next; the head behind the newest."""


@compiled
def _hit(state: State, pool: int, key: int) -> None:
    state.marks[_USED, key] = 1


@compiled
def _miss(state: State, pool: int, key: int) -> int:
    used = state.marks[_USED]
    queue = lists.head_of(state, pool, 0)
    victim = state.marks[_HAND, pool]
    while True:
        # Behind the newest comes the oldest.
        if victim == queue:
            victim = lists.following(state, queue)
        if lists.is_free(state, victim):
            if not used[victim]:
                break
            used[victim] = 0
        victim = lists.following(state, victim)

    state.marks[_HAND, pool] = lists.following(state, victim)
    lists.remove(state, victim)
    _fill(state, pool, key)
    return victim


@compiled
def _fill(state: State, pool: int, key: int) -> None:
    queue = lists.head_of(state, pool, 0)
    # It has walked off the newest: back to the oldest, before `key` enters.
    if state.marks[_HAND, pool] == queue:
        state.marks[_HAND, pool] = lists.following(state, queue)
    lists.append(state, queue, key)
    state.marks[_USED, key] = 0
    # There was no oldest.
    if state.marks[_HAND, pool] == queue:
        state.marks[_HAND, pool] = key


@compiled
def _drop(state: State, pool: int, key: int) -> None:
    if state.marks[_HAND, pool] == key:
        state.marks[_HAND, pool] = lists.following(state, key)
    lists.remove(state, key)


class SIEVE(AdmittingCompiledCache):
    """Evict the first expert not used since a hand last passed it; the hand moves from
    the oldest to the newest.

    A used expert is spared once. The hand stays where it evicted; newcomers enter
    behind it. Held experts are passed over and keep their mark. Requests are made from
    layer steps as `moesim.policies.cache._request_lists` defines. Equal to
    libCacheSim's Sieve on one request at a time.

    Source: Zhang et al., NSDI 2024, algorithm 1.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def bring(self, context: RunContext) -> CacheKernels:
        """Make an empty queue for each pool, with its hand."""
        known = lists.request_state(context, lists=1, rows=2)
        for pool in range(len(context.capacity_slots)):
            known.marks[_HAND, pool] = lists.head_of(known, pool, 0)
        return lists.kernels_of(known, _hit, _miss, _fill, _drop)
