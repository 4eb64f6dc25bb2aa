"""Sequences were recorded one by one; a server runs several at once. Here they are laid
side by side.

A batch is a group of consecutive sequences. Its prefill step holds all their prompt
tokens, its decode step *i* the *i*-th generated token of each sequence that is still
alive.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice, pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.errors import TraceError
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from moesim.traces.format.reader import SequenceRows, Trace

CHUNK_COUNTS = 1 << 20
"""Workload counters held at once while a group of sequences is cut into steps."""


@dataclass(slots=True)
class RoutedLayer:
    """What the gate of one MoE layer decided in one step. A active experts, T tokens.

    Attributes:
        layer: MoE layer.
        experts: int32 [A] active experts, ascending.
        tokens: int32 [A] tokens routed to each (the workload).
        routing: uint16 [T, K] experts of every token, best first.
        weights: float16 [T, K], or None when not asked for.
        scores: float16 [T, E], or None when not asked for.
        predicted: predictor name -> float16 [T, E]; left out where its target lies past
            the last layer.
    """

    layer: int
    experts: np.ndarray
    tokens: np.ndarray
    routing: np.ndarray
    weights: np.ndarray | None
    scores: np.ndarray | None
    predicted: dict[str, np.ndarray]


@dataclass(slots=True)
class RoutedStep:
    """One forward pass of a batch.

    Attributes:
        step: forward pass, counted over the whole run from 0.
        phase: prefill or decode.
        batch: number of the group of sequences.
        tokens: tokens of the step (in a ragged prefill some layers hold fewer).
        context_tokens: largest position plus one.
        sequences: sequences taking part.
        layers: one entry per MoE layer, in order.
    """

    step: int
    phase: Phase
    batch: int
    tokens: int
    context_tokens: int
    sequences: int
    layers: list[RoutedLayer]


def compose(
    trace: Trace,
    *,
    batch: int = 1,
    steps: int | None = None,
    columns: Iterable[str] = (),
) -> Iterator[RoutedStep]:
    """Cut a trace into the forward passes of batches of `batch` consecutive sequences.

    Args:
        trace: an opened trace.
        batch: sequences that run together, >= 1.
        steps: keep the first so many forward passes; None keeps all.
        columns: optional columns the policies need; others are never read.

    Raises:
        TraceError: `batch` or `steps` below 1 or absurdly large, a missing column, or a
            damaged trace.
    """
    check_counts(batch, steps)
    wanted = tuple(columns)
    trace.require(wanted, "this replay")
    return islice(_compose(trace, batch, wanted), steps)


def check_counts(batch: int, steps: int | None) -> None:
    """Refuse batches and numbers of steps that cannot be.

    Raises:
        TraceError: below 1 or absurdly large.
    """
    for name, value in (("batch", batch), ("steps", steps)):
        if value is not None and not 1 <= value <= sys.maxsize:
            raise TraceError(
                f"{name}: expected {'>= 1' if value < 1 else f'<= {sys.maxsize}'}, got"
                f" {value}"
            )


def _compose(
    trace: Trace, batch: int, columns: tuple[str, ...]
) -> Iterator[RoutedStep]:
    sequences = trace.sequences(columns)
    step = 0
    index = 0
    while group := list(islice(sequences, batch)):
        cutter = _Group(group, trace.shape.layers, trace.shape.experts, index)
        for routed in cutter.steps():
            routed.step = step
            yield routed
            step += 1
        index += 1
        # before the next one is read: two batches at once would be the peak
        group.clear()


class _Group:
    """The rows of one batch, cut into steps a bounded number of rows at a time. B
    sequences.
    """

    def __init__(
        self, group: list[SequenceRows], layers: int, experts: int, index: int
    ) -> None:
        self.group = group
        self.layers = layers
        self.experts = experts
        self.index = index
        self.prompts = [
            int(np.count_nonzero(rows.phase == Phase.PREFILL)) for rows in group
        ]
        decoded = [
            len(rows.pos) - prompt
            for rows, prompt in zip(group, self.prompts, strict=True)
        ]
        self.lengths = np.array(decoded) // layers
        self.columns = [name for name in group[0].columns if name != "token"]

    def steps(self) -> Iterator[RoutedStep]:
        if any(self.prompts):
            yield self._prefill()
        longest = int(self.lengths.max())
        stride = max(
            1, CHUNK_COUNTS // (self.layers * max(self.experts, len(self.group)))
        )
        for start in range(0, longest, stride):
            yield from self._decode(start, min(start + stride, longest))

    def _prefill(self) -> RoutedStep:
        rows = self._gather([slice(0, prompt) for prompt in self.prompts])
        layer = rows["layer"]
        order = np.argsort(layer, kind="stable")
        edges = np.searchsorted(layer[order], np.arange(self.layers + 1))
        routing = rows["experts"][order]
        active = [_active(routing[a:b], self.experts) for a, b in pairwise(edges)]
        views = {
            name: _cut(values[order], edges)
            for name, values in rows.items()
            if name in self.columns
        }
        layers = self._layers(
            [a for a, _ in active], [n for _, n in active], _cut(routing, edges), views
        )
        present = [(r, p) for r, p in zip(self.group, self.prompts, strict=True) if p]
        tokens = sum(len(np.unique(r.pos[:p])) for r, p in present)
        context = 1 + max(int(r.pos[p - 1]) for r, p in present)
        return RoutedStep(
            0, Phase.PREFILL, self.index, tokens, context, len(present), layers
        )

    def _decode(self, start: int, stop: int) -> Iterator[RoutedStep]:
        """Decode steps `start` to `stop` of the group."""
        spans = [
            slice(p + self.layers * min(start, n), p + self.layers * min(stop, n))
            for p, n in zip(self.prompts, self.lengths.tolist(), strict=True)
        ]
        rows = self._gather(spans)
        count = stop - start
        places = count * self.layers
        alive = np.count_nonzero(self.lengths[:, None] > np.arange(start, stop), axis=0)
        context = np.zeros(count, dtype=np.int64)
        for sequence, span in zip(self.group, spans, strict=True):
            pos = sequence.pos[span][:: self.layers]
            np.maximum(context[: len(pos)], pos + 1, out=context[: len(pos)])
        routing = rows["experts"]
        views: dict[str, list[np.ndarray]]
        if alive[0] == 1:  # one sequence: every row is a layer step of its own
            shape = (places, 1, -1)
            views = {name: list(rows[name].reshape(shape)) for name in self.columns}
            active: list[np.ndarray] = list(np.sort(routing.astype(np.int32), axis=1))
            tokens: list[np.ndarray] = list(np.ones(routing.shape, dtype=np.int32))
            routed = list(routing.reshape(shape))
        else:
            key = np.concatenate([np.arange(span.stop - span.start) for span in spans])
            order = np.argsort(key, kind="stable")
            edges = np.concatenate(([0], np.cumsum(np.repeat(alive, self.layers))))
            routing = routing[order]
            views = {name: _cut(rows[name][order], edges) for name in self.columns}
            flat = (key[order, None] * self.experts + routing).reshape(-1)
            counts = np.bincount(flat, minlength=places * self.experts)
            flat = np.flatnonzero(counts)
            cuts = np.searchsorted(flat, np.arange(places + 1) * self.experts)
            active = _cut((flat % self.experts).astype(np.int32), cuts)
            tokens = _cut(counts[flat].astype(np.int32), cuts)
            routed = _cut(routing, edges)
        layers = self._layers(active, tokens, routed, views)
        for place, (sequences, positions) in enumerate(
            zip(alive.tolist(), context.tolist(), strict=True)
        ):
            part = layers[place * self.layers : (place + 1) * self.layers]
            yield RoutedStep(
                0, Phase.DECODE, self.index, sequences, positions, sequences, part
            )

    def _gather(self, spans: list[slice]) -> dict[str, np.ndarray]:
        """The rows in `spans` of each sequence, in sequence order; views where there is
        only one.
        """
        parts: dict[str, list[np.ndarray]] = {
            name: [] for name in ("experts", "layer", *self.columns)
        }
        for sequence, span in zip(self.group, spans, strict=True):
            parts["experts"].append(sequence.experts[span])
            parts["layer"].append(sequence.layer[span])
            for name in self.columns:
                parts[name].append(sequence.columns[name][span])
        return {name: _joined(values) for name, values in parts.items()}

    def _layers(
        self,
        active: list[np.ndarray],
        tokens: list[np.ndarray],
        routing: list[np.ndarray],
        views: dict[str, list[np.ndarray]],
    ) -> list[RoutedLayer]:
        """One `RoutedLayer` per entry; entries run through the layers again and
        again.
        """
        numbers = list(range(self.layers)) * (len(active) // self.layers)
        nothing = repeat(None)
        predictors = [name for name in views if name in PREDICTION_COLUMNS]
        predicted: Iterable[dict[str, np.ndarray]] = repeat({})
        if predictors:
            reach = {name: self.layers - int(name[len("pred")]) for name in predictors}
            predicted = [
                {name: views[name][place] for name in predictors if layer < reach[name]}
                for place, layer in enumerate(numbers)
            ]
        weights: Iterable[Any] = views.get("weights", nothing)
        scores: Iterable[Any] = views.get("scores", nothing)
        return list(
            map(
                RoutedLayer,
                numbers,
                active,
                tokens,
                routing,
                weights,
                scores,
                predicted,
            )
        )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _active(routing: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Active experts int32 [A], ascending, and the tokens of each, of routing [T,
    K].
    """
    counts = np.bincount(routing.reshape(-1), minlength=experts)
    active = np.flatnonzero(counts)
    return active.astype(np.int32), counts[active].astype(np.int32)


def _cut(values: np.ndarray, edges: np.ndarray) -> list[np.ndarray]:
    """Views of `values` between consecutive `edges`."""
    bounds = edges.tolist()
    return [values[a:b] for a, b in pairwise(bounds)]
