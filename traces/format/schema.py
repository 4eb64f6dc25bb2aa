"""The format of a routing trace: its columns, its header, and the shape of the model it
came from.

One row is one token at one MoE layer. The header travels in the Parquet metadata, so a
trace says by itself which model, which prompts and which tool it came from.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from moesim.base.errors import TraceError
from moesim.base.inputs import parse_json
from moesim.base.text import visible

if TYPE_CHECKING:
    from collections.abc import Sequence


SCHEMA_VERSION = 1
METADATA_KEY = b"moesim"
SPLITS = ("calibration", "evaluation")
"""A policy is fitted on the first and judged on the second."""


# Layers and experts are numbered in 16 bits, with and without a sign.
MOST_LAYERS = (1 << 15) - 1
MOST_EXPERTS = 1 << 16
# No weight and no expert of a real model is near it; it keeps sums far from overflow.
MOST_OF_A_SIZE = 1 << 48

_LIMITS = {
    "layers": (1, MOST_LAYERS),
    "experts": (1, MOST_EXPERTS),
    **dict.fromkeys(("top_k", "hidden", "expert_intermediate"), (1, MOST_OF_A_SIZE)),
    **dict.fromkeys(
        (
            "other_bytes",
            "shared_experts",
            "shared_intermediate",
            "dense_intermediate",
            "heads",
            "kv_heads",
            "head_dim",
            "vocab",
            "kv_values",
            "window_tokens",
            "windowed_layers",
        ),
        (0, MOST_OF_A_SIZE),
    ),
}
"""Least and most of each size of a model."""

_NO_OTHER_FIELDS = {"extra": "forbid"}

_SELDOM = ("bytes_by_expert", "kv_values", "window_tokens", "windowed_layers")


class Phase(enum.IntEnum):
    """Which kind of forward pass a step is."""

    PREFILL = 0
    DECODE = 1

    @property
    def label(self) -> str:
        """The name used in files: ``prefill`` or ``decode``."""
        return self.name.lower()


# In the order in which files have them.
REQUIRED_COLUMNS = ("seq", "pos", "phase", "layer", "experts")
# The digit is the depth: how many layers on the predicted one lies.
PREDICTION_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw", "pred1_res")
OPTIONAL_COLUMNS = ("weights", "scores", *PREDICTION_COLUMNS, "token")


def prediction_distance(column: str) -> int:
    """Return how many layers ahead a column of `PREDICTION_COLUMNS` predicts."""
    return int(column[len("pred")])


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of one MoE model that decide bytes and FLOPs.

    L MoE layers, E routed experts per layer, K chosen per token, H hidden, F expert
    intermediate. `expert_bytes` has one entry per MoE layer, because quantised layers
    of one model differ. Where experts of one layer differ as well, `bytes_by_expert`
    has their sizes, [L][E], and `expert_bytes` the mean of each layer, rounded; it is
    empty elsewhere. `assumed` names the fields that were not known and hold stated
    defaults.

    A layer keeps `2 x kv_heads x head_dim` values of each token, or `kv_values` where
    that is stated: latent attention compresses keys and values. Of all layers
    `windowed_layers` keep no more than `window_tokens`, none where they are recurrent.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_intermediate: int
    expert_bytes: tuple[int, ...]
    other_bytes: int
    dense_layers: tuple[int, ...] = ()
    shared_experts: int = 0
    shared_intermediate: int = 0
    dense_intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    dtype: str = "bf16"
    scoring: str = "softmax"
    norm_topk: bool = True
    assumed: tuple[str, ...] = ()
    bytes_by_expert: tuple[tuple[int, ...], ...] = ()
    kv_values: int = 0
    window_tokens: int = 0
    windowed_layers: int = 0

    __pydantic_config__ = _NO_OTHER_FIELDS

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have."""
        # A header is read from a file, so this is no matter of our own bugs.
        for name, (least, most) in _LIMITS.items():
            if not least <= getattr(self, name) <= most:
                raise TraceError(
                    f"model shape {self.name!r}: {name}: expected {least}..{most}, got"
                    f" {getattr(self, name)}"
                )
        # Names of files from elsewhere must do nothing to a terminal or a page.
        object.__setattr__(self, "name", visible(self.name))
        if not self.name.strip():
            raise TraceError("model shape: name: expected a name, got none")
        if self.kv_heads > self.heads:
            raise TraceError(
                f"model shape {self.name!r}: kv_heads {self.kv_heads} exceeds heads"
                f" {self.heads}"
            )
        self._check_layers()
        if self.top_k > self.experts:
            raise TraceError(
                f"model shape {self.name!r}: top_k {self.top_k} exceeds experts"
                f" {self.experts}"
            )
        if self.bytes_by_expert:
            self._check_bytes_by_expert()
        if len(self.expert_bytes) != self.layers:
            raise TraceError(
                f"model shape {self.name!r}: expert_bytes: expected {self.layers}"
                f" entries (one per MoE layer), got {len(self.expert_bytes)}"
            )
        if min(self.expert_bytes) < 1 or max(self.expert_bytes) > MOST_OF_A_SIZE:
            raise TraceError(
                f"model shape {self.name!r}: expert_bytes: expected"
                f" 1..{MOST_OF_A_SIZE} bytes in every layer"
            )

    def _check_layers(self) -> None:
        # Dense layers and MoE layers together are all layers of the model.
        last = self.all_layers - 1
        inside = all(0 <= layer <= last for layer in self.dense_layers)
        if not inside or len(set(self.dense_layers)) < len(self.dense_layers):
            raise TraceError(
                f"model shape {self.name!r}: dense_layers: expected different layers"
                f" 0..{last}, got {self.dense_layers}"
            )
        if self.windowed_layers > self.all_layers:
            raise TraceError(
                f"model shape {self.name!r}: windowed_layers: expected at most"
                f" {self.all_layers}, got {self.windowed_layers}"
            )

    def _check_bytes_by_expert(self) -> None:
        sizes = self.bytes_by_expert
        if [len(layer) for layer in sizes] != [self.experts] * self.layers:
            raise TraceError(
                f"model shape {self.name!r}: bytes_by_expert: expected {self.layers}"
                f" lists (one per MoE layer) of {self.experts} sizes"
            )
        for layer, of_layer in enumerate(sizes):
            if min(of_layer) < 1 or max(of_layer) > MOST_OF_A_SIZE:
                raise TraceError(
                    f"model shape {self.name!r}: bytes_by_expert: layer {layer}:"
                    f" expected 1..{MOST_OF_A_SIZE} bytes for every expert"
                )
        means = tuple(map(_mean_bytes, sizes))
        if self.expert_bytes != means:
            raise TraceError(
                f"model shape {self.name!r}: expert_bytes: expected the means of"
                f" bytes_by_expert, {means}, got {self.expert_bytes}"
            )

    def with_bytes_by_expert(self, sizes: Sequence[Sequence[int]]) -> ModelShape:
        """The same model with experts of these sizes, [L][E].

        Raises:
            TraceError: too few or too many, or a size that no expert can have.
        """
        by_expert = tuple(tuple(layer) for layer in sizes)
        means = tuple(_mean_bytes(layer) for layer in by_expert)
        if all(len(set(layer)) == 1 for layer in by_expert):
            by_expert = ()
        return replace(self, expert_bytes=means, bytes_by_expert=by_expert)

    def bytes_of(self, layer: int, expert: int | None = None) -> int:
        """Bytes of an expert; of its layer's mean, if none is named."""
        if expert is None or not self.bytes_by_expert:
            return self.expert_bytes[layer]
        return self.bytes_by_expert[layer][expert]

    def sizes_by_expert(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of every expert, [L][E]."""
        if self.bytes_by_expert:
            return self.bytes_by_expert
        return tuple((size,) * self.experts for size in self.expert_bytes)

    @property
    def attention(self) -> tuple[int, int, int]:
        """Heads, heads of keys, and size of a head, as attention is computed: latents
        like one head of keys, and like one of the hidden size where nothing is known.
        """
        if self.heads and self.head_dim:
            return self.heads, self.kv_heads or self.heads, self.head_dim
        head_dim = self.kv_values // 2 or self.hidden
        return max(1, self.hidden // head_dim), 1, head_dim

    @property
    def all_layers(self) -> int:
        """Layers with experts and without."""
        return self.layers + len(self.dense_layers)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The model's own number of each layer with experts."""
        dense = set(self.dense_layers)
        return tuple(layer for layer in range(self.all_layers) if layer not in dense)

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """The different sizes of its experts in bytes, ascending."""
        return tuple(sorted(set(chain(*(self.bytes_by_expert or [self.expert_bytes])))))

    @property
    def max_expert_bytes(self) -> int:
        """Bytes of the largest expert: what a staging slot must hold."""
        return self.expert_sizes[-1]

    @property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts together."""
        return sum(map(sum, self.sizes_by_expert()))

    @property
    def expert_flops_per_token(self) -> int:
        """Multiply-adds count twice: gate, up and down projections, ``6 H F``."""
        # Three matrices of H x F, two operations per weight.
        return 6 * self.hidden * self.expert_intermediate

    def fields(self) -> dict[str, Any]:
        """All fields by name, for files."""
        fields = asdict(self)
        # Few models need them; without, versions that do not know them read the file.
        for name in _SELDOM:
            if not fields[name]:
                del fields[name]
        return fields


def _mean_bytes(sizes: Sequence[int]) -> int:
    """The mean of a layer's experts, rounded half up."""
    return (2 * sum(sizes) + len(sizes)) // (2 * len(sizes)) if sizes else 0


@dataclass
class _Version:
    """Fields of every version of the header."""

    schema_version: int


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The JSON object under Parquet key ``moesim``.

    `provenance` holds model, revision, prompts digest, tool and date; `calibration`
    identifies the artefacts (residual vectors) that optional columns depend on; `split`
    is ``calibration`` or ``evaluation``.
    """

    shape: ModelShape
    provenance: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    split: str = "evaluation"
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        """Refuse a part of the data that nobody knows."""
        if self.split not in SPLITS:
            raise TraceError(
                f"split: expected {' or '.join(SPLITS)}, got {self.split!r}"
            )

    # A misspelt field must not count as one that is missing.
    __pydantic_config__ = _NO_OTHER_FIELDS

    def to_json(self) -> str:
        """Serialise with sorted keys, so equal headers are equal bytes."""
        fields = asdict(self) | {"shape": self.shape.fields()}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> TraceHeader:
        """Parse a header.

        Raises:
            TraceError: not JSON, nested too deep, another schema version, or fields
                missing or of a wrong type.
        """
        place = f"{where}: header 'moesim'"
        way_out = "is this a moesim trace? `moesim trace import` makes one"

        # Alone and first: another version may have other fields.
        version = parse_json(
            text, _Version, where=place, error=TraceError, way_out=way_out
        )
        if version.schema_version != SCHEMA_VERSION:
            raise TraceError(
                f"{where}: trace schema version: expected {SCHEMA_VERSION}, found"
                f" {version.schema_version}; record it again"
            )
        return parse_json(text, cls, where=place, error=TraceError, way_out=way_out)
