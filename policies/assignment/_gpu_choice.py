"""Helpers for assignments on several GPUs: copies in flight, and which GPU to use.

A active experts, G GPUs.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.assignment._kernels import spread
from moesim.policies.base import IN_FLIGHT, RESIDENT

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork, MachineView

_EVERYWHERE = np.ones((0, 0), np.bool_)
"""As `allowed`: every GPU."""


def gpu_state(
    work: LayerWork,
    view: MachineView,
) -> np.ndarray:
    """State of every active expert on one GPU after the other: int8 [G * A].

    With one GPU this is `work.state`; with several that only knows the best of them.
    """
    gpus = len(work.arrive_s)
    if gpus == 1:
        return work.state

    flying = np.concatenate(
        [view.in_flight(work.layer, gpu)[work.experts] for gpu in range(gpus)]
    )
    resident = work.arrive_s.ravel() == 0.0
    state = np.where(resident, RESIDENT, flying * IN_FLIGHT)
    return state.astype(np.int8)


def in_flight(
    work: LayerWork,
    view: MachineView,
) -> np.ndarray:
    """Which active experts are on their way to which GPU: bool [G, A]."""
    state = gpu_state(work, view).reshape(work.arrive_s.shape)
    flying = state == IN_FLIGHT
    # There are seldom copies in flight; counting is how numpy sees that soonest.
    if not np.count_nonzero(flying):
        return flying
    # A copy that lands this very moment counts as resident.
    return flying & (work.arrive_s > 0.0)


def link_s(work: LayerWork) -> np.ndarray:
    """Seconds until each link has ended the copy under way: float64 [G]."""
    return _idle_s(len(work.arrive_s)) if work.link_s is None else work.link_s


@cache
def _idle_s(gpus: int) -> np.ndarray:
    """As `link_s` where all links are idle, as in most layer steps."""
    zeros = np.zeros(gpus)
    zeros.flags.writeable = False
    return zeros


def transfer_s(work: LayerWork) -> np.ndarray:
    """`arrive_s` without the wait for the copy under way: float64 [G, A].

    For schedules that let copies follow each other: only the first waits for it.
    """
    if work.link_s is None:
        return work.arrive_s
    wait_s = work.link_s[:, None]
    # What is in flight lands with the copy under way; what is absent, after it.
    return np.where(work.arrive_s > wait_s, work.arrive_s - wait_s, work.arrive_s)


def first_cpu_s(view: MachineView) -> float:
    """Extra seconds of the first CPU expert of a layer step; 0 for a view without
    them.
    """
    return float(getattr(view, "cpu_first_s", 0.0))


def gpu_lanes(
    work: LayerWork,
    chosen: np.ndarray,
) -> np.ndarray:
    """Lanes of experts of which some shall run on a GPU: int8 [A].

    With several GPUs each of them, in ascending id, goes to the GPU that would finish
    it first, ties to the lower GPU: greedy's rule on a machine whose CPU takes forever,
    so that all gaps are equal.

    Args:
        work: the layer step.
        chosen: bool [A], those that shall; the others go to the CPU.
    """
    if len(work.gpu_s) == 1:
        return chosen.astype(np.int8)
    return spread(chosen, _EVERYWHERE, work.gpu_s, work.arrive_s, link_s(work))


def allowed_lanes(
    work: LayerWork,
    allowed: np.ndarray,
) -> np.ndarray:
    """Lanes of experts that run on a GPU wherever one is allowed: int8 [A].

    With several GPUs as in `gpu_lanes`.

    Args:
        work: the layer step.
        allowed: bool [G, A], such as where each expert is resident; the CPU computes
            what no GPU may.
    """
    if len(allowed) == 1:
        return allowed[0].astype(np.int8)
    chosen = np.logical_or.reduce(allowed)
    return spread(chosen, allowed, work.gpu_s, work.arrive_s, link_s(work))
