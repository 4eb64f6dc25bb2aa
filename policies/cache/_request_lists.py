"""Caches that are defined one request at a time: ARC, CLOCK, LeCaR, SIEVE, S3-FIFO,
SLRU.

Their definitions know neither layer steps nor held experts nor prefetches. The
translation stands here, once:

- A layer step is several requests: its hits in ascending id when the step is noted,
  then the misses that take a victim's slot, in launch order. In the step that completes
  the filling of a cache, those that took a free slot come last.
- A miss that is computed on the CPU, or declined, is no request: it neither enters nor
  changes any count.
- Entering by prefetch is the request; the first demand use is then a hit.
- Candidates are residents that are not held: the definition's victim is the first in
  its order that may leave.
- An expert that leaves without having been chosen (a copy cancelled, a swap) leaves no
  trace in the ghost lists.
- A victim that stays after all, since somebody needed it or the copy was not made,
  enters anew when victims are asked for next.

Two forms of it: kernels on linked lists in a policy's state, and a base in Python
(`PerRequestCache`) for rules whose numbers are no lists. In the first a policy writes
what a hit, a miss and a free slot do to its lists of one memory pool; the kernels turn
the planner's questions into these.

A list is linked through two rows of the state's marks, oldest key first. Behind the
columns of all keys each list of each pool has one of its own, its *head*: the oldest
key follows it, the newest precedes it, so that an empty list needs no case of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import CachePolicy
from moesim.policies.kernels import (
    ACCESSED,
    MOVED,
    VICTIMS,
    CacheKernels,
    State,
    Work,
    state,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from moesim.policies.base import LayerWork, RunContext


# Rows of the state's marks, by key.
_NEXT = 0
_PREVIOUS = 1

_HEAD = 2
"""Head of the list that a key is in, -1 for none."""

_SIZE = 3
"""By head: keys in the list."""

_FREE = 4
"""Whether a key may leave, while a victim is chosen."""

_PLACED = 5
"""Whether `serve_misses` has entered a key that has not been admitted yet."""

_PLACED_KEYS = 6
"""A list of such keys, some of which may have been admitted since."""

CAPACITY = 7
"""By pool: slots."""

ROWS = 8
"""First row of the policy's own."""

# Places in the state's integers.
_EXPERTS = 0
_POOLS = 1
_KEYS = 2
_LISTS = 3
_CACHED = 4
_PLACED_COUNT = 5

INTEGERS = 6
"""First place of the policy's own."""


def request_state(
    context: RunContext,
    *,
    lists: int,
    ghosts: int = 0,
    rows: int = 0,
    integers: tuple[int, ...] = (),
) -> State:
    """Make empty lists for every memory pool.

    Args:
        context: of the run.
        lists: of each pool.
        ghosts: how many of them, the last ones, remember what has left.
        rows: of marks that the policy has for itself, all 0.
        integers: that the policy has for itself.

    Returns:
        The state, with a score of 0 for each pool.
    """
    keys = context.shape.layers * context.shape.experts
    slots = context.capacity_slots
    pools = len(slots)
    marks = np.zeros((ROWS + rows, keys + pools * lists), np.int64)
    heads = np.arange(keys, keys + pools * lists)
    marks[_NEXT, heads] = heads
    marks[_PREVIOUS, heads] = heads
    marks[_HEAD] = -1
    marks[CAPACITY, :pools] = slots
    sizes = (context.shape.experts, pools, keys, lists, lists - ghosts, 0)
    return state([np.zeros(pools)], marks, integers=[*sizes, *integers])


# -- lists -----------------------------------------------------------------------------


@compiled
def head_of(state: State, pool: int, number: int) -> int:
    """The head of one of a pool's lists."""
    return state.integers[_KEYS] + pool * state.integers[_LISTS] + number


@compiled
def list_of(state: State, pool: int, key: int) -> int:
    """Number of the list that a key is in, -1 for none."""
    head = state.marks[_HEAD, key]
    return -1 if head < 0 else head - head_of(state, pool, 0)


@compiled
def is_cached(state: State, pool: int, key: int) -> bool:
    """Whether a key is in a list that is no list of ghosts."""
    number = list_of(state, pool, key)
    return number >= 0 and number < state.integers[_CACHED]


@compiled
def size_of(state: State, head: int) -> int:
    """Number of keys in a list."""
    return state.marks[_SIZE, head]


@compiled
def following(state: State, key: int) -> int:
    """The next newer key of a list; its head behind the newest, the oldest behind its
    head.
    """
    return state.marks[_NEXT, key]


