"""What became of copies to a GPU: were prefetches used, was an expert brought back that
had just left?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.timeline.spans import (
    COMPUTE,
    DELAYED,
    FETCH,
    HIT,
    JOIN,
    MISS,
    PREFETCH,
    REPLACE,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.timeline.spans import Chunk

REFETCH_STEPS = 5
_EXPERTS = 1 << 16

# Kinds of events; an access has its state added.
_SETTLED = 0
_FETCH = 1
_PREFETCH = 2
_UNUSED = 3
_ACCESS = 4


class CopyAggregator:
    """Counts copies, re-fetches, and prefetches that were used.

    The tables do not say when an expert leaves a cache, so departures are inferred.
    Events of one expert are ordered by step, and within a step copies (by start) before
    the access. A prefetch was *used* if the next event is a hit or a delayed hit; a
    miss in the very step of the copy is looked past, since a prefetch for the next step
    may be issued after it. A copy is a *re-fetch* if the expert had been on the GPU
    (copied, hit or delayed) in the five steps before. Source of the idea: SMoE's
    re-fetch rate, which counts from evictions that only a cache can see.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self.copies = 0
        self.refetched = 0
        self.prefetched = 0
        self.used = 0
        self.timely = 0

        self._is_link = np.array([lane.startswith("h2d") for lane in lanes])
        self._copies: list[Chunk] = []
        self._accesses: list[Chunk] = []
        # Per expert the last event in which it was on the GPU: its key, the step, and
        # whether it is a prefetch whose use is not known yet.
        self._present: Chunk = {
            "key": np.empty(0, np.int64),
            "step": np.empty(0, np.int64),
            "event": np.empty(0, np.int64),
        }

    def add_spans(self, spans: Chunk) -> int:
        """Buffer the copies of one chunk; return the last step whose compute it has
        seen.
        """
        kind = spans["kind"]
        is_copy = (kind >= FETCH) & (kind <= REPLACE) & self._is_link[spans["lane"]]
        if is_copy.any():
            copies = {
                name: spans[name][is_copy] for name in ("step", "kind", "start_s")
            }
            copies["key"] = _key(spans["layer"][is_copy], spans["expert"][is_copy])
            self._copies.append(copies)

        computed = spans["step"][(kind == COMPUTE) | (kind == JOIN)]
        return int(computed.max()) if len(computed) else -1

    def add_accesses(self, accesses: Chunk) -> None:
        """Buffer one chunk of accesses."""
        self._accesses.append(
            {
                "key": _key(accesses["layer"], accesses["expert"]),
                "step": accesses["step"],
                "state": accesses["state"],
            }
        )

    def settle(self, before: int | None = None) -> None:
        """Resolve all buffered events of steps below `before` (None: all)."""
        copies, self._copies = _split(self._copies, before)
        accesses, self._accesses = _split(self._accesses, before)
        if copies is not None or accesses is not None:
            self._resolve(copies, accesses)

    def _resolve(
        self,
        copies: Chunk | None,
        accesses: Chunk | None,
    ) -> None:
        key, step, event = self._events(copies, accesses)
        count = len(key)
        index = np.arange(count)
        is_copy = (event == _FETCH) | (event == _PREFETCH)
        is_present = event != _ACCESS + MISS

        before = self._last_present(is_present, index)
        same_key = (before >= 0) & (key[before] == key)
        is_recent = is_copy & same_key & (step - step[before] <= REFETCH_STEPS)
        self.copies += int(is_copy.sum())
        self.refetched += int(is_recent.sum())
        self.prefetched += int((event == _PREFETCH).sum())

        prefetches = index[(event == _PREFETCH) | (event == _UNUSED)]
        after = _next_event(prefetches, key, count)
        is_miss = (after >= 0) & (event[after] == _ACCESS + MISS)
        # Issued behind the access of its own step, for the next one.
        looked_past = is_miss & (step[after] == step[prefetches])
        after[looked_past] = _next_event(after[looked_past], key, count)

        is_known = after >= 0
        self.timely += int((is_known & (event[after] == _ACCESS + HIT)).sum())
        self.used += int((is_known & (event[after] >= _ACCESS + DELAYED)).sum())

        # What is remembered: of each expert the last event in which it was there.
        event[prefetches] = np.where(is_known, _SETTLED, _UNUSED)
        event[is_copy & (event == _FETCH)] = _SETTLED
        present = index[is_present]
        if len(present):
            is_last = np.concatenate((np.diff(key[present]) != 0, [True]))
            present = present[is_last]
        event[event >= _ACCESS] = _SETTLED
        self._present = {
            "key": key[present],
            "step": step[present],
            "event": event[present],
        }

    def _events(
        self,
        copies: Chunk | None,
        accesses: Chunk | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Key, step and kind of all events, those of one expert behind each other."""
        events = [tuple(self._present.values())]
        if copies is not None:
            by_start = np.argsort(copies["start_s"], kind="stable")
            kind = np.where(copies["kind"] == PREFETCH, _PREFETCH, _FETCH)
            key = copies["key"][by_start]
            events.append((key, copies["step"][by_start], kind[by_start]))
        if accesses is not None:
            kind = _ACCESS + accesses["state"].astype(np.int64)
            events.append((accesses["key"], accesses["step"], kind))

        key, step, event = (
            np.concatenate(columns).astype(np.int64)
            for columns in zip(*events, strict=True)
        )
        # Within a step copies come before the access.
        time = (step << 1) + (event >= _ACCESS)
        order = np.argsort((key << 32) + time, kind="stable")
        return key[order], step[order], event[order]

    @staticmethod
    def _last_present(
        is_present: np.ndarray,
        index: np.ndarray,
    ) -> np.ndarray:
        """Place of the last event before each one in which an expert was there."""
        if not len(index):
            return index

        last = np.maximum.accumulate(np.where(is_present, index, -1))
        return np.concatenate(([-1], last[:-1]))


def _key(
    layer: np.ndarray,
    expert: np.ndarray,
) -> np.ndarray:
    return layer.astype(np.int64) * _EXPERTS + expert


def _next_event(
    index: np.ndarray,
    key: np.ndarray,
    count: int,
) -> np.ndarray:
    """Index of the next event of the same key, -1 if there is none."""
    after = index + 1
    # The last event has none behind it; any valid index serves to look.
    inside = np.minimum(after, count - 1)
    return np.where((after < count) & (key[inside] == key[index]), inside, -1)


def _split(
    chunks: list[Chunk],
    before: int | None,
) -> tuple[Chunk | None, list[Chunk]]:
    """Join chunks and split them at a step: what is below it, and the rest."""
    if not chunks:
        return None, []

    joined = {
        name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]
    }
    if before is None:
        return joined, []

    is_ready = joined["step"] < before
    ready = {name: values[is_ready] for name, values in joined.items()}
    rest = {name: values[~is_ready] for name, values in joined.items()}
    return ready, [rest] if len(rest["key"]) else []
