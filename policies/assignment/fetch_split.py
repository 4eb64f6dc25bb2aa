"""FreeToken's split of a layer step's misses between link and CPU."""

from __future__ import annotations

import math

import numpy as np

from moesim.policies.assignment._gpu_choice import gpu_lanes, in_flight, transfer_s
from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.parameters import expect
from moesim.policies.ranking import highest_first

# Products of a share and a count, and times that should be equal, differ by rounding.
_TOLERANCE = 1e-9


class FetchSplit(AssignmentPolicy):
    """Fetch a fixed share of the misses and compute the others on the CPU, so that both
    end together; residents run on the GPU.

    The cost of q fetches among m misses is ``max(q / p, (m - q) / c)`` with p experts
    per second over the link and c on the CPU, both *while the other is busy*; it is
    least at ``q* m`` with the share ``q* = p / (p + c)``. Experts are whole, so the
    cheaper neighbour of ``q* m`` is taken, ties to fewer fetches. The misses with most
    tokens are fetched, largest first, ties to the lower id. What is in flight is
    awaited.

    The view knows the rates of a link and a CPU that have the machine for themselves.
    Host memory feeds both: a measured pair of 65.9 and 25.2 GB/s was 71.5 and 14.8
    together, which is 17 % instead of 28 %. So give `fraction` as measured, or the
    slowdowns.

    Args:
        fraction: q* itself; none computes it for each layer step from copy and CPU
            times.
        link_slowdown: how many times longer a copy takes while the CPU computes.
        cpu_slowdown: how many times longer CPU experts take while the link copies.

    Source: FreeToken, `moe/benchbw.py` (its pull request 38 for the figures); several
    links count together.
    """

    def __init__(
        self,
        *,
        fraction: float | None = None,
        link_slowdown: float = 1.0,
        cpu_slowdown: float = 1.0,
    ) -> None:
        expect(
            fraction is None or 0.0 <= fraction <= 1.0,
            "fraction",
            "0 <= fraction <= 1 or none",
            fraction,
        )
        expect(link_slowdown > 0.0, "link_slowdown", "a number > 0", link_slowdown)
        expect(cpu_slowdown > 0.0, "cpu_slowdown", "a number > 0", cpu_slowdown)
        self.fraction = fraction
        self.link_slowdown = link_slowdown
        self.cpu_slowdown = cpu_slowdown

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place residents, then split the misses."""
        present = (work.arrive_s == 0.0) | in_flight(work, view)
        on_gpu = present.any(axis=0)
        misses = np.flatnonzero(~on_gpu)
        misses = highest_first(misses, work.tokens[misses])
        order = np.concatenate((np.flatnonzero(on_gpu), misses))

        fetched = misses[: self._fetches(work, misses)]
        on_gpu[fetched] = True
        # A miss may be fetched to any GPU; what is on one, or bound for it, stays.
        allowed = present.copy()
        allowed[:, fetched] = True
        return Assignment(gpu_lanes(work, on_gpu, allowed), order)

    def _fetches(
        self,
        work: LayerWork,
        misses: np.ndarray,
    ) -> int:
        """How many of the misses to fetch."""
        count = len(misses)
        if not count:
            return 0

        if self.fraction is None:
            gpus = len(work.arrive_s)
            cpu_s = np.maximum(work.host_s, work.cpu_s)
            arrive_s = float(transfer_s(work)[:, misses].mean())
            fetch_s = arrive_s * self.link_slowdown / gpus
            compute_s = float(cpu_s[misses].mean()) * self.cpu_slowdown
        else:
            # Any pair of times with this ratio gives the fraction back.
            fetch_s = 1.0 - self.fraction
            compute_s = self.fraction

        total_s = fetch_s + compute_s
        share = compute_s / total_s if total_s > 0.0 else 1.0
        fewer = min(math.floor(share * count + _TOLERANCE), count - 1)
        fewer_s = max(fewer * fetch_s, (count - fewer) * compute_s)
        # One more fetch: above q* the link is the longer of the two.
        more_s = (fewer + 1) * fetch_s
        return fewer if fewer_s <= more_s * (1.0 + _TOLERANCE) else fewer + 1
