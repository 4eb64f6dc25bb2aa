"""What the runtime itself costs: dispatch, planning, and how near its lanes come to bare copies, reads and products.

Trace-driven runs of a model of 8 layers x 16 experts with 4.5 MiB each (float32, top-4, made-up routing with a taste),
and between them, in the same process, the same operations in a bare loop: the very copies of the run before, slot by
slot, its direct reads of the same store in their order, and products with raw torch calls. Runs and bare loops take
turns, since a disk or a neighbour's cache may be faster now than a minute ago. Run it on a quiet machine:
`python -m benchmarks.runtime_overhead`.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from moesim import api
from moesim.runs import machine_profile, open_random_store, run_trace
from runtime.host_lanes import HostDevice
from runtime.memory import HostTier
from runtime.tracedriven import shape_for
from traces.reader import Trace, open_trace
from traces.schema import ModelShape, Phase, TraceHeader
from traces.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runtime.store import ExpertStore

SHAPE = ModelShape(
    name="bench", layers=8, experts=16, top_k=4, hidden=1024, expert_intermediate=384,
    expert_bytes=(3 * 1024 * 384 * 4,) * 8, other_bytes=1 << 20, heads=8, kv_heads=2, head_dim=64, dtype="f32",
)  # fmt: skip
TOKENS = 60
POLICIES = ("all-cpu", "on-demand", "greedy", "beam", "ilp")
SLOTS = 4
TURNS = 3


def figures(folder: Path) -> dict[str, Any]:
    """Measure everything; shares are medians of bare loops over medians of runs, on one thread, in this process."""
    profile = machine_profile(None)
    trace = made_up_trace(folder / "bench.parquet")
    found: dict[str, Any] = {"profile": profile.name, "planning_share": {}, "planning_us": {}}
    with open_random_store(shape_for(SHAPE, None), folder / "store", "float32") as store:
        for policy in POLICIES:
            run = _run(trace, store, profile, policy)
            found["planning_share"][policy] = run.metrics["planning_share"]
            found["planning_us"][policy] = 1e6 * run.metrics["planning_s"] / run.metrics["layer_steps"]
            if policy == "greedy":
                found["dispatch_us"] = _spread(run.result.dispatch_s)
                found["hand_off_us"] = _spread(run.result.hand_off_s)
                found["layer_ms"] = 1e3 * run.metrics["makespan_s"] / run.metrics["layer_steps"]
            if policy in ("all-cpu", "on-demand"):
                lane = "cpu" if policy == "all-cpu" else "gpu0"
                found[f"{lane}_compute_share"] = bare_product_s(store) / _median_s(run, lane, "compute")
        shares: dict[str, list[float]] = {"h2d0_bandwidth_share": [], "ssd_bandwidth_share": []}
        for _ in range(TURNS):
            with noted_copies() as copies:
                run = _run(trace, store, profile, "on-demand")
            shares["h2d0_bandwidth_share"].append(bare_copy_s(store, copies) / _median_s(run, "h2d0", "fetch"))
            run = _run(trace, store, profile, "on-demand", host_memory_bytes=24 * store.slot_bytes)
            shares["ssd_bandwidth_share"].append(bare_read_s(store, run) / _median_s(run, "ssd", "read"))
        found |= {name: float(np.median(values)) for name, values in shares.items()}
        found["turns"] = shares
        found["direct_reads"] = store.direct
    return found


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


def bare_copy_s(store: ExpertStore, copies: list[tuple[int, int]]) -> float:
    """Median seconds of the same copies, one after the other: from the same places to the same places."""
    first = min(source for _, source in copies)
    places = [(slot, (source - first) // store.slot_bytes) for slot, source in copies]
    slots, records = (1 + max(column) for column in zip(*places, strict=True))
    with HostTier(records, store.slot_bytes) as host, HostTier(slots, store.slot_bytes) as device:
        return _bare_s([partial(device.record(slot).copy_, host.record(record)) for slot, record in places])


def bare_read_s(store: ExpertStore, run: Any) -> float:
    """Median seconds of the same reads, one after the other."""
    spans = run.timeline.frame()
    reads = spans[spans["kind"] == "read"].sort_values("start_s")[["layer", "expert"]].to_numpy().tolist()
    with HostTier(24, store.slot_bytes) as host:
        return _bare_s([partial(store.read_into, *key, host.record(i % 24)) for i, key in enumerate(reads)])


def bare_product_s(store: ExpertStore, count: int = 64, rounds: int = 3) -> float:
    """Median seconds of one expert's products for one token, from memory that no cache holds."""
    layout, hidden = store.layout(0), torch.randn(1, SHAPE.hidden)
    with HostTier(count, store.slot_bytes) as device, torch.inference_mode():
        views = [layout.views(device.record(slot)) for slot in range(count)]

        def product(weights: Any) -> None:
            gate, up = functional.linear(hidden, weights.up).chunk(2, dim=-1)
            functional.linear(functional.silu(gate) * up, weights.down)

        return _bare_s([partial(product, weights) for weights in views * rounds])


def _bare_s(work: list[Callable[[], Any]]) -> float:
    """Median seconds of each of some operations, on one thread."""
    torch.set_num_threads(1)
    times = []
    for one in work:
        begin_s = time.perf_counter()
        one()
        times.append(time.perf_counter() - begin_s)
    return float(np.median(times))


def made_up_trace(path: Path) -> Trace:
    """Decode steps of one sequence whose experts have favourites."""
    rng = np.random.default_rng(0)
    rows = TOKENS * SHAPE.layers
    taste = np.tile(rng.normal(size=(SHAPE.layers, SHAPE.experts)), (TOKENS, 1))
    experts = np.argsort(-(taste + rng.normal(size=taste.shape)), axis=1)[:, : SHAPE.top_k]
    with TraceWriter(path, TraceHeader(SHAPE, {"tool": "benchmark"})) as writer:
        position, layer = np.repeat(np.arange(TOKENS), SHAPE.layers), np.tile(np.arange(SHAPE.layers), TOKENS)
        writer.write(0, position, np.full(rows, Phase.DECODE), layer, experts)
    return open_trace(path)


def _run(trace: Trace, store: ExpertStore, profile: Any, policy: str, **memory: Any) -> Any:
    options = api.MemoryOptions(slots_per_layer=SLOTS, **memory)
    return run_trace(trace, policy, store=store, dtype="float32", hw=profile, memory=options)


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
    print(f"runtime, profile {found['profile']}, one layer {found['layer_ms']:.2f} ms under greedy")
    for name in ("dispatch_us", "hand_off_us"):
        spread, words = found[name], name[:-3].replace("_", "-")
        print(f"  {words} per layer: median {spread['median']:.0f} us, p99 {spread['p99']:.0f} us")
    for policy, share in found["planning_share"].items():
        print(f"  planning, {policy}: {100 * share:.1f} % of the run, {found['planning_us'][policy]:.0f} us per layer")
    for name, wanted in (
        ("h2d0_bandwidth_share", 0.85),
        ("ssd_bandwidth_share", 0.85),
        ("gpu0_compute_share", 0.9),
        ("cpu_compute_share", 0.9),
    ):
        print(f"  {name.replace('_', ' ')} of a bare loop: {100 * found[name]:.0f} % (wanted: {100 * wanted:.0f} %)")
    turns = "; ".join(
        f"{name.split('_')[0]} {', '.join(f'{100 * one:.0f}' for one in values)} %"
        for name, values in found["turns"].items()
    )
    print(f"  direct reads: {found['direct_reads']}; bandwidth shares turn by turn: {turns}")


if __name__ == "__main__":
    report()
