"""An independent audit of a run: its three tables and its trace, nothing of the engine.

Simulated and real runs are judged alike. Each rule is a function that yields what is
wrong; a text that names the place.
"""

import itertools
from collections import defaultdict

import pandas as pd
import pyarrow.parquet as pq

COPIES = ("fetch", "prefetch", "replace")
MOVES = (*COPIES, "read")
# Rounding of sums of a few thousand double-precision numbers.
EPSILON_S = 1e-9


class Record:
    """The tables of a run, and what it should have been.

    Args:
        folder: with the three tables.
        trace: opened; None where routing is not that of a trace.
        config: as ``run.json`` has it.
        makespan_s: as the metrics have it.

    Attributes:
        sizes: bytes of an expert of each layer, those of the trace's shape at first.
    """

    def __init__(self, folder, trace, config, makespan_s):
        self.spans = pq.read_table(folder / "timeline.parquet").to_pandas()
        self.accesses = pq.read_table(folder / "accesses.parquet").to_pandas()
        self.steps = pq.read_table(folder / "steps.parquet").to_pandas()
        for table in (self.spans, self.accesses, self.steps):
            for name in table.select_dtypes("category"):
                table[name] = table[name].astype(str)
        self.trace = trace
        self.sizes = None if trace is None else trace.shape.expert_bytes
        self.config = config
        self.makespan_s = makespan_s


def audit(record):
    """All that is wrong with a run."""
    return [fault for rule in RULES for fault in itertools.islice(rule(record), 3)]


def spans_have_an_order(record):
    """A span ends after it begins, and no earlier than time begins."""
    spans = record.spans
    wrong = spans[(spans.end_s < spans.start_s) | (spans.start_s < -EPSILON_S)]
    for span in wrong.itertuples():
        yield f"order: span from {span.start_s} to {span.end_s} on {span.lane}"


def lanes_do_one_thing_at_a_time(record):
    """No two spans of a lane overlap."""
    for lane, spans in record.spans.groupby("lane"):
        ordered = spans.sort_values(["start_s", "end_s"])
        before_s = ordered.end_s.cummax().shift(fill_value=0.0)
        wrong = ordered[ordered.start_s < before_s - EPSILON_S]
        for span in wrong.itertuples():
            yield f"overlap: {lane}: {span.kind} of step {span.step} begins at {span.start_s}"


def bytes_are_those_of_the_expert(record):
    """A copy or read moves exactly one expert; nothing else moves experts."""
    if record.sizes is None:
        return
    sizes = record.sizes
    for span in record.spans.itertuples():
        due = sizes[span.layer] if span.kind in MOVES else 0
        if span.kind in (*MOVES, "compute") and span.bytes != due:
            yield f"bytes: {span.kind} of layer {span.layer}: expected {due}, found {span.bytes}"


def every_access_is_computed(record):
    """Each active expert is computed where its access says, once at least."""
    spans = record.spans[record.spans.kind == "compute"]
    keys = ["step", "layer", "expert", "lane"]
    computed = set(zip(*(spans[key] for key in keys), strict=True))
    for access in zip(*(record.accesses[key] for key in keys), strict=True):
        if access not in computed:
            yield f"compute: {access}: expected a span, found none"


def nothing_is_computed_before_it_arrived(record):
    """On a GPU, an expert that missed was copied there before it is computed, and one
    that hit was either copied before or there from the beginning.
    """
    arrivals = _arrivals(record)
    computed = _computed(record)
    for access in record.accesses.itertuples():
        if not access.lane.startswith("gpu"):
            continue
        span = computed.get((access.step, access.layer, access.expert, access.lane))
        if span is None:
            continue
        landed = [
            copy
            for copy in arrivals[access.lane[3:], access.layer, access.expert]
            if copy.end_s <= span.start_s + EPSILON_S
        ]
        if access.state != "hit" and not landed:
            yield (
                f"arrival: step {access.step} layer {access.layer} expert"
                f" {access.expert}: {access.state}, computed at {span.start_s}, never"
                " arrived before"
            )


def no_memory_holds_more_than_its_size(record):
    """Experts that hit were resident since they were copied; so many at once fit.

    An expert is resident at least from the copy's beginning to the end of the last hit
    before its next copy. Evictions are nowhere recorded, so this is the least.
    """
    slots = record.config.get("cache_slots")
    if not slots or record.config.get("gpus", 1) > 1:
        return
    held = defaultdict(list)
    for layer, events in _held(record).items():
        pool = layer if record.config["cache_scope"] != "global" else 0
        held[pool] += events
    by_layer = record.config["cache_scope"] != "global"
    # What is prefetched may wait in a staging slot, which all layers share.
    staging = record.config["staging"]
    pools = range(len(slots)) if by_layer else [0]
    room = {pool: slots[pool] + staging for pool in pools}
    everywhere = sum(slots) if by_layer else slots[0]
    held["all"] = [event for events in held.values() for event in events]
    room["all"] = everywhere + staging
    for pool, events in held.items():
        count = 0
        # What ends at an instant makes room for what begins then.
        for time_s, change in sorted(events):
            count += change
            if count > room[pool]:
                yield f"memory: pool {pool}: {count} experts at {time_s}, room for {room[pool]}"
                break


