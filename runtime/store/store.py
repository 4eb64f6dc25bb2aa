"""The expert store: every expert of a model in one file, each a single aligned read
away.

Picture a warehouse with a ledger. `experts.bin` is the warehouse: records of fixed
maps, one per expert, each beginning on a block boundary, so that one direct read brings
one expert. `store.json` is the ledger: which record holds which expert, how its bytes
become weights, and a checksum of each. The ledger is written last and sealed with its
own digest; without it there is no store, so a build that was killed leaves nothing that
could be mistaken for one. It leaves a journal instead, and the next build of the same
model continues where it stopped (`runtime/store/build.py`). A seal, `checked`, notes in
which state of both files every checksum was right, so reads need not compare them
again; where a file was touched since, all of it is read before anybody uses it.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from moesim.runtime.errors import StoreError
from moesim.runtime.models.expert_math import ExpertLayout, round_up
from moesim.runtime.store.direct_io import BLOCK_BYTES, DirectFile
from moesim.runtime.store.memory import HostTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    import torch


FORMAT: Final = "moesim-experts"
VERSION: Final = 1
INDEX_NAME: Final = "store.json"
DATA_NAME: Final = "experts.bin"
JOURNAL_NAME: Final = "experts.journal"
SEAL_NAME: Final = "checked"


class BuildProgress(NamedTuple):
    """How far a build or a check has come."""

    records: int
    total_records: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """What `store.json` says. R records, L MoE layers.

    Attributes:
        model: the model's name.
        model_digest: the checkpoint (or the draw) the experts came from.
        layouts: the different maps of a record.
        layer_layouts: [L] which of them each layer uses.
        records: per layer, the record of each expert.
        offsets: [R] where each record begins, a multiple of `BLOCK_BYTES`.
        checksums: [R] CRC-32 of each record, padding included.
        data_bytes: size of `experts.bin`.
        distinct: fewer records than experts on purpose: how many; None where every
            expert has its own.
    """

    model: str
    model_digest: str
    layouts: tuple[ExpertLayout, ...]
    layer_layouts: tuple[int, ...]
    records: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    checksums: tuple[int, ...]
    data_bytes: int
    distinct: int | None = None

    @property
    def per_layer(self) -> tuple[ExpertLayout, ...]:
        """[L] the map of each layer's records."""
        return tuple(self.layouts[layout] for layout in self.layer_layouts)

    def to_json(self) -> str:
        """Serialise, sealed with a digest; equal stores are equal bytes."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "model_digest": self.model_digest,
            "layouts": [layout.to_json() for layout in self.layouts],
            "layer_layouts": list(self.layer_layouts),
            "records": [list(row) for row in self.records],
            "offsets": list(self.offsets),
            "checksums": list(self.checksums),
            "data_bytes": self.data_bytes,
            "distinct": self.distinct,
        }
        return json.dumps(body | {"digest": digest_of(body)}, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> StoreIndex:
        """Read and check a ledger.

        Raises:
            StoreError: not a ledger, of another version, or altered.
        """
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            body = None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise StoreError(
                f"{path}: expected the index of an expert store, found something else"
            )
        if body.get("version") != VERSION:
            raise StoreError(
                f"{path}: store version: expected {VERSION}, found"
                f" {body.get('version')}; remove the folder and build the store again"
            )
        sealed = body.pop("digest", None)
        if sealed != digest_of(body):
            raise StoreError(
                f"{path}: its digest does not match: it was altered; remove the folder"
                " and build the store again"
            )
        try:
            return cls(
                model=body["model"],
                model_digest=body["model_digest"],
                layouts=tuple(ExpertLayout.from_json(raw) for raw in body["layouts"]),
                layer_layouts=tuple(body["layer_layouts"]),
                records=tuple(tuple(row) for row in body["records"]),
                offsets=tuple(body["offsets"]),
                checksums=tuple(body["checksums"]),
                data_bytes=body["data_bytes"],
                distinct=body["distinct"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path}: {type(error).__name__}: {error}; remove the folder and build"
                " the store again"
            ) from None


class ExpertStore:
    """An open store. Reads are safe from several threads at once.

    Args:
        directory: where `moesim.runtime.store.build.build_store` put it.
        direct: read around the page cache where the file system allows it.

    Attributes:
        index: the ledger.
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
            unfinished = (self.directory / JOURNAL_NAME).is_file()
            found = (
                "an unfinished build; run it again to continue"
                if unfinished
                else "none; `moesim store build` makes one"
            )
            raise StoreError(
                f"{self.directory}: expected an expert store with {INDEX_NAME}, found"
                f" {found}"
            )
        self.index = StoreIndex.read(path)
        self._file = DirectFile(self.directory / DATA_NAME, direct=direct)
        if self._file.size_bytes != self.index.data_bytes:
            self._file.close()
            raise StoreError(
                f"{self._file.path}: expected {self.index.data_bytes} bytes, found"
                f" {self._file.size_bytes}; it was truncated or altered: remove the"
                " folder and build the store again"
            )
        self.direct = self._file.direct
        self.reason = self._file.reason
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
        """Return the map of a layer's records; the same object every time."""
        return self.index.layouts[self.index.layer_layouts[layer]]

    def record_bytes(self, layer: int) -> int:
        """Bytes that one read of this layer moves: the record and its padding to whole
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
        size = self.record_bytes(layer)
        record = self.index.records[layer][expert]
        assert target.data_ptr() % BLOCK_BYTES == 0, (
            "direct reads need slots on a block boundary"
        )
        view = memoryview(target.numpy())[:size]
        self._file.read_into(self.index.offsets[record], view)
        if check and zlib.crc32(view) != self.index.checksums[record]:
            raise StoreError(
                f"{self._file.path}: layer {layer}, expert {expert} (byte"
                f" {self.index.offsets[record]}): checksum does not match: the file was"
                " altered; remove the folder and build the store again"
            )
        return size

    def verify(self, progress: Callable[[BuildProgress], None] | None = None) -> None:
        """Read every record once and compare its checksum.

        Raises:
            StoreError: a record was altered.
        """
        seen: set[int] = set()
        done = 0
        with HostTier(1, self.slot_bytes) as tier:
            for layer, row in enumerate(self.index.records):
                for expert, record in enumerate(row):
                    if record in seen:
                        continue
                    seen.add(record)
                    done += self.read_into(layer, expert, tier.record(0), check=True)
                    if progress is not None:
                        progress(
                            BuildProgress(
                                len(seen),
                                len(self.index.offsets),
                                done,
                                self.index.data_bytes,
                            )
                        )
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
        except BaseException:
            self.close()
            raise
        return self

    def seal(self) -> None:
        """Note that every checksum is right for the files as they are; where that
        cannot be written, all look again.
        """
        with suppress(OSError):
            (self.directory / SEAL_NAME).write_text(self._state(), encoding="utf-8")

    def _is_sealed(self) -> bool:
        try:
            return (self.directory / SEAL_NAME).read_text(
                encoding="utf-8"
            ) == self._state()
        except (OSError, ValueError):
            return False

    def _state(self) -> str:
        """Which files these are, and when they were last touched."""
        files = [(self.directory / name).stat() for name in (DATA_NAME, INDEX_NAME)]
        return (
            " ".join(
                f"{one.st_ino} {one.st_size} {one.st_mtime_ns} {one.st_ctime_ns}"
                for one in files
            )
            + "\n"
        )

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


def record_stride(layout: ExpertLayout) -> int:
    """Bytes from one record to the next: whole blocks."""
    return round_up(layout.expert_bytes, BLOCK_BYTES)


def digest_of(body: Mapping[str, Any]) -> str:
    """Name a JSON object: BLAKE2b of its canonical text, in hexadecimal."""
    return hashlib.blake2b(
        json.dumps(body, sort_keys=True).encode(), digest_size=16
    ).hexdigest()
