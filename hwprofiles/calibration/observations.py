"""Tables of what is learned from a run: its operations, and the gaps between them.

A timeline is a list of spans. To learn costs from it, each operation must be seen with
the tokens or bytes it had and with the share of its time during which other workers
were busy; and the time that belongs to no operation (waking a thread, handing out work,
joining) must be cut out of the gaps between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

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
        workers: worker -> its lanes; the same in all runs.
        kept: bool [steps], which forward passes count; all when None.
    """

    timeline: Timeline
    shape: ModelShape
    assignment: str
    context_tokens: Sequence[int]
    workers: Mapping[str, tuple[str, ...]]
    kept: np.ndarray | None = None


def units_of(table: pd.DataFrame, blocks: int = 1) -> Units:
    """Return the units that are resampled as a whole, of a table with ``run`` and
    ``step``.
    """
    return Units(table["run"].to_numpy(), table["step"].to_numpy(), blocks)


class Operations(NamedTuple):
    """Operations of one kind of lane. N operations, C kinds of lanes.

    Attributes:
        table: a row for each, with the columns of `Spans.table`; ``size``, tokens of a
            product or bytes of a copy; ``first`` product of its lane in a layer step;
            ``late``, a product that waited for its expert while its lane began with one
            that was there: its worker may have been woken for this one; ``fresh``, the
            expert was read from the SSD in the same layer step; ``active`` experts of
            its layer step, and its ``copies`` from one memory to another.
        states: float64 [N, 2**C], share of the operation's time by which kinds of lanes
            (bits in the order of `LANE_KINDS`) worked elsewhere.
        expected: the same of a window as long as such operations take usually, by what
            runs when it begins.
    """

    table: pd.DataFrame
    states: np.ndarray
    expected: np.ndarray


