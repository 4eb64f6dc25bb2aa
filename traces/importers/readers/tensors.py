"""Named arrays out of the files people keep tensors in: safetensors, npy, npz, and
torch's zip. Nothing is executed.
"""

from __future__ import annotations

import json
import math
import re
import warnings
import zipfile
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from moesim.traces.importers.readers import torch_file as torchfile
from moesim.traces.importers.readers.foreign import DAMAGE, bad, decoding, head

if TYPE_CHECKING:
    from pathlib import Path

NPY = b"\x93NUMPY"
_SAFE = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "bf16",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "BOOL": "?",
}
_HEADER_BYTES = 100_000_000


def kind_of(path: Path) -> str:
    """``npy``, ``npz``, ``safetensors``, ``torch``, or nothing; by content, never
    raises.
    """
    start = head(path, 16)
    if start.startswith(NPY):
        return "npy"
    if start.startswith(b"PK\x03\x04"):
        if torchfile.is_torch_file(path):
            return "torch"
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except DAMAGE:
            return ""
        return "npz" if names and all(name.endswith(".npy") for name in names) else ""
    if (
        len(start) == 16
        and 2 <= int.from_bytes(start[:8], "little") <= _HEADER_BYTES
        and start[8:9] == b"{"
    ):
        return "safetensors"
    return ""


def load_named(path: Path) -> dict[str, np.ndarray]:
    """Name -> array, in natural order of the names (``layer.2`` before ``layer.10``);
    npy has one name, nothing.

    Raises:
        TraceError: none of the kinds, damaged, or not made of plain tensors.
    """
    kind = kind_of(path)
    with decoding(path, kind or "tensors"):
        if kind == "npy":
            with path.open("rb") as file:
                found = {"": array(path, "array", file, path.stat().st_size)}
        elif kind == "npz":
            with zipfile.ZipFile(path) as archive:
                found = {}
                for entry in archive.infolist():
                    with archive.open(entry) as file:
                        found[entry.filename.removesuffix(".npy")] = array(
                            path, entry.filename, file, entry.file_size
                        )
        elif kind == "safetensors":
            found = _safetensors(path)
        elif kind == "torch":
            found = flat("", torchfile.load(path))
        else:
            raise bad(
                path,
                "content",
                "safetensors, npy, npz or a torch zip",
                "none of them",
                "save the tensors as npz",
            )
    return dict(sorted(found.items(), key=lambda item: natural(item[0])))


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names by value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]


def flat(prefix: str, value: Any) -> dict[str, Any]:
    """The arrays (or `Stored` ones) of nested lists and dicts, named by their path;
    everything else is left out.
    """
    if isinstance(value, np.ndarray | torchfile.Stored):
        return {prefix: value}
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    found: dict[str, Any] = {}
    for key, inner in items:
        found |= flat(f"{prefix}.{key}" if prefix else str(key), inner)
    return found


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, column order and dtype of an npy stream, which is left at its numbers;
    raises as numpy does.
    """
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    if version > (2, 0):
        raise ValueError(f"npy format {version}; save it with numpy.save")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers of Python 2
        found: tuple[tuple[int, ...], bool, np.dtype] = read(file)
    return found


def array(path: Path, name: str, file: IO[bytes], size_bytes: int) -> np.ndarray:
    """Numbers of one npy stream. Its header is believed only as far as the file is
    long.

    Raises:
        TraceError: another format, Python objects, or fewer bytes than the header says.
    """
    shape, fortran, dtype = npy_header(file)
    count = believable(path, name, shape, dtype, size_bytes)
    data = file.read(count * dtype.itemsize)
    if len(data) != count * dtype.itemsize:
        raise bad(
            path,
            name,
            f"{count * dtype.itemsize} bytes",
            f"{len(data)}",
            "was it cut off while copying?",
        )
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def believable(
    path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype, size_bytes: int
) -> int:
    """How many numbers an npy header promises.

    Raises:
        TraceError: Python objects, or more than the file has room for.
    """
    if dtype.hasobject or dtype.kind not in "iufb":
        raise bad(
            path,
            name,
            "numbers",
            f"dtype {dtype}, which is never unpickled",
            "save plain numbers",
        )
    count = 1
    for side in shape:
        count *= side
    if min(shape, default=0) < 0 or count * dtype.itemsize > size_bytes:
        raise bad(
            path, name, f"at most {size_bytes} bytes", f"shape {shape} of {dtype}"
        )
    return count


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    data = np.memmap(path, np.uint8, "r")
    found = {}
    for name, (dtype, shape, start) in places(path).items():
        raw = np.dtype("<u2" if dtype == "bf16" else dtype)
        numbers = np.frombuffer(
            data[start : start + math.prod(shape) * raw.itemsize], raw
        ).reshape(shape)
        found[name] = torchfile.from_bf16(numbers) if dtype == "bf16" else numbers
    return found


def places(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Name -> (dtype or ``bf16``, shape, first byte in the file).

    Source: the layout of safetensors: u64 header length, a JSON header, raw
    little-endian numbers.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            raise bad(
                path,
                "header",
                f"{length} bytes",
                f"{size - 8}",
                "was it cut off while copying?",
            )
        header = json.loads(file.read(length))
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _SAFE.get(entry["dtype"])
        if dtype is None:
            raise bad(
                path,
                f"tensor {name!r}",
                f"one of {', '.join(_SAFE)}",
                entry["dtype"],
                "convert it",
            )
        start, stop = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not 0 <= start <= stop <= size - 8 - length:
            raise bad(
                path,
                f"tensor {name!r}",
                "a place inside the file",
                f"bytes {start}..{stop}",
                "was it cut off?",
            )
        due = math.prod(shape) * np.dtype("<u2" if dtype == "bf16" else dtype).itemsize
        if min(shape, default=0) < 0 or due != stop - start:
            raise bad(
                path,
                f"tensor {name!r}",
                f"{due} bytes for shape {list(shape)}",
                stop - start,
            )
        found[name] = dtype, shape, 8 + length + start
    return found


def integers(path: Path, name: str, array: Any, dimensions: int) -> np.ndarray:
    """Check that an array holds integers, of any size, and has so many dimensions.

    Raises:
        TraceError: naming the array.
    """
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.kind not in "iu"
        or array.ndim != dimensions
    ):
        found = (
            f"{array.dtype} {list(array.shape)}"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise bad(path, name, f"integers with {dimensions} dimensions", found)
    result: np.ndarray = array
    return result
