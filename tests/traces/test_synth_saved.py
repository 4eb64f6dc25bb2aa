"""Saved statistics: drawn from as from the trace, small, refused where damaged, and the
shipped ones like the traces that they were fitted to.
"""

import dataclasses

import numpy as np
import pytest
from support.command_line import refused

from benchmarks.ship_statistics import DATA, FOREIGN, OURS, SUFFIX
from moesim.base.errors import TraceError
from moesim.traces.format.reader import open_trace
from moesim.traces.models import model_shape
from moesim.traces.stats.routing_curves import routing_curves
from moesim.traces.synthetic.draw import draw
from moesim.traces.synthetic.fit import fit
from moesim.traces.synthetic.generate import of_lengths, stated, synthesise
from moesim.traces.synthetic.saved import load, model_like, save, shipped_statistics

SHIPPED = (*FOREIGN, *OURS)


@pytest.fixture(scope="module")
def fitted():
    return fit(open_trace("tiny"))


# -- those that ship -------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_says_what_it_is_like(name):
    """How like it is, `test_routing_curves` asks."""
    model = model_like(name)
    assert model.shape.name == name
    # Who draws from a drawn trace must be told.
    assert ("itself synthetic" in model.provenance["like"]) is (name in OURS)
    licence = "MIT" if name.startswith(("qwen3.6", "qwen3.8")) else "Apache-2.0"
    assert name in OURS or model.provenance["like_licence"].startswith(licence)


def test_the_models_of_the_papers_ship():
    assert shipped_statistics() == tuple(sorted(SHIPPED))
    sizes = [(DATA / f"{name}{SUFFIX}").stat().st_size for name in SHIPPED]
    assert sum(sizes) < 620 << 10


def test_another_weight_format_changes_bytes_only():
    half = model_like("qwen3-30b-a3b")
    packed = model_like("qwen3-30b-a3b", "q4_k_m")
    assert max(packed.shape.expert_bytes) < 0.4 * max(half.shape.expert_bytes)
    # The recording overrode the model's top-k of 8.
    assert half.shape.top_k == packed.shape.top_k == 6
    assert (half.popularity == packed.popularity).all()


# Shares of a layer's experts that 32 recorded sequences of gpt-oss touch at their first,
# second … token (docs/measurements/synthetic-traces.md).
BEGINNINGS = (0.23, 0.16, 0.17, 0.20, 0.28, 0.39, 0.43, 0.64)


def test_texts_begin_with_the_same_experts():
    """They share their first words. Each sampled experts of its own: 0.31 for 0.16."""
    model = model_like("gpt-oss-20b")
    drawn = draw(model, len(BEGINNINGS), 32, np.random.default_rng(1))
    for token, share in enumerate(BEGINNINGS):
        touched = [len(np.unique(drawn[:, token, n])) / 32 for n in range(24)]
        assert np.mean(touched) == pytest.approx(share, abs=0.12), token

    # Sequences are drawn a few at a time; what they share does not depend on that.
    topic = np.zeros(1, int)
    one, other = (
        draw(model, 20, 1, np.random.default_rng(seed), topic) for seed in (2, 3)
    )
    assert (one[:, 0] == other[:, 0]).all()
    assert not (one == other).all()


def test_default_habits_forget_as_a_model_does_that_they_were_not_chosen_on():
    """Kimi-Linear's tokens use 0.15 of what was used 32 tokens ago; drawn ones 0.31."""
    model = model_like("kimi-linear-48b-a3b")
    drawn = list(draw(stated(model.shape), 80, 2, np.random.default_rng(0)))
    overlap = routing_curves(drawn, model.shape.experts)["overlap"]
    for lag in ("8", "16", "32"):
        real = model.likeness.real["overlap"][lag]
        assert overlap[lag] == pytest.approx(real, abs=0.06), lag


# -- files -----------------------------------------------------------------------------