@compiled
def append(state: State, head: int, key: int) -> None:
    """Make a key that is in no list the newest of one."""
    marks = state.marks
    newest = marks[_PREVIOUS, head]
    marks[_NEXT, newest] = key
    marks[_PREVIOUS, key] = newest
    marks[_NEXT, key] = head
    marks[_PREVIOUS, head] = key
    marks[_HEAD, key] = head
    marks[_SIZE, head] += 1


@compiled
def remove(state: State, key: int) -> None:
    """Take a key out of its list."""
    marks = state.marks
    marks[_NEXT, marks[_PREVIOUS, key]] = marks[_NEXT, key]
    marks[_PREVIOUS, marks[_NEXT, key]] = marks[_PREVIOUS, key]
    marks[_SIZE, marks[_HEAD, key]] -= 1
    marks[_HEAD, key] = -1


@compiled
def is_free(state: State, key: int) -> bool:
    """Whether a key may leave now."""
    return state.marks[_FREE, key] != 0


@compiled
def first_free(state: State, head: int) -> int:
    """The oldest key of a list that may leave; -1 if there is none."""
    key = state.marks[_NEXT, head]
    while key != head:
        if state.marks[_FREE, key]:
            return key
        key = state.marks[_NEXT, key]
    return -1


# -- requests --------------------------------------------------------------------------


@compiled
def _pool_of(state: State, key: int) -> int:
    # One pool alone is the global scope, whatever the layer.
    if state.integers[_POOLS] == 1:
        return 0
    return key // state.integers[_EXPERTS]


@compiled
def _forget_placed(state: State, drop: Any) -> None:
    """Drop what was entered and never admitted."""
    for n in range(state.integers[_PLACED_COUNT]):
        key = state.marks[_PLACED_KEYS, n]
        if state.marks[_PLACED, key]:
            forget(state, key, drop)
    state.integers[_PLACED_COUNT] = 0


@compiled
def forget(state: State, key: int, drop: Any) -> None:
    """Drop a key that leaves without having been chosen; chosen ones have left."""
    pool = _pool_of(state, key)
    if is_cached(state, pool, key):
        drop(state, pool, key)
    state.marks[_PLACED, key] = 0


@compiled
def pass_hits(state: State, work: Work, hit: Any, drop: Any) -> None:
    """Pass on the hits of a layer step, in ascending id: ``hit(state, pool, key)``."""
    _forget_placed(state, drop)
    first = work.layer * state.integers[_EXPERTS]
    pool = _pool_of(state, first)
    for expert in work.experts:
        if is_cached(state, pool, first + expert):
            hit(state, pool, first + expert)


@compiled
def serve_misses(
    state: State,
    incoming: np.ndarray,
    candidates: np.ndarray,
    chosen: np.ndarray,
    miss: Any,
    drop: Any,
) -> None:
    """Serve the misses one by one, in launch order: ``miss(state, pool, key)`` enters a
    key and returns its victim, which is free.
    """
    _forget_placed(state, drop)
    marks = state.marks
    for key in candidates:
        marks[_FREE, key] = 1
    for n in range(len(incoming)):
        if n >= len(candidates):
            chosen[n] = -1
            continue
        key = incoming[n]
        chosen[n] = miss(state, _pool_of(state, key), key)
        marks[_FREE, chosen[n]] = 0
        marks[_PLACED, key] = 1
        marks[_PLACED_KEYS, n] = key
        state.integers[_PLACED_COUNT] += 1
    for key in candidates:
        marks[_FREE, key] = 0


@compiled
def take_back(state: State, candidates: np.ndarray, fill: Any) -> None:
    """Enter residents that are in no list: ``fill(state, pool, key)``.

    They were chosen once, left the lists, and stayed after all, since somebody needed
    them or the copy was not made.
    """
    for key in candidates:
        pool = _pool_of(state, key)
        if not is_cached(state, pool, key):
            fill(state, pool, key)


@compiled
def confirm(state: State, keys: np.ndarray, fill: Any) -> None:
    """Confirm keys that `serve_misses` has entered; the others took a free slot:
    ``fill(state, pool, key)``.
    """
    for key in keys:
        pool = _pool_of(state, key)
        if state.marks[_PLACED, key]:
            state.marks[_PLACED, key] = 0
        elif not is_cached(state, pool, key):
            fill(state, pool, key)


@compiled
def drop_from_list(state: State, pool: int, key: int) -> None:
    """Take a key out of its list, wherever it is."""
    remove(state, key)


