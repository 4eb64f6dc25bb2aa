"""Sizes of memories that nobody stated: what a card leaves, by hand; sizes and formats
as people write them; machines with all their parts.
"""

import pytest
from support.command_line import refused

import moesim
from moesim.hwprofiles.dense_costs import DenseSizes
from moesim.hwprofiles.profile import load_profile
from moesim.policies.systems import compose
from moesim.runs.config import MemoryOptions, RunConfig
from moesim.runs.memory import (
    kept_bytes,
    of_all_cards,
    plan_memory,
    workspace_bytes,
)
from moesim.runs.setup import Setup
from moesim.traces.format.schema import TraceHeader
from moesim.traces.models import model_shape
from moesim.traces.weight_formats import bytes_per_weight

GIB = 1 << 30
CARD = "rtx4060ti"
MODEL = "qwen3-30b-a3b"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen") / "q.parquet"
    moesim.synth(path, tokens=6, shape=MODEL, quant="q4_k_m")
    return path


def setup_of(trace, policy="greedy", **options):
    config = RunConfig.of(trace, policy, **{"hw": CARD, **options})
    return Setup.of(config, moesim.open_trace(trace))


# What the card leaves.


def test_keys_and_values_by_hand():
    """48 layers, 4 heads of 128 for keys and 4 for values, 2 bytes each: 96 KiB."""
    assert kept_bytes(model_shape(MODEL), 1) == 48 * 2 * 4 * 128 * 2 == 96 * 1024


@pytest.mark.parametrize(("name", "context_bytes"), [
    # One latent of 512 + 64 values in each of 27 layers, 61 of V3.
    ("deepseek-v2-lite", 27 * 576 * 2 * 4096),
    ("deepseek-v3", 61 * 576 * 2 * 4096),
    # Half of 24 layers see 128 tokens.
    ("gpt-oss-20b", 12 * 2 * 8 * 64 * 2 * (4096 + 128)),
    # Every fourth of 48 layers has attention, the others a recurrence.
    ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2 * 4096),
    # Five of 30 layers see everything, with fewer and wider heads.
    ("gemma-4-26b-a4b", 2 * (5 * 2 * 2 * 512 * 4096 + 25 * 2 * 8 * 256 * 1024)),
    ("kimi-linear-48b-a3b", 7 * 576 * 2 * 4096),
])  # fmt: skip
def test_layers_keep_what_their_attention_looks_back_at(name, context_bytes):
    """Latents, windows and recurrences kept keys and values of full width; what a step
    reads are those of the mean layer.
    """
    shape = model_shape(name)
    assert kept_bytes(shape, 4096) == context_bytes
    kept = DenseSizes.of(shape).kept
    assert kept.bytes(4096) * shape.all_layers == pytest.approx(context_bytes)
    header = TraceHeader(shape).to_json()
    assert TraceHeader.from_json(header, where="a test").shape == shape


def test_workspace_is_a_driver_and_the_outputs_of_512_tokens():
    shape = model_shape(MODEL)
    assert workspace_bytes(shape) == shape.vocab * 512 * 4 + 450 * 2**20


def test_the_default_cache_is_what_the_card_leaves(qwen):
    setup = setup_of(qwen, context_tokens=4096)
    shape = setup.shape
    rest = (
        4096 * 96 * 1024
        + workspace_bytes(shape)
        + shape.other_bytes
        + 2 * shape.max_expert_bytes
    )
    left = 16 * GIB - rest
    cached = setup.memory.gpu.total_bytes
    # Within one expert in each of the layers, which all get as many slots.
    assert left - shape.layers * shape.max_expert_bytes < cached <= left
    bill = setup.gpu_bill()
    assert list(bill) == [
        "cache",
        "staging",
        "dense weights",
        "keys and values",
        "workspace",
    ]
    assert bill["keys and values"] == 4096 * 96 * 1024
    assert 0 <= 16 * GIB - sum(bill.values()) < shape.layers * shape.max_expert_bytes


