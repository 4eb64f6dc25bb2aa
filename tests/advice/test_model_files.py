"""What a model file holds, to the byte: several architectures and quantisations, split
files, Hugging Face folders, names; broken ones in one line with a way out.
"""

import json

import pytest
from support.model_files import write_gguf, write_hf

from moesim.advice.model.catalogue import model_contents, named_contents
from moesim.base.errors import AdviceError
from moesim.traces.models import shapes

ARCHITECTURES = {
    "plain": {},
    "dense layers first, shared experts": {
        "architecture": "deepseek2",
        "dense_layers": 1,
        "shared": True,
        "attention.kv_lora_rank": 64,
        "rope.dimension_count": 32,
    },
    "windows, tied head": {
        "architecture": "gpt-oss",
        "quant": "MXFP4",
        "down": "MXFP4",
        "head": False,
        "attention.sliding_window": 128,
    },
    "eight bits": {"quant": "Q8_0", "down": "Q8_0"},
    "three bits": {"quant": "IQ3_XXS", "down": "Q3_K"},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bytes_of_every_layer_are_those_that_were_written(tmp_path, name):
    path = tmp_path / "model.gguf"
    options = ARCHITECTURES[name]
    sizes = write_gguf(path, **options)
    contents = model_contents(str(path))

    assert [layer.expert_bytes for layer in contents.layers] == sizes.experts
    assert [layer.dense_bytes for layer in contents.layers] == sizes.dense
    assert contents.embed_bytes == sizes.embed
    assert contents.head_bytes == (sizes.head or sizes.embed)
    assert contents.file_bytes == sizes.file_bytes
    dense = options.get("dense_layers", 0)
    assert contents.moe_layers == tuple(range(dense, 3))
    assert contents.layers[-1].top_k == 2


def test_a_split_file_is_the_same_model(tmp_path):
    whole = tmp_path / "whole.gguf"
    sizes = write_gguf(whole)
    write_gguf(tmp_path / "m.gguf", tensors_per_part=10)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    contents = model_contents(str(parts[0]))
    assert [layer.expert_bytes for layer in contents.layers] == sizes.experts
    assert contents.layers == model_contents(str(whole)).layers


def test_a_part_without_the_others_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", tensors_per_part=10)
    first, second, *_ = sorted(tmp_path.glob("m-*.gguf"))
    second.unlink()
    with pytest.raises(AdviceError, match="parts are missing, the first is"):
        model_contents(str(first))


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_a_header_that_is_cut_off_is_one_line(tmp_path, share):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    # Zeros of the weights make up most of the file; the header is its first part.
    header = path.read_bytes()[: 64 * 40]
    path.write_bytes(header[: int(share * len(header))])
    with pytest.raises(AdviceError, match=r"m\.gguf: .*(cut off|not a GGUF)") as caught:
        model_contents(str(path))
    assert "\n" not in str(caught.value)


def test_weights_need_not_be_there(tmp_path):
    """The header alone is enough, as of a download that was stopped."""
    path = tmp_path / "m.gguf"
    sizes = write_gguf(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert model_contents(str(path)).file_bytes == sizes.file_bytes


def test_other_files_are_refused_by_what_they_are(tmp_path):
    text = tmp_path / "notes.gguf"
    text.write_text("not a model")
    with pytest.raises(AdviceError, match="not a GGUF file"):
        model_contents(str(text))
    dense = tmp_path / "dense.gguf"
    write_gguf(dense, dense_layers=3, without=("expert_count",))
    with pytest.raises(AdviceError, match="no routed experts"):
        model_contents(str(dense))
    lacking = tmp_path / "lacking.gguf"
    write_gguf(lacking, without=("embedding_length",))
    with pytest.raises(AdviceError, match=r"lacks qwen3moe\.embedding_length"):
        model_contents(str(lacking))
    with pytest.raises(AdviceError, match="no such file"):
        model_contents(str(tmp_path / "nothing.gguf"))


def test_broken_folders_are_one_line(tmp_path):
    with pytest.raises(AdviceError, match=r"without config\.json"):
        model_contents(str(tmp_path))
    folder = write_hf(tmp_path / "hf", moe_intermediate_size=None)
    with pytest.raises(AdviceError, match="expected one of moe_intermediate_size"):
        model_contents(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(AdviceError, match="not JSON"):
        model_contents(str(folder))


def test_names_are_those_of_the_table():
    assert len(shapes()) > 20
    contents = named_contents("Qwen3-30B-A3B-Instruct-2507", "Q4_K_M")
    # The published file has 18.56 GB.
    assert contents.file_bytes == pytest.approx(18.56e9, rel=0.02)
    assert contents.weights == pytest.approx(30.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("ggml-org/gpt-oss-120b-GGUF", "gpt-oss-120b"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("unsloth/Qwen3-30B-A3B-Instruct-2507-UD-Q4_K_XL", "qwen3-30b-a3b"),
        ("GLM-5-744B-A40B", "glm-5"),
        ("Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Kimi-K2-Instruct-0905", "kimi-k2"),
        ("DeepSeek-V3.2-Exp", "deepseek-v3"),
        ("NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "nemotron-3-super-120b-a12b"),
        ("LiquidAI/LFM2.5-8B-A1B", "lfm2-8b-a1b"),
        ("Trinity-Nano-Preview", "trinity-nano"),
    ],
)
def test_words_about_training_files_and_size_leave_the_model_as_it_is(name, shape):
    assert named_contents(name).layers == named_contents(shape).layers


@pytest.mark.parametrize(
    ("name", "quant", "words"),
    [
        ("nothing-7b", "", "no such file, folder or name"),
        ("qwen3-30b", "", "did you mean 'qwen3-30b-a3b'"),
        ("qwen3", "", r"did you mean 'qwen3-.*'qwen3-30b-a3b', .* or \d+ more\?"),
        ("qwen3-30b-a3b", "Q9_Z", "quantisation 'Q9_Z': unknown"),
        ("glm-5.9-flash", "", "did you mean 'glm-5.3-flash'"),
        # Another architecture, of 552 billion weights.
        ("deepseek-v4.1-flash", "", "did you mean 'deepseek-v4-flash'"),
        ("glm-5-flash", "", "did you mean 'glm-"),
        # It has half of the experts.
        ("qwen3.8-flash-next-coder", "", "did you mean 'qwen3.8-flash-next'"),
        ("glm-5-air", "", "no such file, folder or name"),
        ("kimi-k2-nano", "", "no such file, folder or name"),
        ("gpt-oss-20b-mini", "", "did you mean 'gpt-oss-20b'"),
        ("glm-5-320b-a18b", "", "no such file, folder or name"),
        ("deepseek-r1-distill-qwen-32b", "", "no such file, folder or name"),
    ],
)
def test_unknown_names_say_where_to_look(name, quant, words):
    """A4: a name that adds flash, air, lite, mini or nano is another model."""
    with pytest.raises(AdviceError, match=words):
        named_contents(name, quant)


def test_a_file_knows_its_own_formats(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    with pytest.raises(AdviceError, match="says its own formats"):
        model_contents(str(path), "Q8_0")


def test_the_command_prints_layers(tmp_path, command):
    path = tmp_path / "model.gguf"
    sizes = write_gguf(path, dense_layers=1)
    _, text, _ = command("model", path)
    assert "2 MoE layers with 4 experts, 2 per token" in " ".join(text.split())
    printed = json.loads(command("model", path, "--json")[1])
    assert [layer["expert_bytes"] for layer in printed["by_layer"]] == sizes.experts
