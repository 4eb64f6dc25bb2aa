"""What the runtime itself costs: dispatch, planning, and how near its lanes come to
bare copies, reads and products.

Trace-driven runs of a model of 8 layers x 16 experts with 4.5 MiB each (float32, top-4,
made-up routing with a taste), and between them, in the same process, the same
operations in a bare loop: the very copies of the run before, slot by slot, its direct
reads of the same store in their order, and products with raw torch calls. A machine
with neighbours is faster in one second than in the next, so short runs and bare loops
take turns, and which of both begins a turn is drawn. How much one bare loop differs
from the one before is printed beside, for no comparison is better than that. Reads are
compared twice: with a loop that has the machine to itself, and with one beside which
another thread computes products, as in a run. Run it on a quiet machine: `python -m
benchmarks.runtime_overhead`.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from moesim.runs.machine import machine_profile, open_random_store
from moesim.runs.measured import run_trace
from moesim.runtime.executor.device import HostDevice
from moesim.runtime.executor.trace_driven import shape_for
from moesim.runtime.store.memory import HostSlots
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.schema import ModelShape, Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moesim.runtime.store.store import ExpertStore

SHAPE = ModelShape(
    name="bench",
    layers=8,
    experts=16,
    top_k=4,
    hidden=1024,
    expert_intermediate=384,
    expert_bytes=(3 * 1024 * 384 * 4,) * 8,
    other_bytes=1 << 20,
    heads=8,
    kv_heads=2,
    head_dim=64,
    dtype="f32",
)
TOKENS = 60
POLICIES = ("all-cpu", "on-demand", "greedy", "beam", "ilp")
SLOTS = 4
TURNS = 16
TURN_TOKENS = 12


class Link(NamedTuple):
    """One kind of operation: the run that does it, the bare loop of the same, and the
    share that is wanted.
    """

    policy: str
    lane: str
    kind: str
    wanted: float
    bare: Callable[[ExpertStore, Any, list[tuple[int, int]]], float]
    host_slots: int | None = None


def figures(folder: Path) -> dict[str, Any]:
    """Measure everything, on one thread, in this process."""
    profile = machine_profile(None)
    trace = made_up_trace(folder / "bench.parquet", TOKENS)
    short = made_up_trace(folder / "short.parquet", TURN_TOKENS)
    found: dict[str, Any] = {
        "profile": profile.name,
        "planning_share": {},
        "planning_us": {},
        "links": {},
    }
    with open_random_store(
        shape_for(SHAPE, None), folder / "store", "float32"
    ) as store:
        for policy in POLICIES:
            run = _run(trace, store, profile, policy)
            found["planning_share"][policy] = run.metrics["planning_share"]
            found["planning_us"][policy] = (
                1e6 * run.metrics["planning_s"] / run.metrics["layer_steps"]
            )
            if policy == "greedy":
                found["dispatch_us"] = _spread(run.result.dispatch_s)
                found["hand_off_us"] = _spread(run.result.hand_off_s)
                found["layer_ms"] = (
                    1e3 * run.metrics["makespan_s"] / run.metrics["layer_steps"]
                )
        for name, link in LINKS.items():
            found["links"][name] = in_turns(link, short, store, profile)
        found["direct_reads"] = store.direct
    return found


def in_turns(
    link: Link, trace: Trace, store: ExpertStore, profile: Any
) -> dict[str, list[float]]:
    """Let runs and bare loops take turns, in drawn order.

    Returns:
        By turn, ``share``: the median second of the bare loop over the run's own; and
        ``control``: that of the bare loop over the one of the turn before.
    """
    memory = (
        {}
        if link.host_slots is None
        else {"host_memory_bytes": link.host_slots * store.slot_bytes}
    )

    def a_run() -> tuple[Any, list[tuple[int, int]]]:
        with noted_copies() as copies:
            return _run(trace, store, profile, link.policy, **memory), copies

    draws = random.Random(0)
    # Neither counts: the first run names the operations, the first loop is no turn's.
    run, copies = a_run()
    bare_s = [link.bare(store, run, copies)]
    shares = []
    for _ in range(TURNS):
        run_begins = draws.random() < 0.5
        if run_begins:
            run, copies = a_run()
        bare_s.append(link.bare(store, run, copies))
        if not run_begins:
            run, copies = a_run()
        shares.append(bare_s[-1] / _median_s(run, link.lane, link.kind))
    controls = [later_s / earlier_s for earlier_s, later_s in pairwise(bare_s)]
    return {"share": shares, "control": controls}


@contextmanager
def noted_copies() -> Iterator[list[tuple[int, int]]]:
    """Note slot and source address of every copy into the host accelerator's slots."""
    copies: list[tuple[int, int]] = []
    straight = HostDevice.copy

    def noting(self: HostDevice, slot: int, record: torch.Tensor, nbytes: int) -> None:
        copies.append((slot, record.data_ptr()))
        straight(self, slot, record, nbytes)

    HostDevice.copy = noting  # type: ignore[method-assign]
    try:
        yield copies
    finally:
        HostDevice.copy = straight  # type: ignore[method-assign]


