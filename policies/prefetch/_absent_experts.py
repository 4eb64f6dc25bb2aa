"""Selection of absent experts from a ranking of a coming layer's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.base import ExpertKey
from moesim.policies.planner.resident_mask import present

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import MachineView


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
