"""Injuries to the bytes of a file, as disks, networks, editors and attackers make them."""

import json
import tomllib

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


VALUES = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    10**12,
    10**30,
    "",
    "x",
    "\x00",
    "\ud800",
    "../../etc/passwd",
    [],
    {},
    [None],
    [[[]]],
    {"x": 1},
)


def restructured(data, dice, _other):
    """Another value, one less, one more or two exchanged in JSON, JSON lines or TOML.

    What is none of these gets another injury.
    """
    text = data.decode("utf-8", "replace")
    try:
        return json.dumps(_changed(json.loads(text), dice)).encode()
    except (ValueError, RecursionError):
        pass
    try:
        return tomli_w.dumps(_changed(tomllib.loads(text), dice)).encode()
    except (ValueError, TypeError, AttributeError):
        pass
    lines = text.split("\n")
    at = dice.randrange(len(lines))
    try:
        lines[at] = json.dumps(_changed(json.loads(lines[at]), dice))
    except ValueError:
        return worded(data, dice, _other)
    return "\n".join(lines).encode("utf-8", "replace")


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
INJURIES = (flipped, truncated, mixed, worded, numbered, repeated, removed)


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
