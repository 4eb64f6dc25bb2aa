"""Memory for experts: rows of equal slots, allocated once and written before use; and
direct reads, which fill them from files.

Both memory levels below the disk are the same thing, a row of slots of fixed size: one
in host memory, one on the device. A whole row is allocated before the run and written
once, because memory that was never written is not memory yet (its first use costs a
page fault, and reading it measures the zero page). A slot holds any expert's record;
viewing it as weight tensors costs nothing, since the views are made once per slot and
layout.

Which expert may use which slot is decided elsewhere (`engine/memory.py`);
a row only knows free from taken, and only one thread takes and gives back.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import stat
import weakref
from typing import TYPE_CHECKING, Final

import torch

from moesim.base.errors import RuntimeFault, StoreError
from moesim.base.files import Closing
from moesim.base.host import available_memory_bytes
from moesim.runtime.models.expert_layout import ExpertLayout, ExpertWeights, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moesim.runtime.accelerators import Accelerator

BLOCK_BYTES: Final = 4096
"""Alignment that every current disk and file system accepts for direct I/O."""


class Slots(Closing):
    """A row of slots over one contiguous uint8 tensor.

    Args:
        memory: uint8 [slots * slot_bytes], written.
        slot_bytes: size of each slot, a multiple of `BLOCK_BYTES`.

    Attributes:
        memory: the bytes of all slots.
        slots: how many.
        slot_bytes: size of each.
        device: where the memory is.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: int) -> None:
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.slots: int = memory.numel() // slot_bytes
        self.device = memory.device
        # A view of no rows is ambiguous, so none is made.
        self._rows = list(memory.view(self.slots, slot_bytes)) if self.slots else []

        # Taken from the end, so that the lowest slot comes first.
        self._free = list(range(self.slots - 1, -1, -1))
        self._taken = [False] * self.slots
        self._views: dict[tuple[int, int], tuple[ExpertLayout, ExpertWeights]] = {}

    @property
    def free(self) -> int:
        """Slots that are not taken."""
        return len(self._free)

    def take(self) -> int:
        """Take a free slot: the lowest at first, later the one given back last.

        Raises:
            RuntimeFault: all are taken.
        """
        if not self._free:
            raise RuntimeFault(
                f"all {self.slots} slots of {self.slot_bytes} bytes on {self.device}"
                " are taken"
            )
        slot = self._free.pop()
        self._taken[slot] = True
        return slot

    def give_back(self, slot: int) -> None:
        """Make a taken slot free again. Its bytes stay until it is written again."""
        assert self._taken[slot], f"slot {slot} is free already"
        self._taken[slot] = False
        self._free.append(slot)

    def record(self, slot: int) -> torch.Tensor:
        """Return a slot's bytes: uint8 [slot_bytes], a view."""
        return self._rows[slot]

    def weights(self, slot: int, layout: ExpertLayout) -> ExpertWeights:
        """View a slot as the weight tensors of `layout`; views are made once and kept.

        A layout is known by its identity, so ask with the store's own objects.
        """
        key = (slot, id(layout))
        entry = self._views.get(key)
        if entry is None:
            # The layout is kept beside its views, so that no other gets its id.
            entry = (layout, layout.views(self._rows[slot]))
            self._views[key] = entry
        return entry[1]

    def close(self) -> None:
        """Let go of the memory; views handed out keep theirs alive."""
        self._views.clear()
        self._rows.clear()
        self.memory = torch.empty(0, dtype=torch.uint8)


class HostSlots(Slots):
    """Slots in host memory, page-aligned, so that direct reads land in them without
    another copy.

    Args:
        slots: how many, >= 0.
        slot_bytes: size of each; rounded up to a multiple of `BLOCK_BYTES`.
        page_lock: the accelerator that copies from them by itself, so that pages must
            stay where they are; None where nobody does.

    Raises:
        RuntimeFault: there is not that much memory, or it cannot be page-locked.
    """

    def __init__(
        self, slots: int, slot_bytes: int, *, page_lock: Accelerator | None = None
    ) -> None:
        slot_bytes = round_up(slot_bytes, BLOCK_BYTES)
        super().__init__(_host_memory(slots, slot_bytes), slot_bytes)
        self._unlock: weakref.finalize[..., HostSlots] | None = None
        if page_lock is not None and self.slots:
            page_lock.page_lock(self.memory)
            # Also of a row that is dropped unclosed: the device would go on to take
            # whoever has these addresses next for the locked pages.
            self._unlock = weakref.finalize(self, page_lock.page_unlock, self.memory)
            self._unlock.atexit = False

    @property
    def page_locked(self) -> bool:
        """True if the pages stay where they are."""
        return self._unlock is not None and self._unlock.alive

    def close(self) -> None:
        """Unlock the pages and let go of them."""
        if self._unlock is not None:
            self._unlock()
        super().close()


