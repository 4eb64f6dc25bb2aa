"""What speaks against a trace, each on a trace made to deserve exactly that."""

import numpy as np
import pytest

from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.stats.quality_checks import (
    UNEVEN_LEAST,
    QualityChecker,
    check_quality,
)

SHAPE = model_shape("layers=3,experts=8,top_k=2,expert_bytes=1KiB")


def kinds(path, sequences):
    """Write sequences of (positions, prompt tokens, ids [T, L, K]) and name what is
    found; grave ones in capitals.
    """
    with TraceWriter(path, TraceHeader(SHAPE)) as writer:
        for number, (pos, prompt, ids) in enumerate(sequences):
            phase = np.where(np.arange(len(ids)) < prompt, Phase.PREFILL, Phase.DECODE)
            writer.write(
                number,
                *(np.repeat(one, 3) for one in (pos, phase)),
                np.tile(range(3), len(ids)),
                ids.reshape(-1, 2),
            )
    return [
        finding.kind.upper() if finding.grave else finding.kind
        for finding in check_quality(open_trace(path))
    ]


def drawn(tokens, seed=0, skew=1.5):
    rng = np.random.default_rng(seed)
    return np.argsort(
        rng.gumbel(size=(tokens, 3, 8)) * -1 + np.linspace(0, skew, 8), axis=2
    )[:, :, :2]


def test_a_trace_without_fault(tmp_path):
    assert kinds(tmp_path / "t", [(np.arange(200), 5, drawn(200))]) == []


@pytest.mark.parametrize(("sequence", "expected"), [
    ((np.arange(200), 0, drawn(200)), ["prefill"]),
    ((np.arange(200) + 9, 5, drawn(200)), ["LATE"]),
    ((np.arange(200) * 2, 5, drawn(200)), ["HOLE"]),
    ((np.arange(900), 5, drawn(900, skew=0)), ["UNIFORM"]),
    ((np.arange(300), 5, np.tile(drawn(30), (10, 1, 1))), ["loop"]),
    # Too short to tell a loop from a text that repeats a phrase.
    ((np.arange(60), 0, np.tile(drawn(10), (6, 1, 1))), ["prefill"]),
    ((np.arange(70), 0, np.tile(drawn(10), (7, 1, 1))), ["loop", "prefill"]),
])  # fmt: skip
def test_one_fault_at_a_time(tmp_path, sequence, expected):
    assert kinds(tmp_path / "t", [sequence]) == expected


def test_copies(tmp_path):
    one = (np.arange(40), 5, drawn(40))
    assert kinds(tmp_path / "t", [one, (np.arange(40), 5, drawn(40, seed=1)), one]) == [
        "COPY"
    ]


def test_chi_square_by_hand():
    """Loads 6 2 0 0 of 8 choices of 4 experts, expected 2 each: (16 + 0 + 4 + 4) / 2 =
    12, over 4 - 1 = 3: 4.
    """
    checker = QualityChecker(
        model_shape("layers=1,experts=4,top_k=1,expert_bytes=1KiB")
    )
    checker.add(
        np.arange(8),
        np.ones(8, np.int8),
        np.zeros(8, np.int16),
        np.array([[0]] * 6 + [[1]] * 2),
    )
    assert checker.uneven().tolist() == [4.0]


def test_random_routing_scores_one():
    """The expectation for K distinct experts drawn evenly, at three shapes."""
    rng = np.random.default_rng(0)
    for experts, top_k in ((8, 2), (32, 4), (64, 8)):
        checker = QualityChecker(
            model_shape(f"layers=40,experts={experts},top_k={top_k},expert_bytes=1KiB")
        )
        ids = np.argsort(rng.random((400 * 40, experts)), axis=1)[:, :top_k]
        pos, layer = np.divmod(np.arange(400 * 40), 40)
        checker.add(pos, np.ones(len(pos), np.int8), layer, ids)
        assert np.median(checker.uneven()) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize(("name", "model"), [
    ("qwen3_30b_a3b_top6", "qwen3-30b-a3b"),
    ("olmoe_1b_7b_decode299", "olmoe-1b-7b"),
    ("kimi_linear_48b_a3b_decode300", "kimi-linear-48b-a3b"),
])  # fmt: skip
def test_real_traces_are_trusted(shared_traces, tmp_path, name, model):
    import_trace(
        shared_traces / f"{name}.parquet", tmp_path / "t", shape=model_shape(model)
    )
    trace = open_trace(tmp_path / "t")
    assert not [finding for finding in check_quality(trace) if finding.grave]
    checker = QualityChecker(trace.shape)
    for rows in trace.sequences():
        checker.add(rows.pos, rows.phase, rows.layer, rows.experts)
    assert np.median(checker.uneven()) > 10 * UNEVEN_LEAST
