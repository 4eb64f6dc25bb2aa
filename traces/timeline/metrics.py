"""Metrics of a run: every figure a report may print, computed from the three tables of
a timeline.

`aggregators`, `stalls` and `copies` go over the tables once; here their numbers become
metrics, and `METRICS` is the one place that defines them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

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


class Metric(NamedTuple):
    """Unit, direction and definition of a figure of a run.

    Attributes:
        group: the section of ``docs/reference/metrics.md`` that explains it.
        unit: of its values; empty for plain counts.
        better: ``larger``, ``smaller``, or empty where neither is.
        meaning: definition, in a line.
    """

    group: str
    unit: str
    better: str
    meaning: str


LARGER: Final = "larger"
SMALLER: Final = "smaller"
NEITHER: Final = ""
SPEED: Final = "Speed"
HITS: Final = "Hits"
LANES: Final = "Lanes and links"
PREFETCHES: Final = "Prefetch"
ENERGY: Final = "Energy"
REQUESTS: Final = "Requests"
RUN: Final = "About the run"

# Every key of `summarise`.
METRICS: dict[str, Metric] = {
    "steps": Metric(SPEED, "", NEITHER, "forward passes"),
    "layer_steps": Metric(
        SPEED,
        "",
        NEITHER,
        "MoE layers of forward passes in which anything was computed",
    ),
    "batches": Metric(
        SPEED,
        "",
        NEITHER,
        "groups of sequences that ran together; with arrivals, times of work between"
        " times of idleness",
    ),
    "accesses": Metric(
        HITS, "", NEITHER, "distinct active experts, summed over layer steps"
    ),
    "hits": Metric(
        HITS,
        "",
        LARGER,
        "accesses that found the expert resident on a GPU when the layer step was"
        " planned",
    ),
    "delayed_hits": Metric(HITS, "", SMALLER, "accesses that found it being copied"),
    "misses": Metric(HITS, "", SMALLER, "accesses that found it absent"),
    "hit_rate_active": Metric(
        HITS, "share", LARGER, "hits ÷ accesses, CPU-computed experts included"
    ),
    "hit_rate_gpu": Metric(
        HITS,
        "share",
        LARGER,
        "the same over GPU-assigned experts only; null if there are none",
    ),
    "hit_rate_token": Metric(
        HITS, "share", LARGER, "tokens of hits ÷ tokens of accesses"
    ),
    "ttft_s": Metric(
        SPEED,
        "s",
        SMALLER,
        "from the start of a batch to the end of its prefill, micro-batches included;"
        " mean over batches whose prompts were computed to their end",
    ),
    "tpot_s": Metric(
        SPEED,
        "s",
        SMALLER,
        "between the ends of consecutive steps of a batch; mean over decode steps, or"
        " over the tokens that steps keep of drafts",
    ),
    "tpot_p50_s": Metric(SPEED, "s", SMALLER, "median of the same"),
    "tpot_p95_s": Metric(
        SPEED, "s", SMALLER, "95th percentile of the same, linearly interpolated"
    ),
    "prefill_tokens": Metric(SPEED, "tokens", NEITHER, "prompt tokens computed"),
    "decode_tokens": Metric(
        SPEED,
        "tokens",
        NEITHER,
        "tokens generated, those of drafts as far as they were kept",
    ),
    "prefill_tokens_per_s": Metric(
        SPEED,
        "tokens/s",
        LARGER,
        "prompt tokens of **all** sequences ÷ prefill seconds",
    ),
    "prefill_tokens_per_s_seq": Metric(
        SPEED,
        "tokens/s",
        LARGER,
        "own prompt tokens ÷ prefill seconds, mean over sequences",
    ),
    "decode_tokens_per_s": Metric(
        SPEED,
        "tokens/s",
        LARGER,
        "generated tokens of **all** sequences ÷ decode seconds",
    ),
    "decode_tokens_per_s_seq": Metric(
        SPEED,
        "tokens/s",
        LARGER,
        "own generated tokens ÷ own decode seconds, mean over sequences: the speed that"
        " one user sees, and the papers' definition",
    ),
    "bytes": Metric(
        LANES,
        "bytes per link",
        NEITHER,
        "moved over `h2d…`, `d2h…`, `ssd`: experts only, activations are latency"
        " without bytes",
    ),
    "bandwidth": Metric(
        LANES,
        "bytes/s per link",
        LARGER,
        "bytes ÷ seconds in which the link was busy; null if it never was",
    ),
    "busy_s": Metric(LANES, "s per lane", NEITHER, "in which the lane worked"),
    "stall_s": Metric(
        LANES,
        "s per compute lane",
        SMALLER,
        "idle after planning while the expert it computed next was being copied",
    ),
    "planning_s": Metric(LANES, "s", SMALLER, "spent in decisions"),
    "planning_share": Metric(LANES, "share", SMALLER, "planning_s ÷ makespan_s"),
    "imbalance": Metric(
        LANES,
        "share",
        SMALLER,
        "difference of CPU and busiest GPU ÷ the longer of both, mean over layer steps",
    ),
    "prefetched": Metric(PREFETCHES, "", NEITHER, "prefetches copied to a GPU"),
    "prefetch_accuracy": Metric(
        PREFETCHES,
        "share",
        LARGER,
        "prefetched experts used before they left ÷ prefetched",
    ),
    "prefetch_coverage": Metric(
        PREFETCHES,
        "share",
        LARGER,
        "prefetched experts used ÷ (those + misses); null without prefetches",
    ),
    "prefetch_timeliness": Metric(
        PREFETCHES,
        "share",
        LARGER,
        "prefetched experts fully there when used ÷ used; null if none was used",
    ),
    "refetch_rate_5": Metric(
        PREFETCHES,
        "share",
        SMALLER,
        "copies of experts that had been on that very GPU within the five steps before"
        " ÷ all copies to GPUs",
    ),
    "makespan_s": Metric(SPEED, "s", SMALLER, "from the first start to the last end"),
    "energy_j": Metric(
        ENERGY,
        "J",
        SMALLER,
        "idle watts of all lanes and the platform over the makespan, plus what busy"
        " lanes draw beyond idle; null without power figures",
    ),
    "tokens_per_kj": Metric(
        ENERGY, "tokens/kJ", LARGER, "generated tokens ÷ kilojoules"
    ),
}

# What the tables do not tell, but the run does.
RUN_METRICS: dict[str, Metric] = {
    "memory_high_bytes": Metric(
        LANES,
        "bytes per memory",
        SMALLER,
        "most bytes of experts in the cache at one time",
    ),
    "routing": Metric(
        RUN,
        "",
        NEITHER,
        "`recorded`, or `altered` if a routing policy changed experts: then later"
        " layers would have seen other activations",
    ),
    "approximate": Metric(
        RUN,
        "",
        NEITHER,
        "`true` if the assignment computes experts ahead of their gate, on the layer"
        " before's input (`daop`), or lets results join one layer later"
        " (`ktransformers-deferral`): then answers differ even with recorded routing",
    ),
    "gate_mass_kept": Metric(
        RUN,
        "share",
        LARGER,
        "with altered routing: gate scores of the experts used ÷ those of the recorded"
        " ones, mean over tokens",
    ),
    "filling_share": Metric(
        LANES,
        "share",
        NEITHER,
        "bytes that first filled the GPUs' caches ÷ bytes copied to GPUs: the more, the"
        " more the run shows how caches begin; null without copies",
    ),
    "events": Metric(RUN, "", NEITHER, "events of the simulation"),
    "wall_s": Metric(RUN, "s", SMALLER, "real seconds that the replay took"),
}

# What a run with arrivals adds, in the object ``requests`` and in rows of sweeps.
REQUEST_METRICS: dict[str, Metric] = {
    "requests": Metric(
        REQUESTS, "", NEITHER, "requests that were served to their last token"
    ),
    "ttft_p50_s": Metric(REQUESTS, "s", SMALLER, "median of their `ttft_s`"),
    "ttft_p95_s": Metric(REQUESTS, "s", SMALLER, "95th percentile"),
    "ttft_p99_s": Metric(REQUESTS, "s", SMALLER, "99th percentile"),
    "tpot_p99_s": Metric(REQUESTS, "s", SMALLER, "99th percentile of their `tpot_s`"),
    "slo_attainment": Metric(
        REQUESTS, "share", LARGER, "requests within both limits of `--slo` ÷ requests"
    ),
    "goodput_per_s": Metric(
        REQUESTS, "1/s", LARGER, "requests within both limits ÷ makespan"
    ),
}

# What rows of sweeps and comparisons hold beside them.
ROW_METRICS: dict[str, Metric] = {
    "h2d_bytes": Metric(LANES, "bytes", SMALLER, "moved over all links to GPUs"),
    "ssd_bytes": Metric(LANES, "bytes", SMALLER, "read from the SSD"),
    "h2d_bytes_per_s": Metric(
        LANES,
        "bytes/s",
        LARGER,
        "h2d_bytes ÷ seconds in which these links were busy, added up over links",
    ),
    "busiest_share": Metric(
        LANES,
        "share",
        NEITHER,
        "share of the makespan in which the lane `busiest` worked, which worked most",
    ),
    "cache_bytes": Metric(LANES, "bytes", SMALLER, "size of the GPU cache"),
    "gpu_bytes": Metric(
        LANES,
        "bytes",
        SMALLER,
        "memory of each GPU for cache, staging and other weights",
    ),
    "host_bytes": Metric(LANES, "bytes", SMALLER, "host memory for experts"),
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

    def add(self, table: str, chunk: Chunk) -> None:
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
        self,
        power: Mapping[str, tuple[float, float]] | None = None,
        *,
        ends_in_prompt: bool = False,
    ) -> dict[str, Any]:
        """Return every one of `METRICS`, once all chunks have come.

        Args:
            power: lane -> (idle watts, busy watts), and optionally ``platform`` ->
                (idle watts, ignored).
            ends_in_prompt: the run was cut before the last prompts were computed to
                their end, so when their first tokens came is not known.
        """
        self._stalls.add(None)
        self._copies.settle()

        steps = self._steps.figures(ends_in_prompt=ends_in_prompt)

        # Steps may begin before the first span, and end behind the last.
        start_s = self._steps.column("start_s").min(initial=self._lanes.start_s)
        end_s = self._steps.column("end_s").max(initial=self._lanes.end_s)
        makespan_s = float(end_s - start_s) if end_s >= start_s else 0.0

        figures: dict[str, Any] = {
            **_access_figures(self._accesses),
            **steps,
            **_lane_figures(self._names, self._lanes, makespan_s),
            **_copy_figures(self._copies, int(self._accesses.states[MISS])),
            **_stall_figures(self._names, self._stalls),
            **self._energy_figures(makespan_s, power, steps["decode_tokens"]),
            "makespan_s": makespan_s,
        }
        # In the order of the definitions, whatever computed them.
        return {name: figures[name] for name in METRICS}

    def _energy_figures(
        self,
        makespan_s: float,
        power: Mapping[str, tuple[float, float]] | None,
        tokens: int,
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

        per_kj = _ratio(tokens, energy_j / 1000) if tokens else None
        return {"energy_j": energy_j, "tokens_per_kj": per_kj}


def summarise(
    timeline: Timeline,
    *,
    power: Mapping[str, tuple[float, float]] | None = None,
    ends_in_prompt: bool = False,
) -> dict[str, Any]:
    """Compute all `METRICS` of a recorded run in one pass: `Summary` over its tables.

    Args:
        timeline: a run, in memory or loaded.
        power, ends_in_prompt: as `Summary.figures` takes them.
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
    return summary.figures(power, ends_in_prompt=ends_in_prompt)


def _ratio(part: float, total: float) -> float | None:
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


def _lane_figures(
    names: tuple[str, ...], lanes: LaneAggregator, makespan_s: float
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


def _stall_figures(names: tuple[str, ...], stalls: StallAggregator) -> dict[str, Any]:
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


def _copy_figures(copies: CopyAggregator, misses: int) -> dict[str, Any]:
    # Without any prefetch, coverage would be 0 although nothing was tried.
    coverage = _ratio(copies.used, copies.used + misses) if copies.prefetched else None
    return {
        "prefetched": copies.prefetched,
        "prefetch_accuracy": _ratio(copies.used, copies.prefetched),
        "prefetch_coverage": coverage,
        "prefetch_timeliness": _ratio(copies.timely, copies.used),
        "refetch_rate_5": _ratio(copies.refetched, copies.copies),
    }
