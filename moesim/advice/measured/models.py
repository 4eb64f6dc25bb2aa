"""The models of a folder: exact rows of ``models.csv`` first, then names and shapes."""

from __future__ import annotations

import re
from dataclasses import replace

from moesim.advice.errors import AdviceError
from moesim.advice.measured.folder import MeasuredFolder, Row, size_in_label
from moesim.advice.model.catalogue import named_contents, shape_named
from moesim.advice.model.contents import LayerContents, ModelContents
from moesim.traces.weight_formats import recipe


class FolderModels:
    """Contents of every model that rows of a folder name."""

    def __init__(self, folder: MeasuredFolder) -> None:
        self.exact = folder["models.csv"]
        self.known: dict[tuple[str, str], ModelContents] = {}

    def contents(self, model: str, quant: str) -> ModelContents:
        """Return what the file of a row holds.

        Args:
            model: as the row names it.
            quant: its label, possibly with the file's size.

        Raises:
            AdviceError: the model is neither in ``models.csv`` nor known by name.
        """
        key = (model, quant)
        if key not in self.known:
            self.known[key] = self._contents(model, quant)
        return self.known[key]

    def _contents(self, model: str, quant: str) -> ModelContents:
        label = re.sub(r"\s*\(.*", "", quant)
        row = self._exact_row(model, label)
        # Exact bytes first; the table of shapes is good to a few per cent.
        if row is not None:
            contents = _from_row(row)
        else:
            contents = named_contents(model, label, size_in_label(quant))
        return contents.renamed(f"{model} {quant}")

    def _exact_row(self, model: str, quant: str) -> Row | None:
        """Find the row whose model name equals or continues the given one."""
        fitting = [
            row
            for row in self.exact
            if row.text("quant").lower() == quant.lower()
            and _plain(row.text("model")).startswith(_plain(model))
        ]
        # "gpt-oss-20b" also begins longer names; the shortest is meant.
        return min(fitting, key=lambda row: len(row.text("model")), default=None)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", text.lower())


def _from_row(row: Row) -> ModelContents:
    """Spread one row's sums over layers, keeping which layers have larger experts."""
    total = _whole(row, "n_layers")
    moe = _whole(row, "n_moe_layers")
    experts = _whole(row, "n_experts")
    top_k = _whole(row, "top_k")
    smallest = _whole(row, "expert_bytes_min")
    largest = _whole(row, "expert_bytes_max")
    expert_params = _whole(row, "expert_params")
    if not 0 < moe <= total:
        raise AdviceError(
            f"{row.place}: n_moe_layers: expected 1 to {total}, got {moe}"
        )

    larger = _layers_in_words(row.text("note"), moe)
    count_larger = _whole(row, "layers_with_max")
    if not larger or len(larger) != count_larger:
        # The row does not say which; spread the larger ones evenly.
        stride = moe / max(1, count_larger)
        larger = {int(index * stride) for index in range(count_larger)}

    # The row has sums only, so all layers share one attention.
    template = _template(row, total)
    formats = recipe(row.text("quant"))
    up = formats.up if formats else "f16"
    layers = []
    for at in range(total):
        layer = template
        # Dense layers come first in every architecture that has some.
        index = at - (total - moe)
        if index >= 0:
            stored = experts * (largest if index in larger else smallest)
            layer = replace(
                layer,
                experts=experts,
                top_k=top_k,
                expert_bytes=stored,
                expert_weights=experts * expert_params,
                expert_formats={up: stored},
            )
        layers.append(layer)

    head_format = formats.head if formats else "f16"
    return ModelContents(
        name=row.text("model"),
        architecture=row.text("model"),
        layers=tuple(layers),
        embed_bytes=_whole(row, "embed_bytes"),
        head_bytes=_whole(row, "head_bytes"),
        head_weights=_whole(row, "lm_head_params"),
        head_format=head_format,
        hidden=0,
        source="models.csv",
        quant=row.text("quant"),
    )


def _template(row: Row, total: int) -> LayerContents:
    """Return one layer without experts; attention as the named shape has it."""
    formats = recipe(row.text("quant"))
    dense = formats.dense if formats else "f16"
    head_weights = _whole(row, "lm_head_params")
    dense_weights = _whole(row, "dense_params_per_token") - head_weights
    dense_bytes = _whole(row, "dense_bytes") // total

    layer = LayerContents(
        dense_bytes=dense_bytes,
        dense_weights=dense_weights // total,
        dense_formats={dense: dense_bytes},
        kv_bytes_per_token=_whole(row, "kv_bytes_per_token_ctx") // total,
    )
    if shape_named(row.text("model")) is not None:
        named = named_contents(row.text("model"), row.text("quant"))
        # Attention costs FLOPs that bytes do not tell.
        widths = [other.attention_width for other in named.layers]
        group = max(other.query_group for other in named.layers)
        width = sum(widths) // len(widths)
        layer = replace(layer, attention_width=width, query_group=group)
    return layer


def _whole(row: Row, column: str) -> int:
    value = row.number(column)
    if value is None or value < 0:
        raise AdviceError(f"{row.place}: {column}: expected a number >= 0, found none")
    return round(value)


def _layers_in_words(note: str, moe: int) -> set[int]:
    """Read ``max at layers 0-5,8,11`` into layer numbers."""
    match = re.search(r"layers ([\d,\- ]+)", note)
    if match is None:
        return set(range(moe))

    layers: set[int] = set()
    for piece in match.group(1).replace(" ", "").strip(",").split(","):
        first, _, last = piece.partition("-")
        layers |= set(range(int(first), int(last or first) + 1))
    return layers
