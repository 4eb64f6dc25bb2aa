"""The record of a run: nothing is lost, nothing is half-written, and Perfetto can open
it.
"""

import errno
import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import moesim
import moesim.traces
import moesim.traces.timeline.spans as tl
from moesim import traces
from moesim.base.errors import TraceError
from moesim.policies.names import ABSENT, IN_FLIGHT, RESIDENT
from moesim.traces.timeline.operations import OperationTable, Part
from moesim.traces.timeline.perfetto import write_perfetto
from moesim.traces.timeline.spans import (
    COMPUTE,
    DENSE,
    FETCH,
    KIND_NAMES,
    PLAN,
    Timeline,
)

LANES = ("cpu", "gpu0", "h2d0", "d2h0", "ssd", "control")


def record(timeline, steps=3, layers=2):
    """Two active experts per layer step, one on the CPU and one fetched to the GPU."""
    now = 0.0
    for step in range(steps):
        begun = now
        for layer in range(layers):
            timeline.span(1, DENSE, step, layer, -1, now, now + 1.0, 0)
            timeline.span(5, PLAN, step, layer, -1, now + 1.0, now + 1.5, 0)
            experts = np.array([0, 6])
            tokens = np.array([1, 1])
            states = np.array([tl.HIT, tl.MISS])
            timeline.access(step, layer, experts, tokens, np.array([0, 1]), states)
            timeline.span(2, FETCH, step, layer, 6, now + 1.5, now + 3.5, 1000 + step)
            timeline.span(0, COMPUTE, step, layer, 0, now + 1.5, now + 2.5, 0)
            timeline.span(1, COMPUTE, step, layer, 6, now + 3.5, now + 4.0, 0)
            now += 4.0
        timeline.step(step, int(step > 0), 0, 1, 1, begun, now)
    return timeline


def test_states_mean_the_same_to_planner_and_timeline():
    assert (tl.MISS, tl.DELAYED, tl.HIT) == (ABSENT, IN_FLIGHT, RESIDENT)
    names = [KIND_NAMES[kind] for kind in (tl.DENSE, tl.READ, tl.JOIN)]
    assert names == ["dense", "read", "join"]


def test_memory_and_disk_hold_the_same(tmp_path, monkeypatch):
    """Also when every step is a chunk of its own."""
    monkeypatch.setattr(tl, "CHUNK_SPANS", 10)
    monkeypatch.setattr(tl, "CHUNK_ACCESSES", 2)
    monkeypatch.setattr(tl, "CHUNK_STEPS", 1)
    inside = record(Timeline(LANES))
    with Timeline(LANES, tmp_path / "run") as outside:
        record(outside)
    loaded = Timeline.load(tmp_path / "run")
    assert loaded.lanes == LANES
    for name in ("frame", "access_frame", "step_frame"):
        expected = getattr(inside, name)()
        assert len(expected) in (30, 12, 3)
        assert expected.equals(getattr(outside, name)())
        assert expected.equals(getattr(loaded, name)())
    assert len(list(inside.chunks())) == 3
    place = {"step": 0, "layer": 0, "expert": 6}
    fetched = {"lane": "h2d0", "kind": "fetch", "bytes": 1000}
    times = {"start_s": 1.5, "end_s": 3.5}
    assert loaded.frame().iloc[2].to_dict() == place | fetched | times
    access = loaded.access_frame().iloc[1].to_dict()
    assert access == place | {"tokens": 1, "lane": "gpu0", "state": "miss"}
    assert loaded.step_frame()["phase"].tolist() == ["prefill", "decode", "decode"]


