"""The bound when layers have experts of unequal size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from moesim.policies.cache._offline_bounds import Uses
from moesim.policies.cache._offline_optimal import PlannedCache
from moesim.policies.parameters import expect_choice

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

Value = Literal["hits", "bytes"]


class BeladySize(PlannedCache):
    """Follow the best plan for a global pool of bytes that experts of several sizes
    share.

    With unequal sizes evicting the farthest next use is no optimum, and the optimum is
    hard to find. The linear relaxation bounds every demand-filled cache
    (`stays[0].least_cost`); the policy carries out the stays that it grants wholly
    (`stays[0].plan_cost`), so the truth lies between. In per-layer scope sizes are
    equal and both coincide. Its room is the number of largest experts that fit, as that
    is all a policy is told; the pool may be larger by less than one of them.

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
        place: np.ndarray,
        key: np.ndarray,
        tokens: np.ndarray,
        slots: int,
        context: RunContext,
    ) -> tuple[Uses, float]:
        """Price every miss 1, or its bytes; sizes are relative to the largest
        expert.
        """
        del tokens
        bytes_of = np.array(context.shape.expert_bytes, np.float64)[
            key // context.shape.experts
        ]
        cost = bytes_of if self.value == "bytes" else np.ones(len(key))
        size = (
            bytes_of / context.shape.max_expert_bytes
            if len(context.capacity_slots) == 1
            else np.ones(len(key))
        )
        return Uses(place, key, size, cost, np.zeros(len(key))), float(slots)
