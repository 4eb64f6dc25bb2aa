"""Dumps as people have them: names that nobody agreed on, a file for each layer, ends
that are missing.
"""

import csv
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesim.base.errors import TraceError
from moesim.traces.format.reader import open_trace
from moesim.traces.importers import import_trace
from moesim.traces.importers.readers import tables
from moesim.traces.models import model_shape

LAYERS = 3
SHAPE = model_shape(f"layers={LAYERS},experts=8,top_k=2,expert_bytes=1MiB")
TOKENS = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]
ROWS = [(*token, layer) for token in TOKENS for layer in range(LAYERS)]
EXPERTS = [[(n * 3 + layer) % 8, (n * 3 + layer + 1) % 8] for n, (_, _, layer) in enumerate(ROWS)]  # fmt: skip


def routing(trace):
    """(sequence, position, layer) -> experts."""
    found = {}
    for rows in open_trace(trace).sequences():
        for pos, layer, experts in zip(rows.pos, rows.layer, rows.experts, strict=True):
            found[rows.seq, int(pos), int(layer)] = experts.tolist()
    return found


EXPECTED = {
    ("ab".index(seq), pos, layer): experts
    for (seq, pos, layer), experts in zip(ROWS, EXPERTS, strict=True)
}


def brought(source, tmp_path, **options):
    out = tmp_path / "out.parquet"
    summary = import_trace(source, out, shape=SHAPE, **options)
    return routing(out), summary


def columns(**names):
    """The rows as columns, our names exchanged for theirs."""
    ours = {
        "seq": [row[0] for row in ROWS],
        "pos": [row[1] for row in ROWS],
        "layer": [row[2] for row in ROWS],
        "experts": EXPERTS,
    }
    return {names.get(name, name): values for name, values in ours.items()}


def as_lines(table):
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    "name", ["problem_id", "req_id", "request_id", "seq_id", "rid"]
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_sequences_have_many_names(tmp_path, kind, name):
    source = tmp_path / f"dump.{kind}"
    table = columns(seq=name, pos="position", layer="layer_id", experts="topk_ids")
    if kind == "parquet":
        pq.write_table(pa.table(table), source)
    else:
        source.write_text(as_lines(table))
    assert brought(source, tmp_path)[0] == EXPECTED


def test_a_table_without_positions_is_asked_for_them(tmp_path):
    source = tmp_path / "dump.parquet"
    table = columns(pos="when")
    pq.write_table(pa.table(table), source)
    with pytest.raises(
        TraceError, match="expected one for pos, found seq, when, layer"
    ):
        brought(source, tmp_path)


def test_keys_of_nested_layers_can_be_mapped(tmp_path):
    source = tmp_path / "dump.jsonl"
    lines = []
    for n, (seq, pos) in enumerate(TOKENS):
        experts = EXPERTS[n * LAYERS : (n + 1) * LAYERS]
        layers = [{"where": at, "what": ids} for at, ids in enumerate(experts)]
        lines.append(json.dumps({"who": seq, "when": pos, "layers": layers}) + "\n")
    source.write_text("".join(lines))
    words = "seq=who,pos=when,layer=where,experts=what"
    assert brought(source, tmp_path, options={"map": words})[0] == EXPECTED


def test_lists_in_csv_may_be_written_as_python_does(tmp_path):
    source = tmp_path / "dump.csv"
    table = columns()
    with source.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    assert brought(source, tmp_path)[0] == EXPECTED


@pytest.mark.parametrize("unused", [False, True])
def test_a_dictionary_may_have_labels_that_no_row_uses(tmp_path, unused):
    """pandas writes all categories, also after rows were selected."""
    more = ["z"] if unused else []
    table = {
        "seq_id": pd.Categorical(columns()["seq"], [*more, "a", "b", *more[1:], "y"]),
        "token": columns()["pos"],
        "phase": pd.Categorical(["decode"] * len(ROWS), ["prefill", "decode"]),
        "layer": columns()["layer"],
        "expert_ids": EXPERTS,
    }
    source = tmp_path / "rows.parquet"
    pd.DataFrame(table).to_parquet(source)
    found, summary = brought(source, tmp_path)
    assert summary.importer == "routing_rows"
    assert found == EXPECTED


