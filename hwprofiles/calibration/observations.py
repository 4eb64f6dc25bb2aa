"""What a run says about its operations: how long, on what, beside whom, and what came
between them.

A timeline is a list of spans. To learn costs from it, each operation must be seen with
the tokens or bytes it had and with the share of its time during which other workers
were busy; and the time that belongs to no operation (waking a thread, handing out work,
joining) must be cut out of the gaps between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from moesim.hwprofiles.profile import lane_class
from moesim.hwprofiles.schema import LANE_CLASSES
from moesim.traces.timeline.spans import COMPUTE, DENSE, FETCH, JOIN, PLAN, READ

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline

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
        kept: bool [steps], which forward passes count; all when None.
    """

    timeline: Timeline
    shape: ModelShape
    assignment: str
    context_tokens: Sequence[int]
    workers: Mapping[str, tuple[str, ...]]
    kept: np.ndarray | None = None


class Operations(NamedTuple):
    """Operations of one class of lanes. N operations, C classes of other lanes.

    Attributes:
        seconds: float64 [N].
        sizes: int64 [N], tokens of a product, bytes of a copy.
        shares: float64 [N, C], share of the operation's time during which each class
            worked elsewhere.
        first: bool [N], first product of its lane in a layer step.
        fresh: bool [N], the expert was read from the SSD in the same layer step.
        active: float64 [N], active experts of its layer step.
        copies: float64 [N], experts brought from one memory to another in its layer
            step.
        odd: bool [N], belongs to a step with an odd number.
        shapes: int64 [N], number of the run's shape.
        runs: int64 [N], twice the number of the run, and one more in its first step
            (which may be a prefill).
    """

    seconds: np.ndarray
    sizes: np.ndarray
    shares: np.ndarray
    first: np.ndarray
    fresh: np.ndarray
    active: np.ndarray
    copies: np.ndarray
    odd: np.ndarray
    shapes: np.ndarray
    runs: np.ndarray

    @classmethod
    def joined(cls, parts: Iterable[Operations]) -> Operations:
        """Lay several runs end to end."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def where(self, keep: np.ndarray) -> Operations:
        """Choose some."""
        return Operations(*(column[keep] for column in self))


class Rows(NamedTuple):
    """Seconds that pass once per layer step, beside how much there was to do: N layer
    steps.

    Attributes:
        seconds: float64 [N].
        active: float64 [N], active experts.
        copies: float64 [N], experts brought from one memory to another.
        tiered: float64 [N], 1 where an SSD lies behind host memory.
        group: int64 [N], number of the lane class (an index into `LANE_CLASSES`) that
            it concerns; 0 where none.
    """

    seconds: np.ndarray
    active: np.ndarray
    copies: np.ndarray
    tiered: np.ndarray
    group: np.ndarray

    @classmethod
    def joined(cls, parts: Iterable[Rows]) -> Rows:
        """Lay several end to end."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def where(self, keep: np.ndarray) -> Rows:
        """Choose some."""
        return Rows(*(column[keep] for column in self))


@dataclass(slots=True)
class Gaps:
    """Seconds between operations.

    Attributes:
        follow: lane class -> from the end of an operation to the start of the next on
            the same worker, as float64 [n].
        first: from the end of planning to the first operation of the ``cpu`` or ``gpu``
            lane's worker.
        read: from the end of planning to the first read, as float64 [n].
        join: what passes between two dense parts beside planning and lanes: the
            request, from the end of the last operation to the join, the join, to the
            next dense part; by the lane whose operation was the last.
    """

    follow: dict[str, list[np.ndarray]] = field(default_factory=dict)
    first: list[Rows] = field(default_factory=list)
    read: list[np.ndarray] = field(default_factory=list)
    join: list[Rows] = field(default_factory=list)


