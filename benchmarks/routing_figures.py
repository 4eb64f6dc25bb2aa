"""Published figures that need only routing, beside the same figures of any trace.

    python -m benchmarks.routing_figures                     # lists the experiments
    python -m benchmarks.routing_figures hybrimoe-hit-rate --shared DIR
    python -m benchmarks.routing_figures all --drawn FOLDER --steps 50

Ours need not agree: other models, other prompts, often another length. What is printed
says which model and trace each column is of, what the experiment does, and where it
departs from its source. Traces are the shipped one, those of ``--trace``, others'
recordings in ``--shared``, and with ``--drawn`` two like DALI's models, without
predictions, which would prove themselves; then DALI's table 4 is printed as well.

``routing_figures.yaml`` describes the experiments; each of its rows names a function of
this module with its arguments. A function takes an `Excerpt` of a trace and returns one
figure, or several by name, or raises `LacksError`.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
import yaml

from moesim.base.errors import TraceError
from moesim.base.files import ScratchFolder
from moesim.engine.observers import observed_policy
from moesim.evidence.reproduction.questions import (
    COMPARISONS,
    filled,
    records,
    selected,
)
from moesim.evidence.reproduction.workloads import Workload
from moesim.hwprofiles.profile import load_profile
from moesim.policies import cache_replay
from moesim.policies.arrays import view_of
from moesim.policies.assignment._optimum import modelled_s, optimal
from moesim.policies.names import CPU
from moesim.policies.prefetch.statistical import Transitions
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.policies.systems import System
from moesim.questions import learned_cache as learned
from moesim.questions.gap import MixReplays
from moesim.reporting.tables import aligned
from moesim.runs.config import RunConfig
from moesim.runs.replay import replay
from moesim.runs.setup import Setup
from moesim.sim.replay import Replay
from moesim.traces.format.arrays import predicted_workload
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import layer_steps, of_steps
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.shipped import resolve_trace
from moesim.traces.stats.statistics import SimilarityAggregator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from moesim.engine.planner import Planner
    from moesim.evidence.reproduction.questions import Record
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.base import CachePolicy
    from moesim.policies.cache_replay import CacheCounts
    from moesim.runs.result import Run
    from moesim.sim.results import ReplayResult
    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline

MACHINE = "rtx3090-epyc7532"
"""Datasheet profile of the experiments that need one: DALI's machine."""


@lru_cache(maxsize=64)
def _sequences(trace: Trace) -> int:
    # A trace is recorded per sequence; batches are composed when it is replayed.
    return sum(1 for _ in trace.sequences())


class LacksError(TraceError):
    """What a trace lacks for a figure, in one line that begins with "lacks"."""


