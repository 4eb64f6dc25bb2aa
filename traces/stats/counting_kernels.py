"""The counting loops behind `moesim.traces.stats.statistics`: one visit per access, or
per row, and nothing kept but tables.

L layers, E experts, K experts per token, A accesses of a block, N layer steps of it.
"""

from __future__ import annotations

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
    tokens, layers, top_k = routing.shape

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
    tokens, layers, top_k = routing.shape
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
