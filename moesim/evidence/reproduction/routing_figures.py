"""Figures that need only routing: a function for each experiment of
``data/papers.yaml``, under its name, fills a `Table` for any trace.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moesim.base.errors import TraceError
from moesim.engine.observers import observed_policy
from moesim.evidence.reproduction.runs import decode_replays
from moesim.hwprofiles.profile import load_profile
from moesim.policies import cache_replay
from moesim.policies.arrays import view_of
from moesim.policies.prefetch.statistical import Transitions
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.policies.systems import System
from moesim.questions import learned_cache as learned
from moesim.questions.gap_mixes import Grades
from moesim.runs.config import MemoryOptions
from moesim.runs.replay import replay
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import layer_steps
from moesim.traces.format.schema import Phase
from moesim.traces.predictions import predicted_workload
from moesim.traces.stats.statistics import SimilarityAggregator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moesim.policies.base import CachePolicy
    from moesim.policies.cache_replay import CacheCounts
    from moesim.runs.result import Run
    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

MACHINE = "rtx3090-epyc7532"
"""Datasheet profile of the experiments that need one: DALI's machine."""


class LacksError(TraceError):
    """What a trace lacks for a figure, in one line that begins with "lacks"."""


class Table(dict[str, "float | str"]):
    """Row -> figure, or what the trace lacks."""

    def put(
        self,
        rows: Sequence[str],
        compute: Callable[..., Sequence[float | str]],
        *arguments: Any,
    ) -> None:
        """Fill rows with what a function returns."""
        try:
            figures = compute(*arguments)
        except LacksError as lack:
            figures = [str(lack)] * len(rows)
        self.update(zip(rows, figures, strict=True))


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

    def need(self, *columns: str) -> None:
        """Refuse a trace without these optional columns."""
        missing = [name for name in columns if name not in self.trace.columns]
        if missing:
            raise LacksError(f"lacks column {', '.join(missing)}")

    def decode(self, *columns: str, batch: int = 1) -> Iterator[RoutedStep]:
        """Decode steps in which all `batch` sequences take part."""
        self.need(*columns)
        passes = compose(
            self.trace, batch=batch, steps=self.most_steps, columns=columns
        )
        for step in passes:
            # Sequences end one after another; a step of fewer is another batch size.
            if step.phase == Phase.DECODE and step.sequences == batch:
                yield step

    def batches(self, *sizes: int) -> dict[int, int]:
        """Published batch sizes that the trace has sequences for, each with itself; 0
        for the others. Where none fits, the whole trace is one batch besides, if that
        is two sequences at least.
        """
        # A trace is recorded per sequence; batches are composed when it is replayed.
        available = sum(1 for _ in self.trace.sequences())
        fitting = {size: size if size <= available else 0 for size in sizes}
        if not any(fitting.values()) and available > 1:
            fitting[available] = available
        return fitting

    def batch_near(self, size: int) -> int:
        """That batch size, or the largest that the trace has sequences for."""
        return max(1, *self.batches(size).values())

    def replayed(self, policy: str, memory: MemoryOptions, **options: Any) -> Run:
        """A run on `MACHINE`."""
        limits: dict[str, Any] = {"steps": self.most_steps, "seed": self.seed}
        return replay(
            self.trace, policy, hw=MACHINE, memory=memory, **limits, **options
        )


def _need_sequences(size: int, batch: int) -> None:
    if not batch:
        raise LacksError(f"lacks sequences: batches of {size} want as many")


def percent(part: float, total: float) -> float:
    """Part of total in %.

    Raises:
        LacksError: total is 0: the trace holds nothing of what is counted.
    """
    if not total:
        raise LacksError("lacks what is counted in these forward passes; see --steps")
    return 100.0 * part / total


# -- caches driven alone: every miss is fetched and offered, and no time passes --------


def cache_counts(
    excerpt: Excerpt, spec: str, size: CacheSize, policy: CachePolicy | None = None
) -> CacheCounts:
    """Hits and misses of a cache policy; of `policy`, if given, in place of `spec`."""
    named = cast("CachePolicy", resolve(spec, "cache"))
    excerpt.need(*named.needs)
    steps = excerpt.most_steps
    # A policy that is handed in may watch oracles, so it gets the future too.
    sees_future = named.oracle or policy is not None
    return cache_replay.replay(
        policy or named,
        spec,
        excerpt.shape,
        size,
        layer_steps(
            excerpt.trace, steps=steps, columns=named.needs, tokens=named.reads_tokens
        ),
        future=RecordedFuture.of(excerpt.trace, steps=steps) if sees_future else None,
        seed=excerpt.seed,
    )


