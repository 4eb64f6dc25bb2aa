"""Named tuples as machine code takes them: the same numbers, by address and sizes."""

import sys
from typing import NamedTuple

import numpy as np
import pytest

from moesim.machine_code import types as nb
from moesim.machine_code.functions import INTERPRETED, compiled, loaded, structure
from moesim.machine_code.types import slots_of

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="without machine code there is nothing to pass"
)


class Table(NamedTuple):
    """Two numbers and two arrays."""

    count: int
    rows: np.ndarray
    marks: np.ndarray
    scale: float


TABLE = structure(Table, (nb.int64, nb.float64[:, ::1], nb.int8[::1], nb.float64))


def table(rows=2, columns=3):
    return Table(
        7,
        np.arange(rows * columns, dtype=float).reshape(rows, columns),
        np.arange(columns, dtype=np.int8),
        0.5,
    )


@compiled(nb.float64(TABLE))
def total(given):
    return given.count + given.scale * given.rows.sum() + given.marks.sum()


@compiled(nb.void(TABLE))
def write(given):
    given.rows[-1, -1] = len(given.marks)
    given.marks[0] = given.rows.shape[0]


@compiled(nb.float64(nb.float64[:, ::1], nb.int8[::1]))
def total_of_made(rows, marks):
    # A number of another type becomes the field's own.
    return total(Table(np.int32(7), rows, marks, 0.5))


def test_fields_are_read_by_name():
    assert total(table()) == 7 + 0.5 * 15 + 3


def test_arrays_are_those_of_the_caller():
    given = table()
    write(given)
    assert given.rows[1, 2] == 3
    assert given.marks.tolist() == [2, 1, 2]


def test_a_compiled_function_makes_one():
    given = table(rows=5, columns=4)
    assert total_of_made(given.rows, given.marks) == total(given)


class Pair(NamedTuple):
    """Two arrays."""

    rows: np.ndarray
    marks: np.ndarray


PAIR = structure(Pair, (nb.float64[:, ::1], nb.int8[::1]))
BOOK = np.dtype([("pages", np.int64), ("pair", np.int64, (5,))], align=True)


@compiled(nb.float64(nb.Record(BOOK)[::1]))
def total_by_address(books):
    pair = loaded(Pair, books[0].pair)
    return pair.rows[1].sum() + len(pair.rows) + pair.marks[2]


def test_one_is_loaded_by_its_addresses_and_sizes():
    given = Pair(*table()[1:3])
    books = np.zeros(1, BOOK)
    books["pair"] = slots_of(given)
    assert total_by_address(books) == (3 + 4 + 5) + 2 + 2


def test_a_call_keeps_no_reference():
    given = table()
    before = [sys.getrefcount(array) for array in given[1:3]]
    for _ in range(10):
        total(given)
    assert [sys.getrefcount(array) for array in given[1:3]] == before


@pytest.mark.parametrize("wrong", [
    table()._replace(rows=np.zeros((2, 3), np.float32)),
    table()._replace(rows=np.zeros((3, 2)).T),
    table()._replace(marks=np.zeros((3, 1), np.int8)),
    table()._replace(count=1.5),
], ids=["other numbers", "not contiguous", "other axes", "no integer"])  # fmt: skip
def test_other_arrays_are_refused(wrong):
    with pytest.raises(TypeError):
        total(wrong)
