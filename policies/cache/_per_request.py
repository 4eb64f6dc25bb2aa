"""Caches that are defined one request at a time: ARC, LeCaR, SIEVE, S3-FIFO, SLRU.

Think of a doorman with a few queues and a list of those who left lately. Their
definitions know neither layer steps nor held experts nor prefetches, so the translation
is written down once, here.

- A layer step is several requests: its hits in ascending id when the step is noted,
  then the misses that are placed, in launch order. In the step that completes the
  filling of a cache, those that found a free place come last.
- A miss that is computed on the CPU, or declined, is no request: it neither enters nor
  teaches.
- Entering by prefetch is the request; the first demand use is then a hit.
- Candidates are what nobody holds: the definition's victim is the first in its order
  that may leave.
- An expert that leaves without a victim's choice (a copy cancelled, a swap) leaves no
  trace in the ghost lists.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

import numpy as np
from moesim.policies.base import CachePolicy

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from moesim.policies.base import LayerWork, RunContext


class Requests(Protocol):
    """The queues of one memory pool: one layer, or the whole memory in global scope.
    Keys are flat.
    """

    def __contains__(self, key: int) -> bool:
        """Whether `key` is in the cache; ghosts are not."""

    def hit(self, key: int) -> None:
        """Note a use of what is inside."""

    def miss(self, key: int, free: Container[int]) -> int:
        """Choose who of `free` leaves for `key`, and book both moves; at least one
        resident is in `free`.
        """

    def fill(self, key: int) -> None:
        """Enter without anybody leaving."""

    def drop(self, key: int) -> None:
        """Leave without having been chosen."""


class RequestCache(CachePolicy):
    """Asks one `Requests` per pool; subclasses make them in `pool`."""

    def start(self, context: RunContext) -> None:
        """Open the pools."""
        self._experts = context.shape.experts
        self._pools = [
            self.pool(int(slots), context) for slots in context.capacity_slots
        ]
        self._placed: set[int] = set()

    @abstractmethod
    def pool(self, capacity: int, context: RunContext) -> Requests:
        """Make the queues of a pool of `capacity` slots, possibly 0."""

    def accessed(self, work: LayerWork) -> None:
        """Pass on the hits, in ascending id."""
        self._forget(self._placed)
        first = work.layer * self._experts
        pool = self._of(first)
        for expert in work.experts.tolist():
            if first + expert in pool:
                pool.hit(first + expert)

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Serve the misses one by one, in launch order."""
        self._forget(self._placed)
        free = set(candidates.tolist())
        chosen = np.full(len(incoming), -1, np.int64)
        for n, key in enumerate(incoming.tolist()):
            if not free:
                break
            chosen[n] = self._of(key).miss(key, free)
            free.discard(int(chosen[n]))
            self._placed.add(key)
        return chosen

    def admitted(self, keys: np.ndarray) -> None:
        """Confirm who was placed in `victims`; the others found a free place."""
        for key in keys.tolist():
            if key in self._placed:
                self._placed.discard(key)
            elif key not in (pool := self._of(key)):
                pool.fill(key)

    def evicted(self, keys: np.ndarray) -> None:
        """Drop those who left unasked."""
        self._forget(keys.tolist())

    def _forget(self, keys: Iterable[int]) -> None:
        """Drop `keys` that are still inside: placed but never admitted, or gone
        unasked.
        """
        for key in sorted(keys):
            if key in (pool := self._of(key)):
                pool.drop(key)
            self._placed.discard(key)

    def _of(self, key: int) -> Requests:
        return self._pools[key // self._experts if len(self._pools) > 1 else 0]


def first(queue: Iterable[int], free: Container[int]) -> int:
    """Find the first of `queue` that may leave; -1 if there is none."""
    return next((key for key in queue if key in free), -1)