def test_a_longer_context_and_a_batch_leave_less(qwen):
    caches = [
        setup_of(qwen, **options).memory.gpu.total_bytes
        for options in ({}, {"context_tokens": 32_768}, {"batch": 4})
    ]
    assert caches[0] > caches[1] == caches[2]


def test_a_stated_size_is_shared_by_staging_other_weights_and_experts():
    """Room for two staged experts, and for ten more: three slots in each layer."""
    shape = model_shape("layers=3,experts=8,top_k=2,expert_bytes=1MiB")
    room = shape.other_bytes + (2 + 10) * (1 << 20)
    sizes = MemoryOptions(gpu_memory_bytes=room, staging=2)
    plan = plan_memory(sizes, shape, load_profile(CARD), compose("greedy"))
    assert plan.gpu.slots.tolist() == [3, 3, 3]


def test_a_stated_size_is_for_weights_alone(qwen):
    """So a series of sizes compares caches, whatever the context."""
    one, other = (
        setup_of(qwen, gpu_memory="8GiB", context_tokens=context)
        for context in (1024, 65_536)
    )
    assert one.memory.gpu.total_bytes == other.memory.gpu.total_bytes
    assert "keys and values" not in one.gpu_bill()


def test_a_model_that_fits_the_card_is_studied_at_a_quarter(command):
    assert setup_of("tiny").fits_card()
    code, _, err = command("replay", "tiny", "--hw", CARD, "--steps", 2)
    assert code == 0
    assert "note: the card would hold all" in err
    stated = command(
        "replay", "tiny", "--hw", CARD, "--steps", 2, "--cache-ratio", 0.25
    )
    assert "the card would hold all" not in stated[2]


def test_a_machine_without_a_card_keeps_a_quarter(qwen):
    setup = setup_of(qwen, hw="two-core-host")
    experts_bytes = sum(setup.shape.expert_bytes) * setup.shape.experts
    assert setup.memory.gpu.total_bytes == pytest.approx(experts_bytes / 4, rel=0.01)
    assert not setup.fits_card()


def test_the_bill_is_printed(command, qwen):
    code, out, err = command("replay", qwen, "--hw", CARD, "--steps", 1)
    assert code == 0
    text = " ".join(out.split())
    assert "16.0 GiB: cache 13." in text
    for item in (
        "2 staged experts 5.8 MiB",
        "dense weights 826.7 MiB",
        "keys and values of 8,192 tokens 768.0 MiB",
        "workspace 746.8 MiB",
    ):
        assert item in text
    # It was sized for the card, so nothing is to be said against it.
    assert "GPU memory" not in err


def test_a_note_about_too_much_memory_is_true(command, qwen):
    """It used to recommend --gpu-memory to somebody who had just given it."""
    _, _, err = command(
        "replay", qwen, "--hw", CARD, "--gpu-memory", "17GiB", "--steps", 1
    )
    assert "more than the card has" in err
    assert "16.0 GiB" in err
    assert "--gpu-memory" not in err


def test_host_memory_need_not_hold_what_a_gpu_keeps_for_good(qwen):
    """llama.cpp loads each tensor into one memory; LRU needs the copy that it evicts."""
    shape = model_shape(MODEL, "q4_k_m")
    experts_bytes = sum(shape.expert_bytes) * shape.experts
    # Enough for all but what 14 GiB of the card hold.
    host = experts_bytes - 12 * GIB
    for system, on_ssd in (("llama.cpp", False), ("greedy", True)):
        plan = plan_memory(
            MemoryOptions(gpu_memory_bytes=14 * GIB, host_memory_bytes=host),
            shape,
            load_profile(CARD),
            compose(system),
        )
        assert (plan.host is not None) is on_ssd


# One pool for all layers.