NOTHING_COUNTED = "lacks what is counted in these forward passes; see --steps"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The first forward passes of a trace, which is what an experiment sees.

    Attributes:
        trace: opened.
        most_steps: forward passes seen; None for all.
        seed: for policies that draw.
    """

    trace: Trace
    most_steps: int | None = None
    seed: int = 0

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.trace.shape

    @property
    def sequences(self) -> int:
        """How many a batch could have."""
        return _sequences(self.trace)

    def need(self, *columns: str) -> None:
        """Refuse a trace without these optional columns."""
        missing = [name for name in columns if name not in self.trace.columns]
        if missing:
            raise LacksError(f"lacks column {', '.join(missing)}")

    def need_sequences(self, batch: int) -> None:
        """Refuse a trace with too few sequences for a batch."""
        if batch > self.sequences:
            raise LacksError(f"lacks sequences: batches of {batch} want as many")

    def decode(self, *columns: str, batch: int = 1) -> Iterator[RoutedStep]:
        """Decode steps in which all `batch` sequences take part."""
        self.need(*columns)
        self.need_sequences(batch)
        passes = compose(
            self.trace, batch=batch, steps=self.most_steps, columns=columns
        )
        for step in passes:
            # Sequences end one after another; a step of fewer is another batch size.
            if step.phase == Phase.DECODE and step.sequences == batch:
                yield step

    def batch_near(self, size: int) -> int:
        """That batch size, or the largest that the trace has sequences for."""
        return max(1, min(size, self.sequences))

    def replayed(self, **options: Any) -> Run:
        """A run on `MACHINE`, with options of `moesim.replay`."""
        limits: dict[str, Any] = {"steps": self.most_steps, "seed": self.seed}
        return replay(self.trace, hw=MACHINE, **limits, **options)


def percent(part: float, total: float) -> float:
    """Part of total in %.

    Raises:
        LacksError: total is 0: the trace holds nothing of what is counted.
    """
    if not total:
        raise LacksError(NOTHING_COUNTED)
    return 100.0 * part / total


def figure(excerpt: Excerpt, described: Mapping[str, Any]) -> float:
    """One figure of an excerpt.

    Args:
        excerpt: of a trace.
        described: ``{statistic: arguments}``, in which ``figure`` names one of several;
            or ``{comparison: {of: ..., over: ...}}`` of two such figures, as records
            compare them.
    """
    ((name, arguments),) = described.items()
    if name in COMPARISONS:
        system, other = (figure(excerpt, arguments[side]) for side in ("of", "over"))
        # Nothing at all cannot be compared with.
        if not other:
            raise LacksError("lacks something to compare with")
        return COMPARISONS[name](system, other)
    stated = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in arguments.items()
    }
    wanted = stated.pop("figure", None)
    figures = computed(excerpt, name, tuple(sorted(stated.items())))
    if wanted is not None:
        figures = figures.get(f"{wanted}".lower())
    if figures is None:
        raise LacksError(NOTHING_COUNTED)
    return float(figures)


@lru_cache(maxsize=64)
def computed(
    excerpt: Excerpt, name: str, arguments: tuple[tuple[str, Any], ...]
) -> Any:
    """What a statistic finds; several rows are read off one computation."""
    return STATISTICS[name](excerpt, **dict(arguments))


# -- caches driven alone: every miss is fetched and offered, and no time passes --------


def cache_counts(
    excerpt: Excerpt, spec: str, size: CacheSize, policy: CachePolicy | None = None
) -> CacheCounts:
    """Hits and misses of a cache policy; of `policy`, if given, in place of `spec`."""
    named = cast("CachePolicy", resolve(spec, "cache"))
    excerpt.need(*named.needs)
    steps = excerpt.most_steps
    return cache_replay.replay(
        policy or named,
        spec,
        excerpt.shape,
        size,
        layer_steps(
            excerpt.trace, steps=steps, columns=named.needs, tokens=named.reads_tokens
        ),
        future=RecordedFuture.of(excerpt.trace, steps=steps) if named.oracle else None,
        seed=excerpt.seed,
    )


def hit_rate(excerpt: Excerpt, policy: str, cached: float) -> float:
    """Of a cache that holds so many % of the experts."""
    size = CacheSize.for_model(excerpt.shape, ratio=cached / 100)
    counts = cache_counts(excerpt, policy.lower(), size)
    return percent(counts.hits, counts.accesses)


LRU_HIT_RATE = 73.0
"""FlashMoE's LRU hit rate in %; the cache size behind it is not stated. Source:
published.yaml, FlashMoE text.
"""
CALLS = ("start", "accessed", "admitted", "evicted", "victims")
"""What recorders must be told of."""

SOON_STEPS = 5
"""A victim that is used again within so many steps was evicted too early."""


class EvictionRecorder:
    """Records how long experts stay in a cache that admits every miss, and what was
    evicted too early.

    An observer (`moesim.engine.observers`) of `CALLS`.

    Args:
        future: of the same forward passes.
        experts: of a layer.

    Attributes:
        step: of the accesses before; admissions and evictions carry none.
        stays: flat key, first and last step of each finished stay in the cache, in
            order; -1 where it was there from the start.
        evictions: how many.
        soon: those of experts used again within `SOON_STEPS`.
    """

    def __init__(self, future: RecordedFuture, experts: int) -> None:
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


def _slots_for(excerpt: Excerpt, hit_rate: float) -> int:
    """Slots per layer at which LRU's hit rate in % comes nearest to `hit_rate`."""

    @cache
    def rate(slots: int) -> float:
        size = CacheSize.for_model(excerpt.shape, slots_per_layer=slots)
        counts = cache_counts(excerpt, "lru", size)
        return percent(counts.hits, counts.accesses)

    # LRU's hit rate never falls as slots grow. The first size at or above the rate may
    # be farther from it than the one before.
    first = 1 + bisect_left(range(1, excerpt.shape.experts), hit_rate, key=rate)
    return min((max(1, first - 1), first), key=lambda n: abs(rate(n) - hit_rate))


