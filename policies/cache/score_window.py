"""SMoE's cache: mean gate scores over a window of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.policies.cache._kernels import (
    lowest_victims,
    score_state,
    stamp,
    stamp_keys,
)
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.kernels import ACCESSED, MOVED, SECONDS, CacheKernels, State, Work
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

_RING = 1
"""Row of the scores of a compiled run at which the ring begins; ties are the last."""


@compiled(
    nb.void(nb.float64[::1], nb.float64[:, ::1], SECONDS, nb.int64, nb.int64, nb.int64)
)
def _roll(
    score: np.ndarray,
    ring: np.ndarray,
    newest: np.ndarray,
    first: int,
    seen: int,
    window: int,
) -> None:
    """Put a step's scores into its layer's ring, and its means into `score`.

    `score` float64 [keys], `ring` [window, keys], `newest` [E]; the layer's keys begin
    at `first`, and it has seen so many steps before.
    """
    # The newest step takes the row of the oldest; rows are fewer until it is full.
    rows = min(seen + 1, window)
    for expert in range(len(newest)):
        key = first + expert
        ring[seen % window, key] = newest[expert]
        total = 0.0
        for row in range(rows):
            total += ring[row, key]
        score[key] = total / rows


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    state.numbers[0] += 1.0
    width = state.integers[0]
    window = state.integers[1]
    first = work.layer * width
    stamp(state.scores[-1], work.experts, first, state.numbers[0])
    if not len(work.scores):
        return
    seen = state.marks[0, work.layer]
    state.marks[0, work.layer] += 1
    ring = state.scores[_RING : _RING + window]
    _roll(state.scores[0], ring, work.scores, first, seen, window)


@compiled(MOVED)
def _admitted(state: State, keys: np.ndarray) -> None:
    stamp_keys(state.scores[-1], keys, state.numbers[0])


class ScoreWindow(AdmittingCompiledCache):
    """Evict the expert with the lowest mean gate score over the last `window` steps of
    its layer.

    Steps in which it was inactive count too. Before a layer has seen `window` steps,
    the mean is over those it has seen. A step of many tokens counts by the mean over
    its tokens. Ties go to the least recently used, then to the lower id. SMoE's shield,
    that experts selected for the current layer cannot leave before it ends, is what the
    planner's holds do for every policy (the text says "elevates eviction priority" and
    means protects). In global scope the means of different layers are compared as they
    are.

    Args:
        window: iterations; SMoE does not give it, our default is 8 (to be swept over 4,
            8, 16).

    Source: SMoE (arXiv 2508.18983), its expert cache.
    """

    needs: tuple[str, ...] = ("scores",)

    def __init__(self, *, window: int = 8) -> None:
        expect(window >= 1, "window", ">= 1", window)
        self.window = window

    def bring(self, context: RunContext) -> CacheKernels:
        """Begin with empty windows."""
        shape = context.shape
        return CacheKernels(
            score_state(
                context,
                rows=1 + self.window + 1,
                marks=[np.zeros(shape.layers)],
                numbers=[0.0],
                integers=[shape.experts, self.window],
            ),
            victims=lowest_victims,
            accessed=_accessed,
            admitted=_admitted,
        )
