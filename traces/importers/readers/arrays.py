"""Arrays in files of tensors (npy, npz, safetensors, torch's zip), read some rows at a
time, so that many large ones can be walked through side by side. Nothing in them is
executed.

An array that does not lie row by row (turned, or a part of something larger) is read as
a whole.
"""

from __future__ import annotations

import functools
import gc
import io
import math
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.base.errors import TraceError
from moesim.base.inputs import (
    MOST_ARRAY_BYTES,
    MOST_BYTES_VARIABLE,
    load_json,
    most_bytes,
)
from moesim.base.seals import check_tensors
from moesim.base.units import format_bytes
from moesim.traces.importers.readers.foreign import (
    DECODING_ERRORS,
    decoding,
    head,
    layout_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
_METADATA = "__metadata__"
# The limit of the safetensors library.
_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20
_CUT_OFF = "was it cut off while copying?"
_PLAIN = (
    "open it with torch.load(..., weights_only=True) and save plain tensors with numpy"
    " or safetensors"
)

# numpy has no bfloat16: its bits are the upper half of a float's.
_BF16 = "bf16"
_SAFETENSORS_KINDS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": _BF16,
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U8": "|u1",
    "U16": "<u2",
    "U32": "<u4",
    "BOOL": "|b1",
}
_TORCH_KINDS = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": _BF16,
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
}


