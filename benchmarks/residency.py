"""Compares what a real engine's cache held with what a replayed one holds, access by
access.

The engine recorded, for every routing, whether it met a resident expert. The trace is
replayed through the planner with one global pool of bytes, no prefetch and copies that
land at once, so that only the cache decides; then every active expert of every layer
step is looked up in both.

``python -m benchmarks.residency trace.parquet dump.csv --cache-size 3000MiB`` prints
it.

Source of the columns: BigMoeOnEdge docs/telemetry.md, "Route trace".
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.errors import TraceError
from moesim.base.units import format_bytes, parse_bytes
from moesim.engine.at_once import carry_out
from moesim.engine.planner import Planner
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import default_profile
from moesim.policies.cache.lru import LRU
from moesim.policies.names import RESIDENT
from moesim.policies.sizes import GLOBAL, CacheSize, MemoryPlan
from moesim.policies.systems import compose
from moesim.traces.format.batch import compose as compose_steps
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

# What the engine recorded of a routing.
MISS = 0
HIT = 1
PREFETCHED = 2

_COLUMNS = ("expert", "residency", "dropped")


class RankLRU(LRU):
    """LRU that orders the experts of one layer step as the engine touches them: token
    by token, best expert last.

    Ties within a layer step are real, and `LRU` breaks them by id. An engine that walks
    its routing in order gives the last one it touched the latest stamp.
    """

    def start(self, context: RunContext) -> None:
        """Prepare the stamps of one layer step."""
        super().start(context)
        self._stamps: dict[int, float] = {}
        self.routing = np.empty((0, 0), np.uint16)

    def accessed(self, work: Work) -> None:
        """Stamp each active expert by its last position in the routing of this layer
        step.
        """
        super().accessed(work)
        touched = self.routing.reshape(-1).astype(np.int64)
        count = len(touched)
        # Between the stamps of two layer steps, which are whole numbers.
        fraction = np.arange(1, count + 1) / (count + 1)
        keys = touched + work.first
        # Of several positions of an expert the last one is kept.
        score = np.asarray(self.score)
        score[keys] = self.now - 1 + fraction
        scores = score[keys].tolist()
        self._stamps = dict(zip(keys.tolist(), scores, strict=True))

    def admitted(self, key: int) -> None:
        """Stamp what enters with its own position, so that entering does not make it
        the most recent.
        """
        self.score[key] = self._stamps.get(key, self.now)


@dataclass(slots=True)
class AccessCounts:
    """Counts of accesses (active experts of layer steps) in one phase.

    Attributes:
        accesses: looked up in both.
        agree: found resident by both or by neither.
        only_engine: resident in the engine only.
        only_replay: resident in the replay only.
        prefetched: of `only_engine`, those that a prefetch of the engine had brought.
        engine_hits: resident in the engine.
        replay_hits: resident in the replay.
        dropped: left out, because the engine never computed them.
    """

    accesses: int = 0
    agree: int = 0
    only_engine: int = 0
    only_replay: int = 0
    prefetched: int = 0
    engine_hits: int = 0
    replay_hits: int = 0
    dropped: int = 0

    @property
    def share(self) -> float:
        """Agreeing accesses over accesses; 1 where there are none."""
        return self.agree / self.accesses if self.accesses else 1.0


@dataclass(slots=True)
class ResidencyCheck:
    """The comparison: counts by phase, and the first access on which engine and replay
    differ.
    """

    cache: str
    cache_bytes: int
    phases: dict[str, AccessCounts] = field(
        default_factory=lambda: {phase.label: AccessCounts() for phase in Phase}
    )
    first: str | None = None

    @property
    def engine_hits(self) -> int:
        """Hits that the engine recorded, all phases."""
        return sum(counts.engine_hits for counts in self.phases.values())

    @property
    def replay_hits(self) -> int:
        """Hits of the replay, all phases."""
        return sum(counts.replay_hits for counts in self.phases.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain values, shares included."""
        phases = {
            name: {**asdict(counts), "share": counts.share}
            for name, counts in self.phases.items()
        }
        return {
            "cache": self.cache,
            "cache_bytes": self.cache_bytes,
            "phases": phases,
            "first": self.first,
        }


