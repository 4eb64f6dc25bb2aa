"""Exported files, read back by the tools they are for."""

import json
from collections import OrderedDict

import libcachesim
import pyarrow.parquet as pq
import pytest
from support import foreign_files as files
from support.imports import bring

from moesim.base.errors import TraceError
from moesim.traces.exporters import EXPORTERS, export_trace
from moesim.traces.format import layer_steps
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace
from moesim.traces.stats.trace_summary import summarise_trace
from moesim.traces.synthetic.generate import stated, synthesise


@pytest.fixture
def long_trace(tmp_path, tiny_shape, monkeypatch):
    """2,500 tokens in 5 sequences: more accesses than a block has here."""
    monkeypatch.setattr(layer_steps, "BLOCK_ACCESSES", 1 << 12)
    model = stated(tiny_shape, skew=1, reuse=0.5, new_tokens=500)
    synthesise(model, tmp_path / "t.parquet", tokens=2500)
    return open_trace(tmp_path / "t.parquet")


def requests(trace):
    """(step, layer, expert) of every access, ascending within a layer step."""
    for step in compose(trace):
        for layer in step.layers:
            yield from (
                (step.step, layer.layer, expert) for expert in layer.experts.tolist()
            )


@pytest.mark.parametrize("slots", [4, 9, 16])
def test_libcachesim_misses_what_a_list_misses(tmp_path, long_trace, slots):
    """LRU as an ordered dict; Belady by looking for the farthest next use. Both from
    the trace, not from the file.
    """
    written = export_trace(long_trace, tmp_path / "t.oracleGeneral", "oracle-general")
    keys = [layer * 8 + expert for _, layer, expert in requests(long_trace)]
    assert written == len(keys)
    for kind, misses in (
        ("LRU", lru_misses(keys, slots)),
        ("Belady", belady_misses(keys, slots)),
    ):
        layout = libcachesim.TraceType.ORACLE_GENERAL_TRACE
        reader = libcachesim.TraceReader(str(tmp_path / "t.oracleGeneral"), layout)
        ratio, _ = getattr(libcachesim, kind)(cache_size=slots << 20).process_trace(
            reader
        )
        assert round(ratio * len(keys)) == misses


def lru_misses(keys, slots):
    cache = OrderedDict()
    misses = 0
    for key in keys:
        if key not in cache:
            misses += 1
            if len(cache) == slots:
                cache.popitem(last=False)
        cache[key] = True
        cache.move_to_end(key)
    return misses


def belady_misses(keys, slots):
    later = {}
    due = [0] * len(keys)
    for number in range(len(keys) - 1, -1, -1):
        due[number] = later.get(keys[number], len(keys))
        later[keys[number]] = number
    cache = {}
    misses = 0
    for number, key in enumerate(keys):
        if key not in cache:
            misses += 1
            if len(cache) == slots:
                del cache[max(cache, key=cache.get)]
        cache[key] = due[number]
    return misses


def test_csv_comes_back_through_the_importer(tmp_path):
    _, trace = bring(files.per_token(tmp_path / "dump", files.routing()))
    written = export_trace(trace, tmp_path / "t.csv", "csv")
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[0] == "seq,pos,phase,layer,e0,e1,w0,w1"
    assert len(lines) == written + 1
    (tmp_path / "again").mkdir()
    source = (tmp_path / "t.csv").rename(tmp_path / "again" / "t.csv")
    _, again = bring(source, {"map": "experts=e*,weights=w*"})
    for one, two in zip(
        trace.sequences(("weights",)), again.sequences(("weights",)), strict=True
    ):
        for name in ("pos", "phase", "layer", "experts"):
            assert (getattr(one, name) == getattr(two, name)).all()
        assert (one.columns["weights"] == two.columns["weights"]).all()


def test_statistics_are_those_of_the_summary(tmp_path, long_trace):
    assert export_trace(long_trace, tmp_path / "s.parquet", "statistics") == 3
    table = pq.read_table(tmp_path / "s.parquet")
    expected = summarise_trace(long_trace).figures
    assert table.column("entropy_bits").to_pylist() == expected["entropy_bits"]
    assert table.column("lru_0.25").to_pylist() == expected["lru"][0.25]
    told = json.loads(table.schema.metadata[b"statistics"])
    assert (told["decode_tokens"], told["model"]) == (2500, "tiny")


def test_layouts_and_their_limits(tmp_path, make_trace, tiny_shape):
    for_caches = {"moe-cache-profile", "moe-cache-slots"}
    assert set(EXPORTERS) == {"csv", "oracle-general", "statistics"} | for_caches
    import dataclasses

    large = dataclasses.replace(tiny_shape, expert_bytes=(1 << 32,) * 3)
    for shape, layout, message in (
        (tiny_shape, "pcap", "known: csv, moe-cache-profile"),
        (large, "oracle-general", "< 4 GiB"),
    ):
        with pytest.raises(TraceError, match=message):
            export_trace(open_trace(make_trace(shape=shape)), tmp_path / "out", layout)
        assert not list(tmp_path.glob("out*"))
    with pytest.raises(TraceError, match="--cache-size: layout csv takes no such"):
        export_trace(open_trace(make_trace()), tmp_path / "o", "csv", cache_size="1GiB")
