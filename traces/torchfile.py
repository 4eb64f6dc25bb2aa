"""Tensors out of ``torch.save`` files, without torch and without executing anything.

A ``.pt`` file is a zip of raw storages and one pickle that says how they form tensors. The pickle is read as
data: a small interpreter knows lists, dicts, numbers, strings and one recipe, "a view of a storage". Any other
name in it is refused, so nothing in the file can run.

Source: the layout of ``torch.serialization`` (zip format, since 1.6) and of the standard library's pickle protocol 2.
"""

from __future__ import annotations

import math
import pickletools
import re
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.errors import TraceError
from traces.foreign import DAMAGE, decoding, head

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STORAGES = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "BFloat16Storage": "bf16",
    "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1",
    "BoolStorage": "?",
}  # fmt: skip
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_ORDERED = ("collections", "OrderedDict")
_WAY_OUT = "open it with torch.load(..., weights_only=True) and save plain tensors with numpy or safetensors"


@dataclass(frozen=True, slots=True)
class _Name:
    """A global the pickle mentions; only compared, never imported."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """A member of the archive that holds numbers."""

    key: str
    dtype: str
    count: int


def is_torch_file(path: Path) -> bool:
    """Whether this is a zip with a ``data.pkl`` in it; never raises."""
    if not head(path, 4).startswith(b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except DAMAGE:
        return False


def is_bare_pickle(path: Path) -> bool:
    """Whether this is a pickle outside a zip, such as ``torch.save`` wrote before 1.6; never raises."""
    start = head(path, 2)
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def refuse_pickle(path: Path) -> TraceError:
    """The line for a file that can only be opened by executing it."""
    return TraceError(
        f"{path}: expected a zip as torch.save writes it, found a bare pickle, which is never executed; {_WAY_OUT}"
    )


def load(path: Path) -> Any:
    """Lists, dicts, numbers, strings and numpy arrays as the file holds them.

    Raises:
        TraceError: not such a file, damaged, or it names anything but tensors.
    """
    with decoding(path, "torch file"), zipfile.ZipFile(path) as archive:
        members = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in members if name.endswith("data.pkl")]
        if len(pickles) != 1:
            raise TraceError(f"{path}: expected one data.pkl, found {len(pickles)}; {_WAY_OUT}")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in members.values()):
            raise TraceError(
                f"{path}: expected stored members as torch.save writes them, found compressed ones; {_WAY_OUT}"
            )
        prefix = pickles[0].removesuffix("data.pkl")
        order = f"{prefix}byteorder"
        if order in members and archive.read(order) != b"little":
            raise TraceError(f"{path}: expected little-endian numbers, found {archive.read(order)[:9]!r}; {_WAY_OUT}")
        return _Reader(path, archive, prefix).run(archive.read(pickles[0]))


class _Reader:
    """A stack machine for the few pickle instructions that describe data."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, prefix: str) -> None:
        self.path, self.archive, self.prefix = path, archive, prefix
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.marks: list[int] = []
        self.storages: dict[str, np.ndarray] = {}

    def run(self, data: bytes) -> Any:
        """What the instructions leave on the stack."""
        for code, argument, place in pickletools.genops(data):
            if code.name == "STOP":
                return self.stack.pop()
            if code.name == "MARK":
                self.marks.append(len(self.stack))
            elif code.name in _LITERALS:
                self.stack.append(argument)
            elif code.name in _CONSTANTS:
                self.stack.append(_constant(code.name))
            elif code.name == "GLOBAL":
                self.stack.append(_Name(*str(argument).split(" ", 1)))
            elif not self._remembered(code.name, argument) and code.name not in ("PROTO", "FRAME"):
                self._combine(code.name, place)
        raise TraceError(f"{self.path}: data.pkl: expected an end, found none; was it cut off while copying?")

    def _remembered(self, name: str, argument: Any) -> bool:
        """Carry out an instruction about the memo; False for any other."""
        if name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        else:
            return False
        return True

    def _combine(self, name: str, place: int | None) -> None:
        stack = self.stack
        if name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            parts = tuple(stack[-count:])
            if len(parts) < count:
                raise ValueError("stack underflow")
            stack[-count:] = [parts]
        elif name == "APPEND":
            value = stack.pop()
            self._target(list).append(value)
        elif name == "APPENDS":
            values = list(self._marked())
            self._target(list).extend(values)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._target(dict)[key] = value
        elif name == "SETITEMS":
            values = list(self._marked())
            self._target(dict).update(zip(values[::2], values[1::2], strict=True))
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(self._rebuilt(function, arguments))
        else:
            raise TraceError(
                f"{self.path}: data.pkl: byte {place}: refused instruction {name}: it is not data; {_WAY_OUT}"
            )

    def _target(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError(f"{type(self.stack[-1]).__name__} is no {kind.__name__}")
        return self.stack[-1]

    def _marked(self) -> Iterator[Any]:
        """What was pushed behind the last mark."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return iter(values)

    def _storage(self, identity: Any) -> _Storage:
        kind, storage, key, _, count = identity
        dtype = _STORAGES.get(storage.name) if isinstance(storage, _Name) and storage.module == "torch" else None
        if kind != "storage" or dtype is None:
            raise TraceError(f"{self.path}: data.pkl: refused {storage}: not a storage of numbers; {_WAY_OUT}")
        return _Storage(str(key), dtype, int(count))

    def _rebuilt(self, function: Any, arguments: Any) -> Any:
        if isinstance(function, _Name) and (function.module, function.name) == _ORDERED and arguments == ():
            return {}
        if not isinstance(function, _Name) or (function.module, function.name) != _REBUILD:
            called = f"{function.module}.{function.name}" if isinstance(function, _Name) else type(function).__name__
            raise TraceError(f"{self.path}: data.pkl: refused to call {called}: pickles are never executed; {_WAY_OUT}")
        storage, offset, size, stride = arguments[:4]
        numbers = self._numbers(storage)
        if min((offset, *size, *stride), default=0) < 0:
            raise ValueError("negative offset, size or stride")
        if math.prod(size) > len(numbers):
            raise ValueError(f"a tensor of shape {size} shows its storage of {len(numbers)} more than once")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and last >= max(len(numbers), 1):
            raise ValueError(f"a tensor of shape {size} reaches beyond its storage of {len(numbers)}")
        width = numbers.dtype.itemsize
        view = np.lib.stride_tricks.as_strided(
            numbers[offset:], tuple(size), tuple(step * width for step in stride), writeable=False
        )
        return from_bf16(view) if storage.dtype == "bf16" else view

    def _numbers(self, storage: Any) -> np.ndarray:
        if not isinstance(storage, _Storage):
            raise TypeError("a tensor without storage")
        if storage.key not in self.storages:
            data = self.archive.read(f"{self.prefix}data/{storage.key}")
            dtype = "<u2" if storage.dtype == "bf16" else storage.dtype
            self.storages[storage.key] = np.frombuffer(data, dtype)
        return self.storages[storage.key]


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Numbers whose upper half is stored: uint16 to float32."""
    return np.asarray(bits.astype(np.uint32, order="C") << 16).view(np.float32)


_CONSTANTS = {"NONE", "NEWTRUE", "NEWFALSE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"}


def _constant(name: str) -> Any:
    """A fresh value of an instruction without arguments."""
    return {"NEWTRUE": True, "NEWFALSE": False, "EMPTY_LIST": [], "EMPTY_DICT": {}, "EMPTY_TUPLE": ()}.get(name)


_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "SHORT_BINSTRING", "BINSTRING", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip


def words(path: Path) -> set[str]:
    """The strings in a torch file's pickle, as far as they can be read; never raises."""
    found: set[str] = set()
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as file:
                start = file.read(1 << 20)
            if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
                return found
            with archive.open(name) as file:
                file.seek(max(0, archive.getinfo(name).file_size - 4096))
                end = file.read()
    except DAMAGE:
        return found
    for data in (start, end):
        for match in re.finditer(rb"X(....)", data, re.DOTALL):
            length = int.from_bytes(match[1], "little")
            if length < 256:
                found.add(data[match.end() : match.end() + length].decode(errors="replace"))
    return found