class Stored(NamedTuple):
    """An array that is still in its file.

    Attributes:
        shape: as numpy has it.
        kind: of its numbers: a type of numpy, or ``bf16``, which is read as float32.
        begin: opens the file at the first number; its numbers follow in order.
    """

    shape: tuple[int, ...]
    kind: str
    begin: Callable[[], IO[bytes]]

    @property
    def dtype(self) -> np.dtype:
        """The type of its numbers once they are read."""
        return np.dtype("<f4" if self.kind == _BF16 else self.kind)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its numbers in the file."""
        return math.prod(self.shape) * _raw(self.kind).itemsize

    def rows(self, count: int) -> Iterator[np.ndarray]:
        """Read parts of `count` rows, the last one perhaps of fewer.

        Raises:
            ValueError: fewer numbers in the file than its header says.
        """
        with self.begin() as file:
            for start in range(0, self.shape[0], count):
                due = min(count, self.shape[0] - start)
                yield self._next(file, (due, *self.shape[1:]))
            # A zip says only behind the last byte whether its checksum is right.
            file.read(1)

    def whole(self) -> np.ndarray:
        """Read all of it; raises as `rows` does."""
        with self.begin() as file:
            numbers = self._next(file, self.shape)
            file.read(1)
        return numbers

    def _next(self, file: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
        raw = _raw(self.kind)
        due = math.prod(shape) * raw.itemsize
        data = bytearray()
        # In pieces: an unpacked member that is read as a whole is held twice.
        while len(data) < due and (
            piece := file.read(min(due - len(data), _PIECE_BYTES))
        ):
            data += piece
        if len(data) < due:
            raise ValueError(f"{list(self.shape)} numbers promised, fewer found")
        numbers = np.frombuffer(data, raw).reshape(shape)
        if self.kind != _BF16:
            return numbers
        return (numbers.astype(np.uint32) << 16).view(np.float32)


@functools.cache
def _raw(kind: str) -> np.dtype:
    """The type of numbers as a file has them."""
    return np.dtype("<u2" if kind == _BF16 else kind)


def in_memory(values: np.ndarray) -> Stored:
    """Return an array that has been read as one that is stored."""
    return Stored(values.shape, values.dtype.str, lambda: io.BytesIO(values.tobytes()))


# -- files -----------------------------------------------------------------------------


def kind_of(path: Path) -> str:
    """Return ``npy``, ``npz``, ``safetensors``, ``torch``, or nothing; by content,
    never raises.
    """
    start = head(path, 16)
    if start.startswith(NPY):
        return "npy"
    if start.startswith(_ZIP):
        return _kind_of_zip(path)
    # A length that a header can have, and the brace that every header begins with.
    is_length = 2 <= int.from_bytes(start[:8], "little") <= _HEADER_BYTES
    return "safetensors" if is_length and start[8:9] == b"{" else ""


def _kind_of_zip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except DECODING_ERRORS:
        # The pickle comes first: of a file that was cut off its name is left.
        return "torch" if b"data.pkl" in head(path, 512) else ""
    if any(name.endswith("data.pkl") for name in names):
        return "torch"
    return "npz" if names and all(name.endswith(".npy") for name in names) else ""


def stored_arrays(path: Path) -> dict[str, Stored]:
    """Return name -> array, in natural order of the names (``layer.2`` before
    ``layer.10``); the array of an npy has an empty name.

    Raises:
        TraceError: none of the kinds, damaged, or not made of plain tensors.
    """
    kind = kind_of(path)
    with decoding(path, kind or "tensors"):
        if kind == "npz":
            arrays = _npz(path)
        elif kind == "npy":
            size = path.stat().st_size
            arrays = {"": npy(path, "array", lambda: path.open("rb"), size)}
        elif kind == "safetensors":
            arrays = _safetensors(path)
        elif kind == "torch":
            arrays = _leaves("", load_torch(path))
        else:
            raise layout_error(
                path,
                "content",
                "safetensors, npy, npz or a torch zip",
                "none of them",
                "save the tensors as npz",
            )
    return {name: arrays[name] for name in sorted(arrays, key=_natural)}


def load_named(path: Path) -> dict[str, np.ndarray]:
    """Return name -> array, as `stored_arrays` has them.

    Raises:
        TraceError: as `stored_arrays`; or altered since it was sealed, or too large.
    """
    stored = stored_arrays(path)
    kind = kind_of(path)
    with decoding(path, kind):
        if kind in ("npy", "npz"):
            # All are held at once.
            _check_size(path, sum(array.size_bytes for array in stored.values()))
        arrays = {name: array.whole() for name, array in stored.items()}
        if kind == "safetensors":
            metadata = _safetensors_header(path)[0].get(_METADATA)
            if metadata:
                check_tensors(path, arrays, metadata)
    return arrays


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names by value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]


def _check_size(path: Path, size_bytes: int) -> None:
    most = max(MOST_ARRAY_BYTES, most_bytes())
    if size_bytes > most:
        raise layout_error(
            path,
            "content",
            f"arrays of at most {format_bytes(most)}",
            format_bytes(size_bytes),
            f"{MOST_BYTES_VARIABLE} raises the limit",
        )


def integers(path: Path, name: str, array: Any, dimensions: int) -> np.ndarray:
    """Return an array after checking that it holds integers, of any size, and has so
    many dimensions.

    Raises:
        TraceError: naming the array.
    """
    # What a pickle holds in a tensor's place may be anything.
    if not isinstance(array, np.ndarray):
        actual = type(array).__name__
    elif array.dtype.kind in "iu" and array.ndim == dimensions:
        return array
    else:
        actual = f"{array.dtype} {list(array.shape)}"
    raise layout_error(path, name, f"integers with {dimensions} dimensions", actual)


# -- numpy -----------------------------------------------------------------------------


def npy(
    path: Path, name: str, begin: Callable[[], IO[bytes]], size_bytes: int
) -> Stored:
    """Return the array of one npy stream; its header is believed only as far as the
    file is long.

    Args:
        path: of the file, for errors.
        name: of the stream in it.
        begin: opens the stream.
        size_bytes: of the stream.

    Raises:
        TraceError: Python objects, or more numbers than there are bytes.
    """
    with begin() as file:
        shape, fortran, dtype = npy_header(file)
        if dtype.hasobject or dtype.kind not in "iufb":
            actual = f"dtype {dtype}, which is never unpickled"
            raise layout_error(path, name, "numbers", actual, "save plain numbers")
        due = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or due > size_bytes:
            expected = f"at most {size_bytes} bytes"
            raise layout_error(path, name, expected, f"shape {shape} of {dtype}")
        if fortran and len(shape) > 1:  # its rows do not lie in order
            _check_size(path, due)
            columns = np.frombuffer(file.read(due), dtype)
            return in_memory(columns.reshape(shape, order="F"))

    def begin_numbers() -> IO[bytes]:
        file = begin()
        npy_header(file)
        return file

    return Stored(shape, dtype.str, begin_numbers)


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, column order and dtype of an npy stream, which is left at its
    numbers; raises as numpy does.
    """
    version = np.lib.format.read_magic(file)
    if version > (2, 0):
        raise ValueError(f"npy format {version}; save it with numpy.save")
    read = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers of Python 2
        header: tuple[tuple[int, ...], bool, np.dtype] = read(file)
    return header


