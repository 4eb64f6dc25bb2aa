"""Adds synthetic predictions of stated accuracy to a trace, and the gate's scores where
it has none.

A prediction of depth d is the true gate's output, mixed with noise: deviations from
each expert's mean logit are multiplied by ``1 / sqrt(1 + r²)``, and noise of the same
variance by ``r / sqrt(1 + r²)`` is added. The ratio r of a depth is solved so that the
share of the used experts among the K best predicted (*recall*) is the one asked for.
A confident expert stands out from the noise and a marginal one does not, so the first
of the K is predicted better than the last. How errors depend on each other says
`moesim.traces.synthetic.prediction_noise`, and what stands in for missing scores
`moesim.traces.synthetic.gate_scores`.

Letters: N rows, T tokens, L layers, E experts, K per token.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.errors import TraceError
from moesim.traces.format.arrays import to_float16
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.writer import TraceWriter
from moesim.traces.synthetic.gate_scores import (
    TOKEN_MEMORY,
    centred,
    fill_logits,
    is_sigmoid,
    logits_of,
    popularity_logits,
)
from moesim.traces.synthetic.loops import (
    SMALLEST,
    add_moments,
    fill_predicted,
    fill_scores,
)
from moesim.traces.synthetic.marks import PREDICTIONS
from moesim.traces.synthetic.prediction_noise import (
    SCORE_STREAM,
    Dependence,
    SequenceNoise,
    Walk,
    count_hits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from moesim.traces.format.reader import SequenceRows
    from moesim.traces.format.schema import TraceHeader

_DEPTH_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw")
_RESIDUAL_COLUMN = "pred1_res"

# Logits held at once: of a chunk of tokens, and of the tokens that fidelities are
# solved on. 4 Mi logits are 32,768 rows of 128 experts, whose mean recall is known to
# about 0.1 points.
CHUNK_VALUES = 1 << 20
SAMPLE_VALUES = 1 << 22
_BISECTIONS = 20
# Recall asked for may miss what can be had by so much: rounding makes equal scores.
TOLERANCE = 0.005


@dataclass(frozen=True, slots=True)
class Predictor:
    """One column of predictions.

    Attributes:
        column: of the trace.
        depth: layers between the gate that it is made at and the one that it is about.
        asked: recall that was asked for.
        fidelity: correlation of predicted and true logits' deviations.
        measured: recall of what is written; NaN before it was measured.
    """

    column: str
    depth: int
    asked: float
    fidelity: float = math.nan
    measured: float = math.nan


@dataclass(frozen=True, slots=True)
class PredictedTrace:
    """The trace that `predict` wrote.

    Attributes:
        path: of the trace.
        rows: written.
        predictors: with the recall asked for and the one measured.
        scores: whether scores were drawn into it.
    """

    path: Path
    rows: int
    predictors: tuple[Predictor, ...]
    scores: bool


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some tokens of one sequence. G = T * L places, token by token.

    Attributes:
        rows: of the whole sequence.
        span: rows that belong to these tokens.
        place: int64 [N], the place of each of those rows.
        tokens: T.
        logits: float32 [G, E]; NaN where no row was recorded.
        experts: uint16 [G, K]; zeros where no row was recorded.
    """

    rows: SequenceRows
    span: slice
    place: np.ndarray
    tokens: int
    logits: np.ndarray
    experts: np.ndarray