class Gaps(NamedTuple):
    """Seconds between operations, as tables of `Spans.times`.

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

    follow: dict[str, pd.DataFrame]
    first: pd.DataFrame
    read: pd.DataFrame
    join: pd.DataFrame


_TINY_S = 1e-12
_TOGETHER = 0.1
_LEAST_USUAL = 8
"""Operations of a size whose mean length says how long such operations usually are."""
_PLACE = ["run", "step", "layer", "expert"]


class Spans:
    """The spans of all runs, as if one had followed the other.

    Attributes:
        runs: as given.
        shapes: of their models, each once.
        table: by start: the columns of timelines, and
            ``seconds``; ``tokens`` of products; ``lane_kind``, an index into
            `LANE_KINDS`; ``worker``, ``run`` and ``shape`` by number; ``layer_step``, a
            number of its own in every run; ``kept``, whether its forward pass counts.

    Args:
        runs: at least one.
    """

    def __init__(self, runs: Sequence[DesignedRun]) -> None:
        self.runs = runs
        self.shapes = list(dict.fromkeys(run.shape for run in runs))
        tables = []
        end_s, layer_steps = 0.0, 0
        for number, run in enumerate(runs):
            spans = _table(run.timeline.chunks())
            spans["seconds"] = spans["end_s"] - spans["start_s"]
            spans[["start_s", "end_s"]] += end_s
            spans["layer_step"] = (
                layer_steps + spans["step"] * run.shape.layers + spans["layer"]
            )
            spans["kept"] = True if run.kept is None else run.kept[spans["step"]]
            lanes = run.timeline.lanes
            lane_kinds = [LANE_KINDS.index(kind_of(lane)) for lane in lanes]
            spans["lane_kind"] = np.array(lane_kinds)[spans["lane"]]
            # Every lane has exactly one worker; the profile has seen to that.
            workers = [
                next(n for n, of in enumerate(run.workers.values()) if lane in of)
                for lane in lanes
            ]
            spans["worker"] = np.array(workers)[spans["lane"]]
            spans["run"] = number
            spans["shape"] = self.shapes.index(run.shape)
            tables.append(spans)
            end_s = 1.0 + spans["end_s"].max()
            layer_steps = 1 + spans["layer_step"].max()
        # Spans are recorded when they end; stable, so that ties keep that order.
        table = pd.concat(tables).sort_values(
            "start_s", kind="stable", ignore_index=True
        )
        # Spans do not store tokens; the table of accesses does, by expert.
        accesses = self._of_runs("access_chunks")[[*_PLACE, "tokens"]]
        self.table = table.merge(accesses, on=_PLACE, how="left")

    def _of_runs(self, chunks: str) -> pd.DataFrame:
        """A table of all runs, with their numbers."""
        tables = (
            _table(getattr(run.timeline, chunks)()).assign(run=number)
            for number, run in enumerate(self.runs)
        )
        return pd.concat(tables, ignore_index=True)

    def kinds(self, *kinds: int) -> pd.Series:
        """Tell which spans are of some kinds, bool [N]."""
        return self.table["kind"].isin(kinds)

    def on(self, lane_kind: LaneKind) -> pd.Series:
        """Tell which spans are on lanes of a kind, bool [N]."""
        return self.table["lane_kind"] == LANE_KINDS.index(lane_kind)

    def operations(
        self, lane_kind: LaneKind, span_kinds: tuple[int, ...]
    ) -> Operations:
        """Cut out operations of some kinds of spans on one kind of lane."""
        table = self.table
        ops = table[table["kept"] & self.kinds(*span_kinds) & self.on(lane_kind)]
        size = "tokens" if span_kinds == (COMPUTE,) else "bytes"

        # Spans are ordered by start, so the first row of a layer step began first.
        first = ~ops["layer_step"].duplicated()
        brought = self._have(ops, self.kinds(FETCH, READ))
        prompt = ops["layer_step"][first & ~brought]
        ops = ops.assign(
            size=ops[size].astype(np.int64),
            first=first,
            late=brought & ops["layer_step"].isin(prompt),
            fresh=self._have(ops, self.kinds(READ)),
        )
        ops = ops.join(self.amounts[["active", "copies"]], on="layer_step")
        return Operations(
            ops.reset_index(drop=True),
            states=self._overlap_states(ops),
            expected=self._expected_states(ops, _usual_seconds(ops)),
        )

    def _have(self, ops: pd.DataFrame, chosen: pd.Series) -> np.ndarray:
        """Tell of which operations the expert is that of chosen spans of the same
        layer step, bool [N].
        """
        experts = 1 + self.table["expert"].max()
        keys, of_ops = (
            of["layer_step"] * experts + of["expert"]
            for of in (self.table[chosen], ops)
        )
        return of_ops.isin(keys).to_numpy()

    def _overlap_states(self, ops: pd.DataFrame) -> np.ndarray:
        """Share of each operation by which kinds of lanes were busy on other workers:
        float64 [N, 2**C], bit c of a state for kind c of `LANE_KINDS`.
        """
        start_s, end_s, workers = (
            ops[name].to_numpy() for name in ("start_s", "end_s", "worker")
        )
        states = np.zeros((len(ops), 1 << len(LANE_KINDS)))
        length_s = np.maximum(end_s - start_s, _TINY_S)
        for worker in np.unique(workers):
            rows = workers == worker
            times_s, masks = self._busy_masks(worker)
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

    def _expected_states(self, ops: pd.DataFrame, usual_s: np.ndarray) -> np.ndarray:
        """The same of windows of the usual length, by what is running when they begin.

        What begins later is left out: it may have begun because the operation ended.
        """
        start_s = ops["start_s"].to_numpy()
        # Who is woken together begins within a tenth of an operation.
        begun_s = start_s + _TOGETHER * usual_s
        share = np.zeros((len(ops), len(LANE_KINDS)))
        lanes: Iterable[Any] = self._busy.groupby(["lane", "worker", "lane_kind"])
        for (_, worker, column), spans in lanes:
            # Spans of a lane follow each other, so the last one begun may run.
            running = np.searchsorted(spans["start_s"], begun_s, "right") - 1
            end_s = spans["end_s"].to_numpy()[np.maximum(running, 0)]
            left = np.clip((end_s - start_s) / usual_s, 0.0, 1.0)
            beside = (running >= 0) & (ops["worker"].to_numpy() != worker)
            share[:, column] = np.maximum(share[:, column], left * beside)

        # All begin with the window, so each state ends with the first that leaves it.
        states = np.zeros((len(ops), 1 << len(LANE_KINDS)))
        for state in range(states.shape[1]):
            busy = state >> np.arange(len(LANE_KINDS)) & 1 == 1
            first_end = share[:, busy].min(axis=1, initial=1.0)
            last_other = share[:, ~busy].max(axis=1, initial=0.0)
            states[:, state] = np.maximum(first_end - last_other, 0.0)
        return states

    @cached_property
    def _busy(self) -> pd.DataFrame:
        """Spans that may slow others."""
        # Control plans while the lanes wait, so it slows none of them.
        return self.table[(self.table["seconds"] > 0) & ~self.on(CONTROL)]

    def _busy_masks(self, worker: int) -> tuple[np.ndarray, np.ndarray]:
        """Times at which anything begins or ends, float64 [E], and which kinds of lanes
        of other workers were busy until then, int64 [E].
        """
        others = self._busy[self._busy["worker"] != worker]
        times_s = np.unique(np.r_[0.0, others["start_s"], others["end_s"]])
        masks = np.zeros(len(times_s), np.int64)
        by_kind: Iterable[Any] = others.groupby("lane_kind")
        for column, spans in by_kind:
            # What begins at one time is busy until the next.
            running = np.zeros(len(times_s) + 1, np.int64)
            np.add.at(running, np.searchsorted(times_s, spans["start_s"]) + 1, 1)
            np.add.at(running, np.searchsorted(times_s, spans["end_s"]) + 1, -1)
            masks |= (np.cumsum(running)[:-1] > 0).astype(np.int64) << column
        return times_s, masks

    def dense_parts(self) -> pd.DataFrame:
        """Cut out dense parts and heads (layer -1), with ``after_read``, whether the
        layer step before them read from the SSD, and their step's ``tokens`` and
        ``sequences``. What lies between two steps counts as head.
        """
        dense = self.table[self.kinds(DENSE)].drop(columns="tokens")
        # The last head has no step behind it, and keeps its own length.
        following = dense.shift(-1)
        heads = (dense["layer"] < 0) & (following["step"] == dense["step"] + 1)
        beyond_s = (following["start_s"] - dense["end_s"]).where(heads, 0.0)
        with_read = self.table["layer_step"][self.kinds(READ)]
        after_read = (dense["layer"] > 0) & (dense["layer_step"] - 1).isin(with_read)
        parts = dense.assign(seconds=dense["seconds"] + beyond_s, after_read=after_read)
        steps = self._of_runs("step_chunks")[["run", "step", "tokens", "sequences"]]
        return parts[parts["kept"]].merge(steps, on=["run", "step"], how="left")

    def planning(self) -> pd.DataFrame:
        """Cut out each planning."""
        plans = self.table[self.table["kept"] & self.kinds(PLAN)]
        return self.times(plans.set_index("layer_step")["seconds"], CONTROL)

    @cached_property
    def amounts(self) -> pd.DataFrame:
        """By layer step: its ``run`` and ``step``; ``active`` experts, and ``copies``
        on demand from another memory; ``shared``, 1 where CPU and GPU share them;
        ``tiered``, 1 where an SSD lies behind host memory.
        """
        # Heads belong to no layer.
        layers = self.table[self.table["layer"] >= 0].groupby("layer_step")
        table = layers[["run", "step"]].first()
        products = self.table[self.kinds(COMPUTE)].groupby("layer_step")
        on_demand = self.table[self.kinds(FETCH, READ)].groupby("layer_step")
        counts = {
            "active": products.size(),
            # An expert that is read and then copied counts once.
            "copies": on_demand["expert"].nunique(),
            "shared": products["lane_kind"].nunique() == len(COMPUTE_KINDS),
            "tiered": table["run"].isin(self.table["run"][self.kinds(READ)]),
        }
        amounts = pd.DataFrame(counts, table.index).fillna(0).astype(np.float64)
        return table.join(amounts)

    def times(self, seconds: pd.Series, lane_kind: LaneKind) -> pd.DataFrame:
        """Make a table of seconds that pass once per layer step, beside how much there
        was to do.

        Args:
            seconds: by layer step; those without a number drop out.
            lane_kind: that it concerns.

        Returns:
            ``seconds``; the columns of `amounts`; ``lane_kind``, an index into
            `LANE_KINDS`.
        """
        seconds = seconds.dropna()
        return self.amounts.loc[seconds.index].assign(
            # Clocks of two threads may cross by a microsecond.
            seconds=np.maximum(seconds.to_numpy(), 0.0),
            lane_kind=LANE_KINDS.index(lane_kind),
        )

    def gaps(self) -> Gaps:
        """Cut out what lies between operations."""
        table = self.table
        # What waits for the SSD shows nothing about handing work out.
        with_read = table["layer_step"][self.kinds(READ)].unique()
        # Prefetches are left out: nothing of the layer step waits for them.
        work = table[table["kept"] & self.kinds(COMPUTE, FETCH)]
        plan_end_s, join_start_s = (
            table[self.kinds(kind)].set_index("layer_step")[time]
            for kind, time in ((PLAN, "end_s"), (JOIN, "start_s"))
        )
        first, last_s = [], {}
        for lane_kind in COMPUTE_KINDS:
            # By worker, not by lane: a host accelerator's own copies are its work too.
            workers = table["worker"][self.on(lane_kind)].unique()
            of_kind = work[work["worker"].isin(workers)].groupby("layer_step")
            last_s[lane_kind] = of_kind["end_s"].max()
            begin_s = self.times(of_kind["start_s"].min() - plan_end_s, lane_kind)
            first.append(begin_s[~begin_s.index.isin(with_read)])
        # The join waits for the last lane only; the other one's end shows nothing.
        latest_s = pd.concat(last_s, axis=1).max(axis=1)
        around_s = self._around_join()
        join = []
        for lane_kind, end_s in last_s.items():
            was_last = end_s == latest_s[end_s.index]
            noticed_s = (join_start_s - end_s[was_last]).clip(lower=0.0)
            join.append(self.times(noticed_s + around_s, lane_kind))

        reads = table[table["kept"] & self.kinds(READ)].groupby("layer_step")
        read_s = reads["start_s"].min() - plan_end_s
        return Gaps(
            self._follow(work[~work["layer_step"].isin(with_read)]),
            pd.concat(first),
            # One that began before the plan had ended was asked for by an earlier plan.
            self.times(read_s[read_s >= 0.0], SSD),
            pd.concat(join),
        )

    def _follow(self, work: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """Gaps between operations of the same layer step and worker."""
        before_s = work.groupby(["worker", "layer_step"])["end_s"].shift()
        gap_s = (work["start_s"] - before_s).dropna()
        after = work.loc[gap_s.index]
        # A GPU whose copies another worker makes waits for them between products.
        without_copies = [
            number
            for number, lanes in enumerate(self.runs[0].workers.values())
            if H2D not in map(kind_of, lanes)
        ]
        waits = after["worker"].isin(without_copies) & self.on(GPU)[after.index]
        follow = {}
        for lane_kind in LANE_KINDS:
            chosen = after[self.on(lane_kind)[after.index] & ~waits]
            if len(chosen):
                between_s = gap_s[chosen.index].set_axis(chosen["layer_step"])
                follow[lane_kind.name] = self.times(between_s, lane_kind)
        return follow

    def _around_join(self) -> pd.Series:
        """Seconds from dense part to planning, and from the start of the join to the
        next dense part, by layer step; of those that have all four.
        """
        chain = self.table[self.kinds(DENSE, PLAN, JOIN)]
        plan, join, following = (chain.shift(-places) for places in (1, 2, 3))
        complete = (
            (chain["kind"] == DENSE)
            & (plan["kind"] == PLAN)
            & (join["kind"] == JOIN)
            & (following["kind"] == DENSE)
        )
        request_s = plan["start_s"] - chain["end_s"]
        around_s = (request_s + following["start_s"] - join["start_s"])[complete]
        return around_s.set_axis(chain["layer_step"][complete]).clip(lower=0.0)


def _table(chunks: Iterable[Mapping[str, np.ndarray]]) -> pd.DataFrame:
    """A table that comes in chunks; narrow integers of the file are wide here."""
    table = pd.concat(map(pd.DataFrame, chunks), ignore_index=True)
    return table.astype(dict.fromkeys(table.select_dtypes("integer"), np.int64))


def _usual_seconds(ops: pd.DataFrame) -> np.ndarray:
    """Geometric mean of operations of about the same size in a run, float64 [N]."""
    logs = np.log(ops["seconds"].clip(lower=_TINY_S))
    doublings = np.round(np.log2(ops["size"].clip(lower=1)))
    alike = logs.groupby([ops["run"], doublings])
    # Of a few, the mean would be mostly the operation's own.
    of_run = logs.groupby(ops["run"]).transform("mean")
    enough = alike.transform("size") >= _LEAST_USUAL
    return np.asarray(np.exp(alike.transform("mean").where(enough, of_run)))
