"""The recorder notes what a model did, nothing else and nothing more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.families import GATES, by_hand, family

from moesim.base.errors import TraceError
from moesim.base.options import ConfigError
from moesim.runtime.models.gates import find_blocks
from moesim.runtime.record.calibration import Residual, mean_drift, residual_vectors
from moesim.runtime.record.record import read_prompts, record
from moesim.traces.format.schema import TraceHeader

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = ["def double(x):", "for i", "import numpy as np"]
FIXED = {"provenance": {"date": "2026-01-01"}}
HALF = 2e-3  # 16-bit floats carry 11 bits; weights and scores here are below 4


class Witness:
    """Hooks of the test's own, written from each module's documented call:
    experts(hidden, ids, weights).
    """

    def __init__(self, local):
        self.blocks = find_blocks(local.model)
        self.ids, self.weights, self.hidden = (
            [[] for _ in self.blocks] for _ in range(3)
        )

    def __enter__(self):
        """Attach."""
        self.hooks = []
        for layer, block in enumerate(self.blocks):
            self.hooks.append(block.experts.register_forward_hook(self._experts(layer)))
            self.hooks.append(block.gate.register_forward_hook(self._gate(layer)))
        return self

    def __exit__(self, *_):
        """Detach."""
        for hook in self.hooks:
            hook.remove()

    def _experts(self, layer):
        def hook(module, args, output):
            self.ids[layer].append(args[1].numpy().copy())
            self.weights[layer].append(args[2].float().numpy().copy())

        return hook

    def _gate(self, layer):
        def hook(module, args, output):
            self.hidden[layer].append(args[0].reshape(-1, args[0].shape[-1]).clone())

        return hook

    def states(self, layer):
        """All gate inputs of a layer, [T, H]."""
        return torch.cat(self.hidden[layer])


def recording(model, out, prompts=PROMPTS, **options):
    """Record prompts with a family, or with a model, on a day that stays the same."""
    local = family(model) if isinstance(model, str) else model
    return record(local, prompts, out, **FIXED | options)


def read(path: Path, column: str, layer: int, seq: int | None = None) -> np.ndarray:
    """One column of one layer as an array [T, …]."""
    table = pq.read_table(path)
    keep = table["layer"].to_numpy() == layer
    if seq is not None:
        keep &= table["seq"].to_numpy() == seq
    return np.array(table[column].filter(keep).to_pylist())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record one prompt with each architecture, with a witness beside the recorder."""
    made = {}

    def make(name):
        if name not in made:
            path = tmp_path_factory.mktemp("record") / f"{name}.parquet"
            with Witness(family(name)) as witness:
                recording(name, path, PROMPTS[:1], new_tokens=6)
            made[name] = path, witness
        return made[name]

    return make


@pytest.mark.parametrize("name", GATES)
def test_ids_and_weights_are_those_the_experts_received(recorded, name):
    """Grouped, biased, sigmoid and sparsemixer gates included: the recorder repeats, it
    does not derive.
    """
    path, witness = recorded(name)
    for layer in range(len(witness.blocks)):
        ids = np.concatenate(witness.ids[layer])
        weights = np.concatenate(witness.weights[layer])
        assert ids.shape == (len(PROMPTS[0]) + 6, GATES[name].top_k)
        experts = read(path, "experts", layer)
        noted = read(path, "weights", layer)
        for token in range(len(ids)):
            used = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
            assert dict(
                zip(experts[token].tolist(), noted[token].tolist(), strict=True)
            ) == pytest.approx(used, abs=HALF)


@pytest.mark.parametrize("name", GATES)
def test_scores_are_the_gate_over_all_experts(recorded, name):
    """Recomputed from the gate's own weights on the hidden state that it saw."""
    path, witness = recorded(name)
    for layer, block in enumerate(witness.blocks):
        expected = by_hand(name, block.gate, witness.states(layer))
        np.testing.assert_allclose(read(path, "scores", layer), expected, atol=HALF)


@pytest.mark.parametrize(
    "name", [name for name, kind in GATES.items() if kind.scoring == "softmax"]
)
def test_experts_are_the_best_scores_best_first(recorded, name):
    """Without bias, scores at the chosen ids fall from left to right, and no other
    beats them (groups aside).
    """
    path, witness = recorded(name)
    for layer in range(len(witness.blocks)):
        scores = read(path, "scores", layer)
        experts = read(path, "experts", layer)
        chosen = np.take_along_axis(scores, experts, axis=1)
        assert (np.diff(chosen, axis=1) <= 0).all()
        if name != "deepseek_v2":
            best = np.sort(scores, axis=1)[:, ::-1][:, : chosen.shape[1]]
            np.testing.assert_array_equal(chosen, best)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "minimax_m2", "phimoe"]
)
def test_predictions_are_later_gates_asked_early(recorded, name):
    """`pred{d}_raw` of layer l is gate l+d on layer l's gate input; where there is no
    such gate, zeros.
    """
    path, witness = recorded(name)
    layers = len(witness.blocks)
    for layer in range(layers):
        for ahead in (1, 2, 3):
            column = read(path, f"pred{ahead}_raw", layer)
            if layer + ahead < layers:
                expected = by_hand(
                    name, witness.blocks[layer + ahead].gate, witness.states(layer)
                )
                np.testing.assert_allclose(column, expected, atol=HALF)
            else:
                assert not column.any()


