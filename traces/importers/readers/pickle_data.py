"""Pickles read as data: the standard library's machine builds lists, dicts, numbers and
strings, and nothing else.

Its instructions are looked through before it starts. One that does more than hold data
is refused, and so are containers nested too deep: Python hashes a key of a dict to the
bottom, tuple in tuple, until its stack is used up. A name is never imported: it becomes
a `GlobalName`, and calling one does what the reader of the file has said, or is
refused.

Source: the standard library's pickle protocol 2 to 5, as `pickletools` describes it.
"""

from __future__ import annotations

import gc
import io
import pickle
import pickletools
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

WAY_OUT = (
    "open it with torch.load(..., weights_only=True) and save plain tensors with numpy"
    " or safetensors"
)

# Containers in each other; what engines write has some five.
DEEPEST = 100

# Instructions that hold data. GLOBAL, BINPERSID and REDUCE only name and call what the
# reader of the file allows.
_DATA = frozenset(
    {
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "EMPTY_LIST",
        "EMPTY_DICT",
        "EMPTY_TUPLE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINSTRING",
        "BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "APPEND",
        "APPENDS",
        "SETITEM",
        "SETITEMS",
        "BINPUT",
        "LONG_BINPUT",
        "MEMOIZE",
        "BINGET",
        "LONG_BINGET",
        "GLOBAL",
        "BINPERSID",
        "REDUCE",
    }
)
_PUTS = ("BINPUT", "LONG_BINPUT", "MEMOIZE")
_CODES = {ord(code.code): code.name for code in pickletools.opcodes}

# Bytes behind an instruction; _COUNTED + n stands for n bytes that say how many follow.
_REFUSED = -1
_TWO_LINES = -2
_COUNTED = 16

# What becomes of the values that an instruction takes off the stack: nothing, one value
# on the stack, part of the value below, or a value out of the memo.
_NOTHING = 0
_PUSH = 1
_INTO = 2
_GET = 3
_TO_MARK = -1
# The depth that stands for a mark on the stack of depths.
_MARK = 255


def _argument_bytes() -> np.ndarray:
    """int64 [256]: how many bytes follow each instruction."""
    counted = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }
    table = np.full(256, _REFUSED)

    for code in pickletools.opcodes:
        if code.name not in _DATA:
            continue
        size = 0 if code.arg is None else code.arg.n
        if size < 0:
            size = _COUNTED + counted[size] if size in counted else _TWO_LINES
        table[ord(code.code)] = size

    return table


def _stack_effects() -> np.ndarray:
    """int64 [256, 2]: what becomes of the values an instruction takes off the stack,
    and how many they are.
    """
    table = np.zeros((256, 2), np.int64)
    containers = (pickletools.pylist, pickletools.pydict)

    for code in pickletools.opcodes:
        # Putting into the memo leaves the stack as it is.
        if code.name not in _DATA or code.name in _PUTS or not code.stack_after:
            continue

        into = code.stack_after[0] in containers and len(code.stack_before) > 0
        taken = code.stack_before[into:]
        kind = _PUSH
        if into:
            kind = _INTO
        elif "BINGET" in code.name:
            kind = _GET

        count = _TO_MARK if pickletools.stackslice in taken else len(taken)
        table[ord(code.code)] = (kind, count)

    return table


_ARGUMENT_BYTES = _argument_bytes()
_STACK_EFFECTS = _stack_effects()
_IS_PUT = bytes(_CODES.get(code) in _PUTS for code in range(256))


