"""Reads the header of a GGUF file: metadata and table of tensors, no weights.

The package `gguf` knows the constants (value types, weight formats and their block
sizes). Its own reader maps every tensor's data, which fails on a header that was
downloaded alone, and takes seconds on a vocabulary; hence the small parser here.

Layout (GGUF specification in the ggml repository): magic, version, tensor count, number
of metadata pairs; the pairs; one record per tensor (name, dimensions, type, offset).
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
    LlamaFileType,
)

from moesim.advice.model.contents import LayerContents, ModelContents, context_sizes
from moesim.base.errors import AdviceError
from moesim.base.inputs import open_input
from moesim.traces.layer_kinds import LayerKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# A header beyond these counts is garbage, not a model; refuse it before looping.
MOST_PAIRS = 100_000
MOST_TENSORS = 1_000_000
MOST_DIMENSIONS = 8
LONGEST_TEXT = 1 << 28

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


# What llama.cpp's --cpu-moe and --n-cpu-moe move, biases included.
ROUTED = re.compile(r"ffn_(?:up|down|gate|gate_up)_(?:ch)?exps\.")
# Files from before 2024-04 hold one tensor per expert: blk.0.ffn_gate.7.weight.
ROUTED_OLD = re.compile(r"ffn_(?:up|down|gate)\.\d+\.")
LAYER = re.compile(r"^blk\.(\d+)\.")
# Looked up by token or n-gram for some layers: Gemma's and Qwen's "PLE".
TABLE = "per_layer_token_embd"
# Heads that predict several tokens ahead are stored but not run.
AHEAD = "nextn"


class Tensor(NamedTuple):
    """One stored tensor.

    Attributes:
        name: as in the file.
        format: weight format, lower case.
        weights: number of elements.
        stored_bytes: bytes of its data.
    """

    name: str
    format: str
    weights: int
    stored_bytes: int


@dataclass(slots=True)
class LayerTensors:
    """Sums over the tensors of one layer."""

    dense_bytes: int = 0
    dense_weights: int = 0
    dense_formats: Counter[str] = field(default_factory=Counter)
    expert_bytes: int = 0
    expert_weights: int = 0
    expert_formats: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class SortedTensors:
    """All tensors of a model, by the part that they belong to."""

    layers: dict[int, LayerTensors] = field(default_factory=dict)
    embed: LayerTensors = field(default_factory=LayerTensors)
    head: LayerTensors = field(default_factory=LayerTensors)
    unused_bytes: int = 0
    table_bytes: int = 0
    table_weights: int = 0


def is_routed(name: str) -> bool:
    """Tell whether a tensor belongs to a routed expert."""
    return any(pattern.search(name) for pattern in (ROUTED, ROUTED_OLD))


def sort_tensors(tensors: Iterable[Tensor], run_layers: int) -> SortedTensors:
    """Add tensors up by layer and part.

    Args:
        tensors: of all files of the model.
        run_layers: layers with this index or above hold multi-token heads.
    """
    parts = SortedTensors()

    for tensor in tensors:
        if tensor.name.startswith(TABLE):
            parts.table_bytes += tensor.stored_bytes
            parts.table_weights += tensor.weights
        elif match := LAYER.match(tensor.name):
            at = int(match.group(1))
            if at < run_layers and AHEAD not in tensor.name:
                _add(parts.layers.setdefault(at, LayerTensors()), tensor)
            else:
                parts.unused_bytes += tensor.stored_bytes
        elif tensor.name.startswith("token_embd."):
            _add(parts.embed, tensor)
        elif tensor.name.startswith("output."):
            _add(parts.head, tensor)
        else:
            # Rope factors, the last norm: small.
            parts.unused_bytes += tensor.stored_bytes
    return parts


def _add(sums: LayerTensors, tensor: Tensor) -> None:
    if is_routed(tensor.name):
        sums.expert_bytes += tensor.stored_bytes
        sums.expert_weights += tensor.weights
        sums.expert_formats[tensor.format] += tensor.stored_bytes
    else:
        sums.dense_bytes += tensor.stored_bytes
        sums.dense_weights += tensor.weights
        sums.dense_formats[tensor.format] += tensor.stored_bytes


class _CutOffError(Exception):
    """The file ends inside its header."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of one model, all parts of a split file together."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[Tensor, ...]


