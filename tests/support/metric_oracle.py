"""A second implementation of every metric: slow, one loop or group per sentence of
``docs/reference/metrics.md``, over the tables as data frames. It shares no code with
the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

REFETCH_STEPS = 5


@dataclass
class Tables:
    """A run's three tables, its lanes, and its requests if it has any."""

    spans: pd.DataFrame
    accesses: pd.DataFrame
    steps: pd.DataFrame
    lanes: tuple[str, ...]

    @classmethod
    def of(cls, timeline):
        return cls(
            timeline.frame(),
            timeline.access_frame(),
            timeline.step_frame(),
            timeline.lanes,
        )


def ratio(part, total):
    return float(part / total) if total else None


def expected_metrics(tables, power=None, *, is_cut_in_prompt=False):
    """Every metric that the tables tell, by name."""
    makespan_s = makespan(tables)
    figures = {
        **hit_figures(tables.accesses),
        **step_figures(tables.steps, is_cut_in_prompt=is_cut_in_prompt),
        **lane_figures(tables, makespan_s),
        **stall_figures(tables),
        **copy_figures(tables),
        "makespan_s": makespan_s,
    }
    return figures | energy_figures(figures, power)


def makespan(tables):
    frames = [frame for frame in (tables.spans, tables.steps) if len(frame)]
    if not frames:
        return 0.0
    first_s = min(frame["start_s"].min() for frame in frames)
    return float(max(frame["end_s"].max() for frame in frames) - first_s)


def hit_figures(accesses):
    counts = accesses["state"].astype(str).value_counts()
    on_gpu = accesses[accesses["lane"].astype(str).str.startswith("gpu")]
    hits = accesses[accesses["state"] == "hit"]
    return {
        "accesses": len(accesses),
        "hits": int(counts.get("hit", 0)),
        "delayed_hits": int(counts.get("delayed", 0)),
        "misses": int(counts.get("miss", 0)),
        "hit_rate_active": ratio(len(hits), len(accesses)),
        "hit_rate_gpu": ratio((on_gpu["state"] == "hit").sum(), len(on_gpu)),
        "hit_rate_token": ratio(hits["tokens"].sum(), accesses["tokens"].sum()),
    }


def step_figures(steps, *, is_cut_in_prompt):
    figures = {"steps": len(steps), "batches": steps["batch"].nunique()}
    ttft_s = []
    gaps_s = []
    seconds = {"prefill": 0.0, "decode": 0.0}
    speeds = {"prefill": [], "decode": []}
    last_batch = steps["batch"].iloc[-1] if len(steps) else None
    for number, batch in steps.groupby("batch", sort=True):
        # A pass lasts from the end of the one before it; the first from its own start.
        begin_s = batch["start_s"].where(
            np.arange(len(batch)) == 0, batch["end_s"].shift()
        )
        batch = batch.assign(seconds=batch["end_s"] - begin_s)  # noqa: PLW2901
        decodes = batch[batch["phase"] == "decode"]
        # Prefills are runs of consecutive prefill passes: micro-batches.
        is_prefill = batch["phase"] == "prefill"
        run = (is_prefill != is_prefill.shift()).cumsum()
        for _, prompt in batch[is_prefill].groupby(run[is_prefill]):
            is_open = (
                is_cut_in_prompt
                and number == last_batch
                and prompt.index[-1] == batch.index[-1]
            )
            seconds["prefill"] += prompt["seconds"].sum()
            if is_open:
                continue
            ttft_s.append(prompt["seconds"].sum())
            prompts = prompt["sequences"].max()
            speed = prompt["tokens"].sum() / prompt["seconds"].sum() / prompts
            speeds["prefill"] += [speed] * prompts
        seconds["decode"] += decodes["seconds"].sum()

        most = decodes["sequences"].max() if len(decodes) else 0
        for rank in range(1, most + 1):
            # The sequence that is the rank-th to end last: it runs in every pass that
            # holds at least so many.
            own = decodes[decodes["sequences"] >= rank]
            tokens = (own["tokens"] / own["sequences"]).sum()
            speeds["decode"].append(tokens / own["seconds"].sum())
        for row in decodes.itertuples():
            each = row.tokens / row.sequences
            gaps_s += [row.seconds / each] * round(each)
    for phase, name in (("prefill", "prefill_tokens"), ("decode", "decode_tokens")):
        tokens = int(steps.loc[steps["phase"] == phase, "tokens"].sum())
        figures[name] = tokens
        figures[f"{name}_per_s"] = ratio(tokens, seconds[phase])
        of_phase = speeds[phase]
        figures[f"{name}_per_s_seq"] = float(np.mean(of_phase)) if of_phase else None
    figures["ttft_s"] = float(np.mean(ttft_s)) if ttft_s else None
    figures["tpot_s"] = float(np.mean(gaps_s)) if gaps_s else None
    for percent in (50, 95):
        value = float(np.percentile(gaps_s, percent)) if gaps_s else None
        figures[f"tpot_p{percent}_s"] = value
    return figures


