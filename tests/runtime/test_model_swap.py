"""A model whose experts are ours answers like the library's own model.

Seven architectures, tiny and random: weights with a spread that makes every expert
matter, biases that are not zero.
"""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from support.families import SOME, VOCABULARY, Swapped, make_checkpoint
from torch.nn import functional
from transformers import AutoModelForCausalLM

from moesim.base.errors import StoreError
from moesim.runtime.models.checkpoint import tensor_bytes
from moesim.runtime.models.expert_layout import (
    ALPHA_SWIGLU,
    MODULE_GATING,
    UNUSED,
    ExpertWeights,
    Gating,
    expert_forward,
    group_tokens,
    pack_layout,
    swiglu_layout,
)
from moesim.runtime.models.gates import offloadable_blocks
from moesim.runtime.models.offloaded import OffloadedModel, StoreExperts
from moesim.runtime.store.build import CheckpointSource, build_store


@pytest.fixture(scope="module", params=SOME)
def swapped(request, tmp_path_factory):
    made = Swapped(request.param, tmp_path_factory.mktemp("swapped"))
    yield made
    made.store.close()


def test_expert_weights_never_enter_the_module(swapped):
    blocks = offloadable_blocks(swapped.plain)
    assert [block.name for block in swapped.offloaded.blocks] == [
        block.name for block in blocks
    ]
    for block in swapped.offloaded.blocks:
        experts = swapped.offloaded.model.get_submodule(f"{block.name}.experts")
        assert experts is block.experts
        assert list(experts.parameters()) == []
        assert list(experts.buffers()) == []
    routed = sum(tensor_bytes(block.experts) for block in blocks)
    assert swapped.offloaded.dense_bytes == tensor_bytes(swapped.plain) - routed
    parameters = swapped.offloaded.model.parameters()
    assert {parameter.device.type for parameter in parameters} == {"cpu"}


# -- layouts ---------------------------------------------------------------------------


def test_a_gating_that_nobody_has_a_name_for_is_the_models_own(tmp_path, monkeypatch):
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    def strange(_self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.sin(gate) * up

    monkeypatch.setattr(MixtralExperts, "_apply_gate", strange)
    directory = make_checkpoint("mixtral", tmp_path / "m")
    # The library's eager forward of Mixtral does not ask `_apply_gate`; its grouped one
    # does.
    plain = AutoModelForCausalLM.from_pretrained(
        directory, experts_implementation="batched_mm"
    ).eval()
    with build_store(directory, tmp_path / "s") as store:
        assert store.layout(0).gating.act == MODULE_GATING
        ours = OffloadedModel.load(directory)
        ours.handler = StoreExperts(store, ours.gatings)
        tokens = torch.arange(9)[None]
        with torch.inference_mode():
            expected = plain(tokens).logits
            assert torch.allclose(ours.model(tokens).logits, expected, atol=1e-5)


def test_swiglu_by_hand():
    """H = 1, F = 1: down * silu(gate x) * up x, with gate 1, up 2, down 3 at x = 2."""
    layout = swiglu_layout(1, 1, torch.float32)
    weights = ExpertWeights(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]]))
    expected = 3 * (2 / (1 + np.exp(-2))) * 4
    assert float(
        expert_forward(weights, torch.tensor([[2.0]]), layout)
    ) == pytest.approx(expected)


def test_biased_transposed_clamped_expert_by_hand():
    """Interleaved gate 9 and up -9 clamp to 7 and -7: (-7 + 1) * 7 * sigmoid(1.7 * 7) *
    2 + 0.5.
    """
    gating = Gating(ALPHA_SWIGLU, interleaved=True, limit=7.0, alpha=1.7)
    shapes = {"gate_up_proj": (1, 2), "down_proj": (1, 1)}
    shapes |= {"gate_up_proj_bias": (2,), "down_proj_bias": (1,)}
    layout = pack_layout(shapes, dtype=torch.float32, transposed=True, gating=gating)
    numbers = ([[4.0, -4.0]], [[2.0]], [1.0, -1.0], [0.5])
    weights = ExpertWeights(*map(torch.tensor, numbers))
    expected = -6 * 7 / (1 + np.exp(-1.7 * 7)) * 2 + 0.5
    assert float(
        expert_forward(weights, torch.tensor([[2.0]]), layout)
    ) == pytest.approx(expected)


