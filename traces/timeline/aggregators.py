"""One pass over a run's tables: each fold takes chunks and keeps a few numbers.

Every fold's memory is bounded by the size of the model (layers × experts) and of one
chunk, never by the length of the run; only `Steps` keeps one number per decode step,
for exact percentiles.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.spans import (
    COMPUTE,
    DELAYED,
    FETCH,
    HIT,
    JOIN,
    MISS,
    PLAN,
    PREFETCH,
    READ,
    REPLACE,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.timeline.spans import Chunk

REFETCH_STEPS = 5
_LAYERS = 1 << 16
_EXPERTS = 1 << 16


class Lanes:
    """Busy time and bytes of each lane, planning time, first start and last end."""

    def __init__(self, lanes: Sequence[str]) -> None:
        self.busy_s = np.zeros(len(lanes))
        self.bytes = np.zeros(len(lanes), dtype=np.int64)
        self.planning_s = 0.0
        self.start_s = np.inf
        self.end_s = -np.inf
        self.spans = 0

    def add(self, spans: Chunk) -> None:
        """Fold one chunk of spans."""
        duration = spans["end_s"] - spans["start_s"]
        count = len(self.busy_s)
        self.busy_s += np.bincount(spans["lane"], duration, count)
        self.bytes += np.bincount(spans["lane"], spans["bytes"], count).astype(np.int64)
        self.planning_s += float(duration[spans["kind"] == PLAN].sum())
        self.start_s = min(self.start_s, float(spans["start_s"].min()))
        self.end_s = max(self.end_s, float(spans["end_s"].max()))
        self.spans += len(duration)


class Accesses:
    """Hits, delayed hits and misses; over all active experts, over GPU-assigned ones,
    and by tokens.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self._on_gpu = np.array([lane.startswith("gpu") for lane in lanes])
        self.states = np.zeros(3, dtype=np.int64)
        self.gpu_states = np.zeros(3, dtype=np.int64)
        self.token_states = np.zeros(3, dtype=np.int64)

    def add(self, accesses: Chunk) -> None:
        """Fold one chunk of accesses."""
        state = accesses["state"]
        self.states += np.bincount(state, minlength=3)
        self.gpu_states += np.bincount(
            state[self._on_gpu[accesses["lane"]]], minlength=3
        )
        self.token_states += np.bincount(state, accesses["tokens"], 3).astype(np.int64)


class Steps:
    """Token counts and times of forward passes, per phase and per sequence."""

    def __init__(self) -> None:
        self.gaps_s = array("d")
        self.ttft_s = array("d")
        self.steps = self.batches = self.sequences = 0
        self.tokens = {Phase.PREFILL: 0, Phase.DECODE: 0}
        self.seconds = {Phase.PREFILL: 0.0, Phase.DECODE: 0.0}
        self.start_s = np.inf
        self.end_s = -np.inf
        self._speeds = {Phase.PREFILL: (0.0, 0), Phase.DECODE: (0.0, 0)}
        self._batch = -1
        self._last_s = 0.0
        self._decoded: list[
            tuple[int, float]
        ] = []  # per decode step of this batch: sequences alive, its end
        self._decode_start_s = 0.0

    def add(self, steps: Chunk) -> None:
        """Fold one chunk of forward passes."""
        for _, phase, batch, tokens, sequences, start_s, end_s in zip(
            *(
                steps[name].tolist()
                for name in (
                    "step",
                    "phase",
                    "batch",
                    "tokens",
                    "sequences",
                    "start_s",
                    "end_s",
                )
            ),
            strict=True,
        ):
            if batch != self._batch:
                self._end_batch()
                self._batch = batch
                self._last_s = start_s
                self.batches += 1
            duration = end_s - self._last_s
            if phase == Phase.PREFILL:
                self.ttft_s.append(duration)
                self._speed(
                    Phase.PREFILL, tokens / duration if duration else 0.0, sequences
                )
            else:
                if not self._decoded:
                    self._decode_start_s = self._last_s
                self.gaps_s.append(duration)
                self._decoded.append((sequences, end_s))
            self.tokens[Phase(phase)] += tokens
            self.seconds[Phase(phase)] += duration
            self.start_s = min(self.start_s, start_s)
            self.end_s = max(self.end_s, end_s)
            self._last_s = end_s
            self.steps += 1

    def per_sequence(self, phase: Phase) -> float | None:
        """Mean over sequences of own tokens per second. Source: DALI, decode and
        prefill speed.
        """
        self._end_batch()
        total, count = self._speeds[phase]
        return total / count if count else None

    def _speed(self, phase: Phase, per_batch: float, sequences: int) -> None:
        """Add a batch's prefill: the speeds of its sequences add up to `per_batch`
        tokens per second.
        """
        total, count = self._speeds[phase]
        self._speeds[phase] = (total + per_batch, count + sequences)

    def _end_batch(self) -> None:
        """A sequence that ends after decode step i has made i tokens: their speeds
        follow from who was alive.
        """
        alive = [sequences for sequences, _ in self._decoded] + [0]
        total, count = self._speeds[Phase.DECODE]
        for made, (_, end_s) in enumerate(self._decoded, start=1):
            ended = alive[made - 1] - alive[made]
            if ended > 0 and end_s > self._decode_start_s:
                total += ended * made / (end_s - self._decode_start_s)
                count += ended
        self._speeds[Phase.DECODE] = (total, count)
        self.sequences += max(alive)
        self._decoded = []


