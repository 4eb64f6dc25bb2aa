"""Similarity, mutual information and predictors, by hand."""

import numpy as np
import pytest
from support.handmade import hand_trace
from support.small_trace import write_trace

from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter
from moesim.traces.stats import statistics
from moesim.traces.stats.statistics import (
    SimilarityAggregator,
    cosines,
    information_bias_bits,
    mutual_information_bits,
)
from moesim.traces.stats.trace_summary import prediction


def test_section_2_5_similarity():
    """Its worked example: (0.866025 + 0.978019) / 2."""
    prefill = np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]])
    decode = np.array([[0.5, 0.5, 0.0], [0.1, 0.3, 0.6]])
    assert cosines(prefill, decode).mean() == pytest.approx(0.922022, abs=1e-6)


def test_mutual_information_by_hand():
    """A copy of two equally likely experts tells one bit; independence tells
    nothing.
    """
    assert mutual_information_bits(np.array([[5, 0], [0, 5]])) == pytest.approx(1.0)
    assert mutual_information_bits(np.array([[2, 6], [1, 3]])) == pytest.approx(
        0.0, abs=1e-12
    )


def test_bias_is_what_independent_layers_seem_to_share():
    """3000 independent tokens, 3 of 12 experts: the mean of 20 estimates, which scatter
    by a tenth.
    """
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(20):
        joint = np.zeros((12, 12), np.int64)
        routing = np.argsort(rng.random((2, 3000, 12)), axis=2)[:, :, :3]
        np.add.at(joint, (np.repeat(routing[0], 3, axis=1), np.tile(routing[1], 3)), 1)
        seen.append(mutual_information_bits(joint))
    assert information_bias_bits(3000, 12, 3) == pytest.approx(np.mean(seen), rel=0.1)


def test_figures_of_a_short_sequence(tmp_path):
    """Prompt uses 0 and 1 of layer 0 equally, the answer 0 only: cosine 1/√2; layer 1
    is alike.
    """
    answer = [[[0], [2]], [[0], [2]], [[0], [3]], [[0], [4]]]
    trace = hand_trace(
        tmp_path / "t.parquet", [[[0], [2]], [[1], [2]], *answer], prompt=2
    )
    fold = SimilarityAggregator(trace.shape)
    for rows in trace.sequences():
        fold.add(rows)
    figures = fold.figures()
    assert figures["similarity_by_layer"] == pytest.approx(
        [1 / np.sqrt(2), 2 / np.sqrt(6)]
    )
    assert figures["information_bits"] == [0.0]


def test_long_sequences_are_counted_in_parts(make_trace, monkeypatch):
    trace = open_trace(make_trace(sequences=((0, 300), (3, 40), (0, 700))))
    figures = []
    for part_tokens in (256, 4096):
        monkeypatch.setattr(statistics, "_PART_TOKENS", part_tokens)
        fold = SimilarityAggregator(trace.shape)
        for rows in trace.sequences():
            fold.add(rows)
        figures.append(fold.figures())
    assert figures[0] == figures[1]
    decode = np.concatenate(
        [
            rows.experts[rows.phase == Phase.DECODE].reshape(-1, 3, 2)
            for rows in trace.sequences()
        ]
    )
    pairs = np.zeros((8, 8), np.int64)
    np.add.at(pairs, (decode[:, 0, :, None], decode[:, 1, None, :]), 1)
    assert figures[0]["information_bits"][0] == mutual_information_bits(pairs)


def test_predictors_that_know_and_one_that_does_not(tmp_path, tiny_shape):
    """pred1_raw holds the next layer's true scores, so it is always right; pred2_raw
    always says 0 and 1.
    """
    rng = np.random.default_rng(1)
    tokens = 30
    layers = tiny_shape.layers
    experts = tiny_shape.experts
    scores = np.argsort(rng.random((tokens, layers, experts)), axis=2).astype(
        np.float16
    )
    routing = np.argsort(-scores, axis=2, kind="stable")[:, :, :2]
    ahead = np.roll(scores, -1, axis=1).reshape(-1, experts)
    fixed = np.tile(np.arange(experts, 0, -1).astype(np.float16), (tokens * layers, 1))
    path = tmp_path / "t.parquet"
    pos = np.repeat(np.arange(tokens), layers)
    layer = np.tile(np.arange(layers), tokens)
    columns = {"pred1_raw": ahead, "pred2_raw": fixed}
    with TraceWriter(path, TraceHeader(tiny_shape), tuple(columns)) as writer:
        writer.write(0, pos, Phase.DECODE, layer, routing.reshape(-1, 2), **columns)
    told = prediction(open_trace(path))
    assert told["pred1_raw"]["accuracy"] == 1.0
    assert told["pred1_raw"]["by_layer"] == [None, 1.0, 1.0]
    assert told["pred1_raw"]["by_rank"][:3] == [1.0, 1.0, None]
    share = np.mean([(routing[t, 2] < 2).sum() / 2 for t in range(tokens)])
    assert told["pred2_raw"]["by_layer"] == [None, None, pytest.approx(share)]
    assert told["pred2_raw"]["by_rank"][0] == pytest.approx(
        (routing[:, 2, 0] == 0).mean()
    )
    bare = write_trace(tmp_path / "bare.parquet", tiny_shape)
    assert prediction(open_trace(bare)) is None