class RivalRecorder(EvictionRecorder):
    """Records evictions, and whether another policy, which is told the same, would have
    named a better first victim in this cache; later ones depend on the first.

    Attributes:
        better: victims that are used later than the rival's.
        decided: those that are used earlier or later.
    """

    def __init__(
        self, rival: CachePolicy, future: RecordedFuture, experts: int
    ) -> None:
        super().__init__(future, experts)
        self._rival = rival
        self.better = 0
        self.decided = 0

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Note one call, and put it to the rival."""
        super().reported(call, arguments, answer)
        if call != "victims":
            if call == "start":
                # The rival is causal: the future is for the policy, if it is an oracle.
                arguments = (replace(arguments[0], future=None),)
            getattr(self._rival, call)(*arguments)
            return
        incoming, candidates, victims = map(np.array, arguments)
        chosen = np.full(1, -1)
        self._rival.victims(incoming[:1], candidates, chosen)
        use, rival_use = (
            self._future.next_use(self.step, *divmod(int(key), self._experts))
            for key in (victims[0], chosen[0])
        )
        # Two victims that are both never used again are equally good.
        self.decided += use != rival_use
        self.better += use > rival_use


def watch(
    spec: str, steps: Sequence[RoutedStep], shape: ModelShape, slots: int
) -> tuple[EvictionRecorder, float]:
    """Let a cache be driven alone; what was recorded of its evictions, and its hit
    rate.
    """
    policy = cast("CachePolicy", resolve(spec, "cache"))
    future = RecordedFuture(steps)
    recorder = EvictionRecorder(future, shape.experts)
    counts = cache_replay.replay(
        observed_policy(policy, recorder, CALLS),
        spec,
        shape,
        CacheSize.for_model(shape, slots_per_layer=slots),
        of_steps(steps),
        future=future,
    )
    return recorder, counts.hit_rate or 0.0


def lru_and_belady(excerpt: Excerpt) -> Mapping[str, float | None]:
    """At the size where LRU comes nearest to the published rate: the hit rate of
    ``lru`` and ``belady``, in how many evictions they ``regret`` it within five steps,
    how often as many ``misses`` LRU has, the share that is ``cached``, how much
    ``later`` LRU lets go.
    """
    shape = excerpt.shape
    slots = _slots_for(excerpt, LRU_HIT_RATE)
    steps = list(compose(excerpt.trace, steps=excerpt.most_steps))
    # The textbook's Belady takes in every miss, as LRU does.
    watched = {
        name: watch(spec, steps, shape, slots)
        for name, spec in (("lru", "lru"), ("belady", learned.BOUND))
    }
    (lru, lru_rate), (belady, belady_rate) = watched.values()
    figures = {
        "cached": percent(slots, shape.experts),
        "later": mean_delay(lru.stays, belady.stays),
    }
    if belady_rate < 1.0:
        figures["misses"] = (1.0 - lru_rate) / (1.0 - belady_rate)
    for name, (recorder, rate) in watched.items():
        figures[name] = 100.0 * rate
        if recorder.evictions:
            figures[f"regret {name}"] = percent(recorder.soon, recorder.evictions)
    return figures


def better_victims(excerpt: Excerpt) -> float:
    """How often LRU's victim is better than LFU's, at that size."""
    slots = _slots_for(excerpt, LRU_HIT_RATE)
    lru, lfu = (cast("CachePolicy", resolve(spec, "cache")) for spec in ("lru", "lfu"))
    future = RecordedFuture.of(excerpt.trace, steps=excerpt.most_steps)
    recorder = RivalRecorder(lfu, future, excerpt.shape.experts)
    size = CacheSize.for_model(excerpt.shape, slots_per_layer=slots)
    cache_counts(excerpt, "lru", size, observed_policy(lru, recorder, CALLS))
    return percent(recorder.better, recorder.decided)


RIVALS = ("lru", "lfu", "arc", "lecar")
LEARNED_RATIO = 0.25


def learned_cache(excerpt: Excerpt) -> Mapping[str, float]:
    """``hits`` and ``misses`` of the learned cache and its rivals in %, on later
    forward passes only, which the network has not seen.
    """
    try:
        from moesim.runtime.train_cache import train
    except ImportError:
        raise LacksError(
            "lacks PyTorch, which trains the network: pip install 'moesim[runtime]'"
        ) from None
    shape = excerpt.shape
    slots = round(LEARNED_RATIO * shape.experts)
    # The experts of one token fill such a cache, so no policy has a choice.
    if slots <= shape.top_k:
        raise LacksError(
            f"lacks experts: a quarter of {shape.experts} leaves a cache nothing to"
            " choose"
        )
    try:
        training, held_out = learned.split(excerpt.trace, steps=excerpt.most_steps)
        network = train(training, shape, seed=excerpt.seed).network
    except TraceError as error:
        raise LacksError(f"lacks forward passes to train on: {error}") from None
    policies = (learned.LEARNED, *RIVALS)
    parameters = {learned.LEARNED: network._asdict()}
    figures = {}
    rates = learned.evaluate(policies, held_out, shape, slots, parameters)
    for name, rate in rates.items():
        # No accesses at all count as no hits, and give no gain.
        hits = rate or 0.0
        figures[f"hits {name}"] = 100.0 * hits
        figures[f"misses {name}"] = 100.0 * (1.0 - hits)
    return figures


# -- systems on a machine, and their parts ---------------------------------------------


def replayed(
    excerpt: Excerpt,
    metric: str,
    near: int = 1,
    columns: Sequence[str] = (),
    **options: Any,
) -> float:
    """A rate of a run in %, with options of `moesim.replay`; `near` is its batch, or
    the largest that the trace has sequences for.
    """
    excerpt.need(*columns)
    rate = excerpt.replayed(batch=excerpt.batch_near(near), **options).metrics[metric]
    # Some are rates of GPU-assigned experts, of which there may be none.
    if rate is None:
        raise LacksError(
            "lacks experts on the GPU: this machine computes all of them on its CPU"
        )
    return 100.0 * float(rate)


LAST_QUARTER = 0.75


def best_late_step(excerpt: Excerpt, batch: int, **options: Any) -> float:
    """Highest hit rate over GPU-assigned experts of one step in the last quarter."""
    excerpt.need_sequences(batch)
    run = excerpt.replayed(batch=batch, **options)
    accesses = run.timeline.access_frame()
    is_late = accesses["step"] >= LAST_QUARTER * run.metrics["steps"]
    on_gpu = accesses[is_late & (accesses["lane"] != "cpu")]
    rates = (on_gpu["state"] == "hit").groupby(on_gpu["step"]).mean()
    if rates.empty:
        raise LacksError("lacks experts on the GPU in the last quarter of the steps")
    return 100.0 * float(rates.max())


@dataclass(slots=True)
class Grades:
    """How far each layer step's assignment is from the best lanes for the same state of
    the machine, with lanes as sums of costs (what most policies minimise).

    Attributes:
        modelled: chosen makespan over the least, of each layer step.
        chosen_s: modelled makespan, summed over layer steps.
        least_s: the least modelled makespan, likewise.
    """

    modelled: list[float] = field(default_factory=list)
    chosen_s: float = 0.0
    least_s: float = 0.0

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Grade one answer; layer steps that cost nothing are left out.

        An observer of `AssignmentPolicy.assign` (`moesim.engine.observers`).
        """
        del call, answer
        work, _, given_lanes, _ = arguments
        least_s = optimal(work).makespan_s
        if not least_s:
            return

        # The CPU computes what is deferred, too.
        lanes = np.maximum(np.asarray(given_lanes), CPU)
        chosen_s = modelled_s(work, lanes)
        self.modelled.append(chosen_s / least_s)
        self.chosen_s += chosen_s
        self.least_s += least_s


