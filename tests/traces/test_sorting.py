"""Rows in any order: sorted in memory or by DuckDB, with the same result, and nothing
left behind.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import foreign_files as files
from support.imports import bring
from typer.testing import CliRunner

from moesim import cli
from moesim.base.errors import TraceError
from moesim.traces.format import sorting
from moesim.traces.format.reader import open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape


def block(*seq, **columns):
    """Rows of these sequences; pos counts down, so that each has to be sorted."""
    pos = np.arange(len(seq), dtype=np.int32)[::-1]
    zeros = np.zeros(len(seq), np.int32)
    return {"seq": np.array(seq, np.int32), "pos": pos, "layer": zeros, **columns}


def interleaved(pieces, out):
    return list(sorting.interleaved(Path("dump"), pieces, out))


def told(blocks):
    return [(one["seq"].tolist(), one["pos"].tolist()) for one in blocks]


COLUMNS = st.sampled_from(["uint16", "int8", "float16", "float32"])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 300),
    kinds=st.lists(COLUMNS, max_size=3),
    rank=st.booleans(),
)
def test_duckdb_and_numpy_sort_alike_whatever_the_columns(
    tmp_path_factory, seed, rows, kinds, rank
):
    """Every row keeps its columns, of any type and width, in pieces of any size."""
    rng = np.random.default_rng(seed)
    keys = rng.choice(1 << 20, rows, replace=False)
    whole = {
        "seq": (keys % 5).astype(np.int32),
        "pos": (keys // 5 % 1000).astype(np.int32),
    }
    whole["layer"] = (keys // 5000).astype(np.int32)
    if rank:
        whole["rank"] = rng.permutation(rows)
    for n, kind in enumerate(kinds):
        shape = (rows, n + 1) if n else rows
        whole[f"c{n}"] = rng.integers(0, 100, shape).astype(kind)
    cuts = np.sort(rng.integers(0, rows + 1, 3))
    parts = [np.split(column, cuts) for column in whole.values()]
    pieces = [dict(zip(whole, one, strict=True)) for one in zip(*parts, strict=True)]
    order = np.lexsort([whole[name] for name in ("layer", "pos", "seq")])
    out = tmp_path_factory.mktemp("sort") / "out"
    patch = pytest.MonkeyPatch()
    for limit in (1 << 30, 0):
        patch.setattr(sorting, "IN_MEMORY_BYTES", limit)
        found = sorting.joined(interleaved(pieces, out))
        for name, column in whole.items():
            assert found[name].dtype == column.dtype, name
            assert (found[name] == column[order]).all(), name
    patch.undo()


def test_what_goes_wrong_while_reading_keeps_its_own_words(tmp_path, monkeypatch):
    monkeypatch.setattr(sorting, "IN_MEMORY_BYTES", 0)

    def pieces():
        yield block(1, 0)
        raise TraceError("row 2: pos: expected a value, found null")

    with pytest.raises(TraceError, match="row 2: pos: expected a value, found null"):
        interleaved(pieces(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_sort_without_room_is_one_line(tmp_path, monkeypatch):
    """A limit that not even one piece fits into stands for a full disk: both come as
    DuckDB's own errors.
    """
    monkeypatch.setattr(sorting, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(sorting, "MEMORY_LIMIT", "1MB")
    wide = np.zeros((4000, 512), np.float32)
    with pytest.raises(
        TraceError,
        match="out: sorting: expected room for the rows in files beside it, found",
    ) as caught:
        interleaved([block(*([1, 0] * 2000), wide=wide)] * 2, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("writer", [files.columns_long, files.moesim_unordered])
def test_an_import_out_of_memory_equals_one_in_memory(tmp_path, monkeypatch, writer):
    source = writer(tmp_path / "dump", files.routing())
    made = []
    for limit in (1 << 30, 0):
        monkeypatch.setattr(sorting, "IN_MEMORY_BYTES", limit)
        bring(source)
        made.append((tmp_path / "out.parquet").read_bytes())
    assert made[0] == made[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "out.parquet"]


def test_an_unsorted_trace_is_refused_with_the_command_that_sorts_it(tmp_path):
    """The command is run as it is named."""
    source = files.moesim_unordered(tmp_path / "t.parquet", files.routing())
    with pytest.raises(
        TraceError, match=r"row .*: order: expected rows by seq, pos, layer"
    ) as caught:
        list(open_trace(source).sequences())
    command = str(caught.value).split("`")[1]
    assert command == f"moesim trace import {source} SORTED"
    done = CliRunner().invoke(
        cli.app, command.replace("SORTED", str(tmp_path / "sorted")).split()[1:]
    )
    assert done.exit_code == 0, done.output
    trace = open_trace(tmp_path / "sorted")
    assert trace.header.calibration == {"vectors": "x"}
    assert (trace.header.split, trace.header.provenance["model"]) == (
        "calibration",
        "m",
    )
    for rows, (_, ids, *_) in zip(
        trace.sequences(("weights",)), files.routing(), strict=True
    ):
        assert (rows.experts == ids[rows.pos, rows.layer]).all()


def test_a_foreign_file_without_a_shape_says_what_to_state(tmp_path):
    source = files.llama_cpp(tmp_path / "dump", files.routing())
    with pytest.raises(
        TraceError,
        match="does not tell the sizes of its model: expected --shape, found none",
    ):
        import_trace(source, tmp_path / "out")


def test_a_shape_that_contradicts_the_header_is_refused(tmp_path):
    source = files.moesim_unordered(tmp_path / "dump", files.routing())
    shape = model_shape(files.SHAPE.replace("experts=8", "experts=16"))
    with pytest.raises(
        TraceError, match=r"shape: experts: expected 8 as in the header .*, found 16"
    ):
        import_trace(source, tmp_path / "out", shape=shape)
