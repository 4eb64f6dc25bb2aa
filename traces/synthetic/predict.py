"""Adds synthetic predictions of stated accuracy to a trace, and the gate's scores where
it has none.

A prediction of depth d is the true gate's output, mixed with noise: deviations from
each expert's mean logit are multiplied by ``1 / sqrt(1 + r²)``, and noise of the same
variance by ``r / sqrt(1 + r²)`` is added. The ratio r of a depth is solved so that the
share of the used experts among the K best predicted (*recall*) is the one asked for.
A confident expert stands out from the noise and a marginal one does not, so the first
of the K is predicted better than the last.

The noise of depth d at a token and layer is a vector over experts, of unit variance:

- *between depths* it is correlated by ``depths ** |d - d'|``: what depth 1 gets wrong,
  depth 2 is likelier to get wrong too;
- *between tokens* of a sequence, for one layer and expert, by ``tokens`` per token:
  wrong guesses are repeated;
- *between layers* its size is: each token and layer has a difficulty, the factor
  ``exp(spread * g)`` with g a standard normal, of whose variance all layers of a token
  share the part ``layers``.

The defaults were measured in the predictions that the shipped trace ``tiny`` has: 0.60
to 0.62, 0.40, 0.4 and 0.26.

Where a trace has no scores, logits are drawn that fit its experts and weights: per
token and layer every expert gets a key, ``probit(share of tokens that chose
it) + x``, with x a standard normal that remembers ``TOKEN_MEMORY`` of its value at the
token before. The K largest keys become the logits of the recorded experts, best first;
the others keep their order among themselves. Recorded weights replace the gaps between
the K: softmax over them gives the weights back. So popular experts are near misses more
often than others, as behind a real gate, and no unused expert has a higher score than a
used one.

Letters: N rows, T tokens, L layers, E experts, K per token.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.signal import lfilter
from scipy.special import expit, logit, ndtri, softmax

from moesim.base.errors import TraceError
from moesim.traces.format.arrays import to_float16, top_k
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.schema import prediction_distance
from moesim.traces.format.writer import TraceWriter
from moesim.traces.stats.statistics import expert_uses
from moesim.traces.synthetic.marks import PREDICTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from moesim.traces.format.schema import TraceHeader

    _Chunk = tuple[dict[str, Any], tuple[np.ndarray, np.ndarray], "_Tokens"]
    """Rows by column, the token and the layer of each, and the tokens themselves."""

_DEPTH_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw")
_RESIDUAL_COLUMN = "pred1_res"

# Logits held at once: of a chunk of tokens, and of the tokens that fidelities are
# solved on. 4 Mi logits are 32,768 rows of 128 experts, whose mean recall is known to
# about 0.1 points.
CHUNK_VALUES = 1 << 20
SAMPLE_VALUES = 1 << 22
# Steps of fidelity that are told apart.
_FIDELITIES = 1 << 20
# Streams of random numbers; depth d has `_DEPTH_STREAM` + d.
SCORE_STREAM = 0
_DIFFICULTY_STREAM = 1
_DEPTH_STREAM = 2
# Of a logit's deviation from its mean, between adjacent tokens: 0.34 in `tiny`.
TOKEN_MEMORY = 0.35
# A choice more or less of an expert that nobody or everybody chose.
_PRIOR = 0.5
# Least difference between the last used expert and the best unused one. Larger than
# half a step of float16, so that rounding cannot make them equal.
_MARGIN = 0.002
# Smallest float16: scores that were rounded to zero are at most that.
SMALLEST = 2.0**-24
# Scores of sigmoid gates stay below one, where a logit would be infinite.
_MOST_SIGMOID = 0.9995
_BISECTIONS = 24
# Recall asked for may miss what can be had by so much: rounding makes equal scores.
TOLERANCE = 0.005


@dataclass(frozen=True, slots=True)
class Dependence:
    """Correlations between errors of predictions; see the module.

    Attributes:
        depths: correlation of the noise of adjacent depths, 0..1.
        tokens: correlation of the noise of adjacent tokens, 0 to less than 1.
        layers: share of the difficulty's variance that a token's layers have in common,
            0..1.
        spread: standard deviation of the logarithm of the difficulty, 0..2.
    """

    depths: float = 0.6
    tokens: float = 0.4
    layers: float = 0.4
    spread: float = 0.25

    def __post_init__(self) -> None:
        """Refuse coefficients that no noise can have."""
        limits = {"depths": 1.0, "tokens": 0.999, "layers": 1.0, "spread": 2.0}
        for name, value in asdict(self).items():
            if not 0 <= value <= limits[name]:
                raise TraceError(
                    f"predictions: dependence of {name}: expected 0..{limits[name]:g},"
                    f" got {value}"
                )


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
    added = [predictor.column for predictor in predictors] + ["scores"] * scores
    _check(trace, predictors, added)
    top_k = trace.shape.top_k
    if at is not None and not 1 <= at <= top_k:
        raise TraceError(f"at: expected 1..{top_k} experts of a token, got {at}")

    work = _Work(trace, seed, dependence or Dependence(), predictors, at, progress)
    work.survey()
    predictors = work.solve()
    written = work.write(target, added)
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
        Predictor(column, depth=prediction_distance(column), asked=value)
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
        self._trace = trace
        self._seed = seed
        self._dependence = dependence
        self._at = at
        self._predictors = predictors
        self._depths = max((predictor.depth for predictor in predictors), default=0)
        # Drawn scores may have been asked for in an earlier call.
        self._has_scores = "scores" in trace.columns
        self._has_weights = "weights" in trace.columns
        # The column that logits follow from.
        self._needed = (
            ["scores"] if self._has_scores else ["weights"] * self._has_weights
        )
        # Scores are sigmoids of logits; others are their softmax.
        self._sigmoid = shape.scoring.startswith("sigmoid")
        self._renormalised = shape.norm_topk or shape.scoring == "topk_then_softmax"
        self._popularity = np.zeros((shape.layers, shape.experts), np.float32)
        self._means = self._popularity
        self._spread = np.ones(shape.layers, np.float32)
        # Every so many tokens one belongs to the sample.
        values = trace.rows * shape.experts
        self._stride = max(1, -(-values // SAMPLE_VALUES))

        self._progress = progress
        self._rows_done = 0
        passes = 1 + (not self._has_scores)
        if predictors:
            passes += 1 + (self._stride > 1)
        self._rows_in_all = passes * trace.rows

    def survey(self) -> None:
        """Count who is popular, where no scores say so."""
        if self._has_scores:
            return

        shape = self._trace.shape
        uses = np.zeros((shape.layers, shape.experts), np.int64)
        for rows in self._trace.sequences():
            uses += expert_uses(rows.layer, rows.experts, shape)
            self._advance(len(rows.pos))
        self._popularity = popularity_logits(uses, shape.top_k)

    def solve(self) -> tuple[Predictor, ...]:
        """Find the fidelity that gives each predictor the recall that it shall have."""
        if not self._predictors:
            return ()

        sample = self._sampled()
        solved = [
            replace(predictor, fidelity=self._fidelity(predictor, sample))
            for predictor in self._predictors
        ]
        # The sample is measured as written; if it is the trace, nothing else is left.
        parts: Iterable[_Tokens] = (sample,)
        if self._stride > 1:
            parts = (tokens for *_, tokens in self._chunks(self._needed))
        sums = np.zeros((len(solved), 2), np.int64)
        for part in parts:
            sums += [self._hits(each, part, as_written=True) for each in solved]
        self._predictors = tuple(
            replace(predictor, measured=float(hits / max(asked, 1)))
            for predictor, (hits, asked) in zip(solved, sums, strict=True)
        )
        return self._predictors

    def write(self, target: Path | str, added: list[str]) -> TraceWriter:
        """Write all rows, with what is drawn beside what was there."""
        kept = sorted(self._trace.columns)
        scores = "scores" in added
        weighs = scores and not self._has_weights
        columns = [*kept, *added, *["weights"] * weighs]
        with TraceWriter(target, self._header(scores=scores), columns) as writer:
            for rows, place, tokens in self._chunks(kept):
                if scores:
                    rows["scores"] = self._scored(tokens.logits)[place]
                if weighs:
                    rows["weights"] = self._weights(rows["scores"], rows["experts"])
                for predictor in self._predictors:
                    rows[predictor.column] = self._column(predictor, tokens)[place]
                writer.write(**rows)

        return writer

    def _header(self, *, scores: bool) -> TraceHeader:
        """The header, with what was drawn in it."""
        header = self._trace.header
        # A trace may be added to twice: what was said before stays true.
        earlier = header.provenance.get(PREDICTIONS)
        drawn: dict[str, Any] = dict(earlier) if isinstance(earlier, dict) else {}
        if scores:
            drawn["scores"] = {
                "token_memory": TOKEN_MEMORY,
                "seed": self._seed,
                "weights": not self._has_weights,
            }
        for predictor in self._predictors:
            drawn[predictor.column] = {
                "recall_asked": predictor.asked,
                "recall_measured": round(predictor.measured, 6),
                "recall_at": self._at,
                "fidelity": round(predictor.fidelity, 6),
                "dependence": asdict(self._dependence),
                "seed": self._seed,
                "scores": "recorded" if self._has_scores else "drawn",
            }
        return replace(header, provenance=header.provenance | {PREDICTIONS: drawn})

    # -- a few tokens at a time --

    def _chunks(self, columns: Sequence[str]) -> Iterator[_Chunk]:
        """All tokens of the trace, a few at a time, each with its noise."""
        shape = self._trace.shape
        layers = shape.layers
        width = layers * shape.experts
        stride = max(1, CHUNK_VALUES // width)
        for number, sequence in enumerate(self._trace.sequences(columns)):
            noise = SequenceNoise(
                self._seed,
                number,
                layers=layers,
                experts=shape.experts,
                depths=self._depths,
                dependence=self._dependence,
            )
            keys = Walk((self._seed, number, SCORE_STREAM), width, TOKEN_MEMORY)
            arrays = sequence.arrays()
            seq = arrays.pop("seq")
            # Positions may have gaps, so tokens are counted.
            token = np.cumsum(np.diff(sequence.pos, prepend=sequence.pos[0]) > 0)
            count = int(token[-1]) + 1
            for first in range(0, count, stride):
                size = min(stride, count - first)
                span = slice(*np.searchsorted(token, (first, first + size)))
                rows = {name: values[span] for name, values in arrays.items()}
                place = token[span] - first, rows["layer"].astype(np.int64)
                logits = np.full((size, layers, shape.experts), np.nan, np.float32)
                if self._has_scores:
                    logits[place] = logits_of(rows["scores"], sigmoid=self._sigmoid)
                else:
                    drawn = keys.next(size).reshape(logits.shape)
                    logits[place] = self._drawn(drawn[place], rows)
                experts = np.zeros((size, layers, shape.top_k), np.uint16)
                experts[place] = rows["experts"]
                tokens = _Tokens(logits, experts, *noise.next(size))
                yield rows | {"seq": seq}, place, tokens
                self._advance(len(rows["layer"]))

    def _drawn(self, keys: np.ndarray, rows: dict[str, Any]) -> np.ndarray:
        """Logits [N, E] of some rows, from the random parts of their keys."""
        logits = logits_behind(
            keys + self._popularity[rows["layer"]],
            rows["experts"],
            rows.get("weights"),
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

    def _sampled(self) -> _Tokens:
        """Every so many tokens; means and spread of all logits on the way."""
        layers = self._trace.shape.layers
        sums = np.zeros((2, layers, self._trace.shape.experts))
        counts = np.zeros((layers, 1), np.int64)
        parts: list[_Tokens] = []
        passed = 0

        for *_, tokens in self._chunks(self._needed):
            logits = tokens.logits.astype(np.float64)
            counts += (~np.isnan(logits[..., :1])).sum(axis=0)
            logits = np.nan_to_num(logits)
            # Token by token, so that the sums are the same for any size of chunks.
            powers = np.stack([logits, logits**2], axis=1)
            sums = np.concatenate([sums[None], powers]).sum(axis=0)
            sampled = slice(-passed % self._stride, None, self._stride)
            parts.append(_Tokens(*(each[sampled] for each in tokens)))
            passed += len(logits)

        rows = np.maximum(counts, 1)
        means = sums[0] / rows
        variance = np.maximum(sums[1] / rows - means**2, 0).mean(axis=1)
        self._means = means.astype(np.float32)
        self._spread = np.sqrt(variance).astype(np.float32)
        return _Tokens(*map(np.concatenate, zip(*parts, strict=True)))

    def _fidelity(self, predictor: Predictor, sample: _Tokens) -> float:
        """Search by halves: recall grows with the fidelity."""

        def recall(step: int) -> float:
            tried = replace(predictor, fidelity=step / _FIDELITIES)
            hits, asked = self._hits(tried, sample, as_written=False)
            return hits / max(asked, 1)

        least = recall(0)
        most = recall(_FIDELITIES)
        # What can be had depends on the trace, so it is said with the refusal.
        if not least - TOLERANCE <= predictor.asked <= most + TOLERANCE:
            way_out = "guesses by popularity alone reach the lower one"
            if predictor.asked > most:
                way_out = (
                    "its experts are not those of the highest scores; predictions of a"
                    " trace without scores are drawn consistent with its experts"
                )
            raise TraceError(
                f"{self._trace.path}: recall of {predictor.column}: expected"
                f" {least:.3f}..{most:.3f} for this trace, got {predictor.asked};"
                f" {way_out}"
            )
        steps = range(_FIDELITIES)
        return bisect_left(steps, predictor.asked, key=recall) / _FIDELITIES

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
        experts = tokens.experts[:, depth:][known][:, : self._at]
        best = top_k(predicted[:, depth:][known], experts.shape[1])
        return int((best[:, :, None] == experts[:, None, :]).sum()), experts.size

    def _advance(self, rows: int) -> None:
        self._rows_done += rows
        if self._progress is not None:
            self._progress(min(1.0, self._rows_done / self._rows_in_all))


# -- noise ---------------------------------------------------------------------------


class Walk:
    """Standard normals [T, W] of one sequence that remember their last token.

    They are the same however many tokens a call asks for.

    Args:
        seed: of the generator; the same numbers give the same walk.
        width: W, values of one token.
        memory: correlation of adjacent tokens.
    """

    def __init__(self, seed: Sequence[int], width: int, memory: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._fresh = np.array([math.sqrt(1 - memory * memory)], np.float32)
        self._past = np.array([1, -memory], np.float32)
        self._width = width
        self._state: np.ndarray | None = None

    def next(self, tokens: int) -> np.ndarray:
        """Return the next `tokens` of them: float32 [T, W]."""
        values = self._rng.standard_normal((tokens, self._width), np.float32)
        if self._state is None:
            # The first token has no past, and unit variance all the same.
            self._state = np.zeros((1, self._width), np.float32)
            values[0] /= self._fresh
        walk, self._state = lfilter(
            self._fresh, self._past, values, axis=0, zi=self._state
        )
        return np.asarray(walk)


class SequenceNoise:
    """The noise of all depths for one sequence, a few tokens at a time.

    Args:
        seed: of the whole trace.
        number: of the sequence in the trace, from 0.
        layers: L.
        experts: E.
        depths: how many, D.
        dependence: between errors.
    """

    def __init__(
        self,
        seed: int,
        number: int,
        *,
        layers: int,
        experts: int,
        depths: int,
        dependence: Dependence,
    ) -> None:
        self._dependence = dependence
        self._shape = (layers, experts)
        # A stream per depth: one more depth leaves the others as they are.
        self._walks = [
            Walk(
                (seed, number, _DEPTH_STREAM + depth),
                layers * experts,
                dependence.tokens,
            )
            for depth in range(1, depths + 1)
        ]
        self._difficulty = np.random.default_rng((seed, number, _DIFFICULTY_STREAM))

    def next(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the next tokens' difficulties, float32 [T, L], and their noise of
        every depth, float32 [T, D, L, E].
        """
        layers, experts = self._shape
        normals = self._difficulty.standard_normal((tokens, 1 + layers), np.float32)
        shared = np.float32(math.sqrt(self._dependence.layers))
        apart = np.float32(math.sqrt(1 - self._dependence.layers))
        exponent = shared * normals[:, :1] + apart * normals[:, 1:]
        difficulty = np.exp(np.float32(self._dependence.spread) * exponent)

        keep = np.float32(self._dependence.depths)
        fresh = np.float32(math.sqrt(1 - self._dependence.depths**2))
        noise = np.empty((tokens, len(self._walks), layers, experts), np.float32)
        for depth, walk in enumerate(self._walks):
            values = walk.next(tokens).reshape(tokens, layers, experts)
            # Deeper guesses add to the errors of shallower ones.
            if depth:
                values = fresh * values + keep * noise[:, depth - 1]
            noise[:, depth] = values
        return difficulty, noise


