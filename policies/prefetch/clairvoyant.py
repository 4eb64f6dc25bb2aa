"""The perfect prefetcher, limited by cache and link alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.machine_code.functions import compiled
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    import numpy as np


@compiled(PREFETCH)
def _coming(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    experts = view.states.shape[1] // (work.layer + len(view.coming_edges))
    count = 0
    # Nearer layers first: the queue serves keys in the order they are named.
    for n in range(min(state.integers[0], len(view.coming_edges) - 1)):
        first = (work.layer + 1 + n) * experts
        for expert in view.coming[view.coming_edges[n] : view.coming_edges[n + 1]]:
            named[count] = first + expert
            count += 1
    return count


class Clairvoyant(CompiledPrefetch):
    """Prefetch exactly the experts that the coming layers of this step will use.

    Nearest layer first, then ascending id. The bound on what a predictor can bring,
    given cache and link. All of them are named; those present are shielded by that.

    Args:
        depth: layers ahead; 1 is what the papers' predictors look at, and more can
            flood a slow link.

    Source: ours; what Belady is for caches.
    """

    oracle: ClassVar[bool] = True

    def __init__(self, *, depth: int = 1) -> None:
        expect(depth >= 1, "depth", "a number >= 1", depth)
        self.depth = depth
        self.ahead = 0
        self.brought = PrefetchKernels(_coming, state(integers=[depth]))
