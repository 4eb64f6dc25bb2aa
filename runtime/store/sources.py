"""Sources of a store's experts: a random draw, or a Hugging Face checkpoint, read and
converted one expert at a time.

Checkpoints name their tensors as their authors liked (``experts.7.w1.weight``,
``experts.gate_up_proj``), and the library knows for each model how these become the
parameters of its experts modules. `CheckpointSource` borrows that knowledge, but
applies it to one expert at a time: it builds the model without memory (on the ``meta``
device), asks the library which checkpoint tensors feed which parameter, and runs the
library's own conversion on the tensors of one expert. So nothing here knows a model by
name, and memory holds one expert, not sixty gigabytes. Only a conversion that mixes
experts (none of the common ones does) needs a layer's full parameter at once.

E routed experts, H hidden, F expert intermediate.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import stat
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from moesim.base.errors import RuntimeFault, StoreError
from moesim.base.files import Closing
from moesim.runtime.models.checkpoint import (
    checkpoint_digest,
    checkpoint_dtype,
    skeleton,
    tensor_files,
)
from moesim.runtime.models.expert_layout import layout_of, swiglu_layout, torch_dtype
from moesim.runtime.models.gates import offloadable_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.runtime.models.expert_layout import ExpertLayout
    from moesim.runtime.models.gates import MoeBlock
    from moesim.traces.format.schema import ModelShape


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


# -- direct io -------------------------------------------------------------------------
# Direct file reads: they go to the disk, around the operating system's page cache.
#
# An operating system answers most reads from its page cache, so an expert "on the
# SSD" would quietly come from memory. Direct I/O goes around that cache, at a price:
# file offset, length and memory address must all be multiples of the block size.
# Where a file system refuses it (some network and overlay file systems do), reads go
# through the cache, and each one asks the kernel to drop what it read;
# `DirectFile.direct` and `.reason` say which of the two happened.

BLOCK_BYTES: Final = 4096
"""Alignment that every current disk and file system accepts for direct I/O."""

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
