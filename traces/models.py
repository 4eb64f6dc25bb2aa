"""Shapes of models that people name, and shapes put in words.

``qwen3-30b-a3b`` is looked up in ``data/models.yaml``; ``qwen3-30b-a3b/4`` is the same
model with hidden and intermediate sizes divided by four, small enough for a PC without
a GPU; ``layers=1,experts=6,top_k=1,expert_bytes=1MiB`` needs no table at all. Whatever
was not known is filled with a stated default and listed in `ModelShape.assumed`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

from moesim.base.errors import TraceError
from moesim.base.text import did_you_mean
from moesim.base.units import parse_bytes
from moesim.traces.format.schema import ModelShape
from moesim.traces.layer_kinds import LayerKind, LayerShape, Mixer, repeated
from moesim.traces.weight_formats import (
    Recipe,
    bytes_per_weight,
    data_table,
    known_labels,
    more_bits,
    recipe,
    row_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_NEEDED = ("layers", "experts", "top_k")
_WORDS = (
    "name",
    *_NEEDED,
    "expert_bytes",
    "hidden",
    "expert_intermediate",
    "shared_intermediate",
    "vocab",
)
_DEFAULT_HIDDEN = 2048
_DEFAULT_INTERMEDIATE = 1024
# What makers publish weights in unless the table says otherwise.
_PUBLISHED = "bf16"


def known_models() -> tuple[str, ...]:
    """Names in the table, sorted."""
    return tuple(sorted(shapes()))


def model_shape(spec: str, weights: str | None = None) -> ModelShape:
    """Find or build a model's shape.

    Args:
        spec: a known name, optionally ``/N`` to divide hidden and intermediate sizes by
            N, or words ``layers=…,experts=…,top_k=…`` with ``expert_bytes=…`` or
            ``hidden=…,expert_intermediate=…``.
        weights: weight format or label of a file that decides the bytes, in upper or
            lower case. In mixed files such as ``q4_k_m`` bytes differ by layer.
            Default: what the model is published in, bf16 unless the table says so.

    Raises:
        TraceError: an unknown name, word or weight format, or sizes that no model can
            have.
    """
    label = None if weights is None else _label(weights)
    if "=" in spec:
        return _in_words(spec, label or _PUBLISHED)

    name, _, divisor = spec.partition("/")
    entry = shapes().get(name.lower())
    if entry is None:
        raise TraceError(
            f"unknown model {name!r}{did_you_mean(name.lower(), known_models())};"
            " `moesim list models` prints all; or in words:"
            " layers=1,experts=6,top_k=1,expert_bytes=1MiB"
        )

    scale = _scale(spec, divisor, entry) if divisor else 1
    return _from_table(
        spec.lower(), entry, label or entry.get("published", _PUBLISHED), scale
    )


def _label(weights: str) -> str:
    """A weight format as shapes name it.

    Raises:
        TraceError: nobody knows its bytes.
    """
    label = weights.strip().lower()
    # A label may say more than its format, as UD-Q4_K_XL does; one word says it all.
    if recipe(label) is not None and " " not in label:
        return label
    labels = known_labels()
    if label in labels:
        return label
    raise TraceError(
        f"weights {weights!r}: unknown format{did_you_mean(label, labels)}; known:"
        f" {', '.join(labels)}"
    )


def _formats(name: str, weights: str) -> Recipe:
    """Formats of the tensors of a model's file; its label was checked."""
    # OpenAI publishes these experts in MXFP4, and files keep them so.
    if weights == "q4_k_m" and name.startswith("gpt-oss"):
        weights = "mxfp4"
    formats = recipe(weights)
    assert formats is not None, "the label was checked"
    return formats


def _scale(spec: str, divisor: str, entry: dict[str, Any]) -> int:
    """Return what ``/N`` divides hidden and intermediate sizes by."""
    if not divisor.isdecimal() or int(divisor) < 1:
        raise TraceError(
            f"model {spec!r}: expected a whole number behind '/', got {divisor!r}"
        )

    scale = int(divisor)
    for key in ("hidden", "expert_intermediate"):
        if entry[key] % scale:
            raise TraceError(
                f"model {spec!r}: {key} {entry[key]} is not divisible by {scale}"
            )
    return scale


