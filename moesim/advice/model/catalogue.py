"""Contents of a model by name: from the table of shapes that ``moesim list models``
prints, in the formats of a label such as ``Q4_K_M``.

Computed bytes are good to a few per cent; where the size of the file is known, the
experts are scaled so that the sum is right.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from moesim.advice.model.contents import ModelContents, shaped_contents
from moesim.advice.model.hf_config import hf_contents
from moesim.base.errors import AdviceError
from moesim.base.text import did_you_mean
from moesim.traces.models import layer_shapes, shapes
from moesim.traces.weight_formats import (
    Recipe,
    bytes_per_weight,
    is_dynamic,
    recipe,
)

DEFAULT_QUANT = "Q4_K_M"

# Words in front of a name, and behind it, that say nothing about the shape: training,
# dates, versions, containers.
MAKERS = ("nvidia", "meta", "mistralai", "google", "openai", "microsoft", "unsloth")
VARIANT = re.compile(
    r"instruct|chat|base|thinking|reasoning|it|pt|hf|gguf|mlx|awq|gptq|preview|exp"
    r"|terminus|speciale|v\d+(\.\d+)*|\d{4}|int[48]|[48]bit"
)
LABEL = re.compile(r"[-_.](ud[-_])?(i?q\d\w*|bf16|f16|fp8|mxfp4|nvfp4)(\.gguf)?$")

# Unsloth's files of Llama 4 are older than its others: "attention and other layers in
# 4 or 6bit", whose middle this is. Shared experts are half of what a token reads there.
# Experts then come to the 3.5 bits that are stated for Q3_K_XL.
# Source: docs.unsloth.ai, "How to run Llama 4".
LLAMA_4_DENSE = "q5_k"


@cache
def all_names() -> dict[str, dict[str, Any]]:
    """Return rows of shapes by their names, and by those of other such models."""
    others = {name: row for row in shapes().values() for name in row.get("also", ())}
    return {**shapes(), **others}


def shape_named(text: str) -> dict[str, Any] | None:
    """Find the shape of a model; None where a word of its name is not known.

    A word that is not known (flash, air, lite, coder, distill) makes it another model.

    Args:
        text: such as ``Qwen3-30B-A3B-Instruct-2507``; case and separators do not
            matter.
    """
    name = text.lower().rstrip("/").rsplit("/", maxsplit=1)[-1]
    words = re.findall(r"[a-z0-9.]+", LABEL.sub("", name))
    while words and words[0] in MAKERS:
        del words[0]
    names = {name.replace("-", ""): name for name in all_names()}

    for count in range(len(words), 0, -1):
        known = names.get("".join(words[:count]))
        if known is None:
            continue
        row = {**all_names()[known], "name": known}
        return row if all(_same_shape(word, row) for word in words[count:]) else None
    return None


def _same_shape(word: str, row: dict[str, Any]) -> bool:
    """Whether a word behind a model's name leaves its shape as it is."""
    if VARIANT.fullmatch(word):
        return True
    size = re.fullmatch(r"(a?)(\d+(?:\.\d+)?)([bt])", word)
    if size is None:
        return False
    stated = float(size[2]) * (1e12 if size[3] == "t" else 1e9)
    model = _computed(row, _known_recipe(DEFAULT_QUANT), "")
    # Makers round, and not all count the head or heads for several tokens.
    if size[1]:
        return math.isclose(stated, model.active_weights, rel_tol=0.3)
    return math.isclose(stated, model.weights, rel_tol=0.06)


