"""The loop behind hit-rate curves, with C types: one visit per access, and nothing kept
but tables.

A accesses of a block, N layer steps of it.
"""

from __future__ import annotations

import numpy as np

# What stands at depth C is what C slots keep and C - 1 slots do not.
#
# A *pool* is a cache with stacks of its own: one per layer, or one for all. P pools of
# W keys; a layer step makes its accesses to one pool, in ascending order of keys; each
# is counted at the depth where its key stood before the step, or at W if it never was
# there.
#
# A stack holds numbers that say both the key and how much it is worth, so one
# comparison settles what comes first: ``rank << bits | tag``, smaller is better, with
# the key as tag of an active one and ``2 W - 1 - key`` of any other. Belady ranks by
# the place of the next use; LRU by the last use, later ones first.


def _insert(displaced: np.ndarray, spot: int, worth: int) -> None:
    """Put a number at `spot` or further up, so that the worst still comes first."""
    while spot > 0 and displaced[spot - 1] < worth:
        displaced[spot] = displaced[spot - 1]
        spot -= 1
    displaced[spot] = worth


def _rebuild_block(
    stack: np.ndarray,
    place: np.ndarray,
    begin: int,
    end: int,
    displaced: np.ndarray,
    count: int,
    mask: int,
) -> int:
    """Fill the block of depths from `begin` to before `end` with the sooner used of
    what stood there and the first `count` displaced; how many are displaced then.

    Arguments as in `rebuild_stacks`, of one pool.
    """
    width = len(place)
    for depth in range(begin, end):
        if count == 0:
            break
        old = stack[depth]
        best = displaced[count - 1]

        if old < 0:
            key = -1 - old
            if place[key] == depth:  # held: it was not placed above
                spot = count - 1
                while displaced[spot] & mask != key:
                    spot -= 1
                best = displaced[spot]
                for n in range(spot, count - 1):
                    displaced[n] = displaced[n + 1]
            count -= 1
        elif old > best:
            # The best has left the end to the others.
            _insert(displaced, count - 1, old)
        else:
            continue

        stack[depth] = best
        tag = best & mask
        place[tag if tag < width else 2 * width - 1 - tag] = depth
    return count


def rebuild_stacks(
    phase: np.ndarray,
    pool: np.ndarray,
    edges: np.ndarray,
    keys: np.ndarray,
    rank: np.ndarray,
    ranked: np.ndarray,
    places: np.ndarray,
    filled: np.ndarray,
    latest: np.ndarray,
    depths: np.ndarray,
) -> None:
    """Rebuild the stack of each layer step: from the top, the better of what stood
    there and what is displaced.

    Displaced are the active keys and those that lost their place above; an active one
    stays where it is met. A block of depths in which everything is better than all
    displaced ones stays as it is: that is what makes large pools fast.

    Args:
        phase: int8 [N]; first index of `depths`.
        pool: int64 [N].
        edges: int64 [N + 1]; layer step i accesses ``keys[edges[i]:edges[i + 1]]``.
        keys: int32 [A], below W.
        rank: int64 [A], of each access's key from now on; smaller is better.
        ranked: [P, blocks * depths of one], the stacks, zeros at first; carried from
            call to call, as are
        places: [P, W], the depth of each key, -1 where it never was,
        filled: [P], how many keys there are, and
        latest: [P, blocks], no less than the largest number in each block of the stack.
        depths: [2, P, W + 1], counted up.
    """
    width = places.shape[1]
    blocks = latest.shape[1]
    depths_of_block = ranked.shape[1] // blocks
    tags = 2 * width
    bits = 1
    while (1 << bits) < tags:
        bits += 1
    mask = (1 << bits) - 1

    # Active keys in each block of the old stack.
    active = np.zeros(blocks, np.int64)
    # Worst first, so that the best is taken off the end: displaced[:count].
    displaced = np.empty(width + 1, np.int64)

    for i in range(len(pool)):
        at = pool[i]
        stack = ranked[at]
        place = places[at]
        bound = latest[at]
        where = depths[phase[i], at]
        count = 0

        for j in range(edges[i], edges[i + 1]):
            _insert(displaced, count, rank[j] << bits | keys[j])
            count += 1

        for n in range(count - 1, -1, -1):
            key = displaced[n] & mask
            depth = place[key]
            where[depth if depth >= 0 else width] += 1
            if depth < 0:  # below all others, better ones first
                depth = filled[at]
                place[key] = depth
                filled[at] += 1
            # A negative number marks the place of an active key.
            stack[depth] = -1 - key
            active[depth // depths_of_block] += 1

        block = 0
        while count > 0:
            if active[block] == 0 and bound[block] < displaced[count - 1]:
                block += 1
                continue

            active[block] = 0
            begin = block * depths_of_block
            end = begin + depths_of_block
            count = _rebuild_block(stack, place, begin, end, displaced, count, mask)

            worst = 0
            for depth in range(begin, end):
                worst = max(worst, stack[depth])
            # Whatever the tags become, the bound holds.
            bound[block] = worst | mask
            block += 1

        # From now on these keys are not active: they lose a tie.
        for j in range(edges[i], edges[i + 1]):
            stack[place[keys[j]]] += tags - 1 - 2 * keys[j]