def read_gguf(path: Path) -> GgufHeader:
    """Read the headers of a GGUF file, or of all parts of a split one.

    Args:
        path: the file; any part of a split file.

    Raises:
        AdviceError: not GGUF, an unknown version, a header cut off or damaged, a part
            missing.
        OSError: the file cannot be opened.
    """
    parts = _parts_of(path)
    metadata, tensors = _read_part(parts[0])
    stated = int(metadata.get("split.count", 1) or 1)

    if stated > 1 and stated != len(parts):
        raise AdviceError(
            f"{path}: its header says {stated} parts, found {len(parts)} by name;"
            " split files are named NAME-00001-of-0000N.gguf and lie side by side"
        )
    for part in parts[1:]:
        _, more = _read_part(part)
        tensors += more
    return GgufHeader(path, metadata, tuple(tensors))


def file_type_label(metadata: Mapping[str, Any]) -> str:
    """Return the label of the whole file, such as ``Q4_K_M``; empty if it has none."""
    number = metadata.get("general.file_type")
    # Files of converters may lack it, or hold a text.
    if not isinstance(number, int):
        return ""
    try:
        return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return ""


def _parts_of(path: Path) -> list[Path]:
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]

    count = int(match["count"])
    names = [
        f"{match['stem']}-{number:05}-of-{count:05}.gguf"
        for number in range(1, count + 1)
    ]
    parts = [path.with_name(name) for name in names]
    # One missing part would silently make a smaller model.
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise AdviceError(
            f"{path}: {len(missing)} of {count} parts are missing, the first is"
            f" {missing[0]}; put all parts into one folder"
        )
    return parts


