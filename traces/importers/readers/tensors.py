"""The files people keep tensors in: safetensors, npy, npz, and torch's zip, and where
the tensors lie in them. Nothing is executed.
"""

from __future__ import annotations

import math
import re
import warnings
import zipfile
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from moesim.base.inputs import (
    MOST_ARRAY_BYTES,
    MOST_BYTES_VARIABLE,
    load_json,
    most_bytes,
)
from moesim.base.units import format_bytes
from moesim.traces.importers.readers import torch_file
from moesim.traces.importers.readers.foreign import (
    BF16,
    DECODING_ERRORS,
    layout_error,
    raw_dtype,
)
from moesim.traces.importers.readers.text import head

if TYPE_CHECKING:
    from pathlib import Path

NPY = b"\x93NUMPY"
_SAFETENSORS_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": BF16,
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "BOOL": "?",
}
_METADATA = "__metadata__"
# The limit of the safetensors library.
_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 16 << 20
_CUT_OFF = "was it cut off while copying?"


def kind_of(path: Path) -> str:
    """Return ``npy``, ``npz``, ``safetensors``, ``torch``, or nothing; by content,
    never raises.
    """
    start = head(path, 16)
    if start.startswith(NPY):
        return "npy"
    if start.startswith(b"PK\x03\x04"):
        return _kind_of_zip(path)

    # A length that a header can have, and the brace that every header begins with.
    is_length = 2 <= int.from_bytes(start[:8], "little") <= _HEADER_BYTES
    is_safetensors = len(start) == 16 and is_length and start[8:9] == b"{"
    return "safetensors" if is_safetensors else ""


def _kind_of_zip(path: Path) -> str:
    if torch_file.is_torch_file(path):
        return "torch"

    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except DECODING_ERRORS:
        return ""
    return "npz" if names and all(name.endswith(".npy") for name in names) else ""


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts the numbers in names by value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]


def leaves(prefix: str, value: Any) -> dict[str, Any]:
    """Return the stored tensors of nested lists and dicts, named by their path;
    everything else is left out.
    """
    if isinstance(value, torch_file.StoredTensor):
        return {prefix: value}

    # Numbers and strings beside the tensors say nothing about routing.
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))

    arrays: dict[str, Any] = {}
    for key, inner in items:
        arrays |= leaves(f"{prefix}.{key}" if prefix else str(key), inner)
    return arrays


# -- npy and npz -----------------------------------------------------------------------


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


def array(path: Path, name: str, file: IO[bytes], size_bytes: int) -> np.ndarray:
    """Return the numbers of one npy stream.

    Its header is believed only as far as the file is long.

    Raises:
        TraceError: another format, Python objects, or fewer bytes than the header says.
    """
    shape, fortran, dtype = npy_header(file)
    count = check_header(path, name, shape, dtype, size_bytes)

    due = count * dtype.itemsize
    check_size(path, name, due)
    # In pieces: an unpacked member read as a whole is held twice.
    data = np.empty(due, np.uint8)
    filled = 0
    while piece := file.read(min(_PIECE_BYTES, due - filled)):
        data[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
        filled += len(piece)
    if filled != due:
        raise layout_error(path, name, f"{due} bytes", f"{filled}", _CUT_OFF)

    return data.view(dtype).reshape(shape, order="F" if fortran else "C")


def check_size(path: Path, name: str, size_bytes: int) -> None:
    """Refuse arrays that would not fit into memory."""
    most = max(MOST_ARRAY_BYTES, most_bytes())
    if size_bytes > most:
        raise layout_error(
            path,
            name,
            f"arrays of at most {format_bytes(most)}",
            format_bytes(size_bytes),
            f"{MOST_BYTES_VARIABLE} raises the limit",
        )


def check_header(
    path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype, size_bytes: int
) -> int:
    """Return how many numbers an npy header promises.

    Raises:
        TraceError: Python objects, or more numbers than `size_bytes` can hold.
    """
    if dtype.hasobject or dtype.kind not in "iufb":
        actual = f"dtype {dtype}, which is never unpickled"
        raise layout_error(path, name, "numbers", actual, "save plain numbers")

    # Python's integers: a hostile shape must not wrap around.
    count = 1
    for side in shape:
        count *= side
    if min(shape, default=0) < 0 or count * dtype.itemsize > size_bytes:
        expected = f"at most {size_bytes} bytes"
        raise layout_error(path, name, expected, f"shape {shape} of {dtype}")

    return count


# -- safetensors -----------------------------------------------------------------------


def safetensors_places(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return name -> (dtype or ``bf16``, shape, first byte in the file).

    Raises:
        TraceError: a header or a tensor that does not fit into the file.

    Source: the layout of safetensors: u64 header length, a JSON header, raw
    little-endian numbers.
    """
    header, header_bytes = _safetensors_header(path)
    data_bytes = path.stat().st_size - header_bytes
    places = {}
    for name, entry in header.items():
        if name != _METADATA:
            dtype, shape, start = _place(path, name, entry, data_bytes)
            places[name] = (dtype, shape, header_bytes + start)
    return places


def safetensors_metadata(path: Path) -> dict[str, str]:
    """Return what a safetensors file says beside its tensors."""
    metadata: dict[str, str] = _safetensors_header(path)[0].get(_METADATA) or {}
    return metadata


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header, and how many bytes it and its length take."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            actual = f"{size - 8}"
            raise layout_error(path, "header", f"{length} bytes", actual, _CUT_OFF)
        return load_json(file.read(length)), 8 + length


def _place(
    path: Path, name: str, entry: dict[str, Any], data_bytes: int
) -> tuple[str, tuple[int, ...], int]:
    """Dtype, shape and first byte behind the header of one tensor."""
    place = f"tensor {name!r}"
    dtype = _SAFETENSORS_TYPES.get(entry["dtype"])
    if dtype is None:
        expected = f"one of {', '.join(_SAFETENSORS_TYPES)}"
        raise layout_error(path, place, expected, entry["dtype"], "convert it")

    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop <= data_bytes:
        actual = f"bytes {start}..{stop}"
        raise layout_error(
            path, place, "a place inside the file", actual, "was it cut off?"
        )

    shape = tuple(entry["shape"])
    due = math.prod(shape) * raw_dtype(dtype).itemsize
    if min(shape, default=0) < 0 or due != stop - start:
        expected = f"{due} bytes for shape {list(shape)}"
        raise layout_error(path, place, expected, stop - start)

    return dtype, shape, start


def integers(path: Path, name: str, array: Any, dimensions: int) -> np.ndarray:
    """Return an array after checking that it holds integers, of any size, and has so
    many dimensions.

    Raises:
        TraceError: naming the array.
    """
    # What a pickle holds in a tensor's place may be anything.
    is_array = isinstance(array, np.ndarray)
    if is_array and array.dtype.kind in "iu" and array.ndim == dimensions:
        checked: np.ndarray = array
        return checked

    actual = type(array).__name__
    if is_array:
        actual = f"{array.dtype} {list(array.shape)}"
    expected = f"integers with {dimensions} dimensions"
    raise layout_error(path, name, expected, actual)
