"""The accesses of a trace in replay order, many layer steps per array: for loops that
must see every one of them.

`moesim.traces.format.batch.compose` gives the same as one object per layer step; that
costs microseconds each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.batch import SequenceGroup, check_counts, sequence_groups
from moesim.traces.format.schema import prediction_distance
from moesim.traces.passes import Passes, check_passes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from moesim.traces.format.batch import PassRows, RoutedLayer, RoutedStep
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
            its layer (`moesim.traces.predictions`).
        score_sums: float32 [N, P, E], their predicted scores, summed over the tokens.
        drafted: int64 [N], tokens of the pass that a draft proposed; None without
            drafts.
        made: int64 [N], tokens by which the sequences have advanced; as above.
        routing: uint16 [R, K], experts of every token; layer step i owns as many of the
            following rows as `rows` says.
        token_scores, token_weights, token_predicted: float64 [R, ...], gate scores,
            combine weights and ``pred1_raw`` of every token, as far as they were read.
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
    drafted: np.ndarray | None = None
    made: np.ndarray | None = None
    routing: np.ndarray | None = None
    token_scores: np.ndarray | None = None
    token_weights: np.ndarray | None = None
    token_predicted: np.ndarray | None = None
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
    routed: bool = False,
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
        routed: with every layer step as an object.

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
        routed=routed,
    )
    # Numbers of all experts are many more than those of the active ones.
    most = BLOCK_ACCESSES // 16 if columns or routing or routed else BLOCK_ACCESSES
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
    routed: bool = False,
) -> Iterator[LayerSteps]:
    step = 0
    for group in groups:
        for passes in group.passes():
            part = _of_passes(passes, group.layers, step, group.index)
            more: dict[str, np.ndarray] = {}
            if "scores" in columns:
                more["scores"] = _mean_scores(passes)
            if predictors:
                more |= _predicted(passes, predictors, group.layers, group.experts)
            if drafts:
                made = part.pass_tokens if passes.kept is None else passes.kept
                more["drafted"] = np.full(len(part.layer), passes.drafted)
                more["made"] = np.broadcast_to(made, len(part.layer))
            if routing:
                more["routing"] = passes.column("experts")
            if tokens:
                more |= {
                    called: passes.column(name).astype(np.float64)
                    for name, called in _TOKEN_COLUMNS.items()
                    if name in columns
                }
            if routed:
                more["routed"] = np.array(group.routed_layers(passes), object)
            yield replace(part, **more) if more else part
            step += len(passes.pass_tokens)


def _of_passes(passes: PassRows, layers: int, step: int, number: int) -> LayerSteps:
    """Passes from `step` on, of the batch with this number."""
    count = len(passes.pass_tokens)
    steps = np.arange(step, step + count, dtype=np.int64)
    total = count * layers

    return LayerSteps(
        step=np.repeat(steps, layers),
        batch=np.full(total, number, np.int64),
        phase=np.full(total, passes.phase, np.int8),
        layer=np.tile(np.arange(layers, dtype=np.int64), count),
        edges=passes.edges.astype(np.int64),
        experts=passes.experts,
        tokens=passes.tokens,
        rows=np.diff(passes.row_edges),
        pass_tokens=np.repeat(passes.pass_tokens.astype(np.int64), layers),
        context_tokens=np.repeat(passes.context_tokens.astype(np.int64), layers),
        sequences=np.repeat(passes.sequences.astype(np.int64), layers),
    )


def _mean_scores(passes: PassRows) -> np.ndarray:
    """Gate scores, mean over the tokens of each layer step: float64 [S, E]."""
    scores = passes.column("scores").astype(np.float64)
    counts = np.diff(passes.row_edges)
    if passes.layer_step is None:
        return scores
    # A layer that no token of a prompt reaches has no mean.
    mean = np.full((len(counts), scores.shape[1]), np.nan)
    used = np.flatnonzero(counts)
    # Sums of 16-bit numbers are exact in 64 bits, in whatever order.
    sums = np.add.reduceat(scores, passes.row_edges[used], axis=0)
    mean[used] = sums / counts[used, None]
    return mean


def _predicted(
    passes: PassRows, predictors: tuple[str, ...], layers: int, experts: int
) -> dict[str, np.ndarray]:
    """Return what these predictors give to the experts of each layer step."""
    from moesim.traces.predictions import tally_layer_steps  # noqa: PLC0415 - few runs predict

    places = len(passes.row_edges) - 1
    top_k = passes.rows["experts"].shape[1]
    workload = np.zeros((places, len(predictors), experts), np.int32)
    sums = np.zeros((places, len(predictors), experts), np.float32)
    for place, name in enumerate(predictors):
        # Layers from here on have no target: it lies past the last one.
        end = layers - prediction_distance(name)
        tally_layer_steps(
            # Compiled code has no float16 on a CPU; float32 orders alike.
            scores=passes.column(name).astype(np.float32),
            row_edges=passes.row_edges,
            has_target=np.arange(places) % layers < end,
            top_k=top_k,
            predictor=place,
            workload=workload,
            sums=sums,
        )
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
    count = len(layers)
    edges = np.zeros(count + 1, np.int64)
    np.cumsum([len(routed.experts) for routed in layers], out=edges[1:])
    part = LayerSteps(
        step=np.full(count, step.step, np.int64),
        batch=np.full(count, step.batch, np.int64),
        phase=np.full(count, step.phase, np.int8),
        layer=np.array([routed.layer for routed in layers], np.int64),
        edges=edges,
        experts=np.concatenate([routed.experts for routed in layers]),
        tokens=np.concatenate([routed.tokens for routed in layers]),
        rows=np.array([len(routed.routing) for routed in layers], np.int64),
        pass_tokens=np.full(count, step.tokens, np.int64),
        context_tokens=np.full(count, step.context_tokens, np.int64),
        sequences=np.full(count, step.sequences, np.int64),
    )
    more: dict[str, np.ndarray] = {}
    scores = [routed.scores for routed in layers if routed.scores is not None]
    if "scores" in columns and len(scores) == count:
        means = [each.mean(axis=0, dtype=np.float64) for each in scores]
        more["scores"] = np.array(means)
    if predictors:
        from moesim.traces.predictions import tallies  # noqa: PLC0415 - few runs predict

        known = [
            tallies(routed.predicted, predictors, routed.routing.shape[1], experts)
            for routed in layers
        ]
        more["workload"] = np.array([workload for workload, _ in known])
        more["score_sums"] = np.array([sums for _, sums in known])
    if step.drafted or step.kept is not None:
        more["drafted"] = np.full(count, step.drafted)
        more["made"] = np.full(count, step.made)
    if routing:
        more["routing"] = _stacked([routed.routing for routed in layers])
    if tokens:
        more |= _by_token(layers, columns)
    return replace(part, **more) if more else part


def _stacked(parts: list[np.ndarray]) -> np.ndarray:
    """Rows of experts below each other; shorter ones end in ids that no expert has."""
    width = max(part.shape[1] for part in parts)
    stacked = np.full((sum(map(len, parts)), width), np.iinfo(np.uint16).max, np.uint16)
    first = 0
    for part in parts:
        stacked[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return stacked


def _by_token(
    layers: list[RoutedLayer], columns: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Gate outputs of single tokens, as far as they are columns and the layers have
    them.
    """
    by_layer: dict[str, list[np.ndarray | None]] = {
        "scores": [routed.scores for routed in layers],
        "weights": [routed.weights for routed in layers],
        "pred1_raw": [routed.predicted.get("pred1_raw") for routed in layers],
    }
    made = {}
    for name, called in _TOKEN_COLUMNS.items():
        widths = [each.shape[1] for each in by_layer[name] if each is not None]
        if name not in columns or not widths:
            continue
        # The last layer predicts none.
        made[called] = np.concatenate(
            [
                np.zeros((len(routed.routing), widths[0])) if each is None else each
                for each, routed in zip(by_layer[name], layers, strict=True)
            ]
        ).astype(np.float64)
    return made


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
