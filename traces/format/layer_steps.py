"""The accesses of a trace in replay order, many layer steps per array: for loops that
must see every one of them.

`moesim.traces.format.batch.compose` gives the same as one object per layer step; that
costs microseconds each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.arrays import top_k
from moesim.traces.format.batch import (
    PassRows,
    SequenceGroup,
    check_counts,
    check_passes,
    sequence_groups,
)
from moesim.traces.format.reader import Passes
from moesim.traces.format.schema import prediction_distance

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.reader import SequenceRows, Trace
    from moesim.traces.format.schema import ModelShape

_TOKEN_COLUMNS = {
    "scores": "token_scores",
    "weights": "token_weights",
    "pred1_raw": "token_predicted",
}
"""Columns of a trace that are cut token by token, and what they are called here."""

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
            its layer .
        score_sums: float32 [N, P, E], their predicted scores, summed over the tokens.
        drafted: int64 [N], tokens of the pass that a draft proposed; None without
            drafts.
        made: int64 [N], tokens by which the sequences have advanced; as above.
        routing: uint16 [R, K], experts of every token; layer step i owns as many of the
            following rows as `rows` says.
        token_scores, token_weights, token_predicted: float64 [R, ...], gate scores,
            combine weights and ``pred1_raw`` of every token, as far as they were read.
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
    drafted: np.ndarray | None = None
    made: np.ndarray | None = None
    routing: np.ndarray | None = None
    token_scores: np.ndarray | None = None
    token_weights: np.ndarray | None = None
    token_predicted: np.ndarray | None = None

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
        rows = int(self.rows[:count].sum())
        for name in ("routing", *_TOKEN_COLUMNS.values()):
            if name in columns:
                columns[name] = getattr(self, name)[:rows]
        return LayerSteps(**columns)


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
    check_counts(batch, steps)
    check_passes(trace.passes, batch)
    trace.require(columns, "this replay")
    groups = sequence_groups(trace, batch, columns)
    parts = _of_groups(
        groups,
        columns,
        predictors,
        drafts=trace.passes.draft_tokens > 0,
        routing=routing,
        tokens=tokens,
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
    groups = (
        SequenceGroup([rows], shape, Passes(), number)
        for number, rows in enumerate(sequences)
    )
    return _of_groups(groups)


def _of_groups(
    groups: Iterable[SequenceGroup],
    columns: tuple[str, ...] = (),
    predictors: tuple[str, ...] = (),
    *,
    drafts: bool = False,
    routing: bool = False,
    tokens: bool = False,
) -> Iterator[LayerSteps]:
    step = 0
    for group in groups:
        for passes in group.passes():
            # Layers from here on have no target: it lies past the last one.
            targets = {
                name: passes.layer < group.layers - prediction_distance(name)
                for name in predictors
            }
            yield _of_passes(
                passes,
                step,
                group.index,
                columns,
                targets,
                drafts=drafts,
                routing=routing,
                tokens=tokens,
                experts=group.experts,
            )
            step += len(passes.pass_tokens)


def _of_passes(
    passes: PassRows,
    step: int,
    batch: int,
    columns: tuple[str, ...],
    targets: Mapping[str, np.ndarray],
    *,
    drafts: bool,
    routing: bool,
    tokens: bool,
    experts: int,
) -> LayerSteps:
    """Passes from `step` on, of the batch with this number.

    Args:
        passes: with the columns that are asked for, as far as there are any.
        step, batch: of the first pass.
        columns: of the gate that are read.
        targets: predictor -> bool [S], whether the layer that it predicts exists.
        drafts: with what drafts proposed.
        routing: with the experts of every token.
        tokens: with the gate outputs of every token.
        experts: of a layer.
    """
    total = len(passes.layer)
    layers = total // len(passes.pass_tokens)

    def by_layer_step(values: np.ndarray) -> np.ndarray:
        return np.repeat(values.astype(np.int64), layers)

    more: dict[str, np.ndarray] = {}
    if "scores" in columns and "scores" in passes.rows:
        more["scores"] = _mean_scores(passes)
    if targets:
        more |= _predicted(passes, targets, experts)
    if drafts:
        made = passes.pass_tokens if passes.kept is None else np.array([passes.kept])
        more["drafted"] = np.full(total, passes.drafted)
        more["made"] = by_layer_step(made)
    if routing:
        more["routing"] = passes.column("experts")
    if tokens:
        more |= {
            called: passes.column(name).astype(np.float64)
            for name, called in _TOKEN_COLUMNS.items()
            if name in columns and name in passes.rows
        }
    return LayerSteps(
        step=by_layer_step(step + np.arange(len(passes.pass_tokens))),
        batch=np.full(total, batch, np.int64),
        phase=np.full(total, passes.phase, np.int8),
        layer=passes.layer,
        edges=passes.edges.astype(np.int64),
        experts=passes.experts,
        tokens=passes.tokens,
        rows=np.diff(passes.row_edges),
        pass_tokens=by_layer_step(passes.pass_tokens),
        context_tokens=by_layer_step(passes.context_tokens),
        sequences=by_layer_step(passes.sequences),
        **more,
    )


def _summed(passes: PassRows, values: np.ndarray) -> np.ndarray:
    """Sums [S, E] of values [R, E] of every token, over those of each layer step."""
    counts = np.diff(passes.row_edges)
    if (counts == 1).all():
        return values
    sums = np.zeros((len(counts), values.shape[1]), values.dtype)
    # No token of a prompt may reach a layer.
    used = np.flatnonzero(counts)
    sums[used] = np.add.reduceat(values, passes.row_edges[used], axis=0)
    return sums


def _mean_scores(passes: PassRows) -> np.ndarray:
    """Gate scores, mean over the tokens of each layer step: float64 [S, E]."""
    # Sums of 16-bit numbers are exact in 64 bits, in whatever order.
    sums = _summed(passes, passes.column("scores").astype(np.float64))
    with np.errstate(invalid="ignore"):
        return sums / np.diff(passes.row_edges)[:, None]


def _predicted(
    passes: PassRows, targets: Mapping[str, np.ndarray], experts: int
) -> dict[str, np.ndarray]:
    """What predictors give to the experts of each layer step: how often each is among
    a token's best scores, and its scores, summed over the tokens.
    """
    layer_steps = len(passes.layer)
    shape = layer_steps, len(targets), experts
    workload = np.zeros(shape, np.int32)
    sums = np.zeros(shape, np.float32)
    place_of_row = np.repeat(np.arange(layer_steps), np.diff(passes.row_edges))
    most = min(experts, passes.rows["experts"].shape[1])
    for number, (name, has_target) in enumerate(targets.items()):
        if not has_target.any():
            continue
        scores = passes.column(name).astype(np.float32)
        best = place_of_row[:, None] * experts + top_k(scores, most)
        counts = np.bincount(best.reshape(-1), minlength=layer_steps * experts)
        workload[has_target, number] = counts.reshape(-1, experts)[has_target]
        sums[has_target, number] = _summed(passes, scores)[has_target]
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
        if part.step[-1] < steps:
            yield part
            continue

        count = int(np.searchsorted(part.step, steps))
        if count:
            yield part.first(count)
        return


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
    rows = {"experts": _stacked(routings)} if routing or predictors else {}
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
    passes = PassRows(
        step.phase,
        layer=np.array([routed.layer for routed in layers], np.int64),
        edges=np.cumsum([0, *(len(routed.experts) for routed in layers)]),
        experts=np.concatenate([routed.experts for routed in layers]),
        tokens=np.concatenate([routed.tokens for routed in layers]),
        row_edges=np.cumsum([0, *map(len, routings)]),
        pass_tokens=np.array([step.tokens]),
        context_tokens=np.array([step.context_tokens]),
        sequences=np.array([step.sequences]),
        rows=rows,
        drafted=step.drafted,
        kept=step.kept,
    )
    return _of_passes(
        passes,
        step.step,
        step.batch,
        columns,
        {
            name: np.array([name in routed.predicted for routed in layers])
            for name in predictors
        },
        drafts=step.drafted > 0 or step.kept is not None,
        routing=routing,
        tokens=tokens,
        experts=experts,
    )


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

    columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(LayerSteps)
        if field.name != "edges" and getattr(parts[0], field.name) is not None
    }

    # Each part's edges count from its own first access, and the last one is the first
    # of the next part.
    lengths = [len(part.experts) for part in parts]
    starts = np.cumsum([0, *lengths]).astype(np.int64)
    edges = [
        part.edges[:-1] + start for part, start in zip(parts, starts, strict=False)
    ]
    columns["edges"] = np.concatenate([*edges, starts[-1:]])
    return LayerSteps(**columns)
