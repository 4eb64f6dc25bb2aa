"""The counting loops behind `moesim.traces.stats.statistics`: one visit per access, or
per row, and nothing kept but tables.

L layers, E experts, K experts per token, A accesses of a block, N layer steps of it.
"""

from __future__ import annotations

import numpy as np
from moesim.traces.compilation import compiled
from numba import types as nb

_I64 = nb.Array(nb.int64, 1, "C", readonly=True)
_I32 = nb.Array(nb.int32, 1, "C", readonly=True)
_TABLE = nb.int64[:, ::1]

WINDOWS = 11
"""Windows of 1, 2, 4, … 1024 steps."""


@compiled(
    nb.void(
        _I64,
        _I64,
        _I64,
        _I64,
        _I32,
        _I32,
        _TABLE,
        _TABLE,
        _TABLE,
        nb.int64[::1],
        nb.float64[::1],
        _TABLE,
        _TABLE,
        nb.int64[::1],
    )
)
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
    """Fold decode layer steps; `step` counts decode steps only.

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
        count = edges[i + 1] - edges[i]
        uses = last_use[at]
        again = 0
        for j in range(edges[i], edges[i + 1]):
            expert = experts[j]
            load[at, expert] += tokens[j]
            mine = uses[expert]
            later = width
            spans = fresh.shape[1]
            if mine >= 0:
                later = 0
                for other in range(width):
                    later += uses[other] > mine
                before = mine // width
                again += before == now - 1
                differs = before ^ now
                spans = 0
                while differs > 0 and spans < fresh.shape[1]:
                    differs >>= 1
                    spans += 1
            distances[at, later] += 1
            for w in range(spans):
                fresh[at, w] += 1
        for j in range(edges[i], edges[i + 1]):
            uses[experts[j]] = now * width + experts[j]
        if now > 0 and last_batch[at] == batch[i] and count > 0:
            overlap[at] += again / count
            pairs[at] += 1
        last_batch[at] = batch[i]
        w = 0
        while w < fresh.shape[1] and (now + 1) % (1 << w) == 0:
            windows[at, w] += fresh[at, w]
            fresh[at, w] = 0
            w += 1


_ROUTING = nb.Array(nb.uint16, 3, "C", readonly=True)


@compiled(nb.void(_ROUTING, nb.int64[:, :, ::1]))
def count_pairs(routing: np.ndarray, joint: np.ndarray) -> None:
    """Count which experts a token uses in consecutive layers: `routing` [T, L, K] into
    `joint` [L - 1, E, E].
    """
    tokens, layers, top_k = routing.shape
    for layer in range(layers - 1):
        table = joint[layer]
        for token in range(tokens):
            for a in range(top_k):
                row = table[routing[token, layer, a]]
                for b in range(top_k):
                    row[routing[token, layer + 1, b]] += 1


@compiled(
    nb.void(_ROUTING, nb.int64, nb.int64[::1], nb.int64[:, :, ::1], nb.int64[:, ::1])
)
def count_segments(  # noqa: C901 - one loop, compiled
    routing: np.ndarray,
    width: int,
    lengths: np.ndarray,
    covered: np.ndarray,
    segments: np.ndarray,
) -> None:
    """Cut `routing` [T, L, K] into whole segments of each of `lengths` [S] tokens:
    choices that the best group covers.

    `covered` [S, L, K]: choices served by the ``g + 1`` experts most used in the
    segment, by g; `segments` [S, L]: how many segments there were.
    """
    tokens, layers, top_k = routing.shape
    counts = np.zeros(width, np.int64)
    for s in range(len(lengths)):
        length = lengths[s]
        # Experts by how often the segment used them.
        many = np.zeros(length + 1, np.int64)
        for segment in range(tokens // length):
            for layer in range(layers):
                for token in range(segment * length, (segment + 1) * length):
                    for k in range(top_k):
                        counts[routing[token, layer, k]] += 1
                for token in range(segment * length, (segment + 1) * length):
                    for k in range(top_k):
                        expert = routing[token, layer, k]
                        many[counts[expert]] += 1
                        counts[expert] = 0
                many[0] = 0
                group = 0
                total = 0
                for times in range(length, 0, -1):
                    while many[times] > 0 and group < top_k:
                        total += times
                        covered[s, layer, group] += total
                        group += 1
                        many[times] -= 1
                    many[times] = 0
                while group < top_k:
                    covered[s, layer, group] += total
                    group += 1
                segments[s, layer] += 1
