"""The joint between gate and experts is found and understood in any Hugging Face MoE
model.
"""

import itertools

import pytest
import torch
from support.families import GATES, family
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from moesim.base.errors import TraceError
from moesim.runtime.models.checkpoint import weights_digest
from moesim.runtime.models.gates import best_first, find_blocks, gate_facts, read_gate
from moesim.runtime.models.local_model import load_model, model_shape


@pytest.mark.parametrize("name", GATES)
def test_gates_are_understood_without_code_per_model(name):
    """Scoring, renormalisation and K are measured at the gate; a rule of its own
    (sparsemixer) is admitted.
    """
    kind = GATES[name]
    local = family(name)
    facts = gate_facts(local.model, find_blocks(local.model))
    assert (facts.top_k, facts.norm_topk) == (kind.top_k, kind.norm_topk)
    assert (facts.scoring, facts.assumed) == (
        (kind.scoring, ()) if kind.scoring else ("softmax", ("scoring",))
    )
    assert not facts.already_scored


@pytest.mark.parametrize("name", GATES)
def test_the_shape_counts_every_byte_once(name):
    """An expert is three H x F matrices (and gpt-oss's biases) of 4 bytes; the rest is
    everything else.
    """
    kind = GATES[name]
    local = family(name)
    shape = model_shape(local.model, name)
    layers = 3 - len(kind.dense_layers)
    assert shape.expert_bytes == (4 * kind.expert_parameters,) * layers
    assert (shape.layers, shape.experts) == (layers, 8)
    assert (shape.hidden, shape.expert_intermediate) == (32, 16)
    for fact in ("dense_layers", "shared_experts", "shared_intermediate"):
        assert getattr(shape, fact) == getattr(kind, fact)
    assert (shape.dtype, shape.vocab) == ("fp32", 256)
    state = {
        tensor.data_ptr(): tensor.nbytes
        for tensor in (*local.model.parameters(), *local.model.buffers())
    }
    assert shape.other_bytes + 8 * sum(shape.expert_bytes) == sum(state.values())


@pytest.mark.parametrize(("name", "kept"), [
    # Latents of 16 values and 8 with positions; a window of 8 in every second layer;
    # a recurrence in the first of every two.
    ("mixtral", (0, 0, 0)),
    ("deepseek_v3", (24, 0, 0)),
    ("gpt_oss", (0, 8, 2)),
    ("qwen3_next", (0, 0, 2)),
])  # fmt: skip
def test_the_shape_says_what_layers_keep_of_a_token(name, kept):
    shape = model_shape(family(name).model, name)
    assert (shape.kv_values, shape.window_tokens, shape.windowed_layers) == kept


def test_gate_outputs_are_read_by_meaning_in_any_order():
    """T=5, E=8, K=2: whatever the order of (logits, weights, ids), each is
    recognised.
    """
    parts = (torch.randn(5, 8), torch.rand(5, 2), torch.randint(8, (5, 2)))
    for order in itertools.permutations(parts):
        for read, part in zip(read_gate(order, 8), parts, strict=True):
            assert torch.equal(read, part)
    logits, weights, index = read_gate(parts[0].view(1, 5, 8), 8)
    assert logits.shape == (5, 8)
    assert weights is None
    assert index is None


def test_a_gate_that_already_scored_is_not_softmaxed_again(monkeypatch):
    """Some versions of the library return probabilities where others return logits."""
    local = family("qwen2_moe")
    blocks = find_blocks(local.model)
    gate = blocks[-1].gate
    original = gate.forward

    def scored(hidden):
        logits, *rest = original(hidden)
        return (logits.softmax(-1), *rest)

    monkeypatch.setattr(gate, "forward", scored)
    facts = gate_facts(local.model, blocks)
    assert (facts.scoring, facts.already_scored) == ("softmax", True)
    assert facts.norm_topk is False
    probabilities = scored(torch.randn(4, 32))[0]
    assert torch.equal(facts.scores(probabilities), probabilities)


def test_a_gate_that_cannot_be_asked_leaves_stated_assumptions():
    """Weights that are not there (a model laid out on the meta device) are not guessed
    at silently.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family("olmoe").model.config)
    facts = gate_facts(model, find_blocks(model))
    assert (facts.top_k, facts.norm_topk) == (4, False)
    assert facts.assumed == ("scoring", "norm_topk")


def test_best_first_goes_by_the_gate_and_keeps_the_order_of_ties():
    """Ids 3, 0, 1 with logits 1, 2, 2: first 0, then 1 (a tie, in the order given),
    then 3.
    """
    index = torch.tensor([[3, 0, 1]])
    logits = torch.tensor([[2.0, 2.0, 9.0, 1.0]])
    experts, weights = best_first(index, torch.tensor([[0.1, 0.2, 0.3]]), logits)
    assert experts.tolist() == [[0, 1, 3]]
    assert weights.tolist() == [
        [pytest.approx(0.2), pytest.approx(0.3), pytest.approx(0.1)]
    ]
    experts, _ = best_first(index, torch.tensor([[0.1, 0.2, 0.3]]), None)
    assert experts.tolist() == [[1, 0, 3]]


def test_a_directory_without_tokenizer_reads_bytes(tmp_path):
    """What was saved is what is loaded, and text becomes its UTF-8 bytes."""
    family("mixtral").model.save_pretrained(tmp_path / "bytes")
    local = load_model(tmp_path / "bytes")
    assert local.name == "bytes"
    assert local.encode("é!") == local.encode("é!".encode()) == [0xC3, 0xA9, 0x21]
    assert weights_digest(local.model) == weights_digest(family("mixtral").model)


def test_a_directory_with_tokenizer_uses_it(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(
        models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(
        tmp_path
    )
    family("mixtral").model.save_pretrained(tmp_path)
    assert load_model(tmp_path).encode("world hello moon") == [2, 1, 0]


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(TraceError, match="expected a Hugging Face model directory"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(TraceError, match="not a loadable causal language model"):
        load_model(tmp_path)


def test_the_weights_digest_sees_one_changed_number():
    local = family("phimoe")
    before = weights_digest(local.model)
    weight = find_blocks(local.model)[1].gate.weight
    kept = weight[0, 0].item()
    with torch.no_grad():
        weight[0, 0] = kept + 1
        assert weights_digest(local.model) != before
        weight[0, 0] = kept
    assert weights_digest(local.model) == before
