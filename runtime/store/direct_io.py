"""Direct file reads: they go to the disk, around the operating system's page cache.

An operating system answers most reads from its page cache, so an expert "on the SSD"
would quietly come from memory. Direct I/O goes around that cache, at a price: file
offset, length and memory address must all be multiples of the block size. Where a file
system refuses it (some network and overlay file systems do), reads go through the
cache, and each one asks the kernel to drop what it read; `DirectFile.direct` and
`.reason` say which of the two happened.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from typing import TYPE_CHECKING, Final, Self

from moesim.runtime.errors import RuntimeFault, StoreError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

BLOCK_BYTES: Final = 4096
"""Alignment that every current disk and file system accepts for direct I/O."""

# Linux moves at most 2 GiB - 4 KiB per call; stay a multiple of the block.
_MAX_READ_BYTES: Final = 1 << 30

# Reads without progress before a disk counts as broken.
_MOST_STALLS: Final = 3

# How a system without direct I/O refuses it, in `open` or in the first read.
_REFUSALS: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """An open file that is read block by block. Safe to share between threads: reads
    carry their own offset.

    Args:
        path: the file.
        direct: try direct I/O; False reads through the page cache on purpose (checks,
            tests).

    Attributes:
        direct: whether reads go around the page cache.
        reason: why not, in words; empty if they do.
        size_bytes: the file's size when opened.

    Raises:
        StoreError: the file cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        # Until the system agrees, reads are not direct.
        self.path = path
        self.direct = False
        self.reason = "not asked for"
        self._descriptor = -1
        try:
            if direct:
                self._open_direct()
            if self._descriptor < 0:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise StoreError(f"{path}: cannot open: {_describe(error)}") from None

        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise StoreError(f"{path}: expected a regular file")
        self.size_bytes = status.st_size

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        """Fill `target` from the file, however many system calls that takes.

        Interrupted calls are repeated by Python; short reads are continued from the
        last full block.

        Args:
            offset_bytes: where in the file; a multiple of `BLOCK_BYTES`.
            target: writable bytes; address and length multiples of `BLOCK_BYTES` where
                `direct` holds.

        Raises:
            RuntimeFault: the disk reports a failure, or returns less than a block again
                and again.
            StoreError: the file ends before `target` is full.
        """
        size = target.nbytes
        done = 0
        stalls = 0
        while done < size:
            count = self._read_some(offset_bytes + done, target[done:])
            end = done + count
            if end < size:
                self._check_not_ended(offset_bytes, end, size)
                # Direct I/O can go on at a block only: the rest is read again.
                end -= end % BLOCK_BYTES if self.direct else 0

            stalls = stalls + 1 if end == done else 0
            if stalls > _MOST_STALLS:
                raise RuntimeFault(
                    f"{self.path}: reading {size - done} bytes at byte"
                    f" {offset_bytes + done} gave {count} bytes, {stalls} times in a"
                    " row; check the disk"
                )
            done = end

        if not self.direct and self._descriptor >= 0:
            _drop_from_cache(self._descriptor, offset_bytes, size)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        """Use as ``with DirectFile(path) as file``."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close on leaving."""
        self.close()

    def _read_some(self, offset_bytes: int, target: memoryview) -> int:
        """Read once; return how many bytes came."""
        try:
            return os.preadv(self._descriptor, [target[:_MAX_READ_BYTES]], offset_bytes)
        except OSError as error:
            raise RuntimeFault(
                f"{self.path}: reading {target.nbytes} bytes at byte {offset_bytes}"
                f" failed: {_describe(error)}; check the disk"
            ) from None

    def _check_not_ended(self, offset_bytes: int, end: int, size: int) -> None:
        """Refuse to go on behind the end of the file.

        Its size is asked for anew: a file can be truncated while it is open.
        """
        if offset_bytes + end >= os.fstat(self._descriptor).st_size:
            raise StoreError(
                f"{self.path}: expected {size} bytes at byte {offset_bytes}, the file"
                f" ended after {end}; it was truncated: remove the folder and build the"
                " store again"
            )

    def _open_direct(self) -> None:
        """Open for direct I/O and try one block; leave the descriptor closed and say
        why if that is refused.
        """
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            self.reason = "this system has no O_DIRECT"
            return

        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | flag)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self.reason = (
                f"the file system refuses O_DIRECT ({_describe(error)}); reads go"
                " through the page cache"
            )
            return

        # Some file systems accept the flag and refuse the read.
        try:
            _probe(descriptor)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _REFUSALS:
                raise
            self.reason = (
                f"the file system refuses direct reads ({_describe(error)}); reads go"
                " through the page cache"
            )
            return

        self._descriptor = descriptor
        self.direct = True
        self.reason = ""


def _probe(descriptor: int) -> None:
    """Read one block."""
    # Mapped memory begins on a page, as direct reads demand.
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        os.preadv(descriptor, [block], 0)


def _drop_from_cache(descriptor: int, offset_bytes: int, length_bytes: int) -> None:
    """Ask the kernel to drop these pages from its cache, where the system knows how."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is not None:
        advise(descriptor, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)


def _describe(error: OSError) -> str:
    """Say what went wrong, with the error's symbol."""
    symbol = errno.errorcode.get(error.errno or 0, error.errno)
    return f"{error.strerror or error} ({symbol})"
