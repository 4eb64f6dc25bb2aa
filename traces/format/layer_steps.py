"""The accesses of a trace in replay order, many layer steps per array: for loops that
must see every one of them.

`moesim.traces.format.batch.compose` says the same with one object per layer step; that
costs microseconds each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from moesim.traces.format.batch import check_counts, compose
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import SequenceRows, Trace

BLOCK_ACCESSES = 1 << 19
"""Accesses of a block, about; memory does not grow with the trace."""


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """N layer steps in replay order with A accesses, an access being an active expert
    of a layer step.

    Attributes:
        step: int64 [N] forward pass, counted over the whole trace.
        batch: int64 [N] number of the group of sequences.
        phase: int8 [N], codes of `Phase`.
        layer: int64 [N].
        edges: int64 [N + 1]; layer step i owns accesses ``edges[i]:edges[i + 1]``.
        experts: int32 [A], ascending within a layer step.
        tokens: int32 [A], the workload of each.
    """

    step: np.ndarray
    batch: np.ndarray
    phase: np.ndarray
    layer: np.ndarray
    edges: np.ndarray
    experts: np.ndarray
    tokens: np.ndarray


def layer_steps(
    trace: Trace, *, batch: int = 1, steps: int | None = None
) -> Iterator[LayerSteps]:
    """Cut a trace into blocks of layer steps, as `compose` would with this `batch` and
    so many `steps`.

    Raises:
        TraceError: `batch` or `steps` below 1, or a damaged trace.
    """
    if batch == 1:
        check_counts(batch, steps)
        parts = of_sequences(trace.sequences(), trace.shape.layers, trace.shape.experts)
        return joined(parts if steps is None else _first(parts, steps))
    return of_steps(compose(trace, batch=batch, steps=steps))


def of_steps(steps: Iterable[RoutedStep]) -> Iterator[LayerSteps]:
    """Forward passes that somebody composed, as blocks."""
    return joined(map(_of_step, steps))


def _first(parts: Iterable[LayerSteps], steps: int) -> Iterator[LayerSteps]:
    """Parts until so many forward passes are over."""
    for part in parts:
        if part.step[-1] < steps:
            yield part
            continue
        count = int(np.searchsorted(part.step, steps))
        if count:
            cut = slice(part.edges[count])
            yield LayerSteps(
                part.step[:count],
                part.batch[:count],
                part.phase[:count],
                part.layer[:count],
                part.edges[: count + 1],
                part.experts[cut],
                part.tokens[cut],
            )
        return


def of_sequences(
    sequences: Iterable[SequenceRows], layers: int, experts: int
) -> Iterator[LayerSteps]:
    """The layer steps of sequences that run one by one, in one to many parts per
    sequence.
    """
    step = 0
    for number, rows in enumerate(sequences):
        prompt = int(np.count_nonzero(rows.phase == Phase.PREFILL))
        if prompt:
            keys = (
                rows.layer[:prompt, None].astype(np.int64) * experts
                + rows.experts[:prompt]
            )
            yield _prefill(
                np.bincount(keys.reshape(-1), minlength=layers * experts),
                layers,
                experts,
                step,
                number,
            )
            step += 1
        wide = rows.experts.shape[1]
        stride = max(1, BLOCK_ACCESSES // (layers * wide)) * layers
        for first in range(prompt, len(rows.pos), stride):
            part = np.sort(rows.experts[first : first + stride], axis=1).astype(
                np.int32
            )
            count = len(part)
            steps = step + np.arange(count, dtype=np.int64) // layers
            step += count // layers
            yield LayerSteps(
                steps,
                np.full(count, number, np.int64),
                np.full(count, Phase.DECODE, np.int8),
                np.tile(np.arange(layers, dtype=np.int64), count // layers),
                np.arange(count + 1, dtype=np.int64) * wide,
                part.reshape(-1),
                np.ones(part.size, np.int32),
            )


def _prefill(
    counts: np.ndarray, layers: int, experts: int, step: int, number: int
) -> LayerSteps:
    """One forward pass of workloads int64 [L * E]."""
    active = np.flatnonzero(counts)
    return LayerSteps(
        np.full(layers, step, np.int64),
        np.full(layers, number, np.int64),
        np.full(layers, Phase.PREFILL, np.int8),
        np.arange(layers, dtype=np.int64),
        np.searchsorted(active, np.arange(layers + 1) * experts).astype(np.int64),
        (active % experts).astype(np.int32),
        counts[active].astype(np.int32),
    )


def _of_step(step: RoutedStep) -> LayerSteps:
    count = len(step.layers)
    edges = np.zeros(count + 1, np.int64)
    np.cumsum([len(routed.experts) for routed in step.layers], out=edges[1:])
    return LayerSteps(
        np.full(count, step.step, np.int64),
        np.full(count, step.batch, np.int64),
        np.full(count, step.phase, np.int8),
        np.arange(count, dtype=np.int64),
        edges,
        np.concatenate([routed.experts for routed in step.layers]),
        np.concatenate([routed.tokens for routed in step.layers]),
    )


def joined(parts: Iterable[LayerSteps]) -> Iterator[LayerSteps]:
    """Few large blocks instead of many small ones."""
    held: list[LayerSteps] = []
    accesses = 0
    for part in parts:
        held.append(part)
        accesses += len(part.experts)
        if accesses >= BLOCK_ACCESSES:
            yield join(held)
            held = []
            accesses = 0
    if held:
        yield join(held)


def join(parts: list[LayerSteps]) -> LayerSteps:
    """One block of several that follow each other."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part.experts) for part in parts)])
    edges = [
        part.edges[:-1] + start for part, start in zip(parts, starts, strict=False)
    ]
    edges.append(starts[-1:].astype(np.int64))
    names = ("step", "batch", "phase", "layer", "experts", "tokens")
    step, batch, phase, layer, experts, tokens = (
        np.concatenate([getattr(p, name) for p in parts]) for name in names
    )
    return LayerSteps(step, batch, phase, layer, np.concatenate(edges), experts, tokens)