def _npz(path: Path) -> dict[str, Stored]:
    archive = zipfile.ZipFile(path)
    return {
        member.filename.removesuffix(".npy"): npy(
            path,
            member.filename,
            lambda member=member: archive.open(member),  # type: ignore[misc]
            member.file_size,
        )
        for member in archive.infolist()
    }


# -- safetensors -----------------------------------------------------------------------


def _safetensors(path: Path) -> dict[str, Stored]:
    """The arrays of a safetensors file: u64 header length, a JSON header, raw
    little-endian numbers.
    """
    header, header_bytes = _safetensors_header(path)
    data_bytes = path.stat().st_size - header_bytes
    header.pop(_METADATA, None)
    arrays = {}
    for name, entry in header.items():
        place = f"tensor {name!r}"
        kind = _SAFETENSORS_KINDS.get(entry["dtype"])
        if kind is None:
            expected = f"one of {', '.join(_SAFETENSORS_KINDS)}"
            raise layout_error(path, place, expected, entry["dtype"], "convert it")

        shape = tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        due = math.prod(shape) * _raw(kind).itemsize
        fits = 0 <= start <= stop <= data_bytes and min(shape, default=0) >= 0
        if not fits or due != stop - start:
            expected = f"{due} bytes for shape {list(shape)} inside the file"
            raise layout_error(path, place, expected, f"{start}..{stop}", _CUT_OFF)

        arrays[name] = Stored(shape, kind, _from(path, header_bytes + start))
    return arrays


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and how many bytes it and its length take."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            raise layout_error(path, "header", f"{length} bytes", size - 8, _CUT_OFF)
        return load_json(file.read(length)), 8 + length


def _from(path: Path, start: int) -> Callable[[], IO[bytes]]:
    def begin() -> IO[bytes]:
        file = path.open("rb")
        file.seek(start)
        return file

    return begin


# -- torch -----------------------------------------------------------------------------


def is_bare_pickle(path: Path) -> bool:
    """Whether this is a pickle outside a zip, such as ``torch.save`` wrote before 1.6;
    never raises.
    """
    start = head(path, 2)
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def pickle_of(path: Path) -> bytes:
    """Return the pickle of a torch file, as far as it can be read; never raises."""
    if not head(path, 4).startswith(_ZIP):
        return b""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
            return archive.read(name)
    except DECODING_ERRORS:
        return b""


def load_torch(path: Path) -> Any:
    """Return lists, dicts, numbers, strings and tensors as a torch file holds them;
    tensors are left there, as `Stored`.

    ``torch.load(weights_only=True)`` takes 17 times as long for many small tensors.

    Raises:
        TraceError: not such a file, damaged, or it names anything but tensors.
    """
    if is_bare_pickle(path):
        raise TraceError(
            f"{path}: expected a zip as torch.save writes it, found a bare pickle,"
            f" which is never executed; {_PLAIN}"
        )
    collects = gc.isenabled()
    # The collector would look through all that is built again and again, which takes
    # longer than building it.
    gc.disable()
    try:
        with decoding(path, "torch file"):
            return _TorchFile(path).load()
    finally:
        if collects:
            gc.enable()


