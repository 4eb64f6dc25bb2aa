"""Lines of JSON come back as columns of stated types, to the last bit; the first line
that does not fit is named.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.traces.errors import TraceError
from moesim.traces.format.arrow import numbers, values
from moesim.traces.importers.readers import jsonl_layouts, text
from moesim.traces.importers.readers.json_lines import (
    JsonLinesReader,
    columns_of,
    is_null,
    list_lengths,
    list_values,
    whole_numbers,
)

ROW = {"pos": "DOUBLE", "name": "VARCHAR", "ids": ["DOUBLE"]}


def parse(text, structure=ROW, number=1):
    return JsonLinesReader(structure).parse("dump", number, text.encode())


def test_two_lines_by_hand():
    lines = parse('{"pos": 3, "ids": [1, 2], "name": "a"}\n{"ids": [], "pos": -0.5}')
    columns = columns_of(lines.values)
    assert columns["pos"].to_pylist() == [3.0, -0.5]
    assert columns["name"].to_pylist() == ["a", None]
    assert list_lengths(columns["ids"]).tolist() == [2, 0]
    assert values(list_values(columns["ids"])).tolist() == [1, 2]
    assert lines.parsed(1) == {"ids": [], "pos": -0.5}


def test_blank_lines_are_left_out_and_counted():
    lines = parse('\n \t\n{"pos": 1}\r\n\n{"pos": 2}\n', number=10)
    assert lines.number.tolist() == [12, 14]
    assert columns_of(lines.values)["pos"].to_pylist() == [1, 2]


def test_another_kind_is_null_and_a_number_in_quotes_is_a_number():
    lines = parse('{"pos": [1]}\n{"pos": "x"}\n5\n{"pos": null}\n{"pos": "7"}')
    assert is_null(columns_of(lines.values)["pos"]).tolist() == [True] * 4 + [False]
    assert columns_of(lines.values)["pos"][4].as_py() == 7


@pytest.mark.parametrize("odd", ["{", '{"pos": 1}}', '{"pos": tru}', "\x00", '{"a'])
def test_the_first_line_that_is_not_json_is_named(odd):
    with pytest.raises(TraceError, match="dump: line 8: expected a whole") as error:
        parse(f'{{"pos": 1}}\n{odd}\n{{', number=7)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named():
    with pytest.raises(TraceError, match="line 1: expected a whole"):
        JsonLinesReader(ROW).parse("dump", 1, b'{"name": "\xff\xfe"}')


def test_quotes_in_a_structure_are_no_end_of_it():
    assert columns_of(parse('{"a\'b": 4}', {"a'b": "DOUBLE"}).values)["a'b"][0].as_py()


ANY_NUMBER = st.floats(allow_nan=False, allow_infinity=False) | st.integers(
    -(10**15), 10**15
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(ANY_NUMBER, st.lists(ANY_NUMBER, max_size=5), st.text()), min_size=1
    )
)
def test_what_python_reads_comes_back_to_the_last_bit(rows):
    """Numbers, lists and strings, as `json` writes them."""
    lines = parse(
        "\n".join(
            json.dumps({"pos": pos, "ids": ids, "name": name})
            for pos, ids, name in rows
        )
    )
    columns = columns_of(lines.values)
    assert columns["pos"].to_pylist() == [float(pos) for pos, *_ in rows]
    assert columns["ids"].to_pylist() == [[*map(float, ids)] for _, ids, _ in rows]
    texts = zip(columns["name"].to_pylist(), rows, strict=True)
    assert all(found == name for found, (*_, name) in texts if name.isprintable())


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ([0, 1, 65_535], -1),
        ([0, 0.5], 1),
        ([-1, 0], 0),
        ([3, 65_536], 1),
        ([math.nan], 0),
        ([math.inf], 0),
        ([], -1),
    ],
)
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


def test_lists_count_their_tokens_across_chunks(tmp_path, monkeypatch):
    """A layer that does not rise begins a token, whether or not a chunk begins
    there.
    """
    rows = [[0, 1, 2], [1, 3, 4], [0, 5, 6], [1, 7, 0], [1, 1, 2], [0, 3, 4]]
    expected = [0, 0, 1, 1, 2, 3]
    for size in (1 << 20, 1):
        monkeypatch.setattr(text, "TEXT_BYTES", size)
        found = tables(tmp_path, '{"top_k": 2}', *map(json.dumps, rows))
        pos = [place for table in found for place in table.pos.to_pylist()]
        assert pos == expected


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"top_k": 2}', "[0, 1]"], r"line 2: expected .layer, 2 ids. .*, found 2"),
        (["[0, 1, 2]", "[0, 1, null]"], r"line 2: expected numbers, found .0, 1, None"),
        (['{"top_k": "x"}', "[0, 1]"], "header: top_k"),
        (
            ['{"pos": 0, "layers": [[1]]}', '{"pos": 1, "layers": 3}'],
            "line 2: expected a list of layers",
        ),
    ],
)
def test_lines_that_are_not_like_the_first(tmp_path, lines, message):
    with pytest.raises(TraceError, match=message):
        tables(tmp_path, *lines)
