"""Adds synthetic predictions of stated accuracy to a trace, and the gate's scores where
it has none.

A prediction is the true gate's output, mixed with noise: an expert's logit deviates
from its mean by ``f`` times the true deviation, plus ``sqrt(1 - f²)`` times a standard
normal of the layer's spread. The fidelity f of a column is solved so that the share of
the used experts among the K best predicted (*recall*) is the one asked for. A confident
expert stands out from the noise and a marginal one does not, so the first of the K is
predicted better than the last. Errors of columns, tokens and layers are independent,
but those of ``pred1_res`` are those of ``pred1_raw``.

Where a trace has no scores, logits are drawn that fit its experts: per token and layer
every expert gets a key, ``probit(share of tokens that chose it) + standard normal``.
The K largest keys become the logits of the recorded experts, best first; the others
keep their order among themselves. Where weights were recorded, the scores of the K have
their ratios. So popular experts are near misses more often than others, as behind a
real gate, and no unused expert has a higher score than a used one.

Letters: N rows, L layers, E experts, K per token, D depths.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import expit, logit, ndtri, softmax

from moesim.base.errors import TraceError
from moesim.traces.format.arrays import to_float16, top_k
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.schema import prediction_distance
from moesim.traces.format.writer import TraceWriter
from moesim.traces.stats.statistics import expert_uses
from moesim.traces.synthetic.marks import PREDICTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_DEPTH_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw")
_RESIDUAL_COLUMN = "pred1_res"

# Logits held at once: of a chunk of tokens, and of the rows that fidelities are solved
# on. 4 Mi logits are 32,768 rows of 128 experts, whose mean recall is known to about
# 0.1 points.
CHUNK_VALUES = 1 << 20
SAMPLE_VALUES = 1 << 22
# Steps of fidelity that are told apart.
_FIDELITIES = 1 << 20
# A choice more or less of an expert that nobody or everybody chose.
_PRIOR = 0.5
# Least difference between the last used expert and the best unused one. Larger than
# half a step of float16, so that rounding cannot make them equal.
_MARGIN = 0.002
# Smallest float16: scores that were rounded to zero are at most that.
_SMALLEST = np.float32(2.0**-24)
# Scores of sigmoid gates stay below one, where a logit would be infinite.
_LARGEST = np.float32(1 - 2.0**-11)
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
        measured: recall over a sample of tokens: all of a trace of up to
            `SAMPLE_VALUES` logits.
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
    predictors: list[Predictor]
    scores: bool


def predict(
    source: Trace | Path | str,
    target: Path | str,
    *,
    recall: Sequence[float] = (),
    residual: float | None = None,
    at: int | None = None,
    scores: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> PredictedTrace:
    """Write a trace with synthetic predictions, and say in its header what they are.

    It is read two or three times, some tokens at a time; memory does not grow with its
    length.

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
        scores: also write the gate's scores, drawn consistent with the recorded
            experts, and the weights that follow from them where there are none.
        seed: same source, options and seed, same file.
        progress: called with the number of rows written so far.

    Raises:
        TraceError: nothing to add, recalls out of 0..1 or rising with the depth, more
            of them than columns or layers, `at` out of 1..K, a column that is there
            already, or a recall that this trace does not admit.
    """
    trace = source if isinstance(source, Trace) else open_trace(source)
    predictors = _asked(trace, recall, residual, at)
    added = [predictor.column for predictor in predictors] + ["scores"] * scores
    _check(trace, added)
    gate = _Gate(trace, seed, max((each.depth for each in predictors), default=0))
    if predictors:
        sample = gate.sample()
        predictors = [gate.solved(each, sample, at) for each in predictors]

    kept = sorted(trace.columns)
    weighs = scores and "weights" not in kept
    drawn: dict[str, Any] = {
        each.column: {
            "recall_asked": each.asked,
            "recall_measured": round(each.measured, 6),
            "recall_at": at,
            "fidelity": round(each.fidelity, 6),
            "seed": seed,
        }
        for each in predictors
    }
    if scores:
        drawn["scores"] = {"seed": seed, "weights": weighs}
    # A trace may be added to twice: what was said before stays true.
    provenance = trace.header.provenance
    drawn = provenance.get(PREDICTIONS, {}) | drawn
    header = replace(trace.header, provenance=provenance | {PREDICTIONS: drawn})
    columns = [*kept, *added, *["weights"] * weighs]
    with TraceWriter(target, header, columns) as writer:
        for chunk in gate.chunks(kept):
            rows = chunk.rows
            if scores:
                rows["scores"] = gate.scores(chunk.logits)
            if weighs:
                rows["weights"] = gate.weights(rows["scores"], rows["experts"])
            for each in predictors:
                rows[each.column] = gate.column(each, chunk)
            writer.write(**rows)
            if progress is not None:
                progress(writer.rows)
    return PredictedTrace(writer.path, writer.rows, predictors, scores)


def _check(trace: Trace, added: list[str]) -> None:
    """Refuse to add nothing, or what is there."""
    if not added:
        raise TraceError(
            f"{trace.path}: nothing to add: state a recall, or ask for scores"
        )
    for column in added:
        if column in trace.columns:
            raise TraceError(
                f"{trace.path}: column {column!r} is there already; leave it out, or"
                " choose a trace without it"
            )


def _asked(
    trace: Trace, recall: Sequence[float], residual: float | None, at: int | None
) -> list[Predictor]:
    """The columns that are wanted, where this trace can take them."""
    shape = trace.shape
    depths = min(len(_DEPTH_COLUMNS), shape.layers - 1)
    if len(recall) > depths:
        raise TraceError(
            f"recall: expected at most {depths} depths below the {shape.layers} layers"
            f" of {shape.name}, got {len(recall)}"
        )
    if list(recall) != sorted(recall, reverse=True):
        listed = ",".join(map(str, recall))
        raise TraceError(
            f"recall: expected no more at a greater depth, got {listed}; the nearest"
            " layer comes first"
        )
    if at is not None and not 1 <= at <= shape.top_k:
        raise TraceError(f"at: expected 1..{shape.top_k} experts of a token, got {at}")

    asked = dict(zip(_DEPTH_COLUMNS, recall, strict=False))
    if residual is not None:
        asked[_RESIDUAL_COLUMN] = residual
    for column, value in asked.items():
        if not 0 < value <= 1:
            raise TraceError(f"recall of {column}: expected 0 < R <= 1, got {value}")
    return [
        Predictor(column, depth=prediction_distance(column), asked=value)
        for column, value in asked.items()
    ]


class _Chunk(NamedTuple):
    """Some whole tokens, N rows.

    Attributes:
        rows: by column.
        logits: float32 [N, E].
        noise: float32 [N, E] for each depth, of what is predicted for these rows.
        sampled: bool [N].
    """

    rows: dict[str, Any]
    logits: np.ndarray
    noise: list[np.ndarray]
    sampled: np.ndarray


class _Gate:
    """The gates of a trace, and guesses about their logits.

    Args:
        trace: what is predicted.
        seed: of all noise.
        depths: D.
    """

    def __init__(self, trace: Trace, seed: int, depths: int) -> None:
        self._trace = trace
        self._seed = seed
        self._depths = depths
        shape = trace.shape
        # Scores are sigmoids of logits; others are their softmax.
        self._sigmoid = shape.scoring.startswith("sigmoid")
        # Drawn scores may have been asked for in an earlier call.
        self._has_scores = "scores" in trace.columns
        uses = np.zeros((shape.layers, shape.experts), np.int64)
        if not self._has_scores:
            for rows in trace.sequences():
                uses += expert_uses(rows.layer, rows.experts, shape)
        # Mean logits of each expert, [L, E], and spread of those of a layer.
        self._popularity = popularity_logits(uses, shape.top_k)
        self._means = self._popularity.copy()
        self._spread = np.ones((shape.layers, 1), np.float32)

    def chunks(self, columns: Sequence[str]) -> Iterator[_Chunk]:
        """All rows of the trace, with the same noise in chunks of any size."""
        shape = self._trace.shape
        stride = max(1, CHUNK_VALUES // (shape.layers * shape.experts))
        share = SAMPLE_VALUES / max(1, self._trace.rows * shape.experts)
        for number, sequence in enumerate(self._trace.sequences(columns)):
            choice, *streams = (
                np.random.default_rng((self._seed, number, stream))
                for stream in range(2 + self._depths)
            )
            arrays = sequence.arrays()
            seq = arrays.pop("seq")
            begins = np.diff(sequence.pos, prepend=-1) > 0
            sampled = choice.random(begins.sum())[np.cumsum(begins) - 1] < share
            edges = [*np.flatnonzero(begins)[::stride].tolist(), len(begins)]
            for first, end in pairwise(edges):
                rows = {name: values[first:end] for name, values in arrays.items()}
                size = (end - first, shape.experts)
                keys, *noise = (
                    rng.standard_normal(size, np.float32) for rng in streams
                )
                if self._has_scores:
                    logits = logits_of(rows["scores"], sigmoid=self._sigmoid)
                else:
                    logits = logits_behind(
                        keys + self._popularity[rows["layer"]],
                        rows["experts"],
                        rows.get("weights"),
                        sigmoid=self._sigmoid,
                    )
                yield _Chunk(rows | {"seq": seq}, logits, noise, sampled[first:end])

    def scores(self, logits: np.ndarray) -> np.ndarray:
        """The gate's scores of logits [N, E], as they are written: float16."""
        exact = logits.astype(np.float64)
        scores = expit(exact) if self._sigmoid else softmax(exact, axis=1)
        return to_float16(scores.astype(np.float32))[0]

    def weights(self, scores: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Combine weights [N, K] of the used experts, as the gate makes them of its
        scores [N, E]: float16.
        """
        used = np.take_along_axis(scores, experts.astype(np.int64), axis=1)
        weights = used.astype(np.float32)
        shape = self._trace.shape
        if shape.norm_topk or shape.scoring == "topk_then_softmax":
            weights /= np.maximum(weights.sum(axis=1, keepdims=True), _SMALLEST)
        return to_float16(weights)[0]

    def column(self, predictor: Predictor, chunk: _Chunk) -> np.ndarray:
        """A column of predictions [N, E]: each row has that of a later layer."""
        # Zeros where no such layer is, as the format has it.
        column = np.zeros(chunk.logits.shape, np.float16)
        about = _about(chunk.rows, predictor.depth)
        guess = self._guess(predictor, chunk, about)
        column[about - predictor.depth] = self.scores(guess)
        return column

    def sample(self) -> _Chunk:
        """Tokens that fidelities are solved on; notes means and spread of logits."""
        needed = sorted({"scores", "weights"} & set(self._trace.columns))
        parts: list[list[np.ndarray]] = []
        for rows, logits, noise, sampled in self.chunks(needed):
            columns = (rows["pos"], rows["layer"], rows["experts"], logits, *noise)
            parts.append([values[sampled] for values in columns])
        pos, layer, experts, logits, *noise = map(
            np.concatenate, zip(*parts, strict=True)
        )
        for each in np.unique(layer):
            of_layer = logits[layer == each]
            self._means[each] = of_layer.mean(axis=0)
            self._spread[each] = np.sqrt(of_layer.var(axis=0).mean())
        return _Chunk(
            {"pos": pos, "layer": layer, "experts": experts}, logits, noise, layer >= 0
        )

    def solved(self, predictor: Predictor, sample: _Chunk, at: int | None) -> Predictor:
        """The predictor with the fidelity that gives it the recall asked for: recall
        grows with the fidelity, so halves are searched.
        """
        about = _about(sample.rows, predictor.depth)
        used = sample.rows["experts"][about, :at]

        def recall(step: int) -> float:
            tried = replace(predictor, fidelity=step / _FIDELITIES)
            best = top_k(self._guess(tried, sample, about), used.shape[1])
            hits = (best[:, :, None] == used[:, None, :]).sum()
            return float(hits / max(used.size, 1))

        least = recall(0)
        most = recall(_FIDELITIES)
        # What can be had depends on the trace, so it is said with the refusal.
        if not least - TOLERANCE <= predictor.asked <= most + TOLERANCE:
            raise TraceError(
                f"{self._trace.path}: recall of {predictor.column}: expected"
                f" {least:.3f} (guesses by popularity) to {most:.3f} (the gate's own"
                f" scores) for this trace, got {predictor.asked}"
            )
        step = bisect_left(range(_FIDELITIES), predictor.asked, key=recall)
        return replace(predictor, fidelity=step / _FIDELITIES, measured=recall(step))

    def _guess(
        self, predictor: Predictor, chunk: _Chunk, about: np.ndarray
    ) -> np.ndarray:
        """Predicted logits float32 [A, E] of the rows `about`: favourites and spread
        are like those of the gate itself.
        """
        layer = chunk.rows["layer"][about]
        means = self._means[layer]
        noise = chunk.noise[predictor.depth - 1][about]
        added = math.sqrt(1 - predictor.fidelity**2) * self._spread[layer] * noise
        kept = predictor.fidelity * (chunk.logits[about] - means)
        return np.asarray(means + kept + added, np.float32)


def _about(rows: dict[str, Any], depth: int) -> np.ndarray:
    """Rows that a prediction is about: that of their token `depth` layers before stands
    as many rows before.
    """
    pos, layer = rows["pos"], rows["layer"]
    fits = (pos[depth:] == pos[:-depth]) & (layer[depth:] - layer[:-depth] == depth)
    return np.flatnonzero(fits) + depth


# -- gates ---------------------------------------------------------------------------


def logits_of(scores: np.ndarray, *, sigmoid: bool) -> np.ndarray:
    """Undo the gate's scoring: float32 logits, up to a constant per row for softmax."""
    # float64 would only make room for digits that float16 never had.
    positive = np.maximum(scores.astype(np.float32), _SMALLEST)
    if sigmoid:
        return np.asarray(logit(np.minimum(positive, _LARGEST)))
    return _centred(np.log(positive))


def _centred(logits: np.ndarray) -> np.ndarray:
    """Rows with a mean of zero: a softmax does not know the difference."""
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
    return _centred(ndtri(np.clip(share, 1e-3, 1 - 1e-3)))


def logits_behind(
    keys: np.ndarray, experts: np.ndarray, weights: np.ndarray | None, *, sigmoid: bool
) -> np.ndarray:
    """Return logits from keys [N, E] and the recorded experts: float32 [N, E].

    Args:
        keys: as the module says.
        experts: [N, K], best first.
        weights: [N, K] combine weights, whose ratios the scores get; None where the
            trace has none.
        sigmoid: whether scores are sigmoids, not a softmax.
    """
    order = np.argsort(-keys, axis=1, kind="stable")
    descending = np.take_along_axis(keys, order, axis=1)
    chosen, rest = np.split(descending, [experts.shape[1]], axis=1)
    if weights is not None:
        # The least of them gets the score of the last key, the largest stays below 1.
        shares = np.maximum(weights.astype(np.float32), _SMALLEST)
        shares /= shares.min(axis=1, keepdims=True)
        if sigmoid:
            most = _LARGEST / shares.max(axis=1, keepdims=True)
            chosen = logit(shares * np.minimum(expit(chosen[:, -1:]), most))
        else:
            chosen = chosen[:, -1:] + np.log(shares)

    logits = np.empty(keys.shape, np.float32)
    used = np.zeros(keys.shape, bool)
    np.put_along_axis(logits, experts.astype(np.intp), chosen, axis=1)
    np.put_along_axis(used, experts.astype(np.intp), values=True, axis=1)
    if rest.size:
        # The others, by descending key, take the keys that are left.
        least = chosen.min(axis=1, keepdims=True)
        lowered = np.maximum(0, rest[:, :1] - (least - np.float32(_MARGIN)))
        others = order[~np.take_along_axis(used, order, axis=1)].reshape(rest.shape)
        np.put_along_axis(logits, others, rest - lowered, axis=1)
    return logits if sigmoid else _centred(logits)
