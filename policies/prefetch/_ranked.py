"""What prefetchers share that rank the experts of a coming layer.

E experts of a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.base import PrefetchPolicy
from moesim.policies.names import ABSENT, DECODE

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

Tie = Literal["id", "score"]

_NO_LIMIT = 1 << 62


def is_present(view: MachineView, key: int) -> bool:
    """Whether an expert is on any GPU or on its way to one."""
    for gpu in range(view.gpus):
        if view.states[gpu, key] != ABSENT:
            return True
    return False


def sort_wanted(value: Floats, second: Floats, ranked: Ints) -> int:
    """Sort the experts of a positive value, highest first; ties go to the higher
    `second`, or to the lower id.

    Args:
        value, second: float64 [E].
        ranked: int64 [E], filled in with ids.

    Returns:
        How many.
    """
    count = 0
    for expert in range(len(value)):
        if value[expert] <= 0.0:
            continue
        rank = count
        while rank > 0:
            other = ranked[rank - 1]
            if value[other] > value[expert]:
                break
            if value[other] == value[expert] and second[other] >= second[expert]:
                break
            ranked[rank] = other
            rank -= 1
        ranked[rank] = expert
        count += 1
    return count


def name_absent(
    view: MachineView,
    layer: int,
    ranked: Ints,
    size: int,
    refill: bool,
    named: Ints,
    count: int,
) -> int:
    """Name ranked experts that are neither on a GPU nor on their way to one.

    Args:
        view: knows what is present.
        layer: a coming layer.
        ranked: int64, ids of experts of it, most wanted first.
        size: ranked experts considered.
        refill: present experts leave their rank to the next expert; otherwise they use
            it up.
        named: flat keys; is filled from `count` on.
        count: keys that are named already.

    Returns:
        How many are named now.
    """
    considered = 0
    for n in range(len(ranked)):
        if considered == size:
            break
        key = layer * view.experts + ranked[n]
        absent = not is_present(view, key)
        if absent:
            named[count] = key
            count += 1
        if absent or not refill:
            considered += 1
    return count


class PredictedWorkload(PrefetchPolicy):
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
        """Say how.

        Args:
            size: ranked experts considered in each layer.
            refill: present experts leave their rank to the next expert; otherwise they
                use it up.
            tie: between equal workloads, ``id`` lower first or ``score`` higher sum
                over tokens first.
            most: keys named in all.
            decode_only: name nothing in a prefill.
        """
        self.size = size
        self.refill = refill
        self.by_score = tie == "score"
        self.most = most
        self.decode_only = decode_only

    def start(self, context: RunContext) -> None:
        """Make room for a ranking."""
        experts = context.shape.experts
        self.value: Floats = zeros(experts)
        self.second: Floats = zeros(experts)
        self.ranked: Ints = zeros(experts, np.int64)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Rank each coming layer that is predicted; nearer ones come first."""
        if self.decode_only and work.phase != DECODE:
            return 0
        count = 0
        for depth in range(len(view.workload)):
            layer = work.layer + 1 + depth
            if layer >= view.layers:
                break
            for expert in range(view.experts):
                self.value[expert] = view.workload[depth, expert]
                if self.by_score:
                    self.second[expert] = view.score_sums[depth, expert]
            wanted = self.ranked[: sort_wanted(self.value, self.second, self.ranked)]
            count = name_absent(
                view, layer, wanted, self.size, self.refill, named, count
            )
        return min(count, self.most)
