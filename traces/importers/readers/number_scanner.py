"""Numbers out of text whose lines are alike: one pass in machine code, whatever stands
around the numbers.

Engines write millions of lines that differ in nothing but their values. `Scanner` takes
a text apart into values (numbers and strings) and what stands around them, the *form*
of a line. So a form has to be understood only once: `Lines.filled` gives a line of that
form with the numbers of its values in their places, which any parser of the format then
reads.

Values are as their decimals say to within two units in the last place of a double;
whole numbers are exact. What is no JSON number (``007``, ``1.``, ``+1``), has more than
15 digits without a fraction, or a string with an escape makes the line odd, and a text
with an odd line is left to others.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
from moesim.traces.compilation import compiled
from moesim.traces.importers.readers.column_cast import floats, whole_numbers
from numba import types as nb

if TYPE_CHECKING:
    from collections.abc import Iterable

_inlined = numba.njit(forceinline=True)
_BYTES = nb.Array(nb.uint8, 1, "C", readonly=True)
_POWERS = 10.0 ** np.arange(0, 290)
_WHOLE_POWERS = np.uint64(10) ** np.arange(0, 20, dtype=np.uint64)
_HIGH = np.uint64(0x8080808080808080)
_MOST_DIGITS = 19
_MOST_WHOLE = 15
_PADDING = 8
_SEED = np.uint64(14695981039346656037)
_PRIME = np.uint64(1099511628211)

# what a byte may be outside strings
_OTHER, _DIGIT, _MINUS, _QUOTE, _LETTER, _END = range(6)


def _classes() -> np.ndarray:
    table = np.full(256, _OTHER, np.uint8)
    table[ord("0") : ord("9") + 1] = _DIGIT
    table[ord("-")] = _MINUS
    table[ord('"')] = _QUOTE
    for first, last in ("az", "AZ", "__"):
        table[ord(first) : ord(last) + 1] = _LETTER
    table[ord("\n")] = _END
    return table


def _neighbours(marks: str) -> np.ndarray:
    table = np.zeros(256, np.bool_)
    table[list(marks.encode())] = True
    return table


_CLASS = _classes()
_BEFORE = _neighbours("[,: \t{;|\n")
_BEHIND = _neighbours(",]}: \t;|\r\n")


class Ref(int):
    """A value of a line, by its number; a string has ``~`` of it."""

    @staticmethod
    def are_numbers(values: Iterable[Any]) -> bool:
        """Whether all of `values` stand for numbers."""
        return all(type(value) is Ref and value >= 0 for value in values)


class Alike(NamedTuple):
    """Lines of one form. N lines with M values each.

    Attributes:
        lines: int64 [N]: their numbers in the text.
        number: float64 [N, M]; nan for strings.
        whole: bool [N, M]; whether a number was written without a fraction and an
            exponent.
        at: int64 [N]; first value of each line among all of the text.
    """

    lines: np.ndarray
    number: np.ndarray
    whole: np.ndarray
    at: np.ndarray

    def some(self, which: np.ndarray) -> Alike:
        """Those lines for which bool [N] holds."""
        return self if which.all() else Alike(*(one[which] for one in self))

    def integers(
        self, columns: Any, kind: type[np.int32 | np.uint16] = np.int32
    ) -> np.ndarray | None:
        """Some values as `kind` [N, C]; None where one is not a whole number from 0 on
        that fits.
        """
        places = np.ascontiguousarray(columns, np.int64).reshape(-1)
        found = np.empty((len(self.number), len(places)), kind)
        most = np.full(len(places), float(np.iinfo(kind).max))
        return (
            found
            if whole_numbers(
                self.number, self.whole, places, np.zeros_like(most), most, found
            )
            else None
        )

    def floats(self, columns: Any) -> np.ndarray:
        """Some values as float32 [N, C]."""
        return floats(self.number, np.ascontiguousarray(columns, np.int64).reshape(-1))


class Found(NamedTuple):
    """What was found in a text of N lines with V values in all, or room for it.

    Attributes:
        form: uint64 [N]; lines with the same form differ only in their values.
        line_at: int64 [N + 1]; first byte of each line.
        value_at: int64 [N + 1]; first value of each line.
        number: float64 [V]; nan for strings.
        whole: bool [V]; whether a number was written without a fraction and an
            exponent.
        start: int32 [V]; first byte of each value.
        stop: int32 [V]; the byte behind it.
    """

    form: np.ndarray
    line_at: np.ndarray
    value_at: np.ndarray
    number: np.ndarray
    whole: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @classmethod
    def of(cls, size: int) -> Found:
        """Room for any text of `size` bytes."""
        numbers = size // 2
        return cls(
            np.empty(size, np.uint64),
            np.empty(size, np.int64),
            np.empty(size, np.int64),
            np.empty(numbers),
            np.empty(numbers, np.bool_),
            np.empty(numbers, np.int32),
            np.empty(numbers, np.int32),
        )

    def first(self, lines: int, values: int) -> Found:
        """The part of the room that so many lines and values took."""
        form, line_at, value_at, *of_values = self
        return Found(
            form[:lines],
            line_at[: lines + 1],
            value_at[: lines + 1],
            *(one[:values] for one in of_values),
        )


class Lines(NamedTuple):
    """A text, uint8, in lines; a value is a number, or a string with or without
    quotes.
    """

    data: np.ndarray
    found: Found

    def filled(self, line: int) -> bytes:
        """A line with the numbers of its values in their places: 0, 1, … for numbers,
        and ``~`` of it for strings.
        """
        first = int(self.found.value_at[line])
        last = int(self.found.value_at[line + 1])
        raw = self._text(
            int(self.found.line_at[line]), int(self.found.line_at[line + 1])
        )
        base = int(self.found.line_at[line])
        at = 0
        strings = np.isnan(self.found.number[first:last]).tolist()
        parts = []
        for value, string in enumerate(strings):
            parts += [
                raw[at : self.found.start[first + value] - base],
                b"%d" % (~value if string else value),
            ]
            at = self.found.stop[first + value] - base
        return b"".join([*parts, raw[at:]])

    def meaning(self, line: int) -> Any:
        """A line of JSON with a `Ref` for each of its values; raises as `json` does."""
        return json.loads(self.filled(line), parse_int=Ref)

    def forms(self) -> list[Alike]:
        """The lines by form, in order of the forms' first lines."""
        if not len(self.found.form):
            return []
        if (self.found.form == self.found.form[0]).all():
            count = len(self.found.form)
            width = int(self.found.value_at[1])
            number = self.found.number.reshape(count, width)
            whole = self.found.whole.reshape(count, width)
            return [Alike(np.arange(count), number, whole, self.found.value_at[:-1])]
        _, first, index = np.unique(
            self.found.form, return_index=True, return_inverse=True
        )
        found = []
        for form in np.argsort(first).tolist():
            lines = np.flatnonzero(index == form)
            at = self.found.value_at[lines]
            place = at[:, None] + np.arange(
                int(self.found.value_at[lines[0] + 1] - at[0])
            )
            found.append(
                Alike(lines, self.found.number[place], self.found.whole[place], at)
            )
        return found

    def labels(self, place: np.ndarray) -> tuple[list[object], np.ndarray]:
        """The different values by number [N], as they are written, and which of them
        each is: int64 [N].
        """
        start = self.found.start[place].astype(np.int64)
        length = self.found.stop[place] - start
        index, first = _labelled(self.data, start, length)
        names = [
            self._text(int(start[one]), int(start[one] + length[one])) for one in first
        ]
        return [name.strip(b'"').decode("utf-8") for name in names], index

    def _text(self, start: int, stop: int) -> bytes:
        return self.data[start:stop].tobytes()


