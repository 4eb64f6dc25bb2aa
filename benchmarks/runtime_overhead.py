"""What the runtime itself costs: dispatch, planning, and how near its lanes come to bare copies, reads and products.

Trace-driven runs of a model of 8 layers x 16 experts with 4.5 MiB each (float32, top-4, made-up routing with a taste),
and beside them, in the same process, the same operations in a bare loop: copies between two memories, direct reads of
the same store, products with raw torch calls. Run it on a quiet machine: `python -m benchmarks.runtime_overhead`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from moesim import api
from moesim.runs import machine_profile, open_random_store, run_trace
from runtime.memory import HostTier
from runtime.tracedriven import shape_for
from traces.reader import Trace, open_trace
from traces.schema import ModelShape, Phase, TraceHeader
from traces.writer import TraceWriter

if TYPE_CHECKING:
    from runtime.store import ExpertStore

SHAPE = ModelShape(
    name="bench", layers=8, experts=16, top_k=4, hidden=1024, expert_intermediate=384,
    expert_bytes=(3 * 1024 * 384 * 4,) * 8, other_bytes=1 << 20, heads=8, kv_heads=2, head_dim=64, dtype="f32",
)  # fmt: skip
TOKENS = 60
POLICIES = ("all-cpu", "on-demand", "greedy", "beam", "ilp")
SLOTS = 4


def figures(folder: Path) -> dict[str, Any]:
    """Measure everything; shares are of a bare loop's median, on one thread, in this process."""
    profile = machine_profile(None)
    trace = made_up_trace(folder / "bench.parquet")
    found: dict[str, Any] = {"profile": profile.name, "planning_share": {}, "planning_us": {}}
    with open_random_store(shape_for(SHAPE, None), folder / "store", "float32") as store:
        bare = bare_loops(store)
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
                found[f"{lane}_compute_share"] = bare["product_s"] / _median_s(run, lane, "compute")
            if policy == "on-demand":
                found["h2d0_bandwidth_share"] = bare["copy_s"] / _median_s(run, "h2d0", "fetch")
        cold = _run(trace, store, profile, "on-demand", host_memory_bytes=24 * store.slot_bytes)
        found["ssd_bandwidth_share"] = bare["read_s"] / _median_s(cold, "ssd", "read")
        found["direct_reads"] = store.direct
        again = bare_loops(store)
        found["bare_drift"] = {name: again[name] / bare[name] for name in bare}
        found["bare"] = bare
    return found


def bare_loops(store: ExpertStore, rounds: int = 3) -> dict[str, float]:
    """Median seconds of one product, one copy and one read of an expert, from memory that no cache holds."""
    torch.set_num_threads(1)
    layout = store.layout(0)
    count = 64
    hidden = torch.randn(1, SHAPE.hidden)
    with HostTier(count, store.slot_bytes) as host, HostTier(count, store.slot_bytes) as device, torch.inference_mode():
        times: dict[str, list[float]] = {"read_s": [], "copy_s": [], "product_s": []}
        for _ in range(rounds):
            for slot in range(count):
                begin = time.perf_counter()
                store.read_into(slot % SHAPE.layers, slot // SHAPE.layers, host.record(slot))
                times["read_s"].append(time.perf_counter() - begin)
            for slot in range(count):
                begin = time.perf_counter()
                device.record(slot).copy_(host.record(slot))
                times["copy_s"].append(time.perf_counter() - begin)
            views = [layout.views(device.record(slot)) for slot in range(count)]
            for weights in views:
                begin = time.perf_counter()
                gate, up = functional.linear(hidden, weights.up).chunk(2, dim=-1)
                functional.linear(functional.silu(gate) * up, weights.down)
                times["product_s"].append(time.perf_counter() - begin)
    return {name: float(np.median(values[count:])) for name, values in times.items()}


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
    drift = ", ".join(f"{name[:-2]} {100 * (ratio - 1):+.0f} %" for name, ratio in found["bare_drift"].items())
    print(f"  direct reads: {found['direct_reads']}; bare loops drifted meanwhile: {drift}")


if __name__ == "__main__":
    report()
