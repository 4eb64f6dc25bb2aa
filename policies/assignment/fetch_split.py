"""FreeToken's split of a layer step's misses between link and CPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.machine_code.types import input_array
from moesim.policies.assignment._kernels import (
    flying,
    launch,
    some_gpu,
    spread,
    transfers,
)
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import (
    ASSIGN,
    EXPERT_IDS,
    LANES,
    ORDER,
    SECONDS,
    SECONDS_BY_GPU,
    AssignmentKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect

if TYPE_CHECKING:
    from moesim.policies.base import (
        RunContext,
    )

# Products of a share and a count, and times that should be equal, differ by rounding.
_TOLERANCE = 1e-9


@compiled
def _fetches(
    misses: np.ndarray,
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    transfer_s: np.ndarray,
    table: np.ndarray,
    rates: np.ndarray,
) -> int:
    """How many of the misses to fetch: by a table unless that is empty, else by the
    share that `rates` gives, or the times where that is negative.

    `rates` float64 [3]: the share, the slowdowns of link and CPU.
    """
    count = len(misses)
    if not count:
        return 0
    if len(table):
        last = len(table) - 1
        return table[min(count, last)] + max(0, count - last)

    # Any pair of times with this ratio gives a fraction back.
    fetch_s = 1.0 - rates[0]
    compute_s = rates[0]
    if rates[0] < 0.0:
        gpus = len(transfer_s)
        arrive_s = 0.0
        compute_s = 0.0
        for i in misses:
            for g in range(gpus):
                arrive_s += transfer_s[g, i]
            compute_s += max(host_s[i], cpu_s[i])
        fetch_s = arrive_s / (gpus * count) * rates[1] / gpus
        compute_s = compute_s / count * rates[2]

    total_s = fetch_s + compute_s
    share = compute_s / total_s if total_s > 0.0 else 1.0
    fewer = min(math.floor(share * count + _TOLERANCE), count - 1)
    fewer_s = max(fewer * fetch_s, (count - fewer) * compute_s)
    # One more fetch: above q* the link is the longer of the two.
    more_s = (fewer + 1) * fetch_s
    return fewer if fewer_s <= more_s * (1.0 + _TOLERANCE) else fewer + 1


@compiled(
    nb.Several((LANES, ORDER))(
        EXPERT_IDS,
        SECONDS,
        SECONDS,
        SECONDS_BY_GPU,
        SECONDS_BY_GPU,
        SECONDS,
        input_array(nb.int8),
        input_array(nb.int64),
        SECONDS,
    )
)
def _split(
    tokens: np.ndarray,
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    link_s: np.ndarray,
    gpu_state: np.ndarray,
    table: np.ndarray,
    rates: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Place residents, then split the misses: lanes int8 [A] and order int64 [A]."""
    active = len(tokens)
    # What is on a GPU, or bound for it, stays; a miss may be fetched to any.
    allowed = flying(gpu_state, arrive_s)
    for g in range(len(arrive_s)):
        for i in range(active):
            allowed[g, i] |= arrive_s[g, i] == 0.0
    on_gpu = some_gpu(allowed)
    misses = np.flatnonzero(~on_gpu)
    largest_first = np.argsort(-tokens[misses], kind="mergesort")
    misses = misses[largest_first]
    order = np.concatenate((np.flatnonzero(on_gpu), misses))

    # What no link brings is no miss that could be fetched.
    comes = np.empty(len(misses), np.bool_)
    for n in range(len(misses)):
        comes[n] = arrive_s[:, misses[n]].max() < np.inf
    misses = misses[comes]
    transfer_s = transfers(arrive_s, link_s)
    count = _fetches(misses, cpu_s, host_s, transfer_s, table, rates)
    for i in misses[:count]:
        on_gpu[i] = True
        allowed[:, i] = True
    return spread(on_gpu, allowed, gpu_s, arrive_s, link_s), order


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    placed, decided = _split(
        work.tokens,
        work.cpu_s,
        work.host_s,
        work.gpu_s,
        work.arrive_s,
        work.link_s,
        gpu_state=work.gpu_state,
        table=state.integers,
        rates=state.numbers,
    )
    launch(lanes, order, placed, decided)
    return False


class FetchSplit(CompiledAssignment):
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
        fetches = [] if table is None else _read_table(table)
        self._fetches_of = np.array(fetches, np.int64)
        self._bring(link_slowdown or 1.0, cpu_slowdown or 1.0)

    def start(self, context: RunContext) -> None:
        """Take what the machine knows of link and CPU beside each other."""
        super().start(context)
        if context.costs is None:
            return
        link, cpu = context.costs.overlap
        self._bring(self.link_slowdown or link, self.cpu_slowdown or cpu)

    def _bring(self, link_slowdown: float, cpu_slowdown: float) -> None:
        """Take the kernel with what it knows: the share is negative for none."""
        fraction = -1.0 if self.fraction is None else self.fraction
        rates = [fraction, link_slowdown, cpu_slowdown]
        self.brought = AssignmentKernels(
            _assign, state(numbers=rates, integers=self._fetches_of)
        )


def _read_table(text: str) -> list[int]:
    """Numbers of fetches by number of misses, from 0 misses on."""
    parts = text.split("/")
    fetches = [int(part) for part in parts if part.isdecimal()]
    is_complete = len(fetches) == len(parts)
    fits = all(count <= misses for misses, count in enumerate(fetches))
    expect(is_complete and fits, "table", "numbers n of m, such as 0/1/1/2", text)
    return fetches
