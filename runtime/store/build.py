"""Builds an expert store, one expert after the other; stoppable at any moment.

A build writes records into a file beside the final one and notes each in a build log.
Killed, it leaves both; the next build of the same model reads the noted records back,
compares them with their checksums, and continues behind the last good one, so the
finished store has the same bytes either way. The index comes last
(`runtime/store/store.py`).

Experts come from a *source*: a random draw, or a Hugging Face checkpoint, read and
converted one expert at a time.

Checkpoints name their tensors as their authors liked (``experts.7.w1.weight``,
``experts.gate_up_proj``), and the library knows for each model how these become the
parameters of its experts modules. `CheckpointSource` borrows that knowledge, but
applies it to one expert at a time: it builds the model without memory (on the ``meta``
device), asks the library which checkpoint tensors feed which parameter, and runs the
library's own conversion on the tensors of one expert. So nothing here knows a model by
name, and memory holds one expert, not sixty gigabytes. Only a conversion that mixes
experts (few do) needs a layer's full parameter at once.

E routed experts, H hidden, F expert intermediate.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import zlib
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from moesim.base.errors import StoreError
from moesim.base.files import open_own, try_lock, write_text
from moesim.runtime.models.checkpoint import (
    checkpoint_digest,
    checkpoint_dtype,
    skeleton,
    tensor_files,
)
from moesim.runtime.models.expert_layout import layout_of, swiglu_layout, torch_dtype
from moesim.runtime.models.gates import offloadable_blocks
from moesim.runtime.store.store import (
    BUILD_LOG_NAME,
    DATA_NAME,
    INDEX_NAME,
    BuildProgress,
    ExpertStore,
    Place,
    StoreIndex,
    digest_of,
    places_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.runtime.models.expert_layout import ExpertLayout
    from moesim.runtime.models.gates import MoeBlock
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
    plan = places_of(source.layouts, source.experts, source.distinct)
    total_bytes = plan[-1].offset_bytes + plan[-1].size_bytes

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
        done_bytes = sum(record.size_bytes for record in plan[: len(checksums)])
        _check_space(directory, total_bytes - done_bytes)

        for number in range(len(checksums), len(plan)):
            record = plan[number]
            raw = _encode(source, record)
            checksum = zlib.crc32(raw)
            # The record first: the log must never name bytes that are not there.
            _write_all(descriptor, raw, record.offset_bytes, part)
            log.write(f"{number} {checksum}\n")
            log.flush()
            checksums.append(checksum)
            done_bytes += record.size_bytes
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
        experts=tuple(source.experts),
        checksums=tuple(checksums),
        distinct=source.distinct,
    )


def _encode(source: ExpertSource, record: Place) -> bytearray:
    """Lay one expert out as the bytes of its record, padding zeroed."""
    layout = source.layouts[record.layer]
    raw = bytearray(record.size_bytes)
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
    descriptor: int, log: IO[str], plan_digest: str, plan: list[Place]
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
    os.ftruncate(
        descriptor, sum(record.size_bytes for record in plan[: len(checksums)])
    )
    return checksums


def _finished(descriptor: int, lines: list[str], plan: list[Place]) -> list[int]:
    """Return checksums of the leading records that are on disk as the log says."""
    checksums: list[int] = []
    # Fewer lines than records: the build was stopped in between.
    for record, line in zip(plan, lines, strict=False):
        number, _, checksum = line.partition(" ")
        if number != str(len(checksums)) or not checksum.isdigit():
            break
        raw = os.pread(descriptor, record.size_bytes, record.offset_bytes)
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


# -- sources ---------------------------------------------------------------------------


class ExpertSource(Protocol):
    """Experts, one after the other.

    `layouts` and `experts` have one entry per MoE layer: the record's layout and the
    number of experts. `distinct` is the number of different records where some experts
    share one, else None.
    """

    name: str
    digest: str
    layouts: tuple[ExpertLayout, ...]
    experts: tuple[int, ...]
    distinct: int | None

    def expert(self, layer: int, expert: int) -> Sequence[torch.Tensor]:
        """Tensors of one expert on the CPU, in the order and shape of the layer's
        layout, in any float dtype.
        """


class RandomSource:
    """Experts of a model's shape with random weights: size and work are real, the
    results mean nothing.

    Every expert is ``3 H F`` weights in `dtype`, whatever bytes per expert the shape
    was quantised to. Weights are uniform with the variance 1 / inputs, so that
    activations keep their size.

    Args:
        shape: the model.
        seed: >= 0; with the same seed every expert is the same, in whatever order they
            are made.
        dtype: of the weights.
        distinct: make only so many different records, used in turn; None for one per
            expert.

    Raises:
        StoreError: `distinct` is out of range.
    """

    def __init__(
        self, shape: ModelShape, seed: int, dtype: str, distinct: int | None = None
    ) -> None:
        total = shape.layers * shape.experts
        if distinct is not None and not 1 <= distinct <= total:
            raise StoreError(
                f"distinct: expected 1 to {total} (layers x experts of {shape.name}),"
                f" got {distinct}"
            )
        width = shape.expert_intermediate
        layout = swiglu_layout(shape.hidden, width, torch_dtype(dtype))
        self.name = f"{shape.name} (random)"
        self.layouts = (layout,) * shape.layers
        self.experts = (shape.experts,) * shape.layers
        self.distinct = distinct
        self._seed = seed

        # All that decides the bytes of the store, so equal digests mean equal stores.
        counts = [shape.layers, shape.experts, shape.hidden, width]
        facts = json.dumps([*counts, seed, dtype, distinct])
        self.digest = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def expert(self, layer: int, expert: int) -> Sequence[torch.Tensor]:
        """Draw one expert."""
        # Seeded per expert, so that a build can continue anywhere.
        draws = np.random.default_rng((self._seed, layer, expert))
        tensors = []
        for spec in self.layouts[layer].tensors:
            # A uniform draw within ±b has the variance b²/3.
            bound = math.sqrt(3 / spec.shape[-1])
            uniform = torch.from_numpy(draws.random(spec.shape, dtype=np.float32))
            tensors.append(uniform.mul_(2 * bound).sub_(bound))
        return tensors


class CheckpointSource:
    """Experts of a Hugging Face directory, read tensor by tensor.

    Args:
        model_dir: a directory with config.json and safetensors, in one file or sharded.
        dtype: of the store; the checkpoint's own when None.

    Raises:
        StoreError: the directory is no Mixture-of-Experts checkpoint that can be read
            without its library's help, is quantised, or lacks expert tensors.
    """

    distinct: int | None = None

    def __init__(self, model_dir: Path | str, dtype: torch.dtype | None = None) -> None:
        self.directory = Path(model_dir)
        self._skeleton = skeleton(self.directory)
        self._blocks = offloadable_blocks(self._skeleton)
        self._files = tensor_files(self.directory)
        self._open_files: dict[Path, Any] = {}

        chosen = dtype or checkpoint_dtype(self.directory)
        self.name = self.directory.resolve().name
        self.digest = checkpoint_digest(self.directory)
        self.layouts = tuple(layout_of(block.experts, chosen) for block in self._blocks)
        self.experts = tuple(block.count for block in self._blocks)
        self._recipes = self._plan()

        # Converted parameters of one layer, where they cannot be made per expert.
        self._converted: dict[str, torch.Tensor] = {}
        self._converted_layer = -1

    def expert(self, layer: int, expert: int) -> Sequence[torch.Tensor]:
        """Read and convert one expert."""
        block = self._blocks[layer]
        return [
            self._part(layer, _parameter_name(block, spec.name), expert)[0]
            for spec in self.layouts[layer].tensors
        ]

    def _plan(self) -> dict[str, _Recipe]:
        """Ask the library which checkpoint tensors feed which expert parameter."""
        from transformers.conversion_mapping import (  # noqa: PLC0415 - seconds to import
            get_model_conversion_mapping,
        )
        from transformers.core_model_loading import (  # noqa: PLC0415 - seconds to import
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self._skeleton)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {
            pattern: converter
            for converter in converters
            for pattern in converter.source_patterns
        }

        parameters = self._skeleton.state_dict()
        prefix = self._skeleton.base_model_prefix
        targets = self._expert_parameters()
        recipes: dict[str, _Recipe] = {}
        # In natural order ("2" before "10"), so that tensor e belongs to expert e.
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(
                key, renamings, converters, prefix, parameters
            )
            # A checkpoint may hold the library's own names, which need no renaming.
            if name not in parameters and key in parameters:
                name = key
                pattern = None
            if name in targets:
                recipe = recipes.setdefault(name, _Recipe(by_pattern.get(pattern)))
                recipe.keys.setdefault(pattern or key, []).append(key)

        missing = sorted(targets - recipes.keys())
        if missing:
            raise StoreError(
                f"{self.directory}: {missing[0]}: no tensor in the checkpoint feeds it;"
                " is it complete?"
            )
        return recipes

    def _expert_parameters(self) -> set[str]:
        """Name every parameter of every experts module."""
        return {
            _parameter_name(block, spec.name)
            for block, layout in zip(self._blocks, self.layouts, strict=True)
            for spec in layout.tensors
        }

    def _part(self, layer: int, target: str, expert: int) -> torch.Tensor:
        """Make one expert's part [1, …] of a parameter."""
        recipe = self._recipes[target]
        if recipe.converter is None:
            (key,) = next(iter(recipe.keys.values()))
            part = self._tensor(key, slice(expert, expert + 1))
        elif recipe.is_per_expert(self.experts[layer]):
            keys = {pattern: [keys[expert]] for pattern, keys in recipe.keys.items()}
            part = self._convert(target, keys)
        else:
            part = self._full_parameter(layer, target)[expert : expert + 1]

        # A conversion that we misread would else fill the store with nonsense.
        expected = (1, *self._skeleton.get_parameter(target).shape[1:])
        if tuple(part.shape) != expected:
            raise StoreError(
                f"{self.directory}: {target}: expected shape {expected} per expert, got"
                f" {tuple(part.shape)}"
            )
        return part

    def _full_parameter(self, layer: int, target: str) -> torch.Tensor:
        """Convert a parameter of all experts [E, …]; those of one layer are kept."""
        if self._converted_layer != layer:
            self._converted.clear()
            self._converted_layer = layer
        if target not in self._converted:
            keys = self._recipes[target].keys
            self._converted[target] = self._convert(target, keys)
        return self._converted[target]

    def _convert(self, target: str, keys: dict[str, list[str]]) -> torch.Tensor:
        """Run the library's conversion on some tensors."""
        # A converter collects tensors, so each use needs a fresh one.
        converter = deepcopy(self._recipes[target].converter)
        for pattern, names in keys.items():
            for name in names:
                converter.add_tensor(target, name, pattern, self._tensor(name))

        converted = converter.convert(
            target, model=self._skeleton, config=self._skeleton.config
        )[target]
        return converted[0] if isinstance(converted, list) else converted

    def _tensor(self, key: str, part: slice | None = None) -> torch.Tensor:
        """Read a tensor, or a part of its first axis."""
        path = self._files[key]
        try:
            if path not in self._open_files:
                self._open_files[path] = safe_open(path, framework="pt")
            tensor = self._open_files[path].get_slice(key)
            return cast("torch.Tensor", tensor[:] if part is None else tensor[part])
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"{path}: tensor {key}: cannot read: {error}; fetch the checkpoint"
                " again"
            ) from None


@dataclass(slots=True)
class _Recipe:
    """The recipe of one parameter [E, …]: checkpoint tensors by pattern, and the
    conversion (None: as it is).
    """

    converter: Any
    keys: dict[str, list[str]] = field(default_factory=dict)

    def is_per_expert(self, count: int) -> bool:
        """True if expert e needs nothing but the e-th tensor of each pattern.

        True for a stack over experts followed by operations inside each expert.
        """
        stack, *others = self.converter.operations
        # By name: importing the library's classes with this module takes seconds.
        if type(stack).__name__ != "MergeModulelist" or stack.dim != 0:
            return False
        if any(
            type(operation).__name__ != "Concatenate" or operation.dim < 1
            for operation in others
        ):
            return False
        return all(len(keys) == count for keys in self.keys.values())


def _parameter_name(block: MoeBlock, tensor: str) -> str:
    return f"{block.name}.experts.{tensor}"