class GlobalName:
    """A global the pickle mentions; only compared, never imported."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __str__(self) -> str:
        """As Python writes it."""
        return f"{self.module}.{self.name}"

    def __call__(self, *_: Any) -> Any:
        """Refuse."""
        raise TraceError(
            f"refused to call {self}: pickles are never executed; {WAY_OUT}"
        )


class _DataUnpickler(pickle.Unpickler):
    """The standard library's, for which every name is a recipe or a `GlobalName`."""

    def __init__(
        self,
        data: bytes,
        recipes: Mapping[tuple[str, str], Callable[..., Any]],
        stored: Callable[[Any], Any],
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")
        self._recipes = recipes
        self._stored = stored

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        return self._recipes.get((module, name)) or GlobalName(module, name)

    def persistent_load(self, identity: Any) -> Any:
        return self._stored(identity)


def read_pickle(
    path: Path,
    place: str,
    data: bytes,
    recipes: Mapping[tuple[str, str], Callable[..., Any]],
    stored: Callable[[Any], Any],
) -> Any:
    """Return what a pickle holds; raises as decoding does.

    Args:
        path: the file, for errors.
        place: of the pickle in it, for errors.
        data: the pickle.
        recipes: module and name -> what a call of it gives.
        stored: what a persistent id stands for.

    Raises:
        TraceError: an instruction that is not data, a call without a recipe, containers
            nested too deep, no end.
    """
    _check_instructions(path, place, data)

    collecting = gc.isenabled()
    # The collector would look through all that is built again and again, which takes
    # longer than building it.
    gc.disable()
    try:
        return _DataUnpickler(data, recipes, stored).load()
    except pickle.PickleError as error:
        raise ValueError(f"{place}: {error}") from None
    except TraceError as error:
        raise TraceError(f"{path}: {place}: {error}") from None
    finally:
        if collecting:
            gc.enable()


def _check_instructions(path: Path, place: str, data: bytes) -> None:
    at, too_deep = _first_stop(data, _ARGUMENT_BYTES, _STACK_EFFECTS, _IS_PUT)

    if too_deep:
        raise TraceError(
            f"{path}: {place}: byte {at}: expected at most {DEEPEST} containers in each"
            f" other, found more; {WAY_OUT}"
        )
    if at >= len(data):
        raise TraceError(
            f"{path}: {place}: expected an end, found none; was it cut off while"
            " copying?"
        )
    if data[at] != ord("."):
        name = _CODES.get(data[at], f"{data[at]:#x}")
        raise TraceError(
            f"{path}: {place}: byte {at}: refused instruction {name}: it is not data;"
            f" {WAY_OUT}"
        )


def _first_stop(  # noqa: C901, PLR0912 - one pass over the bytes
    data: bytes,
    argument_bytes: np.ndarray,
    stack_effects: np.ndarray,
    is_put: bytes,
) -> tuple[int, bool]:
    """The byte of the STOP or of the first instruction that is not data; at least the
    length where neither comes.

    No data either is a memo that is not numbered in turn: the machine allocates places
    for all numbers below. True beside the byte of the first instruction that puts more
    than `DEEPEST` containers in each other; a list that grows once it is part of
    another is not noticed there, but lists are no keys.
    """
    # Depth of each value that the machine would have on its stack and in its memo.
    stack = bytearray(len(data) + 1)
    memo = bytearray(len(data) + 1)
    deepest = DEEPEST
    height = 0
    puts = 0
    at = 0

    while at < len(data):
        begin = at
        code = data[at]
        size = argument_bytes[code]
        if code == 46 or size == _REFUSED:  # STOP
            return begin, False
        at += 1

        # The argument: two lines of text, or a number, perhaps of bytes that follow.
        number = 0
        if size == _TWO_LINES:
            for _ in range(2):
                while at < len(data) and data[at] != 10:
                    at += 1
                at += 1
        else:
            width = size - _COUNTED if size >= _COUNTED else size
            for byte in range(min(width, len(data) - at)):
                digit = data[at + byte]
                number |= digit << 8 * byte
            at += width

            if size >= _COUNTED:
                # Unsigned: a length near 2**64 must not become negative.
                if at > len(data) or number > len(data) - at:
                    return len(data), False
                at += number
            elif is_put[code]:
                if not width:  # MEMOIZE has no number: the next one
                    number = puts
                if number > puts:
                    return begin, False
                memo[number] = stack[height - 1] if height else 0
                puts += number == puts

        # The stack: a container is one deeper than the deepest value in it.
        effect = stack_effects[code, 0]
        count = stack_effects[code, 1]
        if effect == _NOTHING:
            continue

        depth = 0
        # Where the stack holds too little, the machine itself will end here.
        while count != 0 and height > 0:
            height -= 1
            count -= 1
            if stack[height] == _MARK:
                break
            depth = max(depth, stack[height] + 1)

        if effect == _INTO and height > 0:
            height -= 1
            depth = max(depth, stack[height])
        elif effect == _GET:
            depth = memo[number] if number < puts else 0
        elif code == 40:  # MARK
            depth = _MARK

        if deepest < depth < _MARK:
            return begin, True
        stack[height] = depth
        height += 1

    return len(data), False
