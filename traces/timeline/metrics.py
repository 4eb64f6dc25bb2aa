"""Metrics of a run: every figure a report may print, computed from the three tables of
a timeline.

`aggregators`, `stalls` and `copies` go over the tables once; here their numbers become
metrics, and `METRICS` is the one place that defines them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.timeline.aggregators import (
    AccessAggregator,
    LaneAggregator,
    StepAggregator,
)
from moesim.traces.timeline.copies import CopyAggregator
from moesim.traces.timeline.spans import DELAYED, HIT, MISS
from moesim.traces.timeline.stalls import StallAggregator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.traces.timeline.spans import Chunk, Timeline

# Every key of `summarise`: its unit or what is divided by what.
METRICS: dict[str, str] = {
    "steps": "forward passes",
    "layer_steps": "MoE layers of forward passes in which anything was computed",
    "batches": "groups of sequences that ran together",
    "accesses": "distinct active experts, summed over layer steps",
    "hits": "accesses that found the expert resident when the layer step was planned",
    "delayed_hits": "accesses that found it being copied",
    "misses": "accesses that found it absent",
    "hit_rate_active": "hits / accesses, CPU-computed experts included",
    "hit_rate_gpu": "the same over GPU-assigned experts only; null if there are none",
    "hit_rate_token": "tokens of hits / tokens of accesses",
    "ttft_s": (
        "seconds from the start of a batch to the end of its prefill, micro-batches"
        " included, mean over batches; null without prefill"
    ),
    "tpot_s": (
        "seconds between the ends of consecutive steps of a batch, mean over decode"
        " steps, or over the tokens that steps keep of drafts; null without decode"
    ),
    "tpot_p50_s": "median of the same",
    "tpot_p95_s": "95th percentile of the same, linearly interpolated",
    "prefill_tokens": "prompt tokens computed",
    "decode_tokens": "tokens generated, those of drafts as far as they were kept",
    "prefill_tokens_per_s": (
        "prompt tokens of all sequences / prefill seconds; null without prefill"
    ),
    "prefill_tokens_per_s_seq": (
        "own prompt tokens / prefill seconds, mean over sequences"
    ),
    "decode_tokens_per_s": (
        "generated tokens of all sequences / decode seconds; null without decode"
    ),
    "decode_tokens_per_s_seq": (
        "own generated tokens / own decode seconds, mean over sequences (DALI's"
        " definition)"
    ),
    "bytes": "link -> bytes moved",
    "bandwidth": "link -> bytes per second while it was busy; null if it never was",
    "busy_s": "lane -> seconds in which it worked",
    "stall_s": (
        "compute lane -> seconds idle after planning while the expert it computed next"
        " was being copied"
    ),
    "planning_s": "seconds spent in decisions",
    "planning_share": "planning_s / makespan_s",
    "imbalance": "|CPU busy - busiest GPU| / the longer of both, mean over layer steps",
    "prefetched": "prefetches copied to a GPU",
    "prefetch_accuracy": (
        "prefetched experts used before they left / prefetched; null without prefetches"
    ),
    "prefetch_coverage": (
        "prefetched experts used / (those + misses); null without prefetches"
    ),
    "prefetch_timeliness": (
        "prefetched experts fully there when used / used; null if none was used"
    ),
    "refetch_rate_5": (
        "copies to a GPU of experts that had been on it within the five steps before /"
        " copies to GPUs"
    ),
    "makespan_s": "seconds from the first start to the last end",
    "energy_j": (
        "joules: idle watts over the makespan plus extra watts while busy; null without"
        " power figures"
    ),
    "tokens_per_kj": (
        "generated tokens per kilojoule; null without power figures or without decode"
    ),
}

# Key of the power table for watts drawn whatever happens.
PLATFORM = "platform"


class Summary:
    """Computes all `METRICS` of a run from chunks of its tables as they come.

    Memory does not depend on the length of the run, except for eight bytes per decode
    step.

    Attributes:
        seen: last step whose compute spans have come.
        reached: last step whose accesses have come.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self._names = tuple(lanes)
        self._lanes = LaneAggregator(lanes)
        self._stalls = StallAggregator(lanes)
        self._copies = CopyAggregator(lanes)
        self._accesses = AccessAggregator(lanes)
        self._steps = StepAggregator()
        self.seen = -1
        self.reached = -1

    def add(
        self,
        table: str,
        chunk: Chunk,
    ) -> None:
        """Take a chunk of `timeline`, `accesses` or `steps`: each in order, and none of
        the first two far ahead.
        """
        if table == "timeline":
            self._lanes.add(chunk)
            self._stalls.add(chunk)
            self.seen = max(self.seen, self._copies.add_spans(chunk))
        elif table == "accesses":
            self._accesses.add(chunk)
            self._copies.add_accesses(chunk)
            self.reached = int(chunk["step"][-1])
            # A prefetch ends at most one step after its issue.
            self._copies.settle(min(self.seen, self.reached) - 1)
        else:
            self._steps.add(chunk)

    def figures(
        self, power: Mapping[str, tuple[float, float]] | None = None
    ) -> dict[str, Any]:
        """Return every one of `METRICS`, once all chunks have come.

        Args:
            power: lane -> (idle watts, busy watts), and optionally ``platform`` ->
                (idle watts, ignored).
        """
        self._stalls.add(None)
        self._copies.settle()

        # Steps may begin before the first span, and end behind the last.
        start_s = min(self._lanes.start_s, self._steps.start_s)
        end_s = max(self._lanes.end_s, self._steps.end_s)
        makespan_s = float(end_s - start_s) if end_s >= start_s else 0.0

        figures: dict[str, Any] = {
            **_access_figures(self._accesses),
            **_step_figures(self._steps),
            **_lane_figures(self._names, self._lanes, makespan_s),
            **_copy_figures(self._copies, int(self._accesses.states[MISS])),
            **_stall_figures(self._names, self._stalls),
            **self._energy_figures(makespan_s, power),
            "makespan_s": makespan_s,
        }
        # In the order of the definitions, whatever computed them.
        return {name: figures[name] for name in METRICS}

    def _energy_figures(
        self,
        makespan_s: float,
        power: Mapping[str, tuple[float, float]] | None,
    ) -> dict[str, Any]:
        if power is None:
            return {"energy_j": None, "tokens_per_kj": None}

        busy_s = dict(zip(self._names, self._lanes.busy_s.tolist(), strict=True))
        energy_j = 0.0
        for lane, (idle_w, busy_w) in power.items():
            energy_j += idle_w * makespan_s
            if lane != PLATFORM:
                # What a lane draws beyond being idle, while it works.
                energy_j += (busy_w - idle_w) * busy_s.get(lane, 0.0)

        tokens = self._steps.tokens[Phase.DECODE]
        per_kj = _ratio(tokens, energy_j / 1000) if tokens else None
        return {"energy_j": energy_j, "tokens_per_kj": per_kj}


