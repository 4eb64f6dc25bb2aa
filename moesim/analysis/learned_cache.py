"""A learned cache before its judges: trained on one part of a trace, compared on
another.

Every policy plays the held-out part alone, from an empty cache, with every miss
admitted. A witness beside it notes whom it evicted, and whom it could have.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from itertools import islice
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moesim.policies.base import CachePolicy, PolicyError
from moesim.policies.cache.flashmoe import FlashMoE
from moesim.policies.cache_replay import replay
from moesim.policies.planner.residency import CacheSize
from moesim.policies.registry import resolve
from moesim.traces.errors import TraceError
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from moesim.policies.base import LayerWork, RunContext
    from moesim.policies.cache._learned_network import Network
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

LEARNED = "flashmoe"
BOUND = "belady:must_admit=true"
RIVALS = (*FlashMoE.compared_with, BOUND)
RATIOS = (0.125, 0.25, 0.5)
SOON_STEPS = 5
NEAR = 0.1
"""A cut moves to the beginning of a sequence that lies within this share of the
trace.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """Some forward passes of a trace, numbered anew from 0; may be walked again and
    again.
    """

    trace: Trace
    start: int
    stop: int
    batch: int = 1

    def __len__(self) -> int:
        """Forward passes."""
        return self.stop - self.start

    def __iter__(self) -> Iterator[RoutedStep]:
        """Compose the trace afresh."""
        for number, step in enumerate(
            islice(compose(self.trace, batch=self.batch), self.start, self.stop)
        ):
            yield replace(step, step=number)


def split(
    trace: Trace, *, held_out: float = 0.25, batch: int = 1, steps: int | None = None
) -> tuple[Part, Part]:
    """Cut a trace in two: the first part to learn from, the last one to be judged on.

    Args:
        trace: an opened trace.
        held_out: share of the last part, between 0 and 1.
        batch: sequences that run together.
        steps: keep the first so many forward passes.

    Returns:
        Two parts without a common step; the cut lies between two sequences if one
        begins nearby.

    Raises:
        TraceError: nothing would be left of one part.
    """
    groups = [step.batch for step in compose(trace, batch=batch, steps=steps)]
    wanted = round(len(groups) * (1.0 - held_out))
    begins = [
        place for place in range(1, len(groups)) if groups[place] != groups[place - 1]
    ]
    cut = min(begins, key=lambda place: abs(place - wanted), default=wanted)
    if abs(cut - wanted) > NEAR * len(groups):
        cut = wanted
    if not 0 < cut < len(groups):
        raise TraceError(
            f"{trace.path}: {len(groups)} forward passes cannot be cut in two; give a"
            " longer trace"
        )
    return Part(trace, 0, cut, batch), Part(trace, cut, len(groups), batch)


def whole(trace: Trace, *, batch: int = 1, steps: int | None = None) -> Part:
    """All forward passes of a trace, or the first `steps`."""
    return Part(
        trace, 0, sum(1 for _ in compose(trace, batch=batch, steps=steps)), batch
    )


