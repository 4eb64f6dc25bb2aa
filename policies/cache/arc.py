"""ARC, the adaptive replacement cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.machine_code.functions import compiled
from moesim.policies.cache import _request_lists as lists
from moesim.policies.cache.static import Static
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import RunContext
    from moesim.policies.kernels import CacheKernels, State

Fill = Literal["empty", "lowest"]
Ratio = Literal["whole", "real"]

# Lists of a pool, each least recent first.
_ONCE = 0
_OFTEN = 1
_GHOST_ONCE = 2
_GHOST_OFTEN = 3
"""T1, T2 and their ghosts B1, B2. The pool's score is the paper's target p."""

_WHOLE = lists.INTEGERS


@compiled
def _size(state: State, pool: int, number: int) -> int:
    return lists.size_of(state, lists.head_of(state, pool, number))


@compiled
def _hit(state: State, pool: int, key: int) -> None:
    lists.remove(state, key)
    lists.append(state, lists.head_of(state, pool, _OFTEN), key)


@compiled
def _miss(state: State, pool: int, key: int) -> int:
    # Measured before `_fill` removes the ghost, as the paper does.
    ghost = lists.list_of(state, pool, key)
    target = state.scores[0, pool]
    if ghost == _GHOST_ONCE:
        shift = _shift(state, pool, _GHOST_OFTEN, _GHOST_ONCE)
        target = min(target + shift, float(state.marks[lists.CAPACITY, pool]))
    elif ghost == _GHOST_OFTEN:
        shift = _shift(state, pool, _GHOST_ONCE, _GHOST_OFTEN)
        target = max(target - shift, 0.0)
    state.scores[0, pool] = target

    size = _size(state, pool, _ONCE)
    victims = _OFTEN
    if size > target or (ghost == _GHOST_OFTEN and size == target):
        victims = _ONCE
    victim = lists.first_free(state, lists.head_of(state, pool, victims))
    # The other list is asked where the first has only held experts.
    if victim < 0:
        victims = _OFTEN if victims == _ONCE else _ONCE
        victim = lists.first_free(state, lists.head_of(state, pool, victims))
    lists.remove(state, victim)
    lists.append(state, lists.head_of(state, pool, _GHOST_ONCE + victims), victim)
    _fill(state, pool, key)
    return victim


@compiled
def _fill(state: State, pool: int, key: int) -> None:
    """Enter T2 from a ghost list, else T1; then forget ghosts beyond c in L1 and 2c in
    all (cases A and B).
    """
    if lists.list_of(state, pool, key) >= 0:
        lists.remove(state, key)
        lists.append(state, lists.head_of(state, pool, _OFTEN), key)
    else:
        lists.append(state, lists.head_of(state, pool, _ONCE), key)

    capacity = state.marks[lists.CAPACITY, pool]
    once = _size(state, pool, _ONCE) + _size(state, pool, _GHOST_ONCE)
    _forget_oldest(state, pool, _GHOST_ONCE, once - capacity)
    every = 0
    for number in range(4):
        every += _size(state, pool, number)
    _forget_oldest(state, pool, _GHOST_OFTEN, every - 2 * capacity)


@compiled
def _forget_oldest(state: State, pool: int, number: int, count: int) -> None:
    """Remove so many keys from a list, or all."""
    head = lists.head_of(state, pool, number)
    for _ in range(min(count, lists.size_of(state, head))):
        lists.remove(state, lists.following(state, head))


@compiled
def _shift(state: State, pool: int, other: int, returning: int) -> float:
    """How far a hit in the ghost list `returning` moves the target."""
    others = _size(state, pool, other)
    ghosts = _size(state, pool, returning)
    if state.integers[_WHOLE]:
        return max(1.0, float(others // ghosts))
    return max(1.0, others / ghosts)


class ARC(AdmittingCompiledCache):
    """Divide the cache between experts used once (T1) and more often (T2), and shift
    the division when an evicted one returns.

    A ghost hit moves the target p by max(1, ratio of the ghost lists), measured before
    the ghost is removed; T1 gives the victim while it is larger than p (or as large,
    when the ghost was in B2). Requests are made from layer steps as
    `moesim.policies.cache._request_lists` defines; if the list that should give the
    victim has only held experts, the other does.

    Args:
        ratio: ``whole`` divides the ghost lists as integers, as cacheus ``arc.py``
            does, ``real`` exactly, as libCacheSim does: that form equals its ARC on one
            request at a time. The paper leaves it open.
        fill: ``lowest`` fills the cache with the lowest ids before the run, as Fate's
            code does; of ``empty`` a calibration may make something else.

    Source: Megiddo and Modha, FAST 2003, figure 4.
    """

    reference: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, *, ratio: Ratio = "whole", fill: Fill = "empty") -> None:
        expect_choice("ratio", ratio, Ratio)
        expect_choice("fill", fill, Fill)
        self.ratio = ratio
        self.fill = fill

    def bring(self, context: RunContext) -> CacheKernels:
        """Make four empty lists for each pool."""
        self._lowest_ids = Static(fill="lowest")
        self._lowest_ids.start(context)
        rounded = int(self.ratio == "whole")
        return lists.kernels_of(
            lists.request_state(context, lists=4, ghosts=2, integers=(rounded,)),
            _hit,
            _miss,
            _fill,
        )

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Fill with the lowest ids, if asked for."""
        if self.fill == "lowest":
            return self._lowest_ids.initial(capacity_slots)
        return None
