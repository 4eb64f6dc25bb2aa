"""Synthetic traces: drawn with the probabilities they state, and like the real traces
they were fitted to.
"""

import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from benchmarks.likeness import pair_bits
from moesim.base.errors import TraceError
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter
from moesim.traces.models import model_shape
from moesim.traces.stats.quality_checks import check_quality
from moesim.traces.stats.routing_curves import routing_curves
from moesim.traces.stats.trace_summary import summarise_trace
from moesim.traces.synthetic.draw import choose, draw, inclusion
from moesim.traces.synthetic.fit import _past, fit
from moesim.traces.synthetic.generate import stated, synthesise

SHIPPED = Path(__file__).parents[2] / "traces" / "data" / "tiny_evaluation.parquet"
SHAPE = model_shape("layers=4,experts=16,top_k=2,expert_bytes=1MiB")
PLAIN = {"skew": 0, "topic": 0, "reuse": 0, "dependence": 0, "drift": 0}
"""Habits of even, independent choices."""


def figures(path, model, tokens, seed=0, **options):
    synthesise(model, path, tokens=tokens, seed=seed, **options)
    return summarise_trace(open_trace(path)).figures


# -- drawing ---------------------------------------------------------------------------


def test_inclusion_by_hand():
    """Weights 8, 1, 1, 2 at K = 2: 2 * 8/12 exceeds 1, the first is sure, the others
    share a draw: 1/4, 1/4, 1/2.
    """
    found = inclusion(np.log(np.array([[8.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])), 2)
    expected = [[1, 0.25, 0.25, 0.5], [0.5] * 4]
    assert found == pytest.approx(np.array(expected))


def test_every_expert_is_drawn_with_its_probability():
    rng = np.random.default_rng(0)
    odds = inclusion(rng.normal(size=(1, 12)).astype(np.float32) * 2, 3)
    counts = np.zeros(12)
    draws = 40_000
    for _ in range(draws // 400):
        chosen = choose(np.repeat(odds, 400, axis=0), 3, rng)
        assert (np.diff(np.sort(chosen, axis=1), axis=1) > 0).all()
        counts += np.bincount(chosen.reshape(-1), minlength=12)
    error = np.sqrt(odds[0] * (1 - odds[0]) / draws)
    assert (np.abs(counts / draws - odds[0]) <= 5 * error + 1e-6).all()


def test_ages_by_hand():
    """Choices 0, 1, 0, 2, 0 of one layer: before the last token expert 0 is 2 old, 1 is
    3, 2 is 1, 3 was never used.
    """
    classes, made = _past(np.array([[0], [1], [0], [2], [0]]), 4)
    assert classes[4].tolist() == [1, 2, 0, 17]
    assert made.argmax(axis=1).tolist() == [0, 1, 0, 2, 0]


def test_all_experts_when_k_is_e():
    shape = dataclasses.replace(SHAPE, top_k=16)
    drawn = draw(stated(shape), 3, 2, np.random.default_rng(0))
    assert (np.sort(drawn, axis=3) == np.arange(16)).all()


# -- stated statistics -----------------------------------------------------------------


def test_skew_is_zipfs_exponent(tmp_path):
    """Without reuse and with K = 1, the share of rank r is r^-s over its sum: entropy
    as computed.
    """
    shape = dataclasses.replace(SHAPE, top_k=1)
    for skew in (0.0, 1.0, 2.0):
        share = np.arange(1, 17.0) ** -skew
        share /= share.sum()
        found = figures(
            tmp_path / "t.parquet", stated(shape, **PLAIN | {"skew": skew}), 8000
        )
        assert np.mean(found["entropy_bits"]) == pytest.approx(
            -(share * np.log2(share)).sum(), abs=0.05
        )


@pytest.mark.parametrize("reuse", [0.3, 0.5, 0.8])
def test_reuse_is_the_overlap_of_adjacent_tokens(tmp_path, reuse):
    habits = PLAIN | {"skew": 0.3, "reuse": reuse}
    model = stated(SHAPE, **habits, new_tokens=256)
    found = figures(tmp_path / "t.parquet", model, 4096)
    assert np.mean(found["overlap"]) == pytest.approx(reuse, abs=0.04)


def test_even_independent_choices_have_the_hit_rate_of_chance(tmp_path):
    """No skew, no reuse: an LRU cache of C of 16 experts hits C/16 of the time,
    step-atomic.
    """
    found = figures(
        tmp_path / "t.parquet", stated(SHAPE, **PLAIN, new_tokens=4000), 4000
    )
    for ratio, rates in found["lru"].items():
        assert np.mean(rates) == pytest.approx(ratio, abs=0.03)


def information(drawn):
    """Bits that the first expert of one layer tells about the first of the next."""
    pairs = np.zeros((16, 16))
    np.add.at(pairs, (drawn[:, :, 0, 0].ravel(), drawn[:, :, 1, 0].ravel()), 1)
    joint = pairs / pairs.sum()
    apart = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0)
    return float(
        (joint[joint > 0] * np.log2(joint[joint > 0] / apart[joint > 0])).sum()
    )


def test_dependence_ties_layers_together():
    models = [stated(SHAPE, **PLAIN | {"dependence": d}) for d in (0, 1, 3)]
    drawn = [draw(model, 256, 64, np.random.default_rng(0)) for model in models]
    found = list(map(information, drawn))
    assert found[0] < 0.02
    assert found[0] < found[1] < found[2]
    assert found[2] > 0.5


def test_memory_is_how_long_an_expert_stays_likely():
    """At the same overlap of adjacent tokens, what was used 16 tokens ago is used
    again more often where less is forgotten.
    """
    found = []
    for memory in (0.0, 1.0):
        model = stated(SHAPE, **PLAIN | {"reuse": 0.4, "memory": memory})
        routing = list(draw(model, 256, 16, np.random.default_rng(0)))
        overlap = routing_curves(routing, 16)["overlap"]
        assert overlap["1"] == pytest.approx(0.4, abs=0.06)
        found.append(overlap["16"])
    assert found[0] > found[1] + 0.1


def test_topics_of_a_batch_differ_and_each_sequence_stays_as_it_is():
    """Swapped parts change nothing within a sequence; a batch touches more experts."""
    found = []
    for topic in (0.0, 0.5, 1.0):
        model = stated(SHAPE, skew=2, topic=topic, dependence=0)
        drawn = draw(model, 64, 32, np.random.default_rng(0))
        alone = [routing_curves([part], 16) for part in drawn]
        union = routing_curves(list(drawn), 16)["union"]["32"]
        found.append((union, [one["lru"] | one["overlap"] for one in alone]))
    assert found[0][0] < found[1][0] - 0.05 < found[2][0] - 0.1
    lags = [[one["8"] for one in within] for _, within in found]
    assert lags[0] == lags[1] == lags[2]


def test_drift_makes_far_apart_tokens_less_alike():
    """With drift, loads of the first and the last quarter of a sequence differ more
    than without.
    """

    def change(drift):
        model = stated(SHAPE, **PLAIN | {"drift": drift}, drift_tokens=64)
        drawn = draw(model, 400, 24, np.random.default_rng(0))
        loads = [
            np.stack([np.bincount(p[:, 0].ravel(), minlength=16) for p in part])
            for part in (drawn[:, :100], drawn[:, -100:])
        ]
        return np.abs(loads[0] - loads[1]).mean()

    assert change(1.0) > 2 * change(0.0)


@pytest.mark.parametrize(("options", "message"), [
    ({"skew": -1}, "skew: expected 0..5, got -1"),
    ({"reuse": 1}, "reuse: expected 0..0.99, got 1"),
    ({"drift": float("nan")}, "drift: expected 0..5, got nan"),
    ({"prompt_tokens": 0, "new_tokens": 0}, "at least one token per sequence"),
])  # fmt: skip
def test_statistics_that_cannot_be(options, message):
    with pytest.raises(TraceError, match=message):
        stated(SHAPE, **options)


# -- files -----------------------------------------------------------------------------


def test_same_seed_same_file_and_the_number_of_tokens_is_kept(tmp_path):
    model = stated(SHAPE, prompt_tokens=5, new_tokens=20, drift=0.2, dependence=0.3)
    rows = [
        synthesise(model, tmp_path / f"{n}.parquet", tokens=333, seed=seed)
        for n, seed in enumerate((1, 1, 2))
    ]
    assert rows == [333 * 4] * 3
    one, same, other = ((tmp_path / f"{n}.parquet").read_bytes() for n in range(3))
    assert one == same != other
    trace = open_trace(tmp_path / "0.parquet")
    assert trace.header.provenance["synthetic"] is True
    assert [len(rows.pos) // 4 for rows in trace.sequences()] == [25] * 13 + [8]
    assert not [finding for finding in check_quality(trace) if finding.grave]
    with pytest.raises(TraceError, match="tokens: expected 1"):
        synthesise(model, tmp_path / "none.parquet", tokens=0)


def test_memory_does_not_grow_with_the_tokens(tmp_path):
    """Three times the tokens, the same peak: sequences leave as they are drawn."""
    shape = dataclasses.replace(SHAPE, layers=2, expert_bytes=(1, 1))
    model = stated(shape, new_tokens=16)
    peaks = []
    for tokens in (40_000, 120_000):
        tracemalloc.start()
        synthesise(model, tmp_path / "t.parquet", tokens=tokens)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


# -- fitted to real traces -------------------------------------------------------------


def test_like_the_real_trace_that_ships(tmp_path):
    """Curves within 6 points at every size, loads within a fifth, and every two layers
    share the bits they should.

    Without the kinds of tokens the same model's layers share less than half of that:
    the fit found them.
    """
    real = open_trace(SHIPPED)
    expected = summarise_trace(real)
    model = fit(real)
    found = []
    for name, told in (("s", model), ("apart", dataclasses.replace(model, kinds=None))):
        tokens = expected.figures["prefill_tokens"] + expected.figures["decode_tokens"]
        synthesise(told, tmp_path / name, tokens=tokens, seed=1)
        found.append(summarise_trace(open_trace(tmp_path / name)))
    drawn = found[0]
    for curve in ("lru", "belady", "lru_global", "belady_global"):
        rates = [
            np.array(one.figures["curve_decode"][curve]) for one in (expected, drawn)
        ]
        assert np.abs(rates[0] - rates[1]).max() <= 0.06
    shares = [
        one.load / one.load.sum(axis=1, keepdims=True) for one in (expected, drawn)
    ]
    assert (np.abs(shares[0] - shares[1]).sum(axis=1) / 2).mean() <= 0.2
    assert np.mean(drawn.figures["overlap"]) == pytest.approx(
        np.mean(expected.figures["overlap"]), abs=0.06
    )
    assert drawn.figures["information_bits"] == pytest.approx(
        expected.figures["information_bits"], abs=0.12
    )
    for gap in (2, 3, 4, 5):
        bits = [pair_bits(trace, gap) for trace in (real, open_trace(tmp_path / "s"))]
        assert bits[1] == pytest.approx(bits[0], abs=0.15)
    mean = [np.mean(one.figures["information_bits"]) for one in (expected, found[1])]
    bias = expected.figures["information_bias_bits"]
    assert mean[1] - bias < 0.5 * (mean[0] - bias)


@pytest.mark.parametrize("tied", [True, False])
def test_layers_that_depend_and_layers_that_do_not(tmp_path, tied):
    """Two kinds of tokens, each with its own half of the experts: 1 bit between any two
    layers if a token keeps its kind through all of them, none if every layer has its
    own; no layer is nearer to another one in either case.
    """
    shape = model_shape("layers=6,experts=8,top_k=1,expert_bytes=1")
    rng = np.random.default_rng(0)
    half = rng.integers(2, size=(600, 1 if tied else 6))
    routing = (4 * half + rng.integers(4, size=(600, 6))).astype(np.uint16)
    with TraceWriter(tmp_path / "real", TraceHeader(shape)) as writer:
        for number, part in enumerate(np.split(routing, 8)):
            pos = np.repeat(np.arange(75), 6)
            layer = np.tile(np.arange(6), 75)
            writer.write(number, pos, Phase.DECODE, layer, part.reshape(-1, 1))
    synthesise(fit(open_trace(tmp_path / "real")), tmp_path / "made", tokens=6000)
    for gap in (1, 5):
        assert pair_bits(open_trace(tmp_path / "made"), gap, 60) == pytest.approx(
            1.0 if tied else 0.0, abs=0.15
        )


def test_one_layer_has_no_neighbour_to_be_like(tmp_path):
    shape = model_shape("layers=1,experts=8,top_k=2,expert_bytes=1")
    synthesise(stated(shape, skew=1, new_tokens=50), tmp_path / "real", tokens=400)
    model = fit(open_trace(tmp_path / "real"))
    assert synthesise(model, tmp_path / "made", tokens=123) == 123