@dataclass(slots=True)
class Judgement:
    """How one policy evicted. Evictions, unless said otherwise; every rate is None
    where there were none.

    Attributes:
        hit_rate: hits over accesses.
        evictions: how many.
        optimal: share whose victim nobody that could have left instead is used later
            than (ties are optimal): what Belady would have done with the same cache.
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


class Witness(CachePolicy):
    """Stands between a cache and its policy, and writes down every eviction.

    Attributes:
        stays: flat key -> (first step, last step) of each finished stay in the cache,
            in order.
        evictions, optimal, soon: all; those that were the best choice; those of experts
            used again within `SOON_STEPS`.
    """

    def __init__(
        self, policy: CachePolicy, future: RecordedFuture, experts: int
    ) -> None:
        if type(policy).admits is not CachePolicy.admits:
            raise PolicyError(
                "a policy that declines admissions cannot be compared with those that"
                " admit every miss"
            )
        self._policy = policy
        self._future = future
        self._experts = experts
        self._step = 0
        self._since: dict[int, int] = {}
        self.stays: dict[int, list[tuple[int, int]]] = {}
        self.evictions = self.optimal = self.soon = 0

    def start(self, context: RunContext) -> None:
        """Pass on, with the future for an oracle."""
        self._policy.start(
            replace(context, future=self._future) if self._policy.oracle else context
        )

    def accessed(self, work: LayerWork) -> None:
        """Note the step."""
        self._step = work.step
        self._policy.accessed(work)

    def admitted(self, keys: np.ndarray) -> None:
        """Note who came."""
        self._since.update(dict.fromkeys(keys.tolist(), self._step))
        self._policy.admitted(keys)

    def evicted(self, keys: np.ndarray) -> None:
        """Note who left."""
        for key in keys.tolist():
            self.stays.setdefault(key, []).append((self._since.pop(key), self._step))
        self._policy.evicted(keys)

    def precedence(self, incoming: np.ndarray) -> np.ndarray:
        """Pass on."""
        return self._policy.precedence(incoming)

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Let the policy choose, then compare with hindsight."""
        chosen = self._policy.victims(incoming, candidates)
        assert chosen.min() >= 0, "every policy of the comparison admits every miss"
        layer = int(candidates[0]) // self._experts
        uses = self._future.next_uses(
            self._step, layer, candidates - layer * self._experts
        )
        own = uses[np.searchsorted(candidates, chosen)]
        self.evictions += len(chosen)
        self.optimal += int((own >= np.sort(uses)[-len(chosen)]).sum())
        self.soon += int(
            ((own < self._future.never) & (own - self._step <= SOON_STEPS)).sum()
        )
        return chosen


def mean_delay(
    stays: Mapping[int, Sequence[tuple[int, int]]],
    belady: Mapping[int, Sequence[tuple[int, int]]],
) -> float | None:
    """How long, on average, experts overstay: see `Judgement.delay_steps`.

    Args:
        stays: key -> (first, last step) of each finished stay; belady: the same under
            Belady.
    """
    late = []
    for key, own in stays.items():
        ends = [last for _, last in belady.get(key, ())]
        for first, last in own:
            place = bisect_left(ends, first)
            if place < len(ends) and ends[place] < last:
                late.append(last - ends[place])
    return fmean(late) if late else None


