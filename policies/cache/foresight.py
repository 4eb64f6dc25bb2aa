"""The clairvoyant system's cache: what is worth least of all coming uses leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moesim.machine_code.functions import compiled
from moesim.policies.cache._kernels import outscored_victims
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.foresight import VALUE, Foresight, foresee
from moesim.policies.kernels import ACCESSED, VICTIMS, CacheKernels, State, Work
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import RunContext


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    foresee(state, work)


@compiled(VICTIMS)
def _victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    chosen[:] = outscored_victims(incoming, candidates, state.scores[VALUE])


class ForesightCache(AdmittingCompiledCache):
    """Evict the expert whose coming uses, discounted by distance, are worth least.

    What is worth less than all that it could replace is declined. `belady` looks at the
    next use alone; of two experts that are both needed soon, this keeps the one that is
    needed often.

    Args:
        decay: what a use is worth a token later, above 0 and below 1.

    Source: ours; see docs/explanation/gap.md.
    """

    oracle: ClassVar[bool] = True

    def __init__(self, *, decay: float = 0.65) -> None:
        expect(0 < decay < 1, "decay", "0 < decay < 1", decay)
        self.decay = decay

    def bring(self, context: RunContext) -> CacheKernels:
        """Take the run's foresight.

        Raises:
            PolicyError: the future is not available.
        """
        return CacheKernels(
            Foresight.of(context, self.decay).state,
            victims=_victims,
            accessed=_accessed,
        )
