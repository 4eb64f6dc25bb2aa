"""Forward passes of batches, composed from sequences that were recorded one by one.

A batch is a group of consecutive sequences. Its prefill step holds all their prompt
tokens, its decode step *i* the *i*-th generated token of each sequence that is still
alive; other ways to cut them are those of `moesim.traces.passes`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice, pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.errors import TraceError
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase
from moesim.traces.passes import check_passes, micro_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from moesim.traces.format.reader import SequenceRows, Trace

# Workload counters held at once while a group of sequences is cut into steps.
CHUNK_COUNTS = 1 << 20


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
    check_counts(batch, steps)
    check_passes(trace.passes, batch)
    needed = tuple(columns)
    trace.require(needed, "this replay")
    # Checked at the call, not when the first step is asked for.
    return islice(_compose(trace, batch, needed), steps)


def check_counts(
    batch: int,
    steps: int | None,
) -> None:
    """Refuse batches and numbers of steps that cannot be.

    Raises:
        TraceError: below 1 or absurdly large.
    """
    for name, value in (("batch", batch), ("steps", steps)):
        if value is None or 1 <= value <= sys.maxsize:
            continue
        expected = ">= 1" if value < 1 else f"<= {sys.maxsize}"
        raise TraceError(f"{name}: expected {expected}, got {value}")


def _compose(
    trace: Trace,
    batch: int,
    columns: tuple[str, ...],
) -> Iterator[RoutedStep]:
    sequences = trace.sequences(columns)
    step = 0
    index = 0

    while group := list(islice(sequences, batch)):
        for routed in SequenceGroup(group, trace, index).steps():
            routed.step = step
            yield routed
            step += 1
        index += 1
        # Before the next one is read: two batches at once would be the peak of memory.
        group.clear()


class SequenceGroup:
    """The rows of one batch, cut into steps a bounded number of rows at a time. B
    sequences.

    Args:
        group: the sequences.
        trace: that they are of.
        index: number of the batch.
    """

    def __init__(
        self,
        group: list[SequenceRows],
        trace: Trace,
        index: int,
    ) -> None:
        self._group = group
        self._layers = trace.shape.layers
        self._experts = trace.shape.experts
        self._index = index
        self._prompt_rows = [
            int(np.count_nonzero(rows.phase == Phase.PREFILL)) for rows in group
        ]
        decode_rows = [
            len(rows.pos) - prompt
            for rows, prompt in zip(group, self._prompt_rows, strict=True)
        ]
        # Generated tokens of each sequence: each of them has all layers.
        self._generated = np.array(decode_rows) // self._layers
        self._passes = trace.passes
        # No policy sees token ids.
        self._columns = [name for name in group[0].columns if name != "token"]

    def steps(self) -> Iterator[RoutedStep]:
        """Its prefill, if there is one, and its decode steps."""
        if self.has_prompt:
            yield from self.prefills()
        if self._passes.draft_tokens:
            yield from self._verifying()
            return

        longest = int(self._generated.max())
        row_counts = self._layers * max(self._experts, len(self._group))
        stride = max(1, CHUNK_COUNTS // row_counts)
        for start in range(0, longest, stride):
            yield from self._decode(start, min(start + stride, longest))

    @property
    def has_prompt(self) -> bool:
        """Whether any sequence has prompt tokens."""
        return any(self._prompt_rows)

    @property
    def generated(self) -> np.ndarray:
        """Generated tokens of each sequence, int [B]."""
        return self._generated

    def decode_at(self, places: Sequence[int]) -> RoutedStep:
        """The decode step in which each sequence makes a token of its own.

        Args:
            places: number of that token among the generated ones, for each sequence.
        """
        spans = []
        for prompt, place in zip(self._prompt_rows, places, strict=True):
            first = prompt + self._layers * place
            spans.append(slice(first, first + self._layers))
        rows = self._gather(spans)
        count = len(spans)
        if count == 1:
            layers = self._of_one_sequence(rows)
        else:
            layers = self._of_sequences(rows, spans, np.array([count]))
        return RoutedStep(
            step=0,
            phase=Phase.DECODE,
            batch=self._index,
            tokens=count,
            context_tokens=self._context_tokens(spans, 1)[0],
            sequences=count,
            layers=layers,
        )

    def prefills(self) -> Iterator[RoutedStep]:
        """The steps that compute all prompts of the group: one, or one for each
        micro-batch. A prompt of which some layers hold fewer tokens is not cut.
        """
        prompts = [slice(0, prompt) for prompt in self._prompt_rows]
        most = self._passes.micro_batch_tokens
        if most is None or any(self._is_ragged(*pair) for pair in enumerate(prompts)):
            yield self._prefill(prompts)
            return
        tokens = [prompt // self._layers for prompt in self._prompt_rows]
        for parts in micro_batches(tokens, most):
            yield self._prefill(
                [slice(self._layers * a, self._layers * b) for a, b in parts]
            )

    def _is_ragged(self, sequence: int, prompt: slice) -> bool:
        """Whether some layers hold fewer tokens of a prompt than others."""
        tokens = len(np.unique(self._group[sequence].pos[prompt]))
        return prompt.stop != tokens * self._layers

    def _prefill(self, spans: list[slice]) -> RoutedStep:
        """The step that computes the prompt tokens in `spans` of each sequence."""
        rows = self._gather(spans)
        layer = rows["layer"]
        # Stable, so that the tokens of a layer stay in the order of their sequences.
        by_layer = np.argsort(layer, kind="stable")
        edges = np.searchsorted(layer[by_layer], np.arange(self._layers + 1))

        routing = rows["experts"][by_layer]
        active = [_active(routing[a:b], self._experts) for a, b in pairwise(edges)]
        layers = self._routed_layers(
            experts=[experts for experts, _ in active],
            tokens=[tokens for _, tokens in active],
            routing=_cut(routing, edges),
            views={name: _cut(rows[name][by_layer], edges) for name in self._columns},
        )

        prompts = [
            rows.pos[span]
            for rows, span in zip(self._group, spans, strict=True)
            if span.stop > span.start
        ]
        return RoutedStep(
            step=0,
            phase=Phase.PREFILL,
            batch=self._index,
            tokens=sum(len(np.unique(pos)) for pos in prompts),
            context_tokens=1 + max(int(pos[-1]) for pos in prompts),
            sequences=len(prompts),
            layers=layers,
        )

    def _verifying(self) -> Iterator[RoutedStep]:
        """The decode steps of one sequence, each of which verifies a draft."""
        for place, computed, kept in self._passes.verified(int(self._generated[0])):
            first = self._prompt_rows[0] + self._layers * place
            span = slice(first, first + self._layers * computed)
            # Every token as if it were a sequence of its own.
            tokens = [slice(0, self._layers)] * computed
            yield RoutedStep(
                step=0,
                phase=Phase.DECODE,
                batch=self._index,
                tokens=computed,
                context_tokens=1 + int(self._group[0].pos[span.stop - 1]),
                sequences=1,
                layers=self._of_sequences(
                    self._gather([span]), tokens, np.array([computed])
                ),
                drafted=computed - 1,
                kept=kept,
            )

    def _decode(
        self,
        start: int,
        stop: int,
    ) -> Iterator[RoutedStep]:
        """Decode steps `start` to `stop` of the group."""
        spans = self._decode_spans(start, stop)
        steps = np.arange(start, stop)
        alive = np.count_nonzero(self._generated[:, None] > steps, axis=0)
        rows = self._gather(spans)

        if alive[0] == 1:
            layers = self._of_one_sequence(rows)
        else:
            layers = self._of_sequences(rows, spans, alive)

        context = self._context_tokens(spans, len(steps))
        for place, sequences in enumerate(alive.tolist()):
            first = place * self._layers
            yield RoutedStep(
                step=0,
                phase=Phase.DECODE,
                batch=self._index,
                tokens=sequences,
                context_tokens=context[place],
                sequences=sequences,
                layers=layers[first : first + self._layers],
            )

    def _decode_spans(
        self,
        start: int,
        stop: int,
    ) -> list[slice]:
        """The rows of each sequence in decode steps `start` to `stop`."""
        spans = []
        for prompt, generated in zip(
            self._prompt_rows, self._generated.tolist(), strict=True
        ):
            first = prompt + self._layers * min(start, generated)
            last = prompt + self._layers * min(stop, generated)
            spans.append(slice(first, last))

        return spans

    def _context_tokens(
        self,
        spans: list[slice],
        count: int,
    ) -> list[int]:
        """Largest position plus one in each of `count` decode steps."""
        context = np.zeros(count, dtype=np.int64)
        for sequence, span in zip(self._group, spans, strict=True):
            pos = sequence.pos[span][:: self._layers]
            reached = context[: len(pos)]
            np.maximum(reached, pos + 1, out=reached)

        return context.tolist()

    def _of_one_sequence(self, rows: dict[str, np.ndarray]) -> list[RoutedLayer]:
        """Layer steps where one sequence runs: every row is one of its own."""
        routing = rows["experts"]
        one_token = (len(routing), 1, -1)
        return self._routed_layers(
            experts=list(np.sort(routing.astype(np.int32), axis=1)),
            tokens=list(np.ones(routing.shape, dtype=np.int32)),
            routing=list(routing.reshape(one_token)),
            views={name: list(rows[name].reshape(one_token)) for name in self._columns},
        )

    def _of_sequences(
        self,
        rows: dict[str, np.ndarray],
        spans: list[slice],
        alive: np.ndarray,
    ) -> list[RoutedLayer]:
        """Layer steps of several sequences; `alive` [S] run in each step."""
        # Number of each row's layer step among those of this call.
        key = np.concatenate([np.arange(span.stop - span.start) for span in spans])
        order = np.argsort(key, kind="stable")
        edges = np.concatenate(([0], np.cumsum(np.repeat(alive, self._layers))))

        # Workloads of all layer steps in one count.
        routing = rows["experts"][order]
        places = len(alive) * self._layers
        choice = (key[order, None] * self._experts + routing).reshape(-1)
        counts = np.bincount(choice, minlength=places * self._experts)
        used = np.flatnonzero(counts)
        cuts = np.searchsorted(used, np.arange(places + 1) * self._experts)

        return self._routed_layers(
            experts=_cut((used % self._experts).astype(np.int32), cuts),
            tokens=_cut(counts[used].astype(np.int32), cuts),
            routing=_cut(routing, edges),
            views={name: _cut(rows[name][order], edges) for name in self._columns},
        )

    def _gather(self, spans: list[slice]) -> dict[str, np.ndarray]:
        """The rows in `spans` of each sequence, in sequence order; views where there is
        only one.
        """
        parts: dict[str, list[np.ndarray]] = {
            name: [] for name in ("experts", "layer", *self._columns)
        }
        for sequence, span in zip(self._group, spans, strict=True):
            parts["experts"].append(sequence.experts[span])
            parts["layer"].append(sequence.layer[span])
            for name in self._columns:
                parts[name].append(sequence.columns[name][span])

        return {
            name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            for name, arrays in parts.items()
        }

    def _routed_layers(
        self,
        *,
        experts: list[np.ndarray],
        tokens: list[np.ndarray],
        routing: list[np.ndarray],
        views: dict[str, list[np.ndarray]],
    ) -> list[RoutedLayer]:
        """One `RoutedLayer` per entry; entries run through the layers again and
        again.
        """
        numbers = list(range(self._layers)) * (len(experts) // self._layers)

        predictors = [name for name in views if name in PREDICTION_COLUMNS]
        predicted: Iterable[dict[str, np.ndarray]] = repeat({})
        if predictors:
            # Layers from here on have no target: it lies past the last one.
            end = {name: self._layers - int(name[len("pred")]) for name in predictors}
            predicted = [
                {name: views[name][place] for name in predictors if layer < end[name]}
                for place, layer in enumerate(numbers)
            ]

        weights: Iterable[Any] = views.get("weights", repeat(None))
        scores: Iterable[Any] = views.get("scores", repeat(None))
        columns = (numbers, experts, tokens, routing, weights, scores, predicted)
        # `map` ends with the shortest: the endless ones stand for what is not there.
        return list(map(RoutedLayer, *columns))


def _active(
    routing: np.ndarray,
    experts: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Active experts int32 [A], ascending, and the tokens of each, of routing [T,
    K].
    """
    counts = np.bincount(routing.reshape(-1), minlength=experts)
    active = np.flatnonzero(counts)
    return active.astype(np.int32), counts[active].astype(np.int32)


def _cut(
    values: np.ndarray,
    edges: np.ndarray,
) -> list[np.ndarray]:
    """Views of `values` between consecutive `edges`."""
    return [values[a:b] for a, b in pairwise(edges.tolist())]
