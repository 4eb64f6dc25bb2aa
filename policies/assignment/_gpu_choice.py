"""What several assignment policies ask of a layer step: who is under way, and which of
several GPUs.

A active experts, G GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.base import IN_FLIGHT, RESIDENT
from moesim.policies.kernels import UNLIMITED, greedy

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, MachineView


def gpu_state(work: LayerWork, view: MachineView) -> np.ndarray:
    """State of every active expert on one GPU after the other: int8 [G * A].

    With one GPU this is `work.state`; with several that only knows the best of them.
    """
    gpus = len(work.arrive_s)
    if gpus == 1:
        return work.state
    flying = np.concatenate(
        [view.in_flight(work.layer, g)[work.experts] for g in range(gpus)]
    )
    return np.where(work.arrive_s.ravel() == 0.0, RESIDENT, flying * IN_FLIGHT).astype(
        np.int8
    )


def in_flight(work: LayerWork, view: MachineView) -> np.ndarray:
    """Which active experts are on their way to which GPU: bool [G, A]."""
    flying = (gpu_state(work, view) == IN_FLIGHT).reshape(work.arrive_s.shape)
    return flying & (work.arrive_s > 0.0) if flying.any() else flying


def first_cpu_s(view: MachineView) -> float:
    """Extra seconds of the first CPU expert of a layer step; 0 for a view that does not
    say.
    """
    return float(getattr(view, "cpu_first_s", 0.0))


def gpu_lanes(
    work: LayerWork, chosen: np.ndarray, allowed: np.ndarray | None = None
) -> np.ndarray:
    """Lanes of experts of which some shall run on a GPU: int8 [A].

    With several GPUs each of them, in order of its cost and ties to the lower id, goes
    to the GPU that would finish first: greedy's rule on a machine whose CPU takes
    forever.

    Args:
        work: the layer step.
        chosen: bool [A], those that shall; the others go to the CPU.
        allowed: bool [G, A] GPUs that may be used, at least one for each chosen expert;
            None for all.
    """
    lanes = chosen.astype(np.int8)
    if len(work.gpu_s) > 1 and chosen.any():
        never = np.full(np.count_nonzero(chosen), np.inf)
        gpu_s = work.gpu_s if allowed is None else np.where(allowed, work.gpu_s, np.inf)
        arrive_s = work.arrive_s[:, chosen].copy()
        lanes[chosen] = greedy(
            never, never, gpu_s[:, chosen].copy(), arrive_s, UNLIMITED
        )[0]
    return lanes