def _hit_rate(excerpt: Excerpt, spec: str, size: CacheSize) -> tuple[float]:
    counts = cache_counts(excerpt, spec, size)
    return (percent(counts.hits, counts.accesses),)


CACHES = {"LRU": "lru", "MRS": "mrs", "LFU": "lfu", "LFRU": "lfru", "Belady": "belady"}
"""Label -> policy. HybriMoE published LRU and MRS only."""


def hybrimoe_hit_rate(excerpt: Excerpt, table: Table) -> None:
    """LRU, MRS and, for orientation, LFU, LFRU and Belady at 25, 50 and 75 % of the
    experts; HybriMoE as composed on a machine, since prefetches need time to land.
    """
    for cached in (25, 50, 75):
        size = CacheSize.for_model(excerpt.shape, ratio=cached / 100)
        for label, spec in CACHES.items():
            table.put([f"{label}, {cached} % cached"], _hit_rate, excerpt, spec, size)

    def whole() -> tuple[float]:
        excerpt.need("scores", "pred1_raw", "pred2_raw", "pred3_raw")
        # The size is not published; a quarter is that of the other figures.
        run = excerpt.replayed("hybrimoe", MemoryOptions(cache_ratio=0.25))
        return (100.0 * (run.metrics["hit_rate_active"] or 0.0),)

    table.put(["HybriMoE whole, 25 % cached"], whole)


LRU_HIT_RATE = 73.0
"""FlashMoE's LRU hit rate in %; the cache size behind it is not stated. Source:
published.yaml, FlashMoE text.
"""
BELADY = "belady:must_admit=true"
"""The textbook's Belady, which takes in every miss, as LRU does."""
CALLS = ("start", *learned.CALLS)
"""What a history must be told of."""


def _size_for(excerpt: Excerpt, hit_rate: float) -> CacheSize:
    """Slots per layer at which LRU's hit rate in % comes nearest to `hit_rate`."""

    def sized(slots: int) -> CacheSize:
        return CacheSize.for_model(excerpt.shape, slots_per_layer=slots)

    rates: dict[int, float] = {}

    def rate(slots: int) -> float:
        if slots not in rates:
            (rates[slots],) = _hit_rate(excerpt, "lru", sized(slots))
        return rates[slots]

    # LRU's hit rate never falls as slots grow. The first size at or above the rate may
    # be farther from it than the one before.
    first = 1 + bisect_left(range(1, excerpt.shape.experts), hit_rate, key=rate)
    nearest = min((max(1, first - 1), first), key=lambda n: abs(rate(n) - hit_rate))
    return sized(nearest)


def flashmoe_hit_rate(excerpt: Excerpt, table: Table) -> None:
    """LRU, Belady and the ratio of their misses, at the size where LRU comes nearest to
    the published rate.
    """

    def rates() -> Sequence[float | str]:
        # Both at one size: the published rate of Belady belongs to that of LRU.
        size = _size_for(excerpt, LRU_HIT_RATE)
        lru = cache_counts(excerpt, "lru", size)
        belady = cache_counts(excerpt, BELADY, size)
        misses = [counts.accesses - counts.hits for counts in (lru, belady)]
        experts = excerpt.shape.layers * excerpt.shape.experts
        return (
            percent(lru.hits, lru.accesses),
            percent(belady.hits, belady.accesses),
            misses[0] / misses[1] if misses[1] else "lacks misses",
            percent(int(size.slots.sum()), experts),
        )

    rows = ["LRU hit rate, %", "Belady hit rate, %", "misses of LRU / Belady"]
    table.put([*rows, "share of experts cached, %"], rates)


class RivalRecorder(learned.EvictionRecorder):
    """Records evictions, and whether another policy, which is told the same, would have
    named a better first victim in this cache; later ones depend on the first.

    Attributes:
        better: victims that are used later than the rival's.
        decided: those that are used earlier or later.
    """

    def __init__(
        self,
        policy: CachePolicy,
        rival: CachePolicy,
        future: RecordedFuture,
        experts: int,
    ) -> None:
        super().__init__(policy, future, experts)
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


