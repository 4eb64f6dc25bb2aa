"""Tables of what is learned from a run: its operations, and the gaps between them.

A timeline is a list of spans. To learn costs from it, each operation must be seen with
the tokens or bytes it had and with the share of its time during which other workers
were busy; and the time that belongs to no operation (waking a thread, handing out work,
joining) must be cut out of the gaps between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from moesim.hwprofiles.calibration.estimates import Units
from moesim.hwprofiles.lanes import (
    COMPUTE_KINDS,
    CONTROL,
    GPU,
    H2D,
    LANE_KINDS,
    SSD,
    LaneKind,
    kind_of,
)
from moesim.traces.timeline.spans import COMPUTE, DENSE, FETCH, JOIN, PLAN, READ

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline


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
        pace: factor by which the machine took longer than usual meanwhile.
    """

    timeline: Timeline
    shape: ModelShape
    assignment: str
    context_tokens: Sequence[int]
    workers: Mapping[str, tuple[str, ...]]
    kept: np.ndarray | None = None
    pace: float = 1.0


Table = TypeVar("Table", bound=tuple[np.ndarray, ...])
"""Columns of equal length, by name."""


def joined(tables: Iterable[Table]) -> Table:
    """Put tables of one kind below each other; at least one."""
    every = list(tables)
    columns = zip(*every, strict=True)
    return type(every[0])(*map(np.concatenate, columns))


def where(table: Table, keep: np.ndarray) -> Table:
    """Choose rows, by bool [N] or their numbers."""
    return type(table)(*(column[keep] for column in table))


class Operations(NamedTuple):
    """Operations of one kind of lane. N operations, C kinds of lanes.

    Attributes:
        seconds: float64 [N].
        sizes: int64 [N], tokens of a product, bytes of a copy.
        states: float64 [N, 2**C], share of the operation's time by which kinds of lanes
            (bits in the order of `LANE_KINDS`) worked elsewhere.
        expected: the same of a window as long as such operations take usually, by what
            runs when it begins.
        first: bool [N], first product of its lane in a layer step.
        late: bool [N], a product that waited for its expert while its lane began with
            one that was there: its worker may have been woken for this one.
        fresh: bool [N], the expert was read from the SSD in the same layer step.
        active: float64 [N], active experts of its layer step.
        copies: float64 [N], experts brought from one memory to another in its layer
            step.
        odd: bool [N], belongs to a step with an odd number.
        shapes: int64 [N], number of the run's shape.
        runs: int64 [N], twice the number of the run, and one more in its first step
            (which may be a prefill).
        steps: int64 [N], forward pass.
    """

    seconds: np.ndarray
    sizes: np.ndarray
    states: np.ndarray
    expected: np.ndarray
    first: np.ndarray
    late: np.ndarray
    fresh: np.ndarray
    active: np.ndarray
    copies: np.ndarray
    odd: np.ndarray
    shapes: np.ndarray
    runs: np.ndarray
    steps: np.ndarray


class Amounts(NamedTuple):
    """Amounts of work in each layer step: N layer steps.

    Attributes:
        active: float64 [N], active experts.
        copies: float64 [N], experts brought from one memory to another.
        shared: float64 [N], 1 where CPU and GPU share the experts.
    """

    active: np.ndarray
    copies: np.ndarray
    shared: np.ndarray


class LayerStepTimes(NamedTuple):
    """Seconds that pass once per layer step, beside how much there was to do: N layer
    steps.

    Attributes:
        seconds: float64 [N].
        active: float64 [N], active experts.
        copies: float64 [N], experts brought from one memory to another.
        shared: float64 [N], 1 where CPU and GPU share the experts.
        tiered: float64 [N], 1 where an SSD lies behind host memory.
        lane_kind: int64 [N], number of the kind of lane that it concerns, an index into
            `LANE_KINDS`.
        runs: int64 [N], number of the run.
        steps: int64 [N], forward pass.
    """

    seconds: np.ndarray
    active: np.ndarray
    copies: np.ndarray
    shared: np.ndarray
    tiered: np.ndarray
    lane_kind: np.ndarray
    runs: np.ndarray
    steps: np.ndarray

    @property
    def units(self) -> Units:
        """Return the units that are resampled as a whole."""
        return Units(self.runs, self.steps)


