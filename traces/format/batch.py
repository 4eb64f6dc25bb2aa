"""Forward passes of batches, composed from sequences that were recorded one by one.

A batch is a group of consecutive sequences. Its prefill step holds all their prompt
tokens, its decode step *i* the *i*-th generated token of each sequence that is still
alive, unless the trace's passes say otherwise.

A *micro-batch* is a part of a prompt that runs through all layers before the next one
begins. A *draft* proposes some tokens, and one pass of the model verifies them all:
those up to the first wrong one are kept, and one more, which the pass itself makes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.errors import TraceError
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase, prediction_distance

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from moesim.traces.format.reader import Passes, SequenceRows, Trace
    from moesim.traces.format.schema import ModelShape

# Workload counters held at once while a group of sequences is cut into steps.
CHUNK_COUNTS = 1 << 20
# Rows whose experts are counted at once.
_COUNTED_ROWS = 1 << 17


@dataclass(slots=True)
class RoutedLayer:
    """The gate's decision in one MoE layer of one step. A active experts, T tokens.

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
        drafted: tokens of them that a draft proposed; they stand behind the first.
        kept: tokens that the sequence keeps of those that a draft proposed, and the
            one that follows from them; None where nothing was drafted.
    """

    step: int
    phase: Phase
    batch: int
    tokens: int
    context_tokens: int
    sequences: int
    layers: list[RoutedLayer]
    drafted: int = 0
    kept: int | None = None

    @property
    def made(self) -> int:
        """Tokens by which the sequences have advanced."""
        return self.tokens if self.kept is None else self.kept


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """N layer steps in replay order with A accesses, an access being an active expert
    of a layer step, and R rows of a trace.

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
        drafted: int64 [N], tokens of the pass that a draft proposed; None without
            drafts.
        made: int64 [N], tokens by which the sequences have advanced; as above.
        columns: those of the trace that were asked for, [R, …]; layer step i owns as
            many of the following rows as `rows` says.
        scores: float64 [N, E], gate scores, mean over the tokens of each layer step;
            None where nobody asked for them. So are the following ones.
        workload: int32 [N, P, E], tokens that each predictor gives to the experts of
            its layer.
        score_sums: float32 [N, P, E], their predicted scores, summed over the tokens.
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
    drafted: np.ndarray | None = None
    made: np.ndarray | None = None
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    scores: np.ndarray | None = None
    workload: np.ndarray | None = None
    score_sums: np.ndarray | None = None

    @property
    def row_edges(self) -> np.ndarray:
        """int64 [N + 1]; layer step i owns rows ``row_edges[i]:row_edges[i + 1]``."""
        return np.concatenate(([0], np.cumsum(self.rows)))


def compose(
    trace: Trace,
    *,
    batch: int = 1,
    steps: int | None = None,
    columns: Iterable[str] = (),
) -> Iterator[RoutedStep]:
    """Cut a trace into the forward passes of batches of `batch` consecutive sequences.

    Args:
        trace: an opened trace, which says what a pass holds (`Trace.cut`).
        batch: sequences that run together, >= 1.
        steps: keep the first so many forward passes; None keeps all.
        columns: optional columns the policies need; others are never read.

    Raises:
        TraceError: `batch` or `steps` below 1 or absurdly large, a missing column, or a
            damaged trace.
    """
    layers = trace.shape.layers
    parts = numbered(sequence_groups(trace, batch, steps, tuple(columns)))
    routed = chain.from_iterable(routed_steps(part, layers) for part in parts)
    return islice(routed, steps)


def ends_in_prompt(trace: Trace, *, batch: int, steps: int | None) -> bool:
    """Tell whether the first `steps` forward passes end before the prompts of their
    batch do, which micro-batches make possible.
    """
    if steps is None or trace.passes.micro_batch_tokens is None:
        return False
    last = None
    for number, routed in enumerate(compose(trace, batch=batch, steps=steps + 1)):
        if number < steps:
            last = routed.batch
        elif routed.phase == Phase.PREFILL:
            return routed.batch == last
    return False