def expert_bytes(
    name: str,
    hidden: int,
    intermediate: int,
    weights: str,
    layer: int,
    layers: int,
    *,
    matrices: int = 3,
) -> int:
    """Bytes of one expert: gate and up rows of `hidden` weights, down rows of
    `intermediate` weights.

    In mixed files the down projection has more bits in some layers, see
    `moesim.traces.weight_formats.more_bits`.

    Args:
        name: gpt-oss models keep their experts in MXFP4 in ``q4_k_m`` files.
        hidden: H.
        intermediate: F.
        weights: format or label, in lower case.
        layer: layer of the whole model, dense ones counted.
        layers: layers of the whole model.
        matrices: 2 where an expert has no gate.

    Source: llama.cpp's rule for ffn_down; it gives the bytes observed in files of
    Qwen3-30B-A3B (3,059,712 and 2,654,208), Gemma-4-26B-A4B (4,336,640 and 3,593,216)
    and gpt-oss-120b (13,219,200).
    """
    formats = _formats(name, weights)
    down = formats.down_more if more_bits(layer, layers) else formats.down

    # Gate and up have F rows of H weights each, down has H rows of F weights.
    gate_and_up = (matrices - 1) * intermediate * row_bytes(formats.up, hidden)
    return gate_and_up + hidden * row_bytes(down, intermediate)


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Return the rows of the table, by name."""
    return {entry["name"]: entry for entry in data_table("models.yaml")["models"]}


# -- models of the table ---------------------------------------------------------------


def _from_table(
    name: str, entry: dict[str, Any], weights: str, scale: int
) -> ModelShape:
    """The shape of a table entry, hidden and intermediate sizes divided by `scale`."""
    layers = entry["moe_layers"]
    experts = entry["experts"]
    hidden = entry["hidden"] // scale
    intermediate = entry["expert_intermediate"] // scale
    shared_intermediate = entry.get("shared_intermediate", 0) // scale
    dense_intermediate = entry.get("dense_intermediate", 0) // scale
    vocab = entry.get("vocab", 0)
    dense = tuple(entry.get("dense_layers", ()))
    total = layers + len(dense)
    moe_layers = [layer for layer in range(total) if layer not in dense]

    sized = {**entry, "hidden": hidden, "expert_intermediate": intermediate}
    for key in ("shared_intermediate", "dense_intermediate", "expert_hidden"):
        if key in entry:
            sized[key] = entry[key] // scale
    parts = layer_shapes(sized)
    # Layers with a window, or with a recurrence in place of attention.
    full = [each.mixer for each in parts if _sees_everything(each.mixer)]
    windowed = total - len(full)
    # Everything but routed experts, and two tables of tokens.
    other_weights = 2 * vocab * hidden + sum(
        each.mixer.weights + each.feed_forward + each.exact for each in parts
    )
    plain = 2 * entry.get("kv_heads", 0) * entry.get("head_dim", 0)
    kept = full[0].kv_values if full else 0

    return ModelShape(
        name=name,
        layers=layers,
        experts=experts,
        top_k=entry["top_k"],
        hidden=hidden,
        expert_intermediate=intermediate,
        expert_bytes=tuple(
            expert_bytes(
                name,
                sized.get("expert_hidden", hidden),
                intermediate,
                weights,
                layer,
                total,
                matrices=entry.get("matrices", 3),
            )
            for layer in moe_layers
        ),
        other_bytes=_other_bytes(other_weights, weights),
        dense_layers=dense,
        shared_experts=entry.get("shared", 0),
        shared_intermediate=shared_intermediate,
        dense_intermediate=dense_intermediate,
        heads=entry.get("heads", 0),
        kv_heads=entry.get("kv_heads", 0),
        head_dim=entry.get("head_dim", 0),
        kv_values=0 if kept == plain else kept,
        window_tokens=entry.get("window", 0) if windowed else 0,
        windowed_layers=windowed,
        vocab=vocab,
        dtype=weights,
        scoring=entry.get("scoring", "softmax"),
        norm_topk=entry.get("norm_topk", True),
        assumed=tuple(sorted(_assumed(entry, weights))),
    )


def _assumed(entry: dict[str, Any], weights: str) -> set[str]:
    """Fields of a table entry's shape that rest on defaults or on rules of thumb."""
    # Biases, small norms and mixed formats of other tensors are not in the table.
    assumed = {"other_bytes"}
    formats = _formats(name=entry["name"], weights=weights)
    # What a label mixes is llama.cpp's rule, and no file's header.
    if len({formats.up, formats.down, formats.down_more}) > 1:
        assumed.add("expert_bytes")

    for key in ("norm_topk", "scoring", "shared", "vocab"):
        if key not in entry:
            assumed.add("shared_experts" if key == "shared" else key)
    return assumed


