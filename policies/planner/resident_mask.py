"""What lies on any GPU: the question that routing and prefetching ask alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from moesim.policies.base import MachineView


def present(view: MachineView, layer: int, *, in_flight: bool = True) -> np.ndarray:
    """Bool [E]: experts of a layer that are on some GPU, or (unless `in_flight` is
    false) on their way to one.
    """
    found = view.resident(layer)
    for gpu in range(view.gpus):
        if gpu:
            found = found | view.resident(layer, gpu)
        if in_flight:
            found = found | view.in_flight(layer, gpu)
    return found
