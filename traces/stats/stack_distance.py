"""The stacks behind hit-rate curves: what stands at depth C is what C slots keep and C
- 1 slots do not.

A *pool* is a cache with stacks of its own: one per layer, or one for all. P pools of W
keys; a layer step makes its accesses to one pool, in ascending order of keys; each is
counted at the depth where its key stood before the step, or at W if it never was there.

A stack holds numbers that say both the key and how much it is worth, so one comparison
settles what comes first: for LRU ``step << bits | key``, larger is better; for Belady
``place of the next use << bits | tag``, smaller is better, with the key as tag of an
active one and ``2 W - 1 - key`` of any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np



# The place of a use that does not come: later than all others.
NEVER = 1 << 40
# Depths of Belady's stack that are passed over together where nothing in them changes.
BLOCK = 16


def lru_stack(  # noqa: C901, PLR0912 - one loop, compiled
    phase: np.ndarray,
    pool: np.ndarray,
    edges: np.ndarray,
    keys: np.ndarray,
    ranked: np.ndarray,
    known: np.ndarray,
    filled: np.ndarray,
    clock: np.ndarray,
    depths: np.ndarray,
) -> None:
    """Rebuild the stack of each layer step: active keys come up by id, the others sink
    in the order of their last use.

    An active key that stands high enough stays where it is. Keys last used in the same
    layer step sink by falling id as far as they lose their places together.

    Args:
        phase: int8 [N]; first index of `depths`.
        pool: int64 [N].
        edges: int64 [N + 1]; layer step i accesses ``keys[edges[i]:edges[i + 1]]``.
        keys: int32 [A], below W.
        ranked: [P, W], the stacks, carried from call to call, as are
        known: [P, W], whether a key was ever used,
        filled: [P], how many keys there are, and
        clock: [1], the number of the next layer step.
        depths: [2, P, W + 1], counted up.
    """
    width = ranked.shape[1]
    bits = 1
    while (1 << bits) < width:
        bits += 1
    mask = (1 << bits) - 1

    # State of each key in the step at hand: 1 active, 2 active and in its place.
    state = np.zeros(1 << bits, np.int8)
    # What lost its place and waits for another, best first: sunk[begin:end].
    sunk = np.empty(width, np.int64)

    for i in range(len(pool)):
        at = pool[i]
        stack = ranked[at]
        where = depths[phase[i], at]
        first = edges[i]
        last = edges[i + 1]
        seen = filled[at]

        for j in range(first, last):
            key = keys[j]
            state[key] = 1
            # Those never seen before stand below all others, by id.
            if not known[at, key]:
                known[at, key] = True
                stack[filled[at]] = key
                filled[at] += 1

        left = last - first  # active keys not met yet
        due = first  # the first access whose key may not have its place
        begin = 0
        end = 0
        depth = 0
        while left > 0:
            old = stack[depth]
            key = old & mask
            if state[key] > 0:
                where[depth if depth < seen else width] += 1
                left -= 1
            else:
                # Insertion: what sinks is nearly in order.
                spot = end
                while spot > begin and sunk[spot - 1] < old:
                    sunk[spot] = sunk[spot - 1]
                    spot -= 1
                sunk[spot] = old
                end += 1

            if depth < last - first:  # the top belongs to the active ones
                if state[key] != 1:
                    while state[keys[due]] == 2:
                        due += 1
                    key = keys[due]
                state[key] = 2
                stack[depth] = clock[0] << bits | key
            else:
                stack[depth] = sunk[begin]
                begin += 1
            depth += 1

        # Cleared one by one: there are far more keys than active ones.
        for j in range(first, last):
            state[keys[j]] = 0
        clock[0] += 1


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
    displaced: np.ndarray,
    count: int,
    mask: int,
) -> int:
    """Fill the block of depths that starts at `begin` with the sooner used of what
    stood there and the first `count` displaced; how many are displaced then.

    Arguments as in `belady_stack`, of one pool.
    """
    width = len(place)
    for depth in range(begin, begin + BLOCK):
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


def belady_stack(
    phase: np.ndarray,
    pool: np.ndarray,
    edges: np.ndarray,
    keys: np.ndarray,
    following: np.ndarray,
    ranked: np.ndarray,
    places: np.ndarray,
    filled: np.ndarray,
    latest: np.ndarray,
    depths: np.ndarray,
) -> None:
    """Rebuild the stack of each layer step: from the top, the sooner used of what stood
    there and what is displaced.

    Displaced are the active keys and those that lost their place above; an active one
    stays where it is met. A block of depths in which everything is used sooner than all
    displaced ones stays as it is: that is what makes large pools fast.

    Args:
        phase: as in `lru_stack`, as are
        pool: ,
        edges: and
        keys: .
        following: int64 [A], place of each access's next use, at most `NEVER`; larger
            is later.
        ranked: [P, blocks * BLOCK], the stacks, zeros at first; carried from call to
            call, as are
        places: [P, W], the depth of each key, -1 where it never was,
        filled: [P], how many keys there are, and
        latest: [P, blocks], no less than the largest number in each block of the stack.
        depths: [2, P, W + 1], counted up.
    """
    width = places.shape[1]
    blocks = latest.shape[1]
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
            _insert(displaced, count, following[j] << bits | keys[j])
            count += 1

        for n in range(count - 1, -1, -1):
            key = displaced[n] & mask
            depth = place[key]
            where[depth if depth >= 0 else width] += 1
            if depth < 0:  # below all others, sooner used ones first
                depth = filled[at]
                place[key] = depth
                filled[at] += 1
            # A negative number marks the place of an active key.
            stack[depth] = -1 - key
            active[depth // BLOCK] += 1

        block = 0
        while count > 0:
            if active[block] == 0 and bound[block] < displaced[count - 1]:
                block += 1
                continue

            active[block] = 0
            begin = block * BLOCK
            count = _rebuild_block(stack, place, begin, displaced, count, mask)

            worst = np.int64(0)
            for depth in range(begin, begin + BLOCK):
                worst = max(worst, stack[depth])
            # Whatever the tags become, the bound holds.
            bound[block] = worst | mask
            block += 1

        # From now on these keys are not active: they lose a tie.
        for j in range(edges[i], edges[i + 1]):
            stack[place[keys[j]]] += tags - 1 - 2 * np.int64(keys[j])


# -- reuse distance --------------------------------------------------------------------
# How many keys of one cache for all layers were used later than each access's own
# last use: LRU at every size.
#
# Every use has a place in a row of marks; only a key's last use keeps its mark. What
# was used later is then the marks behind a place: counted by 64 in the place's own
# word, and by the words' sums behind it.
#
# Source: Bennett and Kruskal (1975) for the marks; they sum with a tree, which is
# slower for the few thousand keys here.

# Places per key; when they are used up, those without a mark are removed.
PLACES = 3


def _bits_set(word: Any) -> Any:
    """Bits that are set. Source: Warren, Hacker's Delight (2002), 5-1."""
    # Sums of two, of four, of eight bits; then of all eight bytes in the highest one.
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    low = word & np.uint64(0x3333333333333333)
    high = (word >> np.uint64(2)) & np.uint64(0x3333333333333333)
    word = low + high
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