def sequence_groups(
    trace: Trace,
    batch: int,
    steps: int | None,
    columns: tuple[str, ...],
    *,
    routing: bool = True,
) -> Iterator[SequenceGroup]:
    """The batches of a trace; each is used up before the next one is asked for.

    Raises:
        TraceError: `batch` or `steps` below 1 or absurdly large, several sequences with
            drafts, or a missing column.
    """
    for name, value in (("batch", batch), ("steps", steps)):
        if value is not None and not 1 <= value <= sys.maxsize:
            expected = ">= 1" if value < 1 else f"<= {sys.maxsize}"
            raise TraceError(f"{name}: expected {expected}, got {value}")
    if trace.passes.draft_tokens and batch > 1:
        # They would advance at different paces.
        raise TraceError(
            f"draft_tokens: expected one sequence at a time, got batch {batch}; use"
            " batch 1, or draft_tokens 0"
        )
    trace.require(columns, "this replay")
    # Checked at the call, not when the first step is asked for.
    return _groups(trace, batch, columns, routing=routing)


def _groups(
    trace: Trace, batch: int, columns: tuple[str, ...], *, routing: bool
) -> Iterator[SequenceGroup]:
    sequences = trace.sequences(columns)
    index = 0
    while group := list(islice(sequences, batch)):
        yield SequenceGroup(group, trace.shape, trace.passes, index, routing=routing)
        index += 1
        # Before the next one is read: two batches at once would be the peak of memory.
        group.clear()


def numbered(groups: Iterable[SequenceGroup]) -> Iterator[LayerSteps]:
    """The forward passes of batches, some at a time, counted over all of them."""
    step = 0
    for group in groups:
        for part in group.passes():
            part.step[:] += step
            step = int(part.step[-1]) + 1
            yield part


