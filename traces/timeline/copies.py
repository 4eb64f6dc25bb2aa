"""Uses of copies to a GPU: were prefetches used, was an expert brought back that had
just left?
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.timeline.loops import follow_copies
from moesim.traces.timeline.spans import COMPUTE, FETCH, JOIN, PREFETCH, REPLACE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moesim.traces.timeline.spans import Chunk

_LONG_AGO = -(1 << 40)


class CopyAggregator:
    """Counts copies, re-fetches, and prefetches that were used.

    The tables do not say when an expert leaves a cache, so departures are inferred.
    Events of one expert on one GPU are ordered by step, and within a step copies (by
    start) before the access. A prefetch was *used* if the next event is a hit or a
    delayed hit; a miss in the very step of the copy is looked past, since a prefetch
    for the next step may be issued after it. A copy is a *re-fetch* if the expert had
    been on that GPU (copied, hit or delayed) in the five steps before. A hit counts for
    the GPU that computed it, and for the GPU that had the expert last if the CPU did.
    Source of the idea: SMoE's re-fetch rate, which counts from evictions that only a
    cache can see.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self.copies = 0
        self.refetched = 0
        self.prefetched = 0
        self.used = 0
        self.timely = 0

        # GPU of each lane: of the link to it, and of its compute lane; else -1.
        self._link_of = _numbers(lanes, "h2d")
        self._gpu_of = _numbers(lanes, "gpu")
        self._copies: list[Chunk] = []
        self._accesses: list[Chunk] = []
        # Of each GPU and expert the last step in which it was there, and whether that
        # was a prefetch whose use is not known yet: [G, L, E], as far as experts have
        # come.
        last_gpu = max(self._link_of.max(), self._gpu_of.max(), 0)
        gpus = 1 + int(last_gpu)
        self._present_step = np.empty((gpus, 0, 0), np.int64)
        self._prefetch = np.empty((gpus, 0, 0), np.int8)

    def add_spans(self, spans: Chunk) -> int:
        """Buffer the copies of one chunk; return the last step whose compute it has
        seen.
        """
        kind = spans["kind"]
        gpu = self._link_of[spans["lane"]]
        is_copy = (kind >= FETCH) & (kind <= REPLACE) & (gpu >= 0)
        if is_copy.any():
            copies = spans | {"gpu": gpu}
            self._copies.append({name: copies[name][is_copy] for name in _NO_COPIES})

        computed = spans["step"][(kind == COMPUTE) | (kind == JOIN)]
        return int(computed.max()) if len(computed) else -1

    def add_accesses(self, accesses: Chunk) -> None:
        """Buffer one chunk of accesses."""
        accesses = accesses | {"gpu": self._gpu_of[accesses["lane"]]}
        self._accesses.append({name: accesses[name] for name in _NO_ACCESSES})

    def settle(self, before: int | None = None) -> None:
        """Resolve all buffered events of steps below `before` (None: all)."""
        copies, self._copies = _split(self._copies, before)
        accesses, self._accesses = _split(self._accesses, before)
        if copies is not None or accesses is not None:
            self._resolve(copies, accesses)

    def _resolve(self, copies: Chunk | None, accesses: Chunk | None) -> None:
        copies = _NO_COPIES if copies is None else copies
        accesses = _NO_ACCESSES if accesses is None else accesses
        self._make_room(copies, accesses)
        by_start = np.lexsort((copies["start_s"], copies["step"]))
        by_step = np.argsort(accesses["step"], kind="stable")
        counts = np.zeros(len(_COUNTS), np.int64)
        events: Any = (
            *_events(copies, copies["kind"] == PREFETCH, by_start),
            *_events(accesses, accesses["state"], by_step),
        )
        follow_copies(*(*events, self._present_step, self._prefetch, counts))
        for name, count in zip(_COUNTS, counts.tolist(), strict=True):
            setattr(self, name, getattr(self, name) + count)

    def _make_room(self, *events: Chunk) -> None:
        """Let the tables reach to the last layer and expert that have come."""
        _, layers, experts = self._present_step.shape
        for chunk in events:
            layers = max(layers, 1 + int(chunk["layer"].max(initial=-1)))
            experts = max(experts, 1 + int(chunk["expert"].max(initial=-1)))
        if self._present_step.shape[1:] == (layers, experts):
            return
        more = [
            (0, 0),
            (0, layers - self._present_step.shape[1]),
            (0, experts - self._present_step.shape[2]),
        ]
        self._present_step = np.pad(self._present_step, more, constant_values=_LONG_AGO)
        self._prefetch = np.pad(self._prefetch, more)


_COUNTS = ("copies", "refetched", "prefetched", "used", "timely")
"""Attributes of `CopyAggregator`, in the order in which `follow_copies` counts."""

_NO_COPIES: Chunk = {
    name: np.empty(0, np.int64)
    for name in ("step", "gpu", "layer", "expert", "kind", "start_s")
}
_NO_ACCESSES: Chunk = {
    name: np.empty(0, np.int64) for name in ("step", "gpu", "layer", "expert", "state")
}


def _events(
    chunk: Chunk, detail: np.ndarray, order: np.ndarray
) -> Iterator[np.ndarray]:
    """Step, GPU, layer, expert and a detail of copies or accesses in order, int64."""
    names = ("step", "gpu", "layer", "expert")
    columns = (*(chunk[name] for name in names), detail)
    return (column[order].astype(np.int64) for column in columns)


def _split(chunks: list[Chunk], before: int | None) -> tuple[Chunk | None, list[Chunk]]:
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
    return ready, [rest] if len(rest["step"]) else []


def _numbers(lanes: Sequence[str], kind: str) -> np.ndarray:
    """Number of each lane of a kind (1 of ``gpu1``), -1 of others; int64 [lanes]."""
    return np.array(
        [int(lane[len(kind) :]) if lane.startswith(kind) else -1 for lane in lanes],
        np.int64,
    )
