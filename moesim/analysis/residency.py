"""Did the engine's cache hold what a cache of ours would have held? Compared access by
access.

The engine recorded, for every routing, whether it met a resident expert. The trace is
replayed through the planner with one global pool of bytes, no prefetch and copies that
land at once, so that only the cache decides; then every active expert of every layer
step is looked up in both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import default_profile
from moesim.policies.base import RESIDENT, LayerWork, RunContext
from moesim.policies.cache.lru import LRU
from moesim.policies.planner.at_once import carry_out
from moesim.policies.planner.plan import MemoryPlan
from moesim.policies.planner.planner import Planner
from moesim.policies.planner.residency import GLOBAL, CacheSize
from moesim.policies.systems import compose
from moesim.traces.errors import TraceError
from moesim.traces.format.arrow import values
from moesim.traces.format.batch import compose as compose_steps
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase
from moesim.traces.importers.route_trace import residency_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace

MISS = 0
HIT = 1
PREFETCHED = 2
"""What the engine recorded of a routing."""

_COLUMNS = ("seq", "pos", "layer", "expert", "residency", "dropped")


class RankLRU(LRU):
    """LRU that orders the experts of one layer step as the engine touches them: token
    by token, best expert last.

    Ties within a layer step are real, and `LRU` breaks them by id. An engine that walks
    its routing in order gives the last one it touched the latest stamp.
    """

    def start(self, context: RunContext) -> None:
        """Make room for the stamps of one layer step."""
        super().start(context)
        self._step: dict[int, float] = {}

    def accessed(self, work: LayerWork) -> None:
        """Stamp each active expert by its last place in the routing of this layer
        step.
        """
        super().accessed(work)
        touched = work.routing.reshape(-1).astype(np.int64)
        place = np.arange(1, len(touched) + 1) / (len(touched) + 1)
        keys = touched + work.layer * self.experts
        # Of several places of an expert the last one is kept.
        self.score[keys] = self._now - 1 + place
        self._step = dict(zip(keys.tolist(), self.score[keys].tolist(), strict=True))

    def admitted(self, keys: np.ndarray) -> None:
        """Stamp what enters with its own place, so that entering does not make it the
        most recent.
        """
        self.score[keys] = [self._step.get(key, self._now) for key in keys.tolist()]


@dataclass(slots=True)
class Agreement:
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
    phases: dict[str, Agreement] = field(
        default_factory=lambda: {phase.label: Agreement() for phase in Phase}
    )
    first: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, shares included."""
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
    cache_bytes: int,
    cache: str = "lru",
    residency: Path | None = None,
) -> ResidencyCheck:
    """Replay a trace through a cache of so many bytes and compare every access with
    what its engine recorded.

    Args:
        trace: imported from route_trace v1.
        cache_bytes: the engine's expert cache.
        cache: a cache policy; plain ``lru`` orders the experts of a layer step as the
            engine touches them.
        residency: what the import wrote; None for ``TRACE.residency.parquet``.

    Raises:
        TraceError: no residency beside the trace, or it belongs to another trace.
        PolicyError: an unknown cache policy, or one that needs the future.
    """
    opened = open_trace(trace) if isinstance(trace, Path | str) else trace
    beside = residency or residency_path(opened.path)
    shape = opened.shape
    policies = compose("on-demand", cache=cache, prefetch="none").build(
        gpus=1, host_cache=None
    )
    if type(policies.caches[0]) is LRU:
        policies.caches = [RankLRU()]
    size = CacheSize.of(
        shape.expert_bytes, shape.experts, scope=GLOBAL, total_bytes=cache_bytes
    )
    planner = Planner(
        shape,
        Costs(default_profile(), shape),
        policies,
        MemoryPlan(size, staging=shape.experts),
    )
    result = ResidencyCheck(cache, cache_bytes)
    recorded = _recorded(opened, beside)
    current = -1
    rows = _SequenceResidency.empty()
    for step in compose_steps(
        opened, columns=tuple(dict.fromkeys(c for p in policies.all() for c in p.needs))
    ):
        if step.batch != current:
            current = step.batch
            rows = next(recorded)
        _compare(result, planner, step, rows)
    return result


@dataclass(slots=True)
class _SequenceResidency:
    """One sequence's record: rows of the trace, K routings each."""

    prompt: int
    layer: np.ndarray
    experts: np.ndarray
    residency: np.ndarray
    dropped: np.ndarray
    layers: int
    decoded: int = 0

    @classmethod
    def empty(cls) -> _SequenceResidency:
        none = np.empty((0, 1), np.int8)
        return cls(0, np.empty(0, np.int16), none, none, none, 1)

    def met(self, step: RoutedStep, layer: int) -> dict[int, tuple[int, bool]]:
        """Expert -> (residency, dropped) of one layer step; the first routing of an
        expert speaks for it.
        """
        if step.phase is Phase.PREFILL:
            rows = np.flatnonzero(self.layer[: self.prompt] == layer)
        else:
            rows = np.array([self.prompt + self.decoded * self.layers + layer])
        found: dict[int, tuple[int, bool]] = {}
        parts = (self.experts[rows], self.residency[rows], self.dropped[rows])
        for expert, residency, dropped in zip(
            *(part.reshape(-1).tolist() for part in parts), strict=True
        ):
            before = found.get(expert)
            found[expert] = (
                before[0] if before else residency,
                bool(dropped) and (before is None or before[1]),
            )
        return found


def _compare(
    result: ResidencyCheck, planner: Planner, step: RoutedStep, rows: _SequenceResidency
) -> None:
    counts = result.phases[step.phase.label]
    for routed in step.layers:
        plan = planner.plan(routed, step.step, step.phase, 0.0)
        met = rows.met(step, routed.layer)
        for expert, state in zip(
            plan.work.experts.tolist(), plan.work.state.tolist(), strict=True
        ):
            engine, dropped = met[expert]
            if dropped:
                counts.dropped += 1
                continue
            ours = state == RESIDENT
            counts.accesses += 1
            counts.engine_hits += engine != MISS
            counts.replay_hits += ours
            counts.agree += ours == (engine != MISS)
            counts.only_engine += engine != MISS and not ours
            counts.only_replay += ours and engine == MISS
            counts.prefetched += engine == PREFETCHED and not ours
            if result.first is None and ours != (engine != MISS):
                who = "replay only" if ours else "engine only"
                place = f"sequence {step.batch}, position {step.context_tokens - 1}"
                result.first = (
                    f"{place} ({step.phase.label}), layer {routed.layer}, expert"
                    f" {expert}: resident in the {who}"
                )
        carry_out(planner, plan, 0.0)
    if step.phase is Phase.DECODE:
        rows.decoded += 1


def _recorded(trace: Trace, path: Path) -> Iterator[_SequenceResidency]:
    """The record beside the trace, sequence by sequence, checked against the trace's
    own experts.
    """
    try:
        table = pq.read_table(path, columns=list(_COLUMNS), use_threads=False)
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
    layers = trace.shape.layers
    start = 0
    for rows in trace.sequences():
        part = slice(start, start := start + len(rows.pos) * top_k)
        if not np.array_equal(columns["expert"][part], rows.experts.reshape(-1)):
            raise TraceError(
                f"{path}: sequence {rows.seq}: its experts are not those of"
                f" {trace.path}; import both again"
            )
        prompt = int(np.count_nonzero(rows.phase == Phase.PREFILL))
        tables = [
            columns[name][part].reshape(-1, top_k)
            for name in ("expert", "residency", "dropped")
        ]
        yield _SequenceResidency(
            prompt, rows.layer, tables[0], tables[1], tables[2], layers
        )