def flashmoe_refetch(excerpt: Excerpt, table: Table) -> None:
    """Share of evictions regretted within five steps, LRU against LFU, and how late LRU
    lets go.
    """

    def figures() -> Sequence[float | str]:
        size = _size_for(excerpt, LRU_HIT_RATE)
        experts = excerpt.shape.experts
        future = RecordedFuture.of(excerpt.trace, steps=excerpt.most_steps)
        lru, belady = (
            cast("CachePolicy", resolve(spec, "cache")) for spec in ("lru", BELADY)
        )
        rival = cast("CachePolicy", resolve("lfu", "cache"))
        of_lru = RivalRecorder(lru, rival, future, experts)
        of_belady = learned.EvictionRecorder(belady, future, experts)
        cache_counts(excerpt, "lru", size, observed_policy(lru, of_lru, CALLS))
        cache_counts(excerpt, BELADY, size, observed_policy(belady, of_belady, CALLS))
        if not of_lru.evictions or not of_belady.evictions:
            raise LacksError("lacks evictions")
        delay = learned.mean_delay(of_lru.stays, of_belady.stays)
        decided = of_lru.decided
        return (
            percent(of_lru.soon, of_lru.evictions),
            percent(of_belady.soon, of_belady.evictions),
            percent(of_lru.better, decided) if decided else "lacks evictions",
            "lacks evictions" if delay is None else delay,
        )

    rows = [f"refetched within 5 steps, {name}, %" for name in ("LRU", "Belady")]
    rows += ["LRU's victim better than LFU's, %", "LRU evicts later than Belady, steps"]
    table.put(rows, figures)


RIVALS = {"lru": "LRU", "lfu": "LFU", "arc": "ARC", "lecar": "LeCaR"}
"""Policy -> label."""
COPY_RIVALS = ("lru", "lfu")
"""Copies saved are published against these only."""
LEARNED_RATIO = 0.25


def flashmoe_gain(excerpt: Excerpt, table: Table) -> None:
    """Hit rate of the learned cache above its rivals', and copies below theirs, in % of
    the rival's.
    """
    rows = [f"hit rate over {label}, relative %" for label in RIVALS.values()]
    rows += [f"copies saved against {RIVALS[rival]}, %" for rival in COPY_RIVALS]
    table.put(rows, _learned_gains, excerpt)


def _learned_gains(excerpt: Excerpt) -> Sequence[float | str]:
    try:
        from moesim.runtime.train.cache import train  # noqa: PLC0415 - needs torch, which may be missing
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
        # Judged on later forward passes only, which the network has not seen.
        training, held_out = learned.split(excerpt.trace, steps=excerpt.most_steps)
        network = train(training, shape, seed=excerpt.seed).network
    except TraceError as error:
        raise LacksError(f"lacks forward passes to train on: {error}") from None
    judged = learned.evaluate(
        (learned.LEARNED, *RIVALS),
        held_out,
        shape,
        slots,
        {learned.LEARNED: network._asdict()},
    )
    # No accesses at all count as no hits, and give no gain below.
    rates = {row.policy: row.hit_rate or 0.0 for row in judged}
    ours = rates[learned.LEARNED]
    gains = [_change(rates[rival], ours) for rival in RIVALS]
    # Every miss is one copy.
    saved = [_change(1.0 - rates[rival], 1.0 - ours) for rival in COPY_RIVALS]
    return gains + [each if isinstance(each, str) else -each for each in saved]


def _change(before: float, after: float) -> float | str:
    """Relative change in %; none can be told from nothing at all."""
    if not before:
        return "lacks something to compare with"
    return 100.0 * (after / before - 1.0)


# -- systems on a machine, and their parts ---------------------------------------------


WINDOWS = ((2, 8), (2, 16), (4, 8), (8, 8))
"""(window in steps, swaps per window) of DALI's appendix A.6."""
LAST_QUARTER = 0.75


