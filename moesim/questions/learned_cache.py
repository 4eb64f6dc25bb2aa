"""Evaluates a learned cache policy beside baselines, on a part of a trace that it was
not trained on.

Every policy drives the cache alone on the held-out part, from an empty cache, with
every miss admitted, while its evictions are recorded.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from moesim.base.errors import TraceError
from moesim.engine.observers import observed_policy
from moesim.policies.base import CachePolicy, PolicyError
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
) -> list[dict[str, Any]]:
    """Let each policy drive the cache alone on the same steps.

    Args:
        policies: cache policies, as on the command line.
        steps: numbered from 0; walked once per policy and twice more.
        shape: the model.
        slots: per layer.
        artefacts: what learned policies look for.

    Returns:
        For each ``policy`` its ``hit_rate``, its ``evictions``, and of these, None
        where there were none: ``refetch_5``, the share whose victim is used again
        within five steps; ``delay_steps`` (`mean_delay`).

    Raises:
        PolicyError: an unknown policy, a network that does not fit, or a policy that
            declines admissions.
    """
    future = RecordedFuture(steps)
    size = CacheSize.for_model(shape, slots_per_layer=slots)

    def record(spec: str) -> tuple[EvictionRecorder, float | None]:
        policy = cast("CachePolicy", resolve(spec, "cache"))
        recorder = EvictionRecorder(policy, future, shape.experts)
        counts = replay(
            observed_policy(policy, recorder, CALLS),
            spec,
            shape,
            size,
            of_steps(steps, scores=True),
            future=future,
            extras=artefacts,
        )
        return recorder, counts.hit_rate

    # Delays are held against Belady with the same duty to admit.
    belady, _ = record(BOUND)
    rows = []
    for spec in policies:
        recorder, hit_rate = record(spec)
        evictions = recorder.evictions
        rows.append(
            {
                "policy": spec,
                "hit_rate": hit_rate,
                "evictions": evictions,
                "refetch_5": recorder.soon / evictions if evictions else None,
                "delay_steps": mean_delay(recorder.stays, belady.stays),
            }
        )
    return rows


def per_request(
    steps: Iterable[RoutedStep], trained: Network, slots: int
) -> list[dict[str, Any]]:
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
    return [
        {
            "policy": f"{name}{BY_REQUEST}",
            "hit_rate": count / accesses if accesses else None,
        }
        for name, count in hits.items()
    ]


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
    rows = [
        {"slots": count, "ratio": count / shape.experts, **row}
        for count in slots
        for row in (
            *evaluate(policies, held_out, shape, count, artefacts),
            *per_request(held_out, trained, count),
        )
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
    Column("evictions", "evictions"),
    Column("refetch_5", "used again within 5", "share"),
    Column("delay_steps", "delay, steps"),
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


CALLS = ("accessed", "admitted", "evicted", "victims")
"""What a recorder must be told of."""

SOON_STEPS = 5
"""A victim that is used again within so many steps was evicted too early."""


class EvictionRecorder:
    """Records how long experts stay in a cache, and what was evicted too early.

    An observer (`moesim.engine.observers`) of `CALLS`.

    Args:
        policy: whose evictions are recorded.
        future: of the same forward passes.
        experts: of a layer.

    Attributes:
        step: of the accesses before; admissions and evictions carry none.
        stays: flat key, first and last step of each finished stay in the cache, in
            order; -1 where it was there from the start.
        evictions: how many.
        soon: those of experts used again within `SOON_STEPS`.

    Raises:
        PolicyError: the policy may decline admissions.
    """

    def __init__(
        self, policy: CachePolicy, future: RecordedFuture, experts: int
    ) -> None:
        # With admissions declined, caches would differ in what they were offered.
        if not policy.admits_all:
            raise PolicyError(
                "a policy that declines admissions cannot be compared with those that"
                " admit every miss"
            )
        self.stays: list[tuple[int, int, int]] = []
        self.evictions = 0
        self.soon = 0
        self._future = future
        self._experts = experts
        self.step = -1
        self._entered: dict[int, int] = {}

    def reported(self, call: str, arguments: tuple[Any, ...], _answer: Any) -> None:
        """Note one call."""
        match call:
            case "accessed":
                self.step = arguments[0].step
            case "admitted":
                self._entered[arguments[0]] = self.step
            case "evicted":
                (key,) = arguments
                self.stays.append((key, self._entered.pop(key, -1), self.step))
            case "victims":
                self._judge(np.array(arguments[2]))

    def _judge(self, chosen: np.ndarray) -> None:
        """Count victims that are used again soon; they are of one layer."""
        assert chosen.min() >= 0, "every policy of the comparison admits every miss"

        layer = int(chosen[0]) // self._experts
        experts = chosen - layer * self._experts
        next_uses = self._future.next_uses(self.step, layer, experts)
        used_again = next_uses < self._future.never
        within_steps = next_uses - self.step <= SOON_STEPS
        self.evictions += len(chosen)
        self.soon += int((used_again & within_steps).sum())


def mean_delay(
    stays: Sequence[tuple[int, int, int]], belady: Sequence[tuple[int, int, int]]
) -> float | None:
    """Return how many steps, on average, experts overstay; None if none does: from the
    first eviction of an expert by Belady during a stay to the end of that stay.

    Args:
        stays: key, first and last step of each finished stay.
        belady: the same under Belady.
    """
    names = ["key", "first", "last"]
    ours = pd.DataFrame(stays, columns=names, dtype=np.int64)
    theirs = pd.DataFrame(belady, columns=names, dtype=np.int64)
    ends = pd.merge_asof(
        ours.sort_values("first"),
        theirs[["key", "last"]].sort_values("last"),
        left_on="first",
        right_on="last",
        by="key",
        direction="forward",
        suffixes=("", "_belady"),
    )
    delays = ends["last"] - ends["last_belady"]
    late = delays[delays > 0]
    return float(late.mean()) if len(late) else None


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
