"""How well a layer's experts are known one layer ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.prefetch._kernels import predicted_workload
from moesim.policies.prefetch._transitions import Transitions
from moesim.reproduction.experiments.base import Experiment, Workload, percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.reproduction.experiments.base import Found, Setting
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
    for here, there in zip(step.layers, step.layers[1:], strict=False):
        if len(here.routing) == len(there.routing) and len(here.routing):
            yield here, there


def _workload(layer: RoutedLayer, experts: int) -> np.ndarray:
    tokens = np.zeros(experts)
    tokens[layer.experts] = layer.tokens
    return tokens


def accuracy(
    load: Workload, method: str, counts: tuple[int, ...], batch: int
) -> dict[int, float] | None:
    """Share in % of the top k by predicted workload that are top k by true workload.

    Mean over layer steps, for each k.

    EdgeMoE's table is counted on the first half of the decode steps, and every method
    is judged on the second half. None if that half is empty.

    Source: DALI's definition, reference algorithms, section 1.6.
    """
    experts = load.shape.experts
    layers = load.shape.layers
    column = _COLUMN.get(method)
    columns = () if column is None else (column,)
    half = sum(1 for _ in load.decode(batch=batch)) // 2
    table = Transitions(layers, experts)
    right = dict.fromkeys(counts, 0)
    asked = 0
    for number, step in enumerate(load.decode(*columns, batch=batch)):
        for here, there in _pairs(step):
            if number < half:
                table.observe(here.layer, here.routing, there.routing)
                continue
            if column is None:
                wanted = here.tokens @ table.rows(here.layer, here.experts)
            else:
                scores = here.predicted[column].astype(np.float32)
                wanted = predicted_workload(scores, there.routing.shape[1]).astype(
                    np.float64
                )
            true = _workload(there, experts)
            for count in counts:
                right[count] += len(top(wanted, count) & top(true, count))
            asked += 1
    return (
        {count: percent(right[count], count * asked) for count in counts}
        if asked
        else None
    )


def dali_prefetch_workload(load: Workload) -> Found:
    """Top-1 and top-2 accuracy of the table and of the next gate, by batch."""
    batches, lacks = load.batches(BATCHES)
    found: Found = {}
    for method in (EDGEMOE, NEXT_GATE):
        for size, reason in lacks.items():
            found |= {_workload_words(method, count, size): reason for count in (1, 2)}
        for batch in batches:
            rows = [_workload_words(method, count, batch) for count in (1, 2)]
            columns = (_COLUMN[method],) if method in _COLUMN else ()
            if not load.has(*columns):
                found |= dict.fromkeys(rows, load.lacking(*columns))
                continue
            rates = accuracy(load, method, (1, 2), batch)
            found |= (
                dict.fromkeys(rows, f"lacks decode steps of {batch} sequences")
                if rates is None
                else dict(zip(rows, rates.values(), strict=True))
            )
    return found


def _workload_words(method: str, count: int, batch: int) -> str:
    return f"{method}, top {count}, batch {batch}"


def dali_prefetch_residual(load: Workload) -> Found:
    """Top-4 accuracy of the next gate on raw and on corrected input, and their
    per-token overlap with the truth.
    """
    batches, _ = load.batches([8])
    batch = batches[0] if batches else 1
    found: Found = {}
    for method, column in _COLUMN.items():
        if not load.has(column):
            found[f"{method}, by workload"] = load.lacking(column)
            continue
        rates = accuracy(load, method, (PREFETCHED,), batch)
        empty = f"lacks decode steps of {batch} sequences"
        found[f"{method}, by workload"] = empty if rates is None else rates[PREFETCHED]
        found[f"{method}, per token"] = next_layer(load, column)[0]
    return found


def next_layer(load: Workload, column: str) -> tuple[float, float, float]:
    """How a token's predicted experts meet its true ones in decode, in %.

    Returns:
        Share of true experts that are among as many predicted ones; share of tokens
        whose best prediction is the best expert; share whose best prediction is any of
        its experts.
    """
    shared = best = active = tokens = chosen = 0
    for step in load.decode(column):
        for here, there in _pairs(step):
            scores = here.predicted[column].astype(np.float32)
            true = there.routing.astype(np.int64)
            ranked = np.argsort(-scores, axis=1, kind="stable")[:, : true.shape[1]]
            meets = ranked[:, :, None] == true[:, None, :]
            shared += int(meets.any(axis=2).sum())
            best += int(meets[:, 0, 0].sum())
            active += int(meets[:, 0, :].any(axis=1).sum())
            tokens += len(true)
            chosen += true.size
    return percent(shared, chosen), percent(best, tokens), percent(active, tokens)


def daop_next_layer(load: Workload) -> Found:
    """Share of a token's experts that the next gate names one layer early, in
    decode.
    """
    column = _COLUMN[NEXT_GATE]
    return {
        "decode": (
            next_layer(load, column)[0] if load.has(column) else load.lacking(column)
        )
    }


def smoe_prefetch(load: Workload) -> Found:
    """Whether the best predicted expert is the best one, or at least active."""
    rows = ("best expert foreseen", "foreseen expert active")
    if not load.has(_COLUMN[NEXT_GATE]):
        return dict.fromkeys(rows, load.lacking(_COLUMN[NEXT_GATE]))
    return dict(zip(rows, next_layer(load, _COLUMN[NEXT_GATE])[1:], strict=True))


def _residual_row(metric: str, setting: Setting) -> str | None:
    del metric
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
        row=lambda _, setting: _workload_words(
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