class Spans:
    """One run as arrays, ready to be asked.

    Args:
        run: the run.
        shape_number, number: of its shape and of the run itself, which its operations
            carry.
    """

    def __init__(self, run: DesignedRun, shape_number: int, number: int) -> None:
        self.run = run
        self._shape_number = shape_number
        self._number = number
        chunks = list(run.timeline.chunks())
        columns = {
            name: np.concatenate([chunk[name] for chunk in chunks])
            for name in chunks[0]
        }
        order = np.argsort(columns["start_s"], kind="stable")
        self.lane, self.kind, self.step, self.layer, self.expert = (
            columns[name][order].astype(np.int64)
            for name in ("lane", "kind", "step", "layer", "expert")
        )
        self.start_s, self.end_s, self.bytes = (
            columns[name][order] for name in ("start_s", "end_s", "bytes")
        )
        self.seconds = self.end_s - self.start_s
        self.classes = [lane_class(lane) for lane in run.timeline.lanes]
        self._worker = np.array([self._worker_of(lane) for lane in run.timeline.lanes])
        self.place = self.step * run.shape.layers + self.layer  # layer steps in order
        self._kept = (
            np.ones(len(self.step), np.bool_)
            if run.kept is None
            else run.kept[self.step]
        )
        self._tokens = self._tokens_of_experts()

    def _worker_of(self, lane: str) -> int:
        return next(
            number
            for number, lanes in enumerate(self.run.workers.values())
            if lane in lanes
        )

    def _tokens_of_experts(self) -> np.ndarray:
        """Tokens of each product, 1 elsewhere."""
        experts = self.run.shape.experts
        layers = self.run.shape.layers
        chunks = list(self.run.timeline.access_chunks())
        found = {
            name: np.concatenate([chunk[name] for chunk in chunks]).astype(np.int64)
            for name in chunks[0]
        }
        keys = (found["step"] * layers + found["layer"]) * experts + found["expert"]
        order = np.argsort(keys)
        asked = np.maximum(self.place * experts + self.expert, 0)
        at = np.minimum(np.searchsorted(keys[order], asked), len(keys) - 1)
        return np.where(self.kind == COMPUTE, found["tokens"][order][at], 1)

    def of(self, name: str, kinds: tuple[int, ...]) -> Operations:
        """Operations of some kinds on one class of lanes."""
        lanes = [i for i, c in enumerate(self.classes) if c == name]
        here = self._kept & np.isin(self.kind, kinds) & np.isin(self.lane, lanes)
        sizes = self._tokens if kinds == (COMPUTE,) else self.bytes
        first = np.zeros(len(here), np.bool_)
        rows = np.flatnonzero(here)
        first[rows[np.unique(self.place[rows], return_index=True)[1]]] = True
        active, copies = self._amounts()
        keys = self.place * self.run.shape.experts + self.expert
        return Operations(
            self.seconds[here],
            sizes[here],
            self._shares(here),
            first[here],
            np.isin(keys[here], keys[self.kind == READ]),
            active[self.place[here]],
            copies[self.place[here]],
            self.step[here] % 2 == 1,
            np.full(int(here.sum()), self._shape_number),
            2 * self._number + (self.step[here] == 0),
        )

    def _shares(self, here: np.ndarray) -> np.ndarray:
        """Share of each operation's time during which each class of lanes was busy on
        another worker.
        """
        start_s = self.start_s[here]
        end_s = self.end_s[here]
        length_s = np.maximum(end_s - start_s, 1e-12)
        own = self._worker[self.lane[here]]
        shares = np.zeros((len(start_s), len(LANE_CLASSES)))
        for column, name in enumerate(LANE_CLASSES):
            for lane in [i for i, c in enumerate(self.classes) if c == name]:
                rows = (self.lane == lane) & (self.seconds > 0)
                if not rows.any():
                    continue
                edges_s = np.column_stack(
                    (self.start_s[rows], self.end_s[rows])
                ).ravel()
                busy_s = (
                    np.column_stack((np.zeros(rows.sum()), self.seconds[rows]))
                    .ravel()
                    .cumsum()
                )
                both_s = np.interp(end_s, edges_s, busy_s) - np.interp(
                    start_s, edges_s, busy_s
                )
                shares[:, column] += np.where(
                    own == self._worker[lane], 0.0, both_s / length_s
                )
        return np.minimum(shares, 1.0)

    def dense(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Seconds, step and layer (-1: the head) of each dense part, and whether the
        layer before it read from the SSD.

        What lies between two steps counts as head.
        """
        rows = np.flatnonzero(self.kind == DENSE)
        seconds = self.seconds[rows].copy()
        heads = np.flatnonzero(
            (self.layer[rows[:-1]] < 0)
            & (self.step[rows[1:]] == self.step[rows[:-1]] + 1)
        )
        seconds[heads] += self.start_s[rows[heads + 1]] - self.end_s[rows[heads]]
        kept = self._kept[rows]
        after = (self.layer[rows] > 0) & np.isin(
            self.place[rows] - 1, self.place[self.kind == READ]
        )
        return seconds[kept], self.step[rows][kept], self.layer[rows][kept], after[kept]

    def of_steps(self, name: str) -> np.ndarray:
        """A column of the timeline's table of steps, int64 by step number."""
        chunks = list(self.run.timeline.step_chunks())
        steps, values = (
            np.concatenate([chunk[key] for chunk in chunks]).astype(np.int64)
            for key in ("step", name)
        )
        found = np.zeros(int(steps.max()) + 1, np.int64)
        found[steps] = values
        return found

    def planning(self) -> Rows:
        """Each planning."""
        rows = self._kept & (self.kind == PLAN)
        active, copies = self._amounts()
        place = self.place[rows]
        return self._rows(self.seconds[rows], active[place], copies[place])

    def _amounts(self) -> tuple[np.ndarray, np.ndarray]:
        """Active experts and experts on demand from another memory, float64 by layer
        step.
        """
        count = int(self.place.max()) + 2
        active = np.bincount(self.place[self.kind == COMPUTE], minlength=count)
        asked = np.isin(self.kind, (FETCH, READ))
        keys = np.unique(
            self.place[asked] * self.run.shape.experts + self.expert[asked]
        )
        copies = np.bincount(keys // self.run.shape.experts, minlength=count)
        return active.astype(np.float64), copies.astype(np.float64)

    def gaps(self, into: Gaps) -> None:
        """Add this run's gaps."""
        count = int(self.place.max()) + 2
        # What waits for the SSD says nothing about handing work out.
        waits = np.zeros(count, np.bool_)
        waits[self.place[self.kind == READ]] = True
        work = self._kept & np.isin(self.kind, (COMPUTE, FETCH))
        self._follow(np.flatnonzero(work & ~waits[self.place]), into)
        amounts = self._amounts()
        first_s, last_s = self._extremes(work, count)
        plan_end_s = np.full(count, np.nan)
        join_start_s = np.full(count, np.nan)
        plan_end_s[self.place[self.kind == PLAN]] = self.end_s[self.kind == PLAN]
        join_start_s[self.place[self.kind == JOIN]] = self.start_s[self.kind == JOIN]
        latest_s = np.max(list(last_s.values()), axis=0)
        around_s = self._around(count)
        for name in first_s:
            group = LANE_CLASSES.index(name)
            worked = (first_s[name] < _NEVER) & np.isfinite(plan_end_s)
            into.first.append(
                self._rows(first_s[name] - plan_end_s, *amounts, group).where(
                    worked & ~waits
                )
            )
            later = (
                worked
                & (last_s[name] == latest_s)
                & np.isfinite(join_start_s)
                & np.isfinite(around_s)
            )
            told_s = np.maximum(join_start_s - last_s[name], 0.0) + around_s
            into.join.append(self._rows(told_s, *amounts, group).where(later))
        self._first_reads(plan_end_s, into)

    def _first_reads(self, plan_end_s: np.ndarray, into: Gaps) -> None:
        """From the end of planning to the first read that it asked for."""
        rows = np.flatnonzero(self._kept & (self.kind == READ))
        places, first = np.unique(self.place[rows], return_index=True)
        gap_s = self.start_s[rows[first]] - plan_end_s[places]
        # One that began earlier was asked for earlier.
        into.read.append(gap_s[gap_s >= 0.0])

    def _extremes(
        self, work: np.ndarray, count: int
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """First start and last end of each worker that computes, by layer step."""
        first_s = {}
        last_s = {}
        for name in ("cpu", "gpu"):
            workers = {self._worker[i] for i, c in enumerate(self.classes) if c == name}
            rows = work & np.isin(self._worker[self.lane], list(workers))
            first_s[name] = np.full(count, _NEVER)
            last_s[name] = np.full(count, -_NEVER)
            np.minimum.at(first_s[name], self.place[rows], self.start_s[rows])
            np.maximum.at(last_s[name], self.place[rows], self.end_s[rows])
        return first_s, last_s

    def _follow(self, rows: np.ndarray, into: Gaps) -> None:
        """Gaps between operations of the same layer step and worker; a lane alone on
        its worker may wait for others.
        """
        worker = self._worker[self.lane[rows]]
        for number, lanes in enumerate(self.run.workers.values()):
            own = rows[worker == number]
            if len(own) < 2:
                continue
            same = self.place[own[1:]] == self.place[own[:-1]]
            gap_s = np.maximum(self.start_s[own[1:]] - self.end_s[own[:-1]], 0.0)
            waits = (
                {"gpu"}
                if not any(lane_class(lane) == "h2d" for lane in lanes)
                else set()
            )
            for name in {lane_class(lane) for lane in lanes} - waits:
                of = (
                    np.array(
                        [self.classes[lane] == name for lane in self.lane[own[1:]]]
                    )
                    & same
                )
                into.follow.setdefault(name, []).append(gap_s[of])

    def _around(self, count: int) -> np.ndarray:
        """From dense part to planning, the join, and from it to the next dense part;
        NaN where one is missing.
        """
        rows = np.flatnonzero(np.isin(self.kind, (DENSE, PLAN, JOIN)))
        kinds = self.kind[rows]
        start_s = self.start_s[rows]
        end_s = self.end_s[rows]
        steps = np.flatnonzero(
            (kinds[:-3] == DENSE)
            & (kinds[1:-2] == PLAN)
            & (kinds[2:-1] == JOIN)
            & (kinds[3:] == DENSE)
        )
        asked_s = start_s[steps + 1] - end_s[steps]
        joined_s = start_s[steps + 3] - start_s[steps + 2]
        found = np.full(count, np.nan)
        found[self.place[rows[steps]]] = np.maximum(asked_s + joined_s, 0.0)
        return found

    def _rows(
        self,
        seconds: np.ndarray,
        active: np.ndarray,
        copies: np.ndarray,
        group: int = 0,
    ) -> Rows:
        """A table of this run."""
        count = len(seconds)
        tiered = np.full(count, float((self.kind == READ).any()))
        return Rows(
            np.maximum(seconds, 0.0),
            active,
            copies,
            tiered,
            np.full(count, group, np.int64),
        )