class SequenceGroup:
    """The rows of one batch, cut into steps a bounded number of rows at a time. B
    sequences.

    Args:
        group: the sequences.
        shape: of the model.
        passes: what forward passes hold.
        index: number of the batch.
        routing: with the experts of every token among the columns.

    Attributes:
        generated: tokens that each sequence generates, int [B].
    """

    def __init__(
        self,
        group: list[SequenceRows],
        shape: ModelShape,
        passes: Passes,
        index: int,
        *,
        routing: bool = True,
    ) -> None:
        self._group = group
        self._layers = shape.layers
        self._experts = shape.experts
        self._index = index
        self._prompt_rows = [
            int(np.count_nonzero(rows.phase == Phase.PREFILL)) for rows in group
        ]
        decode_rows = [
            len(rows.pos) - prompt
            for rows, prompt in zip(group, self._prompt_rows, strict=True)
        ]
        # Each of them has all layers.
        self.generated = np.array(decode_rows) // self._layers
        self._passes = passes
        # No policy sees token ids.
        columns = [name for name in group[0].columns if name != "token"]
        self._columns = [*["experts"] * routing, *columns]

    def passes(self) -> Iterator[LayerSteps]:
        """Its prefill, if there is one, and its decode steps, some passes at a time,
        which count from 0 in each part.
        """
        if self.has_prompt:
            yield from self._prefills()
        if self._passes.draft_tokens:
            yield from self._verifying()
            return
        longest = int(self.generated.max())
        row_counts = self._layers * max(self._experts, len(self._group))
        stride = max(1, CHUNK_COUNTS // row_counts)
        for start in range(0, longest, stride):
            spans = [
                self._span(sequence, min(start, due), min(start + stride, due))
                for sequence, due in enumerate(self.generated.tolist())
            ]
            yield self._layer_steps(Phase.DECODE, spans)

    @property
    def has_prompt(self) -> bool:
        """True if any sequence has prompt tokens."""
        return any(self._prompt_rows)

    @property
    def prompts(self) -> list[int]:
        """Prompt tokens of each sequence, as far as layers hold them."""
        spans = enumerate(self._prompt_rows)
        return [_distinct(self._group[n].pos[:prompt]) for n, prompt in spans]

    def decode_at(self, places: Sequence[int]) -> RoutedStep:
        """The decode step in which each sequence makes a token of its own.

        Args:
            places: number of that token among the generated ones, for each sequence.
        """
        spans = [
            self._span(sequence, place, place + 1)
            for sequence, place in enumerate(places)
        ]
        part = self._layer_steps(Phase.DECODE, spans)
        (routed,) = routed_steps(part, self._layers)
        return routed

    def _span(self, sequence: int, start: int, stop: int) -> slice:
        """The rows of some generated tokens of a sequence."""
        prompt = self._prompt_rows[sequence]
        return slice(prompt + self._layers * start, prompt + self._layers * stop)

    def prefills(self) -> Iterator[RoutedStep]:
        """The steps that compute all prompts of the group: one, or one for each
        micro-batch. A prompt of which some layers hold fewer tokens is not cut.
        """
        for part in self._prefills():
            yield from routed_steps(part, self._layers)

    def _prefills(self) -> Iterator[LayerSteps]:
        prompts = [slice(0, prompt) for prompt in self._prompt_rows]
        most = self._passes.micro_batch_tokens
        if most is None or any(self._is_ragged(*pair) for pair in enumerate(prompts)):
            yield self._layer_steps(Phase.PREFILL, prompts, together=True)
            return
        tokens = [prompt // self._layers for prompt in self._prompt_rows]
        for parts in micro_batches(tokens, most):
            spans = [slice(self._layers * a, self._layers * b) for a, b in parts]
            yield self._layer_steps(Phase.PREFILL, spans, together=True)

    def _is_ragged(self, sequence: int, prompt: slice) -> bool:
        """Tell whether some layers hold fewer tokens of a prompt than others."""
        tokens = _distinct(self._group[sequence].pos[prompt])
        return prompt.stop != tokens * self._layers

    def _verifying(self) -> Iterator[LayerSteps]:
        """The decode passes of one sequence, each of which verifies a draft."""
        generated = int(self.generated[0])
        sequence = self._group[0].seq
        for place, computed, kept in self._passes.verified(generated, sequence):
            span = self._span(0, place, place + computed)
            yield self._layer_steps(Phase.DECODE, [span], together=True, kept=kept)

    def _layer_steps(
        self,
        phase: Phase,
        spans: list[slice],
        *,
        together: bool = False,
        kept: int | None = None,
    ) -> LayerSteps:
        """The passes of the rows in `spans` of each sequence: one for all of them, or
        one for each token, in which all sequences that have so many take part. Of one
        that verifies a draft `kept` tokens stay.
        """
        rows = self._gather(spans)
        positions = [
            rows.pos[span]
            for rows, span in zip(self._group, spans, strict=True)
            if span.stop > span.start
        ]
        if together:
            layer_step = rows["layer"].astype(np.int64)
            tokens = np.array([sum(map(_distinct, positions))])
            context_tokens = np.array([1 + max(int(pos[-1]) for pos in positions)])
            sequences = np.array([len(positions)])
        else:
            layer_step = np.concatenate([np.arange(len(pos)) for pos in positions])
            longest = max(map(len, positions)) // self._layers
            context_tokens = np.zeros(longest, np.int64)
            sequences = np.zeros(longest, np.int64)
            for pos in positions:
                reached = 1 + pos[:: self._layers]
                part = slice(len(reached))
                sequences[part] += 1
                context_tokens[part] = np.maximum(context_tokens[part], reached)
            tokens = sequences

        count = len(sequences) * self._layers
        columns = {name: rows[name] for name in self._columns}
        if together or len(positions) > 1:
            edges, experts, workload = self._counted(count, rows["experts"], layer_step)
            if columns:
                order = np.argsort(layer_step, kind="stable")
                columns = {name: column[order] for name, column in columns.items()}
        else:
            # Where one sequence runs, every row is a layer step of K distinct experts.
            edges = np.arange(count + 1) * rows["experts"].shape[1]
            experts = np.sort(rows["experts"].astype(np.int32), axis=1).reshape(-1)
            workload = np.ones(len(experts), np.int32)

        def by_layer(values: np.ndarray) -> np.ndarray:
            return np.repeat(values, self._layers)

        drafted = made = None
        if self._passes.draft_tokens:
            drafted = by_layer(np.zeros_like(tokens) if kept is None else tokens - 1)
            made = by_layer(tokens if kept is None else np.array([kept]))
        return LayerSteps(
            step=by_layer(np.arange(len(sequences))),
            batch=np.full(count, self._index, np.int64),
            phase=np.full(count, phase, np.int8),
            layer=np.arange(count) % self._layers,
            edges=edges,
            experts=experts,
            tokens=workload,
            rows=np.bincount(layer_step, minlength=count),
            pass_tokens=by_layer(tokens),
            context_tokens=by_layer(context_tokens),
            sequences=by_layer(sequences),
            drafted=drafted,
            made=made,
            columns=columns,
        )

    def _counted(
        self, places: int, experts: np.ndarray, layer_step: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Edges, active experts and their tokens, of rows [R, K] that belong to
        `layer_step` int64 [R] of `places`.
        """
        counts = np.zeros(places * self._experts, np.int64)
        # Workloads of all layer steps in one count, for so many rows at a time that the
        # numbers stay small beside the rows themselves.
        for first in range(0, len(layer_step), _COUNTED_ROWS):
            part = slice(first, first + _COUNTED_ROWS)
            choice = layer_step[part, None] * self._experts + experts[part]
            counts += np.bincount(choice.reshape(-1), minlength=len(counts))
        used = np.flatnonzero(counts)
        edges = np.searchsorted(used, np.arange(places + 1) * self._experts)
        ids = (used % self._experts).astype(np.int32)
        return edges, ids, counts[used].astype(np.int32)

    def _gather(self, spans: list[slice]) -> dict[str, np.ndarray]:
        """The rows in `spans` of each sequence, in sequence order; views where there is
        only one.
        """
        gathered = {}
        for name in dict.fromkeys(("experts", "layer", *self._columns)):
            parts = [
                sequence.arrays()[name][span]
                for sequence, span in zip(self._group, spans, strict=True)
            ]
            gathered[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return gathered


def routed_steps(block: LayerSteps, layers: int) -> Iterator[RoutedStep]:
    """Whole passes of a model with so many layers as one object each."""
    routed = _routed_layers(block, layers)
    firsts = range(0, len(block.layer), layers)
    numbers = [
        column[::layers].tolist()
        for column in (
            block.step,
            block.batch,
            block.pass_tokens,
            block.context_tokens,
            block.sequences,
        )
    ]
    phase = Phase(int(block.phase[0]))
    drafted, made = block.drafted, block.made
    for first, step, batch, tokens, context_tokens, sequences in zip(
        firsts, *numbers, strict=True
    ):
        of_pass = routed[first : first + layers]
        routed_step = RoutedStep(
            step, phase, batch, tokens, context_tokens, sequences, of_pass
        )
        if drafted is not None and made is not None and phase is Phase.DECODE:
            routed_step.drafted = int(drafted[first])
            routed_step.kept = int(made[first])
        yield routed_step


def _routed_layers(block: LayerSteps, layers: int) -> list[RoutedLayer]:
    """One object per layer step."""
    row_edges = block.row_edges
    views = {name: _cut(column, row_edges) for name, column in block.columns.items()}
    numbers = block.layer.tolist()

    predictors = [name for name in views if name in PREDICTION_COLUMNS]
    predicted: Iterable[dict[str, np.ndarray]] = repeat({})
    if predictors:
        # Layers from here on have no target: it lies past the last one.
        end = {name: layers - prediction_distance(name) for name in predictors}
        predicted = [
            {name: views[name][place] for name in predictors if layer < end[name]}
            for place, layer in enumerate(numbers)
        ]

    weights: Iterable[Any] = views.get("weights", repeat(None))
    scores: Iterable[Any] = views.get("scores", repeat(None))
    experts = _cut(block.experts, block.edges)
    tokens = _cut(block.tokens, block.edges)
    columns = (numbers, experts, tokens, views["experts"], weights, scores, predicted)
    # `map` ends with the shortest: the endless ones stand for what is not there.
    return list(map(RoutedLayer, *columns))


def _distinct(positions: np.ndarray) -> int:
    """Count the tokens that these ascending positions are of."""
    if not len(positions):
        return 0
    return 1 + int(np.count_nonzero(np.diff(positions)))


def _cut(values: np.ndarray, edges: np.ndarray) -> list[np.ndarray]:
    """Views of `values` between consecutive `edges`."""
    return [values[a:b] for a, b in pairwise(edges.tolist())]


def micro_batches(tokens: Sequence[int], most: int) -> Iterator[list[tuple[int, int]]]:
    """Cut the prompts of a batch into micro-batches.

    Each takes equally many tokens of every prompt that is not at its end, at least one.

    Args:
        tokens: of each prompt.
        most: tokens of a micro-batch, >= 1.

    Yields:
        Of each prompt, the first token of its part and the one behind its last.
    """
    done = [0] * len(tokens)
    while True:
        open_prompts = [n for n, count in enumerate(tokens) if done[n] < count]
        if not open_prompts:
            return
        share = max(1, most // len(open_prompts))
        part = [(first, first) for first in done]
        for n in open_prompts[:most]:
            part[n] = done[n], min(tokens[n], done[n] + share)
            done[n] = part[n][1]
        yield part
