"""Machine code does what Python does: every construct, on drawn numbers, both ways."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import output_of

from moesim.machine_code import types as nb
from moesim.machine_code.functions import INTERPRETED, compiled
from moesim.machine_code.translate import TranslationError
from moesim.machine_code.types import input_array

pytestmark = pytest.mark.skipif(INTERPRETED, reason="everything runs as Python")

INTEGERS = st.integers(-(1 << 31), 1 << 31)
FLOATS = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))


@compiled(nb.Several((nb.int64, nb.int64, nb.int64, nb.boolean))(nb.int64, nb.int64))
def whole_numbers(a, b):
    least = min(b, a)
    return a // b, a % b, (a << 3) ^ (b >> 2) & 255 | least, a == b or a > 2 * b


@settings(deadline=None)
@given(INTEGERS, INTEGERS.filter(bool))
def test_whole_numbers_divide_as_python_divides(a, b):
    assert whole_numbers(a, b) == whole_numbers.python(a, b)


@compiled(
    nb.Several((nb.float64, nb.float64, nb.int64, nb.float64))(nb.float64, nb.float64)
)
def numbers(x, y):
    return x % y, x / y + x * y - y**2, math.floor(x), max(x, y) - min(x, y, 0.5)


@settings(deadline=None)
@given(FLOATS, FLOATS.filter(bool))
def test_numbers_compute_to_the_last_bit(x, y):
    assert numbers(x, y) == numbers.python(x, y)


@compiled(nb.int64(input_array(nb.int64), nb.int64[::1], nb.int64))
def loops(values, counts, limit):
    total = 0
    for n in range(len(values) - 1, -1, -1):
        if values[n] < 0:
            continue
        total += values[n]
        if total > limit:
            break
    n = 0
    while n < len(counts) and counts[n] == 0:
        counts[n] += 1
        n += 1
    for sign in (1, -1):
        total += sign * counts[-1]
    counts[1:3] = 7
    counts[:1] = values[:1]
    return total


@settings(deadline=None)
@given(st.lists(INTEGERS, min_size=4, max_size=9), INTEGERS)
def test_loops_and_slices_touch_the_same_elements(values, limit):
    values = np.array(values)
    ours, theirs = np.zeros(4, np.int64), np.zeros(4, np.int64)
    answer = loops(values, ours, limit)
    assert answer == loops.python(values, theirs, limit)
    assert ours.tolist() == theirs.tolist()


@compiled(nb.Several((nb.int64[::1], nb.float64[:, ::1]))(input_array(nb.float64)))
def arrays(x):
    order = np.argsort(-x, kind="stable")
    above = np.flatnonzero(x > 0.0)
    table = np.full((2, len(x)), 0.5)
    table[0] = x
    table[1, :] += np.maximum(x, -x)
    return np.concatenate((order, above)), table


@settings(deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=60))
def test_what_numpy_does_to_arrays_it_does_here(x):
    ours, theirs = arrays(np.array(x)), arrays.python(np.array(x))
    assert all(map(np.array_equal, ours, theirs))


@compiled
def applied(function, x):
    return function(x) + 1


@compiled
def half(x):
    return x / 2


@compiled(nb.float64(nb.int64))
def takes_functions(x):
    return applied(half, x)


def test_a_function_may_take_another():
    assert takes_functions(3) == 2.5


def test_arguments_of_another_type_are_named():
    with pytest.raises(TypeError, match="loops: counts: expected contiguous int64"):
        loops(np.zeros(2, np.int64), np.zeros(2), 1)
    frozen = np.zeros(2, np.int64)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="that can be changed"):
        loops(frozen, frozen, 1)


@compiled(nb.int64(nb.int64))
def uses_a_dictionary(x):
    return {1: x}[1]


def test_what_cannot_be_compiled_is_refused_by_file_and_line():
    line = uses_a_dictionary.python.__code__.co_firstlineno + 2
    with pytest.raises(TranslationError, match=rf"test_translate.py:{line}: .*Dict"):
        uses_a_dictionary(1)


@compiled(nb.int64(nb.int64))
def takes_the_first_that_is_not_zero(x):
    return x or 5


def test_a_choice_between_numbers_is_refused():
    """Python gives 5 or x; machine code has a truth value there."""
    with pytest.raises(TranslationError, match="compare them with 0"):
        takes_the_first_that_is_not_zero(3)


@compiled(nb.float64[:, ::1](nb.float64[:, ::1]))
def takes_the_larger_of_two_tables(x):
    return np.maximum(x, -x)


def test_the_larger_of_two_tables_is_refused():
    """Only its first places were computed."""
    with pytest.raises(TranslationError, match="one dimension"):
        takes_the_larger_of_two_tables(np.ones((2, 3)))


def test_without_machine_code_functions_run_as_python(tmp_path):
    """So that one can step through them."""
    code = (
        "from moesim.policies.assignment._kernels import ascending, greedy;"
        "assert greedy._call is greedy.python; import sys; import moesim;"
        "moesim.replay('tiny', 'hybrimoe', steps=3);"
        "assert 'llvmlite' not in sys.modules"
    )
    output_of("-c", code, cwd=tmp_path, environment={"NUMBA_DISABLE_JIT": "1"})
