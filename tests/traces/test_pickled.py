"""A pickle is data: it comes back as it was put in, and whatever would do more is
refused before it does anything.
"""

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.base.errors import TraceError
from moesim.traces.importers.readers.foreign import DECODING_ERRORS
from moesim.traces.importers.readers.pickle_data import DEEPEST, read_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.lists(inner, max_size=5).map(tuple)
    ),
    max_leaves=30,
)
FILE = Path("dump.pt")


def read(data):
    return read_pickle(
        FILE,
        "data.pkl",
        data,
        {("collections", "OrderedDict"): dict},
        lambda identity: ("stored", identity),
    )


def refused(data, *words):
    with pytest.raises((TraceError, ValueError)) as error:
        read(data)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=60, deadline=None)
@given(PLAIN, st.integers(2, 5))
def test_plain_data_comes_back(value, protocol):
    assert read(pickle.dumps(value, protocol)) == value


class _Calls:
    def __init__(self, what, *arguments):
        self.call = what, arguments

    def __reduce__(self):
        return self.call


class _Holds:
    """An object with a state, which the machine would set."""

    __slots__ = ("value",)


@pytest.mark.parametrize(
    "call",
    [_Calls(print, "x"), _Calls(exec, "1"), [1, {"a": _Calls(pickle.loads, b"N.")}]],
)
def test_nothing_is_called(call, capsys):
    refused(
        pickle.dumps(call, 2),
        "dump.pt: data.pkl: refused to call",
        "pickles are never executed; open it with",
    )
    refused(pickle.dumps(call, 4), "refused instruction STACK_GLOBAL")
    assert capsys.readouterr().out == ""


def test_a_recipe_is_called_and_a_persistent_id_is_looked_up():
    assert read(b"\x80\x02ccollections\nOrderedDict\n)RK\x01K\x02s.") == {1: 2}
    assert read(b"\x80\x02K\x07Q.") == ("stored", 7)


@pytest.mark.parametrize(("data", "words"), [
    (pickle.dumps(_Holds(), 2), "refused instruction NEWOBJ"),
    (b"\x80\x02}}b.", "byte 4: refused instruction BUILD"),
    (b"\x80\x02cos\nsystem\n(K\x01o.", "refused instruction OBJ"),
    (b"\x80\x02(K\x01ios\nsystem\n.", "refused instruction INST"),
    (b"\x80\x02\x82\x01.", "refused instruction EXT1"),
    (b"\x80\x02P7\n.", "refused instruction PERSID"),
    (b"\x80\x02\xff.", "refused instruction 0xff"),
    (b"\x80\x02cos\nsystem\nK\x01R.", "argument"),
    (b"\x80\x02]q\x05.", "byte 3: refused instruction BINPUT"),
    (b"\x80\x02]r\xff\xff\xff\x7f.", "byte 3: refused instruction LONG_BINPUT"),
    (b"\x80\x02]", "expected an end, found none; was it cut off while copying?"),
    (b"\x80\x02X\xff\xff\xff\xffabc.", "expected an end, found none"),
    (b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc.",
     "expected an end, found none"),
    (b"\x80\x02cos\nsystem", "expected an end, found none"),
    (b"\x80\x02.", "data.pkl: "),
    (b"\x80\x02h\x05.", "data.pkl: "),
])  # fmt: skip
def test_what_is_no_data_or_not_whole_is_one_line(data, words):
    with pytest.raises((TraceError, *DECODING_ERRORS)) as error:
        read(data)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


_NESTED = 1_000_000
_MANY = b"\x85" * _NESTED  # a tuple of the tuple of the tuple …


@pytest.mark.parametrize(("data", "at"), [
    (b"\x80\x02})" + _MANY + b"Ns.", DEEPEST + 4),
    (b"\x80\x02}()" + _MANY + b"Nu.", DEEPEST + 5),
    (b"\x80\x04})" + b"\x94\x85" * _NESTED + b"Ns.", 2 * DEEPEST + 5),
    (b"\x80\x02}" + b"(" * _NESTED + b"t" * _NESTED + b"Ns.", DEEPEST + _NESTED + 4),
    (b"\x80\x02})" + b"".join(b"\x85q%ch%c" % (n, n) for n in range(256)) + b"Ns.",
     5 * DEEPEST + 4),
    (b"\x80\x02}ccollections\nOrderedDict\n)" + _MANY + b"RNs.", DEEPEST + 29),
    (b"\x80\x02})" + b"Q" * _NESTED + b"Ns.", DEEPEST + 4),
    (b"\x80\x02" + b"]" * _NESTED + b"a" * (_NESTED - 1) + b".", DEEPEST + _NESTED + 2),
    (b"\x80\x02" + b"}N" * _NESTED + b"}" + b"s" * _NESTED + b".",
     DEEPEST + 2 * _NESTED + 3),
])  # fmt: skip
def test_what_holds_itself_without_end_is_one_line_and_no_crash(data, at):
    """A key is looked into to the bottom, and a million tuples in each other are deeper
    than the processor's stack.
    """
    refused(
        data,
        f"data.pkl: byte {at}: expected at most {DEEPEST} containers in each other,"
        " found more",
    )


def test_as_deep_as_allowed_is_read_and_long_is_not_deep():
    value = ()
    for _ in range(DEEPEST):
        value = (value,)
    assert read(b"\x80\x02)" + b"\x85" * DEEPEST + b".") == value
    rows = [{"a": [(number, number + 1)]} for number in range(3000)]
    assert read(pickle.dumps(rows, 2)) == rows


def test_a_list_that_grew_deep_behind_its_users_back_does_no_harm():
    """Lists are found in their holders as they were; what looks into them has a bound
    of its own.
    """
    many = 100_000
    place = [number.to_bytes(4, "little") for number in range(many)]
    lists = b"".join(b"]r" + place[number] for number in range(many))
    grown = b"".join(
        b"j" + place[number] + b"j" + place[number + 1] + b"a"
        for number in range(many - 1)
    )
    deep = read(b"\x80\x02(" + lists + grown + b"t.")[0]
    with pytest.raises(DECODING_ERRORS):
        repr(deep)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_that_changed_on_the_way_give_data_or_one_error(draw):
    data = bytearray(
        pickle.dumps(
            {"records": [{"a": [1, 300, 70_000], "b": (1.5, "x", None)}] * 3}, 2
        )
    )
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        read(bytes(data))
    except (TraceError, *DECODING_ERRORS):
        pass