def kernels_of(
    known: State, hit: Any, miss: Any, fill: Any, drop: Any = drop_from_list
) -> CacheKernels:
    """Kernels of a rule, made of what it does with one request.

    Args:
        known: its state.
        hit: ``hit(state, pool, key)``.
        miss: ``miss(state, pool, key) -> victim``.
        fill: ``fill(state, pool, key)``, into a free slot.
        drop: ``drop(state, pool, key)``, of a key that was not chosen.
    """
    accessed, victims, admitted, evicted = _kernels(hit, miss, fill, drop)
    return CacheKernels(
        known, victims, accessed=accessed, admitted=admitted, evicted=evicted
    )


@cache
def _kernels(hit: Any, miss: Any, fill: Any, drop: Any) -> tuple[Any, ...]:
    @compiled(ACCESSED)
    def accessed(state: State, work: Work) -> None:
        pass_hits(state, work, hit, drop)

    @compiled(VICTIMS)
    def victims(
        state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
    ) -> None:
        take_back(state, candidates, fill)
        serve_misses(state, incoming, candidates, chosen, miss, drop)

    @compiled(MOVED)
    def admitted(state: State, keys: np.ndarray) -> None:
        confirm(state, keys, fill)

    @compiled(MOVED)
    def evicted(state: State, keys: np.ndarray) -> None:
        for key in keys:
            forget(state, key, drop)

    return accessed, victims, admitted, evicted


class RequestQueues(Protocol):
    """The queues of one memory pool: one layer, or the whole memory in global scope.
    Keys are flat.
    """

    def __contains__(self, key: int) -> bool:
        """Whether `key` is in the cache; ghosts are not."""

    def hit(self, key: int) -> None:
        """Note a use of a key that is in the cache."""

    def miss(self, key: int, free: Container[int]) -> int:
        """Choose which of `free` leaves for `key`, and enter both moves; at least one
        resident is in `free`.
        """

    def fill(self, key: int) -> None:
        """Enter `key` into a free slot: no key leaves."""

    def drop(self, key: int) -> None:
        """Remove a key that leaves without having been chosen."""


class PerRequestCache(CachePolicy):
    """Asks one `RequestQueues` per pool; subclasses make them in `pool`."""

    def start(self, context: RunContext) -> None:
        """Make the pools."""
        self._experts = context.shape.experts
        self._pools = [
            self.pool(int(slots), context) for slots in context.capacity_slots
        ]
        # Keys that `victims` has entered and `admitted` has not yet confirmed.
        self._placed: set[int] = set()

    @abstractmethod
    def pool(
        self,
        capacity: int,
        context: RunContext,
    ) -> RequestQueues:
        """Make the queues of a pool of `capacity` slots, possibly 0."""

    def accessed(self, work: LayerWork) -> None:
        """Pass on the hits, in ascending id."""
        self._forget(self._placed)
        first_key = work.layer * self._experts
        pool = self._pool_of(first_key)
        for expert in work.experts.tolist():
            if first_key + expert in pool:
                pool.hit(first_key + expert)

    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Serve the misses one by one, in launch order."""
        self._forget(self._placed)
        for key in candidates.tolist():
            pool = self._pool_of(key)
            if key not in pool:
                pool.fill(key)
        free = set(candidates.tolist())
        chosen = np.full(len(incoming), -1, np.int64)
        for n, key in enumerate(incoming.tolist()):
            if not free:
                break
            victim = self._pool_of(key).miss(key, free)
            chosen[n] = victim
            free.discard(victim)
            self._placed.add(key)
        return chosen

    def admitted(self, keys: np.ndarray) -> None:
        """Confirm keys that `victims` has entered; the others took a free slot."""
        for key in keys.tolist():
            pool = self._pool_of(key)
            if key in self._placed:
                self._placed.discard(key)
            elif key not in pool:
                pool.fill(key)

    def evicted(self, keys: np.ndarray) -> None:
        """Drop keys that left without having been chosen."""
        self._forget(keys.tolist())

    def _forget(self, keys: Iterable[int]) -> None:
        """Drop `keys` that are still inside: entered but never admitted, or gone
        without having been chosen.
        """
        # Sorted into a list of its own: the set of placed keys shrinks on the way, and
        # its order must not reach the queues.
        for key in sorted(keys):
            pool = self._pool_of(key)
            if key in pool:
                pool.drop(key)
            self._placed.discard(key)

    def _pool_of(self, key: int) -> RequestQueues:
        # One pool alone is the global scope, whatever the layer.
        if len(self._pools) == 1:
            return self._pools[0]
        return self._pools[key // self._experts]


def forget_oldest(queue: dict[int, Any]) -> None:
    """Remove the first key of a dictionary, which keeps them in order of entry."""
    del queue[next(iter(queue))]


def first(queue: Iterable[int], free: Container[int]) -> int:
    """The first key of `queue` that may leave; -1 if there is none."""
    for key in queue:
        if key in free:
            return key
    return -1