class DeviceSlots(Slots):
    """Slots on the device that computes: a GPU's memory, or the host accelerator's own
    part of host memory.

    Args:
        slots: how many, >= 0.
        slot_bytes: size of each; rounded up to a multiple of `BLOCK_BYTES`.
        device: ``cpu`` for the host accelerator, or ``cuda``, ``cuda:1``, …

    Raises:
        RuntimeFault: the device has not that much memory.
    """

    def __init__(
        self, slots: int, slot_bytes: int, device: str | torch.device = "cpu"
    ) -> None:
        where = torch.device(device)
        slot_bytes = round_up(slot_bytes, BLOCK_BYTES)
        if where.type == "cpu":
            super().__init__(_host_memory(slots, slot_bytes), slot_bytes)
            return

        total_bytes = slots * slot_bytes
        try:
            memory = torch.zeros(total_bytes, dtype=torch.uint8, device=where)
        # A torch without CUDA raises an AssertionError, a full device a RuntimeError.
        except (RuntimeError, AssertionError) as error:
            raise RuntimeFault(
                f"{where}: expected {slots} slots of {slot_bytes} bytes"
                f" ({total_bytes / 2**30:.2f} GiB), got: {str(error).splitlines()[0]};"
                " ask for a smaller expert cache"
            ) from None
        super().__init__(memory, slot_bytes)


def huge_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an unwritten tensor in host memory of huge pages: weights that are read
    from end to end.

    Through pages of 4 KiB a product over 16 MiB needs more translations than a
    processor keeps, and how long it takes depends on where the pages happen to lie: the
    same run differed from one allocation to the next.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    # A shape without dense feed-forward has such tensors; no system maps nothing.
    if not nbytes:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(_map_pages(nbytes), dtype=dtype).view(*shape)


def _host_memory(slots: int, slot_bytes: int) -> torch.Tensor:
    """Allocate and write page-aligned host memory, uint8 [slots * slot_bytes]."""
    if slots < 0 or slot_bytes < 1:
        raise ValueError(
            f"expected slots >= 0 and slot_bytes >= 1, got {slots} and {slot_bytes}"
        )
    if slots == 0:
        return torch.empty(0, dtype=torch.uint8)

    total_bytes = slots * slot_bytes
    available_bytes = available_memory_bytes()
    # Writing more than this would end in a kill, not in an error.
    fits = total_bytes <= available_bytes
    try:
        pages = _map_pages(total_bytes) if fits else None
    except (OSError, OverflowError):
        pages = None
    if pages is None:
        raise RuntimeFault(
            f"host memory: expected {slots} slots of {slot_bytes} bytes"
            f" ({total_bytes / 2**30:.2f} GiB), found {available_bytes / 2**30:.2f} GiB"
            " available; ask for a smaller cache"
        )
    return torch.frombuffer(pages, dtype=torch.uint8).zero_()


def _map_pages(nbytes: int) -> mmap.mmap:
    """Map memory of this process alone, of huge pages where the system has them.

    A direct read is cut into a piece for every run of neighbouring pages that it lands
    in. Over scattered pages of 4 KiB the same read took 1.2 to 2.5 times as long, slot
    by slot and run by run differently (4.5 MiB, virtual disk).
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # not a POSIX system
        return mmap.mmap(-1, nbytes)

    # Private, because the kernel gives shared mappings no huge pages by itself.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


# -- direct io -------------------------------------------------------------------------
# Direct file reads: they go to the disk, around the operating system's page cache.
#
# An operating system answers most reads from its page cache, so an expert "on the
# SSD" would quietly come from memory. Direct I/O goes around that cache, at a price:
# file offset, length and memory address must all be multiples of the block size.
# Where a file system refuses it (some network and overlay file systems do), reads go
# through the cache, and each one asks the kernel to drop what it read;
# `DirectFile.direct` and `.reason` say which of the two happened.

# Linux moves at most 2 GiB - 4 KiB per call; stay a multiple of the block.
_MAX_READ_BYTES: Final = 1 << 30

# Reads without progress before a disk counts as broken.
_MOST_STALLS: Final = 3

# How a system without direct I/O refuses it, in `open` or in the first read.
_REFUSALS: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile(Closing):
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

        descriptor = -1
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | flag)
            # Some file systems accept the flag and refuse the read.
            _probe(descriptor)
        except OSError as error:
            if descriptor >= 0:
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
