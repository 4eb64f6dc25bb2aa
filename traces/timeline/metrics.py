"""Metrics of a run: every figure a report may print, computed from the three tables of
a timeline.

`totals` goes over spans and accesses once; here its numbers become metrics, and
`METRICS` is the one place that defines them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.timeline.spans import DELAYED, HIT, MISS, TABLES
from moesim.traces.timeline.totals import Totals

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

    Memory does not depend on the length of the run, except for the table of forward
    passes, some tens of bytes for each.

    Attributes:
        totals: of the spans and accesses so far.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self.totals = Totals(lanes)
        self._names = tuple(lanes)
        self._passes: list[Chunk] = []

    def add(self, table: str, chunk: Chunk) -> None:
        """Take a chunk of `timeline`, `accesses` or `steps`: each in order, and none of
        the first two far ahead.
        """
        if table == "timeline":
            self.totals.add_spans(chunk)
        elif table == "accesses":
            self.totals.add_accesses(chunk)
        else:
            self._passes.append(chunk)

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
        totals = self.totals
        totals.end()
        passes = {
            name: np.concatenate(
                [np.empty(0, dtype), *(chunk[name] for chunk in self._passes)]
            )
            for name, dtype in TABLES["steps"].items()
        }

        # Passes may begin before the first span, and end behind the last.
        start_s = passes["start_s"].min(initial=totals.start_s)
        end_s = passes["end_s"].max(initial=totals.end_s)
        makespan_s = float(end_s - start_s) if end_s >= start_s else 0.0

        by_lane = (totals.busy_s, totals.bytes, totals.stall_s)
        busy_s, moved_bytes, stall_s = (
            dict(zip(self._names, np.asarray(values).tolist(), strict=True))
            for values in by_lane
        )
        links = [each for each in self._names if each.startswith(("h2d", "d2h", "ssd"))]
        computing = [each for each in self._names if each.startswith(("cpu", "gpu"))]
        states, gpu, tokens = totals.states, totals.gpu_states, totals.token_states
        # Without any prefetch, coverage would be 0 although nothing was tried.
        needed = totals.used + int(states[MISS]) if totals.prefetched else 0
        figures: dict[str, Any] = {
            "layer_steps": totals.layer_steps,
            "accesses": int(states.sum()),
            "hits": int(states[HIT]),
            "delayed_hits": int(states[DELAYED]),
            "misses": int(states[MISS]),
            "hit_rate_active": _ratio(states[HIT], states.sum()),
            "hit_rate_gpu": _ratio(gpu[HIT], gpu.sum()),
            "hit_rate_token": _ratio(tokens[HIT], tokens.sum()),
            **_pass_figures(passes, ends_in_prompt=ends_in_prompt),
            "bytes": {link: moved_bytes[link] for link in links},
            "bandwidth": {
                link: _ratio(moved_bytes[link], busy_s[link]) for link in links
            },
            "busy_s": busy_s,
            # Only compute lanes wait for a copy.
            "stall_s": {lane: stall_s[lane] for lane in computing},
            "planning_s": totals.planning_s,
            "planning_share": _ratio(totals.planning_s, makespan_s),
            "imbalance": _ratio(totals.imbalance, totals.layer_steps),
            "prefetched": totals.prefetched,
            "prefetch_accuracy": _ratio(totals.used, totals.prefetched),
            "prefetch_coverage": _ratio(totals.used, needed),
            "prefetch_timeliness": _ratio(totals.timely, totals.used),
            "refetch_rate_5": _ratio(totals.refetched, totals.copies),
            "makespan_s": makespan_s,
            "energy_j": None,
            "tokens_per_kj": None,
        }
        if power is not None:
            energy_j = 0.0
            for lane, (idle_w, busy_w) in power.items():
                energy_j += idle_w * makespan_s
                if lane != PLATFORM:
                    # What a lane draws beyond being idle, while it works.
                    energy_j += (busy_w - idle_w) * busy_s.get(lane, 0.0)
            made = figures["decode_tokens"]
            figures["energy_j"] = energy_j
            figures["tokens_per_kj"] = _ratio(made, energy_j / 1000) if made else None
        # In the order of the definitions, whatever computed them.
        return {name: figures[name] for name in METRICS}


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
    totals = summary.totals
    accesses = timeline.access_chunks()

    for spans in timeline.chunks():
        summary.add("timeline", spans)
        # Accesses follow the spans, so that little has to wait for its counterpart.
        while totals.reached < totals.seen:
            chunk = next(accesses, None)
            if chunk is None:
                break
            summary.add("accesses", chunk)

    for chunk in accesses:
        summary.add("accesses", chunk)
    for chunk in timeline.step_chunks():
        summary.add("steps", chunk)
    return summary.figures(power, ends_in_prompt=ends_in_prompt)


def _pass_figures(passes: Chunk, *, ends_in_prompt: bool) -> dict[str, Any]:
    """Steps, batches, tokens, speeds and times between tokens; without the last
    prompt's time where the run `ends_in_prompt`.
    """
    phase, tokens, sequences = passes["phase"], passes["tokens"], passes["sequences"]
    batch, end_s = passes["batch"], passes["end_s"]
    begins = np.diff(batch, prepend=-1) != 0
    # From the end of the step before: what lies between belongs to the gap.
    start_s = np.where(begins, passes["start_s"], np.roll(end_s, 1))
    duration_s = end_s - start_s
    seconds = np.bincount(phase, duration_s, 2)
    counts = np.bincount(phase, tokens, 2).astype(np.int64)

    # A prompt may be computed in several passes.
    prefills = phase == Phase.PREFILL
    follows = np.roll(prefills, 1) & ~begins
    prompt = np.cumsum(prefills & ~follows)[prefills] - 1
    ttft_s = np.bincount(prompt, duration_s[prefills])
    prompt_tokens = np.bincount(prompt, tokens[prefills])
    prompts = np.zeros(len(ttft_s), np.int64)
    np.maximum.at(prompts, prompt, sequences[prefills])
    if ends_in_prompt and prefills[-1:].any():
        ttft_s = ttft_s[:-1]
    ended = np.arange(len(prompts)) < len(ttft_s)
    timed = ttft_s > 0
    prompt_speeds = prompt_tokens[ended][timed] / ttft_s[timed]

    # A pass that verifies a draft makes several tokens of one sequence.
    decodes = ~prefills
    each = tokens[decodes] / sequences[decodes]
    gaps_s = np.repeat(duration_s[decodes] / each, np.rint(each).astype(np.int64))
    decoding = batch[decodes], each, sequences[decodes], start_s[decodes]
    speeds = {
        Phase.PREFILL: _ratio(prompt_speeds.sum(), prompts[ended].sum()),
        Phase.DECODE: _decode_speed(*decoding, end_s[decodes]),
    }
    figures: dict[str, Any] = {"steps": len(phase), "batches": int(begins.sum())}
    for each_phase in Phase:
        name = f"{each_phase.label}_tokens"
        figures[name] = int(counts[each_phase])
        figures[f"{name}_per_s"] = _ratio(counts[each_phase], seconds[each_phase])
        figures[f"{name}_per_s_seq"] = speeds[each_phase]
    figures["ttft_s"] = _ratio(ttft_s.sum(), len(ttft_s))
    figures["tpot_s"] = _ratio(gaps_s.sum(), len(gaps_s))
    for percent in (50, 95):
        percentile = float(np.percentile(gaps_s, percent)) if len(gaps_s) else None
        figures[f"tpot_p{percent}_s"] = percentile
    return figures


def _decode_speed(
    batch: np.ndarray,
    each: np.ndarray,
    sequences: np.ndarray,
    start_s: np.ndarray,
    end_s: np.ndarray,
) -> float | None:
    """Own tokens per second, mean over the sequences of decode steps [N], which make
    `each` so many tokens of every sequence.

    Source: DALI, decode speed.
    """
    first = np.flatnonzero(np.diff(batch, prepend=-1))
    of_batch = np.repeat(first, np.diff(np.append(first, len(batch))))
    total = np.cumsum(each)
    made = total - (total - each)[of_batch]
    # Sequences that have ended with a step: the next one of their batch has fewer.
    following = np.append(sequences[1:], 0)
    following[np.append(first[1:], len(batch)) - 1] = 0
    seconds = end_s - start_s[of_batch]
    ended = np.where(seconds > 0, np.maximum(sequences - following, 0), 0)
    some = ended > 0
    return _ratio((ended[some] * made[some] / seconds[some]).sum(), ended.sum())


def _ratio(part: float, total: float) -> float | None:
    return float(part / total) if total else None
