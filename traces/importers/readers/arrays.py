"""Arrays in files of tensors (npy, npz, safetensors, torch's zip), which are read as a
whole: the system kills a process whose mapped file is cut short. Nothing in them is
executed.
"""

from __future__ import annotations

import functools
import gc
import io
import math
import pickle
import re
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Iterable
    from pathlib import Path

NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
_METADATA = "__metadata__"
# The limit of the library that writes it.
_SAFETENSORS_HEADER_BYTES = 100_000_000
_CUT_OFF = "was it cut off while copying?"
_PLAIN = (
    "open it with torch.load(..., weights_only=True) and save plain tensors with numpy"
    " or safetensors"
)

BF16 = np.dtype([("bf16", "<u2")])
"""numpy has no bfloat16: its bits are the upper half of a float's (`floats`)."""
_SAFETENSORS_KINDS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BF16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("|i1"),
    "U8": np.dtype("|u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "BOOL": np.dtype("|b1"),
}
_TORCH_KINDS = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


def floats(array: np.ndarray) -> np.ndarray:
    """Return `BF16` as float32, and all other numbers as they are."""
    if array.dtype != BF16:
        return array
    return (array["bf16"].astype(np.uint32) << 16).view(np.float32)


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
    is_length = 2 <= int.from_bytes(start[:8], "little") <= _SAFETENSORS_HEADER_BYTES
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


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return name -> array, read-only, in natural order of the names (``layer.2``
    before ``layer.10``); the array of an npy has an empty name.

    Raises:
        TraceError: none of the kinds, damaged, or not made of plain tensors.
    """
    kind = kind_of(path)
    with decoding(path, kind or "tensors"):
        if kind == "npz":
            _check_packed(path)
            with np.load(path) as members:
                arrays = {name: plain(path, name, members[name]) for name in members}
        elif kind == "npy":
            arrays = {"": plain(path, "array", np.load(path))}
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
    """Return copies of what `read_arrays` has.

    Raises:
        TraceError: as `read_arrays`; or altered since it was sealed, or too large.
    """
    stored = read_arrays(path)
    _check_size(path, sum(array.nbytes for array in stored.values()))
    arrays = {name: np.array(floats(array)) for name, array in stored.items()}
    if kind_of(path) == "safetensors":
        with decoding(path, "safetensors"):
            metadata = _safetensors_header(path, path.read_bytes())[0].get(_METADATA)
            if metadata:
                check_tensors(path, arrays, metadata)
    return arrays


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names by value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]


def plain(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    """Return an array after checking that it holds numbers.

    Raises:
        TraceError: naming the array.
    """
    if array.dtype.kind not in "iufb":
        raise layout_error(path, name, "numbers", f"dtype {array.dtype}")
    return array


def _check_packed(path: Path) -> None:
    """Refuse a zip whose packed members together are too large."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    packed = [each for each in members if each.compress_type != zipfile.ZIP_STORED]
    _check_size(path, sum(each.file_size for each in packed))


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
        actual = f"{floats(array).dtype} {list(array.shape)}"
    raise layout_error(path, name, f"integers with {dimensions} dimensions", actual)


class _Archive:
    """Bytes of the members of a zip; those that are packed are unpacked.

    Args:
        path: of the zip.

    Attributes:
        names: of the members.

    Raises:
        TraceError: what is unpacked together is too large.
    """

    def __init__(self, path: Path) -> None:
        _check_packed(path)
        self._data = memoryview(path.read_bytes())
        self._archive = zipfile.ZipFile(path)
        self.names = self._archive.namelist()

    def read(self, name: str) -> bytes | memoryview:
        """Return a member's bytes.

        Raises:
            KeyError: no such member.
            zipfile.BadZipFile: damaged.
        """
        member = self._archive.getinfo(name)
        if member.compress_type != zipfile.ZIP_STORED:
            return self._archive.read(member)
        # `zipfile` takes 20 µs to read a member, and there may be one per token.
        lengths = struct.unpack_from("<HH", self._data, member.header_offset + 26)
        start = member.header_offset + 30 + sum(lengths)
        data = self._data[start : start + member.file_size]
        if zlib.crc32(data) != member.CRC:
            raise zipfile.BadZipFile(f"Bad CRC-32 for file {name!r}")
        return data


# -- safetensors -----------------------------------------------------------------------


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file: u64 header length, a JSON header, raw
    little-endian numbers.
    """
    data = path.read_bytes()
    header, header_bytes = _safetensors_header(path, data)
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
        due = math.prod(shape) * kind.itemsize
        is_inside = 0 <= start <= stop <= len(data) - header_bytes
        if not is_inside or min(shape, default=0) < 0 or due != stop - start:
            expected = f"{due} bytes for shape {list(shape)} inside the file"
            raise layout_error(path, place, expected, f"{start}..{stop}", _CUT_OFF)
        arrays[name] = np.ndarray(shape, kind, data, header_bytes + start)
    return arrays


def _safetensors_header(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    """The header, and how many bytes it and its length take."""
    length = int.from_bytes(data[:8], "little")
    if 8 + length > len(data):
        raise layout_error(path, "header", f"{length} bytes", len(data) - 8, _CUT_OFF)
    return load_json(data[8 : 8 + length]), 8 + length


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
    """Return lists, dicts, numbers, strings and arrays as a torch file holds them.

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
        self._archive = _Archive(path)
        names = self._archive.names
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
            return functools.partial(_tensor)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _TORCH_KINDS:
            return _TORCH_KINDS[name]
        raise TraceError(
            f"{self._path}: refused to call {module}.{name}: pickles are never"
            f" executed; {_PLAIN}"
        )

    def persistent_load(self, identity: Any) -> np.ndarray:
        """The numbers of a storage."""
        _, kind, key, *_ = identity
        data = self._archive.read(f"{self._prefix}data/{key}")
        return np.frombuffer(data, _SAFETENSORS_KINDS[kind])


def _tensor(
    storage: np.ndarray,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *_: Any,
) -> np.ndarray:
    """A view of a storage.

    Raises:
        ValueError: it lies outside, or shows a number twice.
    """
    # A stride of 0 would make a small file a tensor that fills the memory.
    if math.prod(shape) > len(storage):
        raise ValueError(
            f"a tensor of shape {shape} shows its storage of {len(storage)} twice"
        )
    size = storage.itemsize
    steps = [size * step for step in strides]
    return np.ndarray(shape, storage.dtype, storage, size * offset, steps)


def _leaves(prefix: str, value: Any) -> dict[str, np.ndarray]:
    """The tensors of nested lists and dicts, named by their path."""
    if isinstance(value, np.ndarray):
        return {prefix: value}
    # Numbers and strings beside the tensors say nothing about routing.
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    arrays: dict[str, np.ndarray] = {}
    for key, inner in items:
        arrays |= _leaves(f"{prefix}.{key}" if prefix else str(key), inner)
    return arrays