def test_positions_phases_and_tokens_follow_the_sequence(recorded):
    """14 prompt bytes prefill positions 0-13; 6 generated tokens decode at 14-19; each
    token at every layer.
    """
    path, _ = recorded("qwen3_moe")
    table = pq.read_table(path)
    assert table["pos"].to_pylist() == [pos for pos in range(20) for _ in range(3)]
    assert table["layer"].to_pylist() == [0, 1, 2] * 20
    assert table["phase"].to_pylist() == ["prefill"] * 14 * 3 + ["decode"] * 6 * 3
    tokens = read(path, "token", 0).tolist()
    assert bytes(tokens[:14]) == PROMPTS[0].encode()
    out = family("qwen3_moe").model.generate(
        torch.tensor([tokens[:14]]),
        max_new_tokens=6,
        do_sample=False,
        attention_mask=torch.ones(1, 14),
    )
    assert out[0].tolist() == tokens


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2", "gpt_oss", "phimoe"])
def test_company_changes_nothing(tmp_path, name):
    """Alone or in a batch of three with prompts of 14, 5 and 18 bytes: same tokens and
    experts, and no pads.
    """
    tables = []
    for batch in (1, 3):
        path = tmp_path / f"{batch}.parquet"
        done = recording(name, path, new_tokens=4, batch=batch)
        tables.append(pq.read_table(done.path))
        assert done.rows == (14 + 5 + 18 + 3 * 4) * done.header.shape.layers
        for seq, prompt in enumerate(PROMPTS):
            tokens = read(done.path, "token", 0, seq).tolist()
            assert bytes(tokens[: len(prompt)]) == prompt.encode()
    for column in ("seq", "pos", "phase", "layer", "token", "experts"):
        assert tables[0][column].to_pylist() == tables[1][column].to_pylist()
    for column in ("weights", "scores", "pred1_raw"):
        alone, together = (np.array(table[column].to_pylist()) for table in tables)
        np.testing.assert_allclose(alone, together, atol=HALF)


def test_a_sequence_that_ends_leaves_the_batch(tmp_path, monkeypatch):
    """Its end token is not fed, so it is not recorded; the others go on."""
    local = family("mixtral")
    path = tmp_path / "all.parquet"
    recording(local, path, new_tokens=5)
    made = [
        read(path, "token", 0, seq).tolist()[len(prompt) :]
        for seq, prompt in enumerate(PROMPTS)
    ]
    end = made[0][2]
    lengths = [tokens.index(end) if end in tokens else 5 for tokens in made]
    assert lengths[0] < 5 == max(lengths)
    monkeypatch.setattr(local.model.generation_config, "eos_token_id", [end])
    done = recording(local, tmp_path / "ended.parquet", new_tokens=5, batch=3)
    assert done.decode_tokens == sum(lengths)
    for seq, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        tokens = read(done.path, "token", 0, seq).tolist()
        assert tokens[len(prompt) :] == made[seq][:length]


def test_drift_of_the_worked_example():
    """Two tokens, d=2: (1,0) -> (2,1) and (0,1) -> (1,2) drift by (1,1); corrected,
    h=(.2,.1) turns from e0 to e2.

    Source: DALI (arXiv 2602.03495), equations 10 and 11.
    """
    drift = mean_drift([np.array([[1, 0], [0, 1]]), np.array([[2, 1], [1, 2]])])
    assert drift.tolist() == [[1, 1], [0, 0]]
    gate = np.array([[1, -1], [0, 0.5], [-1, 2.2]])
    state = np.array([0.2, 0.1])
    assert gate @ state == pytest.approx([0.10, 0.05, 0.02])
    assert gate @ (state + drift[0]) == pytest.approx([0.10, 0.55, 1.22])
    assert np.argmax(gate @ (np.array([1, 0]) + drift[0])) == 0


def test_residuals_are_measured_saved_and_used(tmp_path):
    """Vectors are mean steps between gate inputs; `pred1_res` is the next gate on the
    corrected state.
    """
    local = family("glm4_moe")
    with Witness(local) as witness:
        residual = residual_vectors(local, ["calibrate", "me!"])
    step = witness.states(1) - witness.states(0)
    assert len(step) == residual.facts["tokens"] == 12
    np.testing.assert_allclose(
        residual.vectors, [step.mean(0).numpy(), np.zeros(32)], atol=1e-6
    )
    residual.save(tmp_path / "residual.safetensors")
    loaded = Residual.load(tmp_path / "residual.safetensors")
    assert loaded.id == residual.id
    with Witness(local) as witness:
        path = tmp_path / "r.parquet"
        done = recording(local, path, PROMPTS[:1], new_tokens=2, residual=loaded)
    corrected = witness.states(0) + torch.from_numpy(loaded.vectors[0])
    expected = by_hand("glm4_moe", witness.blocks[1].gate, corrected)
    np.testing.assert_allclose(read(done.path, "pred1_res", 0), expected, atol=HALF)
    assert not read(done.path, "pred1_res", 1).any()
    assert done.header.calibration["residual"]["id"] == residual.id


