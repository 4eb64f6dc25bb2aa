"""What routing says of decisions: assignment, prediction, and how alike its phases are.

A function returns row -> figure, or what the trace lacks in one line that begins with
"lacks"; ``data/papers.yaml`` says which published records it stands beside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.evidence.reproduction.routing_caches import MACHINE, Figures
from moesim.evidence.reproduction.runs import decode_replays
from moesim.evidence.reproduction.workloads import Excerpt, percent
from moesim.hwprofiles.profile import load_profile
from moesim.policies.arrays import view_of
from moesim.policies.prefetch.statistical import Transitions
from moesim.policies.systems import System
from moesim.questions.gap_mixes import Grades
from moesim.traces.predictions import predicted_workload
from moesim.traces.stats.statistics import SimilarityAggregator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.traces.format.batch import RoutedLayer, RoutedStep

# -- assignment against its optimum ----------------------------------------------------


DALI = System(assignment="greedy", cache="workload-window:window=4,swaps=8")
"""Over half of the experts (its figure 12)."""
DECODED = 32
"""Decode steps behind DALI's table 4."""


def dali_greedy_loss(excerpt: Excerpt) -> Figures:
    """Modelled time that greedy loses to the exact optimum, for the same states of the
    machine.
    """
    batches, lacks = excerpt.batches([16, 32])
    figures: Figures = {_loss_label(size): reason for size, reason in lacks.items()}
    best_quality = 0.0
    # A trace of one sequence is judged at batch 1, in a row of its own.
    for batch in batches or [1]:
        # Both costs are for one and the same state of the machine.
        grades = Grades()
        profile = load_profile(MACHINE)
        replays = decode_replays(excerpt, batch, DECODED, profile, DALI, 0.5)
        replays.replay_s({}, grades)
        if not grades.least_s:
            figures[_loss_label(batch)] = f"lacks decode steps of {batch} sequences"
            continue
        lost_s = grades.chosen_s - grades.least_s
        figures[_loss_label(batch)] = percent(lost_s, grades.chosen_s)
        # Grades are ratios to the optimum: 1.25 means that a fifth is lost.
        largest = 100 * (1 - 1 / max(grades.modelled))
        figures[f"largest loss of one layer step at batch {batch}, %"] = largest
        best_quality = max(best_quality, percent(grades.least_s, grades.chosen_s))
    if best_quality:
        figures[BEST_QUALITY] = best_quality
    return figures


BEST_QUALITY = "best quality against the optimum, %"


def _loss_label(batch: int) -> str:
    return f"loss at batch {batch}, %"


# -- how well predictors know a layer one layer early ----------------------------------


BATCHES = (8, 16, 32, 64)
EDGEMOE = "EdgeMoE"
NEXT_GATE = "HybriMoE"
RESIDUAL = "DALI"
"""Names of the published methods: a table of transitions, the next gate, the next gate
on corrected input.
"""
_COLUMN = {NEXT_GATE: "pred1_raw", RESIDUAL: "pred1_res"}
PREFETCHED = 4
"""Experts prefetched per layer. Source: DALI, figure 12, for DeepSeek and Qwen."""


def top(scores: np.ndarray, count: int) -> set[int]:
    """Ids of the `count` highest of float [E], ties to the lower id."""
    return set(np.argsort(-scores, kind="stable")[:count].tolist())


def _pairs(step: RoutedStep) -> Iterator[tuple[RoutedLayer, RoutedLayer]]:
    """Neighbouring layers that hold the same tokens."""
    for layer, following in zip(step.layers, step.layers[1:], strict=False):
        # The last layer may hold only part of a prompt (ragged prefill).
        if len(layer.routing) == len(following.routing) and len(layer.routing):
            yield layer, following


def _workload(layer: RoutedLayer, experts: int) -> np.ndarray:
    """Tokens routed to each expert, float64 [E]."""
    tokens = np.zeros(experts)
    tokens[layer.experts] = layer.tokens
    return tokens


def accuracy(
    excerpt: Excerpt, method: str, counts: tuple[int, ...], batch: int
) -> dict[int, float] | None:
    """Share in % of the top k by predicted workload that are top k by true workload.

    Mean over layer steps, for each k.

    EdgeMoE's table is counted on the first half of the decode steps, and every method
    is judged on the second half. None if that half is empty.

    Source: DALI's definition, reference algorithms, section 1.6.
    """
    experts = excerpt.shape.experts
    column = _COLUMN.get(method)
    columns = () if column is None else (column,)
    # Counting first costs a second reading, and holds one step at a time.
    half = sum(1 for _ in excerpt.decode(batch=batch)) // 2
    table = Transitions(excerpt.shape.layers, experts)
    matches = dict.fromkeys(counts, 0)
    judged = 0
    for number, step in enumerate(excerpt.decode(*columns, batch=batch)):
        for layer, following in _pairs(step):
            if number < half:
                before = view_of(layer.routing, np.uint16)
                after = view_of(following.routing, np.uint16)
                table.observe(layer.layer, before, after)
                continue
            # EdgeMoE has no gate to ask: its table says which experts follow which.
            if column is None:
                predicted = table.workload(layer.layer, layer.experts, layer.tokens)
            else:
                predicted = _predicted_workload(layer, column, following)
            true = _workload(following, experts)
            for count in counts:
                matches[count] += len(top(predicted, count) & top(true, count))
            judged += 1
    if not judged:
        return None
    return {count: percent(matches[count], count * judged) for count in counts}


