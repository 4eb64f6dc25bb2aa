"""Mask of a layer's experts that are on any GPU, for routing and prefetching."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import MachineView


def present(view: MachineView, layer: int, *, in_flight: bool = True) -> np.ndarray:
    """Bool [E]: experts of a layer that are on some GPU, or (unless `in_flight` is
    false) on their way to one.
    """
    mask = view.resident(layer)
    for gpu in range(view.gpus):
        if gpu:
            mask = mask | view.resident(layer, gpu)
        if in_flight:
            mask = mask | view.in_flight(layer, gpu)
    return mask
