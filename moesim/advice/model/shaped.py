"""Contents of a model by the shapes of its layers, in the formats of a label: what a
catalogue entry and a ``config.json`` without weights become.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from moesim.advice.model.contents import (
    LayerContents,
    ModelContents,
    context_sizes,
)
from moesim.traces.weight_formats import (
    Recipe,
    bytes_per_weight,
    more_bits,
    row_format,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.layer_kinds import LayerShape

NORM_BYTES_PER_WEIGHT = 4


def shaped_contents(
    layers: Sequence[LayerShape],
    formats: Recipe,
    *,
    name: str,
    hidden: int,
    vocab: int,
    tied: bool,
) -> ModelContents:
    """Compute what a file of these layers holds in these formats."""
    count = len(layers)
    table_weights = vocab * hidden
    return ModelContents(
        name=name,
        architecture=name,
        layers=tuple(
            _layer(shape, hidden, formats, more=more_bits(at, count))
            for at, shape in enumerate(layers)
        ),
        embed_bytes=_stored(table_weights, formats.embed),
        head_bytes=_stored(table_weights, formats.head),
        head_weights=table_weights,
        head_format=formats.head,
        hidden=hidden,
        source="shapes",
        tied=tied,
    )


def _layer(
    shape: LayerShape, hidden: int, formats: Recipe, *, more: bool
) -> LayerContents:
    dense_format = row_format(formats.dense, hidden)
    dense_weights = shape.mixer.weights + shape.feed_forward
    # Gates and norms stay in single precision in GGUF files.
    dense_formats = {
        dense_format: _stored(dense_weights, dense_format),
        "f32": shape.exact * NORM_BYTES_PER_WEIGHT,
    }
    # Recipes give some layers more bits, see `more_bits`.
    down = row_format(
        formats.down_more if more else formats.down, shape.expert_intermediate
    )
    up = row_format(formats.up, shape.expert_hidden)
    matrix = shape.experts * shape.expert_hidden * shape.expert_intermediate
    expert_formats: Counter[str] = Counter()
    if shape.experts:
        expert_formats[up] += _stored((shape.matrices - 1) * matrix, up)
        expert_formats[down] += _stored(matrix, down)

    return LayerContents(
        dense_bytes=sum(dense_formats.values()),
        dense_weights=dense_weights + shape.exact,
        dense_formats=dense_formats,
        experts=shape.experts,
        zero_experts=shape.zero_experts,
        top_k=shape.top_k,
        expert_bytes=sum(expert_formats.values()),
        expert_weights=shape.matrices * matrix,
        expert_formats=dict(expert_formats),
        **context_sizes(shape.mixer),
    )


def _stored(weights: int, name: str) -> int:
    return round(weights * bytes_per_weight(name))
