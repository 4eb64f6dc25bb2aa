"""Compiled choice of absent experts from a ranking of a coming layer's experts.

E experts of a layer, G GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import ABSENT, ExpertKey, PrefetchPolicy
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
    state,
)
from moesim.policies.ranking import present
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, MachineView, RunContext


_DECODE = int(Phase.DECODE)


@compiled
def is_present(states: np.ndarray, key: int) -> bool:
    """Whether an expert is on any GPU or on its way to one."""
    for gpu in range(len(states)):
        if states[gpu, key] != ABSENT:
            return True
    return False


@compiled
def ranked_experts(value: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Ids of the experts of a positive `value` [E], highest first.

    Ties go to the higher `second` [E], or to the lower id.
    """
    ranked = np.empty(len(value), np.int64)
    count = 0
    for expert in range(len(value)):
        if value[expert] <= 0:
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
    return ranked[:count]


@compiled
def name_absent(
    ranked: np.ndarray,
    layer: int,
    experts: int,
    states: np.ndarray,
    size: int,
    refill: bool,
    named: np.ndarray,
    count: int,
) -> int:
    """Name ranked experts that are neither on a GPU nor on their way to one.

    Args:
        ranked: ids of experts of `layer`, most wanted first.
        layer: a coming layer.
        experts: E.
        states: int8 [G, L * E].
        size: ranked experts considered.
        refill: present experts leave their rank to the next expert; otherwise they use
            it up.
        named: flat keys; is filled from `count` on.
        count: keys that are named already.

    Returns:
        How many are named now.
    """
    considered = 0
    for expert in ranked:
        if considered == size:
            break
        key = layer * experts + expert
        absent = not is_present(states, key)
        if absent:
            named[count] = key
            count += 1
        if absent or not refill:
            considered += 1
    return count


@compiled(PREFETCH)
def by_predicted_workload(
    state: State, work: Work, view: KernelView, named: np.ndarray
) -> int:
    """Rank each coming layer that is predicted by its workload; nearer ones come first.

    The state's integers: ranked experts considered in each layer; whether present ones
    leave their rank to the next; whether ties between equal workloads go to the higher
    sum of scores; most keys of all; and whether nothing is named in a prefill.
    """
    if state.integers[4] and work.phase != _DECODE:
        return 0
    size = state.integers[0]
    refill = state.integers[1] != 0
    by_score = state.integers[2] != 0
    count = 0
    depths, experts = view.workload.shape
    layers = view.states.shape[1] // experts
    for depth in range(depths):
        layer = work.layer + 1 + depth
        if layer >= layers:
            break
        second = view.score_sums[depth]
        if not by_score:
            second = np.zeros(experts, np.float32)
        ranked = ranked_experts(view.workload[depth], second)
        count = name_absent(
            ranked, layer, experts, view.states, size, refill, named, count
        )
    return min(count, state.integers[3])


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


def absent_experts(
    ranked: np.ndarray,
    layer: int,
    view: MachineView,
    *,
    size: int,
    refill: bool,
) -> list[ExpertKey]:
    """Keep what is neither on a GPU nor on its way to one.

    Args:
        ranked: ids of experts of `layer`, most wanted first.
        layer: a coming layer.
        view: knows what is present, on any GPU.
        size: ranked experts considered.
        refill: present experts leave their rank to the next expert; otherwise they use
            it up.
    """
    # Cut before the present ones are taken out, so that they use up their rank.
    if not refill:
        ranked = ranked[:size]
    is_present = present(view, layer)
    absent = ranked[~is_present[ranked]][:size]
    return [ExpertKey(layer, expert) for expert in absent.tolist()]


class FuturePrefetch(PrefetchPolicy):
    """Sees which experts the coming layers of a step will use. The planner refuses it
    where there is no future.
    """

    oracle: ClassVar[bool] = True

    def start(self, context: RunContext) -> None:
        """Keep the future."""
        self._future = context.future

    def coming(
        self,
        work: LayerWork,
        view: MachineView,
        depth: int,
    ) -> np.ndarray:
        """Active experts `depth` layers on in this step, int32 ascending; none past the
        last layer.
        """
        layer = work.layer + depth
        # The next step's first layers are out of reach: its tokens are not there yet.
        if self._future is None or layer >= view.layers:
            return np.zeros(0, np.int32)
        return self._future.active(work.step, layer)
