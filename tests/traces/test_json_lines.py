"""Lines of JSON come back as columns of stated types, to the last bit; the first line
that does not fit is named.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.base.errors import TraceError
from moesim.traces.importers.readers import tables as reader
from moesim.traces.importers.readers.tables import json_rows

ROW = {"pos": "DOUBLE", "name": "VARCHAR", "ids": ["DOUBLE"]}
COLUMNS = {name: f"line.{name}" for name in ROW}


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return tmp_path_factory.mktemp("lines") / "dump"


def pieces(path, text, structure=ROW, columns=COLUMNS, **query):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(json_rows(path, structure, columns, **query))


def columns_of(rows):
    return {name: column.to_pylist() for name, (column,) in rows.columns.items()}


def read(*args, **query):
    """The columns of a small text, which is one piece."""
    (rows,) = pieces(*args, **query)
    return columns_of(rows)


def test_blank_lines_are_left_out_and_counted(dump):
    text = '\n \t\n{"pos": 1}\r\n\n{"pos": 2}\n{"pos": 3}'
    (rows,) = pieces(dump, text)
    assert "line 5: " in str(rows.fault(1, "x", "y", 0))
    assert columns_of(rows)["pos"] == [1, 2, 3]
    (behind,) = pieces(dump, text, skip=2)
    assert columns_of(behind)["pos"] == [3]
    assert "line 6: " in str(behind.fault(0, "x", "y", 0))
    assert pieces(dump, "\n \n") == []


@pytest.mark.parametrize(
    ("odd", "reason"),
    [(odd, "a whole") for odd in ("{", '{"pos": 1}}', '{"pos": tru}', "\x00", '{"a')]
    # Half of a surrogate pair: Python takes it.
    + [('{"name": "\\ud800"}', "y"), (b'{"name": "\xff\xfe"}', "a whole")],
)
def test_a_line_that_is_not_json_is_null_and_named(dump, odd, reason):
    odd = odd if isinstance(odd, bytes) else odd.encode()
    (rows,) = pieces(dump, b'\n{"pos": 1}\n' + odd + b"\n{")
    assert columns_of(rows)["pos"] == [1, None, None]
    message = str(rows.fault(1, "pos", "y", 0)) if reason == "y" else ""
    if not message:
        with pytest.raises(TraceError) as error:
            rows.fault(1, "pos", "y", 0)
        message = str(error.value)
    assert f"dump: line 3: pos: expected {reason}" in message
    assert "\n" not in message


def test_a_line_that_is_too_long_is_refused(dump, monkeypatch):
    monkeypatch.setattr(reader, "MOST_LINE_BYTES", 1 << 20)
    # DuckDB allows more than it is told to, but not that much.
    long = b'{"pos": 1' + b" " * (40 << 20) + b"}\n"
    with pytest.raises(TraceError, match="expected JSON in lines of up to 1 MiB"):
        pieces(dump, long)


@pytest.mark.parametrize("name", ["x*y", "a[b]c", "w?z", "x.gz", "~", "pos=7/x"])
def test_a_name_is_no_pattern(tmp_path, name):
    """Of one file, whatever else DuckDB reads into names."""
    (tmp_path / "pos=7").mkdir()
    for other in ("xzy", "abc", "wyz"):
        (tmp_path / other).write_text('{"pos": 1}\n')
    assert read(tmp_path / name, '{"pos": 2}')["pos"] == [2]


def test_a_reading_that_is_left_does_not_disturb_the_next_one(dump):
    text = "".join(f'{{"pos": {pos}}}\n' for pos in range(50_000))
    dump.write_text(text)
    left = json_rows(dump, ROW, COLUMNS)
    next(left)
    assert sum(rows.length for rows in pieces(dump, text)) == 50_000


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
    columns = read(dump, "\n".join(map(json.dumps, lines)))
    assert columns["pos"] == [float(pos) for pos, *_ in rows]
    assert columns["ids"] == [[*map(float, ids)] for _, ids, _ in rows]
    texts = zip(columns["name"], rows, strict=True)
    assert all(found == name for found, (*_, name) in texts if name.isprintable())
