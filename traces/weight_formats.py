"""Weight formats: bytes per weight, and what a file label such as ``Q4_K_M`` mixes.

A label names a recipe, not one format: llama.cpp gives the down projections of some
layers, the value projections and the head more bits. `recipe` follows those rules as
far as they move the sum by more than a few per cent; a file's header is exact.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

FLOAT_FORMATS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Dtypes that a run on this PC computes in -> their weight formats."""

BLOCK_WEIGHTS = 256


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats of the tensors of one file.

    Attributes:
        up: gate and up projections of experts.
        down: down projections in most layers.
        down_more: down projections in the layers of `more_bits`.
        dense: attention and shared experts.
        head: output head.
        embed: token embeddings.
    """

    up: str
    down: str
    down_more: str
    dense: str
    head: str
    embed: str


@cache
def data_table(name: str) -> dict[str, Any]:
    """Return a table in ``traces/data``, by its file's name."""
    file = resources.files("moesim.traces").joinpath("data", name)
    # Written in C where PyYAML brings it: a tenth of the time.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table: dict[str, Any] = yaml.load(file.read_text(encoding="utf-8"), loader)  # noqa: S506 - both are safe
    return table


def _formats() -> dict[str, Any]:
    return data_table("weight_formats.yaml")


def bytes_per_weight(name: str) -> float:
    """Return stored bytes per weight of a format; 16 bits for one nobody knows."""
    block = _formats()["blocks"].get(name)
    if block is not None:
        weights, block_bytes = block
        return block_bytes / weights
    return float(_formats()["fork_bits"].get(name, 16.0)) / 8


def row_bytes(name: str, width: int) -> int:
    """Return the bytes of one row of `width` weights: whole blocks."""
    name = row_format(name, width)
    block = _formats()["blocks"].get(name)
    if block is None:
        return math.ceil(width * bytes_per_weight(name))
    weights, block_bytes = block
    return math.ceil(width / weights) * block_bytes


def known_format(name: str) -> bool:
    """Tell whether the bytes of a format are known."""
    return name in _formats()["blocks"] or name in _formats()["fork_bits"]


def known_labels() -> tuple[str, ...]:
    """Return formats and labels of files, sorted."""
    kinds = ("blocks", "fork_bits", "recipes")
    return tuple(sorted({name for kind in kinds for name in _formats()[kind]}))


def row_format(name: str, width: int) -> str:
    """Return the format that rows of `width` weights really get."""
    if width % BLOCK_WEIGHTS:
        return _formats()["short_rows"].get(name, name)
    return name


def more_bits(layer: int, layers: int) -> bool:
    """Tell whether llama.cpp gives this layer's down projection more bits.

    The first eighth of the layers, the last eighth, and every third between.
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def is_dynamic(label: str) -> bool:
    """Tell whether a label is that of one of Unsloth's dynamic files."""
    marked = re.search(r"\bUD\b", label, re.IGNORECASE) is not None
    return marked or label.lower().endswith("_xl")


def recipe(label: str) -> Recipe | None:
    """Return the formats behind a label; None for one that says nothing.

    Args:
        label: such as ``Q4_K_M``, ``UD-Q4_K_XL``, ``IQ1_S_R4`` or ``bf16``.
    """
    word = re.search(
        r"(?:i?q\d(?:_[a-z0-9]+)*|bf16|f16|fp16|f32|fp8|mxfp4|nvfp4)", label.lower()
    )
    if word is None:
        return None

    # Suffixes that change the order of rows in memory, not their size.
    name = re.sub(r"_(?:r4|r8|r16)$", "", word.group(0)).replace("fp16", "f16")
    # "XL" and "L" give head and embeddings more bits; where a format has no medium
    # recipe of its own (Q2, Q6, Q8), the experts are plain.
    base = re.sub(r"_k_(?:xl|l)$", "_k_m", name)
    recipes = _formats()["recipes"]
    if name not in recipes and base != name:
        plain = base.removesuffix("_k_m")
        fitting = (base, "q8_0" if plain == "q8" else f"{plain}_k")
        known = known_labels()
        name = next((label for label in fitting if label in known), name)

    if name not in recipes:
        # Eight bits and more leave nothing to step up to.
        return Recipe(*[name] * 6) if known_format(name) else None
    plain_recipe = Recipe(*recipes[name])
    if not is_dynamic(label):
        return plain_recipe
    # Unsloth keeps attention, shared experts and head in eight or six bits.
    down = _formats()["steps_up"].get(plain_recipe.up, plain_recipe.down)
    return replace(plain_recipe, down=down, dense="q8_0", head="q6_k", embed="q6_k")
