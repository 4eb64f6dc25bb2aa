"""From a ranking of a coming layer's experts to a wish list, for policies that rank by
something of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.base import ExpertKey
from moesim.policies.planner.resident_mask import present

if TYPE_CHECKING:
    import numpy as np
    from moesim.policies.base import MachineView


def wishes(
    ranked: np.ndarray, layer: int, view: MachineView, *, size: int, refill: bool
) -> list[ExpertKey]:
    """Keep what is not on a GPU yet, or on its way.

    Args:
        ranked: ids of experts of `layer`, most wanted first.
        layer: a coming layer.
        view: says what is present, on any GPU.
        size: ranked experts considered.
        refill: present experts leave their place to the next in rank; otherwise they
            use it up.
    """
    if not refill:
        ranked = ranked[:size]
    absent = ranked[~present(view, layer)[ranked]]
    return [ExpertKey(layer, expert) for expert in absent[:size].tolist()]
