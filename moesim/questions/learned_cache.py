"""Evaluates a learned cache policy beside baselines, on a part of a trace that it was
not trained on.

Every policy drives the cache alone on the held-out part, from an empty cache, with
every miss admitted.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from moesim.base.errors import TraceError
from moesim.policies.cache._learned_network import FlashMoERequests, LRURequests
from moesim.policies.cache.flashmoe import FlashMoE
from moesim.policies.cache_replay import replay
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.reporting.answers import Answer
from moesim.reporting.parts import Column, Listing
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import of_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.policies.base import CachePolicy
    from moesim.policies.cache._learned_network import Network
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

LEARNED = "flashmoe"
BOUND = "belady:must_admit=true"
CAUSAL_BASELINES = FlashMoE.compared_with
BASELINES = (*CAUSAL_BASELINES, BOUND)
"""What the learned policy is compared with: causal ones, and what bounds them all."""
RATIOS = (0.125, 0.25, 0.5)
BY_REQUEST = ", by request"


def evaluate(
    policies: Iterable[str],
    steps: Iterable[RoutedStep],
    shape: ModelShape,
    slots: int,
    artefacts: Mapping[str, Any],
) -> dict[str, float | None]:
    """Let each policy drive the cache alone on the same steps.

    Args:
        policies: cache policies, as on the command line.
        steps: numbered from 0; walked once per policy and once more.
        shape: the model.
        slots: per layer.
        artefacts: what learned policies look for.

    Returns:
        Hit rate of each; None without accesses.

    Raises:
        PolicyError: an unknown policy, or a network that does not fit.
    """
    future = RecordedFuture(steps)
    size = CacheSize.for_model(shape, slots_per_layer=slots)
    return {
        spec: replay(
            cast("CachePolicy", resolve(spec, "cache")),
            spec,
            shape,
            size,
            of_steps(steps, scores=True),
            future=future,
            extras=artefacts,
        ).hit_rate
        for spec in policies
    }


def per_request(
    steps: Iterable[RoutedStep], trained: Network, slots: int
) -> dict[str, float | None]:
    """Hit rates where requests are served one by one: of the learned policy as in the
    released code, and of LRU.
    """
    caches: dict[str, FlashMoERequests | LRURequests] = {
        LEARNED: FlashMoERequests(trained, slots),
        "lru": LRURequests(trained.layers, slots),
    }
    hits = dict.fromkeys(caches, 0)
    accesses = 0
    for step in steps:
        for routed in step.layers:
            accesses += len(routed.experts)
            for name, cache in caches.items():
                hits[name] += cache.serve(routed.layer, routed.experts)
    return {
        f"{name}{BY_REQUEST}": count / accesses if accesses else None
        for name, count in hits.items()
    }


def cache_sizes(shape: ModelShape) -> list[int]:
    """Return slots per layer for `RATIOS`, where a choice exists.

    With no more slots than one token has experts every policy of this comparison does
    the same.
    """
    counts = [round(ratio * shape.experts) for ratio in RATIOS]
    return [count for count in counts if shape.top_k < count < shape.experts]


def report(
    trace: Trace,
    held_out: Sequence[RoutedStep],
    trained: Network,
    facts: Mapping[str, Any],
    slots: Sequence[int],
    *,
    start: int = 0,
) -> dict[str, Any]:
    """Evaluate a trained network beside its baselines at several cache sizes.

    Args:
        trace: of the held-out part.
        held_out: forward passes that it was not trained on.
        trained: the network.
        facts: of its training.
        slots: cache sizes, per layer.
        start: number of the first of those forward passes in the trace.

    Returns:
        One JSON object; `learned_answer` prints it.
    """
    shape = trace.shape
    artefacts = {LEARNED: trained._asdict()}
    policies = (LEARNED, *BASELINES)
    rows = []
    for count in slots:
        rates = evaluate(policies, held_out, shape, count, artefacts)
        rates |= per_request(held_out, trained, count)
        size = {"slots": count, "ratio": count / shape.experts}
        rows += [
            {**size, "policy": name, "hit_rate": rate} for name, rate in rates.items()
        ]
    return {
        "trace": trace.path.name,
        "trace_digest": trace.digest(),
        "model": shape.name,
        "held_out_steps": [start, start + len(held_out)],
        "training": dict(facts),
        "rows": rows,
    }


_COLUMNS = [
    Column("slots", "slots per layer"),
    Column("ratio", "of experts", "share"),
    Column("policy", "policy"),
    Column("hit_rate", "hit rate", "share"),
]


def learned_answer(report: Mapping[str, Any]) -> Answer:
    """Say whether the learned policy is worth it, at each size of the cache.

    Args:
        report: as `moesim.questions.learned_cache.report` makes it.
    """
    start, stop = report["held_out_steps"]
    facts = report["training"]
    setting = {
        "held-out part": f"forward passes {start:,} to {stop - 1:,} of"
        f" {report['trace']}; every cache is empty at first and admits every miss,"
        " step-atomic",
        "network": f"K = {facts['horizon']}, h = {facts['hidden']}, seed"
        f" {facts['seed']}; {facts['bytes_per_layer'] / 1024:.1f} KiB per layer",
        "training": f"{facts['training_steps']:,} training and"
        f" {facts['validation_steps']:,} validation steps, {facts['epochs_run']} epochs"
        f" in {facts['seconds_s']:.0f} s, validation loss"
        f" {facts['validation_loss_first']:.4f} to {facts['validation_loss_best']:.4f}",
    }
    rows = pd.DataFrame(report["rows"])
    rows = rows.sort_values(["slots", "hit_rate"], ascending=[True, False])
    note = "by request: served one at a time, as the released code does"
    return Answer(
        question="is a learned cache worth it?",
        subject=report["model"],
        setting=list(setting.items()),
        tables=[Listing(rows, _COLUMNS, lead=3, note=note)],
        sentences=[
            f"{slots} slots per layer: {conclusion(of_size)}"
            for slots, of_size in rows.groupby("slots")
        ],
        data=dict(report),
    )


def conclusion(rows: pd.DataFrame) -> str:
    """State whether the learned policy beats each causal baseline, in points of the hit
    rate.
    """
    rates = rows.set_index("policy")["hit_rate"].fillna(0.0)
    gains = rates[LEARNED] - rates[list(CAUSAL_BASELINES)]
    points = [f"{100 * gain:+.1f} to {name}" for name, gain in gains.items()]
    # Equal is not better.
    unbeaten = gains.index[gains <= 0]
    outcome = "beats every causal rival"
    if len(unbeaten):
        outcome = f"does not beat {', '.join(unbeaten)}"
    return f"the learned policy {outcome}; points of hit rate: {', '.join(points)}"


NEAR = 0.1
"""A cut moves to the beginning of a sequence that lies within this share of the
trace.
"""


def split(
    trace: Trace, *, held_out: float = 0.25, batch: int = 1, steps: int | None = None
) -> tuple[list[RoutedStep], list[RoutedStep]]:
    """Cut a trace in two: the first part to learn from, the last one to evaluate on.

    Args:
        trace: an opened trace.
        held_out: share of the last part, between 0 and 1.
        batch: sequences that run together.
        steps: keep the first so many forward passes.

    Returns:
        Two parts without a common step, each numbered from 0; the cut lies between two
        sequences if one begins nearby.

    Raises:
        TraceError: nothing would be left of one part.
    """
    passes = list(compose(trace, batch=batch, steps=steps))
    count = len(passes)
    target = round(count * (1.0 - held_out))
    # A new group of sequences begins where the number of the batch changes.
    begins = [
        step for step in range(1, count) if passes[step].batch != passes[step - 1].batch
    ]

    # Within a sequence, what comes next depends on what came before: both parts would
    # know of each other.
    cut = min(begins, key=lambda step: abs(step - target), default=target)
    if abs(cut - target) > NEAR * count:
        cut = target
    if not 0 < cut < count:
        raise TraceError(
            f"{trace.path}: {count} forward passes cannot be cut in two; give a"
            " longer trace"
        )
    judged = [replace(step, step=step.step - cut) for step in passes[cut:]]
    return passes[:cut], judged


def check_held_out(training: Trace, held_out: Trace) -> None:
    """Refuse a held-out trace that shares sequences with the training trace: judging on
    what was learned from flatters whoever learned.

    Raises:
        TraceError: they share some, whatever their files are called.
    """
    learned, judged = (
        [
            hashlib.sha256(rows.experts.tobytes()).hexdigest()
            for rows in trace.sequences()
        ]
        for trace in (training, held_out)
    )
    shared = np.isin(judged, learned).sum()
    if shared:
        raise TraceError(
            f"{held_out.path}: expected sequences to judge on that are not in"
            f" {training.path}, found {shared} of {len(judged)} that are; hold out"
            " another trace, or leave a part of this one to be held out"
        )
