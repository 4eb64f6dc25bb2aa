"""Tensors out of ``torch.save`` files, without torch and without executing anything.

A ``.pt`` file is a zip of raw storages and one pickle that says how they form tensors. The pickle is read as
data: a small interpreter knows lists, dicts, numbers, strings and one recipe, "a view of a storage". Any other
name in it is refused, so nothing in the file can run.

Source: the layout of ``torch.serialization`` (zip format, since 1.6) and of the standard library's pickle protocol 2.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickletools
import re
import struct
import weakref
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.errors import TraceError
from traces.foreign import DAMAGE, Once, decoding, head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_STORAGES = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "BFloat16Storage": "bf16",
    "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1",
    "BoolStorage": "?",
}  # fmt: skip
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_ORDERED = ("collections", "OrderedDict")
_TAIL_BYTES = 65_557 + 20  # the end of a zip with the longest comment, and what says where a large one ends
_HEADER_BYTES = 512  # most local headers, with torch's padding
_ENTRY = struct.Struct("<4s6xH4xLLLHHH8xL")
_LARGE = 0xFFFFFFFF
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


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that is still in its file: a view of a storage."""

    archive: Archive
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def raw(self) -> np.dtype:
        """Type of its numbers in the file."""
        return np.dtype("<u2" if self.storage.dtype == "bf16" else self.storage.dtype)

    def in_order(self) -> Callable[[], Callable[[int], bytes]] | None:
        """What begins to read its bytes, where they are all of its storage and lie row by row; otherwise None."""
        name = f"data/{self.storage.key}"
        size = self.archive.members[self.archive.prefix + name][1]
        dense = self.offset == 0 and self.stride == _dense(self.shape)
        if not dense or math.prod(self.shape) * self.raw.itemsize != size:
            return None
        return lambda: self.archive.begin(name)

    def array(self) -> np.ndarray:
        """Its numbers, read-only. Raises as reading damaged zips does."""
        dtype = self.raw
        numbers = np.frombuffer(self.archive.read(f"data/{self.storage.key}"), dtype)
        if self.offset == 0 and self.stride == _dense(self.shape):
            view = numbers[: math.prod(self.shape)].reshape(self.shape)
        else:
            strides = tuple(step * dtype.itemsize for step in self.stride)
            view = np.lib.stride_tricks.as_strided(numbers[self.offset :], self.shape, strides, writeable=False)
        return from_bf16(view) if self.storage.dtype == "bf16" else view


@functools.cache
def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of numbers that lie row by row."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def is_torch_file(path: Path) -> bool:
    """Whether this is a zip with a ``data.pkl`` in it; never raises."""
    start = head(path, 512)
    if not start.startswith(b"PK\x03\x04"):
        return False
    if start[30 : 30 + int.from_bytes(start[26:28], "little")].endswith(b"data.pkl"):
        return True  # torch writes it first
    try:
        return any(name.endswith("data.pkl") for name in _archive.kept(path).members)
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


def load(path: Path, *, stored: bool = False) -> Any:
    """Lists, dicts, numbers, strings and numpy arrays as the file holds them.

    Args:
        path: the file.
        stored: whether tensors are left in the file, as `Stored`.

    Raises:
        TraceError: not such a file, damaged, or it names anything but tensors.
    """
    with decoding(path, "torch file"):
        archive = _archive.kept(path)
        pickles = [name for name in archive.members if name.endswith("data.pkl")]
        if len(pickles) != 1:
            raise TraceError(f"{path}: expected one data.pkl, found {len(pickles)}; {_WAY_OUT}")
        if archive.packed:
            raise TraceError(
                f"{path}: expected stored members as torch.save writes them, found compressed ones; {_WAY_OUT}"
            )
        archive.prefix = pickles[0].removesuffix("data.pkl")
        if f"{archive.prefix}byteorder" in archive.members and (order := archive.read("byteorder")) != b"little":
            raise TraceError(f"{path}: expected little-endian numbers, found {order[:9]!r}; {_WAY_OUT}")
        return _Reader(path, archive, stored=stored).run(archive.read("data.pkl"))


