"""The clairvoyant system's cache: what is worth least of all coming uses leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.policies.foresight import Foresight
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranked_cache import OutscoringCache

if TYPE_CHECKING:
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext

Fill = Literal["best", "empty"]


class ForesightCache(OutscoringCache):
    """Evict the expert whose coming uses, discounted by distance, are worth least.

    What is worth less than all that it could replace is declined. `belady` looks at the
    next use alone; of two experts that are both needed soon, this keeps the one that is
    needed often.

    Args:
        decay: what a use is worth a token later, above 0 and below 1.
        fill: the start, ``best`` with what is worth most, or ``empty``.

    Source: ours; see docs/explanation/gap.md.
    """

    oracle: ClassVar[bool] = True

    def __init__(self, *, decay: float = 0.65, fill: Fill = "best") -> None:
        expect(0 < decay < 1, "decay", "0 < decay < 1", decay)
        expect_choice("fill", fill, Fill)
        self.decay = decay
        self.fill = fill

    def start(self, context: RunContext) -> None:
        """Take the run's foresight.

        Raises:
            PolicyError: the future is not available.
        """
        OutscoringCache.start(self, context)
        self.foresight = Foresight.of(context, self.decay)
        self.score = self.foresight.value

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Fill every pool with what is worth most: int64 flat keys, ascending."""
        if self.fill == "empty":
            return np.zeros(0, np.int64)
        values = np.asarray(self.score).reshape(len(capacity_slots), -1)
        # Stable, so that ties go to lower keys.
        ranked = np.argsort(-values, axis=1, kind="stable")
        first = np.arange(len(values)) * values.shape[1]
        pools = zip(first, ranked, capacity_slots, strict=True)
        chosen = [begin + keys[:slots] for begin, keys, slots in pools]
        return np.sort(np.concatenate(chosen)).astype(np.int64)

    def accessed(self, work: Work) -> None:
        self.foresight.foresee(work)
