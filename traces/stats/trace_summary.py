"""All that a trace says about itself, and what follows for offloading, in one pass; in
a second one where sequences run together, and for recorded predictions.

Statistics are about decode unless they say otherwise; the definitions stand with what
computes them: `statistics` and `hit_rate_curves`.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from moesim.base.units import format_bytes, percent
from moesim.traces.format.arrays import top_k
from moesim.traces.format.batch import compose
from moesim.traces.format.layer_steps import joined, layer_steps, of_sequences
from moesim.traces.format.parquet import write_table
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase, prediction_distance
from moesim.traces.stats.hit_rate_curves import CURVES, curves
from moesim.traces.stats.statistics import LayerAggregator, SimilarityAggregator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from moesim.traces.format.batch import LayerSteps, RoutedLayer
    from moesim.traces.format.reader import SequenceRows, Trace
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.stats.hit_rate_curves import Curves

# Share of a layer's experts that one step uses, from which on offloading moves most of
# the model at every token.
DENSE = 0.25
# Hit rate of LRU above the share that is cached, at the knee: locality worth caching
# for; hardly any.
LOCAL = 0.15
SLIGHT = 0.05
# For a rough idea only: what a PCIe 4.0 x16 link copies; profiles hold measurements.
COPY_BYTES_PER_S = 25e9
# Shares of a layer's experts in a cache whose hit rates are told layer by layer.
CACHE_RATIOS = (0.125, 0.25, 0.5, 0.75)
# Hit rates whose cache sizes are of interest, beside the knee.
_GOALS = (0.8, 0.9, 0.95)


@dataclass(slots=True)
class TraceSummary:
    """The result of `summarise_trace`.

    Attributes:
        shape: the model.
        figures: JSON-ready; the keys are listed at `summarise_trace`.
        curves: hit counts at every size.
        load: int64 [L, E] tokens routed to each expert in decode.
    """

    shape: ModelShape
    figures: dict[str, Any]
    curves: Curves
    load: np.ndarray


def summarise_trace(
    trace: Trace, *, batch: int = 1, progress: Callable[[int], None] | None = None
) -> TraceSummary:
    """Characterise a trace. L layers, E experts, K per token.

    Args:
        trace: an opened trace.
        batch: sequences that run together; changes loads, reuse and curves.
        progress: called with the rows read so far, after each sequence.

    Returns:
        figures: ``batch``, ``prefill_tokens``, ``decode_tokens``, ``decode_steps``;
        ``overlap_chance``, the overlap that independent uniform choices would have,
        K/E; lists of L numbers, null where the trace has no decode:

        - ``active``: mean active experts per decode step; ``active_prefill``: the same
            per prefill step;
        - ``entropy_bits``: of the load over experts, log2 E if even; ``max_share``:
            load of the busiest expert;
        - ``overlap``: mean share of a step's active experts that were active in the
            step before, within one batch;
        - ``working_set``: mean distinct experts in windows of 32 decode steps;
            ``touched``: distinct experts at all;
        - ``lru``: cache ratio -> hit rate in decode of an LRU cache of
            ``round(ratio * E)`` slots for the layer;

        and

        - ``reuse``: [E + 1] accesses in decode that hit LRU caches of more than so many
            slots per layer (last: first use), all layers;
        - ``working_set_by_window``: window in decode steps -> mean distinct experts of
            a layer;
        - ``curve_decode``, ``curve_all``: ``lru`` and ``belady`` hit rates [E + 1] at 0
          … E slots per layer, and ``lru_global``, ``belady_global`` [L * E + 1], one
          cache for all layers; null without accesses;
        - ``similarity``, ``similarity_by_layer``: prefill to decode, mean over
            sequences that have both;
        - ``information_bits`` [L - 1], ``information_bias_bits``: what a layer's
            experts tell about the next one's;
        - ``prediction``: see `predictor_accuracy.prediction`;
        - ``verdict``: see `offloading_verdict`.

    Raises:
        TraceError: `batch` below 1, or a damaged trace.
    """
    shape = trace.shape
    layers = LayerAggregator(shape)
    similarity = SimilarityAggregator(shape)

    def read() -> Iterator[SequenceRows]:
        rows = 0
        for sequence in trace.sequences():
            similarity.add(sequence)
            yield sequence
            rows += len(sequence.pos)
            if progress is not None:
                progress(rows)

    def counted() -> Iterator[LayerSteps]:
        if batch == 1:
            blocks = joined(of_sequences(read(), shape))
        else:
            blocks = layer_steps(trace, batch=batch)
        for block in blocks:
            layers.add(block)
            yield block

    hit_rates = curves(counted(), shape)
    if batch > 1:
        # Similarity is about single sequences, which batches have mixed.
        deque(read(), maxlen=0)

    figures = {
        "batch": batch,
        **layers.figures(),
        "lru": _lru_by_layer(hit_rates),
        "reuse": hit_rates.depths["lru"][Phase.DECODE].sum(axis=0).tolist(),
        "curve_decode": _rates(hit_rates, Phase.DECODE),
        "curve_all": _rates(hit_rates, None),
        **similarity.figures(),
        "prediction": prediction(trace, batch=batch),
    }
    figures["verdict"] = offloading_verdict(shape, figures)
    return TraceSummary(shape, figures, hit_rates, layers.load)


def _rates(curves: Curves, phase: Phase | None) -> dict[str, list[float]] | None:
    """Hit rates at every size; None without any access."""
    if not curves.accesses("lru", phase).sum():
        return None

    return {name: curves.rates(name, phase).tolist() for name in CURVES}


def _lru_by_layer(curves: Curves) -> dict[float, list[float] | None]:
    """Cache ratio -> hit rate of each layer in decode, [L]; None without decode."""
    hits = curves.hits("lru", Phase.DECODE)
    accesses = curves.accesses("lru", Phase.DECODE)
    if not accesses.any():
        return dict.fromkeys(CACHE_RATIOS)
    rates = hits / np.maximum(accesses, 1)[:, None]
    experts = hits.shape[1] - 1
    return {ratio: rates[:, round(ratio * experts)].tolist() for ratio in CACHE_RATIOS}


def knee(rates: np.ndarray) -> int:
    """Return the slots at which a curve [E + 1] stands farthest above the straight line
    from nothing to everything cached.

    Source: Satopaa et al. (2011), the knee of a normalised concave curve.
    """
    line = np.linspace(0.0, rates[-1], len(rates))
    return int(np.argmax(rates - line))


def offloading_verdict(shape: ModelShape, figures: dict[str, Any]) -> dict[str, Any]:
    """Is this model worth offloading, and with how much memory?

    Returns:
        ``answer`` (``yes``, ``hardly``, ``no``, ``unknown``), ``why`` in words, and
        ``sizes``: for the knee of LRU's curve and for hit rates of 80, 90 and 95 % the
        slots per layer, their bytes, hit rates of LRU and Belady, and the bytes that an
        LRU cache copies per decode step if every miss is copied.
    """
    curve = figures["curve_decode"]
    total = shape.routed_bytes
    if curve is None:
        why = [
            (
                "No generated tokens: a prompt uses nearly all experts once, which says"
                " nothing about caching."
            )
        ]
        return {"answer": "unknown", "why": why, "sizes": [], "experts_bytes": total}

    # A step that uses much of a layer leaves a cache little to save.
    lru = np.array(curve["lru"])
    share = float(np.mean(figures["active"])) / shape.experts
    sizes = _cache_sizes(shape, curve, share)

    best = sizes[0]
    # What caching gains beyond holding that share of evenly used experts.
    gain = float(lru[best["slots"]] - best["slots"] / shape.experts)
    answer, reason = _judged(share, gain)
    return {
        "answer": answer,
        "why": _why(shape, best, share, gain, reason),
        "sizes": sizes,
        "experts_bytes": total,
    }


def _cache_sizes(
    shape: ModelShape, curve: dict[str, list[float]], share: float
) -> list[dict[str, Any]]:
    """The ``sizes`` of `offloading_verdict`; `share` of all experts is what a decode
    step uses.
    """
    lru = np.array(curve["lru"])
    belady = np.array(curve["belady"])

    slots_at = {"knee": knee(lru)}
    for goal in _GOALS:
        if lru[-1] >= goal:
            slots_at[f"{goal:.0%}"] = int(np.argmax(lru >= goal))

    slot_bytes = sum(shape.expert_bytes)  # one slot in every layer
    step_bytes = slot_bytes * share * shape.experts
    return [
        {
            "at": name,
            "slots": slots,
            "bytes": slots * slot_bytes,
            "lru": float(lru[slots]),
            "belady": float(belady[slots]),
            "copied_bytes_per_step": float((1 - lru[slots]) * step_bytes),
        }
        for name, slots in slots_at.items()
    ]


def _why(
    shape: ModelShape, best: dict[str, Any], share: float, gain: float, reason: str
) -> list[str]:
    """Sentences."""
    copied = best["copied_bytes_per_step"]
    copy_ms = copied / COPY_BYTES_PER_S * 1e3

    sentences = [
        (
            f"All {shape.layers} x {shape.experts} experts weigh"
            f" {format_bytes(shape.routed_bytes)}; a decode step uses"
            f" {percent(share)}."
        ),
        (
            f"The curve of LRU bends at {best['slots']} of {shape.experts} experts per"
            f" layer ({format_bytes(best['bytes'])}): {percent(best['lru'])} hits,"
            f" {100 * gain:+.1f} points against equally used experts; Belady, who"
            f" knows the future, {percent(best['belady'])}."
        ),
        (
            f"What is missing there is {format_bytes(round(copied))} per decode step:"
            f" {copy_ms:.1f} ms if all of it were copied at"
            f" {COPY_BYTES_PER_S / 1e9:.0f} GB/s, computing and overlap left out."
        ),
        reason,
    ]
    if shape.assumed:
        fields = ", ".join(shape.assumed)
        sentences.append(f"The sizes rest on assumed fields: {fields}.")
    return sentences


def _judged(share: float, gain: float) -> tuple[str, str]:
    """The answer, and the sentence that gives its reason."""
    if share > DENSE:
        return "no", (
            "Too dense: every step needs more than a quarter of the experts, so most of"
            " the model moves."
        )
    if gain < SLIGHT:
        return "no", (
            "Hardly any locality: a cache hits little more than the share of experts"
            " that it holds."
        )
    if gain < LOCAL:
        return "hardly", (
            "Little locality: bandwidth or the CPU, not the cache, will decide the"
            " speed."
        )
    return "yes", (
        "A part of the experts serves most accesses; `moesim replay` tells the time"
        " that a machine needs."
    )


# -- summary tables --------------------------------------------------------------------
# The statistics of a trace as Parquet tables, for notebooks and other tools.

_BY_LAYER = (
    "active",
    "active_prefill",
    "entropy_bits",
    "max_share",
    "overlap",
    "working_set",
    "touched",
    "similarity_by_layer",
)
# Figures by size of the cache have a table of their own.
_CURVES = ("curve_decode", "curve_all")


def write_tables(trace: Trace, summary: TraceSummary, folder: Path) -> list[Path]:
    """Write what `summarise_trace` found.

    Returns:
        ``layers.parquet`` one row per layer; ``load.parquet`` layer, expert, tokens in
        decode; ``curves.parquet`` slots per layer with hits and accesses by phase,
        layer and policy; each with the other figures as JSON under the metadata key
        ``statistics``.
    """
    shape = summary.shape
    load = {
        "layer": np.repeat(np.arange(shape.layers), shape.experts),
        "expert": np.tile(np.arange(shape.experts), shape.layers),
        "tokens": summary.load.reshape(-1),
    }
    layers = layer_table(trace, summary)
    tables = {
        "layers": layers,
        "load": pa.table(load),
        "curves": _curve_table(summary.curves),
    }

    paths = []
    for name, table in tables.items():
        path = folder / f"{name}.parquet"
        # One table at a time appears; a notebook never meets half of one.
        write_table(path, table.replace_schema_metadata(layers.schema.metadata))
        paths.append(path)
    return paths


def layer_table(trace: Trace, summary: TraceSummary) -> pa.Table:
    """Return the figures that have a number for each layer, a row per layer; with the
    others as JSON under the metadata key ``statistics``.
    """
    layers = summary.shape.layers
    by_layer = {
        name: values
        for name, values in _by_layer(summary.figures).items()
        if len(values) == layers
    }
    single = {
        name: value
        for name, value in summary.figures.items()
        if name not in (*by_layer, *_CURVES)
    }
    described = {"trace": trace.path.name, "model": summary.shape.name, **single}
    metadata = {"statistics": json.dumps(described, sort_keys=True)}
    columns = {"layer": np.arange(layers), **by_layer}
    return pa.table(columns).replace_schema_metadata(metadata)


def _curve_table(curves: Curves) -> pa.Table:
    """A row per phase, layer and number of slots of the layer."""
    hits = {
        name: np.stack([curves.hits(name, phase) for phase in Phase])
        for name in ("lru", "belady")
    }
    accesses = np.stack([curves.accesses("lru", phase) for phase in Phase])
    shape = hits["lru"].shape
    phase, layer, slots = np.indices(shape).reshape(len(shape), -1)
    return pa.table(
        {
            "phase": np.array([each.label for each in Phase])[phase],
            "layer": layer,
            "slots": slots,
            "accesses": np.repeat(accesses, shape[-1]),
            **{name: values.reshape(-1) for name, values in hits.items()},
        }
    )


def _by_layer(figures: dict[str, Any]) -> dict[str, list[Any]]:
    """Lists with one entry per layer, under flat names."""
    columns = {name: figures[name] for name in _BY_LAYER}
    for ratio, values in figures["lru"].items():
        columns[f"lru_{ratio}"] = values

    information = figures["information_bits"]
    if information is not None:
        # Nothing follows the last layer.
        columns["information_bits_to_next"] = [*information, None]
    for name, accuracy in (figures["prediction"] or {}).items():
        columns[f"{name}_accuracy"] = accuracy["by_layer"]

    return {name: values for name, values in columns.items() if values is not None}


# -- recorded predictors ---------------------------------------------------------------
# How well did the recorded predictors know which experts would work? By depth, by
# layer, by rank of the workload.


# Workload ranks that are told apart.
RANKS = 16


def prediction(trace: Trace, *, batch: int = 1) -> dict[str, Any] | None:
    """Return the accuracy of every predictor of a trace in decode; None without
    predictions.

    A predictor's workload is the number of tokens that have the expert among their K
    best scores. Ties in a workload, predicted or true, go to the better mean rank, then
    to the lower id.

    Returns:
        per predictor: ``by_layer``, per predicted layer the share of active experts
        among as many best predicted (null where nothing predicts it); ``by_rank``, for
        r = 1 …, the share of the r experts of largest workload among the r best
        predicted, over steps with at least r active experts; ``depth`` and
        ``accuracy``, the mean of ``by_layer`` over layer steps.

    Source: DALI's prefetch accuracy, top-k of the predicted against top-k of the true
    workload.
    """
    names = [name for name in PREDICTION_COLUMNS if name in trace.columns]
    if not names:
        return None

    layers = trace.shape.layers
    experts = trace.shape.experts
    ranks = min(RANKS, experts)
    # Sums of overlaps and how many they are, by layer and by rank.
    sums = {name: (np.zeros((2, layers)), np.zeros((2, ranks))) for name in names}

    for step in compose(trace, batch=batch, columns=names):
        if step.phase != Phase.DECODE:
            continue

        # A prediction made at one layer is about a later one.
        truth = [_by_workload(routed, experts) for routed in step.layers]
        for routed in step.layers:
            for name, scores in routed.predicted.items():
                target = routed.layer + prediction_distance(name)
                best = top_k(
                    np.ascontiguousarray(scores, dtype=np.float32), trace.shape.top_k
                )
                predicted = np.argsort(-_votes(best, experts), kind="stable")
                shares = _shares_in_common(predicted, truth[target])
                by_layer, by_rank = sums[name]
                by_layer[:, target] += shares[-1], 1
                by_rank[0, : len(shares)] += shares[:ranks]
                by_rank[1, : len(shares)] += 1

    return {name: _figures(name, *tables) for name, tables in sums.items()}


def _shares_in_common(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Share of the first r of one ranking that are among the first r of another, for
    every r up to the length of `truth`.
    """
    active = len(truth)
    rank = np.argsort(predicted)
    # From this rank on an expert is among the first of both.
    common_from = np.maximum(rank[truth], np.arange(active))
    common = np.cumsum(np.bincount(common_from, minlength=active)[:active])
    return common / np.arange(1, active + 1)


def _figures(name: str, by_layer: np.ndarray, by_rank: np.ndarray) -> dict[str, Any]:
    total, count = by_layer.sum(axis=1)
    return {
        "depth": prediction_distance(name),
        "accuracy": float(total / count) if count else None,
        "by_layer": _shares(by_layer),
        "by_rank": _shares(by_rank),
    }


def _shares(table: np.ndarray) -> list[float | None]:
    return [float(total / count) if count else None for total, count in table.T]


def _by_workload(routed: RoutedLayer, experts: int) -> np.ndarray:
    """Active experts, largest workload first."""
    votes = _votes(routed.routing, experts)
    return np.argsort(-votes, kind="stable")[: len(routed.experts)]


def _votes(choices: np.ndarray, experts: int) -> np.ndarray:
    """Votes [E] of choices [T, K], best first: one per token, ties broken by ranks."""
    tokens, top_k = choices.shape
    # A token's vote outweighs any sum of ranks.
    worth = tokens * top_k + 1 + top_k - np.arange(top_k)
    return np.bincount(choices.reshape(-1), np.tile(worth, tokens), experts)
