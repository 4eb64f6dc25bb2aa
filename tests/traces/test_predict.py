"""Synthetic predictions: as accurate as asked for, and marked wherever a result was
made with them.
"""

import json

import numpy as np
import pytest
from scipy.special import expit, softmax
from support.command_line import refused

import moesim
from moesim.base.errors import TraceError
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.synthetic import predict as module
from moesim.traces.synthetic.generate import stated, synthesise
from moesim.traces.synthetic.marks import PREDICTIONS, synthetic_caveats
from moesim.traces.synthetic.predict import logits_behind, popularity_logits, predict

RECALL = (0.8, 0.7, 0.62)
COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw")
POINTS = 0.005


def copied(source, target, columns):
    """A trace with only these of its optional columns."""
    with TraceWriter(target, source.header, columns) as writer:
        for rows in source.sequences(columns):
            writer.write(
                rows.seq, rows.pos, rows.phase, rows.layer, rows.experts, **rows.columns
            )
    return target


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The shipped trace, with weights only."""
    path = tmp_path_factory.mktemp("predict") / "bare.parquet"
    return copied(open_trace("tiny"), path, ["weights"])


@pytest.fixture(scope="module")
def predicted(bare):
    path = bare.with_name("predicted.parquet")
    predict(bare, path, recall=RECALL, residual=0.83, scores=True, seed=3)
    return path


def recall_of(path, column, at=None):
    """Recall over all tokens, of the K best or of the `at` best experts, by rank of the
    used one: float64 [K].
    """
    trace = open_trace(path)
    at = at or trace.shape.top_k
    depth = int(column[4])
    hits = []
    for rows in trace.sequences([column]):
        # Rows of a ragged prefill have no neighbour at a later layer: a dictionary
        # finds those that are there.
        places = {
            key: row for row, key in enumerate(zip(rows.pos, rows.layer, strict=True))
        }
        best = np.argsort(-rows.columns[column], axis=1, kind="stable")
        for (pos, layer), place in places.items():
            target = places.get((pos, layer + depth))
            if target is not None:
                used = rows.experts[target, :at]
                hits.append(np.isin(used, best[place, :at]))
    return np.mean(hits, axis=0)


# -- accuracy --------------------------------------------------------------------------


def test_recall_at_one_is_how_often_the_best_expert_is_foreseen(bare, tmp_path):
    made = predict(bare, tmp_path / "made", recall=(0.8,), at=1)
    (share,) = recall_of(tmp_path / "made", "pred1_raw", at=1)
    assert share == pytest.approx(0.8, abs=POINTS)
    assert made.predictors[0].measured == pytest.approx(share, abs=0.001)
    # It is foreseen as one of K more often than as the best.
    assert recall_of(tmp_path / "made", "pred1_raw")[0] > 0.9


@pytest.mark.parametrize("kept", [(), ("weights",), ("weights", "scores")])
def test_recall_is_the_one_asked_for(tmp_path, kept):
    """With recorded scores, with scores drawn behind recorded weights, and with neither:
    counted anew, from the file.
    """
    source = copied(open_trace("tiny"), tmp_path / "source", kept)
    made = predict(source, tmp_path / "made", recall=(1.0, *RECALL[:2]), residual=0.9)
    for entry in made.predictors:
        by_rank = recall_of(tmp_path / "made", entry.column)
        assert by_rank.mean() == pytest.approx(entry.asked, abs=POINTS)
        assert entry.measured == pytest.approx(by_rank.mean(), abs=0.001)
        # Confident experts are predicted better than marginal ones.
        assert (np.diff(by_rank) < 0).all() or entry.asked == 1


@pytest.mark.parametrize(("name", "model"), [
    ("qwen3_30b_a3b_top6", "qwen3-30b-a3b"),
    ("olmoe_1b_7b_decode299", "olmoe-1b-7b"),
    ("kimi_linear_48b_a3b_decode300", "kimi-linear-48b-a3b"),
])  # fmt: skip
def test_recall_on_other_peoples_traces(shared_traces, tmp_path, name, model):
    """Sigmoid gates, and a ragged prefill."""
    source = import_trace(
        shared_traces / f"{name}.parquet", tmp_path / "real", shape=model_shape(model)
    ).path
    made = predict(source, tmp_path / "made", recall=RECALL, scores=True)
    for predictor in made.predictors:
        assert predictor.measured == pytest.approx(predictor.asked, abs=POINTS)
    if name.startswith(("qwen3", "olmoe")):
        for column, asked in zip(COLUMNS, RECALL, strict=True):
            recall = recall_of(tmp_path / "made", column).mean()
            assert recall == pytest.approx(asked, abs=POINTS)


# -- scores ----------------------------------------------------------------------------


def test_drawn_scores_are_those_of_the_recorded_experts(predicted):
    """The K recorded are the K highest, best first, their softmax is the recorded
    weights, and all of them sum to one.
    """
    for rows in open_trace(predicted).sequences(["scores", "weights"]):
        scores = rows.columns["scores"].astype(np.float64)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :4]
        assert (np.sort(best, axis=1) == np.sort(rows.experts, axis=1)).all()
        chosen = np.take_along_axis(scores, rows.experts.astype(int), axis=1)
        assert (np.diff(chosen, axis=1) <= 0).all()
        weights = chosen / chosen.sum(axis=1, keepdims=True)
        assert weights == pytest.approx(rows.columns["weights"], rel=0.003, abs=1e-3)
        assert scores.sum(axis=1) == pytest.approx(1, abs=0.01)


def test_weights_follow_from_drawn_scores_where_there_are_none(tmp_path):
    """`adapmoe` and SMoE's router need both. The shipped model's gate renormalises."""
    source = copied(open_trace("tiny"), tmp_path / "source", [])
    predict(source, tmp_path / "made", scores=True)
    made = open_trace(tmp_path / "made")
    for rows in made.sequences(["scores", "weights"]):
        scores = rows.columns["scores"].astype(np.float64)
        used = np.take_along_axis(scores, rows.experts.astype(int), axis=1)
        expected = used / used.sum(axis=1, keepdims=True)
        assert rows.columns["weights"] == pytest.approx(expected, abs=1e-3)
    (caveat,) = synthetic_caveats(made.header)
    assert "scores and weights drawn" in caveat


def logits_for(weights, *, sigmoid=False):
    """Logits [E] of one row of 6 experts, of which 4 and 1 are used with `weights`."""
    keys = np.array([[0.3, -1.0, 2.0, 0.5, 1.0, -2.0]], np.float32)
    experts = np.array([[4, 1]], np.uint16)
    given = None if weights is None else np.array([weights], np.float32)
    return logits_behind(keys, experts, given, sigmoid=sigmoid)[0]


def test_logits_by_hand():
    """Keys 2, 1, 0.5, 0.3, -1, -2 in the mean 2/15: the used experts get 2 and 1, the
    others keep their order: 2 before 3 before 0 before 5. Weights 0.75 and 0.25 make the
    first of them 1 + ln 3, and scores have their ratio.
    """
    keys = np.array([-1.0, 1.0, 0.5, 0.3, 2.0, -2.0])
    assert logits_for(None) == pytest.approx(keys - keys.mean(), abs=1e-6)
    keys[4] = 1 + np.log(3)
    logits = logits_for([0.75, 0.25])
    assert logits == pytest.approx(keys - keys.mean(), abs=1e-6)
    assert softmax(logits)[4] / softmax(logits)[1] == pytest.approx(3, rel=1e-5)


@pytest.mark.parametrize("weights", [(0.6, 0.4), (0.9, 0.01)])
def test_sigmoid_scores_have_the_ratio_of_the_weights(weights):
    scores = expit(logits_for(weights, sigmoid=True))
    assert scores[4] / scores[1] == pytest.approx(weights[0] / weights[1], rel=1e-3)
    assert scores[[2, 3, 0, 5]].max() < scores[1] < scores[4] < 1


def test_popular_experts_are_near_misses():
    """An expert that every second token chose stands above one that few chose."""
    keys = popularity_logits(np.array([[500, 100, 100, 300]]), top_k=1)
    assert keys[0, 0] > keys[0, 3] > keys[0, 1] == keys[0, 2]
    assert keys.mean() == pytest.approx(0, abs=1e-6)


# -- files -----------------------------------------------------------------------------


def test_the_same_file_however_large_the_chunks(bare, tmp_path, monkeypatch):
    options = {"recall": RECALL, "residual": 0.7, "scores": True}
    files = []
    # 1,152 tokens of 192 logits: all at once, 5 tokens, one token.
    for number, values in enumerate((1 << 20, 1000, 1)):
        monkeypatch.setattr(module, "CHUNK_VALUES", values)
        predict(bare, tmp_path / str(number), **options, seed=1)
        files.append((tmp_path / str(number)).read_bytes())
    assert files[0] == files[1] == files[2]
    predict(bare, tmp_path / "other", **options, seed=2)
    assert (tmp_path / "other").read_bytes() != files[0]


def test_a_sample_stands_for_a_longer_trace(bare, tmp_path, monkeypatch):
    """Solved on a fourth of the tokens."""
    monkeypatch.setattr(module, "SAMPLE_VALUES", 6912 * 32 // 4)
    predict(bare, tmp_path / "made", recall=(0.7,))
    recall = recall_of(tmp_path / "made", "pred1_raw").mean()
    assert recall == pytest.approx(0.7, abs=0.02)
    assert recall != pytest.approx(0.7, abs=1e-4)


def test_a_ragged_prefill_and_gaps_in_positions(tmp_path):
    """The last layer has only the last prompt token: rows stay as they are."""
    shape = model_shape("layers=3,experts=8,top_k=2,expert_bytes=1")
    pos = np.array([0, 0, 1, 1, 1, 5, 5, 5])
    layer = np.array([0, 1, 0, 1, 2, 0, 1, 2])
    phase = np.where(pos < 5, Phase.PREFILL, Phase.DECODE).astype(np.int8)
    experts = np.array([[0, 1], [2, 3]] * 4)
    with TraceWriter(tmp_path / "ragged", TraceHeader(shape)) as writer:
        writer.write(0, pos, phase, layer, experts)
    predict(tmp_path / "ragged", tmp_path / "made", recall=(0.9,), scores=True)
    (rows,) = open_trace(tmp_path / "made").sequences(["scores", "pred1_raw"])
    assert (rows.pos == pos).all()
    assert (rows.experts == experts).all()
    # Position 0 has no guess about a layer that nobody recorded, and none past the end.
    guessed = (rows.columns["pred1_raw"] > 0).all(axis=1)
    assert guessed.tolist() == [True, False, True, True, False, True, True, False]


@pytest.mark.parametrize(("options", "message"), [
    ({"recall": (0.6, 0.8)}, "expected no more at a greater depth, got 0.6,0.8"),
    ({"recall": (1.2,)}, "recall of pred1_raw: expected 0 < R <= 1, got 1.2"),
    ({"recall": (float("nan"),)}, "expected 0 < R <= 1, got nan"),
    ({"recall": (0.8,) * 4}, "expected at most 3 depths"),
    ({"residual": 0}, "recall of pred1_res: expected 0 < R <= 1"),
    ({}, "nothing to add"),
    ({"recall": (0.8,), "at": 99}, r"at: expected 1\.\.\d experts of a token, got 99"),
    ({"recall": (0.01,)}, r"recall of pred1_raw: expected 0\.1\d+ .* to 1\.000"),
])  # fmt: skip
def test_what_cannot_be_asked_for(bare, tmp_path, options, message):
    with pytest.raises(TraceError, match=message) as refusal:
        predict(bare, tmp_path / "made", **options)
    assert "\n" not in str(refusal.value)
    # Neither the trace nor what it is written to at first.
    assert not list(tmp_path.iterdir())


def test_columns_that_are_there_stay(predicted, tmp_path):
    for options in ({"recall": (0.8,)}, {"scores": True}):
        with pytest.raises(TraceError, match="is there already"):
            predict(predicted, tmp_path / "made", **options)
    shallow = tmp_path / "shallow"
    shape = model_shape("layers=2,experts=8,top_k=2,expert_bytes=1")
    synthesise(stated(shape, new_tokens=9), shallow, tokens=9)
    with pytest.raises(TraceError, match="at most 1 depths below the 2 layers"):
        predict(shallow, tmp_path / "made", recall=(0.8, 0.7))


# -- marks -----------------------------------------------------------------------------


def test_scores_first_and_predictions_later(bare, tmp_path):
    """Both calls stay in the header, beside what the trace said before."""
    predict(bare, tmp_path / "scored", scores=True, seed=1)
    predict(tmp_path / "scored", tmp_path / "both", recall=(0.8,), seed=2)
    provenance = open_trace(tmp_path / "both").header.provenance
    assert provenance["model"] == "tiny"
    drawn = provenance[PREDICTIONS]
    assert drawn["scores"] == {"seed": 1, "weights": False}
    assert drawn["pred1_raw"]["recall_asked"] == 0.8
    assert drawn["pred1_raw"]["recall_measured"] == pytest.approx(0.8, abs=POINTS)
    assert drawn["pred1_raw"]["seed"] == 2


def test_every_result_says_so(predicted, tmp_path):
    run = moesim.replay(
        str(predicted), "greedy", prefetch="next-gate", steps=3, out=tmp_path / "run"
    )
    (warning,) = [text for text in run.warnings if "synthetic predictions" in text]
    assert "pred1_raw recall 0.8" in warning
    saved = json.loads((tmp_path / "run" / "run.json").read_text())
    assert warning in saved["warnings"]
    assert saved["config"]["synthetic"] == [warning]
    # A trace that was recorded has nothing to confess.
    assert moesim.replay("tiny", "greedy", steps=1).config["synthetic"] == []


def test_routing_that_was_drawn_is_said_to_be(tmp_path):
    shape = model_shape("layers=2,experts=8,top_k=2,expert_bytes=1MiB")
    synthesise(stated(shape), tmp_path / "drawn", tokens=20)
    run = moesim.replay(str(tmp_path / "drawn"), "greedy")
    assert any(text.startswith("synthetic routing: drawn") for text in run.warnings)


def test_the_command_line(bare, command, tmp_path):
    out = tmp_path / "made.parquet"
    code, printed, _ = command(
        "trace", "predict", bare, out, "--recall", "0.8,0.7,0.62", "--scores"
    )
    assert code == 0
    assert "pred1_raw: recall 0.800, asked 0.8" in printed
    _, printed, _ = command("trace", "info", out)
    assert "synthetic predictions" in printed
    assert "(asked 0.62)" in " ".join(printed.split())
    assert refused(
        command("trace", "predict", bare, out, "--recall", "0.6,0.8"), "greater depth"
    )
