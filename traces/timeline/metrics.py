"""Metrics of a run: every figure a report may print, computed from the three tables of
a timeline.

`totals` goes over spans and accesses once; here its numbers become metrics. What each
means stands in ``docs/reference/metrics.md``.
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


LARGER: Final = "larger"
SMALLER: Final = "smaller"


class Metric(NamedTuple):
    """Unit and direction of a figure; ``docs/reference/metrics.md`` defines it.

    Attributes:
        unit: of its values; empty for plain counts.
        better: ``larger``, ``smaller``, or empty where neither is.
    """

    unit: str = ""
    better: str = ""


# Every key of `summarise`.
METRICS: dict[str, Metric] = {
    "steps": Metric(),
    "layer_steps": Metric(),
    "batches": Metric(),
    "accesses": Metric(),
    "hits": Metric("", LARGER),
    "delayed_hits": Metric("", SMALLER),
    "misses": Metric("", SMALLER),
    "hit_rate_active": Metric("share", LARGER),
    "hit_rate_gpu": Metric("share", LARGER),
    "hit_rate_token": Metric("share", LARGER),
    "ttft_s": Metric("s", SMALLER),
    "tpot_s": Metric("s", SMALLER),
    "tpot_p50_s": Metric("s", SMALLER),
    "tpot_p95_s": Metric("s", SMALLER),
    "prefill_tokens": Metric("tokens"),
    "decode_tokens": Metric("tokens"),
    "prefill_tokens_per_s": Metric("tokens/s", LARGER),
    "prefill_tokens_per_s_seq": Metric("tokens/s", LARGER),
    "decode_tokens_per_s": Metric("tokens/s", LARGER),
    "decode_tokens_per_s_seq": Metric("tokens/s", LARGER),
    "bytes": Metric("bytes per link"),
    "bandwidth": Metric("bytes/s per link", LARGER),
    "busy_s": Metric("s per lane"),
    "stall_s": Metric("s per compute lane", SMALLER),
    "planning_s": Metric("s", SMALLER),
    "planning_share": Metric("share", SMALLER),
    "imbalance": Metric("share", SMALLER),
    "prefetched": Metric(),
    "prefetch_accuracy": Metric("share", LARGER),
    "prefetch_coverage": Metric("share", LARGER),
    "prefetch_timeliness": Metric("share", LARGER),
    "refetch_rate_5": Metric("share", SMALLER),
    "makespan_s": Metric("s", SMALLER),
    "energy_j": Metric("J", SMALLER),
    "tokens_per_kj": Metric("tokens/kJ", LARGER),
}

# What the tables do not tell, but the run does.
RUN_METRICS: dict[str, Metric] = {
    "memory_high_bytes": Metric("bytes per memory", SMALLER),
    "routing": Metric(),
    "approximate": Metric(),
    "gate_mass_kept": Metric("share", LARGER),
    "filling_share": Metric("share"),
    "events": Metric(),
    "wall_s": Metric("s", SMALLER),
}

# What a run with arrivals adds, in the object ``requests`` and in rows of sweeps.
REQUEST_METRICS: dict[str, Metric] = {
    "requests": Metric(),
    "ttft_p50_s": Metric("s", SMALLER),
    "ttft_p95_s": Metric("s", SMALLER),
    "ttft_p99_s": Metric("s", SMALLER),
    "tpot_p99_s": Metric("s", SMALLER),
    "slo_attainment": Metric("share", LARGER),
    "goodput_per_s": Metric("1/s", LARGER),
}

# What rows of sweeps and comparisons hold beside them.
ROW_METRICS: dict[str, Metric] = {
    "h2d_bytes": Metric("bytes", SMALLER),
    "ssd_bytes": Metric("bytes", SMALLER),
    "h2d_bytes_per_s": Metric("bytes/s", LARGER),
    "busiest_share": Metric("share"),
    "cache_bytes": Metric("bytes", SMALLER),
    "gpu_bytes": Metric("bytes", SMALLER),
    "host_bytes": Metric("bytes", SMALLER),
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
