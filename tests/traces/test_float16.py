"""What the compiled loops find is what numpy finds, for every float and every
row.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moesim.traces.format.arrays import first_repeat, to_float16


def numpy_halves(values):
    with np.errstate(all="ignore"):
        return values.astype(np.float16)


def same(one, other):
    return (one.view(np.uint16) == other.view(np.uint16)).all()


def test_every_half_and_the_floats_around_the_middle_of_two_round_as_numpy_rounds():
    below = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (below[:-1] + below[1:]) / 2
    for values in (
        below,
        middle,
        np.nextafter(middle, np.float32(0)),
        np.nextafter(middle, np.float32(9e4)),
    ):
        for signed in (values, -values):
            found, finite = to_float16(signed)
            assert same(found, numpy_halves(signed))
            assert finite


@given(arrays.arrays(np.uint32, (7, 3), elements=st.integers(0, 2**32 - 1)))
def test_any_bits_round_as_numpy_rounds_or_are_said_to_be_beyond(bits):
    values = bits.view(np.float32)
    found, finite = to_float16(values)
    expected = numpy_halves(values)
    good = np.isfinite(expected)
    assert same(found[good], expected[good])
    assert (np.isfinite(found) == good).all()
    assert finite == good.all()


@given(
    arrays.arrays(
        np.uint16,
        st.tuples(st.integers(0, 9), st.integers(1, 5)),
        elements=st.integers(0, 12),
    )
)
def test_the_first_row_with_an_id_twice(ids):
    repeats = [
        row for row, found in enumerate(ids.tolist()) if len(set(found)) < len(found)
    ]
    expected = repeats[0] if repeats else -1
    assert first_repeat(ids) == expected
