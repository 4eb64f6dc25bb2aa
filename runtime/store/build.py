"""Filling the warehouse: one expert after the other, stoppable at any moment.

A build writes records into a file beside the final one and notes each in a journal.
Killed, it leaves both; the next build of the same model reads the noted records back,
compares them with their checksums, and continues behind the last good one, so the
finished store has the same bytes either way. The ledger comes last
(`runtime/store/store.py`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import torch
from moesim.runtime.errors import StoreError
from moesim.runtime.models.expert_math import torch_dtype
from moesim.runtime.store.sources import (
    CheckpointSource,
    ExpertSource,
    ModuleSource,
    RandomSource,
)
from moesim.runtime.store.store import (
    DATA_NAME,
    INDEX_NAME,
    JOURNAL_NAME,
    BuildProgress,
    ExpertStore,
    StoreIndex,
    digest_of,
    record_stride,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.traces.format.schema import ModelShape

_PART_NAME: Final = DATA_NAME + ".part"


def build_store(
    model: Path | str | torch.nn.Module,
    out_dir: Path | str,
    *,
    dtype: str | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
) -> ExpertStore:
    """Build the store of a model, or continue a build that was stopped, or open it if
    it is there.

    Args:
        model: a Hugging Face directory, or a model in memory.
        out_dir: the store's directory.
        dtype: of the stored weights; the model's own when None.
        progress: called after every record that is written, or compared, where a
            store's files were touched since that was last done; raising in it stops the
            build, which can be continued.

    Raises:
        StoreError: the model has no usable experts, the directory holds another model's
            store, another build is at work there, or the disk is too small.
    """
    chosen = None if dtype is None else torch_dtype(dtype)
    source: ExpertSource = (
        ModuleSource(model, chosen)
        if isinstance(model, torch.nn.Module)
        else CheckpointSource(model, chosen)
    )
    return _build(source, Path(out_dir), progress)


def build_random_store(
    shape: ModelShape,
    out_dir: Path | str,
    seed: int = 0,
    *,
    dtype: str = "bfloat16",
    distinct: int | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
) -> ExpertStore:
    """Build a store with the shape of a model and random weights, for trace-driven
    runs.

    Args:
        shape: the model; every expert has ``3 H F`` weights.
        out_dir: the store's directory.
        seed: of the weights.
        dtype: of the stored weights.
        distinct: bound the disk space: make only so many records and let experts share
            them in turn. Every read still goes to the disk. The index says so.
        progress: as in `build_store`.

    Raises:
        StoreError: as in `build_store`.
    """
    return _build(RandomSource(shape, seed, dtype, distinct), Path(out_dir), progress)


class _Record(NamedTuple):
    """One record to write: whose it is and where it goes."""

    layer: int
    expert: int
    offset: int
    size: int


def _build(
    source: ExpertSource,
    directory: Path,
    progress: Callable[[BuildProgress], None] | None,
) -> ExpertStore:
    """Write what is missing, then the ledger."""
    if (directory / INDEX_NAME).is_file():
        store = ExpertStore(directory)
        same = store.index.model_digest == source.digest
        if not same or store.index.per_layer != tuple(source.layouts):
            store.close()
            expected = source.layouts[0].dtype
            found = store.layout(0).dtype
            what = f"that of {store.index.model} (or another version of it)"
            if same and found != expected:
                what = f"it in {found} instead of {expected}"
            raise StoreError(
                f"{directory}: expected no store or that of {source.name}, found"
                f" {what}; choose another directory"
            )
        return store.trusted(progress)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = (directory / JOURNAL_NAME).open("a+", encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"{directory}: cannot write here: {error.strerror}; choose another"
            " directory"
        ) from None
    with opened as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(
                f"{directory}: another build is at work here; wait for it to end"
            ) from None
        index = _write_records(source, directory, journal, progress)
        part = directory / (INDEX_NAME + ".part")
        part.write_text(index.to_json(), encoding="utf-8")
        (directory / _PART_NAME).replace(directory / DATA_NAME)
        part.replace(directory / INDEX_NAME)
        (directory / JOURNAL_NAME).unlink()
    store = ExpertStore(directory)
    store.seal()
    return store


def _write_records(
    source: ExpertSource,
    directory: Path,
    journal: IO[str],
    progress: Callable[[BuildProgress], None] | None,
) -> StoreIndex:
    """Write every record that the journal does not vouch for."""
    layouts = tuple(dict.fromkeys(source.layouts))
    plan, rows = _plan(source)
    total = plan[-1].offset + plan[-1].size
    part = directory / _PART_NAME
    # Killed between the last two renames.
    if not part.exists() and (directory / DATA_NAME).exists():
        (directory / DATA_NAME).replace(part)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        head = {
            "model_digest": source.digest,
            "layouts": [one.to_json() for one in layouts],
            "data_bytes": total,
        }
        checksums = _resume(descriptor, journal, digest_of(head), plan)
        done = sum(record.size for record in plan[: len(checksums)])
        _check_space(directory, total - done)
        for number in range(len(checksums), len(plan)):
            record = plan[number]
            raw = _encode(source, record)
            _write_all(descriptor, raw, record.offset, part)
            checksums.append(zlib.crc32(raw))
            journal.write(f"{number} {checksums[-1]}\n")
            journal.flush()
            done += record.size
            if progress is not None:
                progress(BuildProgress(number + 1, len(plan), done, total))
        os.ftruncate(descriptor, total)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return StoreIndex(
        model=source.name,
        model_digest=source.digest,
        layouts=layouts,
        layer_layouts=tuple(layouts.index(layout) for layout in source.layouts),
        records=rows,
        offsets=tuple(record.offset for record in plan),
        checksums=tuple(checksums),
        data_bytes=total,
        distinct=source.distinct,
    )


def _plan(source: ExpertSource) -> tuple[list[_Record], tuple[tuple[int, ...], ...]]:
    """Give every expert a record, layer by layer; where records are shared, experts use
    them in turn.
    """
    plan: list[_Record] = []
    rows: list[tuple[int, ...]] = []
    at = flat = 0
    for layer, (layout, count) in enumerate(
        zip(source.layouts, source.experts, strict=True)
    ):
        size = record_stride(layout)
        row: list[int] = []
        for expert in range(count):
            if source.distinct is None or flat < source.distinct:
                plan.append(_Record(layer, expert, at, size))
                at += size
            row.append(flat if source.distinct is None else flat % source.distinct)
            flat += 1
        rows.append(tuple(row))
    return plan, tuple(rows)


def _encode(source: ExpertSource, record: _Record) -> bytearray:
    """Lay one expert out as the bytes of its record, padding zeroed."""
    layout = source.layouts[record.layer]
    raw = bytearray(record.size)
    views = layout.views(torch.frombuffer(raw, dtype=torch.uint8))
    tensors = source.expert(record.layer, record.expert)
    for spec, view, tensor in zip(
        layout.tensors, (v for v in views if v is not None), tensors, strict=True
    ):
        if tuple(tensor.shape) != spec.shape:
            raise StoreError(
                f"{source.name}: layer {record.layer}, expert {record.expert},"
                f" {spec.name}: expected shape {spec.shape}, got {tuple(tensor.shape)}"
            )
        view.copy_(tensor)
    return raw


def _resume(
    descriptor: int, journal: IO[str], plan_digest: str, plan: list[_Record]
) -> list[int]:
    """Return checksums of the leading records that an earlier build of the same plan
    finished; start the journal.

    Each is read back and compared, so a crash that lost written pages costs time, not
    trust.
    """
    journal.seek(0)
    # What follows the last newline was torn off.
    lines = journal.read().split("\n")[:-1]
    checksums: list[int] = []
    if lines and lines[0] == plan_digest:
        for record, line in zip(plan, lines[1:], strict=False):
            number, _, checksum = line.partition(" ")
            if number != str(len(checksums)) or not checksum.isdigit():
                break
            if zlib.crc32(os.pread(descriptor, record.size, record.offset)) != int(
                checksum
            ):
                break
            checksums.append(int(checksum))
    journal.seek(0)
    journal.truncate()
    journal.write(
        "".join(
            f"{line}\n"
            for line in [plan_digest, *(f"{i} {c}" for i, c in enumerate(checksums))]
        )
    )
    journal.flush()
    os.ftruncate(descriptor, sum(record.size for record in plan[: len(checksums)]))
    return checksums


def _write_all(descriptor: int, raw: bytearray, offset: int, path: Path) -> None:
    """Write a record, however many system calls that takes."""
    view = memoryview(raw)
    while view:
        try:
            written = os.pwrite(descriptor, view, offset)
        except OSError as error:
            raise StoreError(
                f"{path}: writing at byte {offset} failed: {error.strerror}; make room"
                " and run the build again to continue"
            ) from None
        view = view[written:]
        offset = offset + written


def _check_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to begin what the disk cannot hold."""
    free = shutil.disk_usage(directory).free
    if needed_bytes > free:
        raise StoreError(
            f"{directory}: expected {needed_bytes / 2**30:.2f} GiB of free disk space,"
            f" found {free / 2**30:.2f} GiB; choose another disk"
        )