def predict(
    source: Trace | Path | str,
    target: Path | str,
    *,
    recall: Sequence[float] = (),
    residual: float | None = None,
    at: int | None = None,
    scores: bool = False,
    seed: int = 0,
    dependence: Dependence | None = None,
    progress: Callable[[float], None] | None = None,
) -> PredictedTrace:
    """Write a trace with synthetic predictions, and say in its header what they are.

    It is read three to four times, a sequence at a time; memory does not grow with its
    length. The result does not depend on how many tokens are worked on at once.

    Args:
        source: a trace.
        target: the trace to write; it appears when it is complete.
        recall: of ``pred1_raw``, ``pred2_raw``, ``pred3_raw``: the share of the experts
            really used, among the K best predicted, over all tokens of the trace.
        residual: recall of ``pred1_res``, if there shall be such a column. Its noise is
            that of ``pred1_raw``: their errors were correlated by 0.998 in ``tiny``.
        at: measure recalls at so many experts: a token's `at` best ones, among the `at`
            best predicted; None for all K. With 1 it is how often the best expert is
            foreseen.
        scores: also write the gate's scores, drawn consistent with the recorded experts
            and weights, and the weights that follow from them where there are none.
        seed: same source, options and seed, same file.
        dependence: between errors; None takes that of the trace ``tiny``.
        progress: called with the share of the work done.

    Raises:
        TraceError: nothing to add, recalls out of 0..1 or rising with the depth, more
            of them than columns or layers, `at` out of 1..K, a column that is there
            already, or a recall that this trace does not admit.
    """
    if seed < 0:
        raise TraceError(f"predict: seed: expected >= 0, got {seed}")
    trace = source if isinstance(source, Trace) else open_trace(source)
    predictors = _predictors(tuple(recall), residual)
    columns = [predictor.column for predictor in predictors]
    _check(trace, predictors, [*columns, *(["scores"] if scores else [])])
    top_k = trace.shape.top_k
    if at is not None and not 1 <= at <= top_k:
        raise TraceError(f"at: expected 1..{top_k} experts of a token, got {at}")

    work = _Work(trace, seed, dependence or Dependence(), predictors, at, progress)
    work.survey()
    predictors = work.solve()
    header = _marked(trace.header, work, predictors, scores=scores)
    written = work.write(target, header, predictors, scores=scores)
    return PredictedTrace(written.path, written.rows, predictors, scores)


# -- what was asked --------------------------------------------------------------------


def _predictors(
    recall: tuple[float, ...], residual: float | None
) -> tuple[Predictor, ...]:
    if len(recall) > len(_DEPTH_COLUMNS):
        raise TraceError(
            f"recall: expected at most {len(_DEPTH_COLUMNS)} depths"
            f" ({', '.join(_DEPTH_COLUMNS)}), got {len(recall)}"
        )

    asked = dict(zip(_DEPTH_COLUMNS, recall, strict=False))
    if residual is not None:
        asked[_RESIDUAL_COLUMN] = residual
    for column, value in asked.items():
        if not 0 < value <= 1:
            raise TraceError(f"recall of {column}: expected 0 < R <= 1, got {value}")
    if list(recall) != sorted(recall, reverse=True):
        listed = ",".join(map(str, recall))
        raise TraceError(
            f"recall: expected no more at a greater depth, got {listed}; the nearest"
            " layer comes first"
        )
    return tuple(
        Predictor(column, depth=int(column[len("pred")]), asked=value)
        for column, value in asked.items()
    )


def _check(trace: Trace, predictors: tuple[Predictor, ...], columns: list[str]) -> None:
    """Refuse what this trace cannot take."""
    if not columns:
        raise TraceError(
            f"{trace.path}: nothing to add: state a recall, or ask for scores"
        )
    for column in columns:
        if column in trace.columns:
            raise TraceError(
                f"{trace.path}: column {column!r} is there already; leave it out, or"
                " choose a trace without it"
            )
    for predictor in predictors:
        if predictor.depth >= trace.shape.layers:
            raise TraceError(
                f"{trace.path}: recall: expected depths below the {trace.shape.layers}"
                f" layers of {trace.shape.name}, got depth {predictor.depth}"
            )


# -- the header ------------------------------------------------------------------------


def _marked(
    header: TraceHeader, work: _Work, predictors: tuple[Predictor, ...], *, scores: bool
) -> TraceHeader:
    """The header, with what was drawn in it."""
    # A trace may be added to twice: what was said before stays true.
    earlier = header.provenance.get(PREDICTIONS)
    drawn: dict[str, Any] = dict(earlier) if isinstance(earlier, dict) else {}
    if scores:
        drawn["scores"] = {
            "token_memory": TOKEN_MEMORY,
            "seed": work.seed,
            "weights": not work.has_weights,
        }
    for predictor in predictors:
        drawn[predictor.column] = {
            "recall_asked": predictor.asked,
            "recall_measured": round(predictor.measured, 6),
            "recall_at": work.at,
            "fidelity": round(predictor.fidelity, 6),
            "dependence": asdict(work.dependence),
            "seed": work.seed,
            "scores": "recorded" if work.has_scores else "drawn",
        }
    return replace(header, provenance=header.provenance | {PREDICTIONS: drawn})


# -- the work --------------------------------------------------------------------------


