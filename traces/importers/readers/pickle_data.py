"""Pickles read as data: the standard library's machine builds lists, dicts, numbers and
strings, and nothing of ours.

Its instructions are looked through before it starts, and one that does more than hold
data is refused, or that holds it too deep: Python looks into a key of a dict to the
bottom, tuple in tuple, until its stack is used up. A name is never imported: it becomes
a `Name`, and calling one does what the reader of the file has said, or is refused.

Source: the standard library's pickle protocol 2 to 5, as `pickletools` describes it.
"""

from __future__ import annotations

import gc
import io
import pickle
import pickletools
from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.compilation import compiled
from moesim.traces.errors import TraceError
from numba import types as nb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

WAY_OUT = (
    "open it with torch.load(..., weights_only=True) and save plain tensors with numpy"
    " or safetensors"
)
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
# _COUNTED + n: n bytes that say how many follow
_REFUSED = -1
_TWO_LINES = -2
_COUNTED = 16
_PUTS = {"BINPUT": 1, "LONG_BINPUT": 4, "MEMOIZE": 0}
# What becomes of what an instruction takes off the stack.
_NOTHING, _PUSH, _INTO, _GET = range(4)
_TO_MARK = -1
_MARK = 255  # on the stack of depths
DEEPEST = 100
"""Containers in each other; what engines write has some five."""


def _arguments() -> np.ndarray:
    """int64 [256]: how many bytes follow each instruction."""
    table = np.full(256, _REFUSED)
    counted = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }
    for code in pickletools.opcodes:
        if code.name in _DATA:
            size = 0 if code.arg is None else code.arg.n
            known = (
                size
                if size >= 0
                else _COUNTED + counted[size]
                if size in counted
                else _TWO_LINES
            )
            table[ord(code.code)] = known
    return table


def _effects() -> np.ndarray:
    """int64 [256, 2]: what becomes of the values an instruction takes off the stack,
    and how many they are.
    """
    table = np.zeros((256, 2), np.int64)
    for code in pickletools.opcodes:
        if code.name in _DATA and code.stack_after and code.name not in _PUTS:
            into = (
                code.stack_after[0] in (pickletools.pylist, pickletools.pydict)
                and len(code.stack_before) > 0
            )
            taken = code.stack_before[into:]
            kind = _INTO if into else _GET if "BINGET" in code.name else _PUSH
            table[ord(code.code)] = (
                kind,
                _TO_MARK if pickletools.stackslice in taken else len(taken),
            )
    return table


_ARGUMENTS = _arguments()
_EFFECTS = _effects()
_CODES = {ord(code.code): code.name for code in pickletools.opcodes}
_IS_PUT = np.array([_CODES.get(code) in _PUTS for code in range(256)])


class Name:
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


class _Machine(pickle.Unpickler):
    """The standard library's, for which every name is a recipe or a `Name`."""

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
        return self._recipes.get((module, name)) or Name(module, name)

    def persistent_load(self, identity: Any) -> Any:
        return self._stored(identity)


def unpickled(
    path: Path,
    place: str,
    data: bytes,
    recipes: Mapping[tuple[str, str], Callable[..., Any]],
    stored: Callable[[Any], Any],
) -> Any:
    """What a pickle holds; raises as decoding does.

    Args:
        path: the file, for errors.
        place: of the pickle in it, for errors.
        data: the pickle.
        recipes: module and name -> what a call of it gives.
        stored: what a persistent id stands for.

    Raises:
        TraceError: an instruction that is not data, a call without a recipe, data in
            data without end, no end.
    """
    at, deep = _end(np.frombuffer(data, np.uint8), _ARGUMENTS, _EFFECTS, _IS_PUT)
    if deep:
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
        what = _CODES.get(data[at], f"{data[at]:#x}")
        raise TraceError(
            f"{path}: {place}: byte {at}: refused instruction {what}: it is not data;"
            f" {WAY_OUT}"
        )
    collecting = gc.isenabled()
    # it would look through all that is built again and again, which takes longer than
    # building it
    gc.disable()
    try:
        return _Machine(data, recipes, stored).load()
    except pickle.PickleError as error:
        raise ValueError(f"{place}: {error}") from None
    except TraceError as error:
        raise TraceError(f"{path}: {place}: {error}") from None
    finally:
        if collecting:
            gc.enable()


@compiled(
    nb.Tuple((nb.int64, nb.boolean))(
        nb.Array(nb.uint8, 1, "C", readonly=True),
        nb.int64[::1],
        nb.int64[:, ::1],
        nb.boolean[::1],
    )
)
def _end(  # noqa: C901, PLR0912 - one pass over the bytes
    data: np.ndarray, arguments: np.ndarray, effects: np.ndarray, is_put: np.ndarray
) -> tuple[int, bool]:
    """The byte of the STOP or of the first instruction that is not data; at least the
    length where neither comes.

    No data either is a memo that is not numbered in turn: the machine makes room for
    all numbers below. True beside the byte of the first instruction that puts more than
    `DEEPEST` containers in each other; a list that grows once it is part of another is
    not noticed there, but lists are no keys.
    """
    # depths of what is there
    stack = np.empty(len(data) + 1, np.uint8)
    memo = np.empty(len(data) + 1, np.uint8)
    at = puts = held = 0
    while at < len(data):
        begin = at
        code = data[at]
        kind = arguments[code]
        if code == 46 or kind == _REFUSED:
            return begin, False
        at += 1
        number = np.uint64(0)
        if kind == _TWO_LINES:
            for _ in range(2):
                while at < len(data) and data[at] != 10:
                    at += 1
                at += 1
        else:
            width = kind - _COUNTED if kind >= _COUNTED else kind
            for byte in range(min(width, len(data) - at)):
                number |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
            at += width
            if kind >= _COUNTED:
                if at > len(data) or number > np.uint64(len(data) - at):
                    return len(data), False
                at += np.int64(number)
            elif is_put[code]:
                if not width:
                    number = np.uint64(puts)
                if number > np.uint64(puts):
                    return begin, False
                memo[number] = stack[held - 1] if held else 0
                puts += number == np.uint64(puts)
        into, count = effects[code]
        if into == _NOTHING:
            continue
        depth = 0
        # Where too little is there, the machine will end here.
        while count != 0 and held > 0:
            held = held - 1
            count = count - 1
            if stack[held] == _MARK:
                break
            depth = max(depth, int(stack[held]) + 1)
        if into == _INTO and held > 0:
            held -= 1
            depth = max(depth, int(stack[held]))
        elif into == _GET:
            depth = int(memo[number]) if number < np.uint64(puts) else 0
        elif code == 40:
            depth = _MARK
        if DEEPEST < depth < _MARK:
            return begin, True
        stack[held] = depth
        held += 1
    return len(data), False