def check_residency(
    trace: Trace | Path | str,
    dump: Path,
    *,
    cache_bytes: int | None,
    cache: str = "lru",
) -> ResidencyCheck:
    """Replay a trace through a cache of so many bytes and compare every access with
    what its engine recorded.

    Args:
        trace: imported from `dump`.
        dump: a route_trace v1 file.
        cache_bytes: the engine's expert cache; None takes the least size at which as
            many accesses hit as in the engine, which takes a dozen replays.
        cache: a cache policy; plain ``lru`` orders the experts of a layer step as the
            engine touches them.

    Raises:
        TraceError: the dump has no residency, or belongs to another trace.
        PolicyError: an unknown cache policy, or one that needs the future.
    """
    opened = open_trace(trace) if isinstance(trace, Path | str) else trace
    record = _record(dump)

    def replayed(cache_bytes: int) -> ResidencyCheck:
        sequences = _recorded_sequences(opened, dump, record)
        return _replayed(opened, cache_bytes, cache, sequences)

    return replayed(cache_bytes or _engine_size(opened.shape, replayed))


def _engine_size(shape: ModelShape, replayed: Callable[[int], ResidencyCheck]) -> int:
    """The least size at which as many accesses hit as in the engine, by bisection: hits
    of a replay grow with its cache.
    """
    expert_bytes = shape.max_expert_bytes
    low = 1
    high = shape.layers * shape.experts
    while low < high:
        middle = (low + high) // 2
        phases = replayed(middle * expert_bytes).phases
        missing = sum(each.engine_hits - each.replay_hits for each in phases.values())
        if missing > 0:
            low = middle + 1
        else:
            high = middle
    return low * expert_bytes


def _replayed(
    opened: Trace, cache_bytes: int, cache: str, records: Iterator[_SequenceRecord]
) -> ResidencyCheck:
    """Replay the trace through a cache of one size, beside the record."""
    shape = opened.shape

    # Every active expert is fetched on demand, so the cache sees every access.
    system = compose("on-demand", cache=cache, prefetch="none")
    policies = system.build(gpus=1, host_cache=None)
    if type(policies.caches[0]) is LRU:
        policies.caches = [RankLRU()]
    size = CacheSize.for_model(shape, scope=GLOBAL, total_bytes=cache_bytes)
    # Costs decide nothing here. Staging holds a whole layer: an engine computes what
    # does not fit its cache as well.
    costs = Costs(default_profile(), shape)
    memory = MemoryPlan(size, staging=shape.experts)
    planner = Planner(shape, costs, policies, memory)
    columns = dict.fromkeys(
        column for policy in policies.all() for column in policy.needs
    )

    result = ResidencyCheck(cache, cache_bytes)
    current = -1
    record = _SequenceRecord.empty()
    for step in compose_steps(opened, columns=tuple(columns)):
        # Batches of one: each is the next sequence.
        if step.batch != current:
            current = step.batch
            record = next(records)
        _compare(result, planner, step, record)
    return result


@dataclass(slots=True)
class _SequenceRecord:
    """What the engine recorded of one sequence: R rows of the trace, K routings each.

    Attributes:
        prompt: rows of the prompt.
        layer: int16 [R].
        experts, residency, dropped: [R, K].
        layers: MoE layers.
        decoded: decode steps compared so far.
    """

    prompt: int
    layer: np.ndarray
    experts: np.ndarray
    residency: np.ndarray
    dropped: np.ndarray
    layers: int
    decoded: int = 0

    @classmethod
    def empty(cls) -> _SequenceRecord:
        no_routings = np.empty((0, 1), np.int8)
        return cls(
            prompt=0,
            layer=np.empty(0, np.int16),
            experts=no_routings,
            residency=no_routings,
            dropped=no_routings,
            layers=1,
        )

    def states(self, step: RoutedStep, layer: int) -> dict[int, tuple[int, bool]]:
        """Expert -> (residency, dropped) of one layer step.

        The first routing of an expert counts, as later ones meet what it brought; an
        expert is dropped only if all of its routings are.
        """
        if step.phase is Phase.PREFILL:
            rows = np.flatnonzero(self.layer[: self.prompt] == layer)
        else:
            rows = np.array([self.prompt + self.decoded * self.layers + layer])

        states: dict[int, tuple[int, bool]] = {}
        for expert, residency, dropped in zip(
            self.experts[rows].reshape(-1).tolist(),
            self.residency[rows].reshape(-1).tolist(),
            self.dropped[rows].reshape(-1).tolist(),
            strict=True,
        ):
            earlier = states.get(expert)
            if earlier is None:
                states[expert] = (residency, bool(dropped))
            else:
                states[expert] = (earlier[0], bool(dropped) and earlier[1])
        return states


