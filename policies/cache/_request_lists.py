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
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import filled, view_of, zeros
from moesim.policies.base import CachePolicy
from moesim.policies.names import NONE

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext


class RequestCache(CachePolicy):
    """Turns the planner's questions into single requests. A subclass says what a hit, a
    miss and a free slot do to the lists of one memory pool.

    A list holds keys, oldest first. It is named by its *head*, a key behind those of
    all experts: the oldest key follows it and the newest precedes it, so that an empty
    list needs no case of its own.

    Attributes:
        capacity: int64 [pools], slots.
        following, previous: int64, by key or head: the neighbours in its list, the
            newer one first.
        head_of: int64, by key: head of the list that it is in, -1 for none.
        size: int64, by head: keys in the list.
        free: int8, by key: whether it may leave, while a victim is chosen.
    """

    def make_lists(self, context: RunContext, lists: int, ghosts: int = 0) -> None:
        """Make empty lists for every memory pool; the last `ghosts` of them remember
        what has left.
        """
        self.experts = context.shape.experts
        self.pools = len(context.capacity_slots)
        self.keys = context.shape.layers * self.experts
        self.lists = lists
        self.cached_lists = lists - ghosts
        self.capacity: Ints = view_of(context.capacity_slots, np.int64)
        places = self.keys + self.pools * lists
        self.following: Ints = np.arange(places, dtype=np.int64).data
        self.previous: Ints = np.arange(places, dtype=np.int64).data
        self.head_of: Ints = filled(places, NONE, np.int64)
        self.size: Ints = zeros(places, np.int64)
        self.free: Ints = zeros(self.keys, np.int8)
        # Keys that `victims` has entered and `admitted` has not yet confirmed.
        self.placed: Ints = zeros(self.keys, np.int8)
        self.placed_keys: Ints = zeros(self.keys, np.int64)
        self.placed_count = 0

    # -- requests, a subclass's own ----------------------------------------------------

    def hit(self, pool: int, key: int) -> None:
        """Note a use of a key that is in the cache."""
        raise NotImplementedError

    def miss(self, pool: int, key: int) -> int:
        """Choose a free key that leaves for `key`, enter both moves, and return it; the
        pool has a free one.
        """
        raise NotImplementedError

    def fill(self, pool: int, key: int) -> None:
        """Enter `key` into a free slot: nobody leaves."""
        raise NotImplementedError

    def drop(self, pool: int, key: int) -> None:
        """Remove a key that leaves without having been chosen."""
        self.remove(key)

    # -- the planner's questions -------------------------------------------------------

    def accessed(self, work: Work) -> None:
        self._forget_placed()
        pool = self._pool_of(work.first)
        for i in range(work.active):
            key = work.first + work.experts[i]
            if self._is_cached(pool, key):
                self.hit(pool, key)

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        count = len(candidates)
        # Chosen once and out of the lists, they stayed after all: enter them anew.
        for c in range(count):
            self._fill_unless_cached(candidates[c])
        self._forget_placed()
        for c in range(count):
            self.free[candidates[c]] = 1
        for n in range(min(len(incoming), count)):
            key = incoming[n]
            victim = self.miss(self._pool_of(key), key)
            chosen[n] = victim
            self.free[victim] = 0
            self.placed[key] = 1
            self.placed_keys[n] = key
            self.placed_count += 1
        for c in range(count):
            self.free[candidates[c]] = 0

    def admitted(self, key: int) -> None:
        if self.placed[key]:
            self.placed[key] = 0
        else:
            self._fill_unless_cached(key)

    def evicted(self, key: int) -> None:
        pool = self._pool_of(key)
        if self._is_cached(pool, key):
            self.drop(pool, key)
        self.placed[key] = 0

    def _forget_placed(self) -> None:
        """Drop what was entered and never admitted."""
        for n in range(self.placed_count):
            key = self.placed_keys[n]
            if self.placed[key]:
                RequestCache.evicted(self, key)
        self.placed_count = 0

    def _fill_unless_cached(self, key: int) -> None:
        pool = self._pool_of(key)
        if not self._is_cached(pool, key):
            self.fill(pool, key)

    def _pool_of(self, key: int) -> int:
        # One pool alone is the global scope, whatever the layer.
        return 0 if self.pools == 1 else key // self.experts

    def _is_cached(self, pool: int, key: int) -> bool:
        number = self.list_of(pool, key)
        return 0 <= number < self.cached_lists

    # -- lists -------------------------------------------------------------------------

    def head(self, pool: int, number: int) -> int:
        """The head of one of a pool's lists."""
        return self.keys + pool * self.lists + number

    def list_of(self, pool: int, key: int) -> int:
        """Number of the list that a key is in, -1 for none."""
        head = self.head_of[key]
        return NONE if head < 0 else head - self.head(pool, 0)

    def append(self, head: int, key: int) -> None:
        """Make a key that is in no list the newest of one."""
        newest = self.previous[head]
        self.following[newest] = key
        self.previous[key] = newest
        self.following[key] = head
        self.previous[head] = key
        self.head_of[key] = head
        self.size[head] += 1

    def remove(self, key: int) -> None:
        """Take a key out of its list."""
        self.following[self.previous[key]] = self.following[key]
        self.previous[self.following[key]] = self.previous[key]
        self.size[self.head_of[key]] -= 1
        self.head_of[key] = NONE

    def first_free(self, head: int) -> int:
        """The oldest key of a list that may leave; -1 if there is none."""
        key = self.following[head]
        while key != head:
            if self.free[key]:
                return key
            key = self.following[key]
        return NONE
