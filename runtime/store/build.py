"""Builds an expert store, one expert after the other; stoppable at any moment.

A build writes records into a file beside the final one and notes each in a build log.
Killed, it leaves both; the next build of the same model reads the noted records back,
compares them with their checksums, and continues behind the last good one, so the
finished store has the same bytes either way. The index comes last
(`runtime/store/store.py`).
"""

from __future__ import annotations

import os
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import torch

from moesim.base.errors import StoreError
from moesim.base.files import open_own, try_lock, write_text
from moesim.runtime.models.expert_layout import torch_dtype
from moesim.runtime.store.sources import (
    CheckpointSource,
    RandomSource,
)
from moesim.runtime.store.store import (
    BUILD_LOG_NAME,
    DATA_NAME,
    INDEX_NAME,
    BuildProgress,
    ExpertStore,
    StoreIndex,
    digest_of,
    record_stride,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runtime.store.sources import ExpertSource
    from moesim.traces.format.schema import ModelShape

_PART_NAME: Final = DATA_NAME + ".part"


def build_store(
    model_dir: Path | str,
    out_dir: Path | str,
    *,
    dtype: str | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
) -> ExpertStore:
    """Build the store of a model, or continue a build that was stopped, or open it if
    it is there.

    Args:
        model_dir: a Hugging Face directory.
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
    return _build(CheckpointSource(model_dir, chosen), Path(out_dir), progress)


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
    """One record to write: the expert it holds, and where it goes."""

    layer: int
    expert: int
    offset: int
    size: int


def _build(
    source: ExpertSource,
    directory: Path,
    progress: Callable[[BuildProgress], None] | None,
) -> ExpertStore:
    """Write what is missing, then the index."""
    if (directory / INDEX_NAME).is_file():
        return _open_existing(source, directory, progress)

    with _open_log(directory) as log:
        if try_lock(log.fileno()) is False:
            raise StoreError(
                f"{directory}: another build is at work here; wait for it to end"
            )
        # It may have ended between our look for an index and the lock.
        if (directory / INDEX_NAME).is_file():
            (directory / BUILD_LOG_NAME).unlink(missing_ok=True)
            return _open_existing(source, directory, progress)
        index = _write_records(source, directory, log, progress)

        # The index comes last: with it, there is a store. A kill between the two leaves
        # data that the next build takes up again.
        (directory / _PART_NAME).replace(directory / DATA_NAME)
        write_text(directory / INDEX_NAME, index.to_json())
        (directory / BUILD_LOG_NAME).unlink(missing_ok=True)

    store = ExpertStore(directory)
    store.seal()
    return store


def _open_existing(
    source: ExpertSource,
    directory: Path,
    progress: Callable[[BuildProgress], None] | None,
) -> ExpertStore:
    """Open a store that is there, if it is that of `source`."""
    store = ExpertStore(directory)
    same_model = store.index.model_digest == source.digest
    if same_model and store.index.per_layer == tuple(source.layouts):
        return store.trusted(progress)

    store.close()
    content = f"that of {store.index.model} (or another version of it)"
    expected = source.layouts[0].dtype
    stored = store.layout(0).dtype
    if same_model and stored != expected:
        content = f"it in {stored} instead of {expected}"
    raise StoreError(
        f"{directory}: expected no store or that of {source.name}, found {content};"
        " choose another directory"
    )


def _open_log(directory: Path) -> IO[str]:
    """Make the directory and open its build log, keeping what is in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND
        descriptor = open_own(directory / BUILD_LOG_NAME, flags)
        return os.fdopen(descriptor, "a+", encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"{directory}: cannot write here: {error.strerror}; choose another"
            " directory"
        ) from None


def _write_records(
    source: ExpertSource,
    directory: Path,
    log: IO[str],
    progress: Callable[[BuildProgress], None] | None,
) -> StoreIndex:
    """Write every record that the build log does not have."""
    # In order of appearance, so that equal models have equal indexes.
    layouts = tuple(dict.fromkeys(source.layouts))
    plan, rows = _plan(source)
    total_bytes = plan[-1].offset + plan[-1].size

    part = directory / _PART_NAME
    # Killed between the last two renames, a build left its data under the final name.
    if not part.exists() and (directory / DATA_NAME).exists():
        (directory / DATA_NAME).replace(part)

    descriptor = open_own(part, os.O_RDWR)
    try:
        plan_digest = digest_of(
            {
                "model_digest": source.digest,
                "layouts": [asdict(layout) for layout in layouts],
                "data_bytes": total_bytes,
            }
        )
        checksums = _resume(descriptor, log, plan_digest, plan)
        done_bytes = sum(record.size for record in plan[: len(checksums)])
        _check_space(directory, total_bytes - done_bytes)

        for number in range(len(checksums), len(plan)):
            record = plan[number]
            raw = _encode(source, record)
            checksum = zlib.crc32(raw)
            # The record first: the log must never name bytes that are not there.
            _write_all(descriptor, raw, record.offset, part)
            log.write(f"{number} {checksum}\n")
            log.flush()
            checksums.append(checksum)
            done_bytes += record.size
            if progress is not None:
                progress(BuildProgress(number + 1, len(plan), done_bytes, total_bytes))

        # Before the renames: an index must never vouch for bytes still in memory.
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
        data_bytes=total_bytes,
        distinct=source.distinct,
    )


