"""Base of caches that are defined one request at a time: ARC, LeCaR, SIEVE, S3-FIFO,
SLRU, CLOCK.

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

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moesim.policies.base import CachePolicy

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from moesim.policies.base import LayerWork, RunContext


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