def _sees_everything(mixer: Mixer) -> bool:
    return bool(mixer.kv_values and not mixer.window_tokens)


def layer_shapes(entry: Mapping[str, Any]) -> tuple[LayerShape, ...]:
    """Layers of a table entry, in order."""
    hidden = int(entry["hidden"])
    experts = int(entry["experts"])
    intermediate = int(entry["expert_intermediate"])
    matrices = int(entry.get("matrices", 3))
    zero_experts = int(entry.get("zero_experts", 0))
    dense_layers = set(entry.get("dense_layers", ()))
    kinds = _kinds(entry, entry["moe_layers"] + len(dense_layers))

    # Where no source says, as wide as the experts of one token together.
    usual = entry["top_k"] * intermediate
    dense = matrices * hidden * int(entry.get("dense_intermediate", usual))
    beside = matrices * hidden * int(entry.get("shared_intermediate", 0))
    width = int(entry.get("expert_hidden", hidden))
    if width != hidden:
        beside += 2 * hidden * width

    shapes = []
    for at, kind in enumerate(kinds):
        mixer = repeated(kind.mixer(hidden=hidden), int(entry.get("attentions", 1)))
        extra = int(entry.get("connection_weights", 0))
        if at in dense_layers:
            # Layers of some hybrids are a mixer alone.
            feed_forward = extra if entry.get("mixer_alone") else extra + dense
            shapes.append(LayerShape(mixer, feed_forward, 2 * hidden))
            continue
        shapes.append(
            LayerShape(
                mixer=mixer,
                feed_forward=beside + extra,
                exact=hidden * (2 + experts + zero_experts),
                experts=experts,
                zero_experts=zero_experts,
                top_k=int(entry["top_k"]),
                expert_hidden=width,
                expert_intermediate=intermediate,
                matrices=matrices,
            )
        )
    return tuple(shapes)


def _kinds(entry: Mapping[str, Any], layers: int) -> list[LayerKind]:
    """The kind of each layer: by letter of ``pattern``, or ``full`` and ``other``."""
    if "pattern" in entry:
        rows = {name: _row(row) for name, row in entry["kinds"].items()}
        return [rows[letter] for letter in entry["pattern"]]

    full = _full_attention(entry)
    other = full
    if "other" in entry:
        other = _row(entry["other"])
    elif "window" in entry:
        heads = entry.get("window_heads", entry["heads"])
        sizes = {"window": entry["window"], "heads": heads}
        other = LayerKind(full.kind, {**full.sizes, **sizes})
    if "global_kv_heads" in entry:
        # Layers without a window have fewer and wider heads.
        wide = {"kv_heads": entry["global_kv_heads"], "key": entry["global_head_dim"]}
        wide["same"] = int(entry.get("same_kv", False))
        full = LayerKind(full.kind, {**full.sizes, **wide})

    every = entry.get("full_every") or entry.get("window_every") or 1
    numbers = entry.get("full_layers", range(every - 1, layers, every))
    return [full if at in numbers else other for at in range(layers)]


def _row(row: Mapping[str, Any]) -> LayerKind:
    sizes = {key: size for key, size in row.items() if key != "kind"}
    return LayerKind(row["kind"], sizes)


def _full_attention(entry: Mapping[str, Any]) -> LayerKind:
    heads = entry["heads"]
    index = {"index": entry.get("index_dim", 0)}
    index["index_heads"] = entry.get("index_heads", 0)
    if "mla" in entry:
        return LayerKind("latent", {"heads": heads, **index, **entry["mla"]})
    gated = int(entry.get("query_gate", False))
    sizes = {"kv_heads": entry["kv_heads"], "key": entry["head_dim"], "gated": gated}
    if "value_dim" in entry:
        sizes["value"] = entry["value_dim"]
    return LayerKind("attention", {"heads": heads, **sizes, **index})


