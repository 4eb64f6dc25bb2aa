"""The stacks behind hit-rate curves: what stands at depth C is what C slots keep and C - 1 slots do not.

A *pool* is a cache with stacks of its own: one per layer, or one for all. P pools of W keys; a layer step makes its
accesses to one pool, in ascending order of keys; each is counted at the depth where its key stood before the step, or
at W if it never was there.
"""

from __future__ import annotations

import numpy as np
from numba import types as nb

from traces.compiled import compiled

_I64 = nb.Array(nb.int64, 1, "C", readonly=True)
_I32 = nb.Array(nb.int32, 1, "C", readonly=True)
_I8 = nb.Array(nb.int8, 1, "C", readonly=True)
BLOCK = 16
"""Depths of Belady's stack that are passed over together where nothing in them changes."""


@compiled(
    nb.void(
        _I8, _I64, _I64, _I32, nb.int32[:, ::1], nb.int64[:, ::1], nb.int64[::1], nb.int64[::1], nb.int64[:, :, ::1]
    )
)
def lru_stack(  # noqa: C901 - one loop, compiled
    phase: np.ndarray,
    pool: np.ndarray,
    edges: np.ndarray,
    keys: np.ndarray,
    stacks: np.ndarray,
    uses: np.ndarray,
    filled: np.ndarray,
    clock: np.ndarray,
    depths: np.ndarray,
) -> None:
    """Rebuild the stack of each layer step: active keys come up by id, the others sink in the order of their last use.

    Those last used in the same layer step sink by falling id as far as they lose their places together.

    Args:
        phase: int8 [N]; first index of `depths`.
        pool: int64 [N].
        edges: int64 [N + 1]; layer step i accesses ``keys[edges[i]:edges[i + 1]]``.
        keys: int32 [A], below W.
        stacks: [P, W], carried from call to call, as are
        uses: [P, W], the layer step of each key's last use, -1 before it,
        filled: [P], how many keys there are, and
        clock: [1], the number of the next layer step.
        depths: [2, P, W + 1], counted up.
    """
    width = stacks.shape[1]
    state = np.zeros(width, np.int8)  # 1: active, 2: active and in its place
    sunk = np.empty(width, np.int32)  # old keys that lost their place and wait for another
    for i in range(len(pool)):
        at = pool[i]
        stack, use, where = stacks[at], uses[at], depths[phase[i], at]
        first, last, seen = edges[i], edges[i + 1], filled[at]
        for j in range(first, last):
            state[keys[j]] = 1
            if use[keys[j]] < 0:  # those never seen before stand below all others, by id
                stack[filled[at]] = keys[j]
                filled[at] += 1
        left, due, begin, end, depth = last - first, first, 0, 0, 0
        while left > 0:
            old = stack[depth]
            if state[old] > 0:
                where[depth if depth < seen else width] += 1
                left -= 1
            if state[old] == 1:
                state[old] = 2
                depth += 1
                continue  # held where it stands
            if state[old] == 0:
                spot = end
                while spot > begin and use[sunk[spot - 1]] == use[old] and sunk[spot - 1] < old:
                    sunk[spot] = sunk[spot - 1]
                    spot -= 1
                sunk[spot] = old
                end += 1
            while due < last and state[keys[due]] == 2:
                due += 1
            if due < last:
                stack[depth] = keys[due]
                state[keys[due]] = 2
            else:
                stack[depth] = sunk[begin]
                begin += 1
            depth += 1
        for j in range(first, last):
            state[keys[j]] = 0
            use[keys[j]] = clock[0]
        clock[0] += 1


@compiled(
    nb.void(
        _I8, _I64, _I64, _I32, _I64, nb.int32[:, ::1], nb.int32[:, ::1], nb.int64[::1], nb.int64[:, ::1],
        nb.int64[:, ::1], nb.int64[:, :, ::1],
    )
)  # fmt: skip
def belady_stack(  # noqa: C901, PLR0912, PLR0915 - one loop, compiled
    phase: np.ndarray,
    pool: np.ndarray,
    edges: np.ndarray,
    keys: np.ndarray,
    following: np.ndarray,
    stacks: np.ndarray,
    places: np.ndarray,
    filled: np.ndarray,
    uses: np.ndarray,
    latest: np.ndarray,
    depths: np.ndarray,
) -> None:
    """Rebuild the stack of each layer step: from the top, the sooner used of what stood there and what is in hand.

    In hand are the active keys and those that lost their place above; an active one stays where it is met. A block of
    depths in which everything is used sooner than all in hand stays as it is: that is what makes large pools fast.

    Args:
        phase: as in `lru_stack`, as are
        pool: ,
        edges: and
        keys: .
        following: int64 [A], place of each access's next use; larger is later.
        stacks: [P, W], carried from call to call, as are
        places: [P, W], the depth of each key, -1 where it never was,
        filled: [P], how many keys there are,
        uses: [P, W], the next use of each key, and
        latest: [P, blocks], the latest next use in each block of the stack.
        depths: [2, P, W + 1], counted up.
    """
    width, blocks = stacks.shape[1], latest.shape[1]
    active, placed = np.zeros(width, np.bool_), np.zeros(width, np.bool_)
    hot = np.zeros(blocks, np.int64)  # active keys in a block of the old stack
    hand = np.empty(width + 1, np.int32)  # worst first
    for i in range(len(pool)):
        at = pool[i]
        stack, place, use, bound = stacks[at], places[at], uses[at], latest[at]
        where = depths[phase[i], at]
        kept = 0
        for j in range(edges[i + 1] - 1, edges[i] - 1, -1):  # higher ids are worse
            key = keys[j]
            active[key], placed[key] = True, False
            use[key] = following[j]
            spot = kept
            while spot > 0 and use[hand[spot - 1]] < following[j]:
                hand[spot] = hand[spot - 1]
                spot -= 1
            hand[spot] = key
            kept += 1
        for n in range(kept - 1, -1, -1):
            key = hand[n]
            where[place[key] if place[key] >= 0 else width] += 1
            if place[key] < 0:  # below all others, sooner used ones first
                place[key] = filled[at]
                stack[filled[at]] = key
                filled[at] += 1
            hot[place[key] // BLOCK] += 1
        block = 0
        while kept > 0:
            if hot[block] == 0 and bound[block] < use[hand[kept - 1]]:
                block += 1
                continue
            hot[block] = 0
            worst = 0
            depth = block * BLOCK
            end = min(depth + BLOCK, filled[at])
            while depth < end:
                old = stack[depth]
                if kept > 0:
                    best = hand[kept - 1]
                    if active[old]:
                        if not placed[old]:  # held
                            spot = kept - 1
                            while hand[spot] != old:
                                spot -= 1
                            for n in range(spot, kept - 1):
                                hand[n] = hand[n + 1]
                            best = old
                        kept -= 1
                    elif use[old] < use[best] or (use[old] == use[best] and not active[best] and old > best):
                        best = old
                    else:
                        spot = kept - 1
                        while spot > 0:
                            other = hand[spot - 1]
                            if use[other] > use[old] or (use[other] == use[old] and not active[other] and old > other):
                                break
                            spot -= 1
                        for n in range(kept - 1, spot, -1):
                            hand[n] = hand[n - 1]
                        hand[spot] = old  # the best has left the end of the hand to the others
                    if best != old:
                        stack[depth] = best
                        place[best] = depth
                    placed[best] = True
                    old = best
                worst = max(worst, use[old])
                depth += 1
            bound[block] = worst
            block += 1
        for j in range(edges[i], edges[i + 1]):
            active[keys[j]] = False
