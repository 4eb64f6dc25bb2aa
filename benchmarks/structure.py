"""Structure, free of noise: a real run replayed with its own measured times.

    python -m benchmarks.structure run1 run2        # finished runs (moesim run --out)
    python -m benchmarks.structure t.parquet --hw hw.toml --steps 6 --pairs

Every operation takes as long as it really took, from the instant at which its worker
was to do it to the instant at which its consequences queued; control's parts as well.
Who does what, in which order, after what and with which decisions is simulated. So what
differs then is the simulator's structure, or the runtime's, and no noise.

With a trace each system, and with ``--pairs`` combinations that show every two policies
of different kinds together, really runs with batches of 1 and 4, all experts in host
memory or a part of them, and a drawn size of cache. It ends with code 1 when a
structure differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.combinations import pairwise, served
from benchmarks.measured_replay import MeasuredReplay
from moesim.base.errors import TraceError
from moesim.evidence.validation.learning import load_run
from moesim.hwprofiles import paths
from moesim.hwprofiles.schema import ProfileError
from moesim.policies.base import PolicyError
from moesim.policies.systems import SYSTEMS
from moesim.reporting.tables import aligned
from moesim.runs.config import RunConfig
from moesim.runs.machine import machine_profile, open_random_store
from moesim.runs.measured import columns_of, run_trace
from moesim.runs.setup import Setup
from moesim.runtime.executor.trace_driven import shape_for
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace
from moesim.traces.timeline.operations import PART_NAMES, REQUEST, OperationTable
from moesim.traces.timeline.spans import DENSE, STATE_NAMES, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from moesim.engine.operations import Operation
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace

MEDIAN_AIM = 0.005
WORST_AIM = 0.02
"""Largest relative differences of step times."""

_PLACE = ("lane", "kind", "step", "layer", "expert")


class MeasuredDurations:
    """How long every operation of a real run kept its worker.

    Operations of the last forward pass need not match: the run may end before a
    prefetch that nobody waits for has begun.

    Attributes:
        unmatched: simulated operations that the run did not have, by kind.
    """

    def __init__(self, operations: OperationTable) -> None:
        """Sort a run's operations."""
        columns = operations.columns()
        picked_s = columns["picked_s"].copy()
        # The run begins with its first dense part, the replay at zero.
        dense = np.flatnonzero(columns["kind"] == DENSE)
        picked_s[dense[:1]] = 0.0
        seconds = columns["ended_s"] - picked_s

        self.unmatched: Counter[str] = Counter()
        self._seconds: dict[tuple[int, ...], deque[float]] = {}
        self._last = int(columns["step"].max())
        places = np.column_stack([columns[name] for name in _PLACE]).tolist()
        # An expert may come twice in one step: in the order in which it did.
        for row in np.argsort(picked_s, kind="stable").tolist():
            place = tuple(places[row])
            self._seconds.setdefault(place, deque()).append(float(seconds[row]))

    def scatter(self, operation: Operation) -> None:
        """Let an operation take as long as it really took; as predicted if it was not
        there.
        """
        place = tuple(getattr(operation, name) for name in _PLACE)
        measured = self._seconds.get(place)
        if measured:
            operation.work_s = measured.popleft()
        elif operation.kind < REQUEST and operation.step < self._last:
            self.unmatched[PART_NAMES[operation.kind]] += 1

    def has(self, operation: Operation) -> bool:
        """Whether the run had this operation, and it has not been simulated yet."""
        return bool(
            self._seconds.get(tuple(getattr(operation, name) for name in _PLACE))
        )

    def left(self) -> Counter[str]:
        """Operations of the run that were not simulated, by kind."""
        left: Counter[str] = Counter()
        for (_, kind, step, *_), rows in self._seconds.items():
            if rows and kind < REQUEST and step < self._last:
                left[PART_NAMES[kind]] += len(rows)
        return left