class DenseParts(NamedTuple):
    """Dense parts and heads of a run: N of them.

    Attributes:
        seconds: float64 [N].
        step: int64 [N].
        layer: int64 [N]; -1 for the head.
        after_read: bool [N], the layer step before it read from the SSD.
    """

    seconds: np.ndarray
    step: np.ndarray
    layer: np.ndarray
    after_read: np.ndarray


@dataclass(slots=True)
class Gaps:
    """Seconds between operations.

    Attributes:
        follow: kind of lane -> from the end of an operation to the start of the next on
            the same worker.
        first: from the end of planning to the first operation of the ``cpu`` or ``gpu``
            lane's worker.
        read: from the end of planning to the first read.
        join: what passes between two dense parts beside planning and lanes: the
            request, from the end of the last operation to the join, the join, to the
            next dense part; by the lane whose operation was the last.
    """

    follow: dict[str, list[LayerStepTimes]] = field(default_factory=dict)
    first: list[LayerStepTimes] = field(default_factory=list)
    read: list[LayerStepTimes] = field(default_factory=list)
    join: list[LayerStepTimes] = field(default_factory=list)


_TINY_S = 1e-12
_TOGETHER = 0.1
_LEAST_USUAL = 8
"""Operations of a size whose mean length says how long such operations usually are."""