def _read_part(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    file_bytes = path.stat().st_size

    with open_input(path, buffering=1 << 20) as file:
        try:
            return _Parser(file, path, file_bytes).parse()
        except _CutOffError:
            raise AdviceError(
                f"{path}: the GGUF header is cut off after {file_bytes:,} bytes;"
                " download the file again (its first 64 MiB are enough here)"
            ) from None


class _Parser:
    """Walks through one header; every read checks that the file still goes on."""

    def __init__(self, file: BinaryIO, path: Path, file_bytes: int) -> None:
        self.file = file
        self.path = path
        self.file_bytes = file_bytes

    def parse(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return metadata and tensors."""
        magic = self.file.read(4)
        if magic != MAGIC:
            raise AdviceError(
                f"{self.path}: not a GGUF file: expected it to begin with b'GGUF',"
                f" found {magic!r}"
            )
        version = self._number("I")
        if version not in VERSIONS:
            raise AdviceError(
                f"{self.path}: GGUF version {version}: expected 2 or 3; files of the"
                " opposite byte order cannot be read either"
            )
        tensor_count = self._counted(MOST_TENSORS, "tensors")
        pair_count = self._counted(MOST_PAIRS, "metadata pairs")

        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._text()
            metadata[key] = self._value(self._value_type())

        records = [self._record() for _ in range(tensor_count)]
        return metadata, self._sized(records, metadata)

    def _sized(
        self, records: list[tuple[str, int, int, int]], metadata: Mapping[str, Any]
    ) -> list[Tensor]:
        """Give every tensor its bytes: by its format, or by the next one's offset.

        The distance to the next tensor also works for formats that are younger than
        the package (those of forks, for example).
        """
        alignment = int(metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
        start = -(-self.file.tell() // alignment) * alignment
        by_place = sorted(record[3] for record in records)
        following = dict(pairwise(by_place))

        tensors = []
        for name, weights, type_number, offset in records:
            try:
                kind = GGMLQuantizationType(type_number)
                block, block_bytes = GGML_QUANT_SIZES[kind]
                label = kind.name.lower()
                stored = -(-weights // block) * block_bytes
            except (ValueError, KeyError):
                label = f"type{type_number}"
                # The last tensor ends where the file does.
                end = following.get(offset, self.file_bytes - start)
                stored = max(0, end - offset)
            tensors.append(Tensor(name, label, weights, stored))
        return tensors

    def _record(self) -> tuple[str, int, int, int]:
        """Return name, number of weights, type number and offset of one tensor."""
        name = self._text()
        dimensions = self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} with {dimensions} dimensions")

        sizes = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
        type_number = self._number("I")
        offset = self._number("Q")
        return name, math.prod(sizes), type_number, offset

    def _value_type(self) -> GGUFValueType:
        number = self._number("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._damaged(f"metadata of type {number}") from None

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._number(_SCALARS[kind])

        inner = self._value_type()
        length = self._counted(LONGEST_TEXT, "array entries")
        if inner in _SCALARS:
            letter = _SCALARS[inner]
            size = struct.calcsize(letter) * length
            return struct.unpack(f"<{length}{letter}", self._take(size))

        if inner != GGUFValueType.STRING:
            raise self._damaged("an array of arrays")
        # Vocabularies: a few hundred thousand texts that nobody asks for.
        for _ in range(length):
            self._take(self._counted(LONGEST_TEXT, "characters"))
        return ()

    def _text(self) -> str:
        length = self._counted(LONGEST_TEXT, "characters")
        return self._take(length).decode("utf-8", errors="replace")

    def _counted(self, most: int, damage: str) -> int:
        count = self._number("Q")
        if count > most:
            raise self._damaged(f"{count:,} {damage}")
        return count

    def _number(self, letter: str) -> Any:
        size = struct.calcsize(letter)
        return struct.unpack(f"<{letter}", self._take(size))[0]

    def _take(self, size: int) -> bytes:
        # Also keeps a damaged length from asking for gigabytes of memory.
        if self.file.tell() + size > self.file_bytes:
            raise _CutOffError
        return self.file.read(size)

    def _damaged(self, damage: str) -> AdviceError:
        place = self.file.tell()
        return AdviceError(
            f"{self.path}: damaged GGUF header: {damage} before byte {place:,};"
            " download the file again"
        )


def gguf_contents(path: Path) -> ModelContents:
    """Read what a GGUF file holds.

    Raises:
        AdviceError: a broken header, missing metadata, or a model without experts.
    """
    header = read_gguf(path)
    keys = _Keys(path, header.metadata)

    stored_layers = keys.whole("block_count")
    run_layers = stored_layers - keys.whole("nextn_predict_layers", 0)
    parts = sort_tensors(header.tensors, run_layers)

    experts = keys.whole("expert_count", 0)
    routed_bytes = sum(layer.expert_bytes for layer in parts.layers.values())
    if not experts or not routed_bytes:
        raise AdviceError(
            f"{path}: {keys.architecture}: no routed experts in this file; moesim"
            " advises on Mixture-of-Experts models only"
        )
    # A part of a split file under another name looks like this.
    missing = [at for at in range(run_layers) if at not in parts.layers]
    if missing:
        raise AdviceError(
            f"{path}: its header says {run_layers} layers, found no tensor of layer"
            f" {missing[0]}; is this one part of a split file?"
        )

    hidden = keys.whole("embedding_length")
    top_k = keys.whole("expert_used_count", 1)
    layers = []
    for at in range(run_layers):
        sums = parts.layers[at]
        # Dense layers of a mixed model have no experts.
        routed = bool(sums.expert_bytes)
        layers.append(
            LayerContents(
                dense_bytes=sums.dense_bytes,
                dense_weights=sums.dense_weights,
                dense_formats=dict(sums.dense_formats),
                experts=experts if routed else 0,
                top_k=top_k if routed else 0,
                expert_bytes=sums.expert_bytes,
                expert_weights=sums.expert_weights,
                expert_formats=dict(sums.expert_formats),
                **context_sizes(_kind(keys, at).mixer(hidden=hidden)),
            )
        )
    # Tied models store no head of their own.
    tied = not parts.head.dense_bytes
    head = parts.embed if tied else parts.head
    return ModelContents(
        name=path.name,
        architecture=keys.architecture,
        layers=tuple(layers),
        embed_bytes=parts.embed.dense_bytes,
        head_bytes=head.dense_bytes,
        head_weights=head.dense_weights,
        head_format=next(iter(head.dense_formats), "bf16"),
        hidden=hidden,
        source="gguf header",
        quant=file_type_label(header.metadata),
        tied=tied,
        unused_bytes=parts.unused_bytes,
        table_bytes=parts.table_bytes,
        table_weights=parts.table_weights,
    )


class _Keys:
    """Metadata of one architecture: ``block_count`` means ``qwen3moe.block_count``."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture", "?"))

    def value(self, key: str) -> Any:
        """Return the value of one key, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None, layer: int = 0) -> int:
        """Return a whole number; arrays hold one per layer.

        Raises:
            AdviceError: the header lacks it and there is no default.
        """
        value = self.value(key)
        if isinstance(value, tuple):
            value = value[min(layer, len(value) - 1)] if value else None
        if value is None:
            if default is None:
                raise AdviceError(
                    f"{self.path}: the GGUF header lacks {self.architecture}.{key}; is"
                    " this a language model?"
                )
            return default
        return int(value)


def _kind(keys: _Keys, at: int) -> LayerKind:
    """What one layer is, by the keys of its architecture."""
    if _is_recurrent(keys, at):
        return _recurrence(keys)
    heads = keys.whole("attention.head_count", 0, at)
    index = {
        "index": keys.whole("attention.indexer.key_length", 0),
        "index_heads": keys.whole("attention.indexer.head_count", 0),
    }
    # Others compress the keys of their indexer alone.
    if keys.value("attention.output_group_count") is not None:
        sizes = {
            "heads": heads,
            "key": keys.whole("attention.key_length"),
            "q": keys.whole("attention.q_lora_rank", 0),
            "o": keys.whole("attention.output_lora_rank", 0),
            "o_groups": keys.whole("attention.output_group_count", 0),
            "window": keys.whole("attention.sliding_window"),
            "ratio": keys.whole("attention.compress_ratios", 0, at),
        }
        return LayerKind("compressed", {**sizes, **index})

    # Files from before April 2025 lack the absorbed matrices of latent attention, and
    # the engine keeps full keys and values for each head.
    rank = keys.whole("attention.kv_lora_rank", 0)
    if rank and keys.value("attention.key_length_mla") is not None:
        rope = keys.whole("rope.dimension_count", 0)
        key = keys.whole("attention.key_length_mla")
        sizes = {
            "heads": heads,
            "kv": rank,
            "rope": rope,
            "nope": key - rope,
            "value": keys.whole("attention.value_length_mla", key),
        }
        return LayerKind("latent", {**sizes, **index})

    window = _window(keys, at)
    hidden = keys.whole("embedding_length")
    size = hidden // heads if heads else 0
    key = keys.whole("attention.key_length", size, at)
    value = keys.whole("attention.value_length", size, at)
    if window:
        key = keys.whole("attention.key_length_swa", key)
        value = keys.whole("attention.value_length_swa", value)
    kv_heads = keys.whole("attention.head_count_kv", heads, at)
    if rank:
        kv_heads = heads
    sizes = {"heads": heads, "kv_heads": kv_heads, "key": key, "value": value}
    return LayerKind("attention", {**sizes, **index, "window": window})


def _recurrence(keys: _Keys) -> LayerKind:
    """The recurrence or convolution that stands in attention's place: its state is in
    the header, its weights are in the tensors.
    """
    if keys.value("shortconv.l_cache") is not None:
        return LayerKind("conv", {"conv": keys.whole("shortconv.l_cache")})
    kda = keys.whole("kda.head_dim", 0)
    if kda:
        heads = keys.whole("attention.head_count", 0)
        return LayerKind("kda", {"heads": heads, "key": kda})
    if not keys.value("ssm.inner_size"):
        # Layers of some hybrids are experts alone.
        return LayerKind("none")
    inner = keys.whole("ssm.inner_size")
    state = keys.whole("ssm.state_size", 0)
    sizes = {"heads": 1, "key": inner, "groups": 0, "state": state}
    return LayerKind("ssm", sizes)


def _is_recurrent(keys: _Keys, at: int) -> bool:
    listed = keys.value("attention.recurrent_layers")
    if isinstance(listed, tuple) and listed:
        return bool(listed[min(at, len(listed) - 1)])
    # Hybrids (Qwen3-Next and later): every n-th layer has full attention.
    interval = keys.whole("full_attention_interval", 0)
    if not interval and keys.value("ssm.inner_size") and "qwen3" in keys.architecture:
        interval = 4
    if interval:
        return (at + 1) % interval != 0

    # Others state key-value heads by layer; 0 marks a layer without attention.
    stated = keys.value("attention.head_count_kv")
    return (
        isinstance(stated, tuple) and keys.whole("attention.head_count_kv", 0, at) == 0
    )


def _window(keys: _Keys, at: int) -> int:
    """How far back a layer looks; 0 without a limit."""
    window = keys.whole("attention.sliding_window", 0)
    pattern = keys.value("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return window if pattern[min(at, len(pattern) - 1)] else 0
    if isinstance(pattern, int) and pattern > 0:
        # Every n-th layer sees everything.
        return window if (at + 1) % pattern else 0
    if keys.architecture == "gpt-oss":
        # Alternates, beginning with a window.
        return window if at % 2 == 0 else 0
    return 0
