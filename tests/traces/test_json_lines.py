"""Lines of JSON come back as columns of stated types, to the last bit; the first line
that does not fit is named.
"""

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.base.errors import TraceError
from moesim.traces.format.parquet import numbers, values
from moesim.traces.importers.readers import json_lines, jsonl_layouts
from moesim.traces.importers.readers.json_lines import (
    JsonLinesReader,
    columns_of,
    is_null,
    list_lengths,
    list_values,
    whole_numbers,
)

ROW = {"pos": "DOUBLE", "name": "VARCHAR", "ids": ["DOUBLE"]}


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return tmp_path_factory.mktemp("lines") / "dump"


def pieces(path, text, structure=ROW, skip=0):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(JsonLinesReader(structure).read(path, skip))


def read(*args):
    """The lines of a small text, which is one piece."""
    (lines,) = pieces(*args)
    return lines


def test_two_lines_by_hand(dump):
    text = '{"pos": 3, "ids": [1, 2], "name": "a"}\n{"ids": [], "pos": -0.5}'
    in_memory = JsonLinesReader(ROW).parse(dump, text.encode().splitlines())
    for lines in (read(dump, text), in_memory):
        columns = columns_of(lines.values)
        assert columns["pos"].to_pylist() == [3.0, -0.5]
        assert columns["name"].to_pylist() == ["a", None]
        assert list_lengths(columns["ids"]).tolist() == [2, 0]
        assert values(list_values(columns["ids"])).tolist() == [1, 2]
        assert lines.parsed(1) == {"ids": [], "pos": -0.5}
        assert [lines.number(line) for line in range(2)] == [1, 2]


def test_blank_lines_are_left_out_and_counted(dump):
    text = '\n \t\n{"pos": 1}\r\n\n{"pos": 2}\n{"pos": 3}'
    lines = read(dump, text)
    assert [lines.number(line) for line in range(3)] == [3, 5, 6]
    assert columns_of(lines.values)["pos"].to_pylist() == [1, 2, 3]

    behind = read(dump, text, ROW, 2)
    assert columns_of(behind.values)["pos"].to_pylist() == [3]
    assert behind.number(0) == 6
    assert behind.parsed(0) == {"pos": 3}


def test_a_text_of_blank_lines_has_none(dump):
    assert pieces(dump, "\n \n") == []


def test_another_kind_is_null_and_a_number_in_quotes_is_a_number(dump):
    lines = read(dump, '{"pos": [1]}\n{"pos": "x"}\n5\n{"pos": null}\n{"pos": "7"}')
    assert is_null(columns_of(lines.values)["pos"]).tolist() == [True] * 4 + [False]
    assert columns_of(lines.values)["pos"][4].as_py() == 7


@pytest.mark.parametrize("odd", ["{", '{"pos": 1}}', '{"pos": tru}', "\x00", '{"a'])
def test_the_first_line_that_is_not_json_is_named(dump, odd):
    text = f'\n{{"pos": 1}}\n{odd}\n{{'
    with pytest.raises(TraceError, match="dump: line 3: expected a whole") as error:
        pieces(dump, text)
    assert "\n" not in str(error.value)
    with pytest.raises(TraceError, match="dump: line 2: expected a whole"):
        JsonLinesReader(ROW).parse(dump, text.encode().split(b"\n")[1:])


def test_bytes_that_are_no_text_are_named(dump):
    with pytest.raises(TraceError, match="line 1: expected a whole"):
        pieces(dump, b'{"name": "\xff\xfe"}')


def test_half_of_a_surrogate_pair_is_named(dump):
    """Python takes it, DuckDB does not."""
    with pytest.raises(TraceError, match="line 2: expected JSON that can be read"):
        pieces(dump, '{"name": "a"}\n{"name": "\\ud800"}')


def test_a_line_that_is_too_long_is_refused(dump, monkeypatch):
    monkeypatch.setattr(json_lines, "MOST_LINE_BYTES", 1 << 20)
    # DuckDB allows more than it is told to, but not that much.
    long = b'{"pos": 1' + b" " * (40 << 20) + b"}\n"
    with pytest.raises(TraceError, match="expected JSON in lines of up to 1 MiB"):
        pieces(dump, long)


def test_quotes_in_a_structure_are_no_end_of_it(dump):
    lines = read(dump, '{"a\'b": 4, "c\\"d": 5}', {"a'b": "DOUBLE", 'c"d': "DOUBLE"})
    columns = columns_of(lines.values)
    assert [columns[name].to_pylist() for name in ("a'b", 'c"d')] == [[4], [5]]


