"""The loops behind statistics and hit-rate curves, with C types: one visit per access,
or per row, and nothing kept but tables.

L layers, E experts, K experts per token, A accesses of a block, N layer steps of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Windows of 1, 2, 4, … 1024 steps.
WINDOWS = 11


def count_decode(
    step: np.ndarray,
    batch: np.ndarray,
    layer: np.ndarray,
    edges: np.ndarray,
    experts: np.ndarray,
    tokens: np.ndarray,
    load: np.ndarray,
    last_use: np.ndarray,
    distances: np.ndarray,
    last_batch: np.ndarray,
    overlap: np.ndarray,
    fresh: np.ndarray,
    windows: np.ndarray,
    pairs: np.ndarray,
) -> None:
    """Count decode layer steps into tables; `step` counts decode steps only.

    Tables: `load` [L, E] tokens; `last_use` [L, E], ``step * E + expert`` or -1;
    `distances` [L, E + 1] experts used later than an access's own last use (E: none);
    `last_batch` [L]; `overlap` [L] sums of shares over `pairs` [L] steps with a step
    before them in the batch; `fresh` [L, W] first uses in the running aligned window of
    ``2 ** w`` steps; `windows` [L, W] the same in windows that are over.
    """
    width = load.shape[1]

    for i in range(len(layer)):
        at = layer[i]
        now = step[i]
        first = edges[i]
        last = edges[i + 1]
        uses = last_use[at]
        again = 0

        for j in range(first, last):
            expert = experts[j]
            load[at, expert] += tokens[j]
            latest = uses[expert]
            distance = width
            spans = fresh.shape[1]

            if latest >= 0:
                # Distinct experts used later: those with a larger stamp.
                distance = 0
                for other in range(width):
                    distance += uses[other] > latest
                before = latest // width
                again += before == now - 1

                # Two steps lie in one aligned window of 2 ** w steps where they differ
                # only in their lowest w bits.
                differing = before ^ now
                spans = 0
                while differing > 0 and spans < fresh.shape[1]:
                    differing >>= 1
                    spans += 1

            distances[at, distance] += 1
            for w in range(spans):
                fresh[at, w] += 1

        # Only now: accesses of one layer step are not later than each other.
        for j in range(first, last):
            uses[experts[j]] = now * width + experts[j]

        if now > 0 and last_batch[at] == batch[i] and last > first:
            overlap[at] += again / (last - first)
            pairs[at] += 1
        last_batch[at] = batch[i]

        # The windows that end with this step.
        w = 0
        while w < fresh.shape[1] and (now + 1) % (1 << w) == 0:
            windows[at, w] += fresh[at, w]
            fresh[at, w] = 0
            w += 1


def count_pairs(routing: np.ndarray, joint: np.ndarray) -> None:
    """Count which experts a token uses in consecutive layers: `routing` [T, L, K] into
    `joint` [L - 1, E, E].
    """
    tokens = routing.shape[0]
    layers = routing.shape[1]
    top_k = routing.shape[2]

    # Layer by layer: one table at a time stays in the processor's cache.
    for layer in range(layers - 1):
        table = joint[layer]
        for token in range(tokens):
            for a in range(top_k):
                row = table[routing[token, layer, a]]
                for b in range(top_k):
                    row[routing[token, layer + 1, b]] += 1


def count_segments(  # noqa: C901 - one loop, compiled
    routing: np.ndarray,
    width: int,
    lengths: np.ndarray,
    covered: np.ndarray,
    segments: np.ndarray,
) -> None:
    """Cut `routing` [T, L, K] into whole segments of each of `lengths` [S] tokens, and
    count the choices that the best group of experts covers.

    `covered` [S, L, K]: choices served by the ``g + 1`` experts most used in the
    segment, by g; `segments` [S, L]: how many segments there were.
    """
    tokens = routing.shape[0]
    layers = routing.shape[1]
    top_k = routing.shape[2]
    uses = np.zeros(width, np.int64)

    for s in range(len(lengths)):
        length = lengths[s]
        # How many experts the segment used so often, by that number.
        experts_with = np.zeros(length + 1, np.int64)

        for segment in range(tokens // length):
            first = segment * length
            for layer in range(layers):
                for token in range(first, first + length):
                    for k in range(top_k):
                        uses[routing[token, layer, k]] += 1

                # Cleared on the way: a second visit counts among the experts that were
                # never used.
                for token in range(first, first + length):
                    for k in range(top_k):
                        expert = routing[token, layer, k]
                        experts_with[uses[expert]] += 1
                        uses[expert] = 0
                experts_with[0] = 0

                # The most used first, until the group has K experts.
                group = 0
                total = 0
                for times in range(length, 0, -1):
                    while experts_with[times] > 0 and group < top_k:
                        total += times
                        covered[s, layer, group] += total
                        group += 1
                        experts_with[times] -= 1
                    experts_with[times] = 0

                # A segment may have used fewer experts than that.
                while group < top_k:
                    covered[s, layer, group] += total
                    group += 1
                segments[s, layer] += 1


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


def next_places(
    place: np.ndarray,
    edges: np.ndarray,
    experts: np.ndarray,
    layers: int,
    width: int,
    first_use: np.ndarray,
) -> np.ndarray:
    """The place, step * L + layer, of each access's next use, int64 [A]; `first_use`,
    by key, goes from the end of the block to its begin.
    """
    following = np.empty(len(experts), np.int64)

    # Backwards: what was met last is what comes next.
    for i in range(len(place) - 1, -1, -1):
        base = place[i] % layers * width
        for j in range(edges[i], edges[i + 1]):
            following[j] = first_use[base + experts[j]]
            first_use[base + experts[j]] = place[i]

    return np.asarray(following)


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


def _bits_set(word: int) -> int:
    """Bits that are set. Source: Warren, Hacker's Delight (2002), 5-1."""
    # Sums of two, of four, of eight bits; then of all eight bytes in the highest one.
    word = word - ((word >> 1) & 0x5555555555555555)
    low = word & 0x3333333333333333
    high = (word >> 2) & 0x3333333333333333
    word = low + high
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (word * 0x0101010101010101) >> 56 & 0xFF