def _plan(source: ExpertSource) -> tuple[list[_Record], tuple[tuple[int, ...], ...]]:
    """Give every expert a record, layer by layer; where records are shared, experts use
    them in turn.
    """
    plan: list[_Record] = []
    rows: list[tuple[int, ...]] = []
    offset = 0
    number = 0
    for layer, (layout, count) in enumerate(
        zip(source.layouts, source.experts, strict=True)
    ):
        size = record_stride(layout)
        row: list[int] = []
        for expert in range(count):
            if source.distinct is None or number < source.distinct:
                plan.append(_Record(layer, expert, offset, size))
                offset += size
            # Sharing in turn spreads the reads of a layer over the disk.
            shared = number if source.distinct is None else number % source.distinct
            row.append(shared)
            number += 1
        rows.append(tuple(row))
    return plan, tuple(rows)


def _encode(source: ExpertSource, record: _Record) -> bytearray:
    """Lay one expert out as the bytes of its record, padding zeroed."""
    layout = source.layouts[record.layer]
    raw = bytearray(record.size)
    weights = layout.views(torch.frombuffer(raw, dtype=torch.uint8))
    # An expert without biases leaves those fields empty.
    views = [view for view in weights if view is not None]
    tensors = source.expert(record.layer, record.expert)

    for spec, view, tensor in zip(layout.tensors, views, tensors, strict=True):
        if tuple(tensor.shape) != spec.shape:
            raise StoreError(
                f"{source.name}: layer {record.layer}, expert {record.expert},"
                f" {spec.name}: expected shape {spec.shape}, got {tuple(tensor.shape)}"
            )
        view.copy_(tensor)
    return raw


def _resume(
    descriptor: int, log: IO[str], plan_digest: str, plan: list[_Record]
) -> list[int]:
    """Return checksums of the leading records that an earlier build of the same plan
    finished; start the build log.

    Each is read back and compared, so a crash that lost written pages costs time, not
    trust.
    """
    log.seek(0)
    # What follows the last newline was torn off.
    lines = log.read().split("\n")[:-1]
    checksums: list[int] = []
    if lines and lines[0] == plan_digest:
        checksums = _finished(descriptor, lines[1:], plan)

    log.seek(0)
    log.truncate()
    entries = [f"{number} {checksum}" for number, checksum in enumerate(checksums)]
    log.write("".join(f"{line}\n" for line in [plan_digest, *entries]))
    log.flush()
    os.ftruncate(descriptor, sum(record.size for record in plan[: len(checksums)]))
    return checksums


def _finished(descriptor: int, lines: list[str], plan: list[_Record]) -> list[int]:
    """Return checksums of the leading records that are on disk as the log says."""
    checksums: list[int] = []
    # Fewer lines than records: the build was stopped in between.
    for record, line in zip(plan, lines, strict=False):
        number, _, checksum = line.partition(" ")
        if number != str(len(checksums)) or not checksum.isdigit():
            break
        raw = os.pread(descriptor, record.size, record.offset)
        if zlib.crc32(raw) != int(checksum):
            break
        checksums.append(int(checksum))
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
        offset += written


def _check_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to begin what the disk cannot hold."""
    free_bytes = shutil.disk_usage(directory).free
    if needed_bytes > free_bytes:
        raise StoreError(
            f"{directory}: expected {needed_bytes / 2**30:.2f} GiB of free disk space,"
            f" found {free_bytes / 2**30:.2f} GiB; choose another disk"
        )
