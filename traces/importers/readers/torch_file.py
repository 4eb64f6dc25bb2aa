"""Tensors out of ``torch.save`` files, without torch and without executing anything.

A ``.pt`` file is a zip of raw storages and one pickle that says how they form tensors.
The pickle is read as data: lists, dicts, numbers, strings and one recipe, "a view of a
storage". Any other name in it is refused, so nothing in the file can run.

Source: the layout of ``torch.serialization`` (zip format, since 1.6).
"""

from __future__ import annotations

import functools
import math
import os
import re
import struct
import weakref
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from moesim.traces.errors import TraceError
from moesim.traces.importers.readers.foreign import DAMAGE, Once, decoding, head
from moesim.traces.importers.readers.pickle_data import WAY_OUT, Name, unpickled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_TYPES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bf16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}
_STORAGES = {
    name: (dtype, np.dtype("<u2" if dtype == "bf16" else dtype))
    for name, dtype in _TYPES.items()
}
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_ORDERED = ("collections", "OrderedDict")
# The end of a zip with the longest comment, and what says where a large one ends.
_TAIL_BYTES = 65_557 + 20
_HEADER_BYTES = 512  # most local headers, with torch's padding
_AHEAD_BYTES = 1 << 18
_ENTRY = struct.Struct("<4s6xH4xLLLHHH8xL")
_LOCAL = struct.Struct("<4s22xHH")
_LARGE = 0xFFFFFFFF


class _Storage(NamedTuple):
    """A member of the archive that holds numbers; `raw` is their type in the file."""

    key: str
    dtype: str
    raw: np.dtype