class Archive:
    """The members of a zip, found as fast as thousands of small ones need; torch writes one per tensor.

    Source: the layout of zip (APPNOTE 4.3, 4.5.3), as far as members that are stored.
    """

    def __init__(self, path: Path) -> None:
        self.prefix = ""
        self.packed = False
        self.members: dict[str, tuple[int, int, int]] = {}  # name -> local header, bytes, crc
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        size = os.fstat(self._file).st_size
        tail_at = max(0, size - _TAIL_BYTES)
        tail = os.pread(self._file, _TAIL_BYTES, tail_at)
        end = tail.rfind(b"PK\x05\x06")
        if end < 0:
            raise zipfile.BadZipFile("File is not a zip file")
        count, length, at = struct.unpack_from("<HLL", tail, end + 10)
        if end >= 20 and tail[end - 20 : end - 16] == b"PK\x06\x07":
            (large,) = struct.unpack_from("<Q", tail, end - 12)
            count, length, at = struct.unpack_from("<QQQ", os.pread(self._file, 56, large), 32)
        directory = os.pread(self._file, min(length, size), at)
        place = 0
        for _ in range(count):
            mark, method, crc, packed, unpacked, name, extra, note, header = _ENTRY.unpack_from(directory, place)
            if mark != b"PK\x01\x02":
                raise zipfile.BadZipFile("Bad magic number for central directory")
            place += _ENTRY.size
            called = directory[place : place + name].decode("utf-8")
            if _LARGE in (packed, unpacked, header):
                wide = _wide(directory[place + name : place + name + extra])
                unpacked, packed, header = (
                    next(wide) if short == _LARGE else short for short in (unpacked, packed, header)
                )
            self.packed |= method != zipfile.ZIP_STORED or packed != unpacked
            self.members[called] = (header, unpacked, crc)
            place += name + extra + note

    def read(self, name: str) -> bytes:
        """A member's bytes; raises as `zipfile` does."""
        header, size, crc = self.members[self.prefix + name]
        found = os.pread(self._file, _HEADER_BYTES + size, header)
        if found[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile("Bad magic number for file header")
        start = 30 + int.from_bytes(found[26:28], "little") + int.from_bytes(found[28:30], "little")
        if start > _HEADER_BYTES:
            found, start = os.pread(self._file, size, header + start), 0
        data = found[start : start + size]
        if len(data) < size or zlib.crc32(data) != crc:
            raise zipfile.BadZipFile(f"Bad CRC-32 for file {name!r}")
        return data

    def part(self, name: str, start: int, stop: int) -> bytes:
        """Some of a member's bytes, unchecked."""
        header, size, _ = self.members[self.prefix + name]
        begin = os.pread(self._file, 30, header)
        data_at = header + 30 + int.from_bytes(begin[26:28], "little") + int.from_bytes(begin[28:30], "little")
        return os.pread(self._file, max(0, min(stop, size) - start), data_at + start)

    def begin(self, name: str) -> Callable[[int], bytes]:
        """A function that gives a member's next so many bytes, and raises at the last one where their sum is wrong."""
        _, size, crc = self.members[self.prefix + name]
        at = found = 0

        def read(count: int) -> bytes:
            nonlocal at, found
            data = self.part(name, at, at + count)
            at, found = at + len(data), zlib.crc32(data, found)
            if at >= size and found != crc:
                raise zipfile.BadZipFile(f"Bad CRC-32 for file {name!r}")
            return data

        return read


def _wide(extra: bytes) -> Iterator[int]:
    """The 64-bit numbers of a directory entry."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            return iter(struct.unpack_from(f"<{length // 8}Q", extra, 4))
        extra = extra[4 + length :]
    return iter(())


_archive = Once(Archive)


class _Reader:
    """A stack machine for the few pickle instructions that describe data."""

    def __init__(self, path: Path, archive: Archive, *, stored: bool) -> None:
        self.path, self.archive, self.stored = path, archive, stored
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.marks: list[int] = []

    def run(self, data: bytes) -> Any:  # noqa: C901, PLR0912 - a branch per instruction
        """What the instructions leave on the stack."""
        stack, memo = self.stack, self.memo
        file, at, size = io.BytesIO(data), 0, len(data)
        while at < size:  # the frequent ones first: a dump has hundreds of thousands
            code = data[at]
            at += 1
            if code == 0x71:  # BINPUT
                memo[data[at]] = stack[-1]
                at += 1
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x72:  # LONG_BINPUT
                memo[int.from_bytes(data[at : at + 4], "little")] = stack[-1]
                at += 4
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x4D:  # BININT2
                stack.append(data[at] | data[at + 1] << 8)
                at += 2
            elif code in _FRESH:
                stack.append(_constant(_FRESH[code]))
            elif code in _COMBINING:
                self._combine(_COMBINING[code], at - 1)
            elif code == 0x58:  # BINUNICODE
                length = int.from_bytes(data[at : at + 4], "little")
                if at + 4 + length > size:
                    raise ValueError(f"expected {length} bytes in a string, found {size - at - 4}")
                stack.append(data[at + 4 : at + 4 + length].decode("utf-8", "surrogatepass"))
                at += 4 + length
            elif code == 0x28:  # MARK
                self.marks.append(len(stack))
            elif code == 0x2E:  # STOP
                return stack.pop()
            else:
                at = self._other(code, file, at)
        raise TraceError(f"{self.path}: data.pkl: expected an end, found none; was it cut off while copying?")

    def _other(self, code: int, file: io.BytesIO, at: int) -> int:
        """Carry out any instruction; where the next one is."""
        found = _CODES.get(code)
        if found is None:
            raise ValueError(f"at position {at - 1}, opcode {bytes([code])!r} unknown")
        argument = None
        if found.arg is not None:
            file.seek(at)
            argument = found.arg.reader(file)
        name = found.name
        if name in _LITERALS:
            self.stack.append(argument)
        elif name == "GLOBAL":
            self.stack.append(_Name(*str(argument).split(" ", 1)))
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name not in ("PROTO", "FRAME"):
            self._combine(name, at - 1)
        return at if argument is None and found.arg is None else file.tell()

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
        if not isinstance(storage, _Storage):
            raise TypeError("a tensor without storage")
        if min((offset, *size, *stride), default=0) < 0:
            raise ValueError("negative offset, size or stride")
        width = np.dtype("<u2" if storage.dtype == "bf16" else storage.dtype).itemsize
        numbers, rest = divmod(self.archive.members[f"{self.archive.prefix}data/{storage.key}"][1], width)
        if rest:
            raise ValueError("buffer size must be a multiple of element size")
        if math.prod(size) > numbers:
            raise ValueError(f"a tensor of shape {size} shows its storage of {numbers} more than once")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and last >= max(numbers, 1):
            raise ValueError(f"a tensor of shape {size} reaches beyond its storage of {numbers}")
        found = Stored(self.archive, storage, offset, tuple(size), tuple(stride))
        return found if self.stored else found.array()


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Numbers whose upper half is stored: uint16 to float32."""
    return np.asarray(bits.astype(np.uint32, order="C") << 16).view(np.float32)


_CODES = {ord(op.code): op for op in pickletools.opcodes}


def _codes(*names: str) -> dict[int, str]:
    """Instructions by their byte."""
    return {code: op.name for code, op in _CODES.items() if op.name in names}


_FRESH = _codes("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE")
_COMBINING = _codes(
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINPERSID", "REDUCE"
)


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
        archive = _archive.kept(path)
        name = next(name for name in archive.members if name.endswith("data.pkl"))
        archive.prefix = name.removesuffix("data.pkl")
        size = archive.members[name][1]
        start, end = archive.part("data.pkl", 0, 1 << 20), archive.part("data.pkl", max(0, size - 4096), size)
    except (StopIteration, *DAMAGE):
        return found
    for data in (start, end):
        for match in re.finditer(rb"X(....)", data, re.DOTALL):
            length = int.from_bytes(match[1], "little")
            if length < 256:
                found.add(data[match.end() : match.end() + length].decode(errors="replace"))
    return found