def the_makespan_is_the_last_end(record):
    """From zero to the last end of any span."""
    last_s = max(record.spans.end_s.max(), record.steps.end_s.max())
    first_s = min(record.spans.start_s.min(), record.steps.start_s.min())
    if not any(
        abs(record.makespan_s - end_s) <= EPSILON_S
        for end_s in (last_s, last_s - first_s)
    ):
        yield f"makespan: expected {last_s}, found {record.makespan_s}"


def steps_follow_each_other(record):
    """A forward pass begins when the one before has ended, and its spans lie in it."""
    ends = record.steps.end_s.shift(fill_value=0.0)
    for step in record.steps[record.steps.start_s < ends - EPSILON_S].itertuples():
        yield f"steps: {step.step} begins before the one before it ends"


def accesses_are_those_of_the_trace(record):
    """The active experts of every layer step, with their tokens, as the trace routes
    them.
    """
    if record.trace is None or record.config.get("routing") != "as-recorded":
        return
    due = _routed(record)
    found = defaultdict(dict)
    for access in record.accesses.itertuples():
        found[access.step, access.layer][access.expert] = access.tokens
    for key in sorted(due.keys() | found.keys()):
        if due.get(key) != found.get(key):
            yield f"accesses: step, layer {key}: expected {due.get(key)}, found {found.get(key)}"


RULES = (
    spans_have_an_order, lanes_do_one_thing_at_a_time, bytes_are_those_of_the_expert,
    every_access_is_computed, nothing_is_computed_before_it_arrived,
    no_memory_holds_more_than_its_size, the_makespan_is_the_last_end,
    steps_follow_each_other, accesses_are_those_of_the_trace,
)  # fmt: skip


def _arrivals(record):
    """Copies to each GPU, by its number, layer and expert, in their order."""
    arrivals = defaultdict(list)
    copies = record.spans[record.spans.kind.isin(COPIES)]
    for span in copies.sort_values("end_s").itertuples():
        arrivals[span.lane.removeprefix("h2d"), span.layer, span.expert].append(span)
    return arrivals


def _computed(record):
    spans = record.spans[record.spans.kind == "compute"]
    return {
        (span.step, span.layer, span.expert, span.lane): span
        for span in spans.itertuples()
    }


def _held(record):
    """Layer -> (time, one more or one less) of the least residency of each expert."""
    arrivals = _arrivals(record)
    computed = _computed(record)
    uses = defaultdict(list)
    for access in record.accesses.itertuples():
        span = computed.get((access.step, access.layer, access.expert, access.lane))
        if access.state == "hit" and access.lane.startswith("gpu") and span is not None:
            uses[access.layer, access.expert].append(span)

    events = defaultdict(list)
    for (layer, expert), spans in uses.items():
        starts = [copy.start_s for copy in arrivals["0", layer, expert]]
        for begin_s, end_s in itertools.pairwise([0.0, *starts, float("inf")]):
            last = [span.end_s for span in spans if begin_s <= span.start_s < end_s]
            if last:
                # A hair less than both ends: only what surely overlaps counts.
                events[layer] += [(begin_s + EPSILON_S, 1), (max(last) - EPSILON_S, -1)]
    return events


def _routed(record):
    """(step, layer) -> expert -> tokens, composed anew from the trace's rows.

    A pass that verifies a draft computes the drafted tokens as well, whatever it keeps;
    the next one begins behind those that were kept, which the table of steps tells.
    """
    kept = record.steps.sort_values("step").tokens.tolist()
    drafted = record.config.get("draft_tokens") or 0
    due = defaultdict(lambda: defaultdict(int))
    step = 0
    sequences = record.trace.sequences()
    while group := list(itertools.islice(sequences, record.config["batch"])):
        passes = defaultdict(list)
        for rows in group:
            frame = pd.DataFrame({"pos": rows.pos, "phase": rows.phase})
            decode = sorted(set(frame.pos[frame.phase == 1]))
            number = {pos: place + 1 for place, pos in enumerate(decode)}
            for row, pos in enumerate(rows.pos):
                passes[number.get(pos, 0)].append((rows, row))
        last = max(passes)
        number = min(passes)
        while number <= last:
            if step == len(kept):
                return due
            computed = range(number, number + 1 + drafted) if number else (0,)
            for rows, row in itertools.chain(
                *(passes[n] for n in computed if n <= last)
            ):
                for expert in rows.experts[row]:
                    due[step, int(rows.layer[row])][int(expert)] += 1
            number += kept[step] if drafted and number else 1
            step += 1
    return due