def lane_figures(tables, makespan_s):
    spans = tables.spans.assign(
        seconds=tables.spans["end_s"] - tables.spans["start_s"],
        lane=tables.spans["lane"].astype(str),
    )
    busy_s = spans.groupby("lane")["seconds"].sum()
    moved = spans.groupby("lane")["bytes"].sum()
    links = [lane for lane in tables.lanes if lane[:3] in ("h2d", "d2h", "ssd")]
    planning_s = float(spans.loc[spans["kind"] == "plan", "seconds"].sum())
    return {
        "bytes": {lane: int(moved.get(lane, 0)) for lane in links},
        "bandwidth": {
            lane: ratio(moved.get(lane, 0), busy_s.get(lane, 0)) for lane in links
        },
        "busy_s": {lane: float(busy_s.get(lane, 0.0)) for lane in tables.lanes},
        "planning_s": planning_s,
        "planning_share": ratio(planning_s, makespan_s),
    }


def stall_figures(tables):
    spans = tables.spans.assign(lane=tables.spans["lane"].astype(str))
    compute = spans[spans["kind"] == "compute"]
    copies = spans[spans["kind"].isin(["fetch", "prefetch", "replace", "read"])]
    copies = copies.assign(
        target=copies["lane"].str.replace("h2d", "gpu").replace("ssd", "cpu")
    )
    lanes = [lane for lane in tables.lanes if lane.startswith(("cpu", "gpu"))]
    stall_s = dict.fromkeys(lanes, 0.0)
    shares = []
    landings = {
        key: np.sort(rows["end_s"].to_numpy())
        for key, rows in copies.groupby(["target", "layer", "expert"])
    }
    plans = spans[spans["kind"] == "plan"].groupby(["step", "layer"])["end_s"].last()
    for (step, layer), work in compute.groupby(["step", "layer"]):
        busy_s = (work["end_s"] - work["start_s"]).groupby(work["lane"]).sum()
        cpu_s = busy_s.get("cpu", 0.0)
        gpu_s = max((busy_s[lane] for lane in busy_s.index if lane != "cpu"), default=0)
        longer_s = max(cpu_s, gpu_s)
        shares.append(abs(cpu_s - gpu_s) / longer_s if longer_s else 0.0)

        plan_end_s = plans.get((step, layer), math.inf)
        for lane, own in work.sort_values("start_s", kind="stable").groupby("lane"):
            idle_from_s = plan_end_s
            for span in own.itertuples():
                landed = landings.get((lane, layer, span.expert), np.empty(0))
                # The last copy that had ended by then.
                landed = landed[landed <= span.start_s]
                if len(landed):
                    waited_s = min(span.start_s, landed[-1]) - idle_from_s
                    stall_s[lane] += max(0.0, waited_s)
                idle_from_s = max(span.end_s, plan_end_s)
    return {
        "layer_steps": len(shares),
        "stall_s": stall_s,
        "imbalance": float(np.mean(shares)) if shares else None,
    }