class _Work:
    """The passes over a trace: popularity, means and sample, measuring, writing."""

    def __init__(
        self,
        trace: Trace,
        seed: int,
        dependence: Dependence,
        predictors: tuple[Predictor, ...],
        at: int | None,
        progress: Callable[[float], None] | None,
    ) -> None:
        shape = trace.shape
        self.trace = trace
        self.seed = seed
        self.dependence = dependence
        self.at = at
        self._predictors = predictors
        self._depths = max((predictor.depth for predictor in predictors), default=0)
        # Drawn scores may have been asked for in an earlier call.
        self.has_scores = "scores" in trace.columns
        self.has_weights = "weights" in trace.columns
        self._sigmoid = is_sigmoid(shape)
        self._renormalised = shape.norm_topk or shape.scoring == "topk_then_softmax"
        self._popularity = np.zeros((shape.layers, shape.experts), np.float32)
        self._means = self._popularity
        self._spread = np.ones(shape.layers, np.float32)
        # Every so many tokens one belongs to the sample.
        values = trace.rows * shape.experts
        self._stride = max(1, -(-values // SAMPLE_VALUES))

        self._progress = progress
        self._rows_done = 0
        passes = 1 + (not self.has_scores)
        if predictors:
            passes += 1 + (self._stride > 1)
        self._rows_in_all = passes * trace.rows

    def survey(self) -> None:
        """Count who is popular, where no scores say so."""
        if self.has_scores:
            return

        shape = self.trace.shape
        counts = np.zeros(shape.layers * shape.experts, np.int64)
        for rows in self.trace.sequences():
            choice = rows.layer.astype(np.int64)[:, None] * shape.experts + rows.experts
            counts += np.bincount(choice.reshape(-1), minlength=len(counts))
            self._advance(len(rows.pos))
        table = counts.reshape(shape.layers, shape.experts)
        self._popularity = popularity_logits(table, shape.top_k)

    def solve(self) -> tuple[Predictor, ...]:
        """Find the fidelity that gives each predictor the recall that it shall have."""
        if not self._predictors:
            return ()

        sample = self._sampled()
        solved = tuple(
            replace(predictor, fidelity=self._fidelity(predictor, sample))
            for predictor in self._predictors
        )
        # The sample is measured as written; if it is the trace, nothing else is left.
        parts: Iterator[_Sample] = iter((sample,))
        if self._stride > 1:
            parts = self._parts()
        return self._measured(solved, parts)

    def write(
        self,
        target: Path | str,
        header: TraceHeader,
        predictors: tuple[Predictor, ...],
        *,
        scores: bool,
    ) -> TraceWriter:
        """Write all rows, with what is drawn beside what was there."""
        added = [predictor.column for predictor in predictors]
        if scores:
            added.append("scores")
        weighs = scores and not self.has_weights
        if weighs:
            added.append("weights")
        kept = sorted(self.trace.columns)

        with TraceWriter(target, header, [*kept, *added]) as writer:
            for chunk, noise in self._with_noise(kept):
                columns = {name: chunk.rows.columns[name][chunk.span] for name in kept}
                if scores:
                    columns["scores"] = self._scored(chunk.logits)[chunk.place]
                if weighs:
                    experts = chunk.rows.experts[chunk.span]
                    columns["weights"] = self._weights(columns["scores"], experts)
                for predictor in predictors:
                    columns[predictor.column] = self._column(predictor, chunk, noise)
                writer.write(
                    seq=chunk.rows.seq,
                    pos=chunk.rows.pos[chunk.span],
                    phase=chunk.rows.phase[chunk.span],
                    layer=chunk.rows.layer[chunk.span],
                    experts=chunk.rows.experts[chunk.span],
                    **columns,
                )
                self._advance(len(chunk.place))

        return writer

    # -- a few tokens at a time --

    def _with_noise(self, columns: Sequence[str]) -> Iterator[tuple[_Chunk, _Noise]]:
        """All chunks of the trace, each with its noise."""
        shape = self.trace.shape
        for number, rows in enumerate(self.trace.sequences(columns)):
            noise = SequenceNoise(
                self.seed,
                number,
                layers=shape.layers,
                experts=shape.experts,
                depths=self._depths,
                dependence=self.dependence,
            )
            for chunk in self._chunks(number, rows):
                yield chunk, _Noise(*noise.next(chunk.tokens))

    def _chunks(self, number: int, rows: SequenceRows) -> Iterator[_Chunk]:
        shape = self.trace.shape
        layers = shape.layers
        keys = Walk(
            (self.seed, number, SCORE_STREAM), layers * shape.experts, TOKEN_MEMORY
        )
        # Positions may have gaps, so tokens are counted.
        token = np.cumsum(np.diff(rows.pos, prepend=rows.pos[0]) > 0)
        count = int(token[-1]) + 1
        stride = max(1, CHUNK_VALUES // (layers * shape.experts))

        for first in range(0, count, stride):
            tokens = min(stride, count - first)
            begin, end = np.searchsorted(token, (first, first + tokens)).tolist()
            span = slice(begin, end)
            place = (token[span] - first) * layers + rows.layer[span]

            places = tokens * layers
            logits = np.full((places, shape.experts), np.nan, np.float32)
            if self.has_scores:
                recorded = rows.columns["scores"][span]
                logits[place] = logits_of(recorded, sigmoid=self._sigmoid)
            else:
                drawn = keys.next(tokens).reshape(places, -1)
                logits[place] = self._drawn(drawn, place, rows, span)
            experts = np.zeros((places, shape.top_k), np.uint16)
            experts[place] = rows.experts[span]
            yield _Chunk(rows, span, place, tokens, logits, experts)

    def _drawn(
        self, keys: np.ndarray, place: np.ndarray, rows: SequenceRows, span: slice
    ) -> np.ndarray:
        """Logits [N, E] of some rows, from the random parts of all keys [G, E]."""
        shape = self.trace.shape
        weights = np.zeros((0, shape.top_k), np.float32)
        if "weights" in rows.columns:
            weights = rows.columns["weights"][span].astype(np.float32)

        logits = np.empty((len(place), shape.experts), np.float32)
        fill_logits(
            keys[place] + self._popularity[rows.layer[span]],
            np.ascontiguousarray(rows.experts[span]),
            weights,
            renormalised=self._renormalised,
            sigmoid=self._sigmoid,
            logits=logits,
        )
        return logits if self._sigmoid else centred(logits)

    def _scored(self, logits: np.ndarray) -> np.ndarray:
        """The gate's scores of logits, as they are written: float16."""
        scores = np.empty_like(logits)
        fill_scores(logits, self._sigmoid, scores)
        return to_float16(scores)[0]

    def _weights(self, scores: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Combine weights [N, K] of the used experts, as the gate makes them of its
        scores [N, E]: float16.
        """
        used = np.take_along_axis(scores, experts.astype(np.int64), axis=1)
        weights = used.astype(np.float32)
        if self._renormalised:
            weights /= np.maximum(weights.sum(axis=1, keepdims=True), SMALLEST)
        return to_float16(weights)[0]

    def _column(self, predictor: Predictor, chunk: _Chunk, noise: _Noise) -> np.ndarray:
        """A column of predictions [N, E]: each row has the one of a later layer."""
        layers = self.trace.shape.layers
        scores = self._scored(self._guess(predictor, chunk.logits, noise))
        layer = chunk.place % layers
        has_target = layer < layers - predictor.depth
        # Zeros where no such layer is, as the format has it.
        column = np.zeros((len(chunk.place), scores.shape[1]), np.float16)
        column[has_target] = scores[chunk.place[has_target] + predictor.depth]
        return column

    def _guess(
        self, predictor: Predictor, logits: np.ndarray, noise: _Noise
    ) -> np.ndarray:
        """Predicted logits [G, E], at the layers that they are about."""
        predicted = np.empty_like(logits)
        fill_predicted(
            logits=logits,
            means=self._means,
            noise=noise.of_depth[predictor.depth - 1],
            difficulty=noise.difficulty,
            spread=self._spread,
            fidelity=predictor.fidelity,
            predicted=predicted,
        )
        return predicted

    # -- accuracy --

    def _sampled(self) -> _Sample:
        """Every so many tokens; means and spread of all logits on the way."""
        shape = self.trace.shape
        layers = shape.layers
        sums = np.zeros((2, layers, shape.experts))
        counts = np.zeros(layers, np.int64)
        parts: list[_Sample] = []
        passed = 0

        needed = [name for name in ("scores", "weights") if name in self.trace.columns]
        for chunk, noise in self._with_noise(needed[:1]):
            add_moments(chunk.logits, sums, counts)
            first = -passed % self._stride
            tokens = np.arange(first, chunk.tokens, self._stride)
            passed += chunk.tokens
            if len(tokens):
                places = tokens[:, None] * layers + np.arange(layers)
                parts.append(_Sample.of(chunk, noise, places.reshape(-1)))
            self._advance(len(chunk.place))

        rows = np.maximum(counts, 1)[:, None]
        means = sums[0] / rows
        variance = np.maximum(sums[1] / rows - means**2, 0).mean(axis=1)
        self._means = means.astype(np.float32)
        self._spread = np.sqrt(variance).astype(np.float32)
        return _Sample.joined(parts)

    def _parts(self) -> Iterator[_Sample]:
        """All tokens of the trace, a chunk at a time."""
        needed = [name for name in ("scores", "weights") if name in self.trace.columns]
        for chunk, noise in self._with_noise(needed[:1]):
            yield _Sample.of(chunk, noise, np.arange(len(chunk.logits)))
            self._advance(len(chunk.place))

    def _fidelity(self, predictor: Predictor, sample: _Sample) -> float:
        """Bisection: recall grows with the fidelity."""

        def recall(fidelity: float) -> float:
            tried = replace(predictor, fidelity=fidelity)
            hits, asked = self._hits(tried, sample, as_written=False)
            return hits / max(asked, 1)

        least = recall(0.0)
        most = recall(1.0)
        # What can be had depends on the trace, so it is said with the refusal.
        if not least - TOLERANCE <= predictor.asked <= most + TOLERANCE:
            way_out = "guesses by popularity alone reach the lower one"
            if predictor.asked > most:
                way_out = (
                    "its experts are not those of the highest scores; predictions of a"
                    " trace without scores are drawn consistent with its experts"
                )
            raise TraceError(
                f"{self.trace.path}: recall of {predictor.column}: expected"
                f" {least:.3f}..{most:.3f} for this trace, got {predictor.asked};"
                f" {way_out}"
            )

        low = 0.0
        high = 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if recall(middle) < predictor.asked:
                low = middle
            else:
                high = middle
        return high

    def _measured(
        self, predictors: tuple[Predictor, ...], parts: Iterator[_Sample]
    ) -> tuple[Predictor, ...]:
        """The recall of what is going to be written."""
        sums = np.zeros((len(predictors), 2), np.int64)
        for part in parts:
            for index, predictor in enumerate(predictors):
                sums[index] += self._hits(predictor, part, as_written=True)
        return tuple(
            replace(predictor, measured=float(hits / max(asked, 1)))
            for predictor, (hits, asked) in zip(predictors, sums, strict=True)
        )

    def _hits(
        self, predictor: Predictor, sample: _Sample, *, as_written: bool
    ) -> tuple[int, int]:
        """Used experts among as many best predicted ones, and used experts."""
        layers = self.trace.shape.layers
        predicted = self._guess(predictor, sample.logits, sample.noise)
        layer = np.arange(len(predicted)) % layers
        known = ~np.isnan(sample.logits[:, 0])
        # Nobody predicts the first layers, and no one knows what was not recorded; a
        # guess also needs a row to stand in, at the layer that it is made at.
        made = np.zeros(len(known), bool)
        made[predictor.depth :] = known[: -predictor.depth]
        rows = np.flatnonzero((layer >= predictor.depth) & known & made)
        if as_written:
            predicted = self._scored(predicted).astype(np.float32)
        experts = np.ascontiguousarray(sample.experts[rows, : self.at])
        return count_hits(predicted[rows], experts), experts.size

    def _advance(self, rows: int) -> None:
        self._rows_done += rows
        if self._progress is not None:
            self._progress(min(1.0, self._rows_done / self._rows_in_all))


@dataclass(frozen=True, slots=True)
class _Noise:
    """Noise of G places: difficulties float32 [G], and float32 [G, E] of each depth."""

    difficulty: np.ndarray
    of_depth: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Tokens on which recall is measured. G places, all layers of each token."""

    logits: np.ndarray
    experts: np.ndarray
    noise: _Noise

    @classmethod
    def of(cls, chunk: _Chunk, noise: _Noise, places: np.ndarray) -> _Sample:
        """Some places of a chunk."""
        chosen = _Noise(
            noise.difficulty[places], [values[places] for values in noise.of_depth]
        )
        return cls(chunk.logits[places], chunk.experts[places], chosen)

    @classmethod
    def joined(cls, parts: list[_Sample]) -> _Sample:
        """All places of some samples."""
        depths = range(len(parts[0].noise.of_depth))
        noise = _Noise(
            np.concatenate([part.noise.difficulty for part in parts]),
            [
                np.concatenate([part.noise.of_depth[depth] for part in parts])
                for depth in depths
            ],
        )
        return cls(
            np.concatenate([part.logits for part in parts]),
            np.concatenate([part.experts for part in parts]),
            noise,
        )
