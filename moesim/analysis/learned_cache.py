"""Evaluates a learned cache policy beside baselines, on a part of a trace that it was
not trained on.

Every policy drives the cache alone on the held-out part, from an empty cache, with
every miss admitted, while its evictions are recorded.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moesim.analysis.eviction_recorder import CALLS, EvictionRecorder, mean_delay
from moesim.policies.cache._one_request import FlashMoERequests, LRURequests
from moesim.policies.cache.flashmoe import FlashMoE
from moesim.policies.cache_replay import replay
from moesim.policies.planner.observers import observed_policy
from moesim.policies.planner.residency import CacheSize
from moesim.policies.registry import resolve
from moesim.traces.format.future import RecordedFuture

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.analysis.trace_split import TracePart
    from moesim.policies.base import CachePolicy
    from moesim.policies.cache._learned_network import Network
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

LEARNED = "flashmoe"
BOUND = "belady:must_admit=true"
CAUSAL_BASELINES = FlashMoE.compared_with
BASELINES = (*CAUSAL_BASELINES, BOUND)
"""What the learned policy is compared with: causal ones, and what bounds them all."""
RATIOS = (0.125, 0.25, 0.5)


@dataclass(slots=True)
class CacheEvaluation:
    """How one policy evicted. Evictions, unless said otherwise; every rate is None
    where there were none.

    Attributes:
        policy: specification.
        hit_rate: hits over accesses.
        evictions: how many.
        optimal: share whose victim is used no sooner than any expert that could have
            left instead (ties are optimal): what Belady would have done with the same
            cache.
        refetch_5: share whose victim is used again within five steps.
        delay_steps: steps between the first eviction of an expert by Belady on this
            trace and the eviction that ends the same stay here, mean over stays that
            ended later than Belady's.
    """

    policy: str
    hit_rate: float | None
    evictions: int
    optimal: float | None
    refetch_5: float | None
    delay_steps: float | None


def evaluate(
    policies: Iterable[str],
    steps: Iterable[RoutedStep],
    shape: ModelShape,
    slots: int,
    artefacts: Mapping[str, Any],
) -> list[CacheEvaluation]:
    """Let each policy drive the cache alone on the same steps.

    Args:
        policies: cache policies, as on the command line.
        steps: numbered from 0; walked once per policy and twice more.
        shape: the model.
        slots: per layer.
        artefacts: what learned policies look for.

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
            steps,
            future=future,
            extras=artefacts,
        )
        return recorder, counts.hit_rate

    # Delays are held against Belady with the same duty to admit.
    belady, _ = record(BOUND)
    evaluations = []
    for spec in policies:
        recorder, hit_rate = record(spec)
        evaluations.append(
            CacheEvaluation(
                spec,
                hit_rate,
                evictions=recorder.evictions,
                optimal=_share(recorder.optimal, recorder.evictions),
                refetch_5=_share(recorder.soon, recorder.evictions),
                delay_steps=mean_delay(recorder.stays, belady.stays),
            )
        )
    return evaluations


def per_request(
    steps: Iterable[RoutedStep], trained: Network, slots: int
) -> dict[str, float | None]:
    """Hit rates where requests are served one by one, by policy: the learned one as in
    the released code, and LRU.
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
    return {name: _share(count, accesses) for name, count in hits.items()}


def _share(count: int, total: int) -> float | None:
    return count / total if total else None


def cache_sizes(shape: ModelShape, *ratios: float) -> list[int]:
    """Return slots per layer for `ratios` and the usual `RATIOS`, where a choice
    exists.

    With no more slots than one token has experts every policy of this comparison does
    the same.
    """
    # A set: a requested ratio may round to a usual size.
    counts = {round(ratio * shape.experts) for ratio in (*RATIOS, *ratios)}
    return sorted(count for count in counts if shape.top_k < count < shape.experts)


def report(
    held_out: TracePart,
    trained: Network,
    facts: Mapping[str, Any],
    slots: Sequence[int],
) -> dict[str, Any]:
    """Evaluate a trained network beside its baselines at several cache sizes.

    Args:
        held_out: what it was not trained on.
        trained: the network.
        facts: of its training.
        slots: cache sizes, per layer.

    Returns:
        One JSON object; `moesim.analysis.learned_cache_report.report_text` prints it.
    """
    trace = held_out.trace
    shape = trace.shape
    artefacts = {LEARNED: trained._asdict()}
    sizes = []
    for count in slots:
        evaluations = evaluate((LEARNED, *BASELINES), held_out, shape, count, artefacts)
        sizes.append(
            {
                "slots": count,
                "ratio": count / shape.experts,
                "policies": [asdict(evaluation) for evaluation in evaluations],
                "per_request": per_request(held_out, trained, count),
            }
        )
    return {
        "trace": trace.path.name,
        "trace_digest": trace.digest(),
        "model": shape.name,
        "held_out_steps": [held_out.start, held_out.stop],
        "training": dict(facts),
        "evaluation_s": evaluation_s(trained),
        "sizes": sizes,
    }


def evaluation_s(trained: Network, times: int = 200) -> float:
    """Measure the median seconds of one evaluation of one layer on this machine, with
    numpy.
    """
    # Any numbers will do: a product takes as long whatever it multiplies.
    features = np.linspace(0.0, 1.0, 2 * trained.experts, dtype=np.float32)
    seconds = []
    for number in range(times):
        # Layers take turns, as in a run: weights of the last one are not in the cache.
        layer = number % trained.layers
        begin_s = time.perf_counter()
        trained.evaluate(layer, features)
        seconds.append(time.perf_counter() - begin_s)
    return median(seconds)