@pytest.mark.parametrize("name", ["x*y", "a[b]c", "w?z", "x.gz", "~", "pos=7/x"])
def test_a_name_is_no_pattern(tmp_path, name):
    """Of one file, whatever else DuckDB reads into names."""
    (tmp_path / "pos=7").mkdir()
    for other in ("xzy", "abc", "wyz"):
        (tmp_path / other).write_text('{"pos": 1}\n')
    assert columns_of(read(tmp_path / name, '{"pos": 2}').values)["pos"][0].as_py() == 2


def test_a_reading_that_is_left_does_not_disturb_the_next_one(dump):
    text = "".join(f'{{"pos": {pos}}}\n' for pos in range(5000))
    dump.write_text(text)
    left = JsonLinesReader(ROW).read(dump)
    next(left)
    assert sum(len(piece.values) for piece in pieces(dump, text)) == 5000


ANY_NUMBER = st.floats(allow_nan=False, allow_infinity=False) | st.integers(
    -(10**15), 10**15
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(ANY_NUMBER, st.lists(ANY_NUMBER, max_size=5), st.text()), min_size=1
    )
)
def test_what_python_reads_comes_back_to_the_last_bit(dump, rows):
    """Numbers, lists and strings, as `json` writes them."""
    lines = read(
        dump,
        "\n".join(
            json.dumps({"pos": pos, "ids": ids, "name": name})
            for pos, ids, name in rows
        ),
    )
    columns = columns_of(lines.values)
    assert columns["pos"].to_pylist() == [float(pos) for pos, *_ in rows]
    assert columns["ids"].to_pylist() == [[*map(float, ids)] for _, ids, _ in rows]
    texts = zip(columns["name"].to_pylist(), rows, strict=True)
    assert all(found == name for found, (*_, name) in texts if name.isprintable())


@pytest.mark.parametrize(("cells", "fault"), [
    ([0, 1, 65_535], -1),
    ([0, 0.5], 1),
    ([-1, 0], 0),
    ([3, 65_536], 1),
    ([math.nan], 0),
    ([math.inf], 0),
    ([], -1),
])  # fmt: skip
def test_whole_numbers_or_the_place_of_the_first_that_is_none(cells, fault):
    found, place = whole_numbers(numbers(np.array(cells, np.float64)), 1 << 16)
    assert place == fault
    assert found.tolist() == (cells if fault < 0 else [])


def test_a_null_is_no_whole_number():
    assert whole_numbers(pa.array([1.0, 2.0, None]), 9)[1] == 2


def tables(tmp_path, *lines):
    path = tmp_path / "dump"
    path.write_text("\n".join(lines) + "\n")
    return list(jsonl_layouts.row_tables(path))


def test_a_position_goes_before_a_token_id(tmp_path):
    (table,) = tables(
        tmp_path, '{"token": 17, "pos": 4, "layer": 0, "experts": [1, 2]}'
    )
    assert table.pos.to_pylist() == [4]


def test_layers_without_numbers_have_their_turn(tmp_path):
    line = (
        '{"pos": 0, "layers": [{"ids": [1]}, {"ids": [2], "layer": 5}, {"ids": [3]}]}'
    )
    (table,) = tables(tmp_path, line, line.replace(": 0", ": 1"))
    assert table.layer.to_pylist() == [0, 5, 2, 0, 5, 2]
    assert table.pos.to_pylist() == [0, 0, 0, 1, 1, 1]
    assert table.line.tolist() == [0, 0, 0, 1, 1, 1]


def test_lists_count_their_tokens_across_pieces(tmp_path, monkeypatch):
    """A layer that does not rise begins a token, whether or not a piece begins
    there.
    """
    rows = [[0, 1, 2], [1, 3, 4], [0, 5, 6], [1, 7, 0], [1, 1, 2], [0, 3, 4]]
    expected = [0, 0, 1, 1, 2, 3]
    for lines in (2048, 1):
        monkeypatch.setattr(json_lines, "PIECE_BYTES", 0)
        monkeypatch.setattr(json_lines, "BATCH_LINES", lines)
        found = tables(tmp_path, '{"top_k": 2}', *map(json.dumps, rows))
        assert len(found) == (1 if lines > 1 else len(rows))
        pos = [place for table in found for place in table.pos.to_pylist()]
        assert pos == expected


@pytest.mark.parametrize(("lines", "message"), [
    (['{"top_k": 2}', "[0, 1]"], r"line 2: expected .layer, 2 ids. .*, found 2"),
    (["[0, 1, 2]", "[0, 1, null]"], r"line 2: expected numbers, found .0, 1, None"),
    (['{"top_k": "x"}', "[0, 1]"], "header: top_k"),
    (['{"pos": 0, "layers": [[1]]}', '{"pos": 1, "layers": 3}'],
     "line 2: expected a list of layers"),
])  # fmt: skip
def test_lines_that_are_not_like_the_first(tmp_path, lines, message):
    with pytest.raises(TraceError, match=message):
        tables(tmp_path, *lines)