DALI = System(assignment="greedy", cache="workload-window:window=4,swaps=8")
"""Over half of the experts (its figure 12)."""
DECODED = 32
"""Decode steps behind DALI's table 4."""


def decode_replays(
    trace: Trace,
    profile: HardwareProfile,
    system: System,
    *,
    batch: int,
    steps: int,
    cache_ratio: float,
    most_steps: int | None = None,
    seed: int = 0,
) -> MixReplays:
    """Replays of the first decode steps of full batches, within `most_steps` forward
    passes; of policies that do not look ahead.
    """

    def walk(planner: Planner, timeline: Timeline) -> ReplayResult:
        full = (
            step
            for step in compose(trace, batch=batch, steps=most_steps)
            if step.phase == Phase.DECODE and step.sequences == batch
        )
        # Prefill steps are left out, so steps are numbered anew.
        passes = (
            replace(step, step=number)
            for number, step in zip(range(steps), full, strict=False)
        )
        return Replay(profile, planner, timeline).run(passes)

    config = RunConfig.of(None, cache_ratio=cache_ratio, seed=seed)
    setup = Setup(config, trace.shape, profile, system)
    return MixReplays(setup, walk, RecordedFuture(()))


def greedy(excerpt: Excerpt, batch: int) -> Mapping[str, float]:
    """Modelled time in % that greedy loses to the exact optimum for one and the same
    states of the machine: ``loss`` of all layer steps, ``largest`` of the worst one.
    """
    excerpt.need_sequences(batch)
    grades = Grades()
    replays = decode_replays(
        excerpt.trace,
        load_profile(MACHINE),
        DALI,
        batch=batch,
        steps=DECODED,
        cache_ratio=0.5,
        most_steps=excerpt.most_steps,
        seed=excerpt.seed,
    )
    replays.replay_s({}, grades)
    if not grades.least_s:
        raise LacksError(f"lacks decode steps of {batch} sequences")
    return {
        "loss": percent(grades.chosen_s - grades.least_s, grades.chosen_s),
        # Grades are ratios to the optimum: 1.25 means that a fifth is lost.
        "largest": 100.0 * (1.0 - 1.0 / max(grades.modelled)),
    }