class RunSpans:
    """The spans of one run, ready to be cut into tables.

    Attributes:
        run: the run.
        number: as given.
        lane, kind, step, layer, expert: int64 [N].
        start_s, end_s, seconds: float64 [N], at the machine's usual pace.
        bytes: [N].
        layer_step: int64 [N], number of the layer step.
        kept: bool [N], the span lies in a forward pass that counts.
        lane_kinds: kind of each lane.
        worker: int64 [lanes], number of each lane's worker.

    Args:
        run: the run.
        shape_number: of the run's shape among all shapes.
        number: of the run among all runs.
    """

    def __init__(
        self,
        run: DesignedRun,
        shape_number: int,
        number: int,
    ) -> None:
        self.run = run
        self._shape_number = shape_number
        self.number = number

        # Spans are recorded when they end; stable, so that ties keep that order.
        columns = _concatenated(run.timeline.chunks())
        order = np.argsort(columns["start_s"], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
        # At the machine's usual pace; that is one, so nothing changes, mostly.
        self.start_s = columns["start_s"] / run.pace
        self.end_s = columns["end_s"] / run.pace
        self.bytes = columns["bytes"]

        # Narrow in the file; wide here, since keys are made of their products.
        self.lane = columns["lane"].astype(np.int64)
        self.kind = columns["kind"].astype(np.int64)
        self.step = columns["step"].astype(np.int64)
        self.layer = columns["layer"].astype(np.int64)
        self.expert = columns["expert"].astype(np.int64)
        self.seconds = self.end_s - self.start_s
        self.layer_step = self.step * run.shape.layers + self.layer

        if run.kept is None:
            self.kept = np.ones(len(self.step), np.bool_)
        else:
            self.kept = run.kept[self.step]
        self.lane_kinds = [kind_of(lane) for lane in run.timeline.lanes]
        workers = [self._worker_of(lane) for lane in run.timeline.lanes]
        self.worker = np.array(workers)
        self._tokens = self._tokens_of_products()

    def _worker_of(self, lane: str) -> int:
        # Every lane has exactly one worker; the profile has seen to that.
        return next(
            number
            for number, lanes in enumerate(self.run.workers.values())
            if lane in lanes
        )

    def _tokens_of_products(self) -> np.ndarray:
        """Tokens of each product, 1 elsewhere: int64 [N]."""
        # Spans do not store tokens; the table of accesses does, by expert.
        experts = self.run.shape.experts
        layers = self.run.shape.layers
        columns = _concatenated(self.run.timeline.access_chunks())
        accesses = {name: column.astype(np.int64) for name, column in columns.items()}
        access_layer_steps = accesses["step"] * layers + accesses["layer"]
        access_keys = access_layer_steps * experts + accesses["expert"]
        order = np.argsort(access_keys)
        access_keys = access_keys[order]
        tokens = accesses["tokens"][order]

        # Spans without an expert have negative keys; what they find is not used.
        keys = np.maximum(self.layer_step * experts + self.expert, 0)
        rows = np.searchsorted(access_keys, keys)
        rows = np.minimum(rows, len(access_keys) - 1)
        return np.where(self.kind == COMPUTE, tokens[rows], 1)

    @property
    def layer_step_count(self) -> int:
        """Numbers of layer steps that may occur, and one more."""
        return int(self.layer_step.max()) + 2

    def lanes_of(self, lane_kind: LaneKind) -> list[int]:
        """Return the numbers of all lanes of a kind."""
        return [i for i, kind in enumerate(self.lane_kinds) if kind is lane_kind]

    def operations(
        self, lane_kind: LaneKind, span_kinds: tuple[int, ...]
    ) -> Operations:
        """Cut out operations of some kinds of spans on one kind of lane."""
        on_lane = np.isin(self.lane, self.lanes_of(lane_kind))
        of_kind = np.isin(self.kind, span_kinds)
        chosen = self.kept & of_kind & on_lane
        sizes = self._tokens if span_kinds == (COMPUTE,) else self.bytes

        # Spans are ordered by start, so the first row of a layer step began first.
        rows = np.flatnonzero(chosen)
        unique = np.unique(self.layer_step[rows], return_index=True)
        first_rows = rows[unique[1]]
        first = np.zeros(len(chosen), np.bool_)
        first[first_rows] = True

        amounts = where(self.amounts, self.layer_step[chosen])
        expert_keys = self.layer_step * self.run.shape.experts + self.expert
        read_keys = expert_keys[self.kind == READ]
        brought = np.isin(expert_keys, expert_keys[np.isin(self.kind, (FETCH, READ))])
        prompt = self.layer_step[first_rows[~brought[first_rows]]]
        late = brought & np.isin(self.layer_step, prompt)
        # The first step may be a prefill, whose operations have other neighbours.
        in_first_step = self.step[chosen] == 0
        count = int(chosen.sum())
        start_s = self.start_s[chosen]
        lanes = self.lane[chosen]
        usual_s = self._usual_seconds(chosen, sizes[chosen])
        return Operations(
            seconds=self.seconds[chosen],
            sizes=sizes[chosen],
            states=self._overlap_states(start_s, self.end_s[chosen], lanes),
            expected=self._expected_states(start_s, usual_s, lanes),
            first=first[chosen],
            late=late[chosen],
            fresh=np.isin(expert_keys[chosen], read_keys),
            active=amounts.active,
            copies=amounts.copies,
            odd=self.step[chosen] % 2 == 1,
            shapes=np.full(count, self._shape_number),
            runs=2 * self.number + in_first_step,
            steps=self.step[chosen],
        )

    def _overlap_states(
        self, start_s: np.ndarray, end_s: np.ndarray, lanes: np.ndarray
    ) -> np.ndarray:
        """Share of each interval by which kinds of lanes were busy on other workers:
        float64 [intervals, 2**C], bit c of a state for kind c of `LANE_KINDS`.

        Args:
            start_s, end_s: float64 [intervals].
            lanes: int64 [intervals], the lane whose worker does not count.
        """
        states = np.zeros((len(start_s), 1 << len(LANE_KINDS)))
        length_s = np.maximum(end_s - start_s, _TINY_S)
        workers = self.worker[lanes]
        for worker in np.unique(workers):
            rows = workers == worker
            times_s, masks = self._busy_masks(int(worker))
            spent_s = np.diff(times_s, prepend=times_s[0])
            for mask in np.unique(masks):
                # Seconds in this state so far, as a function of time.
                in_state_s = np.cumsum(np.where(masks == mask, spent_s, 0.0))
                until_end_s = np.interp(end_s[rows], times_s, in_state_s)
                until_start_s = np.interp(start_s[rows], times_s, in_state_s)
                states[rows, mask] = (until_end_s - until_start_s) / length_s[rows]
        # Before the first and after the last span nobody is busy.
        states[:, 0] += np.maximum(1.0 - states.sum(axis=1), 0.0)
        return states

    def _expected_states(
        self, start_s: np.ndarray, usual_s: np.ndarray, lanes: np.ndarray
    ) -> np.ndarray:
        """The same of windows of the usual length, by what is running when they begin.

        What begins later is left out: it may have begun because the operation ended.
        """
        workers = self.worker[lanes]
        # Who is woken together begins within a tenth of an operation.
        begun_s = start_s + _TOGETHER * usual_s
        share = np.zeros((len(start_s), len(LANE_KINDS)))
        for column, lane_kind in enumerate(LANE_KINDS):
            for lane in self.lanes_of(lane_kind):
                rows = np.flatnonzero((self.lane == lane) & (self.seconds > 0))
                if lane_kind is CONTROL or not len(rows):
                    continue
                # Spans of a lane follow each other, so the last one begun may run.
                running = np.searchsorted(self.start_s[rows], begun_s, "right") - 1
                end_s = self.end_s[rows[np.maximum(running, 0)]]
                left = np.clip((end_s - start_s) / usual_s, 0.0, 1.0)
                beside = (running >= 0) & (workers != self.worker[lane])
                share[:, column] = np.maximum(share[:, column], left * beside)

        # All begin with the window, so each state ends with the first that leaves it.
        states = np.zeros((len(start_s), 1 << len(LANE_KINDS)))
        for state in range(states.shape[1]):
            busy = state >> np.arange(len(LANE_KINDS)) & 1 == 1
            first_end = share[:, busy].min(axis=1, initial=1.0)
            last_other = share[:, ~busy].max(axis=1, initial=0.0)
            states[:, state] = np.maximum(first_end - last_other, 0.0)
        return states

    def _busy_masks(self, worker: int) -> tuple[np.ndarray, np.ndarray]:
        """Times at which anything begins or ends, float64 [E], and which kinds of lanes
        of other workers were busy until then, int64 [E].
        """
        times = [np.zeros(1)]
        changes = []
        for column, lane_kind in enumerate(LANE_KINDS):
            for lane in self.lanes_of(lane_kind):
                # Control plans while the lanes wait, so it slows none of them.
                if lane_kind is CONTROL or self.worker[lane] == worker:
                    continue
                rows = (self.lane == lane) & (self.seconds > 0)
                changes.append((column, self.start_s[rows], self.end_s[rows]))
                times += [self.start_s[rows], self.end_s[rows]]
        times_s = np.unique(np.concatenate(times))
        masks = np.zeros(len(times_s), np.int64)
        for column, starts_s, ends_s in changes:
            # What begins at one time is busy until the next.
            running = np.zeros(len(times_s) + 1, np.int64)
            np.add.at(running, np.searchsorted(times_s, starts_s) + 1, 1)
            np.add.at(running, np.searchsorted(times_s, ends_s) + 1, -1)
            busy = np.cumsum(running)[:-1] > 0
            masks |= busy.astype(np.int64) << column
        return times_s, masks

    def _usual_seconds(self, chosen: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Geometric mean of operations of about the same size in this run, float64
        [operations].
        """
        if not chosen.any():
            return np.zeros(0)
        logs = np.log(np.maximum(self.seconds[chosen], _TINY_S))
        doublings = np.round(np.log2(np.maximum(sizes, 1))).astype(np.int64)
        number = np.unique(doublings, return_inverse=True)[1]
        count = np.bincount(number)
        means = np.bincount(number, logs) / count
        # Of a few, the mean would be mostly the operation's own.
        means = np.where(count >= _LEAST_USUAL, means, logs.mean())
        return np.exp(means[number])

    def dense_parts(self) -> DenseParts:
        """Cut out dense parts and heads; what lies between two steps counts as head."""
        rows = np.flatnonzero(self.kind == DENSE)
        step = self.step[rows]
        layer = self.layer[rows]

        # The last head has no step behind it, and keeps its own length.
        seconds = self.seconds[rows].copy()
        is_head = layer[:-1] < 0
        next_step_follows = step[1:] == step[:-1] + 1
        heads = np.flatnonzero(is_head & next_step_follows)
        next_start_s = self.start_s[rows[heads + 1]]
        seconds[heads] += next_start_s - self.end_s[rows[heads]]

        layer_steps_with_read = self.layer_step[self.kind == READ]
        previous = self.layer_step[rows] - 1
        after_read = (layer > 0) & np.isin(previous, layer_steps_with_read)
        kept = self.kept[rows]
        return DenseParts(
            seconds=seconds[kept],
            step=step[kept],
            layer=layer[kept],
            after_read=after_read[kept],
        )

    def of_steps(self, name: str) -> np.ndarray:
        """Return a column of the timeline's table of steps, int64 by step number."""
        columns = _concatenated(self.run.timeline.step_chunks())
        steps = columns["step"].astype(np.int64)
        count = int(steps.max()) + 1
        by_step = np.zeros(count, np.int64)
        by_step[steps] = columns[name].astype(np.int64)
        return by_step

    def planning(self) -> LayerStepTimes:
        """Cut out each planning."""
        rows = self.kept & (self.kind == PLAN)
        return self.times(
            seconds=self.seconds[rows],
            layer_steps=self.layer_step[rows],
            lane_kind=CONTROL,
        )

    @cached_property
    def amounts(self) -> Amounts:
        """Count active experts, and experts on demand from another memory, by layer
        step [P], and tell who shares them.
        """
        count = self.layer_step_count
        computed = self.layer_step[self.kind == COMPUTE]
        active = np.bincount(computed, minlength=count)

        # An expert that is read and then copied counts once.
        experts = self.run.shape.experts
        on_demand = np.isin(self.kind, (FETCH, READ))
        keys = self.layer_step[on_demand] * experts + self.expert[on_demand]
        once = np.unique(keys)
        copies = np.bincount(once // experts, minlength=count)
        shared = np.ones(count, np.bool_)
        for lane_kind in COMPUTE_KINDS:
            on_lane = np.isin(self.lane, self.lanes_of(lane_kind))
            products = self.layer_step[on_lane & (self.kind == COMPUTE)]
            shared &= np.bincount(products, minlength=count) > 0
        return Amounts(
            active=active.astype(np.float64),
            copies=copies.astype(np.float64),
            shared=shared.astype(np.float64),
        )

    def times(
        self,
        seconds: np.ndarray,
        layer_steps: np.ndarray,
        lane_kind: LaneKind,
    ) -> LayerStepTimes:
        """Make a table of this run: seconds by number of the layer step."""
        count = len(seconds)
        has_reads = float((self.kind == READ).any())
        return LayerStepTimes(
            # Clocks of two threads may cross by a microsecond.
            np.maximum(seconds, 0.0),
            *where(self.amounts, layer_steps),
            tiered=np.full(count, has_reads),
            lane_kind=np.full(count, LANE_KINDS.index(lane_kind), np.int64),
            runs=np.full(count, self.number, np.int64),
            steps=layer_steps // self.run.shape.layers,
        )


def _concatenated(chunks: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Columns of a table that comes in chunks."""
    parts = list(chunks)
    joined = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        joined[name] = np.concatenate(columns)
    return joined


_NEVER_S = 1e30


def add_gaps(spans: RunSpans, gaps: Gaps) -> None:
    """Add one run's gaps."""
    count = spans.layer_step_count
    # What waits for the SSD shows nothing about handing work out.
    with_read = np.zeros(count, np.bool_)
    with_read[spans.layer_step[spans.kind == READ]] = True

    # Prefetches are left out: nothing of the layer step waits for them.
    work = spans.kept & np.isin(spans.kind, (COMPUTE, FETCH))
    without_read = ~with_read[spans.layer_step]
    _add_follow(spans, np.flatnonzero(work & without_read), gaps)

    # Layer steps without a plan stay NaN, and drop out of every comparison.
    planned = spans.kind == PLAN
    plan_end_s = np.full(count, np.nan)
    plan_end_s[spans.layer_step[planned]] = spans.end_s[planned]
    _add_first_and_join(spans, work, plan_end_s, with_read, gaps)
    _add_first_reads(spans, plan_end_s, gaps)


def _add_first_and_join(
    spans: RunSpans,
    work: np.ndarray,
    plan_end_s: np.ndarray,
    with_read: np.ndarray,
    gaps: Gaps,
) -> None:
    """Add gaps from planning to each compute lane's first operation, and around the
    join.
    """
    count = len(plan_end_s)
    layer_steps = np.arange(count)
    joins = spans.kind == JOIN
    join_start_s = np.full(count, np.nan)
    join_start_s[spans.layer_step[joins]] = spans.start_s[joins]

    extremes = {kind: _extremes(spans, work, kind) for kind in COMPUTE_KINDS}
    lasts_s = [last_s for _, last_s in extremes.values()]
    latest_s = np.max(lasts_s, axis=0)
    around_join_s = _around_join(spans, count)

    for lane_kind, (first_s, last_s) in extremes.items():
        worked = (first_s < _NEVER_S) & np.isfinite(plan_end_s)
        first = spans.times(
            seconds=first_s - plan_end_s,
            layer_steps=layer_steps,
            lane_kind=lane_kind,
        )
        gaps.first.append(where(first, worked & ~with_read))

        # The join waits for the last lane only; the other one's end shows nothing.
        was_last = last_s == latest_s
        has_join = np.isfinite(join_start_s)
        has_neighbours = np.isfinite(around_join_s)
        noticed_s = np.maximum(join_start_s - last_s, 0.0)
        join = spans.times(
            seconds=noticed_s + around_join_s,
            layer_steps=layer_steps,
            lane_kind=lane_kind,
        )
        complete = worked & was_last & has_join & has_neighbours
        gaps.join.append(where(join, complete))


def _add_first_reads(spans: RunSpans, plan_end_s: np.ndarray, gaps: Gaps) -> None:
    """Add gaps from the end of planning to the first read that it asked for."""
    rows = np.flatnonzero(spans.kept & (spans.kind == READ))
    layer_steps, first = np.unique(
        spans.layer_step[rows],
        return_index=True,
    )
    first_start_s = spans.start_s[rows[first]]
    gap_s = first_start_s - plan_end_s[layer_steps]
    # One that began before the plan had ended was asked for by an earlier plan.
    asked = gap_s >= 0.0
    gaps.read.append(spans.times(gap_s[asked], layer_steps[asked], SSD))


def _extremes(
    spans: RunSpans, work: np.ndarray, lane_kind: LaneKind
) -> tuple[np.ndarray, np.ndarray]:
    """First start and last end of the workers of a kind of lane: float64 [P] each."""
    count = spans.layer_step_count
    # By worker, not by lane: a host accelerator's own copies are its work as well.
    workers = {spans.worker[lane] for lane in spans.lanes_of(lane_kind)}
    worker = spans.worker[spans.lane]
    rows = work & np.isin(worker, list(workers))
    layer_steps = spans.layer_step[rows]

    first_s = np.full(count, _NEVER_S)
    last_s = np.full(count, -_NEVER_S)
    np.minimum.at(first_s, layer_steps, spans.start_s[rows])
    np.maximum.at(last_s, layer_steps, spans.end_s[rows])
    return first_s, last_s


def _add_follow(spans: RunSpans, rows: np.ndarray, gaps: Gaps) -> None:
    """Add gaps between operations of the same layer step and worker."""
    worker = spans.worker[spans.lane[rows]]
    for number, lanes in enumerate(spans.run.workers.values()):
        of_worker = rows[worker == number]
        if len(of_worker) < 2:
            continue
        before = of_worker[:-1]
        after = of_worker[1:]
        same_layer_step = spans.layer_step[after] == spans.layer_step[before]
        between_s = spans.start_s[after] - spans.end_s[before]
        gap_s = np.maximum(between_s, 0.0)

        served = {kind_of(lane) for lane in lanes}
        if H2D not in served:
            # A GPU whose copies another worker makes waits for them between products.
            served.discard(GPU)
        for lane_kind in LANE_KINDS:
            if lane_kind not in served:
                continue
            lanes_after = spans.lane[after]
            on_kind = np.isin(lanes_after, spans.lanes_of(lane_kind))
            chosen = on_kind & same_layer_step
            layer_steps = spans.layer_step[after[chosen]]
            follow = gaps.follow.setdefault(lane_kind.name, [])
            follow.append(spans.times(gap_s[chosen], layer_steps, lane_kind))


def _around_join(spans: RunSpans, count: int) -> np.ndarray:
    """From dense part to planning, and from the start of the join to the next dense
    part: float64 [P]; NaN where one is missing.
    """
    chain = np.isin(spans.kind, (DENSE, PLAN, JOIN))
    rows = np.flatnonzero(chain)
    kinds = spans.kind[rows]
    start_s = spans.start_s[rows]
    end_s = spans.end_s[rows]

    # Row of the dense part of each layer step that another one follows.
    dense = np.flatnonzero(
        (kinds[:-3] == DENSE)
        & (kinds[1:-2] == PLAN)
        & (kinds[2:-1] == JOIN)
        & (kinds[3:] == DENSE)
    )
    plan = dense + 1
    join = dense + 2
    next_dense = dense + 3
    request_s = start_s[plan] - end_s[dense]
    join_s = start_s[next_dense] - start_s[join]

    around_s = np.full(count, np.nan)
    layer_steps = spans.layer_step[rows[dense]]
    around_s[layer_steps] = np.maximum(request_s + join_s, 0.0)
    return around_s
