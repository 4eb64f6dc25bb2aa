"""How well predictors know a layer's experts one layer early."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.prefetch._transitions import Transitions
from moesim.reproduction.experiments.base import Excerpt, Experiment, percent
from moesim.traces.predictions import predicted_workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.reproduction.experiments.base import Figures, Setting
    from moesim.traces.format.batch import RoutedLayer, RoutedStep

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
                table.observe(layer.layer, layer.routing, following.routing)
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
    return [_workload_row(method, count, batch) for count in TOP]


def _workload_row(method: str, count: int, batch: int) -> str:
    return f"{method}, top {count}, batch {batch}"


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
    rows = list(_SMOE_ROWS.values())
    if not excerpt.has(column):
        return dict.fromkeys(rows, excerpt.lacking(column))
    _, best, active = next_layer(excerpt, column)
    return dict(zip(rows, (best, active), strict=True))


def _residual_row(metric: str, setting: Setting) -> str | None:
    del metric
    # Tasks differ by a few points; the average is what the text discusses.
    return f"{setting['method']}, by workload" if setting["task"] == "Average" else None


_SMOE_ROWS = {
    "prefetch_accuracy_top_score": "best expert foreseen",
    "prefetched_expert_is_active_prob": "foreseen expert active",
}

EXPERIMENTS = (
    Experiment(
        name="dali-prefetch-workload",
        summary="prefetch accuracy by predictor, top k and batch (DALI, table 2)",
        published=(("DALI", "Table 2", "prefetch_accuracy_topk_high_workload"),),
        unit="%",
        needs=(
            "routing of as many sequences as the batch; column pred1_raw for HybriMoE's"
            " predictor"
        ),
        computes=(
            "Of the k experts with the highest workload, the share that the predictor"
            " has among its first k, over the second half of the decode steps;"
            " EdgeMoE's table is counted on the first half."
        ),
        caveats=(
            (
                "the paper's table is calibrated on other texts; ours on the same ones,"
                " earlier"
            ),
            (
                "where sequences are too few, the largest batch there is stands in its"
                " own row"
            ),
        ),
        row=lambda _, setting: _workload_row(
            setting["method"], setting["topk"], setting["batch_size"]
        ),
        run=dali_prefetch_workload,
    ),
    Experiment(
        name="dali-prefetch-residual",
        summary=(
            "prefetch accuracy on raw and residual-corrected gate input (DALI, table 5)"
        ),
        published=(("DALI", "Table 5", "prefetch_accuracy"),),
        unit="%",
        needs="columns pred1_raw and pred1_res",
        computes=(
            "As dali-prefetch-workload for the top 4 at batch 8 (or the largest there"
            " is); beside it the share of a token's experts among as many predicted"
            " ones."
        ),
        caveats=(
            (
                "the paper does not say which k and batch stand behind the table; 4 is"
                " its prefetch size"
            ),
            "only the average over its tasks is quoted",
        ),
        row=_residual_row,
        run=dali_prefetch_residual,
    ),
    Experiment(
        name="daop-next-layer",
        summary="experts foreseen by the next gate, per token (DAOP, section III)",
        published=(("DAOP", "III-3", "next_layer_prediction_accuracy"),),
        unit="%",
        needs="column pred1_raw",
        computes=(
            "Share of a token's experts among as many that the next gate names on this"
            " layer's gate input."
        ),
        caveats=("DAOP predicts from layer 4 on; here all layers count",),
        row=lambda _, setting: str(setting["phase"]),
        run=daop_next_layer,
    ),
    Experiment(
        name="smoe-prefetch",
        summary=(
            "is the best predicted expert the best one, or active at all? (SMoE,"
            " section 6)"
        ),
        published=(
            ("SMoE", "6.2/6.3", "prefetch_accuracy_top_score"),
            ("SMoE", "6.2/6.3", "prefetched_expert_is_active_prob"),
        ),
        unit="%",
        needs="column pred1_raw",
        computes=(
            "Share of tokens whose first predicted expert is their first expert, and"
            " whose first predicted expert is one of theirs."
        ),
        caveats=(
            (
                "SMoE predicts from a partial hidden state of the same layer; the next"
                " gate stands in for it"
            ),
        ),
        row=lambda metric, _: _SMOE_ROWS[metric],
        run=smoe_prefetch,
    ),
)
