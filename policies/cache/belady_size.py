"""The bound where layer steps ask for several experts, and those have any sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.cache._offline_bounds import (
    OfflineOptimalCache,
    Uses,
    sizes_in_slots,
)
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.run_context import RunContext

Value = Literal["hits", "bytes"]


class BeladySize(OfflineOptimalCache):
    """Follow the best plan for a pool of experts of any sizes.

    Evicting the farthest next use is no optimum where a layer step holds several
    experts, or where sizes differ. The linear relaxation bounds every demand-filled
    cache (`stays[0].least_cost`); the policy carries out the stays that it grants
    wholly (`stays[0].plan_cost`). Where experts of a pool are of equal size, both
    coincide, and no demand-filled cache has more hits; elsewhere the truth lies
    between. Its capacity is the number of largest experts that fit, as a policy knows
    nothing else; the pool may be larger by less than one of them.

    Args:
        value: ``hits`` counts every miss the same; ``bytes`` by its expert's size, so
            the least bytes are fetched.

    Source: FOO, in `moesim.policies.cache._offline_bounds`.
    """

    def __init__(self, *, value: Value = "hits") -> None:
        expect_choice("value", value, Value)
        self.value = value

    def uses(
        self,
        time: np.ndarray,
        key: np.ndarray,
        tokens: np.ndarray,
        slots: int,
        context: RunContext,
    ) -> tuple[Uses, float]:
        """Price every miss 1, or its bytes; sizes are relative to the largest
        expert.
        """
        # A miss costs the same whatever its workload.
        del tokens
        cost = np.ones(len(key))
        if self.value == "bytes":
            sizes = np.array(context.shape.sizes_by_expert(), np.float64)
            cost = sizes.reshape(-1)[key]
        uses = Uses(
            time=time,
            key=key,
            size=sizes_in_slots(key, context),
            cost=cost,
            entry=np.zeros(len(key)),
        )
        return uses, float(slots)
