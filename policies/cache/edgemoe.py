"""EdgeMoE's eviction: by frequency, and by how far off the expert's layer is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.cache._kernels import lowest_scores
from moesim.policies.cache.lfu import LFU, Variant, count_uses
from moesim.policies.kernels import ACCESSED, VICTIMS, CacheKernels, State, Work

if TYPE_CHECKING:
    from moesim.policies.base import RunContext


# Places in the state's integers, behind those of `lfu`.
_EXPERTS = 0
_LAYERS = 3
_LAYER = 4


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    """Count as `lfu`, and note where the forward pass is."""
    count_uses(state, work)
    state.integers[_LAYER] = work.layer


@compiled(VICTIMS)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Choose the lowest quotients of uses and distance, ties to the lower key."""
    layers = state.integers[_LAYERS]
    worth = np.empty(len(candidates))
    for n in range(len(candidates)):
        ahead = candidates[n] // state.integers[_EXPERTS] - state.integers[_LAYER] - 1
        worth[n] = state.scores[0, candidates[n]] / (ahead % layers + 1)
    places = np.arange(len(candidates))
    best = np.empty(len(chosen), np.int64)
    lowest_scores(places, worth, worth, best)
    for n in range(len(chosen)):
        chosen[n] = candidates[best[n]] if best[n] >= 0 else -1


class EdgeMoE(LFU):
    """Evict the expert with the fewest uses per layer of distance, ties to the lower
    key.

    Layers follow each other in a fixed order, so an expert of the next layer may be
    needed at once and one of the current layer only in the next forward pass. Uses are
    counted as `lfu` counts them; the distance is 1 for the next layer and the number of
    layers for the current one. Within one layer all distances are equal: with a cache
    per layer this is `lfu`.

    Args:
        variant, decay: as in `lfu`.

    Source: EdgeMoE (arXiv 2308.14352), whose buffer weighs both; the quotient is our
    reading, as we know no formula of it.
    """

    # No yardstick of analyses, which take the plain rules for that.
    reference: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, variant: Variant = "in-cache", decay: float = 1.0) -> None:
        super().__init__(variant=variant, decay=decay)

    def bring(self, context: RunContext) -> CacheKernels:
        """Count as `lfu`; before the first layer."""
        brought = super().bring(context)
        shape = context.shape
        known = brought.state
        integers = np.append(known.integers, [shape.layers, -1])
        return brought._replace(
            state=known._replace(integers=integers),
            victims=_victims,
            accessed=_accessed,
        )
