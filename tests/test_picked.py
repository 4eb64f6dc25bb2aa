"""Columns of numbers come in the type that is asked for, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from moesim.traces.importers.readers.column_cast import floats, whole_numbers

NUMBER = np.array([[7.0, 0.5, 255.0, -3.0], [8.0, 1e30, 0.0, np.nan]])
WHOLE = np.array([[True, False, True, True], [True, True, True, False]])


def picked(columns, kind, least, most, number=NUMBER):
    found = np.empty((len(number), len(columns)), kind)
    limits = (np.full(len(columns), float(limit)) for limit in (least, most))
    return whole_numbers(number, WHOLE, np.array(columns), *limits, found), found


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.int64])
def test_columns_in_any_order_and_type(kind):
    fine, found = picked([0, 0], kind, 0, 100)
    assert fine
    assert found.tolist() == [[7, 7], [8, 8]]


def test_one_value_beyond_its_limits_refuses_all():
    assert picked([2, 0], np.uint16, 0, 255)[0]
    assert not picked([2, 0], np.uint16, 0, 254)[0]
    assert not picked([0, 2], np.uint16, 1, 255)[0]


@pytest.mark.parametrize("column", [1, 3])
def test_fractions_words_and_what_is_far_too_large_are_no_whole_numbers(column):
    assert not picked(
        [0, column], np.int64, np.iinfo(np.int64).min, np.iinfo(np.int64).max
    )[0]


def test_a_table_filled_column_by_column():
    found = np.empty((2, 2), np.int32)
    assert whole_numbers(
        NUMBER, WHOLE, np.array([2, 0]), np.zeros(2), np.full(2, 1e9), found.T
    )
    assert found.tolist() == [[255, 0], [7, 8]]


def test_floats_are_the_nearest_of_32_bits():
    assert floats(NUMBER[:1], np.array([1, 3])).tolist() == [[0.5, -3.0]]
