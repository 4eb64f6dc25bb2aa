"""FreeToken's split of a layer step's misses between link and CPU."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import view_of, zeros
from moesim.policies.assignment._placing import (
    SpreadAssignment,
    flying,
    transfer_s,
)
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

# Products of a share and a count, and times that should be equal, differ by rounding.
TOLERANCE = 1e-9


class FetchSplit(SpreadAssignment):
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
        # Negative for none.
        self.share = -1.0 if fraction is None else fraction
        self.table = table
        self.link_slowdown = link_slowdown
        self.cpu_slowdown = cpu_slowdown
        fetches = [] if table is None else _read_table(table)
        self.fetches: Ints = view_of(fetches, np.int64)

    def start(self, context: RunContext) -> None:
        """Take what the machine knows of link and CPU beside each other."""
        SpreadAssignment.start(self, context)
        self.misses: Ints = zeros(context.shape.experts, np.int64)
        link, cpu = 1.0, 1.0
        if context.costs is not None:
            link, cpu = context.costs.overlap
        self.link_factor = self.link_slowdown or link
        self.cpu_factor = self.cpu_slowdown or cpu

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        residents = self._keep_present(work, order)
        self._sort_misses(work, residents, order)
        count = self._fetchable(work, residents, order)
        for n in range(self._fetch_count(work, count)):
            self.allow(work, self.misses[n])
        self.spread(work, lanes)
        return 0

    def _keep_present(self, work: Work, order: Ints) -> int:
        """Let what is on a GPU, or bound for it, run there, launched first; how many
        there are.
        """
        count = 0
        for i in range(work.active):
            present = False
            for g in range(work.gpus):
                here = flying(work, g, i) or work.arrive_s[g, i] == 0.0
                self.allowed[g, i] = here
                present = present or here
            self.misses[i] = not present
            if present:
                order[count] = i
                count += 1
        return count

    def _sort_misses(self, work: Work, residents: int, order: Ints) -> None:
        """Launch misses behind, by tokens, most first, ties to the lower id."""
        count = residents
        for i in range(work.active):
            if not self.misses[i]:
                continue
            j = count
            while j > residents and work.tokens[order[j - 1]] < work.tokens[i]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = i
            count += 1

    def _fetchable(self, work: Work, residents: int, order: Ints) -> int:
        """List the misses that every link could bring; how many there are."""
        count = 0
        for n in range(residents, work.active):
            comes = True
            for g in range(work.gpus):
                comes = comes and work.arrive_s[g, order[n]] < inf
            if comes:
                self.misses[count] = order[n]
                count += 1
        return count

    def _fetch_count(self, work: Work, misses: int) -> int:
        """How many of so many misses to fetch."""
        if not misses:
            return 0
        if len(self.fetches):
            last = len(self.fetches) - 1
            return self.fetches[min(misses, last)] + max(0, misses - last)
        # Any pair of times with this ratio gives a fraction back.
        fetch_s = 1.0 - self.share
        compute_s = self.share
        if self.share < 0.0:
            fetch_s = self._mean_fetch_s(work, misses)
            compute_s = self._mean_compute_s(work, misses)
        if compute_s == inf:
            return misses
        total_s = fetch_s + compute_s
        share = compute_s / total_s if total_s > 0.0 else 1.0
        fewer = min(int(share * misses + TOLERANCE), misses - 1)
        fewer_s = max(fewer * fetch_s, (misses - fewer) * compute_s)
        # One more fetch: above q* the link is the longer of the two.
        more_s = (fewer + 1) * fetch_s
        return fewer if fewer_s <= more_s * (1.0 + TOLERANCE) else fewer + 1

    def _mean_fetch_s(self, work: Work, misses: int) -> float:
        """Mean copy of a miss while the CPU computes, all links together."""
        total_s = 0.0
        for n in range(misses):
            for g in range(work.gpus):
                total_s += transfer_s(work, g, self.misses[n])
        return total_s / (work.gpus * misses) * self.link_factor / work.gpus

    def _mean_compute_s(self, work: Work, misses: int) -> float:
        """Mean time of a miss on the CPU while the links copy."""
        total_s = 0.0
        for n in range(misses):
            i = self.misses[n]
            total_s += max(work.host_s[i], work.cpu_s[i])
        return total_s / misses * self.cpu_factor


def _read_table(text: str) -> list[int]:
    """Numbers of fetches by number of misses, from 0 misses on."""
    parts = text.split("/")
    fetches = [int(part) for part in parts if part.isdecimal()]
    is_complete = len(fetches) == len(parts)
    fits = all(count <= misses for misses, count in enumerate(fetches))
    expect(is_complete and fits, "table", "numbers n of m, such as 0/1/1/2", text)
    return fetches