def dali_window(excerpt: Excerpt, table: Table) -> None:
    """DALI's greedy assignment over its window cache at 50 %; hits of GPU-assigned
    experts, by window and swaps.
    """
    batch = excerpt.batch_near(8)

    def run_of(window: int, swaps: int, batch: int) -> Run:
        cache = f"workload-window:window={window},swaps={swaps}"
        half = MemoryOptions(cache_ratio=0.5)
        return excerpt.replayed("greedy", half, cache=cache, batch=batch)

    def rates() -> Sequence[float]:
        measured = [run_of(*each, batch).metrics["hit_rate_gpu"] for each in WINDOWS]
        # The rate is one of GPU-assigned experts, of which there may be none.
        if None in measured:
            raise LacksError(
                "lacks experts on the GPU: this machine computes all of them on its CPU"
            )
        by = {
            window: 100.0 * rate for window, rate in zip(WINDOWS, measured, strict=True)
        }
        return [*by.values(), by[2, 16] - by[2, 8], by[4, 8] - by[8, 8]]

    def best_late_step() -> tuple[float]:
        """Highest hit rate over GPU-assigned experts of one step in the last quarter,
        with which DALI's figure 18d ends; it has batch 4.
        """
        _need_sequences(4, excerpt.batches(4)[4])
        run = run_of(8, 1, 4)
        accesses = run.timeline.access_frame()
        is_late = accesses["step"] >= LAST_QUARTER * run.metrics["steps"]
        on_gpu = accesses[is_late & (accesses["lane"] != "cpu")]
        rates = (on_gpu["state"] == "hit").groupby(on_gpu["step"]).mean()
        if rates.empty:
            raise LacksError(
                "lacks experts on the GPU in the last quarter of the steps"
            )
        return (100.0 * float(rates.max()),)

    rows = [f"hit rate (w, u) = {window}, %" for window in WINDOWS]
    gains = ("(2, 16) over (2, 8)", "(4, 8) over (8, 8)")
    rows += [f"gain {pair}, points" for pair in gains]
    table.put(rows, rates)
    table.put(["best late step (w, u) = (8, 1), batch 4, %"], best_late_step)
    table["batch"] = float(batch)


BARE = "on demand with LRU"
_ABLATION = {
    BARE: {"cache": "lru"},
    "+CE": {"cache": "score-window"},
    "+ER": {"routing": "expert-cache-router:alpha=0.3"},
    "+Pre": {"prefetch": "partial-hidden"},
    "+BA": {"policy": "smoe-balancer"},
}
"""Step of the published ablation, in its order -> what it adds to the one before."""


def smoe_hit_rate(excerpt: Excerpt, table: Table) -> None:
    """Selected experts that are resident, for each step of the ablation and from step
    to step.
    """

    def figures() -> Sequence[float | str]:
        excerpt.need("scores", "pred1_raw")
        # Prefetches and the balancer depend on time, so a machine takes part; as many
        # staged experts as the composed system has.
        memory = MemoryOptions(cache_ratio=0.25, staging=4)
        options: dict[str, Any] = {"policy": "on-demand", "prefetch": "none"}
        rates = []
        for added in _ABLATION.values():
            options |= added
            run = excerpt.replayed(memory=memory, **options)
            rates.append(100.0 * (run.metrics["hit_rate_active"] or 0.0))
        changes = [_change(*pair) for pair in pairwise(rates)]
        return [rates[-1], rates[0], *changes, _change(rates[0], rates[-1])]

    rows = [f"{name}, resident of selected" for name in ("SMoE whole", BARE)]
    rows += [f"{step}, change" for step in _ABLATION if step != BARE]
    table.put([*rows, "whole over on demand, change"], figures)


DALI = System(assignment="greedy", cache="workload-window:window=4,swaps=8")
"""Over half of the experts (its figure 12)."""
DECODED = 32
"""Decode steps behind DALI's table 4."""


def dali_greedy_loss(excerpt: Excerpt, table: Table) -> None:
    """Modelled time that greedy loses to the exact optimum, for the same states of the
    machine.
    """
    qualities = []

    def losses(size: int, batch: int) -> Sequence[float]:
        _need_sequences(size, batch)
        # Both costs are for one and the same state of the machine.
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
        lost = percent(grades.chosen_s - grades.least_s, grades.chosen_s)
        qualities.append(100.0 - lost)
        # Grades are ratios to the optimum: 1.25 means that a fifth is lost.
        return lost, 100.0 * (1.0 - 1.0 / max(grades.modelled))

    # A trace of one sequence is judged at batch 1, in a row of its own.
    batches = excerpt.batches(16, 32)
    for size, batch in (batches if any(batches.values()) else batches | {1: 1}).items():
        rows = (
            f"loss at batch {size}, %",
            f"largest loss of one layer step at batch {size}, %",
        )
        table.put(rows, losses, size, batch)
    if qualities:
        table["best quality against the optimum, %"] = max(qualities)


# -- how well predictors know a layer one layer early ----------------------------------


