"""The accesses of a trace in replay order, many layer steps per array: for loops that
must see every one of them.

`moesim.traces.format.batch.compose` gives the same as one object per layer step; that
costs microseconds each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.batch import check_counts, compose
from moesim.traces.format.schema import Phase
from moesim.traces.predictions import tallies

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.reader import SequenceRows, Trace

# Accesses of a block, about: memory does not grow with the trace.
BLOCK_ACCESSES = 1 << 19


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
        rows: int64 [N], tokens of each layer step.
        pass_tokens: int64 [N], tokens of the forward pass.
        context_tokens: int64 [N], largest position plus one in that pass.
        sequences: int64 [N], how many take part in it.
        scores: float64 [N, E], gate scores, mean over the tokens of each layer step;
            None where nobody asked for them. So are the following ones.
        workload: int32 [N, P, E], tokens that each predictor gives to the experts of
            its layer (`moesim.traces.predictions`).
        score_sums: float32 [N, P, E], their predicted scores, summed over the tokens.
        routing: uint16 [R, K], experts of every token; layer step i owns as many of the
            following rows as `rows` says.
        routed: objects [N], every layer step as `compose` gives it.
    """

    step: np.ndarray
    batch: np.ndarray
    phase: np.ndarray
    layer: np.ndarray
    edges: np.ndarray
    experts: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray
    pass_tokens: np.ndarray
    context_tokens: np.ndarray
    sequences: np.ndarray
    scores: np.ndarray | None = None
    workload: np.ndarray | None = None
    score_sums: np.ndarray | None = None
    routing: np.ndarray | None = None
    routed: np.ndarray | None = None

    def first(self, count: int) -> LayerSteps:
        """The first `count` layer steps."""
        accesses = int(self.edges[count])
        columns = {
            field.name: getattr(self, field.name)[:count]
            for field in fields(self)
            if getattr(self, field.name) is not None
        }
        columns["edges"] = self.edges[: count + 1]
        columns["experts"] = self.experts[:accesses]
        columns["tokens"] = self.tokens[:accesses]
        return LayerSteps(**columns)


def layer_steps(
    trace: Trace,
    *,
    batch: int = 1,
    steps: int | None = None,
) -> Iterator[LayerSteps]:
    """Cut a trace into blocks of layer steps, as `compose` would with this `batch` and
    so many `steps`.

    Raises:
        TraceError: `batch` or `steps` below 1, or a damaged trace.
    """
    if batch > 1 or not trace.passes.is_plain:
        return of_steps(compose(trace, batch=batch, steps=steps))

    # One sequence after the other needs no composing, which is most of the time.
    check_counts(batch, steps)
    parts = of_sequences(trace.sequences(), trace.shape.layers, trace.shape.experts)
    return joined(parts if steps is None else _first(parts, steps))


