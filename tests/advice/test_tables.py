"""Tables of devices and models against what their makers state, and names against rows."""

import re
from importlib import resources
from pathlib import Path

import pytest
import yaml
from support.logged_memory import LOGS, billed
from support.model_files import write_gguf, write_hf

from moesim.advice.devices import find, graphics_cards, processors, single_chips
from moesim.advice.machine import describe_machine
from moesim.advice.model.catalogue import named_contents
from moesim.advice.model.gguf_header import gguf_contents
from moesim.advice.model.hf_config import hf_contents
from moesim.advice.plan.memory import Job, bill_of
from moesim.advice.times.work import Setting
from moesim.traces.models import shapes

MIB = 1024**2
GIB = 1024**3


def rows_of(name, key):
    folder = resources.files("moesim.advice").joinpath("data")
    groups = yaml.safe_load(folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    return [(group, row) for group in groups for row in group[key]]


@pytest.mark.parametrize("file", ["cpus", "gpus", "socs"])
def test_every_row_names_its_source_and_date(file):
    for group, row in rows_of(file, file):
        assert group["source"], row["name"]
        assert re.fullmatch(r"20\d\d-\d\d", group["date"]), row["name"]


def test_every_shape_names_its_source_and_when_it_was_read():
    """None is recalled, and none is without the month in which somebody looked."""
    for name, row in shapes().items():
        assert re.search(r"read 20\d\d-\d\d", row["source"]), name
        assert "recalled" not in row["source"], name


@pytest.mark.parametrize("name", shapes())
def test_weights_sum_to_the_published_total(name):
    model = named_contents(name)
    weights = sum(each.dense_weights + each.expert_weights for each in model.layers)
    weights += (1 if model.tied else 2) * model.head_weights
    assert weights / 1e9 == pytest.approx(shapes()[name]["total_b"], rel=0.012)


@pytest.mark.parametrize(("kind", "digits"), [("cpus", 3), ("gpus", 2)])
def test_no_alias_has_a_number_of_its_own(kind, digits):
    """An alias is another spelling or a twin without graphics or overclocking: a number
    of its own needs a row of its own.
    """
    number = re.compile(rf"(?<![a-z\d])\d{{{digits},}}")
    for _, row in rows_of(kind, kind):
        for alias in row.get("also", ()):
            own = number.findall(alias)
            assert not own or own[0] == number.findall(row["name"])[0], alias


CHECKED = yaml.safe_load(
    Path(__file__).with_name("checked_devices.yaml").read_text(encoding="utf-8")
)
UNITS = {"flops": 1e12, "bytes_per_s": 1e9, "link_bytes_per_s": 1e9, "base_hz": 1e9}
NO_FIGURES = {"name", "page"}


@pytest.mark.parametrize("kind", CHECKED)
def test_devices_are_those_of_their_pages(kind):
    """None is answered with a neighbour's figures."""
    chips = {name: chip.graphics for name, chip in single_chips().items()}
    table = {"processors": processors(), "cards": graphics_cards(), "chips": chips}
    for row in CHECKED[kind]:
        device = find(row["name"], table[kind])
        stated = {key: row[key] * UNITS.get(key, 1) for key in row.keys() - NO_FIGURES}
        found = {key: getattr(device, key) for key in stated}
        assert found == pytest.approx(stated, rel=0.005), row["name"]


def test_chips_follow_their_own_rule():
    """Shader rates: cores x 256 x clock. A chip's successor gains tens of per cent."""
    chips = single_chips()
    for older, newer in (("M4", "M5"), ("M4 Pro", "M5 Pro"), ("M4 Max", "M5 Max")):
        ratio = chips[newer].graphics.flops / chips[older].graphics.flops
        assert 0.8 < ratio < 1.5
    nano = chips["Jetson Orin Nano"]
    assert nano.bytes_per_s == pytest.approx(68.3e9)


# Keys and values of one token in half precision: 2 x key heads x head size x 2 bytes x
# layers; for latent attention (rank + rope) x 2 x layers. From the configurations that
# the makers publish.
KEYS_AND_VALUES = {
    "mixtral-8x7b": 32 * 2 * 8 * 128 * 2,
    "phi-3.5-moe": 32 * 2 * 8 * 128 * 2,
    "qwen3-30b-a3b": 48 * 2 * 4 * 128 * 2,
    "qwen2-57b-a14b": 28 * 2 * 4 * 128 * 2,
    "qwen1.5-moe-a2.7b": 24 * 2 * 16 * 128 * 2,
    "olmoe-1b-7b": 16 * 2 * 16 * 128 * 2,
    "deepseek-v2-lite": 27 * (512 + 64) * 2,
    "deepseek-v2": 60 * (512 + 64) * 2,
    "deepseek-v3": 61 * (512 + 64) * 2,
    "kimi-k2": 61 * (512 + 64) * 2,
    "glm-4.7-flash": 47 * (512 + 64) * 2,
    "deepseek-moe-16b": 28 * 2 * 16 * 128 * 2,
    "glm-4.5-air": 46 * 2 * 8 * 128 * 2,
    "glm-4.5": 92 * 2 * 8 * 128 * 2,
    "qwen3-235b-a22b": 94 * 2 * 4 * 128 * 2,
    "qwen3-coder-480b-a35b": 62 * 2 * 8 * 128 * 2,
    "qwen3-next-80b-a3b": 12 * 2 * 2 * 256 * 2,
    "qwen3.6-35b-a3b": 10 * 2 * 2 * 256 * 2,
    "mixtral-8x22b": 56 * 2 * 8 * 128 * 2,
    "minimax-m2": 62 * 2 * 8 * 128 * 2,
    "hunyuan-a13b": 32 * 2 * 8 * 128 * 2,
}


@pytest.mark.parametrize("name", KEYS_AND_VALUES)
def test_keys_and_values_are_those_of_the_configuration(name):
    """Cards share them out, whatever their number."""
    machine = describe_machine(cpu="Xeon Gold 6248", gpu="2x RTX A6000")
    model = named_contents(name)
    states = sum(layer.state_bytes for layer in model.layers)
    for tokens in (1024, 8192):
        bill = bill_of(model, machine, Setting(), Job(context=tokens))
        kept = bill.gpu["keys and values"] - states
        assert kept == pytest.approx(KEYS_AND_VALUES[name] * tokens, rel=0.02)


@pytest.mark.parametrize(
    ("name", "micro_batch", "cells"),
    [
        ("gpt-oss-20b", 512, 768),
        ("gpt-oss-20b", 64, 256),
        ("gemma-4-26b-a4b", 512, 1536),
    ],
)
def test_windows_keep_their_micro_batch_too(name, micro_batch, cells):
    """As many entries as llama.cpp logs for these windows of 128 and 1,024 tokens."""
    model = named_contents(name)
    windowed = model.columns["window_tokens"] > 0
    entries = model.columns["kv_bytes_per_token"][windowed]
    kept = model.kv_cache_bytes(8192, micro_batch)[windowed]
    assert kept.tolist() == (cells * entries).tolist()
    short = model.kv_cache_bytes(100, micro_batch)[windowed]
    assert short.tolist() == (100 * entries).tolist()
    assert windowed.any()


MOST_OFF = {"kept": 0.02, "state": 0.02, "computing": 0.15}


@pytest.mark.parametrize(
    "log",
    LOGS,
    ids=lambda log: f"{log['model']}-{log['context']}-{log.get('micro_batch', 512)}",
)
def test_memory_is_what_engines_logged(log):
    """Keys and values within 2 %, windows with their micro-batch; buffers within 15 %."""
    bill = billed(log)
    for item, most in MOST_OFF.items():
        if item in log:
            assert bill[item] == pytest.approx(log[item], rel=most), item


@pytest.mark.parametrize("label", ["F16", "MXFP4", "Q4_K_M", "UD-Q8_K_XL"])
def test_experts_of_gpt_oss_stay_as_trained(label):
    """Files called F16 keep 4.25 bits in the experts: 65 GB, not 234."""
    model = named_contents("gpt-oss-120b", label)
    assert set(model.expert_formats) == {"mxfp4"}
    assert model.file_bytes < 70e9


DOWNLOADED = "UD-Q2_K_XL Q6_K_XL Q2_K_L UD-IQ2_XXS Q3_K_XL UD-Q5_K_XL Q8_K_XL"


@pytest.mark.parametrize("label", DOWNLOADED.split())
def test_labels_that_people_download_are_known(label):
    model = named_contents("qwen3-30b-a3b", label)
    bits = 8 * model.expert_bytes / sum(each.expert_weights for each in model.layers)
    stated = int(re.search(r"Q(\d)", label).group(1))
    assert stated - 0.2 < bits < stated + 2.5


def test_every_nth_layer_has_full_attention_where_the_configuration_says_so(tmp_path):
    recurrent = {f"linear_{part}_heads": 4 for part in ("num_key", "num_value")}
    recurrent |= {f"linear_{part}_head_dim": 64 for part in ("key", "value")}
    sizes = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4, **recurrent}
    write_hf(tmp_path / "hybrid", layers=8, **sizes)
    model = hf_contents(tmp_path / "hybrid")
    full = [at for at, each in enumerate(model.layers) if each.kv_bytes_per_token]
    assert full == [3, 7]


def latent_file(path, **metadata):
    """DeepSeek-V2-Lite's attention: 16 heads, keys of 192, values of 128, rank 512."""
    write_gguf(path, architecture="deepseek2", **metadata)
    return gguf_contents(path)


OLD = {
    "attention.head_count": 16,
    "attention.head_count_kv": 16,
    "attention.key_length": 192,
    "attention.value_length": 128,
    "attention.kv_lora_rank": 512,
    "rope.dimension_count": 64,
}
NEW = OLD | {
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
}


@pytest.mark.parametrize(
    ("metadata", "entry"), [(OLD, 16 * (192 + 128) * 2), (NEW, (512 + 64) * 2)]
)
def test_latent_attention_depends_on_the_age_of_the_file(tmp_path, metadata, entry):
    """Files without `key_length_mla` run as plain attention: 2,160 MiB at 8,192 tokens
    and 27 layers where newer ones keep 243.
    """
    model = latent_file(tmp_path / "m.gguf", **metadata)
    assert {layer.kv_bytes_per_token for layer in model.layers} == {entry}
    assert 27 * entry * 8192 / MIB == pytest.approx(2160 if metadata is OLD else 243)
    assert all((layer.latent_values > 0) == (metadata is NEW) for layer in model.layers)
