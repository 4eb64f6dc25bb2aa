"""Injuries to the bytes of a file, as disks, networks, editors and attackers make them."""

import json
import re
import tomllib
from contextlib import suppress

import tomli_w

WORDS = (
    b"-1", b"0", b"2", b"999999999999", b"1e309", b"1e9", b"-0.0", b"0.5", b"null",
    b"nan", b"NaN", b"Infinity", b"true", b'"x"', b'""', b"[]", b"{}", b"[[[[", b",",
    b":", b"\n", b"\xff\xfe", b"\xed\xa0\x80", b"\x00" * 8,
)  # fmt: skip


def flipped(data, dice, _other):
    """One bit."""
    body = bytearray(data)
    at = dice.randrange(len(body))
    body[at] ^= 1 << dice.randrange(8)
    return bytes(body)


def truncated(data, dice, _other):
    """The end is missing."""
    return data[: dice.randrange(len(data))]


def spliced(data, dice, other):
    """A piece is gone, stands there twice, or is a word or another file's."""
    at = dice.randrange(len(data))
    stop = at + dice.randint(0, 40)
    words = dice.choice(WORDS), b"", 2 * data[at:stop], other[at:stop]
    return data[:at] + dice.choice(words) + data[stop:]


def numbered(data, dice, _other):
    """Another value in the place of a whole number."""
    numbers = list(re.finditer(rb"\d+", data))
    if not numbers:
        return flipped(data, dice, _other)
    number = dice.choice(numbers)
    return data[: number.start()] + dice.choice(WORDS) + data[number.end() :]


VALUES = (
    None, True, -1, 0, 1, 3, 2.5, -0.0, 1e308, float("nan"), float("inf"), 10**12,
    10**30, "", "x", "\x00", "\ud800", "../../etc/passwd", [], {}, [None], [[[]]],
    {"x": 1},
)  # fmt: skip


def restructured(data, dice, other):
    """Another value, one less, one more or two exchanged in JSON, JSON lines or TOML.

    What is none of these gets another injury.
    """
    text = data.decode("utf-8", "replace")
    for read, write in ((json.loads, json.dumps), (tomllib.loads, tomli_w.dumps)):
        with suppress(ValueError, TypeError, AttributeError, RecursionError):
            return write(_changed(read(text), dice)).encode()
    lines = text.split("\n")
    at = dice.randrange(len(lines))
    with suppress(ValueError, RecursionError):
        lines[at] = json.dumps(_changed(json.loads(lines[at]), dice))
        return "\n".join(lines).encode("utf-8", "replace")
    return spliced(data, dice, other)


def _changed(tree, dice):
    """A tree of lists and objects with one change at a random place."""
    # Walks down from the root, so that every depth is met.
    root = [tree]
    place, key = root, 0
    while isinstance(place[key], list | dict) and place[key] and dice.random() < 0.85:
        place = place[key]
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = dice.choice(keys)

    kind = dice.randrange(6)
    if kind == 0 and place is not root:
        del place[key]
    elif kind == 1 and isinstance(place, list):
        place.insert(key, dice.choice(VALUES))
    elif kind == 2 and isinstance(place, list):
        other = dice.randrange(len(place))
        place[key], place[other] = place[other], place[key]
    elif kind == 3 and isinstance(place, dict):
        place[dice.choice(("x", "", "name", "version"))] = dice.choice(VALUES)
    elif kind == 4 and isinstance(place[key], int | float):
        place[key] = place[key] * dice.choice((-1, 10**6, 0.5, 2))
    else:
        place[key] = dice.choice(VALUES)
    return root[0]


# JSON begins with a bracket, our TOML with a key or a comment.
TREES_BEGIN = tuple(bytes([letter]) for letter in b"[{#nt")
INJURIES = (flipped, truncated, numbered, spliced, spliced, spliced)


def injured(data, dice, other):
    """One to three injuries.

    Args:
        data: the bytes of a file.
        dice: decides all.
        other: another file of the same kind.
    """
    if data[:1] in TREES_BEGIN and dice.random() < 0.5:
        return restructured(data, dice, other)
    for _ in range(dice.choice((1, 1, 2, 3))):
        if data:
            data = dice.choice(INJURIES)(data, dice, other)
    return data
