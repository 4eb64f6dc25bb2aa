"""Balance of CPU and GPU in a layer step, and the time that compute lanes wait for
copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
        spans = Rows(*rows.values())
        waits_s = self._waits_s(spans, place, copies, _plan_end_s(rows, work, keys))
        busy_s = np.zeros((len(keys), self._lanes))
        waited_s = np.zeros(self._lanes)
        sum_by_lane(spans, place, waits_s, busy_s, waited_s)
        self._add_imbalance(busy_s)
        self.stall_s += waited_s

    def _waits_s(
        self, spans: Rows, place: np.ndarray, copies: np.ndarray, plan_end_s: np.ndarray
    ) -> np.ndarray:
        """Seconds that the lane of each compute span waited, float64 [N]."""
        order = np.arange(len(place))
        target = self._target
        is_ordered, waits_s = waits_of_lanes(
            spans, place, order, copies, target, plan_end_s
        )
        if not is_ordered:
            # Threads note their spans as they end, not quite in the order of time.
            order = np.argsort(spans.start_s, kind="stable")
            _, waits_s = waits_of_lanes(spans, place, order, copies, target, plan_end_s)
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


class Rows(NamedTuple):
    """Spans, N, in the types of a timeline's columns.

    Attributes:
        lane, kind: int8 [N].
        layer: int16 [N].
        expert: int32 [N].
        start_s, end_s: float64 [N].
        key: int64 [N], of step and layer.
    """

    lane: np.ndarray
    kind: np.ndarray
    layer: np.ndarray
    expert: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    key: np.ndarray


_ROWS = structure(
    Rows,
    (
        nb.int8[::1],
        nb.int8[::1],
        nb.int16[::1],
        nb.int32[::1],
        nb.float64[::1],
        nb.float64[::1],
        nb.int64[::1],
    ),
)


def waits_of_lanes(
    rows: Rows,
    place: np.ndarray,
    order: np.ndarray,
    copies: np.ndarray,
    target: np.ndarray,
    plan_end_s: np.ndarray,
) -> tuple[bool, np.ndarray]:
    """Compute how long the lane of each compute span waited: idle, after planning and
    after the compute span before, until the last copy of its expert had landed.

    Args:
        rows: N spans of S layer steps.
        place: int64 [N], the layer step of each compute span, -1 of other spans.
        order: int64 [N], in which the compute spans of every lane start.
        copies: int64, spans of copies in the order of their ends.
        target: int64, the lane that computes what each lane brings, -1 for none.
        plan_end_s: float64 [S].

    Returns:
        Whether the order is that of the starts, and if so seconds, float64 [N].
    """
    lanes = len(target)
    layers = 0
    experts = 0
    for row in copies:
        layers = max(layers, rows.layer[row] + 1)
        experts = max(experts, rows.expert[row] + 1)
    landed_s = np.full((lanes, layers, experts), -np.inf)
    landed = np.zeros(lanes, np.int64)
    started_s = np.full(lanes, -np.inf)
    computed_s = np.full((len(plan_end_s), lanes), -np.inf)
    waits_s = np.zeros(len(place))

    for row in order:
        if place[row] < 0:
            continue
        lane = rows.lane[row]
        start_s = rows.start_s[row]
        if start_s < started_s[lane]:
            return False, waits_s
        started_s[lane] = start_s

        # A copy that ends as the span starts has landed.
        while landed[lane] < len(copies):
            copy = copies[landed[lane]]
            if rows.end_s[copy] > start_s:
                break
            if target[rows.lane[copy]] == lane:
                landed_s[lane, rows.layer[copy], rows.expert[copy]] = rows.end_s[copy]
            landed[lane] += 1

        step = place[row]
        idle_from_s = max(computed_s[step, lane], plan_end_s[step])
        computed_s[step, lane] = rows.end_s[row]
        if rows.layer[row] < layers and rows.expert[row] < experts:
            copied_s = min(start_s, landed_s[lane, rows.layer[row], rows.expert[row]])
            waits_s[row] = max(copied_s - idle_from_s, 0.0)
    return True, waits_s


def sum_by_lane(
    rows: Rows,
    place: np.ndarray,
    waits_s: np.ndarray,
    busy_s: np.ndarray,
    waited_s: np.ndarray,
) -> None:
    """Add the seconds of compute spans to those of their layer steps and lanes, float64
    [S, lanes], and what lanes waited before them to those of the lanes.
    """
    for row in range(len(place)):
        if place[row] >= 0:
            lane = rows.lane[row]
            busy_s[place[row], lane] += rows.end_s[row] - rows.start_s[row]
            waited_s[lane] += waits_s[row]


def number_in_order(key: np.ndarray, chosen: np.ndarray, place: np.ndarray) -> int:
    """Number the distinct keys of what is chosen, if they ascend.

    Args:
        key: int64 [N].
        chosen: bool [N].
        place: int64 [N], to be filled in where chosen.

    Returns:
        How many there are; -1 if they do not ascend.
    """
    count = 0
    last = 0
    for n in range(len(key)):
        if not chosen[n]:
            continue
        if not count or key[n] > last:
            count += 1
            last = key[n]
        elif key[n] < last:
            return -1
        place[n] = count - 1
    return count


def _numbered(key: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys of what is chosen, ascending, and which of them each one is, int64;
    -1 where it is not chosen.
    """
    place = np.full(len(key), -1)
    count = number_in_order(key, chosen, place)
    if count < 0:
        # Layer steps follow each other, unless one was begun before its time.
        keys, place[chosen] = np.unique(key[chosen], return_inverse=True)
        return keys, place
    keys = np.empty(count, np.int64)
    keys[place[chosen]] = key[chosen]
    return keys, place


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
