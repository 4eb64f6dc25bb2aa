"""A trace survives the way to disk and back, and a bad one is named by file, row and
column.
"""

import json

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.processes import output_of

from moesim.base.errors import TraceError
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import (
    METADATA_KEY,
    OPTIONAL_COLUMNS,
    Phase,
    TraceHeader,
)
from moesim.traces.format.writer import TraceWriter


def test_optional_columns_come_back_and_only_those_asked_for(make_trace):
    trace = open_trace(make_trace(columns=OPTIONAL_COLUMNS))
    assert trace.columns == set(OPTIONAL_COLUMNS)
    (rows,) = trace.sequences(("weights", "scores", "token"))
    assert set(rows.columns) == {"weights", "scores", "token"}
    assert rows.columns["weights"].shape == (30, 2)
    assert rows.columns["scores"].dtype == np.float16
    best = np.take_along_axis(rows.columns["scores"], rows.experts.astype(int), axis=1)
    assert (best == rows.columns["weights"]).all()


def test_another_reader_reads_every_column(make_trace):
    path = make_trace(columns=OPTIONAL_COLUMNS)
    (rows,) = open_trace(path).sequences(OPTIONAL_COLUMNS)
    found = duckdb.sql(f"select * from '{path}'").fetchnumpy()
    assert found["phase"].tolist() == [Phase(code).label for code in rows.phase]
    for name, values in {
        "pos": rows.pos,
        "layer": rows.layer,
        "experts": rows.experts,
        **rows.columns,
    }.items():
        assert (np.stack(found[name].tolist()) == values).all(), name


def test_same_rows_are_same_bytes(make_trace):
    first = make_trace("a.parquet")
    second = make_trace("b.parquet")
    assert first.read_bytes() == second.read_bytes()
    assert open_trace(first).digest() == open_trace(second).digest()


