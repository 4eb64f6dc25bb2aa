"""How many keys of one cache for all layers were used later than each access's own last
use: LRU at every size.

Every use has a place in a row of marks; only a key's last use keeps its mark. What was
used later is then the marks behind a place: counted by 64 in the place's own word, and
by the words' sums behind it.

Source: Bennett and Kruskal (1975) for the marks; they sum with a tree, which is slower
for the few thousand keys here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array

_I64 = input_array(nb.int64)
_I32 = input_array(nb.int32)
_I8 = input_array(nb.int8)
# Places per key; when they are used up, those without a mark are removed.
PLACES = 3


@compiled(nb.int64(nb.uint64))
def _bits_set(word: Any) -> Any:
    """Bits that are set. Source: Warren, Hacker's Delight (2002), 5-1."""
    # Sums of two, of four, of eight bits; then of all eight bytes in the highest one.
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    low = word & np.uint64(0x3333333333333333)
    high = (word >> np.uint64(2)) & np.uint64(0x3333333333333333)
    word = low + high
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@compiled(
    nb.void(
        _I8,
        _I64,
        _I32,
        nb.uint64[::1],
        nb.int32[::1],
        nb.int64[::1],
        nb.int64[::1],
        nb.int64[::1],
        nb.int64[:, ::1],
    )
)
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