def best_quality(excerpt: Excerpt, batches: Sequence[int]) -> float:
    """What greedy reaches of the optimum at the best of some batches, or at the largest
    there is.
    """
    fitting = [each for each in batches if each <= excerpt.sequences]
    losses = [
        figure(excerpt, {"greedy": {"batch": batch, "figure": "loss"}})
        for batch in fitting or [excerpt.sequences]
    ]
    return 100.0 - min(losses)


# -- how well predictors know a layer one layer early ----------------------------------


PREDICTORS = {"EdgeMoE": None, "HybriMoE": "pred1_raw", "DALI": "pred1_res"}
"""Published method -> column of its predictions: the next gate, the next gate on
corrected input; None for a table of transitions.
"""
TOP = (1, 2, 4)
"""Numbers of experts that tables 2 and 5 compare."""


def top(scores: np.ndarray, count: int) -> set[int]:
    """Ids of the `count` highest of float [E], ties to the lower id."""
    return set(np.argsort(-scores, kind="stable")[:count].tolist())


def _pairs(step: RoutedStep) -> Iterator[tuple[RoutedLayer, RoutedLayer]]:
    """Neighbouring layers that hold the same tokens."""
    for layer, following in pairwise(step.layers):
        # The last layer may hold only part of a prompt (ragged prefill).
        if len(layer.routing) == len(following.routing) and len(layer.routing):
            yield layer, following