class Scanner:
    """Takes texts apart. What it gives is good until it is given the next text: the
    memory is used again.

    Args:
        words: whether bare words are values, as in CSV; otherwise they belong to the
            form, as ``null`` in JSON.
    """

    def __init__(self, *, words: bool = False) -> None:
        self._words = words
        self._room = Found.of(0)

    def scan(self, data: bytes) -> Lines | None:
        """Take whole lines apart, the last one perhaps without its end, less than 2
        GiB; None where one is odd.
        """
        text = np.frombuffer(data + bytes(_PADDING), np.uint8)
        if len(text) > len(self._room.form):
            self._room = Found.of(len(text) + len(text) // 8)
        lines, values = _scan(text, self._words, self._room)
        if lines < 0:
            return None
        return Lines(text, self._room.first(lines, values))


@_inlined
def _eight(data: np.ndarray, at: int) -> np.uint64:
    """Eight bytes as one word, which the compiler makes one load."""
    word = np.uint64(0)
    place = np.uint64(at)
    for byte in range(8):
        word |= np.uint64(data[place + np.uint64(byte)]) << np.uint64(8 * byte)
    return word


@_inlined
def _digits(
    data: np.ndarray, at: int, amount: np.uint64, digits: int
) -> tuple[np.uint64, int, int, int]:
    """Go on with a number: its digits so far, how many count, the byte behind them, and
    how many did not fit.
    """
    count = np.int64(8)
    while count == 8 and digits + 8 <= _MOST_DIGITS:  # eight bytes at once
        word = _eight(data, at) ^ np.uint64(0x3030303030303030)
        strange = (
            (word & np.uint64(0x7F7F7F7F7F7F7F7F)) + np.uint64(0x7676767676767676)
            | word
        ) & _HIGH
        if strange:
            lowest = (strange & (~strange + np.uint64(1))) >> np.uint64(7)
            count = np.int64(lowest * np.uint64(0x0001020304050607) >> np.uint64(56))
            if count == 0:
                break
            word <<= np.uint64(64 - 8 * count)  # zeros in front
        word = (word * np.uint64(10) + (word >> np.uint64(8))) & np.uint64(
            0x00FF00FF00FF00FF
        )
        word = (word * np.uint64(100) + (word >> np.uint64(16))) & np.uint64(
            0x0000FFFF0000FFFF
        )
        word = (word * np.uint64(10_000) + (word >> np.uint64(32))) & np.uint64(
            0xFFFFFFFF
        )
        more = 0 if amount == 0 and word == 0 else count
        while (
            amount == 0 and count == 8 and more > 0 and word < _WHOLE_POWERS[more - 1]
        ):
            more -= 1  # zeros in front of a number do not count
        amount = amount * _WHOLE_POWERS[count] + word
        digits = digits + int(more)
        at = at + int(count)
    lost = 0
    while count == 8:
        digit = np.int64(data[np.uint64(at)]) - 48
        if digit < 0 or digit > 9:
            break
        if digits < _MOST_DIGITS:
            amount = amount * np.uint64(10) + np.uint64(digit)
            digits = digits + 1
        else:
            lost += 1
        at += 1
    return amount, digits, at, lost


@_inlined
def _number(data: np.ndarray, at: int) -> tuple[float, bool, int]:
    """The number at a byte, whether it is written as a whole one, and the byte behind
    it; -1 where it is odd.
    """
    size = len(data) - _PADDING
    negative = data[at] == 45
    at += negative
    begin = at
    amount, digits, at, power = _digits(data, at, np.uint64(0), 0)
    if at == begin or (at > begin + 1 and data[begin] == 48):
        return 0.0, False, -1
    whole = True
    if at < size and data[at] == 46:  # .
        whole = False
        begin = at + 1
        amount, digits, at, lost = _digits(data, begin, amount, digits)
        power -= at - begin - lost
        if at == begin:
            return 0.0, False, -1
    if at < size and data[at] | 32 == 101:  # e, E
        whole = False
        at += 1
        down = at < size and data[at] == 45
        at += down or (at < size and data[at] == 43)
        begin = at
        more, _, at, lost = _digits(data, at, np.uint64(0), 0)
        if at == begin or lost or more > 10_000:
            return 0.0, False, -1
        power += -np.int64(more) if down else np.int64(more)
    if (whole and digits > _MOST_WHOLE) or not -len(_POWERS) < power < len(_POWERS):
        return 0.0, False, -1
    found = np.float64(amount)
    if power < 0:
        found /= _POWERS[-power]
    elif power > 0:
        found *= _POWERS[power]
    return -found if negative else found, whole, at


@_inlined
def _string(data: np.ndarray, at: int) -> int:
    """The byte behind the string or bare word at a byte; -1 where it is odd: an escape,
    or no end on its line.
    """
    size = len(data) - _PADDING
    quoted = data[at] == 34
    at += 1
    while at < size:
        byte = data[at]
        if quoted and byte == 34:
            return at + 1
        if byte == 92 or (quoted and byte < 32):
            return -1
        if not quoted and (byte == 34 or _BEHIND[byte]):
            return at if byte != 34 else -1
        at += 1
    return -1 if quoted else at


@_inlined
def _same(data: np.ndarray, one: int, other: int, length: int) -> bool:
    """Whether two stretches of bytes are equal."""
    while length > 8:
        if _eight(data, one) != _eight(data, other):
            return False
        one = one + 8
        other = other + 8
        length = length - 8
    if length == 0:
        return True
    return (_eight(data, one) ^ _eight(data, other)) << np.uint64(64 - 8 * length) == 0


@_inlined
def _as_before(data: np.ndarray, line: int, at: int, room: Found) -> int:
    """Read line `line` as one of the form of the line before; the byte behind it, -1
    where it is another.
    """
    _, line_at, value_at, number, whole, start, stop = room
    size = len(data) - _PADDING
    before = line_at[line - 1]
    value = value_at[line]
    for known in range(value_at[line - 1], value):
        length = start[known] - before
        if at + length >= size or not _same(data, before, at, length):
            return -1
        at += length
        begin = at
        length = stop[known] - start[known]
        # With the byte behind it: the same value.
        if length < 8 and _same(data, start[known], at, length + 1):
            number[value], whole[value] = number[known], whole[known]
            at += length
        elif number[known] == number[known]:
            number[value], whole[value], at = _number(data, at)
        elif data[at] == data[start[known]] == 34 or (
            data[start[known]] != 34 and _CLASS[data[at]] == _LETTER
        ):
            number[value] = np.nan
            whole[value] = False
            at = _string(data, at)
        else:
            return -1
        if at < 0:
            return -1
        start[value] = begin
        stop[value] = at
        before = stop[known]
        value += 1
    length = line_at[line] - before
    if at + length > size or not _same(data, before, at, length):
        return -1
    return at + length


_ROOM = nb.NamedTuple([numba.typeof(array) for array in Found.of(0)], Found)


@compiled(nb.UniTuple(nb.int64, 2)(_BYTES, nb.boolean, _ROOM))
def _scan(data: np.ndarray, words: bool, room: Found) -> tuple[int, int]:  # noqa: C901, PLR0912 - one pass over bytes
    """Fill the room; how many lines and values there are, (-1, byte) for an odd
    line.
    """
    form, line_at, value_at, number, whole, start, stop = room
    size = len(data) - _PADDING
    at = 0
    line = 0
    value = 0
    line_at[0] = value_at[0] = 0
    mark = _SEED
    while at < size:
        if line > 0 and at == line_at[line]:
            end = _as_before(data, line, at, room)
            if end > 0:
                form[line] = form[line - 1]
                value += value_at[line] - value_at[line - 1]
                line += 1
                line_at[line] = end
                value_at[line] = value
                at = end
                continue
        byte = data[at]
        kind = _CLASS[byte]
        begin = at
        if kind in (_DIGIT, _MINUS):
            number[value], whole[value], at = _number(data, at)
            if (
                at < 0
                or (begin > 0 and not _BEFORE[data[begin - 1]])
                or (at < size and not _BEHIND[data[at]])
            ):
                return -1, begin
        elif kind == _QUOTE or (words and kind == _LETTER):
            number[value] = np.nan
            whole[value] = False
            at = _string(data, at)
            if at < 0:
                return -1, begin
            behind = at
            while behind < size and data[behind] == 32:
                behind += 1
            if kind == _QUOTE and behind < size and data[behind] == 58:  # a key
                for place in range(begin, at):
                    mark = (mark ^ np.uint64(data[place])) * _PRIME
                continue
        else:
            at += 1
            if kind == _END:
                form[line] = mark
                mark = _SEED
                line += 1
                line_at[line] = at
                value_at[line] = value
            else:
                mark = (mark ^ np.uint64(byte)) * _PRIME
            continue
        kind = 256 if kind <= _MINUS else 257 if kind == _QUOTE else 258
        mark = (mark ^ np.uint64(kind)) * _PRIME
        start[value] = begin
        stop[value] = at
        value += 1
    if line_at[line] < size:
        form[line] = mark
        line += 1
        line_at[line] = size
        value_at[line] = value
    return line, value


@compiled(
    nb.Tuple((nb.int64[::1], nb.int64[::1]))(_BYTES, nb.int64[::1], nb.int64[::1])
)
def _labelled(
    data: np.ndarray, start: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which of the different strings each is, by first appearance; and where each of
    those appeared first.
    """
    size = 1024
    while size < 2 * len(start):
        size *= 2
    table = np.full(size, -1, np.int64)
    first = np.empty(len(start), np.int64)
    index = np.empty(len(start), np.int64)
    known = 0
    last = -1
    for one in range(len(start)):
        if (
            last >= 0
            and length[one] == length[last]
            and _same(data, start[one], start[last], length[one])
        ):
            index[one] = index[last]  # most often the same as before
            last = one
            continue
        last = one
        mark = _SEED
        for place in range(start[one], start[one] + length[one]):
            mark = (mark ^ np.uint64(data[place])) * _PRIME
        slot = np.int64((mark ^ (mark >> np.uint64(32))) & np.uint64(size - 1))
        while table[slot] >= 0:
            other = first[table[slot]]
            if length[one] == length[other] and _same(
                data, start[one], start[other], length[one]
            ):
                break
            slot = (slot + 1) & (size - 1)
        if table[slot] < 0:
            table[slot] = known
            first[known] = one
            known += 1
        index[one] = table[slot]
    return index, first[:known].copy()
