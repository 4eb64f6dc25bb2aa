"""Ranking of a coming layer's experts by predicted workload.

Shared by the policies that prefetch by gate predictions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import ExpertKey
from moesim.policies.prefetch._kernels import predicted_workload
from moesim.policies.ranking import ranked

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, MachineView

Tie = Literal["id", "score"]


def by_predicted_workload(
    work: LayerWork,
    view: MachineView,
    column: str,
    depth: int,
    *,
    size: int,
    refill: bool,
    tie: Tie,
) -> list[ExpertKey]:
    """Rank the experts of layer ``work.layer + depth`` by predicted workload and keep
    what is absent.

    Each token's predicted top-k (ties to the lower id) are counted; k is the trace's
    own.

    Args:
        work: the layer step that holds the prediction.
        view: knows what is resident or in flight, on any GPU.
        column: predictor, such as ``pred1_raw``, float16 [T, E].
        depth: layers ahead, >= 1.
        size: ranked experts considered.
        refill: present experts leave their rank to the next expert; otherwise they use
            it up.
        tie: between equal workloads, ``id`` lower first or ``score`` higher sum over
            tokens first.

    Returns:
        At most `size` keys, most wanted first; none beyond the last layer. Experts that
        no token is predicted to choose are never wanted.
    """
    layer = work.layer + depth
    if layer >= view.layers:
        return []

    # Compiled code has no float16 on a CPU; float32 orders alike.
    scores = work.predicted[column].astype(np.float32)
    workload = predicted_workload(scores, work.routing.shape[1])
    if tie == "id":
        order = ranked(workload)
    else:
        # The last key sorts first.
        order = np.lexsort((-scores.sum(axis=0), -workload))

    present = view.resident(layer) | view.in_flight(layer)
    for gpu in range(1, view.gpus):
        present = present | view.resident(layer, gpu)
        present = present | view.in_flight(layer, gpu)

    keys: list[ExpertKey] = []
    for rank, expert in enumerate(order.tolist()):
        considered = len(keys) if refill else rank
        if considered == size or workload[expert] == 0:
            break
        if not present[expert]:
            keys.append(ExpertKey(layer, expert))
    return keys