class _TorchFile(pickle.Unpickler):
    """A zip of raw storages, and one pickle that says how they form tensors.

    No name in it is imported: three stand for what is made here, others are refused.
    """

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        names = self._archive.namelist()
        pickles = [name for name in names if name.endswith("data.pkl")]
        if len(pickles) != 1:
            raise TraceError(
                f"{path}: expected one data.pkl, found {len(pickles)}; {_PLAIN}"
            )
        self._path = path
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in names and self._archive.read(order) != b"little":
            raise TraceError(f"{path}: expected little-endian numbers; {_PLAIN}")
        data = io.BytesIO(self._archive.read(pickles[0]))
        super().__init__(data, encoding="latin-1")

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return functools.partial(self._tensor)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _TORCH_KINDS:
            return _TORCH_KINDS[name]
        raise TraceError(
            f"{self._path}: refused to call {module}.{name}: pickles are never"
            f" executed; {_PLAIN}"
        )

    def persistent_load(self, identity: Any) -> tuple[str, zipfile.ZipInfo]:
        """Kind of numbers and member of the archive of a storage."""
        _, kind, key, *_ = identity
        return kind, self._archive.getinfo(f"{self._prefix}data/{key}")

    def _begin(self, member: zipfile.ZipInfo) -> IO[bytes]:
        file = self._archive.fp
        is_plain = member.compress_type == zipfile.ZIP_STORED
        if file is None or not is_plain or member.file_size > _SMALL_BYTES:
            return self._archive.open(member)
        # Opening a member takes `zipfile` 20 µs, and there may be one per token.
        file.seek(member.header_offset + 26)
        file.seek(sum(struct.unpack("<HH", file.read(4))), io.SEEK_CUR)
        data = file.read(member.file_size)
        if zlib.crc32(data) != member.CRC:
            raise zipfile.BadZipFile(f"bad checksum of {member.filename!r}")
        return io.BytesIO(data)

    def _tensor(
        self,
        storage: tuple[str, zipfile.ZipInfo],
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        *_: Any,
    ) -> Stored:
        kind, member = storage
        if kind not in _TORCH_KINDS.values():
            raise TypeError("a storage of anything but numbers")
        itemsize = _raw(kind).itemsize
        if _is_in_order(member.file_size // itemsize, offset, shape, strides):
            return Stored(shape, kind, lambda: self._begin(member))
        numbers = np.frombuffer(self._archive.read(member), _raw(kind))
        view = np.lib.stride_tricks.as_strided(
            numbers[offset:], shape, [itemsize * step for step in strides]
        )
        return Stored(shape, kind, lambda: io.BytesIO(view.tobytes()))


@functools.lru_cache
def _is_in_order(
    count: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> bool:
    """Whether a view of a storage of `count` numbers lies row by row from its start.

    Raises:
        ValueError: it lies outside, or shows a number twice.
    """
    last = offset + sum(
        (side - 1) * step for side, step in zip(shape, strides, strict=True)
    )
    is_inside = 0 in shape or last < count
    if min((offset, *shape, *strides)) < 0 or not is_inside:
        raise ValueError(f"a tensor of shape {shape} outside its storage of {count}")
    # A stride of 0 would make a small file a tensor that fills the memory.
    if math.prod(shape) > count:
        raise ValueError(
            f"a tensor of shape {shape} shows its storage of {count} twice"
        )
    in_order = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return offset == 0 and strides == in_order


def _leaves(prefix: str, value: Any) -> dict[str, Stored]:
    """The tensors of nested lists and dicts, named by their path."""
    if isinstance(value, Stored):
        return {prefix: value}
    # Numbers and strings beside the tensors say nothing about routing.
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    arrays: dict[str, Stored] = {}
    for key, inner in items:
        arrays |= _leaves(f"{prefix}.{key}" if prefix else str(key), inner)
    return arrays
