"""Weight formats: bytes per weight, and what a file label such as ``Q4_K_M`` mixes.

A label names a recipe, not one format: llama.cpp gives the down projections of some
layers, the value projections and the head more bits. `recipe` follows those rules as
far as they move the sum by more than a few per cent; a file's header is exact.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# Formats of forks, whose block sizes the package `gguf` does not know: bits per weight.
# Source: ik_llama.cpp's pull requests that introduced them.
FORK_BITS = {
    "iq1_kt": 1.75,
    "iq2_kt": 2.125,
    "iq3_kt": 3.125,
    "iq4_kt": 4.0,
    "iq2_ks": 2.1875,
    "iq2_kl": 2.6875,
    "iq2_k": 2.375,
    "iq3_ks": 3.1875,
    "iq3_k": 3.4375,
    "iq4_kss": 4.0,
    "iq4_ks": 4.25,
    "iq4_k": 4.5,
    "iq5_ks": 5.25,
    "iq5_k": 5.5,
    "iq6_k": 6.625,
    "fp8": 8.0,
    "nvfp4": 4.5,
}

BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q8_1": (32, 40),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "q8_k": (256, 292),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq3_xxs": (256, 98),
    "iq1_s": (256, 50),
    "iq4_nl": (32, 18),
    "iq3_s": (256, 110),
    "iq2_s": (256, 82),
    "iq4_xs": (256, 136),
    "i8": (1, 1),
    "i16": (1, 2),
    "i32": (1, 4),
    "i64": (1, 8),
    "f64": (1, 8),
    "iq1_m": (256, 56),
    "bf16": (1, 2),
    "tq1_0": (256, 54),
    "tq2_0": (256, 66),
    "mxfp4": (32, 17),
    "nvfp4": (64, 36),
    "q1_0": (128, 18),
}
"""Weights and bytes of a block of each of ggml's formats: the constants of the package
`gguf`, which takes a tenth of a second to import; a test compares them.
"""

FLOAT_FORMATS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Dtypes that a run on this PC computes in -> their weight formats."""