def judge(
    policies: Iterable[str],
    steps: Iterable[RoutedStep],
    shape: ModelShape,
    slots: int,
    artefacts: Mapping[str, Any],
) -> list[Judgement]:
    """Let each policy evict alone on the same steps.

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
    size = CacheSize.of(shape.expert_bytes, shape.experts, slots_per_layer=slots)

    def witnessed(spec: str) -> tuple[Witness, float | None]:
        witness = Witness(
            cast("CachePolicy", resolve(spec, "cache")), future, shape.experts
        )
        return (
            witness,
            replay(witness, spec, shape, size, steps, extras=artefacts).hit_rate,
        )

    bound, _ = witnessed(BOUND)
    found = []
    for spec in policies:
        seen, hit_rate = witnessed(spec)
        optimal, soon = (
            n / seen.evictions if seen.evictions else None
            for n in (seen.optimal, seen.soon)
        )
        found.append(
            Judgement(
                spec,
                hit_rate,
                seen.evictions,
                optimal,
                soon,
                mean_delay(seen.stays, bound.stays),
            )
        )
    return found


def cache_sizes(shape: ModelShape, *ratios: float) -> list[int]:
    """Slots per layer for `ratios` and the usual `RATIOS`, where a choice exists.

    With no more slots than one token has experts every policy of this comparison does
    the same.
    """
    wanted = {round(ratio * shape.experts) for ratio in (*RATIOS, *ratios)}
    return sorted(count for count in wanted if shape.top_k < count < shape.experts)


def report(
    held_out: Part, trained: Network, facts: Mapping[str, Any], slots: Sequence[int]
) -> dict[str, Any]:
    """Judge a trained network beside its rivals at several cache sizes.

    Args:
        held_out: what it has not seen.
        trained: the network.
        facts: of its training.
        slots: cache sizes, per layer.

    Returns:
        One JSON object; `report_text` prints it.
    """
    shape = held_out.trace.shape
    artefacts = {LEARNED: trained._asdict()}
    sizes = []
    for count in slots:
        rows = judge((LEARNED, *RIVALS), held_out, shape, count, artefacts)
        sizes.append(
            {
                "slots": count,
                "ratio": count / shape.experts,
                "policies": [asdict(row) for row in rows],
            }
        )
    return {
        "trace": held_out.trace.path.name,
        "trace_digest": held_out.trace.digest(),
        "model": shape.name,
        "held_out_steps": [held_out.start, held_out.stop],
        "training": dict(facts),
        "evaluation_s": evaluation_s(trained),
        "sizes": sizes,
    }


def evaluation_s(trained: Network, times: int = 200) -> float:
    """Median seconds of one evaluation of one layer on this machine, with numpy."""
    features = np.linspace(0.0, 1.0, 2 * trained.experts, dtype=np.float32)
    taken = []
    for n in range(times):
        begin_s = time.perf_counter()
        trained.evaluate(n % trained.layers, features)
        taken.append(time.perf_counter() - begin_s)
    return median(taken)


def report_text(found: Mapping[str, Any]) -> str:
    """The report as Markdown: one table per cache size, each with a plain verdict."""
    facts = found["training"]
    start, stop = found["held_out_steps"]
    reach = (
        f"{facts['slots']} slots"
        if facts["horizon"] is None
        else f"K = {facts['horizon']}"
    )
    lines = [f"# Learned cache: {found['model']}", ""]
    lines.append(
        f"Held-out part: forward passes {start:,} to {stop - 1:,} of"
        f" `{found['trace']}`; every cache is empty at first and admits every miss,"
        " step-atomic."
    )
    lines.append(
        f"Network: {facts['labels']} labels ({reach}), h = {facts['hidden']}, seed"
        f" {facts['seed']}; {facts['training_steps']:,} training and"
        f" {facts['validation_steps']:,} validation steps, {facts['epochs_run']} epochs"
        f" in {facts['seconds_s']:.0f} s, validation loss"
        f" {facts['validation_loss_first']:.4f} to {facts['validation_loss_best']:.4f};"
        f" {facts['bytes_per_layer'] / 1024:.1f} KiB per layer,"
        f" {found['evaluation_s'] * 1e6:.0f} µs per evaluation here."
    )
    head = [
        "policy",
        "hit rate",
        "evictions",
        "optimal",
        "used again within 5",
        "delay, steps",
    ]
    for size in found["sizes"]:
        rows = size["policies"]
        lines += [
            "",
            f"## {size['slots']} slots per layer ({size['ratio']:.1%} of the experts)",
            "",
        ]
        lines += [f"| {' | '.join(head)} |", "|---" + "|--:" * (len(head) - 1) + "|"]
        for row in sorted(rows, key=lambda row: -(row["hit_rate"] or 0.0)):
            name = "belady, forced" if row["policy"] == BOUND else row["policy"]
            delay = "" if row["delay_steps"] is None else f"{row['delay_steps']:.1f}"
            shares = [_percent(row[key]) for key in ("optimal", "refetch_5")]
            lines.append(
                f"| {name} | {_percent(row['hit_rate'])} | {row['evictions']:,} |"
                f" {' | '.join(shares)} | {delay} |"
            )
        lines += ["", verdict(rows)]
    return "\n".join(lines) + "\n"


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say whether the learned policy beats each causal rival, in points of the hit
    rate.
    """
    rates = {row["policy"]: row["hit_rate"] or 0.0 for row in rows}
    parts = [
        f"{100 * (rates[LEARNED] - rates[rival]):+.1f} to {rival}"
        for rival in RIVALS
        if rival != BOUND
    ]
    lost = [
        rival for rival in RIVALS if rival != BOUND and rates[LEARNED] <= rates[rival]
    ]
    outcome = f"does not beat {', '.join(lost)}" if lost else "beats every causal rival"
    return f"The learned policy {outcome}; points of hit rate: {', '.join(parts)}."


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
