"""The comparison of lanes with bare loops: whom it holds against whom, and that every
link of it runs.
"""

from types import SimpleNamespace

import pytest

from benchmarks import runtime_overhead as bench
from benchmarks import ssd_reads
from moesim.hwprofiles.profile import load_profile
from moesim.runs.machine import open_random_store
from moesim.runtime.executor.trace_driven import shape_for
from moesim.traces.format.schema import ModelShape

SHAPE = ModelShape(
    "small", 2, 16, 4, 64, 32, (24576,) * 2, 1 << 20, heads=4, kv_heads=2, head_dim=16,
    dtype="f32",
)  # fmt: skip


@pytest.mark.parametrize("draw", [0.0, 0.9], ids=["run first", "loop first"])
def test_a_run_is_held_against_the_bare_loop_of_its_turn(monkeypatch, draw):
    """Loops of 3 and 4 seconds beside runs of 6 and 5, whoever begins: shares of 3/6
    and 4/5; the loops before took 2 and 3.
    """
    runs = iter((6.0, 5.0))
    loops = iter((2.0, 3.0, 4.0))
    drawn = SimpleNamespace(random=lambda: draw)
    monkeypatch.setattr(bench.random, "Random", lambda _: drawn)
    monkeypatch.setattr(bench, "TURNS", 2)
    monkeypatch.setattr(bench, "_run", lambda *_, **__: None)
    monkeypatch.setattr(bench, "_median_s", lambda *_: next(runs))
    link = bench.Link("on-demand", "ssd", "read", 0.85, lambda *_: next(loops))
    assert bench.in_turns(link, None, SimpleNamespace(slot_bytes=1), None) == {
        "share": [0.5, 0.8],
        "control": [3 / 2, 4 / 3],
    }


@pytest.mark.parametrize("name", bench.LINKS)
def test_every_link_finds_its_operations_in_its_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SHAPE", SHAPE)
    monkeypatch.setattr(bench, "TURNS", 1)
    trace = bench.made_up_trace(tmp_path / "t.parquet", 4)
    with open_random_store(shape_for(SHAPE, None), tmp_path / "s", "float32") as store:
        turns = bench.in_turns(
            bench.LINKS[name], trace, store, load_profile("two-core-host")
        )
    assert len(turns["share"]) == len(turns["control"]) == 1
    assert turns["share"][0] > 0
    assert turns["control"][0] > 0


@pytest.fixture
def small_reads(tmp_path, monkeypatch):
    """The bench of reads with small experts: its store and a short trace."""
    for module in (bench, ssd_reads):
        monkeypatch.setattr(module, "SHAPE", SHAPE)
    trace = bench.made_up_trace(tmp_path / "t.parquet", 4)
    with open_random_store(shape_for(SHAPE, None), tmp_path / "s", "float32") as store:
        yield trace, store


def test_a_reader_begins_after_the_plan_that_called_it(small_reads):
    profile = load_profile("two-core-host")
    waits_s = ssd_reads.wakes_s(*small_reads, profile, "all-cpu")
    assert len(waits_s) > 0
    assert (waits_s > 0).all()