def test_a_sequence_longer_than_a_row_group_is_one_sequence(tmp_path, tiny_shape):
    tokens = 30_000  # 90,000 rows of 3 layers: two row groups
    path = tmp_path / "long.parquet"
    with TraceWriter(path, TraceHeader(tiny_shape)) as writer:
        # And calls that fit neither sequences nor groups.
        for start in range(0, tokens, 7_000):
            pos = np.repeat(np.arange(start, min(start + 7_000, tokens)), 3)
            experts = np.stack([pos % 8, (pos + 1) % 8], axis=1)
            writer.write(
                0, pos, Phase.DECODE, np.tile(np.arange(3), len(pos) // 3), experts
            )
    assert pq.ParquetFile(path).num_row_groups == 2
    (rows,) = open_trace(path).sequences()
    assert len(rows.pos) == 90_000
    assert (rows.experts[:, 0] == rows.pos % 8).all()


def test_nothing_is_left_when_writing_fails(tmp_path, tiny_shape):
    path = tmp_path / "t.parquet"

    def fail_after(rows):
        with TraceWriter(path, TraceHeader(tiny_shape)) as writer:
            experts = np.array([[0, 1]] * rows).reshape(rows, 2)
            writer.write(0, 0, Phase.DECODE, np.arange(rows), experts)
            if rows:
                raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fail_after(3)
    with pytest.raises(TraceError, match="at least one row"):
        fail_after(0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("change", "message"), [
    ({"experts": np.array([[0, 8]] * 3)},
     r"row 0: experts: expected 0\.\.7, got 8"),
    ({"experts": np.array([[0, 1, 2]] * 3)},
     r"experts: expected shape \(3, 2\), got \(3, 3\)"),
    ({"weights": np.full((3, 2), 1e6)},
     r"row 0: weights\[0\]: expected a finite 16-bit float, got 1000000"),
    ({"weights": None}, "optional columns: expected weights, got none"),
])  # fmt: skip
def test_writer_refuses(tmp_path, tiny_shape, change, message):
    rows = {"seq": 0, "pos": 0, "phase": Phase.DECODE}
    rows |= {"layer": np.arange(3), "experts": np.array([[0, 1]] * 3)}
    rows["weights"] = np.ones((3, 2))
    writer = TraceWriter(tmp_path / "t.parquet", TraceHeader(tiny_shape), ["weights"])
    with pytest.raises(TraceError, match=message), writer:
        writer.write(**(rows | change))


def test_a_missing_column_names_the_policy_and_the_column(make_trace):
    trace = open_trace(make_trace(columns=("weights",)))
    with pytest.raises(
        TraceError,
        match=r"prefetch residual needs column 'pred1_res', this trace has weights",
    ):
        trace.require(("weights", "pred1_res"), "prefetch residual")


def test_not_a_trace(tmp_path, make_trace):
    good = make_trace()
    cut = tmp_path / "cut.parquet"
    text = tmp_path / "notes.txt"
    cut.write_bytes(good.read_bytes()[:-200])
    text.write_text("no Parquet here")
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"a": [1]}), foreign)
    for path, message in (
        (cut, "not a readable Parquet file"),
        (text, "not a readable Parquet file"),
        (foreign, "expected the header 'moesim'"),
        (tmp_path / "nowhere.parquet", "no such file"),
        (tmp_path, "found a folder"),
    ):
        with pytest.raises(TraceError, match=message) as caught:
            open_trace(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def damaged(path, change):
    """Rewrite a good trace after `change` has edited its columns (name -> Python
    list).
    """
    table = pq.read_table(path)
    columns = table.to_pydict()
    change(columns)
    fields = {field.name: field.type for field in table.schema}
    arrays = {
        name: pa.array(values, fields.get(name)) for name, values in columns.items()
    }
    pq.write_table(
        pa.table(arrays).replace_schema_metadata(table.schema.metadata), path
    )
    return path


def put(column, row, value):
    def change(columns):
        columns[column][row] = value

    return change


def drop(*rows):
    def change(columns):
        for values in columns.values():
            for row in sorted(rows, reverse=True):
                del values[row]

    return change


def swap(first, second):
    def change(columns):
        for values in columns.values():
            values[first], values[second] = values[second], values[first]

    return change


# The trace below has 2 prompt tokens and 2 decode tokens of 3 layers: rows 0-5 are
# prefill, 6-11 decode.
@pytest.mark.parametrize(("change", "message"), [
    (put("experts", 7, [0, 9]), r"row 7: experts: expected 0\.\.7, got 9"),
    (put("experts", 7, [3, 3]), r"row 7: experts: expected distinct ids, got \[3, 3\]"),
    (put("experts", 7, [0, 1, 2]),
     "row 7: experts: expected 2 values as in all rows, got 3"),
    (put("experts", 7, None), "row 7: experts: expected a value in every row, got null"),
    (put("weights", 4, [float("nan"), 1.0]),
     r"row 4: weights\[0\]: expected a finite 16-bit float, got nan"),
    (put("weights", 4, [-0.5, 1.0]), r"row 4: weights\[0\]: expected a number >= 0, got -0.5"),
    (put("seq", 0, -1), "row 0: seq: expected a whole number from 0, got -1"),
    (put("layer", 8, 3), r"row 8: layer: expected 0\.\.2, got 3"),
    (put("phase", 8, "warmup"),
     "row 8: phase: expected one of prefill, .*, got warmup"),
    (put("phase", 9, "prefill"),
     "row 9: phase: expected decode until the sequence ends"),
    (swap(6, 7), "row 7: order: expected rows by seq, pos, layer"),
    (drop(7), ("row 7: layer: expected layer 1 of 3 of the decode token at pos 2, got"
     " layer 2 at pos 2")),
    (put("pos", 11, 4),
     ("row 11: layer: expected layer 2 of 3 of the decode token at pos 3, got"
      " layer 2 at pos 4")),
    (drop(11), ("row 10: layer: expected layer 2 of 3 of the decode token at pos 3, got"
     " the end")),
    (drop(1, 4), ("row 0: layer: expected prompt tokens at each of 3 layers, got none at"
     " layer 1")),
    (drop(*range(12)), "found an empty trace"),
    (lambda columns: columns.pop("pos"), "column 'pos' is missing"),
])  # fmt: skip
def test_reader_names_the_place(make_trace, change, message):
    path = damaged(make_trace(sequences=((2, 2),), columns=("weights",)), change)
    with pytest.raises(TraceError, match=message) as caught:
        list(open_trace(path).sequences(("weights",)))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_damaged_column_that_nobody_reads_does_no_harm(make_trace):
    path = damaged(
        make_trace(columns=("weights",)), put("weights", 0, [float("nan")] * 2)
    )
    assert len(list(open_trace(path).sequences())) == 1


def test_a_column_of_another_type_is_refused(make_trace):
    path = make_trace()
    table = pq.read_table(path)
    text = pa.array(["x"] * len(table))
    pq.write_table(table.set_column(4, "experts", text), path)
    with pytest.raises(TraceError, match="after row 0: Failed to parse string"):
        list(open_trace(path).sequences())


@pytest.mark.parametrize(("header", "message"), [
    ("{", "Invalid JSON"),
    (json.dumps({"schema_version": 99, "shape": {}}), "expected 1, found 99"),
    (json.dumps({"schema_version": 1, "shape": {"name": "x"}}), "header 'moesim'"),
    (f'{{"schema_version": {"[" * 100_000}',
     "header 'moesim': Invalid JSON: recursion limit"),
])  # fmt: skip
def test_a_header_that_cannot_be_trusted(make_trace, header, message):
    path = make_trace()
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: header}), path)
    with pytest.raises(TraceError, match=message):
        open_trace(path)


def test_reading_never_imports_pandas_or_torch(make_trace):
    path = make_trace()
    code = (
        "import sys; from moesim.traces.format.reader import open_trace; from"
        " moesim.traces.format.batch import"
        f" compose;list(compose(open_trace({str(path)!r}))); print(sorted({{'pandas',"
        " 'torch'} & set(sys.modules)))"
    )
    assert output_of("-c", code).strip() == "[]"
