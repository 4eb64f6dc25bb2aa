"""The shipped model has learned its text and its gates; its making is honest about what
was held out.
"""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from support.processes import output_of

torch = pytest.importorskip("torch", reason="the runtime extra is not installed")

from benchmarks import train_tiny as training  # noqa: E402 - needs torch
from moesim.runtime import text as corpus  # noqa: E402 - needs torch
from moesim.runtime.models import local_model as tiny  # noqa: E402 - needs torch

WINDOWED_NATS = (
    1.215  # of the shipped checkpoint on these windows of Python 3.11.7's library
)
WINDOWS = 20  # of 384 bytes: a few KB of text, measured in a second or two


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Compute on one thread: two that wait for each other crawl when tests share the
    cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recorded():
    """Read what the training wrote down."""
    return json.loads((tiny.tiny_dir() / "training.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model():
    return tiny.load_model("tiny").model


@pytest.fixture(scope="module")
def held(model):
    return training.held_out(model, WINDOWS)


def unigram_nats_per_byte(text: bytes) -> float:
    """Return the entropy of single bytes: what a model without any context could reach
    at best.
    """
    return -sum(n / len(text) * math.log(n / len(text)) for n in Counter(text).values())


# --- corpus


def test_a_file_is_in_exactly_one_part():
    parts = [set(corpus.files(part)) for part in corpus.PARTS]
    assert all(parts)
    assert len(set.union(*parts)) == sum(len(part) for part in parts)


def test_the_name_alone_decides_the_part():
    """Frozen, because a checkpoint trained under another deal has seen the evaluation
    text.
    """
    assert corpus.split_of("json/decoder.py") == "training"
    assert corpus.split_of("collections/abc.py") == "calibration"
    assert corpus.split_of("csv.py") == "evaluation"
    for part in corpus.PARTS:
        assert {corpus.split_of(name) for name in corpus.files(part)} == {part}


def test_generated_tested_and_installed_files_are_left_out():
    names = [name for part in corpus.PARTS for name in corpus.files(part)]
    assert not [
        name
        for name in names
        if "site-packages" in name or "/test" in name or "_sysconfigdata" in name
    ]
    assert not [name for name in names if Path(name).is_absolute()]


def test_reading_stops_at_the_limit():
    whole = training.load_bytes("evaluation")
    assert training.load_bytes("evaluation", 1000) == whole[:1000]
    assert training.load_bytes("evaluation", 0) == b""
    with pytest.raises(ValueError, match="limit_bytes: expected >= 0, got -1"):
        training.load_bytes("evaluation", -1)


def test_prompts_repeat_with_their_seed_and_start_a_line():
    drawn = corpus.prompts("evaluation", 5, 200, seed=3)
    assert drawn == corpus.prompts("evaluation", 5, 200, seed=3)
    assert drawn != corpus.prompts("evaluation", 5, 200, seed=4)
    assert [len(prompt) for prompt in drawn] == [200] * 5
    text = b"\n" + training.load_bytes("evaluation")
    assert all(b"\n" + prompt in text for prompt in drawn)


def test_fewer_prompts_are_the_first_of_more():
    few, many = (corpus.prompts("evaluation", n, 100, seed=1) for n in (3, 500))
    assert few == many[:3]


def test_prompts_longer_than_any_file_are_refused():
    with pytest.raises(ValueError, match="ask for shorter prompts"):
        corpus.prompts("evaluation", 1, 10**9, seed=0)


def test_an_unknown_part_is_named():
    with pytest.raises(
        ValueError,
        match="unknown corpus part 'test'; known: calibration, training, evaluation",
    ):
        corpus.files("test")


def test_digests_name_different_texts_differently():
    assert len({training.digest(part) for part in corpus.PARTS}) == len(corpus.PARTS)


def test_the_corpus_does_not_import_torch():
    output_of("-c", "import sys, moesim.runtime.text; sys.exit('torch' in sys.modules)")


# --- the shipped checkpoint


def test_the_shipped_checkpoint_is_small(recorded):
    assert (tiny.tiny_dir() / "model.safetensors").stat().st_size <= 10 * 2**20
    assert 4e6 <= recorded["parameters"] <= 5e6
    assert recorded["finished"]


def test_the_shipped_model_is_the_one_described(model, recorded):
    config = model.config
    assert (config.num_hidden_layers, config.num_experts) == (6, 32)
    assert config.num_experts_per_tok == 4
    assert config.norm_topk_prob
    assert model.num_parameters() == recorded["parameters"]
    assert not model.training


def test_held_out_loss_is_the_recorded_one(held, recorded):
    """Few windows and another library version move it, but not far."""
    if recorded["corpus"]["evaluation"]["digest"] == training.digest("evaluation"):
        assert held.nats_per_byte == pytest.approx(WINDOWED_NATS, abs=0.01)
    assert held.nats_per_byte == pytest.approx(
        recorded["held_out"]["nats_per_byte"], abs=0.35
    )


def test_held_out_loss_beats_any_model_without_context(held):
    unigram = unigram_nats_per_byte(training.load_bytes("evaluation"))
    assert unigram < math.log(256)
    assert held.nats_per_byte < 0.65 * unigram


def test_neighbouring_tokens_share_experts_more_than_by_chance(held, recorded):
    chance = recorded["adjacent_overlap_by_chance"]
    assert chance == 4 / 32
    assert min(held.adjacent_overlap) > 1.2 * chance
    assert min(recorded["adjacent_overlap"]) > 1.2 * chance


def test_no_layer_has_collapsed_onto_a_few_experts(held):
    """A layer that always chose the same four would give each a share of 1/4; equal use
    gives 1/32.
    """
    assert max(held.busiest_expert_share) < 0.15


# --- training


def test_training_lowers_the_loss_and_writes_a_loadable_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CURVE_STEPS", 1)
    monkeypatch.setattr(training, "HELD_OUT_WINDOWS", 4)
    monkeypatch.setattr(
        training, "RECIPE", training.Recipe(batch=2, window_bytes=128, warmup_steps=1)
    )
    out = tmp_path / "models" / "mine"
    seen = []
    facts = training.train_tiny(out, 60, seed=5, progress=seen.append, max_steps=4)

    assert [point.step for point in seen] == [1, 2, 3, 4]
    assert seen[0].train_nats_per_byte == pytest.approx(math.log(256), abs=0.5)
    assert seen[-1].train_nats_per_byte < seen[0].train_nats_per_byte - 0.3
    assert facts["steps"] == 4
    assert facts["finished"]
    assert (
        facts["command"]
        == "benchmarks.train_tiny.train_tiny(out_dir, minutes=60, seed=5, max_steps=4)"
    )
    assert facts["corpus"]["training"]["digest"] == training.digest("training")
    assert json.loads((out / "training.json").read_text()) == json.loads(
        json.dumps(facts)
    )
    # Nothing left beside it.
    assert [path.name for path in out.parent.iterdir()] == ["mine"]
    assert str(tmp_path) not in (out / "training.json").read_text()

    again = training.held_out(tiny.load_weights(out, "float32").eval(), 4)
    assert again.nats_per_byte == pytest.approx(
        facts["held_out"]["nats_per_byte"], abs=1e-3
    )

    repeated = training.train_tiny(out, 1, seed=5, max_steps=4)  # replaces the folder
    losses = [point.train_nats_per_byte for point in repeated["curve"]]
    assert losses == pytest.approx(
        [point.train_nats_per_byte for point in seen], abs=2e-3
    )


def test_experts_split_by_token_compute_what_transformers_computes(model):
    """The fast path of the training against Hugging Face's eager loop."""
    experts = model.model.layers[0].mlp.experts
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 128, generator=draws)
    weights, index = torch.randn(40, 32, generator=draws).softmax(-1).topk(4)
    expected = torch.zeros_like(hidden)
    for token in range(40):
        for expert, weight in zip(index[token], weights[token], strict=True):
            gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            expected[token] += weight * (
                experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            )
    torch.testing.assert_close(
        training._split_experts(experts, hidden, index, weights), expected
    )
