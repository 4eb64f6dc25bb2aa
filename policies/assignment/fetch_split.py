"""FreeToken's split of a layer step's misses between link and CPU."""

from __future__ import annotations

import math

import numpy as np

from moesim.policies.assignment._gpu_choice import gpu_lanes, in_flight, transfer_s
from moesim.policies.base import (
    Assignment,
    AssignmentPolicy,
    LayerWork,
    MachineView,
    RunContext,
)
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
    together, which is 17 % instead of 28 %. So both are slowed down as the machine's
    profile says, and where it does not know, give `fraction` as measured.

    Args:
        fraction: q* itself; none computes it for each layer step from copy and CPU
            times.
        table: how many of 0, 1, 2, ... misses to fetch, as ``0/1/1/2/3``, in the place
            of a share; of more misses, all beyond the table are fetched. For machines
            where whole layer steps were measured.
        link_slowdown: how many times longer a copy takes while the CPU computes; none
            for the profile's contention.
        cpu_slowdown: how many times longer CPU experts take while the link copies; none
            likewise.

    Source: FreeToken, `moe/benchbw.py` (its pull request 38 for the figures); several
    links count together. The table is moe-speed-of-light's (harshithkantamneni).
    """

    def __init__(
        self,
        *,
        fraction: float | None = None,
        table: str | None = None,
        link_slowdown: float | None = None,
        cpu_slowdown: float | None = None,
    ) -> None:
        expect(
            fraction is None or 0.0 <= fraction <= 1.0,
            "fraction",
            "0 <= fraction <= 1 or none",
            fraction,
        )
        holds = link_slowdown is None or link_slowdown > 0.0
        expect(holds, "link_slowdown", "a number > 0 or none", link_slowdown)
        holds = cpu_slowdown is None or cpu_slowdown > 0.0
        expect(holds, "cpu_slowdown", "a number > 0 or none", cpu_slowdown)
        self.fraction = fraction
        self.table = table
        self.link_slowdown = link_slowdown
        self.cpu_slowdown = cpu_slowdown
        self._fetches_of = None if table is None else _read_table(table)
        self._overlap = (link_slowdown or 1.0, cpu_slowdown or 1.0)

    def start(self, context: RunContext) -> None:
        """Take what the machine knows of link and CPU beside each other."""
        if context.costs is None:
            return
        link, cpu = context.costs.overlap
        self._overlap = (self.link_slowdown or link, self.cpu_slowdown or cpu)

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

        if self._fetches_of is not None:
            last = len(self._fetches_of) - 1
            return self._fetches_of[min(count, last)] + max(0, count - last)

        if self.fraction is None:
            link_slowdown, cpu_slowdown = self._overlap
            gpus = len(work.arrive_s)
            cpu_s = np.maximum(work.host_s, work.cpu_s)
            arrive_s = float(transfer_s(work)[:, misses].mean())
            fetch_s = arrive_s * link_slowdown / gpus
            compute_s = float(cpu_s[misses].mean()) * cpu_slowdown
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


def _read_table(text: str) -> list[int]:
    """Numbers of fetches by number of misses, from 0 misses on."""
    parts = text.split("/")
    fetches = [int(part) for part in parts if part.isdecimal()]
    is_complete = len(fetches) == len(parts)
    fits = all(count <= misses for misses, count in enumerate(fetches))
    expect(is_complete and fits, "table", "numbers n of m, such as 0/1/1/2", text)
    return fetches
