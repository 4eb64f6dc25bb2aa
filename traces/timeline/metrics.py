"""What a run was worth: every figure a report may print, computed from the three tables
of a timeline.

The folds of `moesim.traces.timeline.aggregators` go over the tables once; here their
numbers become metrics, and `METRICS` is the one place that defines them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.aggregators import (
    Accesses,
    Copies,
    Lanes,
    LayerSteps,
    Steps,
)
from moesim.traces.timeline.spans import DELAYED, HIT, MISS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.traces.timeline.spans import Chunk, Timeline

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
        "seconds from the start of a batch to the end of its prefill, mean over"
        " batches; null without prefill"
    ),
    "tpot_s": (
        "seconds between the ends of consecutive steps of a batch, mean over decode"
        " steps; null without decode"
    ),
    "tpot_p50_s": "median of the same",
    "tpot_p95_s": "95th percentile of the same, linearly interpolated",
    "prefill_tokens": "prompt tokens computed",
    "decode_tokens": "tokens generated one by one",
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
"""Every key of `summarise`: its unit or what is divided by what."""

PLATFORM = "platform"
"""Key of the power table for watts drawn whatever happens."""


class Summary:
    """All `METRICS` of a run, folded from chunks of its tables as they come.

    Memory does not depend on the length of the run, except for eight bytes per decode
    step.

    Attributes:
        seen: last step whose compute spans have come.
        reached: last step whose accesses have come.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self._names = tuple(lanes)
        self._lanes = Lanes(lanes)
        self._layer_steps = LayerSteps(lanes)
        self._copies = Copies(lanes)
        self._accesses = Accesses(lanes)
        self._steps = Steps()
        self.seen = self.reached = -1

    def add(self, table: str, chunk: Chunk) -> None:
        """Fold a chunk of `timeline`, `accesses` or `steps`: each in order, and none of
        the first two far ahead.
        """
        if table == "timeline":
            self._lanes.add(chunk)
            self._layer_steps.add(chunk)
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
        """Every one of `METRICS`, once all chunks have come.

        Args:
            power: lane -> (idle watts, busy watts), and optionally ``platform`` ->
                (idle watts, ignored).
        """
        lanes = self._lanes
        layer_steps = self._layer_steps
        copies = self._copies
        steps = self._steps
        layer_steps.add(None)
        copies.settle()
        start_s = min(lanes.start_s, steps.start_s)
        end_s = max(lanes.end_s, steps.end_s)
        makespan_s = float(end_s - start_s) if end_s >= start_s else 0.0
        figures: dict[str, Any] = {
            **_access_figures(self._accesses),
            **_step_figures(steps),
            **_lane_figures(self._names, lanes, makespan_s),
            **_copy_figures(copies, int(self._accesses.states[MISS])),
            **_energy_figures(
                self._names, lanes, makespan_s, power, steps.tokens[Phase.DECODE]
            ),
            "layer_steps": layer_steps.layer_steps,
            "stall_s": {
                lane: stall_s
                for lane, stall_s in zip(
                    self._names, layer_steps.stall_s.tolist(), strict=True
                )
                if lane.startswith(("cpu", "gpu"))
            },
            "imbalance": _ratio(layer_steps.imbalance, layer_steps.layer_steps),
            "makespan_s": makespan_s,
        }
        return {name: figures[name] for name in METRICS}


def summarise(
    timeline: Timeline, *, power: Mapping[str, tuple[float, float]] | None = None
) -> dict[str, Any]:
    """Compute all `METRICS` of a recorded run in one pass: `Summary` over its tables.

    Args:
        timeline: a run, in memory or loaded.
        power: as `Summary.figures` takes it.
    """
    summary = Summary(timeline.lanes)
    waiting = timeline.access_chunks()
    for spans in timeline.chunks():
        summary.add("timeline", spans)
        while (
            summary.reached < summary.seen
            and (chunk := next(waiting, None)) is not None
        ):
            summary.add("accesses", chunk)
    for chunk in waiting:
        summary.add("accesses", chunk)
    for chunk in timeline.step_chunks():
        summary.add("steps", chunk)
    return summary.figures(power)


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _access_figures(accesses: Accesses) -> dict[str, Any]:
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


def _step_figures(steps: Steps) -> dict[str, Any]:
    figures: dict[str, Any] = {"steps": steps.steps, "batches": steps.batches}
    for phase in Phase:
        tokens = steps.tokens[phase]
        figures[f"{phase.label}_tokens"] = tokens
        figures[f"{phase.label}_tokens_per_s"] = _ratio(tokens, steps.seconds[phase])
        figures[f"{phase.label}_tokens_per_s_seq"] = steps.per_sequence(phase)
    gaps_s = np.frombuffer(steps.gaps_s)
    figures["ttft_s"] = _ratio(sum(steps.ttft_s), len(steps.ttft_s))
    figures["tpot_s"] = _ratio(float(gaps_s.sum()), len(gaps_s))
    for percent in (50, 95):
        figures[f"tpot_p{percent}_s"] = (
            float(np.percentile(gaps_s, percent)) if len(gaps_s) else None
        )
    return figures


def _lane_figures(
    names: tuple[str, ...], lanes: Lanes, makespan_s: float
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


def _copy_figures(copies: Copies, misses: int) -> dict[str, Any]:
    some = copies.prefetched > 0
    return {
        "prefetched": copies.prefetched,
        "prefetch_accuracy": _ratio(copies.used, copies.prefetched),
        "prefetch_coverage": (
            _ratio(copies.used, copies.used + misses) if some else None
        ),
        "prefetch_timeliness": _ratio(copies.timely, copies.used),
        "refetch_rate_5": _ratio(copies.refetched, copies.copies),
    }


def _energy_figures(
    names: tuple[str, ...],
    lanes: Lanes,
    makespan_s: float,
    power: Mapping[str, tuple[float, float]] | None,
    tokens: int,
) -> dict[str, Any]:
    if power is None:
        return {"energy_j": None, "tokens_per_kj": None}
    busy_s = dict(zip(names, lanes.busy_s.tolist(), strict=True))
    energy_j = 0.0
    for lane, (idle_w, busy_w) in power.items():
        energy_j += idle_w * makespan_s
        if lane != PLATFORM:
            energy_j += (busy_w - idle_w) * busy_s.get(lane, 0.0)
    return {
        "energy_j": energy_j,
        "tokens_per_kj": _ratio(tokens, energy_j / 1000) if tokens else None,
    }