# What llama.cpp falls back to where a row is no multiple of 256 weights.
SHORT_ROWS = {
    "q2_k": "iq4_nl",
    "q3_k": "iq4_nl",
    "iq2_xxs": "iq4_nl",
    "iq2_xs": "iq4_nl",
    "iq2_s": "iq4_nl",
    "iq3_xxs": "iq4_nl",
    "iq3_s": "iq4_nl",
    "iq4_xs": "iq4_nl",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
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


def _same(name: str) -> Recipe:
    return Recipe(name, name, name, name, name, name)


# Source: llama.cpp's llama_tensor_get_type (src/llama-quant.cpp), as far as it matters.
RECIPES = {
    "q2_k": Recipe("q2_k", "q3_k", "q3_k", "q2_k", "q6_k", "q2_k"),
    "q2_k_s": Recipe("q2_k", "q2_k", "q3_k", "q2_k", "q6_k", "q2_k"),
    "q3_k_s": Recipe("q3_k", "q3_k", "q3_k", "q3_k", "q6_k", "q3_k"),
    "q3_k_m": Recipe("q3_k", "q4_k", "q5_k", "q3_k", "q6_k", "q3_k"),
    "q3_k_l": Recipe("q3_k", "q5_k", "q5_k", "q4_k", "q6_k", "q3_k"),
    "q4_0": Recipe("q4_0", "q4_0", "q4_0", "q4_0", "q6_k", "q4_0"),
    "q4_1": Recipe("q4_1", "q4_1", "q4_1", "q4_1", "q6_k", "q4_1"),
    "q4_k_s": Recipe("q4_k", "q4_k", "q5_k", "q4_k", "q6_k", "q4_k"),
    "q4_k_m": Recipe("q4_k", "q4_k", "q6_k", "q4_k", "q6_k", "q4_k"),
    "q5_0": Recipe("q5_0", "q5_0", "q5_0", "q5_0", "q6_k", "q5_0"),
    "q5_k_s": Recipe("q5_k", "q5_k", "q5_k", "q5_k", "q6_k", "q5_k"),
    "q5_k_m": Recipe("q5_k", "q5_k", "q6_k", "q5_k", "q6_k", "q5_k"),
    "iq1_s": Recipe("iq1_s", "q2_k", "q2_k", "q4_k", "q5_k", "q2_k"),
    "iq1_m": Recipe("iq1_m", "q2_k", "q2_k", "q4_k", "q5_k", "q2_k"),
    "iq2_xxs": Recipe("iq2_xxs", "q2_k", "q2_k", "q4_k", "q5_k", "q2_k"),
    "iq2_xs": Recipe("iq2_xs", "q2_k", "q2_k", "q4_k", "q5_k", "q2_k"),
    "iq2_s": Recipe("iq2_xs", "iq3_s", "iq3_s", "q4_k", "q5_k", "iq3_s"),
    "iq2_m": Recipe("iq2_s", "iq3_s", "iq3_s", "q4_k", "q5_k", "iq3_s"),
    "iq3_xxs": Recipe("iq3_xxs", "q3_k", "q4_k", "q4_k", "q5_k", "iq3_s"),
    "iq3_xs": Recipe("iq3_xxs", "q3_k", "q4_k", "q4_k", "q6_k", "iq3_s"),
    "iq3_s": Recipe("iq3_s", "q3_k", "q4_k", "q4_k", "q6_k", "iq3_s"),
    "iq3_m": Recipe("iq3_s", "q4_k", "q4_k", "q4_k", "q6_k", "iq3_s"),
    "iq4_nl": Recipe("iq4_nl", "iq4_nl", "q5_k", "iq4_nl", "q6_k", "iq4_nl"),
    "iq4_xs": Recipe("iq4_xs", "iq4_xs", "q5_k", "iq4_xs", "q6_k", "iq4_xs"),
    # OpenAI's gpt-oss as converted by the ggml organisation.
    "mxfp4": Recipe("mxfp4", "mxfp4", "mxfp4", "q8_0", "q8_0", "q8_0"),
}

# Unsloth's "dynamic" files keep attention, shared experts and head in eight or six
# bits, and one step more in the down projections.
_STEP_UP = {
    "q2_k": "q3_k",
    "q3_k": "q4_k",
    "q4_k": "q5_k",
    "q5_k": "q6_k",
    "iq1_s": "iq2_xxs",
    "iq1_m": "iq2_xxs",
    "iq2_xxs": "iq3_xxs",
    "iq2_m": "iq3_xxs",
    "iq3_xxs": "iq4_xs",
}


def bytes_per_weight(name: str) -> float:
    """Return stored bytes per weight of a format; 16 bits for one nobody knows."""
    block = BLOCKS.get(name)
    if block is not None:
        weights, block_bytes = block
        return block_bytes / weights
    return FORK_BITS.get(name, 16.0) / 8


def row_bytes(name: str, width: int) -> int:
    """Return the bytes of one row of `width` weights: whole blocks."""
    name = row_format(name, width)
    block = BLOCKS.get(name)
    if block is None:
        return math.ceil(width * bytes_per_weight(name))
    weights, block_bytes = block
    return math.ceil(width / weights) * block_bytes


def known_format(name: str) -> bool:
    """Tell whether the bytes of a format are known."""
    return name in BLOCKS or name in FORK_BITS


def known_labels() -> tuple[str, ...]:
    """Return formats and labels of files, sorted."""
    return tuple(sorted({*BLOCKS, *FORK_BITS, *RECIPES}))


def row_format(name: str, width: int) -> str:
    """Return the format that rows of `width` weights really get."""
    if width % BLOCK_WEIGHTS:
        return SHORT_ROWS.get(name, name)
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
    dynamic = is_dynamic(label)
    # "XL" and "L" give head and embeddings more bits; where a format has no medium
    # recipe of its own (Q2, Q6, Q8), the experts are plain.
    base = re.sub(r"_k_(?:xl|l)$", "_k_m", name)
    if name not in RECIPES and base != name:
        plain = base.removesuffix("_k_m")
        fitting = (base, "q8_0" if plain == "q8" else f"{plain}_k")
        name = next((label for label in fitting if _is_format(label)), name)

    if name not in RECIPES and not known_format(name):
        return None
    plain_recipe = RECIPES.get(name, _same(name))
    # Eight bits and more leave nothing to step up to.
    return _dynamic(plain_recipe) if dynamic and name in RECIPES else plain_recipe


def _is_format(name: str) -> bool:
    return name in RECIPES or known_format(name)


def _dynamic(plain: Recipe) -> Recipe:
    down = _STEP_UP.get(plain.up, plain.down)
    return Recipe(plain.up, down, plain.down_more, "q8_0", "q6_k", "q6_k")
