"""Other people's traces become ours, oddities included."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesim.base.errors import TraceError
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.stats.statistics import info

SHAPE = "layers=2,experts=8,top_k=2,expert_bytes=1MiB"
SHARED = {
    "qwen3_30b_a3b_top6": ("qwen3-30b-a3b", 1, 28, 128),
    "gpt_oss_20b": ("gpt-oss-20b", 98, 0, 34_277),
    "olmoe_1b_7b_decode299": ("olmoe-1b-7b", 1, 0, 299),
    "kimi_linear_48b_a3b_decode300": ("kimi-linear-48b-a3b", 1, 0, 300),
}


def foreign(path, rows, **changes):
    """Rows of (seq_id, step, phase, layer, token, expert_ids, scores)."""
    names = ("seq_id", "step", "phase", "layer", "token", "expert_ids", "scores")
    columns = (
        dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) | changes
    )
    types = {
        "expert_ids": pa.list_(pa.int16()),
        "scores": pa.list_(pa.float32()),
        "layer": pa.int16(),
        "token": pa.int32(),
    }
    table = pa.table(
        {
            name: pa.array(values, types.get(name))
            for name, values in columns.items()
            if values is not None
        }
    )
    metadata = {
        "source": "github:x/y",
        "licence": "MIT",
        "sequences": json.dumps([{"seq_id": "b", "repetition": True}]),
    }
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def replay_order(names=("b", "a"), scores=(0.75, 0.25)):
    """Prefill of two tokens, then one decode token; step by step, layer by layer, as a
    runtime writes it.
    """
    rows = []
    for number, name in enumerate(names):
        for layer in range(2):
            rows += [
                (name, 0, "prefill", layer, token, [token, 4 + number], scores)
                for token in range(2)
            ]
        rows += [
            (name, 1, "decode", layer, 2, [2, 4 + number], scores) for layer in range(2)
        ]
    return rows


def check(trace):
    first, second = trace.sequences(("weights",))
    for number, rows in enumerate((first, second)):
        assert rows.pos.tolist() == [0, 0, 1, 1, 2, 2]
        assert rows.layer.tolist() == [0, 1] * 3
        assert rows.phase.tolist() == [Phase.PREFILL] * 4 + [Phase.DECODE] * 2
        assert (
            rows.experts == np.stack([rows.pos, np.full(6, 4 + number)], axis=1)
        ).all()
        assert (rows.columns["weights"] == np.array([0.75, 0.25])).all()


def test_sequences_keep_their_order_of_appearance(tmp_path):
    source = foreign(tmp_path / "in.parquet", replay_order())
    seen = []
    summary = import_trace(
        source, tmp_path / "out.parquet", shape=model_shape(SHAPE), progress=seen.append
    )
    assert (summary.rows, summary.sequences, summary.columns, seen) == (
        12,
        2,
        ("weights",),
        [6, 12],
    )
    trace = open_trace(tmp_path / "out.parquet")
    check(trace)
    told = trace.header.provenance
    assert (told["source"], told["licence"], told["file"]) == (
        "github:x/y",
        "MIT",
        "in.parquet",
    )
    assert (told["sequences"], told["degenerate"]) == (["b", "a"], [0])
    # Another count than that of `trace check`, under other words.
    assert "the file marks 1 of 2 sequences as degenerate repetition" in str(
        told["notes"]
    )


def test_without_scores_there_are_no_weights(tmp_path):
    source = foreign(tmp_path / "in.parquet", replay_order(), scores=[None] * 12)
    summary = import_trace(source, tmp_path / "out.parquet", shape=model_shape(SHAPE))
    assert summary.columns == ()
    assert "no combine weights in the source" in summary.notes


def test_an_overridden_top_k_is_the_traces_own(tmp_path):
    source = foreign(tmp_path / "in.parquet", replay_order())
    summary = import_trace(
        source,
        tmp_path / "out.parquet",
        shape=model_shape(SHAPE.replace("top_k=2", "top_k=4")),
    )
    assert summary.shape.top_k == 2
    assert "top-k is 2 in the trace, 4 in the model" in summary.notes[-1]


@pytest.mark.parametrize(("shape", "change", "message"), [
    (SHAPE.replace("layers=2", "layers=3"), {},
     "prompt tokens at each of 3 layers, got none at layer 2"),
    (SHAPE.replace("layers=2", "layers=1"), {},
     "expected 1 MoE layers as in custom, found 2 layers 0..1"),
    (SHAPE.replace("experts=8", "experts=5"), {}, r"experts: expected 0\.\.4, got 5; does .*; model custom"),
    (SHAPE, {"expert_ids": [[0, 1]] * 11 + [[0]]},
     "row 11: experts: expected 2 values as in all rows, found 1"),
    (SHAPE, {"layer": [0] * 12},
     "pos 0, layer 0: expected one row per token and layer, found two"),
    (SHAPE, {"scores": [[float("nan"), 1.0]] * 12},
     r"weights\[0\]: expected a finite 16-bit float, got nan"),
    (SHAPE, {"expert_ids": None}, "no importer knows this layout"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line_and_no_file(tmp_path, shape, change, message):
    source = foreign(tmp_path / "in.parquet", replay_order(), **change)
    with pytest.raises(TraceError, match=message) as caught:
        import_trace(source, tmp_path / "out.parquet", shape=model_shape(shape))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


@pytest.mark.parametrize("name", SHARED)
def test_real_traces(shared_traces, tmp_path, name):
    model, sequences, prompt, decode = SHARED[name]
    source = shared_traces / f"{name}.parquet"
    out = tmp_path / "out.parquet"
    import_trace(source, out, shape=model_shape(model, "q4_k_m"))
    trace = open_trace(out)
    told = info(trace)
    assert (told["sequences"], told["prefill_tokens"], told["decode_tokens"]) == (
        sequences,
        prompt,
        decode,
    )
    assert trace.rows == pq.read_metadata(source).num_rows
    # independent of the importer: the first decode token's experts, straight from the
    # source
    table = (
        pq.read_table(source, columns=["phase", "layer", "expert_ids"])
        .slice(0, 2000)
        .to_pylist()
    )
    first = [row["expert_ids"] for row in table if row["phase"] == "decode"][
        : trace.shape.layers
    ]
    step = next(step for step in compose(trace) if step.phase is Phase.DECODE)
    assert [layer.routing[0].tolist() for layer in step.layers] == first
