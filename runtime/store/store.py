"""The expert store: every expert of a model in one file, each a single aligned read.

`experts.bin` holds records of fixed layout, one per expert, each beginning on a block
boundary, so that one direct read brings one expert. `store.json` is its index
(`runtime/store/index.py`): which record holds which expert, how its bytes become
weights, and a checksum of each. A build that was killed leaves no index but a build
log, and the next build of the same model continues where it stopped
(`runtime/store/build.py`). A seal, `checked`, notes in which state of both files every
checksum was right, so reads need not compare them again; where a file was touched
since, all of it is read before the store is used.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from moesim.runtime.errors import StoreError
from moesim.runtime.store.direct_io import BLOCK_BYTES, DirectFile
from moesim.runtime.store.index import INDEX_NAME, StoreIndex, record_stride
from moesim.runtime.store.memory import HostSlots
from moesim.traces.files import write_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import torch

    from moesim.runtime.models.expert_layout import ExpertLayout

DATA_NAME: Final = "experts.bin"
BUILD_LOG_NAME: Final = "experts.journal"
SEAL_NAME: Final = "checked"


class BuildProgress(NamedTuple):
    """How far a build or a check has come."""

    records: int
    total_records: int
    done_bytes: int
    total_bytes: int


class ExpertStore:
    """An open store. Reads are safe from several threads at once.

    Args:
        directory: where `moesim.runtime.store.build.build_store` put it.
        direct: read around the page cache where the file system allows it.

    Attributes:
        index: where the records lie.
        direct: whether reads go around the page cache; `reason` says why not.
        slot_bytes: a slot of this size holds any record.

    Raises:
        StoreError: there is no store, or it is truncated, altered or of another
            version.
    """

    def __init__(self, directory: Path | str, *, direct: bool = True) -> None:
        self.directory = Path(directory)
        path = self.directory / INDEX_NAME
        if not path.is_file():
            raise StoreError(
                f"{self.directory}: expected an expert store with {INDEX_NAME}, found"
                f" {self._instead_of_index()}"
            )

        self.index = StoreIndex.read(path)
        self._file = DirectFile(self.directory / DATA_NAME, direct=direct)
        # Checked at once: else a truncated file fails in the middle of a run.
        if self._file.size_bytes != self.index.data_bytes:
            self._file.close()
            raise StoreError(
                f"{self._file.path}: expected {self.index.data_bytes} bytes, found"
                f" {self._file.size_bytes}; it was truncated or altered: remove the"
                " folder and build the store again"
            )
        self.direct = self._file.direct
        self.reason = self._file.reason
        # Layers may differ in size; slots do not.
        self._strides = tuple(record_stride(layout) for layout in self.index.layouts)
        self.slot_bytes = max(self._strides)

    @property
    def layers(self) -> int:
        """MoE layers."""
        return len(self.index.records)

    def experts(self, layer: int) -> int:
        """Experts of a layer."""
        return len(self.index.records[layer])

    def layout(self, layer: int) -> ExpertLayout:
        """Return the layout of a layer's records; the same object every time."""
        return self.index.layouts[self.index.layer_layouts[layer]]

    def record_bytes(self, layer: int) -> int:
        """Bytes that one read of this layer moves: the record and its padding to full
        blocks.
        """
        return self._strides[self.index.layer_layouts[layer]]

    def read_into(
        self, layer: int, expert: int, target: torch.Tensor, *, check: bool = False
    ) -> int:
        """Read one expert into a slot.

        Args:
            layer: MoE layer.
            expert: expert of that layer.
            target: uint8 on the CPU, at least `record_bytes(layer)` long, aligned to
                `BLOCK_BYTES` (the slots of `moesim.runtime.store.memory` are).
            check: compare the checksum, at about the speed of memory.

        Returns:
            Bytes read.

        Raises:
            RuntimeFault: the disk fails.
            StoreError: the file ends too soon, or the checksum differs.
        """
        assert target.data_ptr() % BLOCK_BYTES == 0, (
            "direct reads need slots on a block boundary"
        )
        size = self.record_bytes(layer)
        record = self.index.records[layer][expert]
        offset = self.index.offsets[record]

        # Padding is read too: direct reads have full blocks.
        view = memoryview(target.numpy())[:size]
        self._file.read_into(offset, view)
        if check and zlib.crc32(view) != self.index.checksums[record]:
            raise StoreError(
                f"{self._file.path}: layer {layer}, expert {expert} (byte {offset}):"
                " checksum does not match: the file was altered; remove the folder and"
                " build the store again"
            )
        return size

    def verify(self, progress: Callable[[BuildProgress], None] | None = None) -> None:
        """Read every record once and compare its checksum.

        Raises:
            StoreError: a record was altered.
        """
        # Experts may share a record.
        seen: set[int] = set()
        done_bytes = 0
        with HostSlots(1, self.slot_bytes) as slots:
            for layer, row in enumerate(self.index.records):
                for expert, record in enumerate(row):
                    if record in seen:
                        continue
                    seen.add(record)
                    done_bytes += self.read_into(
                        layer, expert, slots.record(0), check=True
                    )
                    if progress is not None:
                        progress(self._progress(len(seen), done_bytes))
        self.seal()

    def trusted(self, progress: Callable[[BuildProgress], None] | None = None) -> Self:
        """Return this store, every record of it verified since its files were last
        touched; else close it.

        Raises:
            StoreError: a record was altered.
        """
        try:
            if not self._is_sealed():
                self.verify(progress)
        # Ctrl-C too: the caller never gets the store, so cannot close it.
        except BaseException:
            self.close()
            raise
        return self

    def seal(self) -> None:
        """Note that every checksum is right for the files as they are; where that
        cannot be written, all is compared again next time.
        """
        with suppress(OSError):
            write_text(self.directory / SEAL_NAME, self._state())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """Use as ``with ExpertStore(directory) as store``."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close on leaving."""
        self.close()

    def _instead_of_index(self) -> str:
        """Say what a directory without an index holds."""
        if (self.directory / BUILD_LOG_NAME).is_file():
            return "an unfinished build; run it again to continue"
        return "none; `moesim store build` makes one"

    def _progress(self, records: int, done_bytes: int) -> BuildProgress:
        return BuildProgress(
            records, len(self.index.offsets), done_bytes, self.index.data_bytes
        )

    def _is_sealed(self) -> bool:
        try:
            sealed = (self.directory / SEAL_NAME).read_text(encoding="utf-8")
            return sealed == self._state()
        except (OSError, ValueError):
            return False

    def _state(self) -> str:
        """Which files these are, and when they were last touched."""
        facts = []
        for name in (DATA_NAME, INDEX_NAME):
            status = (self.directory / name).stat()
            # Inode and change time too: a copy keeps size and modification time.
            facts.append(
                f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"
                f" {status.st_ctime_ns}"
            )
        return " ".join(facts) + "\n"
