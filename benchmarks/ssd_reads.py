"""What else decides how long a direct read takes: the memory it lands in, and where the
thread that asks for it wakes.

A disk takes a request in pieces, one for each run of neighbouring physical pages, and
bounds their number. So the same experts are read into three kinds of memory, twice
each, for no two allocations get the same pages. And the scheduler may wake the reading
thread on a core that is busy with products; so runs through the executor are timed from
the end of planning to the start of a layer's first read, with the reader left to the
scheduler and beside the device's worker.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.runtime_overhead import SHAPE, SLOTS, TOKENS, made_up_trace
from moesim.runs.machine import machine_profile, open_random_store
from moesim.runs.measured import run_trace
from moesim.runtime.executor.trace_driven import shape_for
from moesim.runtime.store.memory import HostSlots, Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.reader import Trace

HOST_SLOTS = 24
PASSES = 8
POLICIES = ("all-cpu", "greedy")


def shared(store: ExpertStore) -> Slots:
    """Slots in a mapping that children would share."""
    return _mapped(store, mmap.MAP_SHARED)


def private(store: ExpertStore) -> Slots:
    """Slots in a mapping of this process alone, of small pages."""
    return _mapped(store, mmap.MAP_PRIVATE)


def huge(store: ExpertStore) -> Slots:
    """Slots as the runtime has them."""
    return HostSlots(HOST_SLOTS, store.slot_bytes)


KINDS: dict[str, Callable[[ExpertStore], Slots]] = {
    "shared mapping": shared,
    "private mapping": private,
    "huge pages, as in runs": huge,
}


def _mapped(store: ExpertStore, flag: int) -> Slots:
    pages = mmap.mmap(
        -1, HOST_SLOTS * store.slot_bytes, flags=flag | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return Slots(torch.frombuffer(pages, dtype=torch.uint8).zero_(), store.slot_bytes)


def reads_s(store: ExpertStore, make: Callable[[ExpertStore], Slots]) -> np.ndarray:
    """Median seconds of a read into each slot of one allocation, float64 [slots]; other
    experts in every pass.
    """
    keys = [divmod(n, SHAPE.experts) for n in range(SHAPE.layers * SHAPE.experts)]
    taken = np.empty((PASSES, HOST_SLOTS))
    with make(store) as slots:
        for number in range(-HOST_SLOTS, taken.size):  # a first pass does not count
            begin_s = time.perf_counter()
            store.read_into(
                *keys[number % len(keys)], slots.record(number % HOST_SLOTS)
            )
            taken.flat[max(number, 0)] = time.perf_counter() - begin_s
    return np.median(taken, axis=0)


def wakes_s(
    trace: Trace,
    store: ExpertStore,
    profile: HardwareProfile,
    policy: str,
) -> np.ndarray:
    """Seconds from the end of planning to the start of the first read, of each layer
    step that reads: float64 [N].

    Host memory holds half of the experts, so that there are products to compute while
    the reader is woken.
    """
    half = sum(store.index.experts) // 2
    run = run_trace(
        trace,
        policy,
        store=store,
        dtype="float32",
        hw=profile,
        slots_per_layer=SLOTS,
        host_memory_bytes=half * store.slot_bytes,
    )
    spans = run.timeline.frame().groupby(["kind", "step", "layer"])
    planned_s = spans["end_s"].max()["plan"]
    read_s = spans["start_s"].min()["read"]
    return (read_s - planned_s).dropna().to_numpy()


def report() -> None:
    """Print milliseconds."""
    profile = machine_profile(None)
    with tempfile.TemporaryDirectory() as folder:
        trace = made_up_trace(Path(folder) / "t.parquet", TOKENS)
        with open_random_store(
            shape_for(SHAPE, None), Path(folder) / "store", "float32"
        ) as store:
            print(
                f"reads of {store.slot_bytes / 2**20:.1f} MiB into {HOST_SLOTS} slots,"
                f" direct: {store.direct}"
            )
            for kind, make in KINDS.items():
                for _ in range(2):
                    by_slot = 1e3 * reads_s(store, make)
                    print(
                        f"  {kind:<24} median {np.median(by_slot):5.2f} ms, by slot"
                        f" {by_slot.min():.2f} to {by_slot.max():.2f} ms"
                    )
            print("from the end of planning to a layer's first read")
            for policy in POLICIES:
                waits = 1e3 * wakes_s(trace, store, profile, policy)
                middle, late = np.percentile(waits, (50, 90))
                print(
                    f"  {policy:<8} median {middle:5.2f} ms, nine of ten below"
                    f" {late:.2f} ms"
                )


if __name__ == "__main__":
    report()
