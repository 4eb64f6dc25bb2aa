"""Caches that replace experts on their own account: a base that admits no fetched
expert, and the pairing of absent experts with residents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.base import CachePolicy
from moesim.policies.names import NONE, RESIDENT
from moesim.policies.ranked_cache import RankedCache

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

_OUTSIDE = 0
_INSIDE = 1
_PAIRED = 2


class NoAdmissionCache(CachePolicy):
    """Admits nothing: what is fetched or prefetched runs from staging and is gone
    afterwards. A subclass may be empty, or have fixed content (`initial`).
    """

    def admits(self, work: Work, key: int) -> bool:
        return False

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        """Decline all."""


class ReplacingCache(RankedCache):
    """Knows what is inside, so that a subclass can ask for copies of its own.

    Attributes:
        inside: int8 [L * E], 1 of experts that have entered and not left, copies in
            flight included.
    """

    def start(self, context: RunContext) -> None:
        """Begin empty."""
        RankedCache.start(self, context)
        self.inside: Ints = zeros(self.layers * self.experts, np.int8)

    def admitted(self, key: int) -> None:
        self.inside[key] = _INSIDE

    def evicted(self, key: int) -> None:
        self.inside[key] = _OUTSIDE

    def pair(
        self,
        work: Work,
        states: Ints,
        outgoing: Ints,
        incoming: Ints,
        margin: float,
        everyone: bool,
    ) -> int:
        """Pair the best of a layer's missed experts, or of all that are absent, with
        the worst of its residents, while the score gains more than the margin.

        Args:
            work, states, outgoing, incoming: as `replacements` has them.
            margin: of the score.
            everyone: whether all absent experts count, not the missed ones alone.

        Returns:
            How many pairs.
        """
        count = 0
        while True:
            best = self._best_absent(work, everyone)
            worst = self._worst_resident(work, states)
            # Both only get closer: once a pair does not pay, none does.
            if best < 0 or worst < 0:
                break
            if not self.score[best] > self.score[worst] + margin:
                break
            outgoing[count] = worst
            incoming[count] = best
            count += 1
            self.inside[worst] = _PAIRED
            self.inside[best] = _PAIRED
        for n in range(count):
            self.inside[outgoing[n]] = _INSIDE
            self.inside[incoming[n]] = _OUTSIDE
        return count

    def _best_absent(self, work: Work, everyone: bool) -> int:
        best = NONE
        for n in range(self.experts if everyone else work.active):
            key = work.first + (n if everyone else work.experts[n])
            if self.inside[key] != _OUTSIDE:
                continue
            if best < 0 or self.score[key] > self.score[best]:
                best = key
        return best

    def _worst_resident(self, work: Work, states: Ints) -> int:
        worst = NONE
        for key in range(work.first, work.first + self.experts):
            # What is inside may still be in flight, and then it cannot leave yet.
            if self.inside[key] != _INSIDE or states[key] != RESIDENT:
                continue
            if worst < 0 or self.score[key] < self.score[worst]:
                worst = key
        return worst
