"""The misses of a layer step, split so that link and CPU end together."""

from __future__ import annotations

import math

import numpy as np
from moesim.policies.assignment._gpu_choice import gpu_lanes, in_flight
from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.parameters import expect


class FetchSplit(AssignmentPolicy):
    """Fetch a fixed share q* of the misses and compute the others on the CPU meanwhile;
    residents run on the GPU.

    The cost of q fetches among m misses is ``max(q / p, (m - q) / c)`` with p experts
    per second over the link and c on the CPU, both *while the other is busy*; it is
    least at ``q* m`` with ``q* = p / (p + c)``. Experts are whole, so the cheaper
    neighbour of ``q* m`` is taken, ties to fewer fetches. The misses with most tokens
    are fetched, largest first, ties to the lower id. What is in flight is awaited.

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

    def assign(self, work: LayerWork, view: MachineView) -> Assignment:
        """Place residents, then split the misses."""
        here = (work.arrive_s == 0.0) | in_flight(work, view)
        chosen = here.any(axis=0)
        missed = np.flatnonzero(~chosen)
        missed = missed[np.argsort(-work.tokens[missed], kind="stable")]
        fetched = missed[: self._fetches(work, missed)]
        chosen[fetched] = True
        allowed = here.copy()
        allowed[:, fetched] = True
        order = np.concatenate((np.flatnonzero(here.any(axis=0)), missed))
        return Assignment(gpu_lanes(work, chosen, allowed), order)

    def _fetches(self, work: LayerWork, missed: np.ndarray) -> int:
        """How many of the misses to fetch."""
        count = len(missed)
        if not count:
            return 0
        if self.fraction is None:
            fetch_s = (
                float(work.arrive_s[:, missed].mean())
                * self.link_slowdown
                / len(work.arrive_s)
            )
            compute_s = (
                float(np.maximum(work.host_s, work.cpu_s)[missed].mean())
                * self.cpu_slowdown
            )
        else:
            fetch_s = 1.0 - self.fraction
            compute_s = self.fraction
        share = compute_s / (fetch_s + compute_s) if fetch_s + compute_s > 0.0 else 1.0
        few = min(math.floor(share * count + 1e-9), count - 1)
        fewer_s = max(few * fetch_s, (count - few) * compute_s)
        more_s = (few + 1) * fetch_s
        return few if fewer_s <= more_s * (1.0 + 1e-9) else few + 1
