"""Weights decide: an expert is computed where it lies."""

from __future__ import annotations

from policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from policies.lanes import gpu_lanes, in_flight


class FixedMapping(AssignmentPolicy):
    """Compute resident experts on their GPU and all others on the CPU, both at the same time; never fetch on demand.

    What is resident is the cache's affair: with a static one this is KTransformers' placement masks (``frequency``,
    ``uniform``, ``front-loading`` and ``random`` are ways to fill it); with any other it is the usual "cached on
    the GPU, uncached on the CPU".

    An expert resident on several GPUs goes to the one that would finish it first.

    Args:
        wait: experts in flight are awaited on their GPU instead of being computed on the CPU.

    Source: KTransformers, kt-kernel's GPU expert masks; "fixed mapping" as HybriMoE calls it.
    """

    def __init__(self, *, wait: bool = False) -> None:
        self.wait = wait

    def assign(self, work: LayerWork, view: MachineView) -> Assignment:
        """Place by residency, in ascending expert id."""
        here = work.arrive_s == 0.0
        if self.wait:
            here = here | in_flight(work, view)
        return Assignment(gpu_lanes(work, here.any(axis=0), here))
