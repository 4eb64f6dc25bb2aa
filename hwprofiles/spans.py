"""What a run says about its operations: how long, on what, beside whom, and what came between them.

A timeline is a list of spans. To learn costs from it, each operation must be seen with the tokens or bytes it had and
with the share of its time during which other workers were busy; and the time that belongs to no operation (waking a
thread, handing out work, joining) must be cut out of the gaps between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hwprofiles.profile import lane_class
from hwprofiles.schema import LANE_CLASSES
from traces.timeline import COMPUTE, DENSE, FETCH, JOIN, PLAN, READ

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from traces.schema import ModelShape
    from traces.timeline import Timeline

_NEVER = 1e30


@dataclass(frozen=True, slots=True)
class DesignedRun:
    """One run that was made to be learned from.

    Attributes:
        timeline: what happened.
        shape: sizes of the experts and of the rest of the model.
        assignment: name of the assignment policy that planned.
        context_tokens: by step, key/value entries of each sequence.
        workers: worker -> its lanes.
    """

    timeline: Timeline
    shape: ModelShape
    assignment: str
    context_tokens: Sequence[int]
    workers: Mapping[str, tuple[str, ...]]


class Operations(NamedTuple):
    """Operations of one class of lanes. N operations, C classes of other lanes.

    Attributes:
        seconds: float64 [N].
        sizes: int64 [N], tokens of a product, bytes of a copy.
        shares: float64 [N, C], share of the operation's time during which each class worked elsewhere.
        first: bool [N], first product of its lane in a layer step.
        fresh: bool [N], product of an expert that was copied in the same layer step.
        odd: bool [N], belongs to a step with an odd number.
        shapes: int64 [N], number of the run's shape.
    """

    seconds: np.ndarray
    sizes: np.ndarray
    shares: np.ndarray
    first: np.ndarray
    fresh: np.ndarray
    odd: np.ndarray
    shapes: np.ndarray

    @classmethod
    def joined(cls, parts: Iterable[Operations]) -> Operations:
        """Lay several runs end to end."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def where(self, keep: np.ndarray) -> Operations:
        """Choose some."""
        return Operations(*(column[keep] for column in self))


@dataclass(slots=True)
class Gaps:
    """Seconds between operations, as lists of float64 arrays that are joined at the end.

    Attributes:
        follow: lane class -> from the end of an operation to the start of the next on the same worker.
        first: ``cpu`` or ``gpu`` -> from the end of planning to the first operation of that lane's worker.
        last: the same -> from the end of the last operation to the start of the join.
        around: what else passes between two dense parts, the join itself included.
    """

    follow: dict[str, list[np.ndarray]] = field(default_factory=dict)
    first: dict[str, list[np.ndarray]] = field(default_factory=dict)
    last: dict[str, list[np.ndarray]] = field(default_factory=dict)
    around: list[np.ndarray] = field(default_factory=list)