def test_what_is_saved_is_what_is_drawn_from(fitted, tmp_path):
    """Rounded to steps of 1/8 where it is large."""
    path = save(fitted, tmp_path / "tiny.npz")
    assert path.stat().st_size < 40_000
    model = load(path)
    assert model.lengths == fitted.lengths
    assert (model.popularity == fitted.popularity).all()
    for rounded, exact in (
        (model.topics, fitted.topics),
        (model.kinds.weights, fitted.kinds.weights),
    ):
        assert np.abs(rounded - exact).max() <= 0.0625 + 1e-6
    assert model.likeness == fitted.likeness
    assert save(load(path), tmp_path / "again").read_bytes() == path.read_bytes()


def test_lengths_can_be_stated(fitted, tmp_path):
    """A trace of decode tokens only may be drawn with prompts, and says so."""
    model = of_lengths(fitted, prompt_tokens=3, new_tokens=5)
    synthesise(model, tmp_path / "made", tokens=16)
    trace = open_trace(tmp_path / "made")
    assert [len(rows.pos) // 6 for rows in trace.sequences()] == [8, 8]
    assert trace.header.provenance["prompt_tokens"] == 3
    assert of_lengths(fitted).lengths == fitted.lengths
    with pytest.raises(TraceError, match="at least one token"):
        of_lengths(fitted, prompt_tokens=0, new_tokens=0)


def test_damaged_files_are_refused_in_one_line(fitted, tmp_path):
    path = save(fitted, tmp_path / "good.npz")
    good = path.read_bytes()
    cut = tmp_path / "cut.npz"
    cut.write_bytes(good[: len(good) // 2])
    empty = tmp_path / "empty.npz"
    np.savez_compressed(empty, header=np.zeros(3, np.uint8))
    with np.load(path) as archive:
        arrays = dict(archive)
    newer = tmp_path / "newer.npz"
    text = arrays["header"].tobytes()
    header = text.replace(b'"moesim_statistics": 2', b'"moesim_statistics": 9')
    np.savez_compressed(newer, **(arrays | {"header": np.frombuffer(header, np.uint8)}))
    for file, message in (
        (cut, "statistics: "),
        (empty, "found no array character"),
        (newer, "expected version 2, found 9"),
    ):
        with pytest.raises(TraceError, match=message) as refusal:
            model_like(file)
        assert "\n" not in str(refusal.value)
        assert str(file) in str(refusal.value)


def test_what_cannot_be_saved_or_found(tmp_path):
    shape = model_shape("layers=2,experts=8,top_k=2,expert_bytes=1")
    with pytest.raises(TraceError, match="expected those of a trace"):
        save(stated(shape), tmp_path / "stated.npz")
    with pytest.raises(TraceError, match="known: deepseek-v2-lite, gpt-oss-20b"):
        model_like("mixtral")
    with pytest.raises(TraceError, match="sizes of 'tiny' are not known by name"):
        model_like("tiny", "q4_k_m")


def test_a_file_of_that_name_comes_first(fitted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(dataclasses.replace(fitted, drift=0.0), tmp_path / "mixtral-8x7b")
    assert model_like("mixtral-8x7b").shape.name == "tiny"


def test_the_command_line(command):
    words = "trace synth a.parquet --like tiny --tokens 100 --save-stats tiny.npz"
    code, printed, _ = command(*words.split())
    assert code == 0
    assert printed.endswith("wrote tiny.npz\n")
    for source in ("tiny.npz", "olmoe-1b-7b"):
        words = "trace synth b.parquet --tokens 64 --prompt-tokens 16 --new-tokens 16"
        code, _, _ = command(*words.split(), "--like", source)
        assert code == 0
    assert open_trace("b.parquet").shape.name == "olmoe-1b-7b"
    words = ["trace", "synth", "c.parquet", "--tokens", "9"]
    assert refused(command(*words, "--like", "olmo"), "olmoe-1b-7b")
    shape = ("--shape", "olmoe-1b-7b")
    code, _, err = command(*words, *shape, "--save-stats", "x.npz")
    assert code == 2
    assert "--like" in err
