"""From predicted gate scores to a wish list, shared by the policies that prefetch by
workload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from moesim.policies.base import ExpertKey
from moesim.policies.kernels import predicted_workload

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, MachineView

Tie = Literal["id", "score"]


def most_wanted(
    work: LayerWork,
    view: MachineView,
    column: str,
    ahead: int,
    *,
    size: int,
    refill: bool,
    tie: Tie,
) -> list[ExpertKey]:
    """Rank the experts of layer ``work.layer + ahead`` by predicted workload and keep
    what is not there yet.

    Each token's predicted top-k (ties to the lower id) are counted; k is the trace's
    own.

    Args:
        work: the layer step that holds the prediction.
        view: says what is resident or in flight, on any GPU.
        column: predictor, such as ``pred1_raw``, float16 [T, E].
        ahead: layers ahead, >= 1.
        size: ranked experts considered.
        refill: present experts leave their place to the next in rank; otherwise they
            use it up.
        tie: between equal workloads, ``id`` lower first or ``score`` higher sum over
            tokens first.

    Returns:
        At most `size` keys, most wanted first; none beyond the last layer. Experts that
        no token is predicted to choose are never wanted.
    """
    layer = work.layer + ahead
    if layer >= view.layers:
        return []
    scores = work.predicted[column].astype(np.float32)
    workload = predicted_workload(scores, work.routing.shape[1])
    by_id = tie == "id"
    ranked = (
        np.argsort(-workload, kind="stable")
        if by_id
        else np.lexsort((-scores.sum(axis=0), -workload))
    )
    present = view.resident(layer) | view.in_flight(layer)
    for gpu in range(1, view.gpus):
        present = present | view.resident(layer, gpu) | view.in_flight(layer, gpu)
    wanted: list[ExpertKey] = []
    for place, expert in enumerate(ranked.tolist()):
        if (len(wanted) if refill else place) == size or workload[expert] == 0:
            break
        if not present[expert]:
            wanted.append(ExpertKey(layer, expert))
    return wanted