def test_files_appear_only_when_the_run_is_whole(tmp_path):
    def interrupted():
        with Timeline(LANES, tmp_path) as timeline:
            record(timeline)
            assert len(list(tmp_path.glob("*.part"))) == 3
            assert not list(tmp_path.glob("*.parquet"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_long_run_is_flushed_while_it_goes(tmp_path):
    """What waits in memory never exceeds a chunk and one step."""
    timeline = Timeline(LANES, tmp_path)
    experts = np.arange(2)
    for step in range(20):
        for layer in range(600):
            timeline.access(step, layer, experts, experts, experts, experts)
            for _ in range(10):
                timeline.span(0, COMPUTE, step, layer, 1, float(step), step + 1.0, 0)
        timeline.step(step, 1, 0, 1, 1, float(step), step + 1.0)
        assert len(timeline.spans) <= len(tl.pack_span(*[0] * 8)) * (
            tl.CHUNK_SPANS + 6_000
        )
        assert len(timeline._accesses) <= tl.CHUNK_ACCESSES + 600
    timeline.close()
    assert pq.read_metadata(tmp_path / "timeline.parquet").num_rows == 120_000
    assert pq.read_metadata(tmp_path / "accesses.parquet").num_rows == 24_000


def test_loading_something_else_is_one_line(tmp_path):
    with pytest.raises(TraceError, match=r"timeline.parquet: not a readable table"):
        Timeline.load(tmp_path)
    with Timeline(LANES, tmp_path) as timeline:
        record(timeline)
    (tmp_path / "steps.parquet").write_bytes(
        (tmp_path / "steps.parquet").read_bytes()[:100]
    )
    with pytest.raises(
        TraceError, match=r"steps.parquet: not a readable table"
    ) as caught:
        Timeline.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_operations_are_read_as_they_were_saved(tmp_path):
    table = OperationTable()
    table.add(Part(1, DENSE, 2, 3, -1, 0.5, 0.75, 1.25, 1.5, 0.25, 0.125, 7))
    table.add(Part(0, COMPUTE, 2, 3, 6, 1.5, 1.5, 2.0, 2.0))
    table.save(tmp_path)
    read = OperationTable.load(tmp_path)
    assert len(read) == 2
    for name, values in table.columns().items():
        np.testing.assert_array_equal(read.columns()[name], values)


def test_perfetto_shows_two_runs_side_by_side(tmp_path):
    path = tmp_path / "trace.json"
    simulated = record(Timeline(LANES))
    measured = record(Timeline(LANES), steps=1)
    write_perfetto(path, {"simulated": simulated, "measured": measured})
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "simulated", 2: "measured"}
    threads = [
        e["args"]["name"]
        for e in events
        if e["name"] == "thread_name" and e["pid"] == 1
    ]
    assert threads == ["forward passes", "MoE layers", *LANES]
    spans = [e for e in events if e["ph"] == "X" and "cat" in e]
    assert [sum(e["pid"] == pid for e in spans) for pid in (1, 2)] == [30, 10]
    named = {e["name"] for e in spans if e["pid"] == 2 and e["args"]["layer"] == 0}
    assert named == {"dense", "plan", "fetch L0 E6", "compute L0 E0", "compute L0 E6"}
    fetch = next(e for e in spans if e["cat"] == "fetch")
    assert (fetch["ts"], fetch["dur"], fetch["tid"]) == (1.5e6, 2e6, 1002)
    place = {"step": 0, "layer": 0, "expert": 6}
    assert fetch["args"] == place | {"kind": "fetch", "bytes": 1000}


def test_operations_that_follow_each_other_do_not_overlap_in_perfetto(tmp_path):
    """Both ends are rounded, then subtracted: a rounded length reached 1 ns into the
    next operation, and Perfetto drops what overlaps.
    """
    ends = np.cumsum(np.random.default_rng(1).uniform(1e-7, 1e-4, 5000))
    timeline = Timeline(LANES)
    for start, end in pairwise([0.0, *ends.tolist()]):
        timeline.span(0, COMPUTE, 0, 0, 1, start, end, 0)
    path = tmp_path / "t.json"
    write_perfetto(path, {"run": timeline})
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    edges = [(round(e["ts"] * 1e3), round(e["dur"] * 1e3)) for e in spans]
    assert len(edges) == 5000
    for (start, length), (following, _) in pairwise(edges):
        assert start + length == following


def test_perfetto_shows_passes_layers_hits_traffic_and_what_copies_were_for(tmp_path):
    """Of three passes with two layers each, in which one expert is fetched and used."""
    path = tmp_path / "trace.json"
    write_perfetto(path, {"run": record(Timeline(LANES))})
    events = json.loads(path.read_text())["traceEvents"]
    threads = {
        e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"
    }

    def spans(thread):
        return [e for e in events if e["ph"] == "X" and e["tid"] == threads[thread]]

    assert len(spans("forward passes")) == 3
    assert [e["args"]["layer"] for e in spans("MoE layers")] == [0, 1] * 3
    # Layers of a pass follow each other and never reach into the next.
    for layer, following in pairwise(spans("MoE layers")):
        assert layer["ts"] + layer["dur"] == pytest.approx(following["ts"])

    hits = [e for e in events if e["ph"] == "C" and e["name"] == "hit"]
    assert [e["args"]["rate"] for e in hits] == [0.5] * 3
    traffic = [e for e in events if e["ph"] == "C" and e["name"] == "h2d0"]
    # So many bytes in two seconds, then none.
    rates = [each for step in range(3) for each in ((1000 + step) / 2e9, 0.0) * 2]
    assert [e["args"]["GB/s"] for e in traffic] == pytest.approx(rates)

    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 6
    for number, begin in begins.items():
        (copy,) = [e for e in spans("h2d0") if e["ts"] == begin["ts"]]
        (use,) = [
            e
            for e in spans("gpu0")
            if e["ts"] == ends[number]["ts"] and e["cat"] == "compute"
        ]
        assert copy["args"]["expert"] == use["args"]["expert"] == 6
        assert copy["args"]["layer"] == use["args"]["layer"]


def test_perfetto_files_may_be_compressed(tmp_path):
    timelines = {"run": record(Timeline(LANES))}
    for name in ("a.json", "a.json.gz", "b.json.gz"):
        write_perfetto(tmp_path / name, timelines)
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.json").read_bytes()
    # Neither name nor time: the same run gives the same bytes.
    assert packed == (tmp_path / "b.json.gz").read_bytes()


def test_perfetto_of_an_empty_run_is_still_json(tmp_path):
    path = tmp_path / "trace.json"
    write_perfetto(path, {"nothing": Timeline(LANES)})
    assert not [
        e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"
    ]


def test_a_replay_that_keeps_nothing_says_the_same_and_holds_one_chunk(monkeypatch):
    """Metrics are folded as rows come, in small chunks or large ones: same figures to
    the last bit, no rows left, and never more than a chunk held.
    """
    how = {"prefetch": "next-gate", "cache": "lru", "batch": 4, "steps": 60}
    how["hw"] = "rtx3090-epyc7532"
    trace = Path(traces.__file__).parent / "data" / "tiny_evaluation.parquet"
    kept = moesim.replay(trace, "greedy", **how)
    rows = len(kept.timeline.frame()) + len(kept.timeline.access_frame()) + 60
    monkeypatch.setattr(tl, "CHUNK_SPANS", 400)
    monkeypatch.setattr(tl, "CHUNK_ACCESSES", 20)
    monkeypatch.setattr(tl, "CHUNK_STEPS", 3)
    held = []
    chunks = []
    keep = Timeline.take

    def watched(timeline, table, chunk):
        keep(timeline, table, chunk)
        held.append(sum(len(kept) for kept in timeline._chunks.values()))
        chunks.append(len(chunk["step"]))

    monkeypatch.setattr(Timeline, "take", watched)
    dropped = moesim.replay(trace, "greedy", **how, keep=False)
    assert {**dropped.metrics, "wall_s": 0} == {**kept.metrics, "wall_s": 0}
    assert kept.metrics["prefetched"] > 0
    assert kept.metrics["stall_s"]["gpu0"] > 0
    assert rows == sum(chunks) > 5_000
    assert max(chunks) < 2_000
    assert not any(held)
    assert dropped.timeline.frame().empty


def test_a_table_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    """Arrow closes a writer whose write failed, so its file has no room for a seal."""

    def fail(writer, *_arguments, **_options):
        writer.close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fail)
    timeline = Timeline(("cpu",), tmp_path)
    timeline.span(0, 2, 0, 0, 1, 0.0, 1.0, 0)
    with pytest.raises(OSError, match="No space left"):
        timeline.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("table", "frame_of"), [
    ("timeline", Timeline.frame),
    ("accesses", Timeline.access_frame),
    ("steps", Timeline.step_frame),
])  # fmt: skip
def test_tables_say_what_their_columns_hold_and_on_which_lanes(
    tmp_path, table, frame_of
):
    """Whether there are rows or none, in memory or in a file: codes are names, numbers
    have their stated types, and no value is missing.
    """
    coded = {"lane", "kind", "state", "phase"}
    for name, steps in (("some", 2), ("none", 0)):
        with Timeline(LANES, out_dir=tmp_path / name) as timeline:
            record(timeline, steps)
        schema = pq.read_schema(tmp_path / name / f"{table}.parquet")
        assert schema.names == list(tl.TABLES[table])
        assert json.loads(schema.metadata[tl.METADATA_KEY]) == {"lanes": list(LANES)}
        frame = frame_of(record(Timeline(LANES), steps))
        for column, dtype in tl.TABLES[table].items():
            field = schema.field(column)
            assert not field.nullable
            assert pa.types.is_dictionary(field.type) is (column in coded)
            if column in coded:
                assert frame[column].dtype == "category"
            else:
                assert field.type == pa.from_numpy_dtype(dtype)
                assert frame[column].dtype == dtype
