"""Tensors out of ``torch.save`` files, without torch and without executing anything.

A ``.pt`` file is a zip of raw storages and one pickle that says how they form tensors.
The pickle is read as data: lists, dicts, numbers, strings and one recipe, "a view of a
storage". Any other name in it is refused, so nothing in the file can run.

``torch.load(weights_only=True, mmap=True)`` would read the same files. It takes 17
times as long for a dump of many small tensors, torch itself takes 1.7 s to import, and
tuples nested a million deep end the process.

Source: the layout of ``torch.serialization`` (zip format, since 1.6).
"""

from __future__ import annotations

import functools
import math
import re
import struct
import weakref
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.base.errors import TraceError
from moesim.traces.importers.readers.foreign import (
    BF16,
    DECODING_ERRORS,
    ParseCache,
    decoding,
    from_bf16,
    raw_dtype,
)
from moesim.traces.importers.readers.pickle_data import WAY_OUT, GlobalName, read_pickle
from moesim.traces.importers.readers.text import head

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Class of a storage -> type of its numbers.
_STORAGE_TYPES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": BF16,
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}
_REBUILD_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_ORDERED_DICT = ("collections", "OrderedDict")

_LOCAL_HEADER = struct.Struct("<4s22xHH")
# Small storages follow each other, so a buffer serves many of them.
_BUFFER_BYTES = 1 << 18
# How far strings of a pickle are looked for, from its beginning and before its end.
_OPENING_BYTES = 1 << 16
_ENDING_BYTES = 1 << 12
_MOST_LETTERS = 256


class _Storage(NamedTuple):
    """A member of the archive that holds numbers; `raw` is their type in the file."""

    key: str
    dtype: str
    raw: np.dtype


@dataclass(slots=True)  # there are thousands, and a frozen one takes a microsecond more
class StoredTensor:
    """A tensor that is still in its file: a view of a storage."""

    archive: TorchArchive
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def in_order(self) -> Callable[[], Callable[[int], bytes]] | None:
        """Return what begins to read its bytes, where they are all of its storage and
        lie row by row; otherwise None.
        """
        name = f"data/{self.storage.key}"
        size = math.prod(self.shape) * self.storage.raw.itemsize
        if not self._is_dense or size != self.archive.member(name).file_size:
            return None

        return lambda: self.archive.begin(name)

    def array(self) -> np.ndarray:
        """Read its numbers; raises as reading damaged zips does."""
        raw = self.storage.raw
        data = self.archive.read(f"data/{self.storage.key}")
        numbers = np.frombuffer(data, raw)

        if self._is_dense:
            view = numbers[: math.prod(self.shape)].reshape(self.shape)
        else:
            strides = tuple(step * raw.itemsize for step in self.stride)
            # Checked when the tensor was rebuilt: it lies inside its storage.
            view = np.lib.stride_tricks.as_strided(
                numbers[self.offset :], self.shape, strides, writeable=False
            )

        return from_bf16(view) if self.storage.dtype == BF16 else view

    @property
    def _is_dense(self) -> bool:
        return self.offset == 0 and self.stride == _dense_strides(self.shape)


@functools.cache
def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of numbers that lie row by row."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


# -- which files these are -------------------------------------------------------------


def is_torch_file(path: Path) -> bool:
    """Whether this is a zip with a ``data.pkl`` in it; never raises."""
    start = head(path, 512)
    if not start.startswith(b"PK\x03\x04"):
        return False

    # torch writes the pickle first, so its name is in the first header.
    name_bytes = int.from_bytes(start[26:28], "little")
    if start[30 : 30 + name_bytes].endswith(b"data.pkl"):
        return True

    try:
        return bool(_archive.get(path).pickles())
    except DECODING_ERRORS:
        return False


def is_bare_pickle(path: Path) -> bool:
    """Whether this is a pickle outside a zip, such as ``torch.save`` wrote before 1.6;
    never raises.
    """
    start = head(path, 2)
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def refuse_pickle(path: Path) -> TraceError:
    """Return the error of a file that can only be opened by executing it."""
    return TraceError(
        f"{path}: expected a zip as torch.save writes it, found a bare pickle, which is"
        f" never executed; {WAY_OUT}"
    )


def pickled_strings(path: Path) -> set[str]:
    """Return strings in a torch file's pickle, as far as they can be read; never
    raises.
    """
    try:
        archive = _archive.get(path)
        name = archive.pickles()[0]
        archive.prefix = name.removesuffix("data.pkl")
        size = archive.member("data.pkl").file_size
        opening = archive.part("data.pkl", 0, _OPENING_BYTES)
        ending = archive.part("data.pkl", max(0, size - _ENDING_BYTES), size)
    except DECODING_ERRORS:
        return set()

    strings: set[str] = set()
    for data in (opening, ending):
        # BINUNICODE: the letter X, a length of four bytes, the string.
        for match in re.finditer(rb"X(....)", data, re.DOTALL):
            length = int.from_bytes(match[1], "little")
            if length < _MOST_LETTERS:
                text = data[match.end() : match.end() + length]
                strings.add(text.decode(errors="replace"))
    return strings


# -- reading ---------------------------------------------------------------------------


def load(path: Path) -> Any:
    """Return lists, dicts, numbers, strings and tensors as the file holds them; tensors
    are left there, as `StoredTensor`.

    Raises:
        TraceError: not such a file, damaged, or it names anything but tensors.
    """
    with decoding(path, "torch file"):
        archive = _archive.get(path)
        _check_archive(path, archive)

        rebuilder = _TensorRebuilder(archive)
        recipes: dict[tuple[str, str], Callable[..., Any]] = {
            _REBUILD_TENSOR: rebuilder.tensor,
            _ORDERED_DICT: dict,
        }
        data = archive.read("data.pkl")
        return read_pickle(path, "data.pkl", data, recipes, rebuilder.storage)


