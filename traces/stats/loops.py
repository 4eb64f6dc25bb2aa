"""The loops behind hit-rate curves, with C types: one visit per access, and nothing
kept but tables.

A accesses of a block, N layer steps of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# -- stacks ----------------------------------------------------------------------------
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


# -- reuse distance --------------------------------------------------------------------
# How many keys of a pool were used later than each access's own last use: LRU at every
# size, but for layer steps that are larger than the cache.
#
# Every use has a place in a row of marks; only a key's last use keeps its mark. What
# was used later is then the marks behind a place: counted one by one up to the end of
# the place's own block, and by the sums of the blocks behind it.
#
# Source: Bennett and Kruskal (1975) for the marks; they sum with a tree, which is
# slower for the few thousand keys here.


def later_used(
    phase: np.ndarray,
    pool: np.ndarray,
    edges: np.ndarray,
    keys: np.ndarray,
    marks: np.ndarray,
    sums: np.ndarray,
    last: np.ndarray,
    used: np.ndarray,
    now: np.ndarray,
    depths: np.ndarray,
) -> None:
    """Count, before each layer step, the keys used later than each of its own.

    Args:
        phase: int8 [N]; first index of `depths`.
        pool: int64 [N].
        edges: int64 [N + 1]; layer step i accesses ``keys[edges[i]:edges[i + 1]]``.
        keys: int32 [A], below W.
        marks: uint8 [P, places], carried from call to call, as are
        sums: int32 [P, blocks], the marks in each of them,
        last: int64 [P, W], the place of each key's last use, -1 before it,
        used: int32 [P, places], the key used at each place, and
        now: int64 [P], the next place.
        depths: [2, P, W + 1], counted up; W: never before seen.
    """
    size = marks.shape[1] // sums.shape[1]
    for i in range(len(phase)):
        at = pool[i]
        mark = marks[at]
        sum_of = sums[at]
        last_of = last[at]
        key_at = used[at]
        if now[at] + edges[i + 1] - edges[i] > len(key_at):
            now[at] = _moved_together(mark, sum_of, last_of, key_at)
        next_place = now[at]

        # Look up all before any use is noted: a layer step is one moment.
        for j in range(edges[i], edges[i + 1]):
            place = last_of[keys[j]]
            depth = len(last_of)
            if place >= 0:
                depth = 0
                block = place // size
                for later in range(place + 1, (block + 1) * size):
                    depth += mark[later]
                for later in range(block + 1, (next_place - 1) // size + 1):
                    depth += sum_of[later]
            depths[phase[i], at, depth] += 1

        for j in range(edges[i], edges[i + 1]):
            place = last_of[keys[j]]
            if place >= 0:
                mark[place] = 0
                sum_of[place // size] -= 1
            last_of[keys[j]] = next_place
            key_at[next_place] = keys[j]
            mark[next_place] = 1
            sum_of[next_place // size] += 1
            next_place += 1
        now[at] = next_place


def _moved_together(mark: Any, sum_of: Any, last_of: Any, key_at: Any) -> int:
    """Move the marks of a pool together, as its places are used up; the next place
    then.
    """
    mark, sum_of, last_of, key_at = map(np.asarray, (mark, sum_of, last_of, key_at))
    keys = key_at[mark > 0]
    end = len(keys)
    key_at[:end] = keys
    last_of[keys] = np.arange(end)
    mark[:] = np.arange(len(mark)) < end
    sum_of[:] = mark.reshape(len(sum_of), -1).sum(axis=1)
    return end
