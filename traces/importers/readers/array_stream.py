"""Arrays read from their files some rows at a time, so that many large ones can be
walked through side by side.

An array streams if its numbers lie in order: npy, npz (packed or not), safetensors, and
torch tensors with a storage of their own. Any other (turned, or a part of something
larger) is read as a whole.
"""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from moesim.traces.importers.readers import tensors
from moesim.traces.importers.readers import torch_file as torchfile
from moesim.traces.importers.readers.foreign import decoding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Stream:
    """An array in a file.

    Attributes:
        shape: as numpy has it.
        dtype: of its rows.
        raw: of the file, ``<u2`` where floats are kept by their upper half.
        begin: begins to read; the function it gives returns the next so many bytes, and
            raises at the end, if not before, what is damaged.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    raw: np.dtype
    begin: Callable[[], Callable[[int], bytes]]

    def rows(self, count: int) -> Iterator[np.ndarray]:
        """Parts of `count` rows, the last one perhaps of fewer."""
        row_bytes = math.prod(self.shape[1:]) * self.raw.itemsize
        read = self.begin()
        for start in range(0, self.shape[0], count):
            due = min(count, self.shape[0] - start)
            data = read(due * row_bytes)
            if len(data) < due * row_bytes:
                raise ValueError(f"{self.shape[0]} rows promised, fewer found")
            part = np.frombuffer(data, self.raw).reshape(due, *self.shape[1:])
            yield part if self.raw == self.dtype else torchfile.from_bf16(part)
        read(1)  # a zip says only behind the last byte whether its sum is right


def streams(path: Path) -> dict[str, Stream]:
    """Name -> array, as `tensors.load_named` has them.

    Raises:
        TraceError: none of the kinds, damaged, or not made of plain tensors.
    """
    kind = tensors.kind_of(path)
    with decoding(path, kind or "tensors"):
        if kind == "npz":
            with zipfile.ZipFile(path) as archive:
                found = {
                    entry.filename.removesuffix(".npy"): _npz(path, archive, entry)
                    for entry in archive.infolist()
                }
        elif kind == "npy":
            found = {"": _npy(path)}
        elif kind == "safetensors":
            found = {
                name: _of_file(path, *place)
                for name, place in tensors.places(path).items()
            }
        elif kind == "torch":
            leaves = tensors.flat("", torchfile.load(path, stored=True))
            found = {name: _torch(tensor) for name, tensor in leaves.items()}
        else:
            found = {
                name: in_memory(values)
                for name, values in tensors.load_named(path).items()
            }
    return dict(sorted(found.items(), key=lambda item: tensors.natural(item[0])))


def in_memory(values: np.ndarray) -> Stream:
    """An array that has been read."""

    def begin() -> Callable[[int], bytes]:
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        at = 0

        def read(count: int) -> bytes:
            nonlocal at
            at += count
            return flat[at - count : at].tobytes()

        return read

    return Stream(values.shape, values.dtype, values.dtype, begin)


def _of_file(path: Path, dtype: str, shape: tuple[int, ...], start: int) -> Stream:
    """Numbers that lie in a file from byte `start` on."""
    raw = np.dtype("<u2" if dtype == "bf16" else dtype)
    stop = start + math.prod(shape) * raw.itemsize

    def begin() -> Callable[[int], bytes]:
        at = start

        def read(count: int) -> bytes:
            nonlocal at
            with path.open("rb") as file:
                file.seek(at)
                data = file.read(min(count, stop - at))
            at += len(data)
            return data

        return read

    return Stream(shape, np.dtype("<f4") if dtype == "bf16" else raw, raw, begin)


def _npy(path: Path) -> Stream:
    with path.open("rb") as file:
        shape, fortran, dtype = tensors.npy_header(file)
        start = file.tell()
        tensors.believable(path, "array", shape, dtype, path.stat().st_size - start)
        if fortran and len(shape) > 1:
            file.seek(0)
            return in_memory(tensors.array(path, "array", file, path.stat().st_size))
    return _of_file(path, dtype.str, shape, start)


def _npz(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Stream:
    with archive.open(entry) as file:
        shape, fortran, dtype = tensors.npy_header(file)
        tensors.believable(path, entry.filename, shape, dtype, entry.file_size)
    if fortran and len(shape) > 1:
        with archive.open(entry) as file:
            return in_memory(tensors.array(path, entry.filename, file, entry.file_size))

    def begin() -> Callable[[int], bytes]:
        member = zipfile.ZipFile(path).open(entry.filename)  # noqa: SIM115 - open as long as it is read
        tensors.npy_header(member)
        return member.read

    return Stream(shape, dtype, dtype, begin)


def _torch(tensor: torchfile.Stored) -> Stream:
    begin = tensor.in_order()
    if begin is None:
        return in_memory(tensor.array())
    raw = tensor.storage.raw
    return Stream(
        tensor.shape,
        np.dtype("<f4") if tensor.storage.dtype == "bf16" else raw,
        raw,
        begin,
    )
