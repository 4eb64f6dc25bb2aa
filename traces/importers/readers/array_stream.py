"""Arrays read from their files some rows at a time, so that many large ones can be
walked through side by side.

An array streams if its numbers lie in order: npy, npz (packed or not), safetensors, and
torch tensors with a storage of their own. Any other (transposed, or a part of something
larger) is read as a whole.
"""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moesim.base.seals import check_tensors
from moesim.traces.importers.readers import tensors, torch_file
from moesim.traces.importers.readers.foreign import (
    decoding,
    from_bf16,
    layout_error,
    raw_dtype,
    row_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ArrayStream:
    """An array in a file.

    Attributes:
        shape: as numpy has it.
        dtype: of its rows.
        raw: of the file, ``<u2`` for bfloat16, whose bits are the upper half of a
            float.
        begin: starts reading; the function it returns gives the next so many bytes, and
            raises at the end, if not before, what is damaged.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    raw: np.dtype
    begin: Callable[[], Callable[[int], bytes]]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its numbers in the file."""
        return math.prod(self.shape) * self.raw.itemsize

    def rows(self, count: int) -> Iterator[np.ndarray]:
        """Read parts of `count` rows, the last one perhaps of fewer.

        Raises:
            ValueError: fewer rows in the file than its header says.
        """
        read = self.begin()
        for start in range(0, self.shape[0], count):
            due = min(count, self.shape[0] - start)
            yield self._next(read, (due, *self.shape[1:]))

        # A zip says only behind the last byte whether its checksum is right.
        read(1)

    def whole(self) -> np.ndarray:
        """Read all of it; raises as `rows` does."""
        read = self.begin()
        numbers = self._next(read, self.shape)
        read(1)
        return numbers

    def _next(self, read: Callable[[int], bytes], shape: tuple[int, ...]) -> np.ndarray:
        due_bytes = math.prod(shape) * self.raw.itemsize
        data = read(due_bytes)
        if len(data) < due_bytes:
            raise ValueError(f"{list(self.shape)} numbers promised, fewer found")
        part = np.frombuffer(data, self.raw).reshape(shape)
        return part if self.raw == self.dtype else from_bf16(part)


def load_named(path: Path) -> dict[str, np.ndarray]:
    """Return name -> array, as `streams` has them.

    Raises:
        TraceError: as `streams`; or altered since it was sealed, or too large.
    """
    kind = tensors.kind_of(path)
    by_name = streams(path)
    with decoding(path, kind):
        if kind in ("npy", "npz"):
            # All are held at once.
            in_all = sum(stream.size_bytes for stream in by_name.values())
            tensors.check_size(path, "content", in_all)
        arrays = {name: stream.whole() for name, stream in by_name.items()}
        if kind == "safetensors":
            metadata = tensors.safetensors_metadata(path)
            if metadata:
                check_tensors(path, arrays, metadata)
    return arrays


def streams(path: Path) -> dict[str, ArrayStream]:
    """Return name -> array, in natural order of the names (``layer.2`` before
    ``layer.10``); the array of an npy has an empty name.

    Raises:
        TraceError: none of the kinds, damaged, or not made of plain tensors.
    """
    kind = tensors.kind_of(path)
    with decoding(path, kind or "tensors"):
        if kind == "npz":
            arrays = _npz_members(path)
        elif kind == "npy":
            arrays = {"": _npy(path)}
        elif kind == "safetensors":
            places = tensors.safetensors_places(path)
            arrays = {name: _in_file(path, *place) for name, place in places.items()}
        elif kind == "torch":
            leaves = tensors.leaves("", torch_file.load(path))
            arrays = {name: _torch(tensor) for name, tensor in leaves.items()}
        else:
            raise layout_error(
                path,
                "content",
                "safetensors, npy, npz or a torch zip",
                "none of them",
                "save the tensors as npz",
            )

    in_order = sorted(arrays, key=tensors.natural)
    return {name: arrays[name] for name in in_order}


def in_memory(values: np.ndarray) -> ArrayStream:
    """Return a stream of an array that has been read."""

    def begin() -> Callable[[int], bytes]:
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        done = 0

        def read(count: int) -> bytes:
            nonlocal done
            start = done
            done += count
            return flat[start:done].tobytes()

        return read

    return ArrayStream(values.shape, values.dtype, values.dtype, begin)


def _in_file(path: Path, dtype: str, shape: tuple[int, ...], start: int) -> ArrayStream:
    """Numbers that lie in a file from byte `start` on; `dtype` may be ``bf16``."""
    raw = raw_dtype(dtype)
    stop = start + math.prod(shape) * raw.itemsize

    def begin() -> Callable[[int], bytes]:
        at = start

        def read(count: int) -> bytes:
            nonlocal at
            # Opened for each part: a model has more layers than a process has files.
            with path.open("rb") as file:
                file.seek(at)
                data = file.read(min(count, stop - at))
            at += len(data)
            return data

        return read

    return ArrayStream(shape, row_dtype(dtype), raw, begin)


def _npy(path: Path) -> ArrayStream:
    # A header is believed only as far as the file is long.
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        shape, fortran, dtype = tensors.npy_header(file)
        start = file.tell()
        tensors.check_header(path, "array", shape, dtype, size_bytes - start)

        if fortran and len(shape) > 1:  # its rows do not lie in order
            file.seek(0)
            return in_memory(tensors.array(path, "array", file, size_bytes))

    return _in_file(path, dtype.str, shape, start)


def _npz_members(path: Path) -> dict[str, ArrayStream]:
    with zipfile.ZipFile(path) as archive:
        return {
            member.filename.removesuffix(".npy"): _npz(path, archive, member)
            for member in archive.infolist()
        }


def _npz(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> ArrayStream:
    name = member.filename
    with archive.open(member) as file:
        shape, fortran, dtype = tensors.npy_header(file)
        tensors.check_header(path, name, shape, dtype, member.file_size)

    if fortran and len(shape) > 1:
        with archive.open(member) as file:
            return in_memory(tensors.array(path, name, file, member.file_size))

    # Each reader unpacks for itself: a packed member cannot be entered midway.
    def begin() -> Callable[[int], bytes]:
        opened = zipfile.ZipFile(path).open(name)  # noqa: SIM115 - open as long as it is read
        tensors.npy_header(opened)
        return opened.read

    return ArrayStream(shape, dtype, dtype, begin)


def _torch(tensor: torch_file.StoredTensor) -> ArrayStream:
    begin = tensor.in_order()
    if begin is None:
        return in_memory(tensor.array())

    dtype = tensor.storage.dtype
    return ArrayStream(tensor.shape, row_dtype(dtype), tensor.storage.raw, begin)