# -- gates ---------------------------------------------------------------------------


def logits_of(scores: np.ndarray, *, sigmoid: bool) -> np.ndarray:
    """Undo the gate's scoring: float32 logits, up to a constant per row for softmax."""
    # float64 would only make room for digits that float16 never had.
    clipped = np.maximum(scores.astype(np.float32), np.float32(SMALLEST))
    if not sigmoid:
        return centred(np.log(clipped))

    clipped = np.minimum(clipped, np.float32(1 - 2.0**-12))
    return np.log(clipped / (1 - clipped))


def centred(logits: np.ndarray) -> np.ndarray:
    """Return rows with a mean of zero: a softmax does not know the difference."""
    return np.asarray(logits - logits.mean(axis=1, keepdims=True), np.float32)


def popularity_logits(counts: np.ndarray, top_k: int) -> np.ndarray:
    """Return the mean key of every expert, float32 [L, E], from how many tokens chose
    it, int [L, E].
    """
    # Every layer counts by itself: the last one of a ragged prefill has fewer tokens.
    chosen = counts.sum(axis=1, keepdims=True)
    experts = counts.shape[1]
    share = top_k * (counts + _PRIOR) / (chosen + _PRIOR * experts)
    # An expert that every token chose, or none, would be infinitely far away.
    probit = ndtri(np.clip(share, 1e-3, 1 - 1e-3))
    return centred(probit)