EDGEMOE = "EdgeMoE"
NEXT_GATE = "HybriMoE"
RESIDUAL = "DALI"
"""Names of the published methods: a table of transitions, the next gate, the next gate
on corrected input.
"""
_COLUMN = {NEXT_GATE: "pred1_raw", RESIDUAL: "pred1_res"}
PREFETCHED = 4
"""Experts prefetched per layer. Source: DALI, figure 12, for DeepSeek and Qwen."""
TOP = (1, 2)
"""Numbers of experts that table 2 compares."""


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
    excerpt: Excerpt, method: str, counts: tuple[int, ...], batch: int
) -> list[float]:
    """Share in % of the top k by predicted workload that are top k by true workload,
    mean over layer steps, for each k.

    EdgeMoE's table is counted on the first half of the decode steps, and every method
    is judged on the second half.

    Source: DALI's definition, reference algorithms, section 1.6.
    """
    experts = excerpt.shape.experts
    column = _COLUMN.get(method)
    columns = () if column is None else (column,)
    excerpt.need(*columns)
    # Counting first costs a second reading, and holds one step at a time.
    half = sum(1 for _ in excerpt.decode(batch=batch)) // 2
    transitions = Transitions(excerpt.shape.layers, experts)
    matches = dict.fromkeys(counts, 0)
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
            for count in counts:
                matches[count] += len(top(predicted, count) & top(true, count))
            judged += 1
    if not judged:
        raise LacksError(f"lacks decode steps of {batch} sequences")
    return [percent(matches[count], count * judged) for count in counts]


def dali_prefetch_workload(excerpt: Excerpt, table: Table) -> None:
    """Top-1 and top-2 accuracy of the table and of the next gate, by batch."""

    def accuracies(method: str, size: int, batch: int) -> list[float]:
        _need_sequences(size, batch)
        return accuracy(excerpt, method, TOP, batch)

    for method in (EDGEMOE, NEXT_GATE):
        for size, batch in excerpt.batches(8, 16, 32, 64).items():
            rows = [f"{method}, top {count}, batch {size}" for count in TOP]
            table.put(rows, accuracies, method, size, batch)


def dali_prefetch_residual(excerpt: Excerpt, table: Table) -> None:
    """Top-4 accuracy of the next gate on raw and on corrected input, and their
    per-token overlap with the truth.
    """
    # The batch behind the table is not published.
    batch = excerpt.batch_near(8)
    for method, column in _COLUMN.items():
        row = f"{method}, by workload"
        table.put([row], accuracy, excerpt, method, (PREFETCHED,), batch)
        if column in excerpt.trace.columns:
            table[f"{method}, per token"] = next_layer(excerpt, column)[0]


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


def daop_next_layer(excerpt: Excerpt, table: Table) -> None:
    """Share of a token's experts that the next gate names one layer early, in
    decode.
    """
    column = _COLUMN[NEXT_GATE]
    table.put(["decode"], lambda: next_layer(excerpt, column)[:1])


def smoe_prefetch(excerpt: Excerpt, table: Table) -> None:
    """Whether the best predicted expert is the best one, or at least active."""
    column = _COLUMN[NEXT_GATE]
    rows = ("best expert foreseen", "foreseen expert active")
    table.put(rows, lambda: next_layer(excerpt, column)[1:])


# -- routing before any policy ---------------------------------------------------------


def daop_similarity(excerpt: Excerpt, table: Table) -> None:
    """Cosine of the share of tokens routed to each expert in prefill and in decode,
    mean over layers and sequences.
    """
    aggregator = SimilarityAggregator(excerpt.shape)
    for rows in excerpt.trace.sequences():
        aggregator.add(rows)
    similarity = aggregator.figures()["similarity"]
    table["prefill against decode"] = (
        "lacks prefill or decode" if similarity is None else 100 * similarity
    )


def flashmoe_prefill(excerpt: Excerpt, table: Table) -> None:
    """Share of a layer's experts that the first so many tokens of a sequence use, mean
    over layers and sequences.
    """
    shares: dict[int, list[float]] = {count: [] for count in (32, 64, 128, 256)}
    for rows in excerpt.trace.sequences():
        for layer in range(excerpt.shape.layers):
            chosen = rows.experts[rows.layer == layer]
            for count, of_layers in shares.items():
                # Shorter sequences would count as if they stopped using experts.
                if len(chosen) >= count:
                    distinct = len(np.unique(chosen[:count]))
                    of_layers.append(distinct / excerpt.shape.experts)
    for count, of_layers in shares.items():
        table[f"{count} tokens"] = (
            100.0 * float(np.mean(of_layers))
            if of_layers
            else f"lacks sequences of {count} tokens"
        )