def _compare(
    result: ResidencyCheck,
    planner: Planner,
    step: RoutedStep,
    record: _SequenceRecord,
) -> None:
    """Replay one forward pass, and count where engine and replay agree."""
    counts = result.phases[step.phase.label]
    (cache,) = planner.policies.caches
    planner.put(planner.block_of(step))
    work = planner.work
    for place, routed in enumerate(step.layers):
        if isinstance(cache, RankLRU):
            cache.routing = routed.routing
        planner.plan(place, 0.0)
        recorded = record.states(step, routed.layer)
        found = work.state[: work.active]
        for expert, state in zip(work.experts, found, strict=True):
            residency, dropped = recorded[expert]
            if dropped:
                counts.dropped += 1
                continue
            replay_hit = state == RESIDENT
            _count(counts, residency, replay_hit=replay_hit)
            # The first difference explains most of those that follow from it.
            if result.first is None and replay_hit != (residency != MISS):
                where = "replay only" if replay_hit else "engine only"
                result.first = (
                    f"sequence {step.batch}, position {step.context_tokens - 1}"
                    f" ({step.phase.label}), layer {routed.layer}, expert"
                    f" {expert}: resident in the {where}"
                )
        carry_out(planner, 0.0)
    if step.phase is Phase.DECODE:
        record.decoded += 1


def _count(counts: AccessCounts, residency: int, *, replay_hit: bool) -> None:
    engine_hit = residency != MISS
    counts.accesses += 1
    counts.engine_hits += engine_hit
    counts.replay_hits += replay_hit
    counts.agree += replay_hit == engine_hit
    counts.only_engine += engine_hit and not replay_hit
    counts.only_replay += replay_hit and not engine_hit
    counts.prefetched += residency == PREFETCHED and not replay_hit


def _record(path: Path) -> pd.DataFrame:
    """The accesses of a route_trace v1 file, in the order of its trace.

    Raises:
        TraceError: no such file, or another layout.
    """
    try:
        with path.open("rb") as file:
            preamble = sum(1 for _ in takewhile(lambda line: line[:1] == b"#", file))
        table = pd.read_csv(path, skiprows=preamble, skipinitialspace=True)
        if "dropped" not in table:
            table["dropped"] = 0
        return table.sort_values(["turn", "step", "layer", "slot"])[list(_COLUMNS)]
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise TraceError(
            f"{path}: expected a route_trace v1 file with residency, found: {reason}"
        ) from None


def _recorded_sequences(
    trace: Trace, path: Path, record: pd.DataFrame
) -> Iterator[_SequenceRecord]:
    """The record sequence by sequence, checked against the trace's own experts.

    Raises:
        TraceError: it is one of another trace.
    """
    top_k = trace.shape.top_k
    start = 0
    for rows in trace.sequences():
        stop = start + len(rows.pos) * top_k
        routings = record.iloc[start:stop]
        start = stop
        if not np.array_equal(routings["expert"], rows.experts.reshape(-1)):
            raise TraceError(
                f"{path}: sequence {rows.seq}: its experts are not those of"
                f" {trace.path}; import it again"
            )
        experts, residency, dropped = (
            routings[name].to_numpy().reshape(-1, top_k) for name in _COLUMNS
        )
        yield _SequenceRecord(
            prompt=int(np.count_nonzero(rows.phase == Phase.PREFILL)),
            layer=rows.layer,
            experts=experts,
            residency=residency,
            dropped=dropped,
            layers=trace.shape.layers,
        )


def main(words: list[str] | None = None) -> int:
    """Compare, and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.residency")
    parser.add_argument("trace", type=Path, help="imported from the dump")
    parser.add_argument("dump", type=Path, help="what the engine wrote, route_trace v1")
    parser.add_argument("--cache", default="lru", help="policy to compare with")
    parser.add_argument("--cache-size", help="of the engine; default: by its hits")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(words)
    try:
        size = asked.cache_size and parse_bytes(asked.cache_size, where="--cache-size")
        check = check_residency(
            asked.trace, asked.dump, cache_bytes=size, cache=asked.cache
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(check.to_json(), indent=2) if asked.json else _text(check))
    return 0


def _text(check: ResidencyCheck) -> str:
    lines = [f"cache of {format_bytes(check.cache_bytes)}"]
    for name, counts in check.phases.items():
        # A trace without prefill has nothing to say of it.
        if not counts.accesses:
            continue
        agreed = f"{name}: {counts.accesses:,} accesses, {counts.share:.2%} agree"
        engine, replay = (
            f"{hits / counts.accesses:.1%}"
            for hits in (counts.engine_hits, counts.replay_hits)
        )
        lines.append(f"{agreed}; hits {engine} in the engine, {replay} in the replay")
        alone = f"{counts.only_engine:,}, of which {counts.prefetched:,} prefetched"
        lines.append(f"  resident in the engine only: {alone}")
        lines.append(f"  resident in the replay only: {counts.only_replay:,}")
        lines.append(f"  dropped by the engine, and left out: {counts.dropped:,}")
    return "\n".join([*lines, f"first difference: {check.first or 'none'}"])


if __name__ == "__main__":
    raise SystemExit(main())
