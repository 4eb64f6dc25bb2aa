"""Steps of a batch: who is in them, what they ask for, and what an oracle may know
about them.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import traces as drawn_traces

from moesim.base.errors import TraceError
from moesim.traces.format import batch as batch_module
from moesim.traces.format.arrays import predicted_workload
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import join, layer_steps
from moesim.traces.format.reader import Passes, open_trace
from moesim.traces.format.schema import Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter


def by_brute_force(drawn, batch):
    """Tokens of each step as (phase, batch, [(experts [L, K], pos), …]) with plain
    Python loops.
    """
    steps = []
    for index, start in enumerate(range(0, len(drawn.sequences), batch)):
        group = drawn.sequences[start : start + batch]
        prompt = [
            (experts[pos], pos) for length, experts in group for pos in range(length)
        ]
        if prompt:
            steps.append((Phase.PREFILL, index, prompt))
        for i in range(max(len(experts) - length for length, experts in group)):
            alive = [
                (experts[length + i], length + i)
                for length, experts in group
                if length + i < len(experts)
            ]
            steps.append((Phase.DECODE, index, alive))
    return steps


@settings(max_examples=40, deadline=None)
@given(drawn_traces(), st.integers(1, 4), st.integers(1, 3))
def test_steps_hold_exactly_the_tokens_of_the_batch(
    tmp_path_factory, drawn, batch, chunk
):
    path = drawn.write(tmp_path_factory.mktemp("t") / "t.parquet")
    limit = batch_module.CHUNK_COUNTS
    # Cut after every few steps.
    batch_module.CHUNK_COUNTS = (
        chunk * drawn.shape.layers * max(drawn.shape.experts, batch)
    )
    try:
        steps = list(compose(open_trace(path), batch=batch))
    finally:
        batch_module.CHUNK_COUNTS = limit
    expected = by_brute_force(drawn, batch)
    assert [(step.phase, step.batch) for step in steps] == [
        (phase, index) for phase, index, _ in expected
    ]
    assert [step.step for step in steps] == list(range(len(steps)))
    for step, (phase, _, tokens) in zip(steps, expected, strict=True):
        assert step.tokens == len(tokens)
        assert step.context_tokens == 1 + max(pos for _, pos in tokens)
        if phase is Phase.DECODE:
            assert step.sequences == len(tokens)
        assert [layer.layer for layer in step.layers] == list(range(drawn.shape.layers))
        for layer in step.layers:
            routing = np.array([experts[layer.layer] for experts, _ in tokens])
            assert (layer.routing == routing).all()
            active, counts = np.unique(routing, return_counts=True)
            assert (layer.experts == active).all()
            assert (layer.tokens == counts).all()
            assert layer.experts.dtype == layer.tokens.dtype == np.int32
            assert layer.weights is None
            assert layer.scores is None
            assert layer.predicted == {}


def test_ragged_prefill_runs_fewer_tokens_through_the_last_layer(make_trace):
    step = next(compose(open_trace(make_trace(sequences=((4, 1),), ragged=True))))
    assert step.tokens == 4
    assert [layer.tokens.sum() for layer in step.layers] == [8, 8, 2]


def test_optional_columns_follow_their_tokens(tmp_path, tiny_shape):
    """Two sequences side by side: row values say where they came from."""
    path = tmp_path / "t.parquet"
    columns = ("weights", "scores", "pred1_raw", "pred2_raw")
    with TraceWriter(path, TraceHeader(tiny_shape), columns) as writer:
        for seq in range(2):
            pos = np.repeat(np.arange(3), 3)
            layer = np.tile(np.arange(3), 3)
            mark = (100 * seq + 10 * pos + layer).astype(float)[:, None]
            phase = np.where(pos < 1, Phase.PREFILL, Phase.DECODE)
            marks = dict.fromkeys(columns, np.tile(mark, (1, 8)))
            marks["weights"] = np.tile(mark, (1, 2))
            writer.write(seq, pos, phase, layer, np.tile([0, 1], (9, 1)), **marks)
    steps = list(compose(open_trace(path), batch=2, columns=columns))
    for pos, step in enumerate(steps):
        for layer in step.layers:
            mark = [10 * pos + layer.layer, 100 + 10 * pos + layer.layer]
            assert layer.weights is not None
            assert layer.scores is not None
            assert layer.weights[:, 1].tolist() == layer.scores[:, 7].tolist() == mark
            for values in layer.predicted.values():
                assert values[:, 0].tolist() == mark
        # nothing lies beyond the last layer, so nothing can be predicted about it
        predicted = [sorted(layer.predicted) for layer in step.layers]
        assert predicted == [["pred1_raw", "pred2_raw"], ["pred1_raw"], []]


@settings(max_examples=40, deadline=None)
@given(
    drawn_traces(),
    st.integers(1, 4),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 4),
)
def test_blocks_hold_what_composed_steps_hold(
    tmp_path_factory, drawn, batch, steps, micro_batch
):
    """Columns included: scores as the mean of a layer step's tokens, predictions as
    the workload that they amount to.
    """
    columns = ("scores", "pred1_raw", "pred2_raw")
    predictors = columns[1:]
    path = tmp_path_factory.mktemp("blocks") / "t.parquet"
    drawn.write(path, columns)
    trace = open_trace(path).cut(Passes(micro_batch))
    composed = list(compose(trace, batch=batch, steps=steps, columns=columns))
    wanted = {"columns": columns, "predictors": predictors, "routing": True}
    block = join(list(layer_steps(trace, batch=batch, steps=steps, **wanted)))

    by_layer = [(step, layer) for step in composed for layer in step.layers]
    assert len(by_layer) == len(block.layer)
    row_edges = np.cumsum([0, *block.rows])
    for s, (step, layer) in enumerate(by_layer):
        accesses = slice(block.edges[s], block.edges[s + 1])
        assert block.experts[accesses].tolist() == layer.experts.tolist()
        assert block.tokens[accesses].tolist() == layer.tokens.tolist()
        rows = block.columns["experts"][row_edges[s] : row_edges[s + 1]]
        assert rows.tolist() == layer.routing.tolist()
        assert (block.scores[s] == layer.scores.mean(axis=0, dtype=np.float64)).all()
        no_scores = np.zeros((0, trace.shape.experts))
        for place, name in enumerate(predictors):
            scores = layer.predicted.get(name, no_scores).astype(np.float32)
            workload = predicted_workload(scores, layer.routing.shape[1])
            assert (block.workload[s, place] == workload).all()
            assert (block.score_sums[s, place] == scores.sum(axis=0)).all()
        assert block.layer[s] == layer.layer
        assert block.pass_tokens[s] == step.tokens
        for name in ("step", "batch", "phase", "context_tokens", "sequences"):
            assert getattr(block, name)[s] == getattr(step, name)


@pytest.mark.parametrize("options", [{"batch": 0}, {"steps": 0}])
def test_a_batch_and_a_step_count_start_at_one(make_trace, options):
    with pytest.raises(TraceError, match="expected >= 1, got 0"):
        compose(open_trace(make_trace()), **options)


def test_steps_cuts_the_whole_run(make_trace):
    trace = open_trace(make_trace(sequences=((2, 2), (2, 2))))
    assert [step.batch for step in compose(trace, steps=4)] == [0, 0, 0, 1]


@settings(max_examples=40, deadline=None)
@given(drawn_traces(), st.integers(1, 3), st.data())
def test_the_future_agrees_with_a_linear_scan(tmp_path_factory, drawn, batch, data):
    """In any order of asking: forward one step, far ahead, and back."""
    path = drawn.write(tmp_path_factory.mktemp("t") / "t.parquet")
    steps = list(compose(open_trace(path), batch=batch))
    future = RecordedFuture(steps)
    assert future.never == len(steps)
    for step in steps:
        for routed in step.layers:
            place = step.step, routed.layer
            assert future.active(*place).tolist() == routed.experts.tolist()
            assert future.tokens(*place).tolist() == routed.tokens.tolist()
    assert len(future.tokens(len(steps), 0)) == 0
    everyone = np.arange(drawn.shape.experts)
    questions = st.lists(st.integers(-1, len(steps) + 1), min_size=1, max_size=12)
    for now in data.draw(questions):
        for layer in range(drawn.shape.layers):
            later = [(s.step, s.layers[layer]) for s in steps if s.step > now]
            expected = [
                next((at for at, routed in later if e in routed.experts), len(steps))
                for e in everyone
            ]
            assert future.next_uses(now, layer, everyone).tolist() == expected
            assert [future.next_use(now, layer, int(e)) for e in everyone] == expected
            inside = 0 <= now < len(steps)
            active = steps[now].layers[layer].experts.tolist() if inside else []
            assert future.active(now, layer).tolist() == active
