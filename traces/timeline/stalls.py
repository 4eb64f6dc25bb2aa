"""How evenly CPU and GPU work in a layer step, and how long compute lanes wait for
copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import types as nb

from moesim.traces.compilation import compiled
from moesim.traces.timeline.spans import COMPUTE, FETCH, PLAN, READ

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.timeline.spans import Chunk

# Keys are made of numbers below these: step and layer; lane, layer and expert.
_LAYERS = 1 << 16
_EXPERTS = 1 << 16
_COLUMNS = ("lane", "kind", "layer", "expert", "start_s", "end_s")


class StallAggregator:
    """CPU/GPU imbalance and stalls, from the compute spans of each layer step and the
    copies they waited for.

    A compute lane *stalls* before a compute span for the time that it was idle, after
    planning had ended, while the copy of that very expert to it was not yet finished:
    ``min(start, copy end) - max(previous compute end, plan end)`` where positive.
    Copies to ``gpuN`` are spans on ``h2dN``, copies for ``cpu`` are reads on ``ssd``.

    Attributes:
        stall_s: seconds by lane.
        imbalance: sum over layer steps of ``|CPU - busiest GPU| / the longer``.
        layer_steps: those in which anything was computed.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self.stall_s = np.zeros(len(lanes))
        self.imbalance = 0.0
        self.layer_steps = 0

        names = list(lanes)
        self._lanes = len(names)
        self._gpus = [i for i, lane in enumerate(names) if lane.startswith("gpu")]
        self._cpu = names.index("cpu") if "cpu" in names else -1
        # Lane -> the lane that computes what it brings, -1 for none.
        consumers = [_consumer(lane) for lane in names]
        self._target = np.array(
            [names.index(lane) if lane in names else -1 for lane in consumers],
            dtype=np.int64,
        )
        self._open: Chunk | None = None

    def add(self, spans: Chunk | None) -> None:
        """Take one chunk of spans; None closes the last layer step."""
        rows = self._open if spans is None else self._behind(_relevant(spans))
        self._open = None
        if rows is None or not len(rows["key"]):
            return

        work = (rows["kind"] == COMPUTE) | (rows["kind"] == PLAN)
        if spans is not None:
            if not work.any():
                self._open = rows
                return

            # The last layer step may go on in the next chunk, and its copies may
            # stand before its own spans.
            last = rows["key"][work].max()
            unfinished = work & (rows["key"] == last)
            since = np.arange(len(work)) >= int(np.argmax(unfinished))
            kept = unfinished | (~work & since)
            self._open = {name: values[kept] for name, values in rows.items()}
            work &= ~unfinished

        self._settle(rows, work)

    def _behind(self, rows: Chunk) -> Chunk:
        """Rows behind those of the layer step that is still open."""
        if self._open is None:
            return rows

        return {
            name: np.concatenate([self._open[name], rows[name]]) for name in self._open
        }

    def _settle(
        self,
        rows: Chunk,
        work: np.ndarray,
    ) -> None:
        """Count the layer steps whose compute and plan spans are those in `work`."""
        compute = work & (rows["kind"] == COMPUTE)
        if not compute.any():
            return

        lane = rows["lane"][compute]
        duration_s = rows["end_s"][compute] - rows["start_s"][compute]
        keys, place = _numbered(rows["key"][compute])

        self._add_imbalance(lane, duration_s, place, len(keys))

        plan_end_s = _plan_end_s(rows, work, keys)
        waited_s = self._waited_s(rows, compute, place, plan_end_s)
        self.stall_s += np.bincount(lane, waited_s, self._lanes)

    def _add_imbalance(
        self,
        lane: np.ndarray,
        duration_s: np.ndarray,
        place: np.ndarray,
        count: int,
    ) -> None:
        """Add `count` layer steps; `place` says which of them a compute span belongs
        to.
        """
        by_lane = place * self._lanes + lane
        busy_s = np.bincount(by_lane, duration_s, count * self._lanes)
        busy_s = busy_s.reshape(count, -1)

        nothing = np.zeros(count)
        cpu_s = busy_s[:, self._cpu] if self._cpu >= 0 else nothing
        gpu_s = busy_s[:, self._gpus].max(axis=1) if self._gpus else nothing
        longer_s = np.maximum(cpu_s, gpu_s)

        # A layer step whose spans have no length is balanced.
        some = longer_s > 0
        difference_s = np.abs(cpu_s - gpu_s)[some]
        self.imbalance += float((difference_s / longer_s[some]).sum())
        self.layer_steps += count

    def _waited_s(
        self,
        rows: Chunk,
        compute: np.ndarray,
        place: np.ndarray,
        plan_end_s: np.ndarray,
    ) -> np.ndarray:
        """Seconds of each compute span's lane that it waited for a copy.

        Args:
            rows: compute, plan and copy spans.
            compute: bool, the compute spans among them, N.
            place: int64 [N], the layer step of each.
            plan_end_s: of each layer step.
        """
        kind = rows["kind"]
        is_copy = (kind >= FETCH) & (kind <= READ)
        copies = np.flatnonzero(is_copy & (self._target[rows["lane"]] >= 0))
        copies = copies[np.argsort(rows["end_s"][copies], kind="stable")]
        uses = np.flatnonzero(compute)
        lane = rows["lane"][uses].astype(np.int64)

        # One number per expert of a layer and lane; -1 stands for none.
        layers = int(rows["layer"].max()) + 2
        experts = int(rows["expert"].max()) + 2
        of_layer = (rows["layer"] + np.int64(1)) * experts + rows["expert"] + 1
        copy_target = self._target[rows["lane"][copies]]
        landed_s = np.full(self._lanes * layers * experts, -np.inf)

        start_s = rows["start_s"][uses]
        return wait_for_copies(
            Uses(
                np.argsort(start_s, kind="stable"),
                start_s,
                rows["end_s"][uses],
                place,
                lane,
                lane * layers * experts + of_layer[uses],
            ),
            rows["end_s"][copies],
            copy_target * layers * experts + of_layer[copies],
            plan_end_s,
            landed_s,
            self._lanes,
        )


