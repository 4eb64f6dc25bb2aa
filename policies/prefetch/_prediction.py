"""Base of policies that rank a coming layer's experts by predicted workload."""

from __future__ import annotations

from typing import Literal

from moesim.policies.kernels import PrefetchKernels, state
from moesim.policies.prefetch._compiled import CompiledPrefetch
from moesim.policies.prefetch._kernels import by_predicted_workload

Tie = Literal["id", "score"]

_NO_LIMIT = 1 << 62


class PredictedWorkload(CompiledPrefetch):
    """Ranks the experts of each coming layer by predicted workload and keeps what is
    absent.

    Each token's predicted top-k (ties to the lower id) are counted; k is the trace's
    own. One predictor of `needs` looks one layer further ahead than the one before.
    Experts that no token is predicted to choose are never wanted.
    """

    def ranks(
        self,
        *,
        size: int,
        refill: bool,
        tie: Tie,
        most: int = _NO_LIMIT,
        decode_only: bool = False,
    ) -> None:
        """Say how, once `needs` is known.

        Args:
            size: ranked experts considered in each layer.
            refill: present experts leave their rank to the next expert; otherwise they
                use it up.
            tie: between equal workloads, ``id`` lower first or ``score`` higher sum
                over tokens first.
            most: keys named in all.
            decode_only: name nothing in a prefill.
        """
        self.ahead = len(self.needs)
        rule = (size, refill, tie == "score", most, decode_only)
        self.brought = PrefetchKernels(by_predicted_workload, state(integers=rule))
