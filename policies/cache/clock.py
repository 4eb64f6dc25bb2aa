"""CLOCK, first in, first out with second chances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.machine_code.functions import compiled
from moesim.policies.cache import _request_lists as lists
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.base import RunContext
    from moesim.policies.kernels import CacheKernels, State

_USES = lists.ROWS
"""Row of the marks: uses by key."""

_ROUNDS = lists.INTEGERS


@compiled
def _hit(state: State, pool: int, key: int) -> None:
    uses = state.marks[_USES]
    uses[key] = min(uses[key] + 1, state.integers[_ROUNDS])


@compiled
def _miss(state: State, pool: int, key: int) -> int:
    uses = state.marks[_USES]
    queue = lists.head_of(state, pool, 0)
    victim = lists.first_free(state, queue)
    lists.remove(state, victim)
    while uses[victim]:
        # Entered anew, so it stands behind all others.
        uses[victim] -= 1
        lists.append(state, queue, victim)
        victim = lists.first_free(state, queue)
        lists.remove(state, victim)
    _fill(state, pool, key)
    return victim


@compiled
def _fill(state: State, pool: int, key: int) -> None:
    lists.append(state, lists.head_of(state, pool, 0), key)
    state.marks[_USES, key] = 0


class Clock(AdmittingCompiledCache):
    """Evict the oldest expert that was not used since it was last considered.

    One that was used becomes the newest instead, with one use fewer. Held experts keep
    their position and uses. Requests are made from layer steps as
    `moesim.policies.cache._request_lists` defines. Equal to libCacheSim's Clock on one
    request at a time.

    Args:
        rounds: uses that are remembered at most; 1 is the textbook's reference bit
            (second chance), and the default.

    Source: Corbató, A Paging Experiment with the Multics System, 1968.
    """

    def __init__(self, *, rounds: int = 1) -> None:
        expect(rounds >= 1, "rounds", ">= 1", rounds)
        self.rounds = rounds

    def bring(self, context: RunContext) -> CacheKernels:
        """Make an empty queue for each pool."""
        return lists.kernels_of(
            lists.request_state(context, lists=1, rows=1, integers=(self.rounds,)),
            _hit,
            _miss,
            _fill,
        )