def bare_copy_s(store: ExpertStore, _run: Any, copies: list[tuple[int, int]]) -> float:
    """Median seconds of the same copies, one after the other: from the same places to
    the same places.
    """
    first = min(source for _, source in copies)
    places = [(slot, (source - first) // store.slot_bytes) for slot, source in copies]
    slots, records = (1 + max(column) for column in zip(*places, strict=True))
    with (
        HostSlots(records, store.slot_bytes) as host,
        HostSlots(slots, store.slot_bytes) as device,
    ):
        return _bare_s(
            [
                partial(device.record(slot).copy_, host.record(record))
                for slot, record in places
            ]
        )


def bare_read_s(store: ExpertStore, run: Any, _copies: list[tuple[int, int]]) -> float:
    """Median seconds of the same reads, one after the other."""
    spans = run.timeline.frame()
    reads = (
        spans[spans["kind"] == "read"]
        .sort_values("start_s")[["layer", "expert"]]
        .to_numpy()
        .tolist()
    )
    with HostSlots(24, store.slot_bytes) as host:
        return _bare_s(
            [
                partial(store.read_into, *key, host.record(i % 24))
                for i, key in enumerate(reads)
            ]
        )


def bare_read_beside_products_s(
    store: ExpertStore, run: Any, copies: list[tuple[int, int]]
) -> float:
    """The same, while another thread computes products, as one does in a run."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            bare_product_s(store, run, copies)

    neighbour = threading.Thread(target=compute)
    neighbour.start()
    try:
        return bare_read_s(store, run, copies)
    finally:
        stop.set()
        neighbour.join()


def bare_product_s(
    store: ExpertStore, _run: Any, _copies: list[tuple[int, int]]
) -> float:
    """Median seconds of one expert's products for one token, from memory that no cache
    holds.
    """
    count = 64
    rounds = 3
    layout = store.layout(0)
    hidden = torch.randn(1, SHAPE.hidden)
    with HostSlots(count, store.slot_bytes) as device, torch.inference_mode():
        views = [layout.views(device.record(slot)) for slot in range(count)]

        def product(weights: Any) -> None:
            gate, up = functional.linear(hidden, weights.up).chunk(2, dim=-1)
            functional.linear(functional.silu(gate) * up, weights.down)

        return _bare_s([partial(product, weights) for weights in views * rounds])


LINKS = {
    "copies": Link("on-demand", "h2d0", "fetch", 0.85, bare_copy_s),
    "reads": Link("on-demand", "ssd", "read", 0.85, bare_read_s, host_slots=24),
    "reads, products beside": Link(
        "on-demand", "ssd", "read", 0.9, bare_read_beside_products_s, host_slots=24
    ),
    "products, accelerator": Link("on-demand", "gpu0", "compute", 0.9, bare_product_s),
    "products, CPU lane": Link("all-cpu", "cpu", "compute", 0.9, bare_product_s),
}


def _bare_s(work: list[Callable[[], Any]]) -> float:
    """Median seconds of each of some operations, on one thread."""
    torch.set_num_threads(1)
    times = []
    for one in work:
        begin_s = time.perf_counter()
        one()
        times.append(time.perf_counter() - begin_s)
    return float(np.median(times))


def made_up_trace(path: Path, tokens: int) -> Trace:
    """Decode steps of one sequence whose experts have favourites."""
    rng = np.random.default_rng(0)
    rows = tokens * SHAPE.layers
    taste = np.tile(rng.normal(size=(SHAPE.layers, SHAPE.experts)), (tokens, 1))
    experts = np.argsort(-(taste + rng.normal(size=taste.shape)), axis=1)[
        :, : SHAPE.top_k
    ]
    with TraceWriter(path, TraceHeader(SHAPE, {"tool": "benchmark"})) as writer:
        position = np.repeat(np.arange(tokens), SHAPE.layers)
        layer = np.tile(np.arange(SHAPE.layers), tokens)
        writer.write(0, position, np.full(rows, Phase.DECODE), layer, experts)
    return open_trace(path)


def _run(
    trace: Trace, store: ExpertStore, profile: Any, policy: str, **memory: Any
) -> Any:
    sizes = {"slots_per_layer": SLOTS, **memory}
    return run_trace(trace, policy, store=store, dtype="float32", hw=profile, **sizes)


def _median_s(run: Any, lane: str, kind: str) -> float:
    spans = run.timeline.frame()
    spans = spans[(spans["lane"] == lane) & (spans["kind"] == kind)]
    return float((spans["end_s"] - spans["start_s"]).median())


def _spread(seconds: np.ndarray) -> dict[str, float]:
    known = 1e6 * seconds[~np.isnan(seconds)]
    return {"median": float(np.median(known)), "p99": float(np.percentile(known, 99))}


def report() -> None:
    """Print the figures as ratios."""
    with tempfile.TemporaryDirectory() as folder:
        found = figures(Path(folder))
    print(
        f"runtime, profile {found['profile']}, one layer {found['layer_ms']:.2f} ms"
        " under greedy"
    )
    for name in ("dispatch_us", "hand_off_us"):
        spread = found[name]
        words = name[:-3].replace("_", "-")
        print(
            f"  {words} per layer: median {spread['median']:.0f} us, p99"
            f" {spread['p99']:.0f} us"
        )
    for policy, share in found["planning_share"].items():
        print(
            f"  planning, {policy}: {100 * share:.1f} % of the run,"
            f" {found['planning_us'][policy]:.0f} us per layer"
        )
    for name, turns in found["links"].items():
        share, control = (_quartiles(turns[key]) for key in ("share", "control"))
        print(
            f"  {name} against a bare loop: {share[1]:.0f} % (wanted:"
            f" {100 * LINKS[name].wanted:.0f} %); half of {TURNS} turns {share[0]:.0f}"
            f" to {share[2]:.0f} %, bare loop against bare loop {control[0]:.0f} to"
            f" {control[2]:.0f} %"
        )
    print(f"  direct reads: {found['direct_reads']}")


def _quartiles(shares: list[float]) -> np.ndarray:
    """Lower quartile, median and upper quartile, in per cent."""
    return np.percentile(100 * np.array(shares), (25, 50, 75))


if __name__ == "__main__":
    report()