def accuracy(
    excerpt: Excerpt, method: str, batch: int, *, near: bool = False
) -> Mapping[str, float]:
    """By k of `TOP`: share in % of the top k by predicted workload that are top k by
    true workload, mean over layer steps.

    EdgeMoE's table is counted on the first half of the decode steps, and every method
    is judged on the second half.

    Args:
        excerpt: of a trace.
        method: of `PREDICTORS`.
        batch: sequences.
        near: take the largest batch that the trace has sequences for, if it has fewer.

    Source: DALI's definition, reference algorithms, section 1.6.
    """
    experts = excerpt.shape.experts
    batch = excerpt.batch_near(batch) if near else batch
    column = PREDICTORS[method]
    columns = () if column is None else (column,)
    excerpt.need(*columns)
    # Counting first costs a second reading, and holds one step at a time.
    half = sum(1 for _ in excerpt.decode(batch=batch)) // 2
    transitions = Transitions(excerpt.shape.layers, experts)
    matches = dict.fromkeys(TOP, 0)
    judged = 0
    for number, step in enumerate(excerpt.decode(*columns, batch=batch)):
        for layer, following in _pairs(step):
            if number < half:
                views = (view_of(r.routing, np.uint16) for r in (layer, following))
                transitions.observe(layer.layer, *views)
                continue
            # EdgeMoE has no gate to ask: its table says which experts follow which.
            if column is None:
                predicted = transitions.workload(
                    layer.layer, layer.experts, layer.tokens
                )
            else:
                # Ranks must not depend on the float16 in which traces hold scores.
                scores = layer.predicted[column].astype(np.float32)
                predicted = predicted_workload(scores, following.routing.shape[1])
            true = np.zeros(experts)
            true[following.experts] = following.tokens
            for count in TOP:
                matches[count] += len(top(predicted, count) & top(true, count))
            judged += 1
    if not judged:
        raise LacksError(f"lacks decode steps of {batch} sequences")
    return {f"{count}": percent(matches[count], count * judged) for count in TOP}


def foreseen(excerpt: Excerpt, method: str = "HybriMoE") -> Mapping[str, float]:
    """Compare a token's predicted experts with its true ones in decode, in %.

    Returns:
        ``chosen``: true experts that are among as many predicted ones; ``best``: tokens
        whose best prediction is the best expert; ``active``: whose best prediction is
        any of its experts.
    """
    column = str(PREDICTORS[method])
    shared = best = active = tokens = chosen = 0
    for step in excerpt.decode(column):
        for layer, following in _pairs(step):
            scores = layer.predicted[column].astype(np.float32)
            true = following.routing.astype(np.int64)
            ranked = np.argsort(-scores, axis=1, kind="stable")[:, : true.shape[1]]
            # [T, K predicted, K true]: which predicted expert is which true one.
            equal = ranked[:, :, None] == true[:, None, :]
            shared += int(equal.any(axis=2).sum())
            best += int(equal[:, 0, 0].sum())
            active += int(equal[:, 0, :].any(axis=1).sum())
            tokens += len(true)
            chosen += true.size
    return {
        "chosen": percent(shared, chosen),
        "best": percent(best, tokens),
        "active": percent(active, tokens),
    }


# -- routing before any policy ---------------------------------------------------------


def similarity(excerpt: Excerpt) -> float:
    """Cosine of the share of tokens routed to each expert in prefill and in decode,
    mean over layers and sequences.
    """
    aggregator = SimilarityAggregator(excerpt.shape)
    for rows in excerpt.trace.sequences():
        aggregator.add(rows)
    mean = aggregator.figures()["similarity"]
    if mean is None:
        raise LacksError("lacks prefill or decode")
    return 100.0 * float(mean)


def touched(excerpt: Excerpt, tokens: int) -> float:
    """Share of a layer's experts that the first so many tokens of a sequence use, mean
    over layers and sequences.
    """
    shares = [
        len(np.unique(chosen[:tokens])) / excerpt.shape.experts
        for rows in excerpt.trace.sequences()
        for layer in range(excerpt.shape.layers)
        # Shorter sequences would count as if they stopped using experts.
        if len(chosen := rows.experts[rows.layer == layer]) >= tokens
    ]
    if not shares:
        raise LacksError(f"lacks sequences of {tokens} tokens")
    return 100.0 * float(np.mean(shares))


STATISTICS: dict[str, Callable[..., Any]] = {
    "hit_rate": hit_rate,
    "lru_and_belady": lru_and_belady,
    "better_victims": better_victims,
    "learned_cache": learned_cache,
    "replayed": replayed,
    "best_late_step": best_late_step,
    # The batch of other rows.
    "batch_near": Excerpt.batch_near,
    "greedy": greedy,
    "best_quality": best_quality,
    "accuracy": accuracy,
    "foreseen": foreseen,
    "similarity": similarity,
    "touched": touched,
}
"""By the names in ``routing_figures.yaml``."""