# -- models in words -------------------------------------------------------------------


def _in_words(spec: str, weights: str) -> ModelShape:
    """The shape that words such as ``layers=1,experts=6`` describe."""
    given = _parsed_words(spec)
    sizes = {
        key: _size(spec, key, value) for key, value in given.items() if key != "name"
    }
    for key in _NEEDED:
        if key not in sizes:
            raise TraceError(
                f"shape {spec!r}: expected {key}=…; layers, experts and top_k are"
                " always needed"
            )

    layers = sizes["layers"]
    experts = sizes["experts"]
    hidden, intermediate = _hidden_and_intermediate(sizes, weights)
    shared = sizes.get("shared_intermediate", 0)
    vocab = sizes.get("vocab", 0)

    if "expert_bytes" in sizes:
        bytes_by_layer = (sizes["expert_bytes"],) * layers
    else:
        bytes_by_layer = tuple(
            expert_bytes("", hidden, intermediate, weights, layer, layers)
            for layer in range(layers)
        )

    # As for models of the table, with an attention of 4 H².
    layer_weights = hidden * (4 * hidden + 2 + experts + 3 * shared)
    other_weights = layers * layer_weights + 2 * vocab * hidden

    sizes_of_expert = {"hidden", "expert_intermediate", "expert_bytes"}
    assumed = {"other_bytes", "scoring", "norm_topk"} | (sizes_of_expert - set(sizes))
    return ModelShape(
        name=given.get("name", "custom"),
        layers=layers,
        experts=experts,
        top_k=sizes["top_k"],
        hidden=hidden,
        expert_intermediate=intermediate,
        expert_bytes=bytes_by_layer,
        other_bytes=_other_bytes(other_weights, weights),
        shared_experts=int(shared > 0),
        shared_intermediate=shared,
        vocab=vocab,
        dtype=weights,
        assumed=tuple(sorted(assumed)),
    )


def _parsed_words(spec: str) -> dict[str, str]:
    """Key -> value of each word."""
    parsed: dict[str, str] = {}
    for word in spec.split(","):
        key = word.partition("=")[0].strip()
        if "=" not in word or key not in _WORDS:
            raise TraceError(
                f"shape {spec!r}: unknown word {word!r}; known:"
                f" {', '.join(_WORDS)}{did_you_mean(key, _WORDS)}"
            )
        if key in parsed:
            raise TraceError(f"shape {spec!r}: {key}: expected it once, found it twice")
        parsed[key] = word.partition("=")[2].strip()

    return parsed


def _size(spec: str, key: str, value: str) -> int:
    """The value of one word as a number."""
    try:
        # The key says bytes, so a bare number needs no unit.
        in_units = key == "expert_bytes" and not value.isdecimal()
        number = parse_bytes(value, where=key) if in_units else int(value)
    except ValueError as error:
        raise TraceError(f"shape {spec!r}: {key}: {error}") from None

    # A model may well have no shared expert, and need not know its vocabulary.
    least = 0 if key in ("shared_intermediate", "vocab") else 1
    if number < least:
        raise TraceError(f"shape {spec!r}: {key}: expected >= 1, got {value}")
    return number


def _hidden_and_intermediate(sizes: dict[str, int], weights: str) -> tuple[int, int]:
    """H and F as given, or such that ``3 H F`` weights fill `expert_bytes` (H = 2 F if
    both are free), or defaults.
    """
    hidden = sizes.get("hidden", 0)
    intermediate = sizes.get("expert_intermediate", 0)

    if "expert_bytes" in sizes:
        # A mixed file has mostly four bits.
        stored = bytes_per_weight(_formats("", weights).up)
        area = max(1, int(sizes["expert_bytes"] / (3 * stored)))
        if not hidden:
            width = area // intermediate if intermediate else math.isqrt(2 * area)
            hidden = max(1, width)
        intermediate = intermediate or max(1, round(area / hidden))

    return hidden or _DEFAULT_HIDDEN, intermediate or _DEFAULT_INTERMEDIATE


def _other_bytes(weights_count: int, weights: str) -> int:
    """Bytes of all that is no routed expert: in the format of attention, bf16 beside
    MXFP4.
    """
    kind = "bf16" if weights == "mxfp4" else _formats("", weights).dense
    return int(weights_count * bytes_per_weight(kind))