def test_a_pool_for_all_layers_holds_no_more_than_all_experts():
    """It was 213.1 % of all, and a front of memory and time went on growing."""
    setup = setup_of("tiny", gpu_memory="8GiB", cache_scope="global")
    assert setup.memory.gpu.total_bytes == setup.shape.routed_bytes
    config = setup.effective_config(None)
    assert config["cache_ratio"] == 1
    layered = setup_of("tiny", gpu_memory="8GiB").effective_config(None)
    assert config["cache_slots"] == [sum(layered["cache_slots"])]
    assert config["gpu_bytes"] == layered["gpu_bytes"]


@pytest.mark.parametrize("size", [{"cache_ratio": 0.5}, {"gpu_memory": "4MiB"}])
@pytest.mark.parametrize("split", ["layers", "experts"])
def test_what_two_cards_hold_is_counted_alike_in_both_scopes(size, split):
    """With one pool for all layers, one card's part was called the whole."""
    options = {"hw": "dali-2x-rtx3090", "cache": "lru", "gpu_split": split, **size}
    layered, pooled = (
        setup_of("tiny", cache_scope=scope, **options) for scope in ("layer", "global")
    )
    of_layers, of_pool = (setup.effective_config(None) for setup in (layered, pooled))
    shape = layered.shape
    expert = shape.max_expert_bytes
    # Bytes with slots per layer leave up to one expert of each layer unused.
    rounding = shape.layers * expert
    for name in ("cache_bytes", "gpu_bytes"):
        assert of_pool[name] == pytest.approx(of_layers[name], abs=rounding)
    assert of_pool["cache_slots"] == [of_pool["cache_bytes"] // expert]
    assert of_pool["cache_ratio"] == of_pool["cache_bytes"] / shape.routed_bytes
    assert pooled.memory.gpu.total_bytes * (1 + (split == "layers")) == (
        pytest.approx(of_pool["cache_bytes"], abs=1)
    )


def test_each_of_two_cards_has_room_for_all_experts_of_its_layers():
    """Seven layers: four on one card, three on the other."""
    shape = model_shape("layers=7,experts=8,top_k=2,expert_bytes=1MiB")
    plan = plan_memory(
        MemoryOptions(gpu_memory_bytes=8 * GIB, cache_scope="global"),
        shape,
        load_profile("dali-2x-rtx3090"),
        compose("greedy"),
    )
    assert plan.gpu.total_bytes == sum(shape.expert_bytes[:4]) * shape.experts
    assert of_all_cards(plan, shape, 2).total_bytes == shape.routed_bytes


# Machines.


def test_a_profile_may_be_any_file_that_is_written_as_a_path(tmp_path, monkeypatch):
    source = tmp_path / "card.toml"
    moesim.save_profile(load_profile(CARD), source)
    source.rename(tmp_path / "card")
    monkeypatch.chdir(tmp_path)
    assert load_profile("./card").name == CARD


# Sizes and formats.


def test_a_bare_number_of_gigabytes_is_asked_about(command, qwen):
    result = command("replay", qwen, "--gpu-memory", "16", "--hw", CARD)
    assert refused(result, "--gpu-memory", "16 means 16 bytes; write 16GiB")


@pytest.mark.parametrize(("label", "up", "down"), [
    ("Q4_K_M", "q4_k", "q6_k"),
    ("q5_k_m", "q5_k", "q6_k"),
    ("iq4_xs", "iq4_xs", "q5_k"),
    ("MXFP4", "mxfp4", "mxfp4"),
])  # fmt: skip
def test_labels_of_files_are_weight_formats(label, up, down):
    """Two of three matrices in one format, the third in more bits in the first layer."""
    shape = model_shape(MODEL, label)
    weights = shape.hidden * shape.expert_intermediate
    expected = weights * (2 * bytes_per_weight(up) + bytes_per_weight(down))
    assert shape.expert_bytes[0] == expected
    assert shape.dtype == label.lower()