def copy_figures(tables):
    """Follow each expert on each GPU through its copies and uses."""
    spans = tables.spans
    lane = spans["lane"].astype(str)
    copies = spans[
        lane.str.startswith("h2d")
        & spans["kind"].isin(["fetch", "prefetch", "replace"])
    ].sort_values(["step", "start_s"], kind="stable")
    gpus = sorted({int(name[3:]) for name in tables.lanes if name.startswith("gpu")})
    present = {}
    prefetches = {}
    counts = {"copies": 0, "refetched": 0, "prefetched": 0, "used": 0, "timely": 0}

    def copy(row):
        key = (int(str(row.lane)[3:]), row.layer, row.expert)
        counts["copies"] += 1
        counts["refetched"] += row.step - present.get(key, -99) <= REFETCH_STEPS
        counts["prefetched"] += row.kind == "prefetch"
        present[key] = row.step
        prefetches[key] = "unused" if row.kind == "prefetch" else None

    def use(row):
        keys = [(gpu, row.layer, row.expert) for gpu in gpus]
        if row.state == "miss":
            for key in keys:
                own_step = prefetches.get(key) == "unused" and (
                    present[key] == row.step
                )
                # A prefetch for the next step may be issued after this access.
                prefetches[key] = "looked past" if own_step else None
            return
        if str(row.lane).startswith("gpu"):
            key = (int(str(row.lane)[3:]), row.layer, row.expert)
        else:
            # The CPU computed it although a GPU had it: the one that had it last.
            key = max(keys, key=lambda k: (present.get(k, -99), -k[0]))
        if prefetches.get(key):
            counts["used"] += 1
            counts["timely"] += row.state == "hit"
        prefetches[key] = None
        present[key] = row.step

    accesses = tables.accesses
    numbers = sorted({*copies["step"], *accesses["step"]})
    copies_of = dict(iter(copies.groupby("step")))
    uses_of = dict(iter(accesses.groupby("step")))
    for number in numbers:
        for row in copies_of.get(number, copies[:0]).itertuples():
            copy(row)
        for row in uses_of.get(number, accesses[:0]).itertuples():
            use(row)

    used = counts["used"]
    misses = int((accesses["state"] == "miss").sum())
    tried = counts["prefetched"]
    return {
        "prefetched": tried,
        "prefetch_accuracy": ratio(used, tried),
        "prefetch_coverage": ratio(used, used + misses) if tried else None,
        "prefetch_timeliness": ratio(counts["timely"], used),
        "refetch_rate_5": ratio(counts["refetched"], counts["copies"]),
    }


def row_figures(tables, figures):
    """What a row of a sweep holds beside the metrics; figures of requests apart."""
    spans = tables.spans.assign(
        seconds=tables.spans["end_s"] - tables.spans["start_s"],
        lane=tables.spans["lane"].astype(str),
    )
    links = spans[spans["lane"].str.startswith("h2d")]
    used = links[links.groupby("lane")["bytes"].transform("sum") > 0]
    h2d_bytes = int(links["bytes"].sum())
    share = {
        lane: ratio(busy_s, figures["makespan_s"])
        for lane, busy_s in figures["busy_s"].items()
    }
    most = max(each or 0.0 for each in share.values())
    busiest = next(lane for lane, each in share.items() if (each or 0.0) == most)

    batches = {name: [] for name in ("decode_s", "decode_tokens", "makespan_s")}
    for _, batch in tables.steps.groupby("batch", sort=True):
        start_s = batch["start_s"].iloc[0]
        before_s = batch["end_s"].shift(fill_value=start_s)
        is_decode = batch["phase"] == "decode"
        each = (batch["tokens"] / batch["sequences"]).round()[is_decode]
        decode_s = (batch["end_s"] - before_s)[is_decode]
        batches["decode_s"].append(decode_s.sum())
        batches["decode_tokens"].append(int(each.sum()))
        batches["makespan_s"].append(batch["end_s"].iloc[-1] - start_s)
    return {
        "h2d_bytes": h2d_bytes,
        "ssd_bytes": int(spans.loc[spans["lane"] == "ssd", "bytes"].sum()),
        "h2d_bytes_per_s": ratio(h2d_bytes, used["seconds"].sum()),
        "busiest": busiest,
        "busiest_share": share[busiest],
        **{f"batch_{name}": values for name, values in batches.items()},
    }


def placement_of(accesses):
    """Uses and tokens of each expert, and the shares of its uses for which it was
    resident and that a GPU computed.
    """
    rows = {}
    for row in accesses.itertuples():
        cell = rows.setdefault((row.layer, row.expert), [0, 0, 0, 0])
        cell[0] += 1
        cell[1] += row.tokens
        cell[2] += row.state == "hit"
        cell[3] += str(row.lane).startswith("gpu")
    return [
        [*key, uses, tokens, hits / uses, on_gpu / uses]
        for key, (uses, tokens, hits, on_gpu) in sorted(rows.items())
    ]