@dataclass(frozen=True, slots=True)
class Structure:
    """How far the structure of one run differs from its replay's.

    Attributes:
        run: name of the run.
        step_errors: relative difference of each forward pass's seconds, float64 [S].
        accesses: active experts of all layer steps.
        other_states: accesses with another state, by ``measured -> simulated``.
        other_lanes: accesses that another lane computed.
        orders: lane -> first operation that differs, as text; lanes in the same order
            are left out.
        simulated_only: operations that the run did not have, by kind.
        measured_only: operations that were not simulated, by kind.
        shares: share of the workers' time by part: ``waiting`` before operations begin
            (threads that wake, locks), ``counting`` after they end, and operations and
            control's parts by kind.
    """

    run: str
    step_errors: np.ndarray
    accesses: int
    other_states: dict[str, int]
    other_lanes: int
    orders: dict[str, str]
    simulated_only: dict[str, int]
    measured_only: dict[str, int]
    shares: dict[str, float]

    @property
    def median(self) -> float:
        """Median difference of a forward pass."""
        return float(np.median(np.abs(self.step_errors)))

    @property
    def worst(self) -> float:
        """Largest difference of a forward pass."""
        return float(np.abs(self.step_errors).max())

    @property
    def is_equal(self) -> bool:
        """Whether the run meets its aims."""
        return (
            self.median <= MEDIAN_AIM
            and self.worst <= WORST_AIM
            and not self.other_states
            and not self.other_lanes
            and not self.orders
        )

    def findings(self) -> list[str]:
        """What differs, by kind."""
        lines = [
            f"{count} accesses {change}" for change, count in self.other_states.items()
        ]
        if self.other_lanes:
            lines.append(f"{self.other_lanes} accesses on another lane")
        lines += [f"order on {lane}: {text}" for lane, text in self.orders.items()]
        for where, counts in (
            ("simulated only", self.simulated_only),
            ("measured only", self.measured_only),
        ):
            lines += [f"{count} {kind} {where}" for kind, count in counts.items()]
        return lines


def compare_structure(
    name: str, setup: Setup, steps: Iterable[RoutedStep], measured: Timeline
) -> Structure:
    """Replay a real run with its measured times and compare.

    Args:
        name: of the run.
        setup: what it was run with.
        steps: its routing.
        measured: its tables, those of its operations included.

    Raises:
        ProfileError: of a run with CUDA, whose lanes keep the device's time.
    """
    if setup.profile.accelerator == "cuda":
        raise ProfileError(
            f"{name}: expected a run on the host accelerator, found CUDA, whose lanes"
            " keep the device's time; compare times instead (moesim validate)"
        )
    assert measured.operations is not None
    durations = MeasuredDurations(measured.operations)
    simulated = Timeline(setup.profile.lanes)
    planner = setup.planner()
    # What lanes cost each other is in the measured times.
    costs = {
        path: number
        for path, number in setup.profile.numbers.items()
        if not paths.below(path, paths.CONTENTION)
    }
    alone = replace(setup.profile, numbers=costs)
    MeasuredReplay(alone, planner, simulated, durations).run(steps)

    real = _joined(measured.access_chunks())
    virtual = _joined(simulated.access_chunks())
    states, lanes = _other_accesses(real, virtual)
    return Structure(
        run=name,
        step_errors=_step_errors(measured, simulated),
        accesses=len(real["step"]),
        other_states=states,
        other_lanes=lanes,
        orders=_other_orders(measured, simulated),
        simulated_only=dict(durations.unmatched),
        measured_only=dict(durations.left()),
        shares=_shares(measured.operations),
    )