def scores_of(logits: np.ndarray, *, sigmoid: bool) -> np.ndarray:
    """Return the gate's scores of logits [..., E]: float32."""
    exact = logits.astype(np.float64)
    scores = expit(exact) if sigmoid else softmax(exact, axis=-1)
    return np.asarray(scores, np.float32)


def logits_behind(
    keys: np.ndarray,
    experts: np.ndarray,
    weights: np.ndarray | None,
    *,
    renormalised: bool,
    sigmoid: bool,
) -> np.ndarray:
    """Return logits from keys [N, E] and the recorded experts: float32 [N, E],
    log-scores up to a constant where scores are a softmax.

    Args:
        keys: as the module says.
        experts: [N, K], best first.
        weights: [N, K] combine weights; None where the trace has none.
        renormalised: whether the gate rescales the weights of the K to a sum of one.
        sigmoid: whether scores are sigmoids, not a softmax.
    """
    top_k = experts.shape[1]
    order = np.argsort(-keys, axis=1, kind="stable")
    descending = np.take_along_axis(keys, order, axis=1).astype(np.float64)
    chosen, rest = np.split(descending, [top_k], axis=1)
    mass = np.ones(len(keys))
    if weights is not None:
        mass = weights.sum(axis=1, dtype=np.float64)
        chosen = _logits_of_weights(
            weights.astype(np.float64),
            chosen[:, -1:],
            are_scores=(mass < (top_k if sigmoid else 1))[:, None] & (not renormalised),
            sigmoid=sigmoid,
        )

    logits = np.empty(keys.shape, np.float32)
    used = np.zeros(keys.shape, bool)
    np.put_along_axis(logits, experts.astype(np.intp), chosen, axis=1)
    np.put_along_axis(used, experts.astype(np.intp), values=True, axis=1)
    if not rest.size:
        return logits

    # The others, by descending key, take the keys that are left.
    rest = rest - rest[:, :1]
    highest = chosen.min(axis=1) - _MARGIN
    start = np.minimum(descending[:, top_k], highest)
    pull = np.ones(len(keys))
    if not (sigmoid or renormalised):
        some = mass < 1
        start[some], pull[some] = _fitting(rest[some], 1 - mass[some], highest[some])
    others = order[~np.take_along_axis(used, order, axis=1)].reshape(rest.shape)
    values = start[:, None] + pull[:, None] * rest
    np.put_along_axis(logits, others, values, axis=1)
    return logits