@dataclass(slots=True)  # there are thousands, and a frozen one takes a microsecond more
class Stored:
    """A tensor that is still in its file: a view of a storage."""

    archive: Archive
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def in_order(self) -> Callable[[], Callable[[int], bytes]] | None:
        """What begins to read its bytes, where they are all of its storage and lie row
        by row; otherwise None.
        """
        name = f"data/{self.storage.key}"
        size = self.archive.members[self.archive.prefix + name][1]
        dense = self.offset == 0 and self.stride == _dense(self.shape)
        if not dense or math.prod(self.shape) * self.storage.raw.itemsize != size:
            return None
        return lambda: self.archive.begin(name)

    def array(self) -> np.ndarray:
        """Its numbers, read-only. Raises as reading damaged zips does."""
        dtype = self.storage.raw
        numbers = np.frombuffer(self.archive.read(f"data/{self.storage.key}"), dtype)
        if self.offset == 0 and self.stride == _dense(self.shape):
            view = numbers[: math.prod(self.shape)].reshape(self.shape)
        else:
            strides = tuple(step * dtype.itemsize for step in self.stride)
            view = np.lib.stride_tricks.as_strided(
                numbers[self.offset :], self.shape, strides, writeable=False
            )
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
    """Whether this is a pickle outside a zip, such as ``torch.save`` wrote before 1.6;
    never raises.
    """
    start = head(path, 2)
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def refuse_pickle(path: Path) -> TraceError:
    """The line for a file that can only be opened by executing it."""
    return TraceError(
        f"{path}: expected a zip as torch.save writes it, found a bare pickle, which is"
        f" never executed; {WAY_OUT}"
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
            raise TraceError(
                f"{path}: expected one data.pkl, found {len(pickles)}; {WAY_OUT}"
            )
        if archive.packed:
            raise TraceError(
                f"{path}: expected stored members as torch.save writes them, found"
                f" compressed ones; {WAY_OUT}"
            )
        archive.prefix = pickles[0].removesuffix("data.pkl")
        if (
            f"{archive.prefix}byteorder" in archive.members
            and (order := archive.read("byteorder")) != b"little"
        ):
            raise TraceError(
                f"{path}: expected little-endian numbers, found {order[:9]!r};"
                f" {WAY_OUT}"
            )
        tensors = _Tensors(archive, stored=stored)
        recipes: dict[tuple[str, str], Callable[..., Any]] = {
            _REBUILD: tensors.rebuilt,
            _ORDERED: dict,
        }
        return unpickled(
            path, "data.pkl", archive.read("data.pkl"), recipes, tensors.storage
        )


class Archive:
    """The members of a zip, found as fast as thousands of small ones need; torch writes
    one per tensor.

    Source: the layout of zip (APPNOTE 4.3, 4.5.3), as far as members that are stored.
    """

    def __init__(self, path: Path) -> None:
        self.prefix = ""
        self.packed = False
        self.members: dict[
            str, tuple[int, int, int]
        ] = {}  # name -> local header, bytes, crc
        self._ahead = 0, b""  # what was read last, and where it begins
        # Unbuffered, and by seek: Windows has no `os.pread`.
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        size = os.fstat(self._file.fileno()).st_size
        tail_at = max(0, size - _TAIL_BYTES)
        tail = self._bytes(_TAIL_BYTES, tail_at)
        end = tail.rfind(b"PK\x05\x06")
        if end < 0:
            raise zipfile.BadZipFile("File is not a zip file")
        count, length, at = struct.unpack_from("<HLL", tail, end + 10)
        if end >= 20 and tail[end - 20 : end - 16] == b"PK\x06\x07":
            (large,) = struct.unpack_from("<Q", tail, end - 12)
            count, length, at = struct.unpack_from("<QQQ", self._bytes(56, large), 32)
        directory = self._bytes(min(length, size), at)
        place = 0
        for _ in range(count):
            mark, method, crc, packed, unpacked, name, extra, note, header = (
                _ENTRY.unpack_from(directory, place)
            )
            if mark != b"PK\x01\x02":
                raise zipfile.BadZipFile("Bad magic number for central directory")
            place += _ENTRY.size
            called = directory[place : place + name].decode("utf-8")
            if _LARGE in (packed, unpacked, header):
                wide = _wide(directory[place + name : place + name + extra])
                unpacked, packed, header = (
                    next(wide) if short == _LARGE else short
                    for short in (unpacked, packed, header)
                )
            self.packed |= method != zipfile.ZIP_STORED or packed != unpacked
            self.members[called] = (header, unpacked, crc)
            place += name + extra + note

    def _bytes(self, count: int, offset: int) -> bytes:
        """Bytes of the file; fewer at its end."""
        self._file.seek(offset)
        return self._file.read(count)

    def read(self, name: str) -> bytes:
        """A member's bytes; raises as `zipfile` does."""
        header, size, crc = self.members[self.prefix + name]
        at, held = self._ahead
        if not at <= header <= at + len(held) - _HEADER_BYTES - size:
            at = header
            held = self._bytes(max(_AHEAD_BYTES, _HEADER_BYTES + size), header)
            # Small ones follow each other.
            self._ahead = (at, held) if len(held) <= _AHEAD_BYTES else (0, b"")
        start = header - at
        mark, called, extra = _LOCAL.unpack_from(held, start)
        if mark != b"PK\x03\x04":
            raise zipfile.BadZipFile("Bad magic number for file header")
        start += _LOCAL.size + called + extra
        data = held[start : start + size]
        if len(data) < size:
            data = self._bytes(size, at + start)
        if len(data) < size or zlib.crc32(data) != crc:
            raise zipfile.BadZipFile(f"Bad CRC-32 for file {name!r}")
        return data

    def part(self, name: str, start: int, stop: int) -> bytes:
        """Some of a member's bytes, unchecked."""
        header, size, _ = self.members[self.prefix + name]
        _, called, extra = _LOCAL.unpack(self._bytes(_LOCAL.size, header))
        return self._bytes(
            max(0, min(stop, size) - start),
            header + _LOCAL.size + called + extra + start,
        )

    def begin(self, name: str) -> Callable[[int], bytes]:
        """A function that gives a member's next so many bytes, and raises at the last
        one where their sum is wrong.
        """
        _, size, crc = self.members[self.prefix + name]
        at = found = 0

        def read(count: int) -> bytes:
            nonlocal at, found
            data = self.part(name, at, at + count)
            at = at + len(data)
            found = zlib.crc32(data, found)
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


class _Tensors:
    """What the pickle's persistent ids and its one recipe stand for."""

    def __init__(self, archive: Archive, *, stored: bool) -> None:
        self._archive = archive
        self._stored = stored
        self._views: dict[
            tuple[Any, ...], tuple[Any, ...]
        ] = {}  # those that fit; thousands of tensors share one

    def storage(self, identity: Any) -> _Storage:
        """Of a persistent id."""
        kind, storage, key, *_ = identity
        known = (
            _STORAGES.get(storage.name)
            if isinstance(storage, Name) and storage.module == "torch"
            else None
        )
        if kind != "storage" or known is None:
            raise TraceError(f"refused {storage}: not a storage of numbers; {WAY_OUT}")
        return _Storage(str(key), *known)

    def rebuilt(
        self,
        storage: Any,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        *_: Any,
    ) -> Any:
        """A tensor."""
        if type(storage) is not _Storage:
            raise TypeError("a tensor without storage")
        held = self._archive.members[f"{self._archive.prefix}data/{storage.key}"][1]
        view = held, storage.raw, offset, size, stride
        if view not in self._views:
            self._check(*view)
            self._views[view] = view
        found = Stored(self._archive, storage, *self._views[view][2:])
        return found if self._stored else found.array()

    @staticmethod
    def _check(
        held: int,
        raw: np.dtype,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> None:
        """Whether a tensor lies in its storage of `held` bytes, and shows no number
        twice as often as it is there.
        """
        if min((offset, *size, *stride), default=0) < 0:
            raise ValueError("negative offset, size or stride")
        numbers, rest = divmod(held, raw.itemsize)
        if rest:
            raise ValueError("buffer size must be a multiple of element size")
        if math.prod(size) > numbers:
            raise ValueError(
                f"a tensor of shape {size} shows its storage of {numbers} more than"
                " once"
            )
        last = offset + sum(
            (n - 1) * step for n, step in zip(size, stride, strict=True)
        )
        if 0 not in size and last >= max(numbers, 1):
            raise ValueError(
                f"a tensor of shape {size} reaches beyond its storage of {numbers}"
            )


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Numbers whose upper half is stored: uint16 to float32."""
    return np.asarray(bits.astype(np.uint32, order="C") << 16).view(np.float32)


def words(path: Path) -> set[str]:
    """The strings in a torch file's pickle, as far as they can be read; never
    raises.
    """
    found: set[str] = set()
    try:
        archive = _archive.kept(path)
        name = next(name for name in archive.members if name.endswith("data.pkl"))
        archive.prefix = name.removesuffix("data.pkl")
        size = archive.members[name][1]
        start = archive.part("data.pkl", 0, 1 << 16)
        end = archive.part("data.pkl", max(0, size - 4096), size)
    except (StopIteration, *DAMAGE):
        return found
    for data in (start, end):
        for match in re.finditer(rb"X(....)", data, re.DOTALL):
            length = int.from_bytes(match[1], "little")
            if length < 256:
                found.add(
                    data[match.end() : match.end() + length].decode(errors="replace")
                )
    return found
