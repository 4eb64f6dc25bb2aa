"""Model shapes against published sizes, and sizes against what people write."""

import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given
from hypothesis import strategies as st

from moesim.base.errors import TraceError
from moesim.base.units import format_bytes, parse_bytes
from moesim.traces import weight_formats
from moesim.traces.models import known_models, model_shape
from moesim.traces.weight_formats import known_labels

# Published totals in billions of weights; Gemma's vocabulary and attention are not in
# the table.
PUBLISHED = {
    "mixtral-8x7b": 46.7, "phi-3.5-moe": 41.9, "qwen3-30b-a3b": 30.5,
    "qwen2-57b-a14b": 57.4, "qwen1.5-moe-a2.7b": 14.3, "olmoe-1b-7b": 6.9,
    "deepseek-v2-lite": 15.7, "deepseek-moe-16b": 16.4, "deepseek-v3": 671,
    "xverse-moe-a4.2b": 25.8, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
    # Counted over the modules that transformers 5.23.0 builds; 48 is a name.
    "kimi-linear-48b-a3b": 49.12, "glm-4.5-air": 106, "qwen3-235b-a22b": 235,
    "qwen3-next-80b-a3b": 80, "qwen3.5-122b-a10b": 122, "qwen3.5-397b-a17b": 397,
    "qwen3-coder-480b-a35b": 480, "glm-4.5": 355, "glm-4.7-flash": 30, "glm-5": 744,
    "deepseek-v2": 236, "kimi-k2": 1026, "minimax-m2": 229, "llama-4-scout": 109,
    "llama-4-maverick": 400, "mixtral-8x22b": 141, "ernie-4.5-21b-a3b": 21.8,
    "ernie-4.5-300b-a47b": 300, "hunyuan-a13b": 80.4, "dots.llm1": 142,
    "ling-mini-2.0": 16.3, "ling-flash-2.0": 103, "step-3.5-flash": 196,
    "mimo-v2-flash": 309, "solar-open-100b": 102.6,
    # As transformers builds them; glm-5.3-flash without its head for several tokens.
    "deepseek-v4-flash": 284.33, "glm-5.3-flash": 313.33, "minimax-m3": 426.17,
    "nemotron-3-nano-30b-a3b": 31.58, "nemotron-3-super-120b-a12b": 120.67,
    "trinity-nano": 6.12, "kimi-k3": 2800, "longcat-flash-lite": 37.1,
}  # fmt: skip


def test_blocks_are_those_of_ggml():
    blocks = weight_formats.data_table("weight_formats.yaml")["blocks"]
    ours = {name: tuple(size) for name, size in blocks.items()}
    assert ours == {each.name.lower(): size for each, size in GGML_QUANT_SIZES.items()}


def test_every_known_model_but_a_few_has_a_published_size():
    """What the formula counts twice (Gemma's tied head) or lacks (the Qwen models' heads
    for several tokens).
    """
    others = {"gemma-4-26b-a4b", "qwen3.6-35b-a3b", "qwen3.8-flash-next"}
    others |= {"lfm2-8b-a1b", "granite-4-h-small"}  # tied heads
    assert set(known_models()) - set(PUBLISHED) == others


@pytest.mark.parametrize("name", PUBLISHED)
def test_experts_and_the_rest_add_up_to_the_published_size(name):
    shape = model_shape(name, "bf16")
    billions = (sum(shape.expert_bytes) * shape.experts + shape.other_bytes) / 2 / 1e9
    assert billions == pytest.approx(PUBLISHED[name], rel=0.015)


def test_q4_k_m_bytes_are_those_of_real_files():
    """Qwen3-30B-A3B: 3,059,712 where ffn_down has six bits, else 2,654,208; also two
    other observed models.
    """
    qwen = model_shape("qwen3-30b-a3b", "q4_k_m")
    assert set(qwen.expert_bytes) == {3_059_712, 2_654_208}
    larger = [
        layer for layer, count in enumerate(qwen.expert_bytes) if count == 3_059_712
    ]
    assert larger == [*range(6), *range(8, 42, 3), *range(42, 48)]
    assert "expert_bytes" in qwen.assumed
    assert set(model_shape("gemma-4-26b-a4b", "q4_k_m").expert_bytes) == {
        4_336_640,
        3_593_216,
    }
    assert set(model_shape("gpt-oss-120b", "q4_k_m").expert_bytes) == {13_219_200}


