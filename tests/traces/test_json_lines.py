"""Lines of JSON come back as columns of stated types, to the last bit; the first line
that does not fit is named.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.base.errors import TraceError
from moesim.traces.format.parquet import values
from moesim.traces.importers.readers import json_lines as reader
from moesim.traces.importers.readers.json_lines import (
    items_of,
    json_lines,
    lengths_of,
)
from moesim.traces.importers.readers.tables import is_null

ROW = {"pos": "DOUBLE", "name": "VARCHAR", "ids": ["DOUBLE"]}


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return tmp_path_factory.mktemp("lines") / "dump"


def pieces(path, text, structure=ROW, skip=0):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(json_lines(path, structure, skip))


def read(*args):
    """The lines of a small text, which is one piece."""
    (lines,) = pieces(*args)
    return lines


def test_two_lines_by_hand(dump):
    text = '{"pos": 3, "ids": [1, 2], "name": "a"}\n{"ids": [], "pos": -0.5}'
    (in_memory,) = json_lines(dump, ROW, held=text.encode().splitlines())
    for lines in (read(dump, text), in_memory):
        columns = lines.columns
        assert columns["pos"].to_pylist() == [3.0, -0.5]
        assert columns["name"].to_pylist() == ["a", None]
        assert lengths_of(columns["ids"]).tolist() == [2, 0]
        assert values(items_of(columns["ids"])).tolist() == [1, 2]
        assert "line 2: x: expected y, found {" in str(lines.fault(1, "x", "y"))


def test_blank_lines_are_left_out_and_counted(dump):
    text = '\n \t\n{"pos": 1}\r\n\n{"pos": 2}\n{"pos": 3}'
    lines = read(dump, text)
    assert "line 5: " in str(lines.fault(1, "", "y"))
    assert lines.columns["pos"].to_pylist() == [1, 2, 3]
    behind = read(dump, text, ROW, 2)
    assert behind.columns["pos"].to_pylist() == [3]
    assert "line 6: " in str(behind.fault(0, "", "y"))
    assert pieces(dump, "\n \n") == []


def test_another_kind_is_null_and_a_number_in_quotes_is_a_number(dump):
    lines = read(dump, '{"pos": [1]}\n{"pos": "x"}\n5\n{"pos": null}\n{"pos": "7"}')
    assert is_null(lines.columns["pos"]).tolist() == [True] * 4 + [False]
    assert lines.columns["pos"][4].as_py() == 7


@pytest.mark.parametrize("odd", ["{", '{"pos": 1}}', '{"pos": tru}', "\x00", '{"a'])
def test_the_first_line_that_is_not_json_is_named(dump, odd):
    text = f'\n{{"pos": 1}}\n{odd}\n{{'
    with pytest.raises(TraceError, match="dump: line 3: expected a whole") as error:
        pieces(dump, text)
    assert "\n" not in str(error.value)


def test_bytes_that_duckdb_does_not_take_are_named(dump):
    with pytest.raises(TraceError, match="line 1: expected a whole"):
        pieces(dump, b'{"name": "\xff\xfe"}')
    # Half of a surrogate pair: Python takes it.
    with pytest.raises(TraceError, match="line 2: expected JSON of the layout"):
        pieces(dump, '{"name": "a"}\n{"name": "\\ud800"}')


def test_a_line_that_is_too_long_is_refused(dump, monkeypatch):
    monkeypatch.setattr(reader, "MOST_LINE_BYTES", 1 << 20)
    # DuckDB allows more than it is told to, but not that much.
    long = b'{"pos": 1' + b" " * (40 << 20) + b"}\n"
    with pytest.raises(TraceError, match="expected JSON in lines of up to 1 MiB"):
        pieces(dump, long)


def test_quotes_in_a_structure_are_no_end_of_it(dump):
    lines = read(dump, '{"a\'b": 4, "c\\"d": 5}', {"a'b": "DOUBLE", 'c"d': "DOUBLE"})
    columns = lines.columns
    assert [columns[name].to_pylist() for name in ("a'b", 'c"d')] == [[4], [5]]


@pytest.mark.parametrize("name", ["x*y", "a[b]c", "w?z", "x.gz", "~", "pos=7/x"])
def test_a_name_is_no_pattern(tmp_path, name):
    """Of one file, whatever else DuckDB reads into names."""
    (tmp_path / "pos=7").mkdir()
    for other in ("xzy", "abc", "wyz"):
        (tmp_path / other).write_text('{"pos": 1}\n')
    assert read(tmp_path / name, '{"pos": 2}').columns["pos"][0].as_py() == 2


def test_a_reading_that_is_left_does_not_disturb_the_next_one(dump):
    text = "".join(f'{{"pos": {pos}}}\n' for pos in range(5000))
    dump.write_text(text)
    left = json_lines(dump, ROW)
    next(left)
    assert sum(len(piece.values) for piece in pieces(dump, text)) == 5000


ANY_NUMBER = st.floats(allow_nan=False, allow_infinity=False) | st.integers(
    -(10**15), 10**15
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(ANY_NUMBER, st.lists(ANY_NUMBER, max_size=5), st.text()), min_size=1
    )
)
def test_what_python_reads_comes_back_to_the_last_bit(dump, rows):
    """Numbers, lists and strings, as `json` writes them."""
    lines = [dict(zip(("pos", "ids", "name"), row, strict=True)) for row in rows]
    columns = read(dump, "\n".join(map(json.dumps, lines))).columns
    assert columns["pos"].to_pylist() == [float(pos) for pos, *_ in rows]
    assert columns["ids"].to_pylist() == [[*map(float, ids)] for _, ids, _ in rows]
    texts = zip(columns["name"].to_pylist(), rows, strict=True)
    assert all(found == name for found, (*_, name) in texts if name.isprintable())