def summarise(
    timeline: Timeline,
    *,
    power: Mapping[str, tuple[float, float]] | None = None,
) -> dict[str, Any]:
    """Compute all `METRICS` of a recorded run in one pass: `Summary` over its tables.

    Args:
        timeline: a run, in memory or loaded.
        power: as `Summary.figures` takes it.
    """
    summary = Summary(timeline.lanes)
    accesses = timeline.access_chunks()

    for spans in timeline.chunks():
        summary.add("timeline", spans)
        # Accesses follow the spans, so that little has to wait for its counterpart.
        while summary.reached < summary.seen:
            chunk = next(accesses, None)
            if chunk is None:
                break
            summary.add("accesses", chunk)

    for chunk in accesses:
        summary.add("accesses", chunk)
    for chunk in timeline.step_chunks():
        summary.add("steps", chunk)
    return summary.figures(power)


def _ratio(
    part: float,
    total: float,
) -> float | None:
    return float(part / total) if total else None


def _access_figures(accesses: AccessAggregator) -> dict[str, Any]:
    states = accesses.states
    gpu = accesses.gpu_states
    tokens = accesses.token_states
    return {
        "accesses": int(states.sum()),
        "hits": int(states[HIT]),
        "delayed_hits": int(states[DELAYED]),
        "misses": int(states[MISS]),
        "hit_rate_active": _ratio(states[HIT], states.sum()),
        "hit_rate_gpu": _ratio(gpu[HIT], gpu.sum()),
        "hit_rate_token": _ratio(tokens[HIT], tokens.sum()),
    }


def _step_figures(steps: StepAggregator) -> dict[str, Any]:
    figures: dict[str, Any] = {"steps": steps.steps, "batches": steps.batches}

    for phase in Phase:
        tokens = steps.tokens[phase]
        name = f"{phase.label}_tokens"
        figures[name] = tokens
        figures[f"{name}_per_s"] = _ratio(tokens, steps.seconds[phase])
        figures[f"{name}_per_s_seq"] = steps.per_sequence(phase)

    # A view of the array: one number per decode step may be many.
    gaps_s = np.frombuffer(steps.gaps_s)
    figures["ttft_s"] = _ratio(sum(steps.ttft_s), len(steps.ttft_s))
    figures["tpot_s"] = _ratio(float(gaps_s.sum()), len(gaps_s))
    for percent in (50, 95):
        percentile = float(np.percentile(gaps_s, percent)) if len(gaps_s) else None
        figures[f"tpot_p{percent}_s"] = percentile
    return figures


def _lane_figures(
    names: tuple[str, ...],
    lanes: LaneAggregator,
    makespan_s: float,
) -> dict[str, Any]:
    links = [
        i for i, name in enumerate(names) if name.startswith(("h2d", "d2h", "ssd"))
    ]
    return {
        "bytes": {names[i]: int(lanes.bytes[i]) for i in links},
        "bandwidth": {names[i]: _ratio(lanes.bytes[i], lanes.busy_s[i]) for i in links},
        "busy_s": {name: float(lanes.busy_s[i]) for i, name in enumerate(names)},
        "planning_s": lanes.planning_s,
        "planning_share": _ratio(lanes.planning_s, makespan_s),
    }


def _stall_figures(
    names: tuple[str, ...],
    stalls: StallAggregator,
) -> dict[str, Any]:
    by_lane = zip(names, stalls.stall_s.tolist(), strict=True)
    return {
        "layer_steps": stalls.layer_steps,
        # Only compute lanes wait for a copy.
        "stall_s": {
            lane: stall_s
            for lane, stall_s in by_lane
            if lane.startswith(("cpu", "gpu"))
        },
        "imbalance": _ratio(stalls.imbalance, stalls.layer_steps),
    }


def _copy_figures(
    copies: CopyAggregator,
    misses: int,
) -> dict[str, Any]:
    # Without any prefetch, coverage would be 0 although nothing was tried.
    coverage = _ratio(copies.used, copies.used + misses) if copies.prefetched else None
    return {
        "prefetched": copies.prefetched,
        "prefetch_accuracy": _ratio(copies.used, copies.prefetched),
        "prefetch_coverage": coverage,
        "prefetch_timeliness": _ratio(copies.timely, copies.used),
        "refetch_rate_5": _ratio(copies.refetched, copies.copies),
    }