def test_a_residual_of_another_model_is_refused(tmp_path):
    residual = residual_vectors(family("mixtral"), ["abc"])
    for other, message in (
        ("glm4_moe", r"expected shape \(2, 32\), got \(3, 32\)"),
        ("olmoe", r"calibrated on 'mixtral' .* but 'olmoe' has other weights"),
    ):
        with pytest.raises(TraceError, match=message):
            recording(other, tmp_path / "x.parquet", new_tokens=1, residual=residual)
    (tmp_path / "not.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(
        TraceError, match=r"not\.safetensors: expected residual vectors"
    ):
        Residual.load(tmp_path / "not.safetensors")


def test_the_header_says_where_the_trace_comes_from(tmp_path):
    out = tmp_path / "h.parquet"
    done = recording("mixtral", out, new_tokens=0, split="calibration")
    text = pq.read_metadata(done.path).metadata[b"moesim"]
    stored = TraceHeader.from_json(text, where="h.parquet")
    assert stored == done.header
    assert stored.split == "calibration"
    assert (stored.shape.name, stored.shape.scoring) == ("mixtral", "softmax")
    said = stored.provenance
    facts = {"model": "mixtral", "date": "2026-01-01", "sequences": 3}
    assert facts.items() <= said.items()
    assert len(said["weights"]) == len(said["prompts"]) == 64
    assert str(tmp_path) not in json.dumps(said)


def test_columns_that_nobody_wants_are_left_out(tmp_path):
    nothing = {"scores": False, "predictions": False}
    done = recording("mixtral", tmp_path / "s.parquet", new_tokens=1, **nothing)
    names = pq.read_schema(done.path).names
    assert names == ["seq", "pos", "phase", "layer", "experts", "weights", "token"]


def test_recording_leaves_the_model_as_it_was(tmp_path):
    """Hooks are gone afterwards; progress ends at what was promised."""
    local = family("qwen3_moe")
    seen = []
    ids = torch.tensor([list(b"same")])
    with torch.inference_mode():
        before = local.model(input_ids=ids).logits
        out = tmp_path / "o.parquet"
        noting = {"progress": lambda *at: seen.append(at)}
        done = record(local, PROMPTS, out, new_tokens=2, **noting)
        assert torch.equal(local.model(input_ids=ids).logits, before)
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in local.model.modules()
    )
    assert seen[-1] == (14 + 5 + 18 + 6, 43)
    assert done.tokens_per_s > 0


def test_an_interrupted_recording_leaves_nothing_that_is_not_finished(tmp_path):
    """A trace that was there before stays; no hook does. What is finished: see
    `test_record_resume`.
    """
    path = tmp_path / "old.parquet"
    path.write_bytes(b"kept")

    def interrupt(done, expected):
        if done > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recording("qwen3_moe", path, new_tokens=4, progress=interrupt)
    assert [file.name for file in tmp_path.iterdir()] == ["old.parquet"]
    assert path.read_bytes() == b"kept"
    assert not any(
        module._forward_hooks for module in family("qwen3_moe").model.modules()
    )


@pytest.mark.parametrize(("change", "message"), [
    ({"prompts": []}, "prompts: expected at least one token"),
    ({"prompts": ["a", ""]}, "prompt 1: expected at least one token"),
    ({"batch": 0}, "batch: expected a whole number >= 1"),
    ({"new_tokens": -1}, "new_tokens: expected a whole number >= 0"),
    ({"split": "training"}, "split: expected calibration or evaluation, got"),
])  # fmt: skip
def test_impossible_requests_are_refused_before_anything_runs(
    tmp_path, change, message
):
    arguments = {"out": tmp_path / "n.parquet", "new_tokens": 1} | change
    with pytest.raises((TraceError, ConfigError), match=message):
        recording("qwen3_moe", **arguments)
    assert not any(tmp_path.iterdir())


def test_prompts_of_a_text_are_lines_or_blocks(tmp_path):
    """Lines where nothing is blank between them; else blocks."""
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n\n")
    assert read_prompts(file) == ["one", "two"]
    file.write_text("one\n  more\n \n\ntwo\n")
    assert read_prompts(file) == ["one\n  more", "two"]
    file.write_text("\n \n")
    with pytest.raises(TraceError, match="expected prompts, found an empty file"):
        read_prompts(file)
    with pytest.raises(TraceError, match="expected a UTF-8 text file"):
        read_prompts(tmp_path / "missing.txt")
