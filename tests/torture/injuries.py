"""Injuries to the bytes of a file, as disks, networks, editors and attackers make them."""

from __future__ import annotations

WORDS = (
    b"-1",
    b"0",
    b"2",
    b"999999999999",
    b"1e309",
    b"1e9",
    b"-0.0",
    b"0.5",
    b"null",
    b"nan",
    b"NaN",
    b"Infinity",
    b"true",
    b'"x"',
    b'""',
    b"[]",
    b"{}",
    b"[[[[",
    b",",
    b":",
    b"\n",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\x00" * 8,
)


def flipped(data, dice, _other):
    """One bit."""
    body = bytearray(data)
    at = dice.randrange(len(body))
    body[at] ^= 1 << dice.randrange(8)
    return bytes(body)


def truncated(data, dice, _other):
    """The end is missing."""
    return data[: dice.randrange(len(data))]


def mixed(data, dice, other):
    """A piece of another file of the same kind in the same place."""
    start = dice.randrange(len(data))
    stop = start + dice.randint(1, max(1, len(data) // 3))
    return data[:start] + other[start:stop] + data[stop:]


def worded(data, dice, _other):
    """Another word at a random place, or in the place of a number."""
    at = dice.randrange(len(data))
    length = dice.randint(0, 6)
    return data[:at] + dice.choice(WORDS) + data[at + length :]


def numbered(data, dice, _other):
    """Another value in the place of a whole number or text."""
    digits = [at for at in range(len(data)) if data[at : at + 1].isdigit()]
    if not digits:
        return flipped(data, dice, _other)
    at = stop = dice.choice(digits)
    while at > 0 and data[at - 1 : at].isdigit():
        at -= 1
    while stop < len(data) and data[stop : stop + 1].isdigit():
        stop += 1
    return data[:at] + dice.choice(WORDS) + data[stop:]


def repeated(data, dice, _other):
    """A piece stands there twice."""
    at = dice.randrange(len(data))
    length = dice.randint(1, 40)
    return data[:at] + data[at : at + length] + data[at:]


def removed(data, dice, _other):
    """A piece is missing."""
    at = dice.randrange(len(data))
    return data[:at] + data[at + dice.randint(1, 12) :]


INJURIES = (flipped, truncated, mixed, worded, numbered, repeated, removed)


def injured(data, dice, other):
    """One to three injuries.

    Args:
        data: the bytes of a file.
        dice: decides all.
        other: another file of the same kind.
    """
    for _ in range(dice.choice((1, 1, 2, 3))):
        if data:
            data = dice.choice(INJURIES)(data, dice, other)
    return data
