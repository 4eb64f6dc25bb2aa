"""The accesses of a trace in replay order, many layer steps per array: for loops that
must see every one of them.

`moesim.traces.format.batch.compose` gives the same as one object per layer step; that
costs microseconds each.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.arrays import top_k
from moesim.traces.format.batch import (
    LayerSteps,
    SequenceGroup,
    numbered,
    sequence_groups,
)
from moesim.traces.format.reader import Passes
from moesim.traces.format.schema import prediction_distance

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.reader import SequenceRows, Trace
    from moesim.traces.format.schema import ModelShape

_TOKEN_COLUMNS = ("scores", "weights", "pred1_raw")
"""Columns of a trace that somebody reads token by token."""

# Accesses of a block, about: memory does not grow with the trace.
BLOCK_ACCESSES = 1 << 19


def layer_steps(
    trace: Trace,
    *,
    batch: int = 1,
    steps: int | None = None,
    columns: tuple[str, ...] = (),
    predictors: tuple[str, ...] = (),
    routing: bool = False,
    tokens: bool = False,
) -> Iterator[LayerSteps]:
    """Cut a trace into blocks of layer steps, as `compose` would with this `batch` and
    so many `steps`.

    Args:
        trace: an opened trace, which says what a pass holds (`Trace.cut`).
        batch: sequences that run together, >= 1.
        steps: keep the first so many forward passes; None keeps all.
        columns: optional columns to read; gate scores come with ``scores`` among them.
        predictors: those of them whose predicted workloads are asked for.
        routing: with the experts of every token.
        tokens: with the gate outputs of every token, as far as they are columns.

    Raises:
        TraceError: `batch` or `steps` below 1, a missing column, or a damaged trace.
    """
    layers = trace.shape.layers
    groups = sequence_groups(trace, batch, steps, columns, routing=routing)
    parts = (
        _read(
            part,
            columns,
            # Layers from here on have no target: it lies past the last one.
            {
                name: part.layer < layers - prediction_distance(name)
                for name in predictors
            },
            tokens=tokens,
            experts=trace.shape.experts,
            most=trace.shape.top_k,
        )
        for part in numbered(groups)
    )
    # Numbers of all experts are many more than those of the active ones.
    most = BLOCK_ACCESSES // 16 if columns or routing else BLOCK_ACCESSES
    return joined(parts if steps is None else _first(parts, steps), most)


def of_sequences(
    sequences: Iterable[SequenceRows], shape: ModelShape
) -> Iterator[LayerSteps]:
    """Cut sequences that run one by one into layer steps, in one to many parts per
    sequence.
    """
    return numbered(
        SequenceGroup([rows], shape, Passes(), number, routing=False)
        for number, rows in enumerate(sequences)
    )


def _read(
    block: LayerSteps,
    columns: tuple[str, ...],
    targets: Mapping[str, np.ndarray],
    *,
    tokens: bool,
    experts: int,
    most: int,
) -> LayerSteps:
    """A block with what is derived of its columns, without those that nobody reads.

    Args:
        block: with the columns that are asked for, as far as there are any.
        columns: of the gate that are read.
        targets: predictor -> bool [N], whether the layer that it predicts exists.
        tokens: with the gate outputs of every token.
        experts: of a layer.
        most: experts of a token.
    """
    given = block.columns
    more: dict[str, np.ndarray] = {}
    if "scores" in columns and "scores" in given:
        # Sums of 16-bit numbers are exact in 64 bits, in whatever order.
        sums = _summed(block, given["scores"].astype(np.float64))
        with np.errstate(invalid="ignore"):
            more["scores"] = sums / block.rows[:, None]
    if targets:
        more |= _predicted(block, targets, experts, min(most, experts))
    kept = {"experts"}
    if tokens:
        kept |= set(_TOKEN_COLUMNS) & set(columns)
    read = {name: column for name, column in given.items() if name in kept}
    return replace(block, columns=read, **more)


def _summed(block: LayerSteps, values: np.ndarray) -> np.ndarray:
    """Sums [N, E] of values [R, E] of every token, over those of each layer step."""
    if (block.rows == 1).all():
        return values
    sums = np.zeros((len(block.rows), values.shape[1]), values.dtype)
    # No token of a prompt may reach a layer.
    used = np.flatnonzero(block.rows)
    sums[used] = np.add.reduceat(values, block.row_edges[used], axis=0)
    return sums


def _predicted(
    block: LayerSteps, targets: Mapping[str, np.ndarray], experts: int, most: int
) -> dict[str, np.ndarray]:
    """What predictors give to the experts of each layer step: how often each is among
    a token's best scores, and its scores, summed over the tokens.
    """
    layer_steps = len(block.layer)
    shape = layer_steps, len(targets), experts
    workload = np.zeros(shape, np.int32)
    sums = np.zeros(shape, np.float32)
    place_of_row = np.repeat(np.arange(layer_steps), block.rows)
    for number, (name, has_target) in enumerate(targets.items()):
        if not has_target.any():
            continue
        scores = block.columns[name].astype(np.float32)
        best = place_of_row[:, None] * experts + top_k(scores, most)
        counts = np.bincount(best.reshape(-1), minlength=layer_steps * experts)
        workload[has_target, number] = counts.reshape(-1, experts)[has_target]
        sums[has_target, number] = _summed(block, scores)[has_target]
    return {"workload": workload, "score_sums": sums}


def of_steps(
    steps: Iterable[RoutedStep], *, scores: bool = False
) -> Iterator[LayerSteps]:
    """Return composed forward passes as blocks; with their gate `scores`, as far as
    they were read.
    """
    columns = ("scores",) if scores else ()
    return joined(of_step(step, columns=columns, tokens=scores) for step in steps)


def _first(parts: Iterable[LayerSteps], steps: int) -> Iterator[LayerSteps]:
    """Parts until so many forward passes are over."""
    for part in parts:
        count = int(np.searchsorted(part.step, steps))
        if count == len(part.step):
            yield part
            continue
        if count:
            yield _cut(part, count)
        return


def _cut(block: LayerSteps, count: int) -> LayerSteps:
    """The first `count` layer steps."""
    accesses = int(block.edges[count])
    rows = int(block.rows[:count].sum())
    cut = {
        field.name: getattr(block, field.name)[:count]
        for field in fields(block)
        if isinstance(getattr(block, field.name), np.ndarray)
    }
    cut |= {
        "edges": block.edges[: count + 1],
        "experts": block.experts[:accesses],
        "tokens": block.tokens[:accesses],
    }
    columns = {name: column[:rows] for name, column in block.columns.items()}
    return LayerSteps(**cut, columns=columns)


def of_step(
    step: RoutedStep,
    *,
    columns: tuple[str, ...] = (),
    predictors: tuple[str, ...] = (),
    routing: bool = False,
    tokens: bool = False,
    experts: int = 0,
) -> LayerSteps:
    """Return the layer steps of one composed forward pass, all or some.

    Args:
        step: the forward pass.
        columns, predictors, routing, tokens: as in `layer_steps`; what no layer has of
            them is left out.
        experts: routed experts of a layer, if there are predictors.
    """
    layers = step.layers
    routings = [routed.routing for routed in layers]
    rows = {"experts": _stacked(routings)} if routing else {}
    for name in dict.fromkeys((*columns, *predictors)):
        given = [_gate_output(routed, name) for routed in layers]
        known = [values for values in given if values is not None]
        if known:
            # The last layer predicts none.
            width = known[0].shape[1]
            rows[name] = np.concatenate(
                [
                    np.zeros((len(ids), width)) if values is None else values
                    for ids, values in zip(routings, given, strict=True)
                ]
            )

    def by_layer(number: int) -> np.ndarray:
        return np.full(len(layers), number, np.int64)

    has_drafts = step.drafted > 0 or step.kept is not None
    block = LayerSteps(
        step=by_layer(step.step),
        batch=by_layer(step.batch),
        phase=np.full(len(layers), step.phase, np.int8),
        layer=np.array([routed.layer for routed in layers], np.int64),
        edges=np.cumsum([0, *(len(routed.experts) for routed in layers)]),
        experts=np.concatenate([routed.experts for routed in layers]),
        tokens=np.concatenate([routed.tokens for routed in layers]),
        rows=np.array([len(ids) for ids in routings], np.int64),
        pass_tokens=by_layer(step.tokens),
        context_tokens=by_layer(step.context_tokens),
        sequences=by_layer(step.sequences),
        drafted=by_layer(step.drafted) if has_drafts else None,
        made=by_layer(step.made) if has_drafts else None,
        columns=rows,
    )
    targets = {
        name: np.array([name in routed.predicted for routed in layers])
        for name in predictors
    }
    most = max(ids.shape[1] for ids in routings)
    return _read(block, columns, targets, tokens=tokens, experts=experts, most=most)


def _gate_output(routed: RoutedLayer, name: str) -> np.ndarray | None:
    if name in ("scores", "weights"):
        values: np.ndarray | None = getattr(routed, name)
        return values
    return routed.predicted.get(name)


def _stacked(parts: list[np.ndarray]) -> np.ndarray:
    """Rows of experts below each other; shorter ones end in ids that no expert has."""
    width = max(part.shape[1] for part in parts)
    stacked = np.full((sum(map(len, parts)), width), np.iinfo(np.uint16).max, np.uint16)
    first = 0
    for part in parts:
        stacked[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return stacked


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

    joined_columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(LayerSteps)
        if isinstance(getattr(parts[0], field.name), np.ndarray)
    }
    # Each part's edges count from its own first access.
    sizes = np.concatenate([np.diff(part.edges) for part in parts])
    joined_columns["edges"] = np.concatenate(([0], np.cumsum(sizes)))
    columns = {
        name: np.concatenate([part.columns[name] for part in parts])
        for name in parts[0].columns
    }
    return LayerSteps(**joined_columns, columns=columns)
