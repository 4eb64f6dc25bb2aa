"""Kernels of caches that are defined one request at a time: ARC, CLOCK, SIEVE, S3-FIFO,
SLRU.

Layer steps become requests as `moesim.policies.cache._per_request` defines. A policy
writes what a hit, a miss and a free slot do to its lists of one memory pool; the
kernels below turn the planner's questions into these.

A list is linked through two rows of the state's marks, oldest key first. Behind the
columns of all keys each list of each pool has one of its own, its *head*: the oldest
key follows it, the newest precedes it, so that an empty list needs no case of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.compilation import inlined, joined
from moesim.policies.kernels import MOVED, State, Work, state
from moesim.traces.compilation import compiled

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

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


@joined
def head_of(state: State, pool: int, number: int) -> int:
    """The head of one of a pool's lists."""
    return state.integers[_KEYS] + pool * state.integers[_LISTS] + number


@joined
def list_of(state: State, pool: int, key: int) -> int:
    """Number of the list that a key is in, -1 for none."""
    head = state.marks[_HEAD, key]
    return -1 if head < 0 else head - head_of(state, pool, 0)


@joined
def is_cached(state: State, pool: int, key: int) -> bool:
    """Whether a key is in a list that is no list of ghosts."""
    number = list_of(state, pool, key)
    return number >= 0 and number < state.integers[_CACHED]


@joined
def size_of(state: State, head: int) -> int:
    """Number of keys in a list."""
    return state.marks[_SIZE, head]


@joined
def following(state: State, key: int) -> int:
    """The next newer key of a list; its head behind the newest, the oldest behind its
    head.
    """
    return state.marks[_NEXT, key]


@joined
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


@joined
def remove(state: State, key: int) -> None:
    """Take a key out of its list."""
    marks = state.marks
    marks[_NEXT, marks[_PREVIOUS, key]] = marks[_NEXT, key]
    marks[_PREVIOUS, marks[_NEXT, key]] = marks[_PREVIOUS, key]
    marks[_SIZE, marks[_HEAD, key]] -= 1
    marks[_HEAD, key] = -1


@joined
def is_free(state: State, key: int) -> bool:
    """Whether a key may leave now."""
    return state.marks[_FREE, key] != 0


@joined
def first_free(state: State, head: int) -> int:
    """The oldest key of a list that may leave; -1 if there is none."""
    key = state.marks[_NEXT, head]
    while key != head:
        if state.marks[_FREE, key]:
            return key
        key = state.marks[_NEXT, key]
    return -1


# -- requests --------------------------------------------------------------------------


@joined
def _pool_of(state: State, key: int) -> int:
    # One pool alone is the global scope, whatever the layer.
    if state.integers[_POOLS] == 1:
        return 0
    return key // state.integers[_EXPERTS]


@inlined
def _forget_placed(state: State, drop: Any) -> None:
    """Drop what was entered and never admitted."""
    for n in range(state.integers[_PLACED_COUNT]):
        key = state.marks[_PLACED_KEYS, n]
        if state.marks[_PLACED, key]:
            forget(state, key, drop)
    state.integers[_PLACED_COUNT] = 0


@inlined
def forget(state: State, key: int, drop: Any) -> None:
    """Drop a key that leaves without having been chosen; chosen ones have left."""
    pool = _pool_of(state, key)
    if is_cached(state, pool, key):
        drop(state, pool, key)
    state.marks[_PLACED, key] = 0


@inlined
def pass_hits(state: State, work: Work, hit: Any, drop: Any) -> None:
    """Pass on the hits of a layer step, in ascending id: ``hit(state, pool, key)``."""
    _forget_placed(state, drop)
    first = work.layer * state.integers[_EXPERTS]
    pool = _pool_of(state, first)
    for expert in work.experts:
        if is_cached(state, pool, first + expert):
            hit(state, pool, first + expert)


@inlined
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


@inlined
def take_back(state: State, candidates: np.ndarray, fill: Any) -> None:
    """Enter residents that are in no list: ``fill(state, pool, key)``.

    They were chosen once, left the lists, and stayed after all, since somebody needed
    them or the copy was not made.
    """
    for key in candidates:
        pool = _pool_of(state, key)
        if not is_cached(state, pool, key):
            fill(state, pool, key)


@inlined
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


@joined
def drop_from_list(state: State, pool: int, key: int) -> None:
    """Take a key out of its list, wherever it is."""
    remove(state, key)


@compiled(MOVED)
def forget_evicted(state: State, keys: np.ndarray) -> None:
    """Forget what left without having been chosen."""
    for key in keys:
        forget(state, key, drop_from_list)
