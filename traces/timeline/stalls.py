"""Balance of CPU and GPU in a layer step, and the time that compute lanes wait for
copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.timeline.loops import waits_of_lanes
from moesim.traces.timeline.spans import COMPUTE, FETCH, PLAN, READ

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.timeline.spans import Chunk

# More than a model has: keys are made of step and layer.
_LAYERS = 1 << 16
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
        consumers = [consumer(lane) for lane in names]
        self._target = np.array(
            [names.index(lane) if lane in names else -1 for lane in consumers],
            dtype=np.int64,
        )
        self._open: Chunk | None = None

    def add(self, spans: Chunk | None) -> None:
        """Take one chunk of spans; None closes the last layer step."""
        rows = self._open if spans is None else self._behind(_with_key(spans))
        self._open = None
        if rows is None or not len(rows["key"]):
            return

        work = (rows["kind"] == COMPUTE) | (rows["kind"] == PLAN)
        if spans is not None:
            copies = _are_copies(rows["kind"])
            if not work.any():
                self._open = {name: values[copies] for name, values in rows.items()}
                return

            # The last layer step may go on in the next chunk, and its copies may
            # stand before its own spans.
            last = rows["key"][work].max()
            unfinished = work & (rows["key"] == last)
            since = np.arange(len(work)) >= int(np.argmax(unfinished))
            kept = unfinished | (copies & since)
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

    def _settle(self, rows: Chunk, work: np.ndarray) -> None:
        """Count the layer steps whose compute and plan spans are those in `work`."""
        compute = work & (rows["kind"] == COMPUTE)
        if not compute.any():
            return

        keys, place = _numbered(rows["key"], compute)
        copies = np.flatnonzero(_are_copies(rows["kind"]))
        copies = copies[np.argsort(rows["end_s"][copies], kind="stable")]
        waits_s = self._waits_s(rows, place, copies, _plan_end_s(rows, work, keys))
        lane = rows["lane"][compute]
        duration_s = (rows["end_s"] - rows["start_s"])[compute]
        cell = place[compute] * self._lanes + lane
        busy_s = np.bincount(cell, duration_s, len(keys) * self._lanes)
        self._add_imbalance(busy_s.reshape(len(keys), self._lanes))
        self.stall_s += np.bincount(lane, waits_s[compute], self._lanes)

    def _waits_s(
        self, rows: Chunk, place: np.ndarray, copies: np.ndarray, plan_end_s: np.ndarray
    ) -> np.ndarray:
        """Seconds that the lane of each compute span waited, float64 [N]."""
        names = ("lane", "layer", "expert", "start_s", "end_s")
        spans: Any = [rows[name] for name in names]
        rest: Any = (copies, self._target, plan_end_s)
        order = np.arange(len(place))
        is_ordered, waits_s = waits_of_lanes(*(*spans, place, order, *rest))
        if not is_ordered:
            # Threads note their spans as they end, not quite in the order of time.
            order = np.argsort(rows["start_s"], kind="stable")
            _, waits_s = waits_of_lanes(*(*spans, place, order, *rest))
        return waits_s

    def _add_imbalance(self, busy_s: np.ndarray) -> None:
        """Add layer steps, whose lanes were busy for so long: [S, lanes]."""
        count = len(busy_s)
        nothing = np.zeros(count)
        cpu_s = busy_s[:, self._cpu] if self._cpu >= 0 else nothing
        gpu_s = busy_s[:, self._gpus].max(axis=1) if self._gpus else nothing
        longer_s = np.maximum(cpu_s, gpu_s)

        # A layer step whose spans have no length is balanced.
        some = longer_s > 0
        difference_s = np.abs(cpu_s - gpu_s)[some]
        self.imbalance += float((difference_s / longer_s[some]).sum())
        self.layer_steps += count


def _numbered(key: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys of what is chosen, ascending, and which of them each one is, int64;
    -1 where it is not chosen.
    """
    keys = key[chosen]
    steps = np.diff(keys, prepend=keys[0] - 1)
    number = np.cumsum(steps > 0) - 1
    distinct = keys[steps > 0]
    if (steps < 0).any():
        # Layer steps follow each other, unless one was begun before its time.
        distinct, number = np.unique(keys, return_inverse=True)
    place = np.full(len(key), -1)
    place[chosen] = number
    return distinct, place


def consumer(lane: str) -> str:
    """The lane that computes what a link brings; nothing for other lanes."""
    if lane == "ssd":
        return "cpu"

    return lane.replace("h2d", "gpu") if lane.startswith("h2d") else ""


def _are_copies(kind: np.ndarray) -> np.ndarray:
    copies: np.ndarray = (kind >= FETCH) & (kind <= READ)
    return copies


def _with_key(spans: Chunk) -> Chunk:
    """Return the relevant columns of spans, and a key of step and layer."""
    rows = {name: np.ascontiguousarray(spans[name]) for name in _COLUMNS}
    rows["key"] = spans["step"].astype(np.int64) * _LAYERS + rows["layer"]
    return rows


def _plan_end_s(rows: Chunk, work: np.ndarray, keys: np.ndarray) -> np.ndarray:
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
