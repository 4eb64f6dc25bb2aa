"""Compares what a real engine's cache held with what a replayed one holds, access by
access.

The engine recorded, for every routing, whether it met a resident expert. The trace is
replayed through the planner with one global pool of bytes, no prefetch and copies that
land at once, so that only the cache decides; then every active expert of every layer
step is looked up in both.

``python -m benchmarks.residency trace.parquet --cache-size 3000MiB`` prints it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.base.seals import check_seal
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
from moesim.traces.format.parquet import open_parquet, read_metadata, values
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase
from moesim.traces.importers.route_trace import (
    RESIDENCY_OF,
    RESIDENCY_SUFFIX,
    residency_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace

# What the engine recorded of a routing.
MISS = 0
HIT = 1
PREFETCHED = 2

_COLUMNS = ("seq", "pos", "layer", "expert", "residency", "dropped")


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
    *,
    cache_bytes: int | None,
    cache: str = "lru",
    residency: Path | None = None,
) -> ResidencyCheck:
    """Replay a trace through a cache of so many bytes and compare every access with
    what its engine recorded.

    Args:
        trace: imported from route_trace v1.
        cache_bytes: the engine's expert cache; None takes the least size at which as
            many accesses hit as in the engine, which takes a dozen replays.
        cache: a cache policy; plain ``lru`` orders the experts of a layer step as the
            engine touches them.
        residency: what the import wrote; None for ``TRACE.residency.parquet``, or the
            file of that folder that was written with this trace.

    Raises:
        TraceError: no residency beside the trace, or it belongs to another trace.
        PolicyError: an unknown cache policy, or one that needs the future.
    """
    opened = open_trace(trace) if isinstance(trace, Path | str) else trace
    record_path = residency or _residency_of(opened.path, opened.digest())
    if cache_bytes is None:
        cache_bytes = _engine_size(opened, cache, record_path)
    return _replayed(opened, cache_bytes, cache, record_path)


def _residency_of(trace: Path, digest: str) -> Path:
    """The residency of a trace: beside it under its name, else the file of its
    folder that was written with it, whatever either is called now.
    """
    expected = residency_path(trace)
    if expected.is_file():
        return expected
    for path in sorted(trace.parent.glob(f"*{RESIDENCY_SUFFIX}")):
        try:
            metadata = read_metadata(path)
        except (pa.ArrowException, OSError):
            # Not ours to judge: it is none that belongs here.
            continue
        if metadata.get(RESIDENCY_OF.encode()) == digest.encode():
            return path
    return expected


def _engine_size(trace: Trace, cache: str, record_path: Path) -> int:
    """The least size at which as many accesses hit as in the engine, by bisection: hits
    of a replay grow with its cache.
    """
    shape = trace.shape
    expert_bytes = shape.max_expert_bytes
    low = 1
    high = shape.layers * shape.experts
    while low < high:
        middle = (low + high) // 2
        phases = _replayed(trace, middle * expert_bytes, cache, record_path).phases
        missing = sum(each.engine_hits - each.replay_hits for each in phases.values())
        if missing > 0:
            low = middle + 1
        else:
            high = middle
    return low * expert_bytes


def _replayed(
    opened: Trace, cache_bytes: int, cache: str, record_path: Path
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
    records = _recorded_sequences(opened, record_path)
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


def _recorded_sequences(trace: Trace, path: Path) -> Iterator[_SequenceRecord]:
    """Read the record beside the trace, sequence by sequence, checked against the
    trace's own experts.

    Raises:
        TraceError: no such file, not a record, or one of another trace.
    """
    try:
        check_seal(path)
        with open_parquet(path) as file:
            table = file.read(list(_COLUMNS), use_threads=False)
    except FileNotFoundError:
        raise TraceError(
            f"{path}: no such file; `moesim trace import` of a route_trace v1 file"
            " writes it"
        ) from None
    except (pa.ArrowException, OSError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise TraceError(
            f"{path}: not a residency record: {reason}; import the route trace again"
        ) from None

    columns = {name: values(table.column(name).combine_chunks()) for name in _COLUMNS}
    top_k = trace.shape.top_k
    start = 0
    for rows in trace.sequences():
        # The record has one row per routing, in the order of the trace.
        stop = start + len(rows.pos) * top_k
        routings = slice(start, stop)
        start = stop
        if not np.array_equal(columns["expert"][routings], rows.experts.reshape(-1)):
            raise TraceError(
                f"{path}: sequence {rows.seq}: its experts are not those of"
                f" {trace.path}; import both again"
            )
        yield _SequenceRecord(
            prompt=int(np.count_nonzero(rows.phase == Phase.PREFILL)),
            layer=rows.layer,
            experts=columns["expert"][routings].reshape(-1, top_k),
            residency=columns["residency"][routings].reshape(-1, top_k),
            dropped=columns["dropped"][routings].reshape(-1, top_k),
            layers=trace.shape.layers,
        )


def main(words: list[str] | None = None) -> int:
    """Compare, and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.residency")
    parser.add_argument("trace", type=Path, help="imported from route_trace v1")
    parser.add_argument("--cache", default="lru", help="policy to compare with")
    parser.add_argument("--cache-size", help="of the engine; default: by its hits")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(words)
    try:
        size = asked.cache_size and parse_bytes(asked.cache_size, where="--cache-size")
        check = check_residency(asked.trace, cache_bytes=size, cache=asked.cache)
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
