"""What breaks, breaks clearly: one line that says what, threads gone, nothing
half-written, the next run starts.
"""

import dataclasses
import errno
import os
import shutil
import signal
import threading

import pytest
import torch
from support.adversarial_runs import differ, expected
from support.processes import PATIENCE_S, ROOT, start
from support.real_machine import random_store, real_run
from support.small_trace import write_trace

from moesim.base.errors import RuntimeFault, StoreError
from moesim.policies import systems
from moesim.runs.config import MemoryOptions
from moesim.runtime.executor.device import HostDevice
from moesim.runtime.executor.memories import HostSlotMap
from moesim.runtime.store import memory as direct_io
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import ModelShape

torch.set_num_threads(1)

SHAPE = ModelShape("f", 2, 8, 2, 32, 16, (8192,) * 2, 1, dtype="f32")
ON_SSD = MemoryOptions(slots_per_layer=2, host_memory_bytes=5 * 8192)


@pytest.fixture
def trace(tmp_path):
    return open_trace(write_trace(tmp_path / "t.parquet", SHAPE, ((4, 30),)))


@pytest.fixture
def store(trace, tmp_path):
    with random_store(trace, tmp_path / "store") as opened:
        yield opened


def run(trace, store, policy="greedy", **more):
    return real_run(trace, policy, store, memory=ON_SSD, **more)


@pytest.fixture(autouse=True)
def no_thread_stays(trace, store):
    """After every fault: our threads are gone, and the next run works."""
    yield
    assert [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("moesim-")
    ] == []
    assert run(trace, store, steps=3).metrics["steps"] == 3


def test_a_namesake_of_another_width_has_a_store_of_its_own(
    trace, tmp_path, monkeypatch
):
    """Nobody gave these stores a place, so nobody could mend a clash of names; the
    third run finds the first's.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wider = dataclasses.replace(trace.shape, hidden=64, expert_bytes=(24576,) * 2)
    other = open_trace(write_trace(tmp_path / "w.parquet", wider, ((4, 3),)))
    places = [run(one, None, steps=3).config["store"] for one in (trace, other, trace)]
    assert places[0] == places[2] != places[1]


def after(calls, broken):
    """A system call that works so many times, then answers as `broken` does."""
    real = os.preadv
    left = [calls]

    def preadv(*arguments):
        left[0] -= 1
        return real(*arguments) if left[0] >= 0 else broken(real, *arguments)

    return preadv


def test_a_disk_that_fails_in_the_middle_of_a_run(trace, store, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(direct_io.os, "preadv", after(20, fail))
    with pytest.raises(
        RuntimeFault, match=r"experts\.bin: reading 8192 bytes .*EIO.*; check the disk"
    ):
        run(trace, store, out=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == [], (
        "no table of a run that did not end"
    )
    monkeypatch.undo()


def test_a_store_that_was_copied_is_read_whole_once(trace, store, tmp_path):
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    for read in (list(range(1, 17)), []):
        seen = []
        run(
            trace,
            tmp_path / "copy",
            steps=1,
            building=lambda done, seen=seen: seen.append(done.records),
        )
        assert seen == read


def test_a_device_that_runs_out_of_memory(trace, store, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2 GiB\nand much more text"
        )

    monkeypatch.setattr(HostDevice, "begin_compute", full)
    with pytest.raises(
        RuntimeFault,
        match=r"out of memory during the run: CUDA .* 2 GiB; ask for a smaller",
    ):
        run(trace, store, "on-demand")
    monkeypatch.undo()


LONG_RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.real_machine import host_profile
from moesim.runs import machine, measured
machine.this_machine = lambda: ("host", 2)
folder = Path(sys.argv[2])
def tell(info):
    if info.step == 3:
        print("running", flush=True)
try:
    measured.run_trace(folder / "long.parquet", "greedy", store=folder / "store", dtype="float32", hw=host_profile(),
                   slots_per_layer=2, host_memory_bytes=5 * 8192, out=folder / "out", progress=tell)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def long_run(trace, store, tmp_path):
    """A run of its own process that would take minutes, once it has begun."""
    write_trace(tmp_path / "long.parquet", SHAPE, ((4, 6_000),))
    words = ("-c", LONG_RUN, ROOT / "tests", tmp_path)
    with start(*words, environment={"OMP_NUM_THREADS": "1"}) as process:
        assert process.stdout.readline() == "running\n"
        yield process
        process.kill()


def test_ctrl_c_stops_a_run_and_leaves_nothing(long_run, tmp_path):
    """Under heavy load an interpreter takes seven seconds to leave; a run that went on
    would end with code 0.
    """
    long_run.send_signal(signal.SIGINT)
    assert long_run.wait(timeout=PATIENCE_S) == 130
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_run_leaves_no_table_that_looks_whole(
    long_run, trace, store, tmp_path
):
    long_run.kill()
    long_run.wait(timeout=PATIENCE_S)
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert left
    assert all(name.endswith(".part") for name in left)
    again = run(trace, store, out=tmp_path / "out", steps=4)
    assert again.metrics["steps"] == 4


def test_another_number_of_different_experts_is_refused(trace, store):
    """A store that is there is not built anew, nor is what was asked for ignored."""
    with pytest.raises(StoreError, match=r"5 different records \(--distinct\), found"):
        run(trace, store, distinct=5)


def test_a_device_that_cannot_begin_leaves_no_thread(trace, store, monkeypatch):
    """Workers have started by then."""

    def fail(_self, _began_s):
        raise RuntimeError("no context")

    monkeypatch.setattr(HostDevice, "begin", fail)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no context"):
        run(trace, store)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("policy", ["fiddler", "llama.cpp", "ktransformers", "krasis"])
def test_host_memory_holds_no_expert_that_the_device_keeps(
    trace, tmp_path, monkeypatch, policy
):
    """As many experts in host memory as were asked for, though the model has more; the
    answers are those of a run that holds them all.

    llama.cpp computes a layer that is resident in part on the CPU all the same.
    """
    allocated = []
    allocate = HostSlotMap.__init__

    def noting(self, *arguments, **named):
        allocate(self, *arguments, **named)
        allocated.append(self.slots.slots)

    monkeypatch.setattr(HostSlotMap, "__init__", noting)
    monkeypatch.setattr(HostSlotMap, "weights", strict(HostSlotMap.weights))
    kept = 10
    staging = systems.compose(policy).staging_slots(SHAPE) or 2
    memory = MemoryOptions(
        cache_ratio=kept / 16,
        host_memory_bytes=(16 - kept + staging) * 8192,
        cache_scope="global",
    )
    with random_store(trace, tmp_path / "s") as opened:
        answers = expected(trace, policy, store=opened, memory=memory)
        everything = expected(trace, "all-cpu", store=opened)
    assert allocated == [16 - kept, 16]
    assert not differ(answers, everything)


def strict(straight):
    """`HostSlotMap.weights` that refuses what is not there."""

    def weights(self, key):
        assert self.holds_always(key)
        return straight(self, key)

    return weights