def _predicted_workload(
    layer: RoutedLayer, column: str, following: RoutedLayer
) -> np.ndarray:
    """Workload of the following layer as the gate predicts it, float64 [E]."""
    # Ranks must not depend on the float16 in which traces hold scores.
    scores = layer.predicted[column].astype(np.float32)
    top_k = following.routing.shape[1]
    return predicted_workload(scores, top_k).astype(np.float64)


def dali_prefetch_workload(excerpt: Excerpt) -> Figures:
    """Top-1 and top-2 accuracy of the table and of the next gate, by batch."""
    batches, lacks = excerpt.batches(BATCHES)
    figures: Figures = {}
    for method in (EDGEMOE, NEXT_GATE):
        # Published batches that the trace has no sequences for keep their rows.
        for size, reason in lacks.items():
            figures |= dict.fromkeys(_workload_rows(method, size), reason)
        columns = (_COLUMN[method],) if method in _COLUMN else ()
        for batch in batches:
            rows = _workload_rows(method, batch)
            if not excerpt.has(*columns):
                figures |= dict.fromkeys(rows, excerpt.lacking(*columns))
                continue
            rates = accuracy(excerpt, method, TOP, batch)
            if rates is None:
                lack = f"lacks decode steps of {batch} sequences"
                figures |= dict.fromkeys(rows, lack)
            else:
                figures |= dict(zip(rows, rates.values(), strict=True))
    return figures


TOP = (1, 2)
"""Numbers of experts that table 2 compares."""


def _workload_rows(method: str, batch: int) -> list[str]:
    return [f"{method}, top {count}, batch {batch}" for count in TOP]


def dali_prefetch_residual(excerpt: Excerpt) -> Figures:
    """Top-4 accuracy of the next gate on raw and on corrected input, and their
    per-token overlap with the truth.
    """
    # The batch behind the table is not published.
    batch = excerpt.batch_near(8)
    figures: Figures = {}
    for method, column in _COLUMN.items():
        row = f"{method}, by workload"
        if not excerpt.has(column):
            figures[row] = excerpt.lacking(column)
            continue
        rates = accuracy(excerpt, method, (PREFETCHED,), batch)
        if rates is None:
            figures[row] = f"lacks decode steps of {batch} sequences"
        else:
            figures[row] = rates[PREFETCHED]
        figures[f"{method}, per token"] = next_layer(excerpt, column)[0]
    return figures


def next_layer(excerpt: Excerpt, column: str) -> tuple[float, float, float]:
    """Compare a token's predicted experts with its true ones in decode, in %.

    Returns:
        Share of true experts that are among as many predicted ones; share of tokens
        whose best prediction is the best expert; share whose best prediction is any of
        its experts.
    """
    shared = best = active = tokens = chosen = 0
    for step in excerpt.decode(column):
        for layer, following in _pairs(step):
            scores = layer.predicted[column].astype(np.float32)
            true = following.routing.astype(np.int64)
            top_k = true.shape[1]
            ranked = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
            # [T, K predicted, K true]: which predicted expert is which true one.
            equal = ranked[:, :, None] == true[:, None, :]
            shared += int(equal.any(axis=2).sum())
            best += int(equal[:, 0, 0].sum())
            active += int(equal[:, 0, :].any(axis=1).sum())
            tokens += len(true)
            chosen += true.size
    return percent(shared, chosen), percent(best, tokens), percent(active, tokens)


def daop_next_layer(excerpt: Excerpt) -> Figures:
    """Share of a token's experts that the next gate names one layer early, in
    decode.
    """
    column = _COLUMN[NEXT_GATE]
    if not excerpt.has(column):
        return {"decode": excerpt.lacking(column)}
    return {"decode": next_layer(excerpt, column)[0]}


def smoe_prefetch(excerpt: Excerpt) -> Figures:
    """Whether the best predicted expert is the best one, or at least active."""
    column = _COLUMN[NEXT_GATE]
    rows = ("best expert foreseen", "foreseen expert active")
    if not excerpt.has(column):
        return dict.fromkeys(rows, excerpt.lacking(column))
    _, best, active = next_layer(excerpt, column)
    return dict(zip(rows, (best, active), strict=True))


# -- routing before any policy ---------------------------------------------------------


TOKENS = (32, 64, 128, 256)


def daop_similarity(excerpt: Excerpt) -> Figures:
    """Cosine of the share of tokens routed to each expert in prefill and in decode,
    mean over layers and sequences.
    """
    aggregator = SimilarityAggregator(excerpt.shape)
    for rows in excerpt.trace.sequences():
        aggregator.add(rows)
    similarity = aggregator.figures()["similarity"]
    row = "prefill against decode"
    return {row: "lacks prefill or decode" if similarity is None else 100 * similarity}


def flashmoe_prefill(excerpt: Excerpt) -> Figures:
    """Share of a layer's experts that the first so many tokens of a sequence use, mean
    over layers and sequences.
    """
    layers = excerpt.shape.layers
    experts = excerpt.shape.experts
    shares: dict[int, list[float]] = {count: [] for count in TOKENS}
    for rows in excerpt.trace.sequences():
        for layer in range(layers):
            chosen = rows.experts[rows.layer == layer]
            for count in TOKENS:
                # Shorter sequences would count as if they stopped using experts.
                if len(chosen) >= count:
                    distinct = len(np.unique(chosen[:count]))
                    shares[count].append(distinct / experts)
    return {
        f"{count} tokens": (
            100.0 * float(np.mean(of_layers))
            if of_layers
            else f"lacks sequences of {count} tokens"
        )
        for count, of_layers in shares.items()
    }