def _joined(chunks: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    parts = list(chunks)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _step_errors(measured: Timeline, simulated: Timeline) -> np.ndarray:
    """Relative difference of each forward pass, from the end of the one before to its
    own.
    """
    real_s = np.diff(_joined(measured.step_chunks())["end_s"], prepend=0.0)
    virtual_s = np.diff(_joined(simulated.step_chunks())["end_s"], prepend=0.0)
    return np.asarray(virtual_s / real_s - 1.0)


def _other_accesses(
    real: dict[str, np.ndarray], virtual: dict[str, np.ndarray]
) -> tuple[dict[str, int], int]:
    """Count accesses whose states differ, by change, and whose lanes differ."""
    names = ("step", "layer", "expert")
    same = len(real["step"]) == len(virtual["step"])
    if not same or any((real[name] != virtual[name]).any() for name in names):
        return {
            "of other experts": abs(len(real["step"]) - len(virtual["step"])) + 1
        }, 0
    changes: Counter[str] = Counter()
    for row in np.flatnonzero(real["state"] != virtual["state"]).tolist():
        before = STATE_NAMES[real["state"][row]]
        after = STATE_NAMES[virtual["state"][row]]
        changes[f"{before} -> {after}"] += 1
    return dict(changes), int((real["lane"] != virtual["lane"]).sum())


def _other_orders(measured: Timeline, simulated: Timeline) -> dict[str, str]:
    """Find the first operation of each lane that differs."""
    assert measured.operations is not None
    columns = measured.operations.columns()
    last = int(columns["step"].max())
    end_s = float(_joined(measured.step_chunks())["end_s"][-1])
    # What ended after the last forward pass, the simulator does not show.
    ended = (columns["kind"] < REQUEST) & (columns["ended_s"] <= end_s)
    real = _by_lane(
        {name: column[ended] for name, column in columns.items()}, "picked_s", last
    )
    virtual = _by_lane(_joined(simulated.chunks()), "start_s", last)
    orders = {}
    for lane, name in enumerate(measured.lanes):
        first = real.get(lane, [])
        second = virtual.get(lane, [])
        if first == second:
            continue
        at = next(
            (
                i
                for i, pair in enumerate(zip(first, second, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(first), len(second)),
        )
        orders[name] = f"{_words(first, at)} measured, {_words(second, at)} simulated"
    return orders


def _by_lane(
    columns: dict[str, np.ndarray], start: str, last: int
) -> dict[int, list[tuple[int, ...]]]:
    """Kind, step, layer and expert of every operation before the last forward pass, in
    order, by lane.
    """
    order = np.argsort(columns[start], kind="stable")
    order = order[columns["step"][order] < last]
    rows = np.column_stack([columns[name][order] for name in _PLACE]).tolist()
    by_lane: dict[int, list[tuple[int, ...]]] = {}
    for lane, *place in rows:
        by_lane.setdefault(lane, []).append(tuple(place))
    return by_lane


def _words(operations: Sequence[tuple[int, ...]], at: int) -> str:
    if at >= len(operations):
        return "nothing"
    kind, step, layer, expert = operations[at]
    return f"{PART_NAMES[kind]} of step {step}, layer {layer}, expert {expert}"


def _shares(operations: OperationTable) -> dict[str, float]:
    """Shares of the workers' time by part."""
    columns = operations.columns()
    kind = columns["kind"]
    spans = kind < REQUEST
    whole_s = columns["ended_s"] - columns["picked_s"]
    seconds = {
        "waiting": (columns["start_s"] - columns["picked_s"])[spans].sum(),
        "counting": (columns["ended_s"] - columns["end_s"])[spans].sum(),
    }
    for number, name in enumerate(PART_NAMES):
        rows = kind == number
        inside_s = (
            (columns["end_s"] - columns["start_s"]) if number < REQUEST else whole_s
        )
        if rows.any():
            seconds[name] = inside_s[rows].sum()
    total_s = whole_s.sum()
    return {name: float(part_s / total_s) for name, part_s in seconds.items()}


_LINES = 10
"""Most findings that are printed of one run."""
_SMALL = 0.01
"""Shares of the workers' time below this are summed up."""
HEADS = ("run", "steps", "median", "worst", "states", "lanes", "orders", "verdict")


def structure_text(results: Sequence[Structure]) -> str:
    """One row per run, what differs by kind, and where the workers' time went."""
    rows = [HEADS, *(_row(result) for result in results)]
    lines = aligned(rows)
    for result in results:
        findings = result.findings()
        lines += [f"{result.run}: {finding}" for finding in findings[:_LINES]]
        if len(findings) > _LINES:
            lines.append(f"{result.run}: and {len(findings) - _LINES} more")
    lines += ["", *(_shares_line(result) for result in results)]
    equal = sum(result.is_equal for result in results)
    lines.append(
        f"{equal} of {len(results)} runs have the simulator's structure (steps within"
        f" {MEDIAN_AIM:.1%} in the median and {WORST_AIM:.0%} at worst, all access"
        " states, lanes and orders equal)"
    )
    return "\n".join(lines)


def _row(result: Structure) -> tuple[str, ...]:
    states = sum(result.other_states.values())
    return (
        result.run,
        str(len(result.step_errors)),
        f"{result.median:.2%}",
        f"{result.worst:.2%}",
        f"{result.accesses - states:,}/{result.accesses:,}",
        "equal" if not result.other_lanes else str(result.other_lanes),
        "equal" if not result.orders else ", ".join(result.orders),
        "equal" if result.is_equal else "DIFFERENT",
    )


def _shares_line(result: Structure) -> str:
    """Name the parts of the workers' time, the largest first."""
    ranked = sorted(result.shares.items(), key=lambda item: -item[1])
    parts = [f"{name} {share:.0%}" for name, share in ranked if share >= _SMALL]
    return f"{result.run}: workers' time: {', '.join(parts)}"


# -- real runs of a trace, every system and pair of policies -----------------------

BATCHES = (1, 4)
_DISTINCT = 64


class Cells:
    """Runs cells of one trace and compares their structures.

    Args:
        trace: routing.
        profile: of this machine.
        spec: sizes of the experts.
        store: the experts.
        steps: forward passes of each run.
    """

    def __init__(
        self,
        trace: Trace,
        profile: HardwareProfile,
        spec: str | None,
        store: ExpertStore,
        steps: int,
    ) -> None:
        self._trace = trace
        self._profile = profile
        self._spec = spec
        self._store = store
        self._steps = steps
        self._draws = np.random.default_rng(1)

    def structure(self, name: str, batch: int, *, reads: bool) -> Structure:
        """Run a system or a combination, and compare.

        Raises:
            PolicyError, TraceError: it cannot run here.
        """
        trace = self._trace
        shape = shape_for(trace.shape, self._spec)
        host_bytes = None
        if reads:
            experts = shape.experts * shape.layers
            host_bytes = max(40, experts // 2) * shape.max_expert_bytes
        assignment, *parts = name.split("+")
        kinds = ("cache", "prefetch", "routing")
        options: dict[str, Any] = dict(zip(kinds, parts, strict=False))
        options |= {
            "batch": batch,
            "steps": self._steps,
            "slots_per_layer": int(self._draws.integers(0, shape.experts)),
            "host_memory_bytes": host_bytes,
        }
        run = run_trace(
            trace,
            assignment,
            shape=self._spec,
            hw=self._profile,
            store=self._store,
            dtype="float32",
            **options,
        )
        config = RunConfig.of(trace, assignment, **options)
        setup = Setup.of(config, trace, profile=self._profile, shape=run.shape)
        walk = compose(
            trace,
            batch=batch,
            steps=self._steps,
            columns=columns_of(trace, setup.policies()),
        )
        return compare_structure(name, setup, walk, run.timeline)


def names_of(trace: Trace, systems: list[str], *, pairs: bool) -> Iterator[str]:
    """Systems, and combinations of policies."""
    yield from systems or SYSTEMS
    if pairs:
        yield from pairwise(served(trace.columns)[0])


def of_folders(folders: Sequence[Path]) -> int:
    """Print how far the structure of finished runs differs from their replays'."""
    results = [compare_structure(*load_run(folder)) for folder in folders]
    print(structure_text(results))
    return int(not all(result.is_equal for result in results))


def main() -> int:
    """Print one row per cell that differs, and how many do not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path, nargs="+", help="a trace, or runs")
    parser.add_argument("--hw", default=None, help="profile of this machine")
    parser.add_argument("--shape", default=None, help="sizes of the experts")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--systems", nargs="*", default=[], help="some, not all")
    parser.add_argument("--minutes", type=float, default=1e9, help="ends in good time")
    arguments = parser.parse_args()
    if all(source.is_dir() for source in arguments.sources):
        return of_folders(arguments.sources)
    (source,) = arguments.sources
    trace = open_trace(source)
    profile = machine_profile(arguments.hw)
    shape = shape_for(trace.shape, arguments.shape)
    until_s = time.monotonic() + 60.0 * arguments.minutes

    refused: Counter[str] = Counter()
    structures: list[Structure] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_random_store(shape, Path(folder), "float32", _DISTINCT) as store,
    ):
        cells = Cells(trace, profile, arguments.shape, store, arguments.steps)
        for name in names_of(trace, arguments.systems, pairs=arguments.pairs):
            for batch in BATCHES:
                for reads in (False, True):
                    if time.monotonic() > until_s:
                        break
                    try:
                        structure = cells.structure(name, batch, reads=reads)
                    except (PolicyError, TraceError) as error:
                        refused[str(error)] += 1
                        continue
                    structures.append(structure)
                    if not structure.is_equal:
                        place = f"batch {batch}{', reads' * reads}"
                        worst = f"worst step {structure.worst:.2%}"
                        print(name, place, worst, *structure.findings(), sep="; ")
    _sum_up(structures, refused)
    return int(not all(structure.is_equal for structure in structures))


def _sum_up(structures: list[Structure], refused: Counter[str]) -> None:
    errors = np.abs(np.concatenate([one.step_errors for one in structures]))
    accesses = sum(one.accesses for one in structures)
    others = sum(sum(one.other_states.values()) for one in structures)
    equal = sum(one.is_equal for one in structures)
    print(f"{equal} of {len(structures)} runs equal, {len(errors)} steps")
    print(
        f"step times: median {np.median(errors):.2g}, 99 %"
        f" {np.quantile(errors, 0.99):.2g}, worst {errors.max():.2g}"
    )
    print(f"access states: {accesses - others:,} of {accesses:,} equal")
    shares: Counter[str] = Counter()
    for one in structures:
        shares.update(one.shares)
    for part, share in shares.most_common():
        print(f"  {part}: {share / len(structures):.1%} of the workers' time")
    for reason, count in refused.most_common():
        print(f"refused {count}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
