"""How evenly CPU and GPU work in a layer step, and how long compute lanes wait for
copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
        start_s = rows["start_s"][compute]
        end_s = rows["end_s"][compute]
        keys, place = np.unique(rows["key"][compute], return_inverse=True)

        self._add_imbalance(lane, end_s - start_s, place, len(keys))

        idle_from_s = self._idle_from_s(rows, compute)
        idle_from_s = np.maximum(idle_from_s, _plan_end_s(rows, work, keys)[place])
        copy_end_s = self._copy_end_s(rows, compute)
        waited_s = np.minimum(start_s, copy_end_s) - idle_from_s
        self.stall_s += np.bincount(lane, np.maximum(waited_s, 0.0), self._lanes)

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

    def _idle_from_s(
        self,
        rows: Chunk,
        compute: np.ndarray,
    ) -> np.ndarray:
        """End of the compute span before each one, on the same lane in the same layer
        step; -inf for the first.
        """
        key = rows["key"][compute]
        lane = rows["lane"][compute]
        start_s = rows["start_s"][compute]
        end_s = rows["end_s"][compute]

        order = np.lexsort((start_s, lane, key))
        follows = (np.diff(key[order]) == 0) & (np.diff(lane[order]) == 0)
        before_s = np.where(follows, end_s[order][:-1], -np.inf)

        idle_from_s = np.empty(len(key))
        idle_from_s[order] = np.concatenate(([-np.inf], before_s))
        return idle_from_s

    def _copy_end_s(
        self,
        rows: Chunk,
        compute: np.ndarray,
    ) -> np.ndarray:
        """End of the latest copy of the same expert to the same lane before each
        compute span; -inf if none.
        """
        kind = rows["kind"]
        is_copy = (kind >= FETCH) & (kind <= READ)
        copies = np.flatnonzero(is_copy & (self._target[rows["lane"]] >= 0))
        uses = np.flatnonzero(compute)
        if not len(copies):
            return np.full(len(uses), -np.inf)

        # Copies by their ends and uses by their starts in one order, by expert and
        # lane; a copy that ends as the use starts comes before it.
        both = np.concatenate([copies, uses])
        lane = np.concatenate([self._target[rows["lane"][copies]], rows["lane"][uses]])
        of_layer = lane * _LAYERS + rows["layer"][both]
        expert = of_layer * _EXPERTS + rows["expert"][both]
        time_s = np.concatenate([rows["end_s"][copies], rows["start_s"][uses]])
        is_use = np.arange(len(both)) >= len(copies)
        order = np.lexsort((is_use, time_s, expert))

        # The last copy at or before each place of that order.
        copy_places = np.where(is_use[order], -1, np.arange(len(both)))
        last = np.maximum.accumulate(copy_places)
        is_same = (last >= 0) & (expert[order][last] == expert[order])

        end_s = np.empty(len(both))
        end_s[order] = np.where(is_same, time_s[order][last], -np.inf)
        return end_s[len(copies) :]


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