def later_used(  # noqa: C901 - one loop, compiled
    phase: np.ndarray,
    edges: np.ndarray,
    keys: np.ndarray,
    marks: Any,
    sums: np.ndarray,
    last: Any,
    used: np.ndarray,
    clock: Any,
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
    # Numbers of Python where this is not compiled: others do not mix with 64 bits.
    marks = memoryview(marks)
    last = memoryview(last)
    clock = memoryview(clock)
    bit = 1

    for i in range(len(phase)):
        # The places are used up: move the marks together.
        if clock[0] + edges[i + 1] - edges[i] > len(used):
            end = 0
            for word in range(len(marks)):
                marks[word] = 0
                sums[word] = 0
            for place in range(clock[0]):
                key = used[place]
                if last[key] == place:
                    used[end] = key
                    last[key] = end
                    marks[end >> 6] |= bit << (end & 63)
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
                depth = _bits_set(marks[word] >> (place & 63)) - 1
                for other in range(word + 1, word_count):
                    depth += sums[other]
            depths[phase[i], depth] += 1

        for j in range(edges[i], edges[i + 1]):
            key = keys[j]
            place = last[key]
            if place >= 0:
                marks[place >> 6] ^= bit << (place & 63)
                sums[place >> 6] -= 1
            else:
                clock[1] += 1

            place = clock[0]
            last[key] = place
            used[place] = key
            marks[place >> 6] |= bit << (place & 63)
            sums[place >> 6] += 1
            clock[0] += 1


# -- predictors ------------------------------------------------------------------------


def add_overlaps(
    predicted: np.ndarray,
    truth: np.ndarray,
    layer: int,
    by_layer: np.ndarray,
    by_rank: np.ndarray,
) -> None:
    """Add the overlaps of the first r of two rankings, for every r, to `by_rank` [2,
    R], and that of all of `truth` to `by_layer` [2, L].
    """
    true_rank = np.full(len(predicted), len(predicted), np.int64)
    for rank in range(len(truth)):
        true_rank[truth[rank]] = rank

    common = 0
    for rank in range(len(truth)):
        # With each rank two experts come in: one predicted, one true.
        common += true_rank[predicted[rank]] <= rank
        for earlier in range(rank):
            common += true_rank[predicted[earlier]] == rank
        if rank < by_rank.shape[1]:
            by_rank[0, rank] += common / (rank + 1)
            by_rank[1, rank] += 1

    by_layer[0, layer] += common / len(truth)
    by_layer[1, layer] += 1