def of_steps(
    steps: Iterable[RoutedStep],
    *,
    scores: bool = False,
    predictors: tuple[str, ...] = (),
    routing: bool = False,
    routed: bool = False,
    experts: int = 0,
) -> Iterator[LayerSteps]:
    """Return composed forward passes as blocks.

    Args:
        steps: composed with the columns that are asked for.
        scores: with gate scores.
        predictors: with the workloads that these predict.
        routing: with the experts of every token.
        routed: with the composed layer steps themselves.
        experts: of a layer, where `predictors` are asked for.
    """
    if not (scores or predictors or routing or routed):
        return joined(map(_of_step, steps))
    parts = (
        _with_more(
            step, predictors, experts, scores=scores, routing=routing, routed=routed
        )
        for step in steps
    )
    # Numbers of all experts are many more than those of the active ones.
    return joined(parts, BLOCK_ACCESSES // 16)


def _with_more(
    step: RoutedStep,
    predictors: tuple[str, ...],
    experts: int,
    *,
    scores: bool,
    routing: bool,
    routed: bool,
) -> LayerSteps:
    part = _of_step(step)
    more: dict[str, np.ndarray] = {}
    if scores:
        more["scores"] = np.array([_mean_scores(layer) for layer in step.layers])
    if predictors:
        counted = [
            tallies(layer.predicted, predictors, layer.routing.shape[1], experts)
            for layer in step.layers
        ]
        more["workload"] = np.array([workload for workload, _ in counted])
        more["score_sums"] = np.array([sums for _, sums in counted])
    if routing:
        more["routing"] = np.concatenate([layer.routing for layer in step.layers])
    if routed:
        more["routed"] = np.array(step.layers, object)
    return replace(part, **more)


def _mean_scores(layer: RoutedLayer) -> np.ndarray:
    assert layer.scores is not None, "composed without the column"
    mean: np.ndarray = layer.scores.mean(axis=0, dtype=np.float64)
    return mean


def _first(
    parts: Iterable[LayerSteps],
    steps: int,
) -> Iterator[LayerSteps]:
    """Parts until so many forward passes are over."""
    for part in parts:
        if part.step[-1] < steps:
            yield part
            continue

        count = int(np.searchsorted(part.step, steps))
        if count:
            yield part.first(count)
        return


def of_sequences(
    sequences: Iterable[SequenceRows],
    layers: int,
    experts: int,
) -> Iterator[LayerSteps]:
    """Cut sequences that run one by one into layer steps, in one to many parts per
    sequence.
    """
    step = 0
    for number, rows in enumerate(sequences):
        prompt = int(np.count_nonzero(rows.phase == Phase.PREFILL))
        if prompt:
            key = rows.layer[:prompt, None].astype(np.int64) * experts
            choice = (key + rows.experts[:prompt]).reshape(-1)
            # One count for all layers: a prompt is one forward pass.
            workloads = np.bincount(choice, minlength=layers * experts)
            positions = rows.pos[:prompt]
            # Rows are sorted by position, so a token begins where that changes.
            tokens = 1 + int(np.count_nonzero(np.diff(positions)))
            yield _prefill(
                workloads.reshape(layers, experts),
                np.bincount(rows.layer[:prompt], minlength=layers),
                step,
                number,
                tokens=tokens,
                context_tokens=1 + int(positions[-1]),
            )
            step += 1

        top_k = rows.experts.shape[1]
        stride = max(1, BLOCK_ACCESSES // (layers * top_k)) * layers
        for first in range(prompt, len(rows.pos), stride):
            part = rows.experts[first : first + stride]
            context_tokens = rows.pos[first : first + stride].astype(np.int64) + 1
            yield _decode(part, context_tokens, layers, step, number)
            step += len(part) // layers


def _prefill(
    workloads: np.ndarray,
    rows: np.ndarray,
    step: int,
    number: int,
    *,
    tokens: int,
    context_tokens: int,
) -> LayerSteps:
    """One forward pass of workloads int64 [L, E] and rows int64 [L]."""
    layers, experts = workloads.shape
    counts = workloads.reshape(-1)
    active = np.flatnonzero(counts)
    edges = np.searchsorted(active, np.arange(layers + 1) * experts)

    return LayerSteps(
        step=np.full(layers, step, np.int64),
        batch=np.full(layers, number, np.int64),
        phase=np.full(layers, Phase.PREFILL, np.int8),
        layer=np.arange(layers, dtype=np.int64),
        edges=edges.astype(np.int64),
        experts=(active % experts).astype(np.int32),
        tokens=counts[active].astype(np.int32),
        rows=rows.astype(np.int64),
        pass_tokens=np.full(layers, tokens, np.int64),
        context_tokens=np.full(layers, context_tokens, np.int64),
        sequences=np.ones(layers, np.int64),
    )


def _decode(
    routing: np.ndarray,
    context_tokens: np.ndarray,
    layers: int,
    step: int,
    number: int,
) -> LayerSteps:
    """Decode steps from `step` on, of routing [N, K] by token and layer, with
    `context_tokens` int64 [N].
    """
    count, top_k = routing.shape
    tokens = count // layers
    experts = np.sort(routing, axis=1).astype(np.int32).reshape(-1)

    return LayerSteps(
        step=step + np.arange(count, dtype=np.int64) // layers,
        batch=np.full(count, number, np.int64),
        phase=np.full(count, Phase.DECODE, np.int8),
        layer=np.tile(np.arange(layers, dtype=np.int64), tokens),
        # K distinct experts per token: every layer step has as many accesses.
        edges=np.arange(count + 1, dtype=np.int64) * top_k,
        experts=experts,
        tokens=np.ones(len(experts), np.int32),
        rows=np.ones(count, np.int64),
        pass_tokens=np.ones(count, np.int64),
        context_tokens=context_tokens,
        sequences=np.ones(count, np.int64),
    )


def _of_step(step: RoutedStep) -> LayerSteps:
    count = len(step.layers)
    edges = np.zeros(count + 1, np.int64)
    np.cumsum([len(routed.experts) for routed in step.layers], out=edges[1:])

    return LayerSteps(
        step=np.full(count, step.step, np.int64),
        batch=np.full(count, step.batch, np.int64),
        phase=np.full(count, step.phase, np.int8),
        layer=np.arange(count, dtype=np.int64),
        edges=edges,
        experts=np.concatenate([routed.experts for routed in step.layers]),
        tokens=np.concatenate([routed.tokens for routed in step.layers]),
        rows=np.array([len(routed.routing) for routed in step.layers], np.int64),
        pass_tokens=np.full(count, step.tokens, np.int64),
        context_tokens=np.full(count, step.context_tokens, np.int64),
        sequences=np.full(count, step.sequences, np.int64),
    )


def joined(
    parts: Iterable[LayerSteps], most: int = BLOCK_ACCESSES
) -> Iterator[LayerSteps]:
    """Join many small blocks into few large ones, of about `most` accesses."""
    pending: list[LayerSteps] = []
    accesses = 0
    for part in parts:
        pending.append(part)
        accesses += len(part.experts)
        if accesses >= most:
            yield join(pending)
            pending = []
            accesses = 0

    if pending:
        yield join(pending)


def join(parts: list[LayerSteps]) -> LayerSteps:
    """Return one block of several that follow each other."""
    if len(parts) == 1:
        return parts[0]

    columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(LayerSteps)
        if field.name != "edges" and getattr(parts[0], field.name) is not None
    }

    # Each part's edges count from its own first access, and the last one is the first
    # of the next part.
    starts = np.cumsum([0, *(len(part.experts) for part in parts)]).astype(np.int64)
    edges = [
        part.edges[:-1] + start for part, start in zip(parts, starts, strict=False)
    ]
    columns["edges"] = np.concatenate([*edges, starts[-1:]])
    return LayerSteps(**columns)