def later_used(
    phase: np.ndarray,
    edges: np.ndarray,
    keys: np.ndarray,
    marks: np.ndarray,
    sums: np.ndarray,
    last: np.ndarray,
    used: np.ndarray,
    clock: np.ndarray,
    depths: np.ndarray,
) -> None:
    """Count, before each layer step, the keys used later than each of its own.

    Args:
        phase: int8 [N]; first index of `depths`.
        edges: int64 [N + 1]; layer step i accesses ``keys[edges[i]:edges[i + 1]]``.
        keys: int32 [A], below W.
        marks: [places / 64], carried from call to call, as are
        sums: [places / 64], the marks in each word,
        last: [W], the place of each key's last use, -1 before it, and
        used: [places], the key used at each place;
        clock: [2], the next place, and the keys seen.
        depths: [2, W + 1], counted up; W: never before seen.
    """
    bit = np.uint64(1)

    for i in range(len(phase)):
        # The places are used up: move the marks together.
        if clock[0] + edges[i + 1] - edges[i] > len(used):
            end = 0
            marks[:] = np.uint64(0)
            sums[:] = 0
            for place in range(clock[0]):
                key = used[place]
                if last[key] == place:
                    used[end] = key
                    last[key] = end
                    marks[end >> 6] |= bit << np.uint64(end & 63)
                    sums[end >> 6] += 1
                    end += 1
            clock[0] = end

        # Look up all before any use is noted: a layer step is one moment.
        word_count = ((clock[0] - 1) >> 6) + 1
        for j in range(edges[i], edges[i + 1]):
            place = last[keys[j]]
            depth = len(last)
            if place >= 0:
                word = place >> 6
                # Its own mark is among them.
                depth = _bits_set(marks[word] >> np.uint64(place & 63)) - 1
                for other in range(word + 1, word_count):
                    depth += sums[other]
            depths[phase[i], depth] += 1

        for j in range(edges[i], edges[i + 1]):
            key = keys[j]
            place = last[key]
            if place >= 0:
                marks[place >> 6] ^= bit << np.uint64(place & 63)
                sums[place >> 6] -= 1
            else:
                clock[1] += 1

            place = clock[0]
            last[key] = place
            used[place] = key
            marks[place >> 6] |= bit << np.uint64(place & 63)
            sums[place >> 6] += 1
            clock[0] += 1
