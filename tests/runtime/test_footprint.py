"""A run needs no more memory than its parts: what the kernel saw, held against their
sum; and lets go of all of it.
"""

import gc
import weakref
from dataclasses import replace

import psutil
import pytest
from support.real_machine import host_profile, real_run
from support.small_trace import write_trace

from moesim.runs import live
from moesim.runtime.models.offloaded import OffloadedModel
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import ModelShape
from moesim.traces.models import model_shape

MIB = 1 << 20
SMALL = ModelShape(
    "s", 1, 2, 1, hidden=2, expert_intermediate=2, expert_bytes=(48,), other_bytes=1,
    heads=1, kv_heads=1, head_dim=2, vocab=3, dtype="f32",
)  # fmt: skip


@pytest.fixture(scope="module")
def routing(tmp_path_factory):
    """48 layers of 128 experts, top 8, an eighth as wide as a 30B model; six prompt
    tokens and three more.
    """
    place = tmp_path_factory.mktemp("trace") / "q.parquet"
    # A head that is soon drawn.
    shape = replace(model_shape("qwen3-30b-a3b/8"), heads=8, kv_heads=2, vocab=10_000)
    return open_trace(write_trace(place, shape, ((6, 3),)))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def run(routing, store, **more):
    """Experts of 288 KiB, 1.7 GiB in all, 48 MiB of them in host memory."""
    sizes = {"slots_per_layer": 4, "host_memory_bytes": 48 * MIB}
    return real_run(routing, "greedy", store, memory=sizes, distinct=64, **more)


FIRST_USE_BYTES = 128 * MIB
"""By what torch's code and heaps may grow in a process's first run."""


def test_a_run_of_a_30b_shape_takes_its_slots_and_its_dense_weights(routing, store):
    """Experts of 288 KiB, 1.7 GiB in all, 48 MiB of them in host memory."""
    before = resident()
    sizes = {"slots_per_layer": 4, "host_memory_bytes": 48 * MIB}
    found = real_run(routing, "greedy", store, memory=sizes, distinct=64)
    dense = found.startup["dense_bytes"]
    assert dense > 48 * 2 * 256 * 128 * (8 + 2) * 4
    each = 288 * 1024
    experts = 48 * MIB // each * each + (48 * 4 + 2) * each
    parts = before + dense + experts
    assert parts <= found.peak_bytes <= parts + 32 * MIB + FIRST_USE_BYTES
    assert found.to_json()["memory"] == {"peak_bytes": found.peak_bytes}


@pytest.fixture
def uncollected():
    """No garbage collector comes by: what holds itself in a circle stays."""
    gc.disable()
    yield
    gc.enable()


def resident():
    return psutil.Process().memory_info().rss


def test_ten_runs_leave_the_memory_that_they_took(tmp_path, uncollected):
    """Each has dense weights of 24 MiB, the words of a vocabulary."""
    shape = replace(
        SMALL, experts=4, hidden=64, expert_bytes=(1536,), head_dim=32, vocab=100_000
    )
    trace = open_trace(write_trace(tmp_path / "t.parquet", shape, ((1, 2),)))

    def once():
        sizes = {"slots_per_layer": 1}
        return real_run(trace, "greedy", tmp_path / "s", memory=sizes)

    # What libraries make at their first calls stays.
    once()
    gc.collect()
    before = resident()
    for _ in range(10):
        assert once().startup["dense_bytes"] > 24 * MIB
    assert resident() - before < 5 * MIB


def test_a_live_run_lets_its_model_go(tmp_path, uncollected, monkeypatch):
    loaded = []

    def noted(*arguments, load=OffloadedModel.load, **named):
        offloaded = load(*arguments, **named)
        loaded.append(weakref.ref(offloaded.model))
        return offloaded

    monkeypatch.setattr(OffloadedModel, "load", noted)
    options = {"hw": host_profile(), "store": tmp_path / "s", "new_tokens": 1}
    # A library keeps the frames of its first call in an exception.
    for _ in range(2):
        assert live.run_live("tiny", ["The cat"], "greedy", **options).tokens
    assert loaded[1]() is None