def test_bytes_are_those_that_the_maker_publishes_unless_a_format_is_stated():
    assert set(model_shape("gpt-oss-120b").expert_bytes) == {13_219_200}
    assert model_shape("deepseek-v3").expert_bytes[0] == 3 * 7168 * 2048
    assert model_shape("qwen3-30b-a3b").dtype == "bf16"
    assert model_shape("gpt-oss-120b", "bf16").expert_bytes[0] == 2 * 3 * 2880 * 2880


@pytest.mark.parametrize(
    ("weights", "bits"),
    [("f32", 32), ("bf16", 16), ("q8_0", 8.5), ("q4_0", 4.5), ("mxfp4", 4.25)],
)
def test_bytes_per_weight(weights, bits):
    shape = model_shape("gpt-oss-20b", weights)
    assert shape.expert_bytes[0] == 3 * 2880 * 2880 * bits / 8


def test_a_scaled_model_is_smaller_in_both_directions():
    full = model_shape("qwen3-30b-a3b")
    quarter = model_shape("qwen3-30b-a3b/4")
    assert quarter.name == "qwen3-30b-a3b/4"
    assert (quarter.hidden, quarter.expert_intermediate) == (512, 192)
    assert quarter.expert_bytes[0] * 16 == full.expert_bytes[0]
    assert (quarter.layers, quarter.experts, quarter.top_k) == (48, 128, 8)


def test_a_shape_in_words():
    shape = model_shape("layers=1,experts=6,top_k=1,expert_bytes=1MiB")
    assert (shape.layers, shape.experts, shape.top_k, shape.expert_bytes) == (
        1,
        6,
        1,
        (1 << 20,),
    )
    # 3 H F weights of 2 bytes.
    assert 6 * shape.hidden * shape.expert_intermediate == pytest.approx(
        1 << 20, rel=0.01
    )
    assert {"hidden", "expert_intermediate", "other_bytes"} <= set(shape.assumed)


def test_words_that_are_given_are_not_assumed():
    shape = model_shape(
        "layers=2,experts=8,top_k=2,hidden=256,expert_intermediate=128", "q8_0"
    )
    assert shape.expert_bytes == (3 * 256 * 128 * 34 // 32,) * 2
    assert not {"hidden", "expert_intermediate"} & set(shape.assumed)


@pytest.mark.parametrize(("spec", "message"), [
    ("qwen3-30b", r"unknown model 'qwen3-30b'.*did you mean 'qwen3-30b-a3b'"),
    ("qwen3-30b-a3b/5", "hidden 2048 is not divisible by 5"),
    ("qwen3-30b-a3b/x", "expected a whole number behind '/'"),
    ("layers=1,experts=6", "expected top_k="),
    ("layers=1,experts=6,topk=1", r"unknown word 'topk=1'.*did you mean 'top_k'"),
    ("layers=1,experts=6,top_k=0", "top_k: expected >= 1, got 0"),
    ("layers=1,experts=6,top_k=7", "top_k 7 exceeds experts 6"),
    ("layers=one,experts=6,top_k=1", "layers: invalid literal"),
    ("layers=1,experts=6,top_k=1,expert_bytes=1Q", "unknown unit 'Q'"),
])  # fmt: skip
def test_a_wrong_shape_says_what_would_be_right(spec, message):
    with pytest.raises(TraceError, match=message) as caught:
        model_shape(spec)
    assert "\n" not in str(caught.value)


def test_an_unknown_weight_format():
    with pytest.raises(TraceError, match=r"weights 'q4km'.*did you mean 'q4_k_m'"):
        model_shape("mixtral-8x7b", "q4km")
    assert {"bf16", "q4_k_m", "mxfp4"} <= set(known_labels())


@pytest.mark.parametrize(("text", "count"), [
    ("8GiB", 8 << 30),
    ("7.4GB", 7_400_000_000),
    ("512 MiB", 512 << 20),
    ("4096", 4096),
    (17, 17),
    ("1.5kib", 1536),
    ("2tb", 2 * 10**12),
])  # fmt: skip
def test_sizes_as_people_write_them(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "8Q", "16", "8 gigabytes", "1.5", "0x10", -1, True, "nan"],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"--gpu-memory: "):
        parse_bytes(text, where="--gpu-memory")


@given(st.integers(0, 1 << 50))
def test_formatting_is_within_a_twentieth_of_a_unit(count):
    number, unit = format_bytes(count).split()
    exact = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[
        unit
    ]
    assert abs(float(number) * exact - count) <= 0.0501 * exact