class Spans:
    """One run as arrays, ready to be asked.

    Args:
        run: the run.
        shape_number: number that its operations carry.
    """

    def __init__(self, run: DesignedRun, shape_number: int) -> None:
        self.run, self._shape_number = run, shape_number
        chunks = list(run.timeline.chunks())
        columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
        order = np.argsort(columns["start_s"], kind="stable")
        self.lane, self.kind, self.step, self.layer, self.expert = (
            columns[name][order].astype(np.int64) for name in ("lane", "kind", "step", "layer", "expert")
        )
        self.start_s, self.end_s, self.bytes = (columns[name][order] for name in ("start_s", "end_s", "bytes"))
        self.seconds = self.end_s - self.start_s
        self.classes = [lane_class(lane) for lane in run.timeline.lanes]
        self._worker = np.array([self._worker_of(lane) for lane in run.timeline.lanes])
        self.place = self.step * run.shape.layers + self.layer  # layer steps in order
        self._tokens = self._tokens_of_experts()

    def _worker_of(self, lane: str) -> int:
        return next(number for number, lanes in enumerate(self.run.workers.values()) if lane in lanes)

    def _tokens_of_experts(self) -> np.ndarray:
        """Tokens of each product, 1 elsewhere."""
        experts, layers = self.run.shape.experts, self.run.shape.layers
        chunks = list(self.run.timeline.access_chunks())
        found = {name: np.concatenate([chunk[name] for chunk in chunks]).astype(np.int64) for name in chunks[0]}
        keys = (found["step"] * layers + found["layer"]) * experts + found["expert"]
        order = np.argsort(keys)
        asked = np.maximum(self.place * experts + self.expert, 0)
        at = np.minimum(np.searchsorted(keys[order], asked), len(keys) - 1)
        return np.where(self.kind == COMPUTE, found["tokens"][order][at], 1)

    def of(self, name: str, kinds: tuple[int, ...]) -> Operations:
        """Operations of some kinds on one class of lanes."""
        here = np.isin(self.kind, kinds) & np.isin(self.lane, [i for i, c in enumerate(self.classes) if c == name])
        sizes = self._tokens if kinds == (COMPUTE,) else self.bytes
        first = np.zeros(len(here), np.bool_)
        rows = np.flatnonzero(here)
        first[rows[np.unique(self.place[rows], return_index=True)[1]]] = True
        keys = self.place * self.run.shape.experts + self.expert
        fresh = (self.kind == COMPUTE) & np.isin(keys, keys[self.kind == FETCH]) & (name == "gpu")
        return Operations(
            self.seconds[here],
            sizes[here],
            self._shares(here),
            first[here],
            fresh[here],
            self.step[here] % 2 == 1,
            np.full(int(here.sum()), self._shape_number),
        )

    def _shares(self, here: np.ndarray) -> np.ndarray:
        """Share of each operation's time during which each class of lanes was busy on another worker."""
        start_s, end_s = self.start_s[here], self.end_s[here]
        length_s = np.maximum(end_s - start_s, 1e-12)
        own = self._worker[self.lane[here]]
        shares = np.zeros((len(start_s), len(LANE_CLASSES)))
        for column, name in enumerate(LANE_CLASSES):
            for lane in [i for i, c in enumerate(self.classes) if c == name]:
                rows = (self.lane == lane) & (self.seconds > 0)
                if not rows.any():
                    continue
                edges_s = np.column_stack((self.start_s[rows], self.end_s[rows])).ravel()
                busy_s = np.column_stack((np.zeros(rows.sum()), self.seconds[rows])).ravel().cumsum()
                both_s = np.interp(end_s, edges_s, busy_s) - np.interp(start_s, edges_s, busy_s)
                shares[:, column] += np.where(own == self._worker[lane], 0.0, both_s / length_s)
        return np.minimum(shares, 1.0)

    def dense(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds, step and layer (-1: the head) of each dense part; what lies between two steps counts as head."""
        rows = np.flatnonzero(self.kind == DENSE)
        seconds = self.seconds[rows].copy()
        heads = np.flatnonzero((self.layer[rows[:-1]] < 0) & (self.step[rows[1:]] == self.step[rows[:-1]] + 1))
        seconds[heads] += self.start_s[rows[heads + 1]] - self.end_s[rows[heads]]
        return seconds, self.step[rows], self.layer[rows]

    def planning(self) -> tuple[np.ndarray, np.ndarray]:
        """Active experts and seconds of each planning."""
        rows = self.kind == PLAN
        active = np.bincount(self.place[self.kind == COMPUTE], minlength=int(self.place.max()) + 1)
        return active[self.place[rows]], self.seconds[rows]

    def gaps(self, into: Gaps) -> None:
        """Add this run's gaps."""
        count = int(self.place.max()) + 2
        waits = np.zeros(count, np.bool_)  # what waits for the SSD says nothing about handing work out
        waits[self.place[self.kind == READ]] = True
        work = np.isin(self.kind, (COMPUTE, FETCH)) & ~waits[self.place]
        self._follow(np.flatnonzero(work), into)
        first_s, last_s = self._extremes(work, count)
        plan_end_s, join_start_s = np.full(count, np.nan), np.full(count, np.nan)
        plan_end_s[self.place[self.kind == PLAN]] = self.end_s[self.kind == PLAN]
        join_start_s[self.place[self.kind == JOIN]] = self.start_s[self.kind == JOIN]
        latest_s = np.max(list(last_s.values()), axis=0)
        for name in first_s:
            worked = (first_s[name] < _NEVER) & np.isfinite(plan_end_s)
            into.first.setdefault(name, []).append(np.maximum(first_s[name] - plan_end_s, 0.0)[worked])
            later = worked & (last_s[name] == latest_s) & np.isfinite(join_start_s)
            into.last.setdefault(name, []).append(np.maximum(join_start_s - last_s[name], 0.0)[later])
        into.around.append(self._around())

    def _extremes(self, work: np.ndarray, count: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """First start and last end of each worker that computes, by layer step."""
        first_s, last_s = {}, {}
        for name in ("cpu", "gpu"):
            workers = {self._worker[i] for i, c in enumerate(self.classes) if c == name}
            rows = work & np.isin(self._worker[self.lane], list(workers))
            first_s[name], last_s[name] = np.full(count, _NEVER), np.full(count, -_NEVER)
            np.minimum.at(first_s[name], self.place[rows], self.start_s[rows])
            np.maximum.at(last_s[name], self.place[rows], self.end_s[rows])
        return first_s, last_s

    def _follow(self, rows: np.ndarray, into: Gaps) -> None:
        """Gaps between operations of the same layer step and worker; a lane alone on its worker may wait for others."""
        worker = self._worker[self.lane[rows]]
        for number, lanes in enumerate(self.run.workers.values()):
            own = rows[worker == number]
            if len(own) < 2:
                continue
            same = self.place[own[1:]] == self.place[own[:-1]]
            gap_s = np.maximum(self.start_s[own[1:]] - self.end_s[own[:-1]], 0.0)
            waits = {"gpu"} if not any(lane_class(lane) == "h2d" for lane in lanes) else set()
            for name in {lane_class(lane) for lane in lanes} - waits:
                of = np.array([self.classes[lane] == name for lane in self.lane[own[1:]]]) & same
                into.follow.setdefault(name, []).append(gap_s[of])

    def _around(self) -> np.ndarray:
        """Between two dense parts: from dense to planning, the join, and from the join to the next dense part."""
        rows = np.flatnonzero(np.isin(self.kind, (DENSE, PLAN, JOIN)))
        kinds, start_s, end_s = self.kind[rows], self.start_s[rows], self.end_s[rows]
        steps = np.flatnonzero(
            (kinds[:-3] == DENSE) & (kinds[1:-2] == PLAN) & (kinds[2:-1] == JOIN) & (kinds[3:] == DENSE)
        )
        asked_s = start_s[steps + 1] - end_s[steps]
        joined_s = start_s[steps + 3] - start_s[steps + 2]
        return np.maximum(asked_s + joined_s, 0.0)