def _logits_of_weights(
    weights: np.ndarray, last_key: np.ndarray, *, are_scores: np.ndarray, sigmoid: bool
) -> np.ndarray:
    """Logits [N, K] of the used experts from their weights [N, K].

    Weights that were rescaled tell ratios only; then the least of them gets `last_key`
    [N, 1]. Scaled by a constant, they may exceed what scores can add up to.
    """
    weights = np.maximum(weights, SMALLEST)
    smallest = weights.min(axis=1, keepdims=True)
    if not sigmoid:
        return np.where(
            are_scores, np.log(weights), last_key + np.log(weights / smallest)
        )

    # Ratios are kept as long as the largest score stays below one.
    largest = weights.max(axis=1, keepdims=True)
    factor = np.minimum(expit(last_key) / smallest, _MOST_SIGMOID / largest)
    scores = weights * np.where(are_scores, 1.0, factor)
    return np.asarray(logit(np.minimum(scores, _MOST_SIGMOID)))


def _fitting(
    rest: np.ndarray, mass: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The logit of the first unused expert [N], and the factor of the others' distances
    to it [N, E - K], for scores of all unused experts that add up to `mass`; none is
    above `highest`.
    """
    start = np.log(mass / np.exp(rest).sum(axis=1))
    # Flattened until the mass fits below the least used expert.
    low = np.zeros(len(rest))
    high = np.ones(len(rest))
    for _ in range(_BISECTIONS):
        pull = (low + high) / 2
        total = np.exp(highest[:, None] + pull[:, None] * rest).sum(axis=1)
        low = np.where(total < mass, low, pull)
        high = np.where(total < mass, pull, high)
    fits = start <= highest
    return np.where(fits, start, highest), np.where(fits, 1.0, low)
