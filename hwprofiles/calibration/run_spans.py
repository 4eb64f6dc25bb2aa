"""One run's spans as arrays: operations, dense parts and plannings are cut from them.

Spans are ordered by their start. A *layer step* is numbered ``step x layers + layer``,
so that numbers ascend in time; N spans, P layer steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles.calibration.observations import (
    Amounts,
    DenseParts,
    LayerStepTimes,
    Operations,
)
from moesim.hwprofiles.lanes import CONTROL, LANE_KINDS, LaneKind, kind_of
from moesim.traces.timeline.spans import COMPUTE, DENSE, FETCH, PLAN, READ

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moesim.hwprofiles.calibration.observations import DesignedRun

_TINY_S = 1e-12


class RunSpans:
    """The spans of one run, ready to be cut into tables.

    Attributes:
        run: the run.
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
        self._number = number

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

        amounts = self.amounts().where(self.layer_step[chosen])
        expert_keys = self.layer_step * self.run.shape.experts + self.expert
        read_keys = expert_keys[self.kind == READ]
        # The first step may be a prefill, whose operations have other neighbours.
        in_first_step = self.step[chosen] == 0
        count = int(chosen.sum())
        return Operations(
            seconds=self.seconds[chosen],
            sizes=sizes[chosen],
            shares=self._overlap_shares(chosen),
            first=first[chosen],
            fresh=np.isin(expert_keys[chosen], read_keys),
            active=amounts.active,
            copies=amounts.copies,
            odd=self.step[chosen] % 2 == 1,
            shapes=np.full(count, self._shape_number),
            runs=2 * self._number + in_first_step,
        )

    def _overlap_shares(self, chosen: np.ndarray) -> np.ndarray:
        """Share of each operation's time during which lanes of each kind were busy on
        another worker: float64 [operations, C].
        """
        start_s = self.start_s[chosen]
        end_s = self.end_s[chosen]
        length_s = np.maximum(end_s - start_s, _TINY_S)
        own_worker = self.worker[self.lane[chosen]]

        shares = np.zeros((len(start_s), len(LANE_KINDS)))
        for column, lane_kind in enumerate(LANE_KINDS):
            for lane in self.lanes_of(lane_kind):
                rows = (self.lane == lane) & (self.seconds > 0)
                if not rows.any():
                    continue

                # Busy seconds so far, as a function of time: flat between spans.
                starts_s = self.start_s[rows]
                ends_s = self.end_s[rows]
                edges_s = np.column_stack((starts_s, ends_s)).ravel()
                idle_s = np.zeros(len(starts_s))
                increments_s = np.column_stack((idle_s, self.seconds[rows]))
                busy_s = increments_s.ravel().cumsum()
                until_end_s = np.interp(end_s, edges_s, busy_s)
                until_start_s = np.interp(start_s, edges_s, busy_s)
                overlap = (until_end_s - until_start_s) / length_s

                # A lane of the same worker cannot run beside the operation.
                same_worker = own_worker == self.worker[lane]
                shares[:, column] += np.where(same_worker, 0.0, overlap)
        # Two lanes of a kind may overlap the same operation.
        return np.minimum(shares, 1.0)

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
            amounts=self.amounts().where(self.layer_step[rows]),
            lane_kind=CONTROL,
        )

    def amounts(self) -> Amounts:
        """Count active experts, and experts on demand from another memory, by layer
        step [P].
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
        return Amounts(
            active=active.astype(np.float64),
            copies=copies.astype(np.float64),
        )

    def times(
        self,
        seconds: np.ndarray,
        amounts: Amounts,
        lane_kind: LaneKind,
    ) -> LayerStepTimes:
        """Make a table of this run."""
        count = len(seconds)
        has_reads = float((self.kind == READ).any())
        return LayerStepTimes(
            # Clocks of two threads may cross by a microsecond.
            seconds=np.maximum(seconds, 0.0),
            active=amounts.active,
            copies=amounts.copies,
            tiered=np.full(count, has_reads),
            lane_kind=np.full(count, LANE_KINDS.index(lane_kind), np.int64),
        )


def _concatenated(chunks: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Columns of a table that comes in chunks."""
    parts = list(chunks)
    joined = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        joined[name] = np.concatenate(columns)
    return joined