def energy_figures(figures, power):
    if power is None:
        return {"energy_j": None, "tokens_per_kj": None}
    energy_j = 0.0
    for lane, (idle_w, busy_w) in power.items():
        energy_j += idle_w * figures["makespan_s"]
        if lane != "platform":
            energy_j += (busy_w - idle_w) * figures["busy_s"].get(lane, 0.0)
    tokens = figures["decode_tokens"]
    per_kj = ratio(tokens, energy_j / 1000) if tokens else None
    return {"energy_j": energy_j, "tokens_per_kj": per_kj}


@dataclass
class Life:
    """One request: tokens of its prompt, tokens that it generates, and what became of
    it.
    """

    arrival_s: float
    prompt: int
    to_generate: int
    begin_s: float = math.nan
    first_s: float = math.nan
    last_s: float = math.nan
    generated: int = 0
    later: int = 0

    @property
    def is_served(self):
        return not math.isnan(self.first_s) and self.generated == self.to_generate


def lives(steps, lengths, times_s, batch):
    """Every request, with when it was computed."""
    everyone = [
        Life(time_s, *length) for time_s, length in zip(times_s, lengths, strict=False)
    ]
    waiting = list(everyone)
    running = []
    rows = list(steps.itertuples())
    while rows:
        joining = []
        while waiting and waiting[0].arrival_s <= rows[0].start_s:
            if len(running) + len(joining) == batch:
                break
            joining.append(waiting.pop(0))
        prompts = [each for each in joining if each.prompt]
        running += [each for each in joining if each.to_generate]
        if prompts:
            compute_prompts(rows, prompts)
        else:
            generate(rows.pop(0), running)
        running = [each for each in running if each.generated < each.to_generate]
    return everyone


def compute_prompts(rows, prompts):
    """Take passes until every token of some prompts has been computed."""
    left = sum(each.prompt for each in prompts)
    begin_s = rows[0].start_s
    while rows and left > 0:
        row = rows.pop(0)
        assert row.phase == "prefill"
        left -= row.tokens
    for each in prompts:
        each.begin_s = begin_s
        if left <= 0:
            each.first_s = each.last_s = row.end_s


def generate(row, running):
    """Take a pass in which everyone who runs gets a token."""
    assert row.phase == "decode"
    assert row.sequences == len(running)
    for each in running:
        each.generated += 1
        if math.isnan(each.first_s):
            each.first_s = row.end_s
        else:
            each.later += 1
        each.last_s = row.end_s


def expected_requests(steps, lengths, times_s, batch, slo, makespan_s):
    """Figures of requests, from the table of forward passes alone: who is in a pass
    follows from the arrivals, first come first served.

    Args:
        steps: the table.
        lengths: (prompt tokens, generated tokens) of each sequence.
        times_s: when they arrive.
        batch: most that run together.
        slo: limits.
        makespan_s: of the run.
    """
    everyone = lives(steps, lengths, times_s, batch)
    served = [each for each in everyone if each.is_served]
    ttft_s = [each.first_s - each.arrival_s for each in served]
    tpot_s = [
        (each.last_s - each.first_s) / each.later for each in served if each.later
    ]
    prefill_speeds = [
        each.prompt / (each.first_s - each.begin_s) for each in served if each.prompt
    ]
    figures = {
        "requests": len(served),
        "prefill_tokens_per_s_seq": mean(prefill_speeds),
        "decode_tokens_per_s_seq": mean([1 / each for each in tpot_s]),
    }
    for name, seconds in (("ttft", ttft_s), ("tpot", tpot_s)):
        figures[f"{name}_s"] = mean(seconds)
        for percent in (50, 95, 99):
            value = float(np.percentile(seconds, percent)) if seconds else None
            figures[f"{name}_p{percent}_s"] = value
    met = [
        each.first_s - each.arrival_s <= slo.get("ttft", math.inf)
        and not (
            each.later
            and (each.last_s - each.first_s) / each.later > slo.get("tpot", math.inf)
        )
        for each in served
    ]
    has_limits = bool(slo and served)
    figures["slo_attainment"] = mean(met) if has_limits else None
    figures["goodput_per_s"] = sum(met) / makespan_s if has_limits else None
    return figures


def mean(values):
    return float(np.mean(values)) if len(values) else None
