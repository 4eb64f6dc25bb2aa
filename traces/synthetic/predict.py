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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.base.errors import TraceError
from moesim.traces.format.arrays import to_float16, top_k
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.writer import TraceWriter
from moesim.traces.synthetic.gate_scores import (
    SMALLEST,
    TOKEN_MEMORY,
    centred,
    is_sigmoid,
    logits_behind,
    logits_of,
    popularity_logits,
    scores_of,
)
from moesim.traces.synthetic.marks import PREDICTIONS
from moesim.traces.synthetic.prediction_noise import (
    SCORE_STREAM,
    Dependence,
    SequenceNoise,
    Walk,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
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


class _Tokens(NamedTuple):
    """Some tokens at all layers.

    Attributes:
        logits: float32 [T, L, E]; NaN where no row was recorded.
        experts: uint16 [T, L, K]; zeros where no row was recorded.
        difficulty: float32 [T, L], factors of the noise.
        noise: float32 [T, D, L, E], of every depth.
    """

    logits: np.ndarray
    experts: np.ndarray
    difficulty: np.ndarray
    noise: np.ndarray


class _Chunk(NamedTuple):
    """Some tokens of one sequence.

    Attributes:
        rows: of the whole sequence.
        span: rows that belong to these tokens.
        token: int64 [N], the token of each of those rows.
        layer: int64 [N], its layer.
        tokens: what was recorded or drawn of them.
    """

    rows: SequenceRows
    span: slice
    token: np.ndarray
    layer: np.ndarray
    tokens: _Tokens


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
        parts: Iterable[_Tokens] = (sample,)
        if self._stride > 1:
            parts = (chunk.tokens for chunk in self._chunks(self._needed))
        sums = np.zeros((len(solved), 2), np.int64)
        for part in parts:
            for index, predictor in enumerate(solved):
                sums[index] += self._hits(predictor, part, as_written=True)
        return tuple(
            replace(predictor, measured=float(hits / max(asked, 1)))
            for predictor, (hits, asked) in zip(solved, sums, strict=True)
        )

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
            for chunk in self._chunks(kept):
                rows = chunk.rows.arrays()
                seq = rows.pop("seq")
                rows = {name: values[chunk.span] for name, values in rows.items()}
                place = chunk.token, chunk.layer
                if scores:
                    rows["scores"] = self._scored(chunk.tokens.logits)[place]
                if weighs:
                    rows["weights"] = self._weights(rows["scores"], rows["experts"])
                for predictor in predictors:
                    written = self._column(predictor, chunk.tokens)
                    rows[predictor.column] = written[place]
                writer.write(seq=seq, **rows)

        return writer

    # -- a few tokens at a time --

    def _chunks(self, columns: Sequence[str]) -> Iterator[_Chunk]:
        """All tokens of the trace, a few at a time, each with its noise."""
        shape = self.trace.shape
        layers = shape.layers
        width = layers * shape.experts
        stride = max(1, CHUNK_VALUES // width)
        for number, rows in enumerate(self.trace.sequences(columns)):
            noise = SequenceNoise(
                self.seed,
                number,
                layers=layers,
                experts=shape.experts,
                depths=self._depths,
                dependence=self.dependence,
            )
            keys = Walk((self.seed, number, SCORE_STREAM), width, TOKEN_MEMORY)
            # Positions may have gaps, so tokens are counted.
            token = np.cumsum(np.diff(rows.pos, prepend=rows.pos[0]) > 0)
            ends = [*range(stride, int(token[-1]) + 1, stride), int(token[-1]) + 1]
            for first, end in zip([0, *ends], ends, strict=False):
                span = slice(*np.searchsorted(token, (first, end)).tolist())
                place = token[span] - first, rows.layer[span].astype(np.int64)
                size = (end - first, layers)
                logits = np.full((*size, shape.experts), np.nan, np.float32)
                if self.has_scores:
                    recorded = rows.columns["scores"][span]
                    logits[place] = logits_of(recorded, sigmoid=self._sigmoid)
                else:
                    drawn = keys.next(end - first).reshape(logits.shape)
                    logits[place] = self._drawn(drawn[place], rows, span)
                experts = np.zeros((*size, shape.top_k), np.uint16)
                experts[place] = rows.experts[span]
                tokens = _Tokens(logits, experts, *noise.next(end - first))
                yield _Chunk(rows, span, *place, tokens)
                self._advance(len(place[0]))

    def _drawn(self, keys: np.ndarray, rows: SequenceRows, span: slice) -> np.ndarray:
        """Logits [N, E] of some rows, from the random parts of their keys."""
        weights = rows.columns.get("weights")
        logits = logits_behind(
            keys + self._popularity[rows.layer[span]],
            rows.experts[span],
            None if weights is None else weights[span],
            renormalised=self._renormalised,
            sigmoid=self._sigmoid,
        )
        return logits if self._sigmoid else centred(logits)

    def _scored(self, logits: np.ndarray) -> np.ndarray:
        """The gate's scores of logits, as they are written: float16."""
        return to_float16(scores_of(logits, sigmoid=self._sigmoid))[0]

    def _weights(self, scores: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Combine weights [N, K] of the used experts, as the gate makes them of its
        scores [N, E]: float16.
        """
        used = np.take_along_axis(scores, experts.astype(np.int64), axis=1)
        weights = used.astype(np.float32)
        if self._renormalised:
            weights /= np.maximum(weights.sum(axis=1, keepdims=True), SMALLEST)
        return to_float16(weights)[0]

    def _column(self, predictor: Predictor, tokens: _Tokens) -> np.ndarray:
        """A column of predictions [T, L, E]: each layer has that of a later layer."""
        scores = self._scored(self._guess(predictor, tokens))
        column = np.zeros_like(scores)
        # Zeros where no such layer is, as the format has it.
        column[:, : -predictor.depth] = scores[:, predictor.depth :]
        return column

    def _guess(self, predictor: Predictor, tokens: _Tokens) -> np.ndarray:
        """Predicted logits [T, L, E], at the layers that they are about.

        A logit's deviation from its layer's mean is mixed with noise of the same
        variance, so that a predictor has favourites and a spread like those of the gate
        itself. What was not recorded is mere noise.
        """
        fidelity = np.float32(predictor.fidelity)
        # Noise over signal; without signal nothing else is left.
        ratio = tokens.difficulty * np.sqrt(1 - fidelity**2)
        norm = np.sqrt(fidelity**2 + ratio**2)
        known = ~np.isnan(tokens.logits[..., :1])
        added = np.where(known, (ratio / norm)[..., None], 1) * self._spread[:, None]
        kept = (fidelity / norm)[..., None]
        deviation = np.where(known, tokens.logits - self._means, 0)
        noise = tokens.noise[:, predictor.depth - 1]
        return np.asarray(self._means + added * noise + kept * deviation, np.float32)

    # -- accuracy --

    @property
    def _needed(self) -> Sequence[str]:
        """The column that logits follow from."""
        named = [name for name in ("scores", "weights") if name in self.trace.columns]
        return named[:1]

    def _sampled(self) -> _Tokens:
        """Every so many tokens; means and spread of all logits on the way."""
        layers = self.trace.shape.layers
        sums = np.zeros((2, layers, self.trace.shape.experts))
        counts = np.zeros((layers, 1), np.int64)
        parts: list[_Tokens] = []
        passed = 0

        for chunk in self._chunks(self._needed):
            logits = chunk.tokens.logits.astype(np.float64)
            counts += (~np.isnan(logits[..., :1])).sum(axis=0)
            logits = np.nan_to_num(logits)
            # Token by token, so that the sums are the same for any size of chunks.
            powers = np.stack([logits, logits**2], axis=1)
            sums = np.concatenate([sums[None], powers]).sum(axis=0)
            sampled = slice(-passed % self._stride, None, self._stride)
            parts.append(_Tokens(*(each[sampled] for each in chunk.tokens)))
            passed += len(logits)

        rows = np.maximum(counts, 1)
        means = sums[0] / rows
        variance = np.maximum(sums[1] / rows - means**2, 0).mean(axis=1)
        self._means = means.astype(np.float32)
        self._spread = np.sqrt(variance).astype(np.float32)
        return _Tokens(*map(np.concatenate, zip(*parts, strict=True)))

    def _fidelity(self, predictor: Predictor, sample: _Tokens) -> float:
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

    def _hits(
        self, predictor: Predictor, tokens: _Tokens, *, as_written: bool
    ) -> tuple[int, int]:
        """Used experts among as many best predicted ones, and used experts."""
        depth = predictor.depth
        predicted = self._guess(predictor, tokens)
        if as_written:
            predicted = self._scored(predicted).astype(np.float32)
        # Nobody predicts the first layers, and no one knows what was not recorded; a
        # guess also needs a row to stand in, at the layer that it is made at.
        known = ~np.isnan(tokens.logits[..., 0])
        known = known[:, depth:] & known[:, :-depth]
        experts = tokens.experts[:, depth:][known][:, : self.at]
        best = top_k(predicted[:, depth:][known], experts.shape[1])
        return int((best[:, :, None] == experts[:, None, :]).sum()), experts.size

    def _advance(self, rows: int) -> None:
        self._rows_done += rows
        if self._progress is not None:
            self._progress(min(1.0, self._rows_done / self._rows_in_all))