# -- experiments -----------------------------------------------------------------------


DEFAULT_STEPS = 300
"""Forward passes of each trace that count unless stated otherwise: the shortest shared
traces have no more.
"""

FOREIGN = {
    "olmoe_1b_7b_decode299": ("olmoe-1b-7b", "bf16"),
    "qwen3_30b_a3b_top6": ("qwen3-30b-a3b", "q4_k_m"),
    "gpt_oss_20b": ("gpt-oss-20b", "mxfp4"),
    "kimi_linear_48b_a3b_decode300": ("kimi-linear-48b-a3b", "bf16"),
}
"""Other people's traces by file name: the model and weight format that their files do
not tell in our terms.
"""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Published figures, and what computes the same on a trace.

    Attributes:
        name: on the command line.
        summary: one line.
        rows: which published records it stands beside, how their settings name a row,
            and which statistic it is.
        unit: of every figure, as in those records.
        needs: what a trace must have, in words.
        computes: what the functions do, in one or two sentences.
        caveats: where it departs from its source, and what is not known about the
            source.
    """

    name: str
    summary: str
    rows: list[dict[str, Any]]
    unit: str
    needs: str
    computes: str
    caveats: list[str]

    @property
    def keys(self) -> set[tuple[str, str, str]]:
        """Keys of the records that it stands beside."""
        return {tuple(row["of"]) for row in self.rows if "of" in row}

    def row(self, record: Record) -> str | None:
        """The row of a record; None for one that it does not stand beside."""
        for row in self.rows:
            if "of" in row and selected(row, record):
                return str(row["row"]).format_map(record.setting)
        return None

    def figures(self, excerpt: Excerpt) -> dict[str, float | str]:
        """Row -> figure, or what the trace lacks."""
        table: dict[str, float | str] = {}
        for row in self.rows:
            least, most = row.get("spare", (0, excerpt.sequences))
            settings: list[dict[str, Any]] = [{}] * (least <= excerpt.sequences <= most)
            if "of" in row:
                settings = [each.setting for each in records() if selected(row, each)]
            for setting in settings:
                values = setting | {"sequences": excerpt.sequences}
                label = str(row["row"]).format_map(values)
                # Several models have it.
                if label not in table:
                    try:
                        table[label] = figure(excerpt, filled(row["figure"], values))
                    except LacksError as lack:
                        table[label] = str(lack)
        return table

    @property
    def published(self) -> dict[str, dict[str, float | str]]:
        """The published figures: column (source and the model as it names it) -> row ->
        figure.
        """
        columns: dict[str, dict[str, float | str]] = {}
        for record in records():
            row = self.row(record)
            # Some records of a table are not about what the experiment computes.
            if row is not None:
                column = f"{record.source}: {record.setting.get('model', 'as stated')}"
                columns.setdefault(column, {})[row] = record.value
        return columns

    def lines(self, ours: Mapping[str, Mapping[str, float | str]]) -> list[str]:
        """A row per setting: published columns first, then ours, by their heads; what
        traces lack is said below.
        """
        columns = self.published | dict(ours)
        lacks: dict[str, int] = {}

        def cell(figure: float | str | None) -> str:
            if isinstance(figure, str) and figure.startswith("lacks"):
                return f"[{lacks.setdefault(figure, len(lacks) + 1)}]"
            if isinstance(figure, int | float):
                return f"{figure:.4g}"
            return figure or "-"

        # A dict keeps the order of first appearance, which a set would lose.
        rows = [
            (row, *(cell(column.get(row)) for column in columns.values()))
            for row in dict.fromkeys(row for of in columns.values() for row in of)
        ]
        return [
            f"{self.name}: {self.summary}",
            f"computes: {self.computes}",
            *aligned([(self.unit, *columns), *rows]),
            *(f"[{number}] {lack}" for lack, number in lacks.items()),
            *(f"note: {caveat}" for caveat in self.caveats),
        ]


EXPERIMENTS = {
    name: Experiment(name, **described)
    for name, described in yaml.safe_load(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    ).items()
}
"""Name -> experiment, in the order in which they are listed."""


@contextmanager
def opened(path: Path) -> Iterator[Trace]:
    """Open a trace; a foreign one that is known is imported first, and forgotten
    afterwards.
    """
    with ScratchFolder() as folder:
        try:
            trace = open_trace(path)
        except TraceError:
            # A foreign file does not tell the sizes of its model; its name does.
            known = FOREIGN.get(path.stem)
            if known is None or not path.is_file():
                raise
            imported = import_trace(path, folder / path.name, shape=model_shape(*known))
            trace = open_trace(imported.path)
        yield trace


def drawn(folder: Path) -> list[Path]:
    """Traces of two of DALI's models, without predictions."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not Qwen's: it has as many layers and experts as both others together.
    prompts = {"mixtral-8x7b": 64, "deepseek-v2-lite": 16}
    loads = [
        Workload(name, "q4_k_m", prompt, 32, 32, like=name)
        for name, prompt in prompts.items()
    ]
    return [load.calibration().draw(folder) for load in loads]