class Uses(NamedTuple):
    """Compute spans, N.

    Attributes:
        by_start: int64 [N], their places in the order of their starts.
        start_s, end_s: float64 [N].
        layer_step, lane, expert: int64 [N], numbers of what they belong to.
    """

    by_start: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    layer_step: np.ndarray
    lane: np.ndarray
    expert: np.ndarray


_USES = nb.NamedTuple(
    (
        nb.int64[::1],
        nb.float64[::1],
        nb.float64[::1],
        nb.int64[::1],
        nb.int64[::1],
        nb.int64[::1],
    ),
    Uses,
)


@compiled(
    nb.float64[::1](
        _USES,
        nb.float64[::1],
        nb.int64[::1],
        nb.float64[::1],
        nb.float64[::1],
        nb.int64,
    )
)
def wait_for_copies(
    uses: Uses,
    copy_end_s: np.ndarray,
    copy_expert: np.ndarray,
    plan_end_s: np.ndarray,
    landed_s: np.ndarray,
    lanes: int,
) -> np.ndarray:
    """How long the lane of each use was idle, after planning and after the use before
    it, until the last copy of its expert before it had landed: seconds, float64 [N].

    Args:
        uses: N of S layer steps.
        copy_end_s: float64 [C], ascending.
        copy_expert: int64 [C], what each brings.
        plan_end_s: float64 [S].
        landed_s: float64, by expert, of minus infinity.
        lanes: how many there are.
    """
    waited_s = np.empty(len(uses.start_s))
    computed_s = np.full((len(plan_end_s), lanes), -np.inf)
    landed = 0
    for use in uses.by_start:
        start_s = uses.start_s[use]
        # A copy that ends as the use starts has landed.
        while landed < len(copy_end_s) and copy_end_s[landed] <= start_s:
            landed_s[copy_expert[landed]] = copy_end_s[landed]
            landed += 1
        step = uses.layer_step[use]
        lane = uses.lane[use]
        idle_from_s = max(computed_s[step, lane], plan_end_s[step])
        computed_s[step, lane] = uses.end_s[use]
        copied_s = min(start_s, landed_s[uses.expert[use]])
        waited_s[use] = max(copied_s - idle_from_s, 0.0)
    return waited_s


def _numbered(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys, ascending, and which of them each one is: int64."""
    step = np.diff(key)
    if (step < 0).any():
        return np.unique(key, return_inverse=True)
    # Layer steps follow each other, unless one was begun before its time.
    is_first = np.concatenate(([True], step > 0))
    return key[is_first], np.cumsum(is_first) - 1


def _consumer(lane: str) -> str:
    """The lane that computes what a link brings; nothing for other lanes."""
    if lane == "ssd":
        return "cpu"

    return lane.replace("h2d", "gpu") if lane.startswith("h2d") else ""


def _relevant(spans: Chunk) -> Chunk:
    """Compute, plan and copy spans, with a key of step and layer."""
    kind = spans["kind"]
    is_copy = (kind >= FETCH) & (kind <= READ)
    kept = (kind == COMPUTE) | (kind == PLAN) | is_copy

    rows = {name: spans[name][kept] for name in _COLUMNS}
    step = spans["step"][kept].astype(np.int64)
    rows["key"] = step * _LAYERS + rows["layer"]
    return rows


def _plan_end_s(
    rows: Chunk,
    work: np.ndarray,
    keys: np.ndarray,
) -> np.ndarray:
    """End of planning of each layer step in `keys`."""
    plan = work & (rows["kind"] == PLAN)
    plan_keys = rows["key"][plan]
    at = np.searchsorted(keys, plan_keys)
    last = len(keys) - 1
    known = (at < len(keys)) & (keys[np.minimum(at, last)] == plan_keys)

    # Without planning there is no window, so no stall.
    end_s = np.full(len(keys), np.inf)
    end_s[at[known]] = rows["end_s"][plan][known]
    return end_s
