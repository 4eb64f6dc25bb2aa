"""The expert store: every expert of a model in one file, each a single aligned read.

`experts.bin` holds records of fixed layout, one per expert, each beginning on a block
boundary, so that one direct read brings one expert. `store.json` is its index
(`StoreIndex`): how a record's bytes become weights, how many experts a layer has, and a
checksum of each record. A build that was killed leaves no index but a build
log, and the next build of the same model continues where it stopped
(`runtime/store/build.py`). A seal, `checked`, notes in which state of both files every
checksum was right, so reads need not compare them again; where a file was touched
since, all of it is read before the store is used.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self

from moesim.base.errors import StoreError
from moesim.base.files import Closing, write_text
from moesim.base.inputs import load_json, parse_json, read_text
from moesim.runtime.models.expert_layout import ExpertLayout, round_up
from moesim.runtime.store.memory import BLOCK_BYTES, DirectFile, HostSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

FORMAT: Final = "moesim-experts"
VERSION: Final = 2
INDEX_NAME: Final = "store.json"


class Place(NamedTuple):
    """A record: the first expert that it holds, and where it lies."""

    layer: int
    expert: int
    offset_bytes: int
    size_bytes: int


def places_of(
    layouts: Sequence[ExpertLayout], experts: Sequence[int], distinct: int | None
) -> list[Place]:
    """Places of all records, one behind the other, layer by layer.

    Args:
        layouts: [L] of each layer's records.
        experts: [L] routed experts of each layer.
        distinct: records, where experts share them in turn; None for one of each
            expert.
    """
    places: list[Place] = []
    offset = 0
    for layer, (layout, count) in enumerate(zip(layouts, experts, strict=True)):
        size = record_stride(layout)
        for expert in range(count):
            if len(places) == distinct:
                return places
            places.append(Place(layer, expert, offset, size))
            offset += size
    return places


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """The contents of `store.json`. R records, L MoE layers.

    Attributes:
        model: the model's name.
        model_digest: the checkpoint (or the draw) the experts came from.
        layouts: the different layouts of a record.
        layer_layouts: [L] which of them each layer uses.
        experts: [L] routed experts of each layer.
        checksums: [R] CRC-32 of each record, padding included.
        distinct: fewer records than experts on purpose: how many; None where every
            expert has its own.
    """

    model: str
    model_digest: str
    layouts: tuple[ExpertLayout, ...]
    layer_layouts: tuple[int, ...]
    experts: tuple[int, ...]
    checksums: tuple[int, ...]
    distinct: int | None = None

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self) -> None:
        """Refuse layers and records that do not fit together."""
        if not self.experts or min(self.experts) < 1:
            raise StoreError(f"expected experts in every layer, found {self.experts}")
        if len(self.layer_layouts) != len(self.experts) or not all(
            0 <= layout < len(self.layouts) for layout in self.layer_layouts
        ):
            raise StoreError("layer_layouts: expected a known one of each layer")
        if len(self.checksums) != (self.distinct or sum(self.experts)):
            raise StoreError("checksums: expected one of each record")

    @property
    def per_layer(self) -> tuple[ExpertLayout, ...]:
        """[L] the layout of each layer's records."""
        return tuple(self.layouts[layout] for layout in self.layer_layouts)

    def to_json(self) -> str:
        """Serialise, sealed with a digest; equal stores are equal bytes."""
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(body | {"digest": digest_of(body)}, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> StoreIndex:
        """Read and check an index.

        Raises:
            StoreError: not an index, of another version, or altered.
        """
        body = _read_json(path)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise StoreError(
                f"{path}: expected the index of an expert store, found something else"
            )
        # Before the digest: another version may seal itself in another way.
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

        facts = {key: body[key] for key in body if key not in ("format", "version")}
        return parse_json(
            json.dumps(facts),
            cls,
            where=str(path),
            error=StoreError,
            way_out="remove the folder and build the store again",
        )


def record_stride(layout: ExpertLayout) -> int:
    """Bytes from one record to the next, in full blocks: a direct read moves those."""
    return round_up(layout.expert_bytes, BLOCK_BYTES)


def digest_of(body: Mapping[str, Any]) -> str:
    """Name a JSON object: BLAKE2b of its canonical text, in hexadecimal."""
    text = json.dumps(body, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read_json(path: Path) -> Any:
    """Read a JSON file; None where it is none."""
    try:
        return load_json(read_text(path))
    except (OSError, ValueError):
        return None


DATA_NAME: Final = "experts.bin"
BUILD_LOG_NAME: Final = "experts.journal"
SEAL_NAME: Final = "checked"


class BuildProgress(NamedTuple):
    """Progress of a build or a check."""

    records: int
    total_records: int
    done_bytes: int
    total_bytes: int


class ExpertStore(Closing):
    """An open store. Reads are safe from several threads at once.

    Args:
        directory: where `moesim.runtime.store.build.build_store` put it.

    Attributes:
        index: what the records hold.
        places: where they lie.
        direct: whether reads go around the page cache; `reason` says why not.
        slot_bytes: a slot of this size holds any record.

    Raises:
        StoreError: there is no store, or it is truncated, altered or of another
            version.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        path = self.directory / INDEX_NAME
        if not path.is_file():
            raise StoreError(
                f"{self.directory}: expected an expert store with {INDEX_NAME}, found"
                f" {self._instead_of_index()}"
            )

        self.index = StoreIndex.read(path)
        index = self.index
        self.places = places_of(index.per_layer, index.experts, index.distinct)
        *_, last = self.places
        self._data_bytes = last.offset_bytes + last.size_bytes
        self._firsts = [0, *accumulate(index.experts)]
        self._file = DirectFile(self.directory / DATA_NAME)
        # Checked at once: else a truncated file fails in the middle of a run.
        if self._file.size_bytes != self._data_bytes:
            self._file.close()
            raise StoreError(
                f"{self._file.path}: expected {self._data_bytes} bytes, found"
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
        return len(self.index.experts)

    def experts(self, layer: int) -> int:
        """Experts of a layer."""
        return self.index.experts[layer]

    def layout(self, layer: int) -> ExpertLayout:
        """Return the layout of a layer's records; the same object every time."""
        return self.index.layouts[self.index.layer_layouts[layer]]

    def record(self, layer: int, expert: int) -> int:
        """Number of the record that holds an expert; others may share it."""
        number = self._firsts[layer] + expert
        return number % len(self.places)

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
        record = self.record(layer, expert)
        offset = self.places[record].offset_bytes

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
        total = len(self.places)
        with HostSlots(1, self.slot_bytes) as slots:
            for done, place in enumerate(self.places, 1):
                self.read_into(place.layer, place.expert, slots.record(0), check=True)
                if progress is not None:
                    end = place.offset_bytes + place.size_bytes
                    progress(BuildProgress(done, total, end, self._data_bytes))
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

    def _instead_of_index(self) -> str:
        """Say what a directory without an index holds."""
        if (self.directory / BUILD_LOG_NAME).is_file():
            return "an unfinished build; run it again to continue"
        return "none; `moesim run --store` makes one"

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