def named_contents(
    name: str, quant: str = "", file_bytes: int | None = None
) -> ModelContents:
    """Compute what a file of this model holds.

    Args:
        name: of the table, or one that begins with such a name.
        quant: label of the file; default `DEFAULT_QUANT`, or MXFP4 for gpt-oss.
        file_bytes: size of the file, if known.

    Raises:
        AdviceError: an unknown model or label, or a size that no such file can have.
    """
    row = shape_named(name)
    if row is None:
        hint = did_you_mean(name.lower(), all_names())
        raise AdviceError(
            f"model {name!r}: no such file, folder or name{hint}; `moesim list models`"
            " prints the names, and a GGUF file is exact"
        )
    # Experts that were trained in four bits hardly exist in others.
    in_mxfp4 = row.get("published") == "mxfp4"
    label = quant or ("MXFP4" if in_mxfp4 else DEFAULT_QUANT)
    formats = _known_recipe(label)
    if row["name"].startswith("gpt-oss"):
        # Files of gpt-oss keep the experts as trained, whatever the label says: "F16"
        # is about attention and head.
        formats = replace(formats, up="mxfp4", down="mxfp4", down_more="mxfp4")

    if row["name"].startswith("llama-4") and is_dynamic(label):
        formats = replace(formats, dense=LLAMA_4_DENSE)

    contents = _computed(row, formats, label)
    if file_bytes is not None:
        contents = _scaled(contents, file_bytes)
    return contents


def _known_recipe(label: str) -> Recipe:
    formats = recipe(label)
    if formats is None:
        raise AdviceError(
            f"quantisation {label!r}: unknown; expected a llama.cpp label such as"
            " Q4_K_M, UD-Q4_K_XL, IQ2_XXS, Q8_0, MXFP4 or BF16"
        )
    return formats


def _computed(row: dict[str, Any], formats: Recipe, label: str) -> ModelContents:
    contents = shaped_contents(
        layer_shapes(row),
        formats,
        name=row["name"],
        hidden=row["hidden"],
        vocab=row.get("vocab", 0),
        tied=row.get("tied", False),
    )
    table_weights = row.get("table_weights", 0)
    stored = round(table_weights * bytes_per_weight(formats.embed))
    return replace(
        contents,
        quant=label,
        # Tables that are looked up, not multiplied; they may stay in the file.
        table_bytes=row.get("table_bytes", stored),
        table_weights=table_weights,
        table_rows=row.get("table_rows", 1),
        assumed=("bytes follow from the shape and the label",),
    )


def _scaled(contents: ModelContents, file_bytes: int) -> ModelContents:
    """Scale the experts so that all tensors together have the bytes of the file."""
    # Attention and head follow the recipe closely; experts vary most.
    others = contents.file_bytes - contents.expert_bytes
    factor = (file_bytes - others) / contents.expert_bytes

    if not 1 / 3 < factor < 3:
        raise AdviceError(
            f"model {contents.name} in {contents.quant}: expected about"
            f" {contents.file_bytes / 1e9:.1f} GB, got a file of"
            f" {file_bytes / 1e9:.1f} GB; is the name or the label another one?"
        )
    layers = tuple(
        replace(
            layer,
            expert_bytes=round(layer.expert_bytes * factor),
            expert_formats={
                name: round(stored * factor)
                for name, stored in layer.expert_formats.items()
            },
        )
        for layer in contents.layers
    )
    return replace(contents, layers=layers)


def model_contents(model: str, quant: str = "") -> ModelContents:
    """Read a file or folder, or compute the contents of a model by name.

    Args:
        model: a path to a GGUF file, a Hugging Face folder, or a name that
            ``moesim list models`` prints.
        quant: label of the weight formats; not for a GGUF file, which knows its own.

    Raises:
        AdviceError: nothing of the kind, a broken header, or no experts.
    """
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - pathlib raises for strangers
    # Folders first: a folder may be named like a model.
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise AdviceError(
                f"{path}: a folder without config.json; give a GGUF file or the folder"
                " of a Hugging Face model"
            )
        return hf_contents(path, quant)

    # A wrong path should be called that, not an unknown model.
    if path.suffix.lower() == ".gguf" or path.is_file():
        if quant:
            raise AdviceError(
                f"--quant {quant}: {path} says its own formats; leave the option out,"
                " or name the model instead of a file"
            )
        # The library of the format is needed for files only.
        from moesim.advice.model.gguf_header import gguf_contents  # noqa: PLC0415

        try:
            return gguf_contents(path)
        except FileNotFoundError:
            raise AdviceError(f"{path}: no such file") from None
    return named_contents(model, quant)
