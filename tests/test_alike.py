"""Lines that differ only in their values: what the one pass finds is what the parser of
the format finds.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moesim.traces.importers.readers.number_scanner import Ref, Scanner


def scanned(text, **options):
    return Scanner(**options).scan(text.encode())


def test_two_lines_by_hand():
    lines = scanned('{"a": [1, -2.5], "b": "x"}\n{"a": [30, 4e1], "b": "why"}\n')
    (alike,) = lines.forms()
    assert alike.number[:, :2].tolist() == [[1, -2.5], [30, 40]]
    assert alike.whole.tolist() == [[True, False, False]] * 2
    assert lines.filled(1) == b'{"a": [0, 1], "b": -3}\n'
    assert lines.labels(alike.at + 2)[0] == ["x", "why"]
    assert lines.meaning(0) == {"a": [Ref(0), Ref(1)], "b": Ref(~2)}


def test_keys_words_and_blanks_belong_to_the_form():
    texts = (
        '{"a": 1}',
        '{"b": 1}',
        '{"a":1}',
        '{"a": null}',
        '{"a": "1"}',
        '{"a": [1]}',
        "",
        '{"a1": 2}',
    )
    assert len(scanned("\n".join(texts)).forms()) == len(texts)


def test_words_are_values_where_they_are_wanted():
    lines = scanned("1,prefill,req-7\n2,decode,req-8\n3,decode,9\n", words=True)
    first, second = lines.forms()
    assert first.lines.tolist() == [0, 1]
    assert lines.labels(first.at + 1)[0] == ["prefill", "decode"]
    assert second.number[0, 2] == 9


@pytest.mark.parametrize(
    "odd",
    [
        "007",
        "1.",
        ".5",
        "+1",
        "-",
        "1e",
        "1.5.3",
        "12x",
        "1-2",
        '"a\\nb"',
        '"open',
        "1234567890123456",
        "1e999",
    ],
)
def test_odd_lines_are_left_to_others(odd):
    assert scanned(f'{{"a": 1}}\n{{"a": {odd}}}\n') is None


def test_a_scanner_gives_the_same_for_a_text_after_another():
    scanner = Scanner()
    scanner.scan(b"[9, 9, 9]\n" * 100)
    assert scanner.scan(b"[1, 2]\n[3, 4]").forms()[0].number.tolist() == [
        [1, 2],
        [3, 4],
    ]


VALUES = st.recursive(
    st.integers(-(10**15) + 1, 10**15 - 1)
    | st.floats(
        allow_nan=False, allow_infinity=False, min_value=-1e200, max_value=1e200
    )
    | st.none()
    | st.text(
        st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters='"\\')
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=12,
)


def put_back(tree, lines, line):
    """The line that the references stand for."""
    if isinstance(tree, Ref):
        at = int(lines.found.value_at[line]) + (tree if tree >= 0 else ~tree)
        if tree < 0:
            return lines.labels(np.array([at]))[0][0]
        return (
            int(lines.found.number[at])
            if lines.found.whole[at]
            else float(lines.found.number[at])
        )
    if isinstance(tree, list):
        return [put_back(one, lines, line) for one in tree]
    return (
        {key: put_back(one, lines, line) for key, one in tree.items()}
        if isinstance(tree, dict)
        else tree
    )


def close(found, expected):
    if isinstance(expected, float):
        return isinstance(found, float) and abs(found - expected) <= 2 * np.spacing(
            abs(expected)
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            close(found[key], expected[key]) for key in expected
        )
    return found == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        VALUES.filter(lambda value: isinstance(value, list | dict)),
        min_size=1,
        max_size=6,
    )
)
def test_any_json_comes_back(values):
    """Every line parsed by its form equals what `json` makes of it, in any mixture of
    forms.
    """
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    lines = scanned("\n".join([*texts, *texts]))
    if lines is None:  # numbers of more than 15 digits, or far exponents
        assert any(
            len(word) > 15 or "e-" in word for text in texts for word in text.split()
        )
        return
    for line, text in enumerate([*texts, *texts]):
        assert close(put_back(lines.meaning(line), lines, line), json.loads(text))