class LayerSteps:
    """CPU/GPU imbalance and stalls, from the compute spans of each layer step and the
    copies they waited for.

    A compute lane *stalls* before a compute span for the time that it was idle, after
    planning had ended, while the copy of that very expert to it was not yet finished:
    ``min(start, copy end) - max(previous compute end, plan end)`` where positive.
    Copies to ``gpuN`` are spans on ``h2dN``, copies for ``cpu`` are reads on ``ssd``.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self._lanes = list(lanes)
        self.stall_s = np.zeros(len(lanes))
        self.imbalance = 0.0
        self.layer_steps = 0
        self._gpu = [i for i, lane in enumerate(lanes) if lane.startswith("gpu")]
        self._cpu = self._lanes.index("cpu") if "cpu" in lanes else -1
        target = np.full(len(lanes), -1)
        for i, lane in enumerate(lanes):
            consumer = (
                "cpu"
                if lane == "ssd"
                else lane.replace("h2d", "gpu")
                if lane.startswith("h2d")
                else ""
            )
            if consumer in lanes:
                target[i] = self._lanes.index(consumer)
        self._target = target
        self._open: Chunk | None = None

    def add(self, spans: Chunk | None) -> None:
        """Fold one chunk of spans; None closes the last layer step."""
        rows = self._open
        if spans is not None:
            kind = spans["kind"]
            wanted = (
                (kind == COMPUTE) | (kind == PLAN) | ((kind >= FETCH) & (kind <= READ))
            )
            fresh = {
                n: spans[n][wanted]
                for n in ("lane", "kind", "layer", "expert", "start_s", "end_s")
            }
            fresh["key"] = (
                spans["step"][wanted].astype(np.int64) * _LAYERS
                + spans["layer"][wanted]
            )
            rows = (
                fresh
                if rows is None
                else {name: np.concatenate([rows[name], fresh[name]]) for name in rows}
            )
        self._open = None
        if rows is None or not len(rows["key"]):
            return
        work = (rows["kind"] == COMPUTE) | (rows["kind"] == PLAN)
        if spans is not None:
            if not work.any():
                self._open = rows
                return
            last = rows["key"][work].max()
            still = work & (rows["key"] == last)
            first = int(np.argmax(still))
            kept = still | (~work & (np.arange(len(work)) >= first))
            self._open = {name: values[kept] for name, values in rows.items()}
            work &= ~still
        self._settle(rows, work)

    def _settle(self, rows: Chunk, work: np.ndarray) -> None:
        compute = work & (rows["kind"] == COMPUTE)
        if not compute.any():
            return
        lane = rows["lane"][compute]
        key = rows["key"][compute]
        start_s = rows["start_s"][compute]
        end_s = rows["end_s"][compute]
        keys, place = np.unique(key, return_inverse=True)
        # imbalance
        busy = np.bincount(
            place * len(self._lanes) + lane,
            end_s - start_s,
            len(keys) * len(self._lanes),
        )
        busy = busy.reshape(len(keys), -1)
        cpu = busy[:, self._cpu] if self._cpu >= 0 else np.zeros(len(keys))
        gpu = busy[:, self._gpu].max(axis=1) if self._gpu else np.zeros(len(keys))
        longest = np.maximum(cpu, gpu)
        self.imbalance += float(
            (np.abs(cpu - gpu)[longest > 0] / longest[longest > 0]).sum()
        )
        self.layer_steps += len(keys)
        # stalls
        plan = work & (rows["kind"] == PLAN)
        # Without planning there is no window, so no stall.
        plan_end_s = np.full(len(keys), np.inf)
        at = np.searchsorted(keys, rows["key"][plan])
        known = (at < len(keys)) & (
            keys[np.minimum(at, len(keys) - 1)] == rows["key"][plan]
        )
        plan_end_s[at[known]] = rows["end_s"][plan][known]
        order = np.lexsort((start_s, lane, key))
        follows = (np.diff(key[order]) == 0) & (np.diff(lane[order]) == 0)
        idle_from_s = np.empty(len(key))
        idle_from_s[order] = np.concatenate(
            ([-np.inf], np.where(follows, end_s[order][:-1], -np.inf))
        )
        idle_from_s = np.maximum(idle_from_s, plan_end_s[place])
        waited = np.minimum(start_s, self._copy_end_s(rows, compute)) - idle_from_s
        self.stall_s += np.bincount(lane, np.maximum(waited, 0.0), len(self._lanes))

    def _copy_end_s(self, rows: Chunk, compute: np.ndarray) -> np.ndarray:
        """End of the latest copy of the same expert to the same lane before each
        compute span; -inf if none.
        """
        copies = np.flatnonzero(
            (rows["kind"] >= FETCH)
            & (rows["kind"] <= READ)
            & (self._target[rows["lane"]] >= 0)
        )
        uses = np.flatnonzero(compute)
        if not len(copies):
            return np.full(len(uses), -np.inf)
        both = np.concatenate([copies, uses])
        to = np.concatenate([self._target[rows["lane"][copies]], rows["lane"][uses]])
        expert = (to * _LAYERS + rows["layer"][both]) * _EXPERTS + rows["expert"][both]
        time_s = np.concatenate([rows["end_s"][copies], rows["start_s"][uses]])
        is_use = np.arange(len(both)) >= len(copies)
        order = np.lexsort((is_use, time_s, expert))
        last = np.maximum.accumulate(np.where(is_use[order], -1, np.arange(len(both))))
        found = (last >= 0) & (expert[order][last] == expert[order])
        end_s = np.empty(len(both))
        end_s[order] = np.where(found, time_s[order][last], -np.inf)
        return end_s[len(copies) :]


class Copies:
    """What became of copies to a GPU: were prefetches used, was something brought back
    that had just left?

    The tables do not say when an expert leaves a cache, so departures are inferred.
    Events of one expert are ordered by step, and within a step copies (by start) before
    the access. A prefetch was *used* if the next event is a hit or a delayed hit; a
    miss in the very step of the copy is looked past, since a prefetch for the next step
    may be issued after it. A copy is a *re-fetch* if the expert had been on the GPU
    (copied, hit or delayed) in the five steps before. Source of the idea: SMoE's
    re-fetch rate, which counts from evictions that only a cache can see.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self._link = np.array([lane.startswith("h2d") for lane in lanes])
        self.copies = self.refetched = self.prefetched = self.used = self.timely = 0
        self._copies: list[Chunk] = []
        self._accesses: list[Chunk] = []
        # per expert its last presence: key, step, and whether it is a prefetch not yet
        # resolved
        self._past: Chunk = {
            "key": np.empty(0, np.int64),
            "step": np.empty(0, np.int64),
            "what": np.empty(0, np.int64),
        }

    def add_spans(self, spans: Chunk) -> int:
        """Buffer the copies of one chunk; return the last step whose compute it has
        seen.
        """
        kind = spans["kind"]
        wanted = self._link[spans["lane"]] & (kind >= FETCH) & (kind <= REPLACE)
        if wanted.any():
            part = {name: spans[name][wanted] for name in ("step", "kind", "start_s")}
            part["key"] = (
                spans["layer"][wanted].astype(np.int64) * _EXPERTS
                + spans["expert"][wanted]
            )
            self._copies.append(part)
        steps = spans["step"][(kind == COMPUTE) | (kind == JOIN)]
        return int(steps.max()) if len(steps) else -1

    def add_accesses(self, accesses: Chunk) -> None:
        """Buffer one chunk of accesses."""
        key = accesses["layer"].astype(np.int64) * _EXPERTS + accesses["expert"]
        self._accesses.append(
            {"key": key, "step": accesses["step"], "state": accesses["state"]}
        )

    def settle(self, before: int | None = None) -> None:
        """Resolve all buffered events of steps below `before` (None: all)."""
        copies, self._copies = _split(self._copies, before)
        accesses, self._accesses = _split(self._accesses, before)
        if copies is None and accesses is None:
            return
        self._resolve(copies, accesses)

    def _resolve(self, copies: Chunk | None, accesses: Chunk | None) -> None:
        # Kinds of events; access + state for accesses.
        old, fetch, prefetch, pending, access = range(5)
        parts = [(self._past["key"], self._past["step"], self._past["what"])]
        if copies is not None:
            by_start = np.argsort(copies["start_s"], kind="stable")
            what = np.where(copies["kind"] == PREFETCH, prefetch, fetch)
            parts.append(
                (copies["key"][by_start], copies["step"][by_start], what[by_start])
            )
        if accesses is not None:
            parts.append(
                (
                    accesses["key"],
                    accesses["step"],
                    access + accesses["state"].astype(np.int64),
                )
            )
        key, step, what = (
            np.concatenate(columns).astype(np.int64)
            for columns in zip(*parts, strict=True)
        )
        order = np.argsort((key << 32) + (step << 1) + (what >= access), kind="stable")
        key = key[order]
        step = step[order]
        what = what[order]
        count = len(key)
        index = np.arange(count)
        is_copy = (what == fetch) | (what == prefetch)
        is_prefetch = (what == prefetch) | (what == pending)
        present = what != access + MISS
        before = (
            np.concatenate(
                ([-1], np.maximum.accumulate(np.where(present, index, -1))[:-1])
            )
            if count
            else index
        )
        recent = (
            is_copy
            & (before >= 0)
            & (key[before] == key)
            & (step - step[before] <= REFETCH_STEPS)
        )
        self.copies += int(is_copy.sum())
        self.refetched += int(recent.sum())
        self.prefetched += int((what == prefetch).sum())
        asked = index[is_prefetch]
        after = _following(asked, key, count)
        passed = (
            (after >= 0) & (what[after] == access + MISS) & (step[after] == step[asked])
        )
        after[passed] = _following(after[passed], key, count)
        self.timely += int(((after >= 0) & (what[after] == access + HIT)).sum())
        self.used += int(((after >= 0) & (what[after] >= access + DELAYED)).sum())
        what[asked] = np.where(after < 0, pending, old)
        what[is_copy & (what == fetch)] = old
        here = index[present]
        final = (
            here[np.concatenate((np.diff(key[here]) != 0, [True]))]
            if len(here)
            else here
        )
        what[what >= access] = old
        self._past = {"key": key[final], "step": step[final], "what": what[final]}


def _following(index: np.ndarray, key: np.ndarray, count: int) -> np.ndarray:
    """Index of the next event of the same key, -1 if there is none."""
    after = index + 1
    inside = np.minimum(after, count - 1)
    return np.where((after < count) & (key[inside] == key[index]), inside, -1)


def _split(chunks: list[Chunk], before: int | None) -> tuple[Chunk | None, list[Chunk]]:
    """Join chunks and part them at a step: what is below it, and the rest."""
    if not chunks:
        return None, []
    joined = {
        name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]
    }
    if before is None:
        return joined, []
    ready = joined["step"] < before
    rest = {name: values[~ready] for name, values in joined.items()}
    return {name: values[ready] for name, values in joined.items()}, [rest] if len(
        rest["key"]
    ) else []