def test_an_expert_without_a_gate_is_two_products_and_an_activation():
    gating = Gating("relu2", gated=False)
    layout = pack_layout(
        {"up_proj": (6, 4), "down_proj": (4, 6)},
        dtype=torch.float32,
        transposed=False,
        gating=gating,
    )
    draws = torch.Generator().manual_seed(0)
    up, down, hidden = (
        torch.randn(*shape, generator=draws) for shape in ((6, 4), (4, 6), (3, 4))
    )
    expected = functional.relu(hidden @ up.T) ** 2 @ down.T
    assert torch.allclose(
        expert_forward(ExpertWeights(up, down), hidden, layout), expected
    )


def test_tensors_of_a_record_are_disjoint_and_on_cache_lines():
    """gpt-oss's four tensors in bfloat16: 2 * 5 * 6 = 60 bytes, then 30, 12 and 10,
    each on the next 64.
    """
    shapes = {"gate_up_proj": (5, 6), "down_proj": (3, 5)}
    shapes |= {"gate_up_proj_bias": (6,), "down_proj_bias": (5,)}
    layout = pack_layout(shapes, dtype=torch.bfloat16, transposed=True, gating=Gating())
    assert [spec.offset_bytes for spec in layout.tensors] == [0, 64, 128, 192]
    assert layout.expert_bytes == 192 + 10
    record = torch.zeros(256, dtype=torch.uint8)
    for view in layout.views(record):
        view.fill_(1.0)
    # Bfloat16 1.0 is 0x3f80: both bytes set.
    assert int((record != 0).sum()) == 60 + 30 + 12 + 10


# -- grouping and combining ------------------------------------------------------------


def test_pairs_are_grouped_by_expert_in_token_order():
    groups = group_tokens(np.array([[5, 2], [2, 7], [7, 5]]))
    assert groups.experts.tolist() == [2, 5, 7]
    assert groups.tokens.tolist() == [2, 2, 2]
    assert groups.starts.tolist() == [0, 2, 4, 6]
    assert groups.pairs.tolist() == [1, 2, 0, 5, 3, 4]


def test_places_left_unused_belong_to_nobody():
    groups = group_tokens(np.array([[UNUSED, 3], [3, UNUSED]], dtype=np.uint16))
    assert (groups.experts.tolist(), groups.pairs.tolist()) == ([3], [1, 2])


# -- what does not belong together -----------------------------------------------------


def test_a_store_belongs_to_one_checkpoint(tmp_path):
    """Same architecture, same shapes, one weight changed: another model."""
    first = make_checkpoint("olmoe", tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(first)
    with torch.no_grad():
        model.model.embed_tokens.weight += 1
    model.save_pretrained(tmp_path / "second")
    with build_store(first, tmp_path / "s") as store:
        OffloadedModel.load(first).check_store(store)
        with pytest.raises(
            StoreError, match=r"found those of first \(another model or version\)"
        ):
            OffloadedModel.load(tmp_path / "second").check_store(store)


# -- what cannot be offloaded ----------------------------------------------------------


def configured(**changes):
    """Change a checkpoint's configuration."""

    def spoil(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return spoil


def a_dense_model(folder):
    widths = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**widths, **counts)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def experts_of_one_layer_lost(folder):
    weights = folder / "model.safetensors"
    with safe_open(weights, framework="pt") as file:
        tensors = {
            key: file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118
            if ".layers.1.mlp.experts." not in key
        }
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(("opened", "spoil", "message"), [
    (CheckpointSource, a_dense_model, "^LlamaFor.* expected MoE layers .* found none"),
    (OffloadedModel.load, a_dense_model, "expected MoE layers"),
    (OffloadedModel.load, lambda folder: (folder / "config.json").unlink(),
     r"expected a Hugging Face model directory with config\.json"),
    (OffloadedModel.load, configured(model_type="nothing"), "not a causal language"),
    (CheckpointSource, configured(quantization_config={"quant_method": "mxfp4"}),
     "expected float weights, found a quantised checkpoint"),
    (CheckpointSource, experts_of_one_layer_lost,
     r"layers\.1\.mlp\.experts\.down_proj: no tensor in the checkpoint feeds it"),
    (CheckpointSource,
     lambda folder: (folder / "model.safetensors").write_bytes(b"\x00" * 64),
     r"model\.safetensors: not a safetensors file"),
    (CheckpointSource, lambda folder: (folder / "model.safetensors").unlink(),
     r"expected model\.safetensors or"),
])  # fmt: skip
def test_what_cannot_be_offloaded_is_refused_in_one_line(
    tmp_path, opened, spoil, message
):
    folder = make_checkpoint("olmoe", tmp_path / "m")
    spoil(folder)
    with pytest.raises(StoreError, match=message):
        opened(folder)