def layer_files(folder, *, cut=0):
    """A table for each layer: one row per token, neither layer nor position in it.

    Twelve layers, so that names sort otherwise than numbers.
    """
    ids = np.arange(12 * 5 * 2).reshape(12, 5, 2) % 8
    for layer in range(12):
        rows = ids[layer][: 5 - cut] if layer == 11 else ids[layer]
        table = pa.table({"topk_ids": rows.tolist()})
        pq.write_table(table, folder / f"layer{layer}.parquet")
    return ids, sorted(folder.glob("layer*.parquet"))


def test_several_files_are_a_layer_each_by_the_numbers_in_their_names(
    tmp_path, monkeypatch
):
    """Tokens are counted on, wherever a part of a file ends."""
    monkeypatch.setattr(tables, "BATCH_ROWS", 2)
    ids, files = layer_files(tmp_path)
    assert files[1].name == "layer1.parquet"
    assert files[2].name == "layer10.parquet"
    shape = model_shape("layers=12,experts=8,top_k=2,expert_bytes=1MiB")
    out = tmp_path / "out.parquet"
    import_trace(files, out, shape=shape)
    found = routing(out)
    assert len(found) == 60
    for (_, pos, layer), experts in found.items():
        assert experts == ids[layer, pos].tolist()


def test_a_file_with_fewer_tokens_than_the_others_is_named(tmp_path):
    _, files = layer_files(tmp_path, cut=1)
    shape = model_shape("layers=12,experts=8,top_k=2,expert_bytes=1MiB")
    with pytest.raises(TraceError, match=r"layer11\.parquet: rows: expected 5 as in"):
        import_trace(files, tmp_path / "out.parquet", shape=shape)


@pytest.mark.parametrize("kind", ["line", "letter"])
def test_a_dump_that_was_cut_off_can_be_saved(tmp_path, kind):
    """Cut behind a line, or within one: the last token lacks its last layer."""
    text = as_lines(columns())
    lines = text.splitlines(keepends=True)
    source = tmp_path / "dump.jsonl"
    source.write_text("".join(lines[:-1]) + ("" if kind == "line" else lines[-1][:9]))

    with pytest.raises(TraceError):
        brought(source, tmp_path)
    found, summary = brought(source, tmp_path, drop_incomplete=True)
    last = {(1, 2, layer) for layer in range(LAYERS)}
    assert found == {key: ids for key, ids in EXPECTED.items() if key not in last}
    assert "sequence 1: token 2 lacks layers and was left out" in summary.notes
    assert ("the last line was cut off and was left out" in summary.notes) is (kind == "letter")  # fmt: skip
    # The copy without the cut line is gone.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump.jsonl", "out.parquet"]  # fmt: skip


# The command.


PREAMBLE = """# route_trace v1
# model=toy arch=toy n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=1000 dense_bytes=50
# layer=1 expert_bytes=2000 dense_bytes=60
turn,phase,step,layer,slot,expert
"""


def test_a_route_trace_tells_its_own_sizes(command, tmp_path):
    rows = [
        f"0,1,{step},{layer},{slot},{(step + layer + slot) % 4}\n"
        for step in range(3)
        for layer in range(2)
        for slot in range(2)
    ]
    source = tmp_path / "route.csv"
    source.write_text(PREAMBLE + "".join(rows))
    out = tmp_path / "q.parquet"
    code, printed, _ = command("trace", "import", source, out)
    assert code == 0
    shape = open_trace(out).shape
    assert shape.expert_bytes == (1000, 2000)
    assert (shape.layers, shape.experts, shape.top_k) == (2, 4, 2)
    assert shape.other_bytes == 110
    # The file tells bytes and no format.
    assert "bf16" not in printed


def test_a_weight_format_that_nobody_stated_is_called_so(command, tmp_path):
    source = tmp_path / "dump.parquet"
    pq.write_table(pa.table(columns()), source)
    words = ["trace", "import", source, tmp_path / "q.parquet", "--shape"]
    shape = f"layers={LAYERS},experts=8,top_k=2,hidden=64,expert_intermediate=32"
    assert "taken as bf16, --quant says otherwise" in command(*words, shape)[1]
    assert "(q8_0)" in command(*words, shape, "--quant", "Q8_0")[1]