def _check_archive(path: Path, archive: TorchArchive) -> None:
    """Find the pickle, and check that everything is laid out as torch does it."""
    pickles = archive.pickles()
    if len(pickles) != 1:
        raise TraceError(
            f"{path}: expected one data.pkl, found {len(pickles)}; {WAY_OUT}"
        )
    if archive.is_compressed:
        raise TraceError(
            f"{path}: expected stored members as torch.save writes them, found"
            f" compressed ones; {WAY_OUT}"
        )

    archive.prefix = pickles[0].removesuffix("data.pkl")
    if not archive.has("byteorder"):
        return
    order = archive.read("byteorder")
    if order != b"little":
        raise TraceError(
            f"{path}: expected little-endian numbers, found {order[:9]!r}; {WAY_OUT}"
        )


class TorchArchive:
    """The members of a torch file's zip; torch writes one per storage.

    Only the directory is read by `zipfile`: opening a member by it takes 20 µs, and
    there may be one per token.

    Source: the layout of zip (APPNOTE 4.3), as far as members that are stored.

    Attributes:
        prefix: what stands before the name of every member.
        is_compressed: whether any member is.
    """

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()

        self.prefix = ""
        self.is_compressed = any(
            member.compress_type != zipfile.ZIP_STORED
            or member.compress_size != member.file_size
            for member in members
        )
        self._members = {member.filename: member for member in members}
        self._file = path.open("rb", buffering=_BUFFER_BYTES)
        weakref.finalize(self, self._file.close)

    def pickles(self) -> list[str]:
        """Return the names of members that end like torch's pickle."""
        return [name for name in self._members if name.endswith("data.pkl")]

    def has(self, name: str) -> bool:
        """Whether there is such a member."""
        return self.prefix + name in self._members

    def member(self, name: str) -> zipfile.ZipInfo:
        """Return what the directory says about a member; KeyError without one."""
        return self._members[self.prefix + name]

    def read(self, name: str) -> bytes:
        """Return a member's bytes; raises as `zipfile` does."""
        member = self.member(name)
        self._seek(member, 0)
        data = self._file.read(member.file_size)

        if len(data) < member.file_size or zlib.crc32(data) != member.CRC:
            raise zipfile.BadZipFile(f"Bad CRC-32 for file {name!r}")
        return data

    def part(self, name: str, start: int, stop: int) -> bytes:
        """Return some of a member's bytes, unchecked."""
        member = self.member(name)
        self._seek(member, start)
        return self._file.read(max(0, min(stop, member.file_size) - start))

    def begin(self, name: str) -> Callable[[int], bytes]:
        """Return a function that gives a member's next so many bytes, and raises at the
        last one where their checksum is wrong.
        """
        member = self.member(name)
        done = 0
        checksum = 0

        def read(count: int) -> bytes:
            nonlocal done, checksum
            data = self.part(name, done, done + count)
            done += len(data)
            checksum = zlib.crc32(data, checksum)

            if done >= member.file_size and checksum != member.CRC:
                raise zipfile.BadZipFile(f"Bad CRC-32 for file {name!r}")
            return data

        return read

    def _seek(self, member: zipfile.ZipInfo, start: int) -> None:
        """Go to byte `start` of a member's data, which stands behind its own header."""
        self._file.seek(member.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        if mark != b"PK\x03\x04":
            raise zipfile.BadZipFile("Bad magic number for file header")

        # torch pads every header, so that data is aligned.
        self._file.seek(
            member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes + start
        )


_archive = ParseCache(TorchArchive)


class _TensorRebuilder:
    """Makes tensors of what the pickle says: its persistent ids and its one recipe."""

    def __init__(self, archive: TorchArchive) -> None:
        self._archive = archive
        # Thousands of tensors have one shape; each is checked once.
        self._checked: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def storage(self, identity: Any) -> _Storage:
        """Return the storage of a persistent id."""
        kind, storage, key, *_ = identity

        dtype = None
        if isinstance(storage, GlobalName) and storage.module == "torch":
            dtype = _STORAGE_TYPES.get(storage.name)
        if kind != "storage" or dtype is None:
            raise TraceError(f"refused {storage}: not a storage of numbers; {WAY_OUT}")

        return _Storage(str(key), dtype, raw_dtype(dtype))

    def tensor(
        self,
        storage: Any,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        *_: Any,
    ) -> StoredTensor:
        """Return a tensor."""
        if type(storage) is not _Storage:
            raise TypeError("a tensor without storage")

        storage_bytes = self._archive.member(f"data/{storage.key}").file_size
        view = (storage_bytes, storage.raw, offset, size, stride)
        if view not in self._checked:
            _check_view(*view)
            self._checked[view] = view

        # Equal tuples of the first tensor: thousands of copies would only take memory.
        return StoredTensor(self._archive, storage, *self._checked[view][2:])


def _check_view(
    storage_bytes: int,
    raw: np.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> None:
    """Whether a tensor lies in its storage, and shows no number of it twice."""
    if min((offset, *size, *stride), default=0) < 0:
        raise ValueError("negative offset, size or stride")

    numbers, rest = divmod(storage_bytes, raw.itemsize)
    if rest:
        raise ValueError("buffer size must be a multiple of element size")

    # A stride of 0 would make a small file a tensor that fills the memory.
    if math.prod(size) > numbers:
        raise ValueError(
            f"a tensor of shape {size} shows its storage of {numbers} more than once"
        )

    axes = zip(size, stride, strict=True)
    last = offset + sum((count - 1) * step for count, step in axes)
    if 0 not in size and last >= max(numbers, 1):
        raise ValueError(
            f"a tensor of shape {size} reaches beyond its storage of {numbers}"
        )