# -- DALI's table 4 --------------------------------------------------------------------


@dataclass(slots=True)
class _ModelledTime:
    """Sums the modelled makespans of assignments.

    An observer of `AssignmentPolicy.assign` (`moesim.engine.observers`).
    """

    seconds: float = 0.0

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Add one layer step."""
        del call, answer
        work, _view, lanes, _order = arguments
        self.seconds += modelled_s(work, np.asarray(lanes))


def modelled_decode_s(model: str, batch: int, plan: str, folder: Path) -> float:
    """Modelled makespans of the decode steps of one batch in which nothing is resident,
    on the machine that is anchored on the least of them.
    """
    total = _ModelledTime()
    replays = decode_replays(
        open_trace(Workload(model, "q4_k_m", 64, DECODED, 32, like=model).draw(folder)),
        load_profile("dali-rtx3090"),
        System(assignment=plan, cache="none"),
        batch=batch,
        steps=DECODED,
        cache_ratio=0.0,
    )
    replays.replay_s({}, total)
    return total.seconds


MODELS = {"Mixtral": "mixtral-8x7b", "DeepSeek": "deepseek-v2-lite"}
PLANS = {"opt": "exact", "greedy": "greedy"}


def table_4(folder: Path) -> Iterator[str]:
    """A line for each time of the table, ours beside it."""
    yield "dali-table-4: modelled seconds of 32 decode steps (DALI, table 4)"
    for record in records():
        if record.key == ("DALI", "Table 4", "moe_time"):
            setting = record.setting
            ours_s = modelled_decode_s(
                MODELS[setting["model"]],
                setting["batch_size"],
                PLANS[setting["plan"]],
                folder,
            )
            yield f"{record.label}: published {record.value}, ours {ours_s:.10g}"


def main() -> None:
    """Print experiments on traces."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_figures")
    parser.add_argument("names", nargs="*", metavar="NAME", help="or all")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--shared", type=Path, metavar="DIR", help="others' traces")
    parser.add_argument("--drawn", type=Path, metavar="FOLDER", help="draw into it")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if not asked.names:
        for each in EXPERIMENTS.values():
            print(f"{each.name}: {each.summary}; needs {each.needs}")
    names = list(EXPERIMENTS) if asked.names == ["all"] else asked.names
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        parser.error(
            f"no experiment {unknown[0]!r}; expected all, or some of"
            f" {', '.join(EXPERIMENTS)}"
        )
    paths = [resolve_trace("tiny"), *asked.trace]
    if asked.shared is not None:
        shared = [asked.shared / f"{name}.parquet" for name in FOREIGN]
        paths += [path for path in shared if path.is_file()]
    if asked.drawn is not None:
        paths += drawn(asked.drawn)
    for number, path in enumerate(paths, start=1):
        print(f"ours {number}: {path}")
    for name in names:
        ours = {}
        for number, path in enumerate(paths, start=1):
            with opened(path) as trace:
                excerpt = Excerpt(trace, asked.steps, asked.seed)
                figures = EXPERIMENTS[name].figures(excerpt)
                ours[f"ours {number}: {trace.shape.name}"] = figures
        print(*EXPERIMENTS[name].lines(ours), "", sep="\n")
    if asked.drawn is not None:
        print(*table_4(asked.drawn), sep="\n")


if __name__ == "__main__":
    main()
