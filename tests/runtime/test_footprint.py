"""A run needs no more memory than its budget says: what the kernel saw, held against
the sum of the parts.
"""

import gc
import weakref
from dataclasses import replace

import psutil
import pytest
import torch
from support.real_machine import host_profile, real_run
from support.small_trace import write_trace

from moesim.runs import live
from moesim.runtime.executor.trace_driven import (
    FIRST_USE_BYTES,
    Footprint,
    ForcedRouting,
)
from moesim.runtime.models.dense import DenseStack
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


def test_a_run_of_a_30b_shape_stays_within_its_budget(routing, store):
    found = run(routing, store)
    took = found.footprint
    each = 288 * 1024
    assert took.host_slots == 48 * MIB // each * each
    assert took.device_slots == (48 * 4 + 2) * each
    assert took.dense == found.startup["dense_bytes"] > 48 * 2 * 256 * 128 * (8 + 2) * 4
    assert took.kept == 48 * 2 * 2 * 9 * 128 * 4, (
        "layers, keys and values, heads, positions, width, bytes"
    )
    assert took.before + took.host_slots + took.device_slots <= took.peak, (
        "shelves are written, so they are there"
    )
    assert took.peak <= took.budget, "and nothing else is held"
    assert took.peak == pytest.approx(took.budget, rel=0.02), "the bill is no guess"
    assert found.to_json()["memory"]["budget_bytes"] == took.budget
    assert not any("budget" in warning for warning in found.warnings)


def test_a_run_that_takes_more_is_told_so(routing, store, monkeypatch):
    """Somebody holds on to twice what may come on top in the middle of the run."""
    hoard = []
    straight = ForcedRouting._experts

    def greedy(self, *given):
        if not hoard:
            hoard.append(torch.ones(2 * FIRST_USE_BYTES, dtype=torch.uint8))
        return straight(self, *given)

    monkeypatch.setattr(ForcedRouting, "_experts", greedy)
    found = run(routing, store, steps=1)
    assert found.footprint.exceeds
    assert "memory: the run took more than its budget" in found.warnings


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
        assert once().footprint.dense > 24 * MIB
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


def test_what_a_step_computes_with_grows_with_its_tokens():
    """By hand: width 2, one head of 2, no shared expert, 3 words, float32. A token has 6
    hidden states of 2 and twice queries, keys, values, and what was attended.
    """
    dense = DenseStack(SMALL, torch.float32, torch.device("cpu"))
    per_token = 6 * 2 + 2 * (3 * 2 + 2 * 2)
    assert dense.working_bytes(5, 9, 2) == 4 * (5 * per_token + 2 * 3)
    assert dense.working_bytes(50, 9, 2) > 9 * dense.working_bytes(5, 9, 2)


def test_a_budget_is_the_sum_of_its_parts():
    took = Footprint(
        before=1, dense=2, kept=4, host_slots=8, device_slots=16, working=32, peak=50
    )
    assert took.budget == 63
    assert took.to_json()["peak_bytes"] == 50
